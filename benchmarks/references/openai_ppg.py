"""Their side: openai/phasic-policy-gradient, its `train.train_fn` on a recording.

What does not install is replaced: `mpi4py` (a single process), `gym3` (its types and its wrapper's
forwarding), `procgen`.
"""

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from references.cases import Case
from references.playback import Player
from references.quantities import Arrays, Quantities
from references.substitute import (
    divergence_turned,
    draws_given,
    fresh_import,
    invented,
    losses_noted,
    optimizers_noted,
    torch_and_numpy,
)

PACKAGE = "phasic_policy_gradient"


@dataclass(frozen=True)
class Discrete:
    """`gym3.types.Discrete`."""

    n: int


@dataclass(frozen=True)
class Real:
    """`gym3.types.Real`."""


@dataclass(frozen=True)
class TensorType:
    """`gym3.types.TensorType`."""

    eltype: Any
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape))


class Wrapper:
    """`gym3.Wrapper`, which forwards the attributes that it lacks."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class Alone:
    """An MPI communicator of one process."""

    rank, size = 0, 1

    def Get_rank(self) -> int:  # MPI's name
        return 0

    def Get_size(self) -> int:  # MPI's name
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def Allreduce(self, given: np.ndarray, result: np.ndarray, **_: Any) -> None:  # MPI's name
        np.copyto(result, given)


def mpi() -> dict[str, Any]:
    """Return a `mpi4py` of a single process."""
    inner = invented("mpi4py.MPI", COMM_WORLD=Alone(), Comm=Alone, SUM="sum", MIN="min", MAX="max")
    return {"mpi4py": invented("mpi4py", MPI=inner), "mpi4py.MPI": inner}


class Environments:
    """A recording with gym3's interface.

    What is observed is the reward of the step before, the observation, and whether it is a first
    one.
    """

    def __init__(self, player: Player, precision: str) -> None:
        observation, action = player.recording.spaces
        self.player, self.num, self.precision = player, player.num_envs, precision
        self.ob_space = TensorType(Real(), tuple(observation.shape or ()))
        number = action.n  # type: ignore[attr-defined]  # it is discrete
        self.ac_space = TensorType(Discrete(int(number)), ())
        self.reward, self.first = np.zeros(self.num, precision), np.ones(self.num, bool)

    def observe(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.reward, self.player.seen(), self.first

    def act(self, action: np.ndarray) -> None:
        n = self.player.step()
        self.reward = self.player.recording.reward[n].astype(self.precision)
        self.first = self.player.recording.ended[n]

    def get_info(self) -> list[dict[str, Any]]:
        return [{} for _ in range(self.num)]


class Side:
    """Their package, imported in a precision.

    Args:
        path: of their repository.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.precision = precision
        self.orders: list[np.ndarray] = []
        types = invented("gym3.types", Discrete=Discrete, Real=Real, TensorType=TensorType)
        substitutes = mpi() | {
            "gym3": invented("gym3", Wrapper=Wrapper, types=types),
            "gym3.types": types,
            "procgen": invented("procgen", ProcgenGym3Env=None),
            "torch": torch_and_numpy(
                precision, of_torch={"randperm": self._order, "has_cuda": False}
            )["torch"],
        }
        with patch.object(sys, "path", [str(path), *sys.path]):
            names = ("train", "ppg", "ppo", "torch_util", "log_save_helper")
            self.train, self.ppg, self.ppo, self.torch_util, self.log_save_helper = (
                fresh_import(f"{PACKAGE}.{name}", substitutes) for name in names
            )

    def _order(self, number: int) -> torch.Tensor:
        """Stand in for `torch.randperm`."""
        return torch.from_numpy(self.orders.pop(0))

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run `ppg.learn`.

        Args:
            case: the comparison.
            start: initial weights, by our names.
            orders: orders of all passes over samples, in our numbers.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        self.orders = [self._in_their_numbers(order, case, turned=turned) for order in orders]
        environments = Environments(Player(case.experience()), self.precision)
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            for context in (
                draws_given(environments.player.action),
                divergence_turned(turned),
                patch.dict(os.environ, RCALL_LOGDIR=folder),
                contextlib.redirect_stdout(io.StringIO()),
                patch.object(self.train, "get_venv", lambda **_: environments),
                patch.object(self.torch_util, "setup_dist"),  # looks for other processes
                patch.object(self.torch_util, "format_model", return_value=""),
                patch.object(self.log_save_helper.LogSaveHelper, "save"),
            ):
                stack.enter_context(context)
            notes = Notes(
                self,
                case,
                start,
                stack.enter_context(losses_noted()),
                stack.enter_context(optimizers_noted()),
            )
            for owner, name, watched in notes.watched():
                stack.enter_context(patch.object(owner, name, watched))
            self.train.train_fn(
                num_envs=case.num_envs,
                nminibatch=case.minibatches,
                interacts_total=case.budget,
                log_dir=folder,
                **case.settings,
            )
        assert not self.orders, f"{len(self.orders)} orders were left"
        return notes.found

    @staticmethod
    def _in_their_numbers(order: np.ndarray, case: Case, *, turned: bool) -> np.ndarray:
        """Convert indices of a phase's segments to their numbering, by environment."""
        size = case.num_envs // case.minibatches
        if len(order) > case.num_envs:
            rollout, env = np.divmod(order, case.num_envs)
            order, size = env * (len(order) // case.num_envs) + rollout, 4
        return order.reshape(-1, size)[:, ::-1].reshape(-1).copy() if turned else order


class Notes:
    """Records of their functions while these call each other unchanged."""

    def __init__(
        self, side: Side, case: Case, start: Arrays, losses: list[float], adams: list[Any]
    ) -> None:
        self.side, self.case, self.start, self.losses, self.adams = side, case, start, losses, adams
        self.found = Quantities()
        self.weights: Mapping[str, torch.Tensor] = {}
        self.iteration = 0

    def watched(self) -> list[tuple[Any, str, Any]]:
        """Return owner and name of each watched function, and its replacement."""
        side, helper = self.side, self.side.log_save_helper.LogSaveHelper
        learn, learn_policy, advantages = side.ppg.learn, side.ppo.learn, side.ppo.compute_advantage
        log, train = helper.__call__, side.ppg.aux_train

        def begin(*, model: Any, **options: Any) -> None:
            self.weights = self.found.begin(model, self.start, self.case)
            learn(model=model, **options)

        def learn_policy_in_short_rollouts(**options: Any) -> Any:
            return learn_policy(**options, nstep=self.case.num_steps)

        def compute_advantage(
            model: Any, segment: dict[str, Any], *args: Any, **options: Any
        ) -> None:
            advantages(model, segment, *args, **options)
            self._segment(segment)

        def log_iteration(of_run: Any) -> bool:
            self._state("policy phase")
            return log(of_run)

        def aux_train(*, model: Any, **options: Any) -> None:
            # They have a method for this, set_aux_phase, which nothing calls.
            detached = model.detach_value_head
            model.detach_value_head = detached and not self.case.value_gradient_in_aux
            train(model=model, **options)
            model.detach_value_head = detached
            self._state("auxiliary phase")

        return [
            (side.ppg, "learn", begin),
            (side.ppo, "learn", learn_policy_in_short_rollouts),
            (side.ppo, "compute_advantage", compute_advantage),
            (helper, "__call__", log_iteration),
            (side.ppg, "aux_train", aux_train),
        ]

    def _segment(self, segment: dict[str, Any]) -> None:
        self.iteration += 1
        names = {
            "values": "vpred",
            "log-probabilities": "logp",
            "rewards, normalized": "reward",
            "advantages": "adv",
            "value targets": "vtarg",
        }
        for quantity, name in names.items():
            self.found.put(self.iteration, quantity, segment[name])

    def _state(self, phase: str) -> None:
        # The auxiliary phase's is made first.
        tasks = {"policy": self.adams[1:], "aux": self.adams[:1]}
        self.found.put_state(self.iteration, self.weights, self.start, tasks, phase)
        key = f"{self.iteration}|losses of the {phase}'s steps|"
        self.found.arrays[key] = np.append(self.found.arrays.get(key, []), self.losses)
        self.losses.clear()
