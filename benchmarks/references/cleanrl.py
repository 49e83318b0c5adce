"""Their side: CleanRL's scripts, each run from its first line to its last on a recording.

What is replaced: the environments' constructors, TensorBoard, tyro's command line, `print`, the
wrapper that normalizes observations, whose statistics move at other times than ours
(docs/fidelity.md), and the one seed-driven order, `np.random.shuffle`.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from references.cases import Case
from references.playback import Player, playbacks
from references.quantities import Arrays, Quantities
from references.substitute import (
    divergence_turned,
    draws_given,
    invented,
    losses_noted,
    optimizers_noted,
    stand_in,
    torch_and_numpy,
)


class SameStep(gymnasium.vector.SyncVectorEnv):
    """Vector environment as in the Gymnasium that CleanRL pins.

    An ended environment is reset in the same step; infos, which have another form, are left out.
    """

    def __init__(self, makers: list[Any], player: Player) -> None:
        super().__init__(makers, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP)
        self.player = player

    def step(self, actions: np.ndarray) -> Any:
        self.player.step()
        *result, _ = super().step(actions)
        return *result, {}


def gym_env(player: Player) -> Any:
    """Make a `procgen.ProcgenEnv`, with the interface of gym 0.23."""
    import gym  # pyright: ignore[reportMissingImports]  # where CleanRL is

    recording = player.recording

    class ProcgenEnv(gym.Env):  # type: ignore[misc]
        observation_space = gym.spaces.Dict(
            {"rgb": gym.spaces.Box(0, 255, recording.spaces[0].shape, np.uint8)}
        )
        number = recording.spaces[1].n  # type: ignore[attr-defined]  # it is discrete
        action_space = gym.spaces.Discrete(int(number))
        metadata: dict[str, Any] = {"render.modes": []}  # noqa: RUF012  # gym's own is one
        num_envs = player.num_envs

        def reset(self) -> dict[str, np.ndarray]:
            return {"rgb": player.seen()}

        def step(
            self, action: np.ndarray
        ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, list[dict[str, Any]]]:
            n = player.step()
            return (
                {"rgb": player.seen()},
                recording.reward[n].astype(np.float64),
                recording.ended[n],
                [{} for _ in range(player.num_envs)],
            )

    return ProcgenEnv()


class Side:
    """Their scripts, run in a precision.

    Args:
        path: of their repository.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.path, self.precision = path / "cleanrl", precision

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run a script.

        Args:
            case: the comparison.
            start: initial weights, by our names.
            orders: orders of all passes over samples, in our numbers.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        script, player = self.path / case.program, Player(case.experience())
        left = [self._in_their_numbers(order, case, turned=turned) for order in orders]

        def shuffle(indices: np.ndarray) -> None:
            indices[:] = left.pop(0)

        with (
            warnings.catch_warnings(), draws_given(player.action), divergence_turned(turned),
            losses_noted() as losses,
            optimizers_noted() as adams,
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            notes = Notes(case, start, losses, adams)
            namespace: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
            notes.namespace = namespace
            replaced = self._replaced(case, player, shuffle, notes)

            def importer(name: str, *where: Any) -> Any:
                return replaced[name] if name in replaced else builtins.__import__(name, *where)

            namespace["__builtins__"] = {
                **vars(builtins),
                "__import__": importer,
                "print": notes.hear,
            }
            exec(compile(script.read_text(), str(script), "exec"), namespace)
        # An update that fills no phase is dropped there.
        assert len(left) == case.iterations - notes.iteration, f"{len(left)} orders were left"
        return notes.found

    def _replaced(self, case: Case, player: Player, shuffle: Any, notes: Notes) -> dict[str, Any]:
        """Return the modules that replace the script's imports."""
        random = SimpleNamespace(shuffle=shuffle, seed=lambda seed: None)
        arguments = {
            "total_timesteps": case.budget,
            "num_envs": case.num_envs,
            "num_steps": case.num_steps,
            "cuda": False,
            **case.settings,
        }
        summary = invented(
            "torch.utils.tensorboard",
            SummaryWriter=lambda folder: SimpleNamespace(
                add_text=_nothing, add_scalar=notes.scalar, close=_nothing
            ),
        )
        return torch_and_numpy(self.precision, of_numpy={"random": random}) | {
            "tyro": invented("tyro", cli=lambda kind: kind(**arguments)),
            "torch.utils.tensorboard": summary,
            "cleanrl_utils.atari_wrappers": invented("", __getattr__=lambda name: _unwrapped),
            "gymnasium": _gymnasium(player, notes),
            "procgen": invented(
                "procgen", ProcgenEnv=lambda **_: notes.begins_with(gym_env(player))
            ),
        }

    @staticmethod
    def _in_their_numbers(order: np.ndarray, case: Case, *, turned: bool) -> np.ndarray:
        """Convert indices of transitions to their numbering, step by step.

        Segments of a phase have the same numbers on both sides.
        """
        if len(order) == case.num_envs * case.num_steps:
            env, step = np.divmod(order, case.num_steps)
            order, size = step * case.num_envs + env, len(order) // case.minibatches
        else:  # of a rollout, or of a phase
            size = len(order) // case.minibatches if len(order) == case.num_envs else 4
        return order.reshape(-1, size)[:, ::-1].reshape(-1) if turned else order


class Notes:
    """Records of a script while it runs."""

    def __init__(self, case: Case, start: Arrays, losses: list[float], adams: list[Any]) -> None:
        self.case, self.start, self.losses, self.adams = case, start, losses, adams
        self.found = Quantities()
        self.namespace: dict[str, Any] = {}
        self.weights: Mapping[str, torch.Tensor] = {}
        self.iteration = 0

    def begins_with(self, envs: Any) -> Any:
        """Let the agent begin with the given weights, at the first reset: it is made by then."""
        reset = envs.reset

        def first(*args: Any, **options: Any) -> Any:
            self.weights = self.found.begin(self.namespace["agent"], self.start, self.case)
            envs.reset = reset
            return reset(*args, **options)

        envs.reset = first
        return envs

    def scalar(self, name: str, value: float, step: int) -> None:
        """Record an update, or an auxiliary phase, at the last metric that is logged of it."""
        if name == "charts/SPS":
            self.iteration += 1
            script = self.namespace
            names = {
                "values": "values",
                "log-probabilities": "logprobs",
                "rewards, normalized": "rewards",
                "value targets": "returns",
            }
            for quantity, theirs in names.items():
                self.found.put(self.iteration, quantity, script[theirs].T)
            self.found.put(self.iteration, "values after the rollout", script["next_value"][0])
            self.found.put(
                self.iteration,
                "advantages",
                script["b_advantages"].reshape(script["values"].shape).T,
            )
            self._state("policy phase")
        elif name == "losses/aux/real_value_loss":
            self._state("auxiliary phase")

    def hear(self, *words: Any, **_: Any) -> None:
        """Drop the policy gradient at the start of an auxiliary phase, unless it is to be shown.

        The last one is still there, and goes into the first step.
        """
        if words == ("aux epoch 1",) and not self.case.as_it_is:
            self.namespace["optimizer"].zero_grad()

    def _state(self, phase: str) -> None:
        self.found.put_state(
            self.iteration, self.weights, self.start, {"policy": self.adams}, phase
        )
        self.found.put(self.iteration, f"losses of the {phase}'s steps", self.losses)
        self.losses.clear()


def _gymnasium(player: Player, notes: Notes) -> Any:
    """Return Gymnasium with the recording for an environment."""
    make = playbacks(player.recording)
    wrappers = stand_in(
        gymnasium.wrappers,
        **dict.fromkeys(("ResizeObservation", "GrayScaleObservation", "FrameStack"), _unwrapped),
        NormalizeObservation=lambda env: env,
        TransformObservation=lambda env, function: gymnasium.wrappers.TransformObservation(
            env, function, env.observation_space
        ),
    )
    vector = stand_in(
        gymnasium.vector, SyncVectorEnv=lambda makers: notes.begins_with(SameStep(makers, player))
    )
    return stand_in(gymnasium, make=lambda name: make(), wrappers=wrappers, vector=vector)


def _nothing(*_: Any, **__: Any) -> None: ...


def _unwrapped(env: Any, *_: Any, **__: Any) -> Any:
    """Return the environment in place of wrapping it for Atari."""
    return env
