"""Their side: Spinning Up's `ppo` on a recording.

What does not install is replaced: `mpi4py` (a single process), its logger, which asks for
TensorFlow, and gym's spaces, which are Gymnasium's. Ours adds 1e-8 to the deviation that advantages
are divided by; so does theirs here, unless it is to be shown as it is.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium
import numpy as np
import torch
from references.cases import Case
from references.openai_ppg import mpi
from references.playback import Player
from references.quantities import Arrays, Quantities
from references.substitute import (
    draws_given,
    fresh_import,
    invented,
    optimizers_noted,
    packages_in,
    torch_and_numpy,
)

PACKAGES = (
    "spinup",
    "spinup.algos",
    "spinup.algos.pytorch",
    "spinup.algos.pytorch.ppo",
    "spinup.utils",
)


class Logger:
    """`EpochLogger`, which does nothing here."""

    def __init__(self, **_: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: None


class Environment:
    """A recording with gym's old interface, which is reset by whoever steps it."""

    def __init__(self, player: Player) -> None:
        self.player = player
        self.observation_space, self.action_space = player.recording.spaces

    def reset(self) -> np.ndarray:
        return self.player.seen()[0]

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, dict[str, Any]]:
        n = self.player.step()
        recording = self.player.recording
        obs = recording.final_obs[n, 0] if recording.ended[n, 0] else self.player.seen()[0]
        return obs, float(recording.reward[n, 0]), bool(recording.terminated[n, 0]), {}


class Side:
    """Their module, imported in a precision.

    Args:
        path: of their repository.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        logx = invented("spinup.utils.logx", EpochLogger=Logger)
        substitutes = mpi() | torch_and_numpy(precision) | packages_in(path, PACKAGES)
        substitutes |= {"gym": gymnasium, "gym.spaces": gymnasium.spaces, "spinup.utils.logx": logx}
        import scipy.signal  # noqa: F401  # before NumPy is substituted

        self.ppo = fresh_import("spinup.algos.pytorch.ppo.ppo", substitutes)
        self.core = fresh_import("spinup.algos.pytorch.ppo.core", substitutes)

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run `ppo`.

        Args:
            case: the comparison.
            start: initial weights, by our names.
            orders: unused: there are no minibatches.
            turned: whether the samples are added up in the opposite order.
        """
        player, found = Player(case.experience()), Quantities()
        weights: dict[str, torch.nn.Parameter] = {}
        core, iterations = self.core, []

        class Given(core.MLPActorCritic):  # type: ignore[misc,name-defined]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                weights.update(found.begin(self, start, case))

        get = self.ppo.PPOBuffer.get

        def watched(buffer: Any) -> dict[str, torch.Tensor]:
            iterations.append(len(iterations) + 1)
            data = get(buffer)
            names = {"log-probabilities": "logp", "advantages": "adv", "value targets": "ret"}
            for quantity, name in names.items():
                found.put(iterations[-1], quantity, data[name][None])
            found.put(iterations[-1], "values", buffer.val_buf[None])
            return {name: value.flip(0) if turned else value for name, value in data.items()}

        moments = self.ppo.mpi_statistics_scalar

        def with_epsilon(values: np.ndarray) -> tuple[float, float]:
            mean, std = moments(values)
            return mean, std if case.as_it_is else std + 1e-8

        def after(logger: Any) -> None:
            found.put_state(iterations[-1], weights, start, {"policy": adams}, "policy phase")

        with (
            draws_given(player.action),
            patch.object(self.ppo, "mpi_statistics_scalar", with_epsilon),
            optimizers_noted() as adams,
            patch.object(self.ppo.PPOBuffer, "get", watched),
            patch.object(Logger, "dump_tabular", after, create=True),  # the end of an iteration
            patch("builtins.print"),
        ):
            self.ppo.ppo(
                lambda: Environment(player), actor_critic=Given, steps_per_epoch=case.num_steps,
                epochs=case.iterations, max_ep_len=case.recording["limit"], **case.settings,
            )  # fmt: skip
        return found
