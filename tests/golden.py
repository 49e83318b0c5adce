"""Tiny runs whose numbers are committed.

`python -m tests.golden` writes them anew: only in a commit that says why, with a *Numerics* line.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.algorithm import train
from phasicrl.config import Config, ModelConfig, ObsNormConfig, RewardNormConfig, ValueNormConfig
from phasicrl.spaces import choices
from tests.helpers import OBS_NORM, VALUE_NORM, corridor, tiny, tiny_aux

FILE = Path(__file__).with_name("golden.json")


class Image(gym.Env[np.ndarray, np.int64]):
    """A bright dot on a dark field of 16×16 color bytes.

    Reward for moving towards it from the middle, five steps an episode.
    """

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._side)
        self._steps += 1
        return self._draw(), reward, self._steps == 5, False, {}

    def _draw(self) -> np.ndarray:
        self._side = int(self.np_random.integers(3))
        image = np.zeros((16, 16, 3), dtype=np.uint8)
        image[7:9, 1 + 5 * self._side : 4 + 5 * self._side] = 255
        return image


class Echo(gym.Env[Any, Any]):
    """Give back what was shown.

    Actions of any kind, seen as numbers or (`tree`) as parts, with masks or without.

    It is shown in the first of five steps only. Every second episode ends by a time limit, the
    others by the rules.
    """

    def __init__(
        self, actions: gym.Space[Any], *, tree: bool = False, masked: bool = False
    ) -> None:
        self.action_space, self.tree, self.masked = actions, tree, masked
        shown = gym.spaces.Box(-2, 2, (gym.spaces.flatdim(actions),), np.float32)
        self.observation_space = (
            gym.spaces.Dict({"shown": shown, "step": gym.spaces.Discrete(6)}) if tree else shown
        )
        self._episode = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._target = self.np_random.uniform(-1, 2, gym.spaces.flatdim(self.action_space)).astype(
            np.float32
        )
        self._at, self._episode = 0, self._episode + 1
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        given: Any = gym.spaces.flatten(self.action_space, action)
        reward = -3 * float(np.abs(given - self._target).mean())
        self._at += 1
        ends = self._at == 5
        return (
            self._seen(),
            reward,
            ends and self._episode % 2 == 1,
            ends and self._episode % 2 == 0,
            self._info(),
        )

    def get_state(self) -> Any:
        return self._target.tolist(), self._at, self._episode, self.np_random.bit_generator.state

    def set_state(self, state: Any) -> tuple[Any, dict[str, Any]]:
        target, self._at, self._episode, self.np_random.bit_generator.state = state
        self._target = np.array(target, np.float32)
        return self._seen(), self._info()

    def _seen(self) -> Any:
        shown = self._target if self._at == 0 else np.full_like(self._target, self._at / 5)
        return {"shown": shown, "step": self._at} if self.tree else shown

    def _info(self) -> dict[str, Any]:
        """One option of each discrete component is forbidden, another one in each step."""
        forbidden = [
            np.arange(n) == (self._at + self._episode) % n for n in choices(self.action_space)
        ]
        return {"action_mask": ~np.concatenate(forbidden)} if self.masked else {}


Case = tuple[Config, Callable[[], gym.Env[Any, Any]]]

NUMBERS = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))
KEYS = gym.spaces.MultiDiscrete([3, 2])
BOTH = gym.spaces.Dict({"keys": KEYS, "numbers": NUMBERS})


def runs(folder: Path) -> dict[str, Case]:
    """The runs, by name."""
    return (
        basic_runs(folder)
        | memory_and_action_runs(folder)
        | normalizer_runs(folder)
        | estimator_runs(folder)
        | combined_runs(folder)
    )


def basic_runs(folder: Path) -> dict[str, Case]:
    """PPO and PPG on numbers and images, with each of the value paths."""
    ppo = tiny(folder, total_env_steps=160)
    shared = replace(
        ppo,
        model=replace(ppo.model, value_path="shared", init="orthogonal"),
        reward_norm=RewardNormConfig(per="none"),
    )
    clipped = replace(
        shared,
        ppo=replace(shared.ppo, minibatch_by="transitions", advantage_norm="minibatch",
                    value_clip=0.2, max_grad_norm=0.5, schedule="linear"),
    )  # fmt: skip
    apart = replace(
        ppo,
        ppo=replace(
            ppo.ppo,
            policy_epochs=2,
            value_epochs=3,
            bootstrap_truncation=False,
            clip=None,
            kl_penalty=1.0,
        ),
    )
    images = ModelConfig(value_path="detached", channels=(4, 8), blocks=1, hidden_sizes=(16,))
    return {
        "ppo-separate-segments": (ppo, corridor),
        "ppo-shared-transitions-clipped": (clipped, corridor),
        "ppo-value-epochs-first-kl": (apart, corridor),
        "ppo-policy-epochs-first": (
            apart.with_updates({"ppo.epoch_order": "policy_first"}),
            corridor,
        ),
        "ppg-separate": (replace(ppo, aux=tiny_aux()), corridor),
        "ppg-detached-images": (
            replace(ppo, model=images, aux=tiny_aux(optimizer="shared")),
            Image,
        ),
    }


def short(folder: Path, changes: dict[str, Any], *, ppg: bool = False) -> Config:
    """Three iterations, with `changes` at their paths.

    Of PPG an auxiliary phase follows the second one.
    """
    config = tiny(folder, aux=tiny_aux() if ppg else None, total_env_steps=96)
    memory = {"model.memory_size": 6} if "model.memory" in changes else {}
    return config.with_updates({"ppo.max_grad_norm": 0.5, **memory, **changes})


def memory_and_action_runs(folder: Path) -> dict[str, Case]:
    """Memory, masks, and actions of every kind, one at a time."""

    def numbers(**changes: Any) -> Case:
        return short(
            folder, {f"action.{name}": value for name, value in changes.items()}
        ), lambda: Echo(NUMBERS)

    return {
        "ppo-lstm": (short(folder, {"model.memory": "lstm"}), lambda: Echo(NUMBERS)),
        "ppg-lstm": (short(folder, {"model.memory": "lstm"}, ppg=True), corridor),
        "ppo-gru-shared": (
            short(folder, {"model.memory": "gru", "model.value_path": "shared"}),
            corridor,
        ),
        "ppg-gru-detached": (
            short(folder, {"model.memory": "gru", "model.value_path": "detached"}, ppg=True),
            corridor,
        ),
        "ppo-masks": (short(folder, {}), lambda: Echo(KEYS, masked=True)),
        "ppg-masks": (short(folder, {}, ppg=True), lambda: Echo(KEYS, masked=True)),
        "ppo-numbers-raw": numbers(),
        "ppo-numbers-mean-tanh-softplus": numbers(
            mean="tanh", std="softplus", std_value=0.5, min_std=0.01, rescale=True, squash="clip"
        ),
        "ppo-numbers-squash-tanh-exp": numbers(squash="tanh", std="exp", std_value=0.7),
        "ppo-numbers-range": numbers(std="range", std_value=0.2, squash="clip"),
        "ppg-numbers-squash-tanh": (
            short(folder, {"action.squash": "tanh"}, ppg=True),
            lambda: Echo(NUMBERS),
        ),
        "ppo-tree-multidiscrete": (short(folder, {}), lambda: Echo(KEYS, tree=True)),
    }


def normalizer_runs(folder: Path) -> dict[str, Case]:
    """Each normalizer alone; that of rewards by rollouts is in the basic runs."""
    alone = {"reward_norm.per": "none"}
    ema = {"statistics": "ema", "decay": 0.6}
    return {
        "ppo-obs-norm": (
            short(folder, {**alone, "obs_norm": ObsNormConfig(statistics="moments", clip=1.5)}),
            lambda: Echo(NUMBERS),
        ),
        "ppo-obs-norm-ema-tree": (
            short(folder, {**alone, "obs_norm": ObsNormConfig(**ema)}),
            lambda: Echo(KEYS, tree=True),
        ),
        "ppo-reward-norm-steps": (
            short(folder, {"reward_norm": RewardNormConfig(per="step", gamma=0.8, clip=1.0)}),
            lambda: Echo(KEYS),
        ),
        "ppo-value-norm": (
            short(folder, {**alone, "value_norm": VALUE_NORM}),
            lambda: Echo(KEYS),
        ),
        "ppo-value-norm-ema-shared": (
            short(
                folder,
                {
                    **alone,
                    "value_norm": ValueNormConfig(**ema),
                    "model.value_path": "shared",
                    "ppo.value_clip": 0.2,
                },
            ),
            lambda: Echo(KEYS),
        ),
        "ppg-value-norm": (
            short(folder, {**alone, "value_norm": VALUE_NORM}, ppg=True),
            lambda: Echo(KEYS),
        ),
    }


def estimator_runs(folder: Path) -> dict[str, Case]:
    """Other returns and objectives, and what is steered by the divergence."""
    reinforce = {
        "ppo.estimator": "monte_carlo",
        "ppo.baseline": False,
        "ppo.objective": "log_prob",
        "ppo.clip": None,
    }
    epochs = {"ppo.policy_epochs": 2, "ppo.value_epochs": 2, "ppo.learning_rate": 5e-3}
    follows = {
        **epochs,
        "ppo.schedule": "adaptive_kl",
        "ppo.schedule_kl": 1e-3,
        "ppo.target_kl": 0.05,
    }
    steered = {
        **epochs,
        "ppo.kl_penalty": 1.0,
        "ppo.kl_penalty_target": 0.01,
        "ppo.kl_estimate": "exact",
        "ppo.adam_eps_hat": True,
    }
    averaged = {**epochs, "ppo.proximal_decay": 0.8, "ppo.advantage_decay": 0.5,
                "ppo.adam_betas": (0.8, 0.99)}  # fmt: skip
    return {
        "ppo-n-step": (
            short(folder, {"ppo.estimator": "n_step", "ppo.n_step": 3}),
            lambda: Echo(KEYS),
        ),
        "ppo-monte-carlo": (short(folder, {"ppo.estimator": "monte_carlo"}), lambda: Echo(KEYS)),
        "reinforce": (short(folder, reinforce), lambda: Echo(NUMBERS)),
        "reinforce-episodes": (
            short(folder, {**reinforce, "ppo.collect_by": "episodes", "ppo.num_steps": 12}),
            lambda: Echo(NUMBERS),
        ),
        "ppo-episodes": (
            short(
                folder,
                {
                    **epochs,
                    "ppo.collect_by": "episodes",
                    "ppo.num_steps": 12,
                    "ppo.advantage_norm": "minibatch",
                    "ppo.minibatch_by": "transitions",
                },
            ),
            lambda: Echo(KEYS),
        ),
        "actor-critic": (
            short(folder, {"ppo.objective": "log_prob", "ppo.clip": None}),
            lambda: Echo(KEYS),
        ),
        "ppo-recomputed": (
            short(folder, {**epochs, "ppo.recompute_advantages": True, "ppo.reward_clip": 1.0}),
            lambda: Echo(KEYS),
        ),
        "ppo-adaptive-kl": (short(folder, follows), lambda: Echo(KEYS)),
        "ppo-adaptive-penalty": (short(folder, steered), lambda: Echo(NUMBERS)),
        "ppo-averaged": (
            short(folder, {**averaged, "ppo.recompute_advantages": True}),
            lambda: Echo(KEYS),
        ),
        "ppg-averaged": (
            short(
                folder,
                {
                    **averaged,
                    "ppo.kl_penalty": 1.0,
                    "ppo.kl_estimate": "exact",
                    "model.memory": "gru",
                },
                ppg=True,
            ),
            lambda: Echo(NUMBERS),
        ),
    }


def combined_runs(folder: Path) -> dict[str, Case]:
    """Much of it together."""
    norms = {
        "obs_norm": OBS_NORM,
        "value_norm": VALUE_NORM,
        "reward_norm": RewardNormConfig(per="step"),
    }
    memory = {"model.memory": "lstm", "action.squash": "tanh", "action.std": "softplus", **norms}
    every = {
        **memory,
        "model.memory": "gru",
        "model.value_path": "detached",
        "aux.optimizer": "shared",
        "ppo.recompute_advantages": True,
    }
    epochs = {"ppo.policy_epochs": 2, "ppo.value_epochs": 2}
    return {
        "ppo-together": (
            short(folder, {**memory, "ppo.value_learning_rate": 1e-3}),
            lambda: Echo(BOTH, tree=True, masked=True),
        ),
        "ppg-together": (
            short(folder, {**every, **epochs}, ppg=True),
            lambda: Echo(BOTH, tree=True, masked=True),
        ),
    }


def measure(config: Config, make_env: Callable[[], gym.Env[Any, Any]]) -> list[dict[str, float]]:
    """Every metric of every iteration that does not depend on the clock, and a sum over the final
    weights.
    """
    rows: list[dict[str, float]] = []

    def note(run: Any, record: dict[str, float]) -> None:
        rows.append(
            {
                name: value
                for name, value in record.items()
                if not name.startswith("time/") and name != "charts/SPS"
            }
        )

    run = train(config, make_env=make_env, on_iteration=note)
    rows.append(
        {name: float(tensor.double().sum()) for name, tensor in run.agent.state_dict().items()}
    )
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        FILE.write_text(
            json.dumps({name: measure(*run) for name, run in runs(Path(folder)).items()}, indent=1)
            + "\n"
        )
