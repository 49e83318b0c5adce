"""Processes that train one run together: starting them, and the same order of data in one."""

import itertools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Generator, Tensor
from torch import distributed as dist

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.distributed import connect_ranks
from phasicrl.rollout import PolicySamples, Samples
from phasicrl.training.run import Run
from tests import golden
from tests.envs.counting import PlainCounting
from tests.envs.simulators import TensorEnvs
from tests.helpers import NoisyEncoder, corridor, tiny

_SERVER = multiprocessing.get_context("forkserver")
_STORES: list[dist.TCPStore] = []
"""Stores where the ranks of each start meet, on ports that the system chose and that stay taken."""


def _rank(variables: dict[str, str], errors: Path, task: Callable[..., None], args: Any) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.stderr = errors.open("a", buffering=1)
    task(*args)


def start_ranks(folder: Path, size: int, task: Callable[..., Any], *args: Any) -> list[BaseProcess]:
    """Start `task` in so many processes, as `torchrun` would.

    What each says to stderr is in `errors-RANK.txt`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _STORES.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    common = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_STORES[-1].port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }  # fmt: skip
    processes = []
    for rank in map(str, range(size)):
        variables = common | {"RANK": rank, "LOCAL_RANK": rank}
        said = folder / f"errors-{rank}.txt"
        processes.append(_SERVER.Process(target=_rank, args=(variables, said, task, args)))
        processes[-1].start()
    return processes


def ended(processes: list[BaseProcess], *, seconds: float = 300.0) -> list[int | None]:
    """Wait for processes, kill those that do not end, and return the exit codes."""
    for process in processes:
        process.join(seconds)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def run_ranks(folder: Path, size: int, task: Callable[..., None], *args: Any) -> None:
    """Run `task` in so many processes to its end, which has to be a good one in all."""
    codes = ended(start_ranks(folder, size, task, *args))
    said = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("errors-*.txt")))
    assert not any(codes), f"exit codes {codes}: {said}"


def _order(samples: Samples, number: int, rank: int, size: int) -> Tensor:
    """Return a random order of `size` things for the call of this number in one process."""
    return torch.randperm(size, generator=Generator().manual_seed(1000 * number + rank))


@contextmanager
def same_minibatches(config: Config, processes: int, rank: int | None) -> Iterator[None]:
    """Draw the same minibatches in one process as in several.

    Each of several draws an order of its own data. The one puts their parts of each minibatch one
    after the other.

    Args:
        config: of the run.
        processes: how many.
        rank: of this process; None is the one that does all.
    """
    calls = itertools.count()

    def random_order(samples: Samples, *, unit: str, generator: Generator) -> Tensor:
        number, length = next(calls), samples.first.shape[1]
        steps = 1 if unit == "segments" else length
        if rank is not None:
            return _order(samples, number, rank, len(samples) * steps)
        aux = config.aux
        rollouts, minibatches = 1, config.ppo.num_minibatches
        if not isinstance(samples, PolicySamples):
            rollouts, minibatches = aux.every, aux.num_minibatches * aux.every
        places = torch.arange(len(samples) * steps).view(rollouts, processes, -1)
        parts = []
        for other in range(processes):
            own = places[:, other].flatten()
            parts.append(own[_order(samples, number, other, len(own))].view(minibatches, -1))
        return torch.cat(parts, dim=1).flatten()

    with mock.patch.object(Samples, "random_order", random_order):
        yield


COMPILED = {
    "ppo-compiled": ("ppo-shared-transitions-clipped", {"compute.compile": "on"}),
    "ppg-compiled": ("ppg-separate", {"compute.compile": "on"}),
}
"""Further runs: a golden one, and what several processes change in it, but one does not."""


REMEMBERING = {f"{name}-lstm": name for name in ("ppo-masks", "ppg-masks")}
"""Further runs: golden ones, with a memory."""


LOST = {"ppo-averaged-lost": "ppo-averaged", "ppg-lost": "ppg-separate"}
"""Further runs: golden ones, in a simulator that loses final observations."""


def make_lost(num_envs: int) -> TensorEnvs:
    return TensorEnvs(PlainCounting, num_envs, "lost")


def case(folder: Path, name: str) -> golden.Case:
    """Return the configuration and the environment of one of the runs."""
    config, make_env = golden.runs(folder)[(REMEMBERING | LOST).get(name, name)]
    if name in REMEMBERING:
        config = config.with_updates({"model.memory": "lstm", "model.memory_size": 6})
    if name in LOST:  # so that ranks have unequal numbers of known steps
        config = config.with_updates({"ppo.num_steps": 6})
    return config, make_env


def measure(folder: Path, name: str, processes: int, rank: int | None) -> dict[str, Any]:
    """Train three iterations of one of the runs, with eight environments in all.

    Returns:
        Metrics of each iteration, and the final weights.
    """
    base, changes = COMPILED.get(name, (name, {}))
    changes = {} if rank is None else changes
    config, make_env = case(folder, base)
    # Adam divides by the gradient's size: one of nothing but rounding would be a whole step.
    config = config.with_updates({"env.num_envs": 8, "ppo.adam_eps": 1e-3} | changes)
    config = config.with_updates({"total_env_steps": 3 * config.batch_size})
    rows: list[dict[str, float]] = []

    def keep(run: Run, record: dict[str, float]) -> None:
        rows.append({key: x for key, x in record.items() if not key.startswith("time/")})

    with same_minibatches(config, processes, rank):
        lost = name in LOST
        run = train(
            config, callbacks=keep, make_env=None if lost else make_env,
            make_vector_env=make_lost if lost else None,
        )  # fmt: skip
    if lost and rank is None:  # the halves of the ranks have unequal numbers of known steps
        weight = run.buffer.rollouts.weight
        assert weight is not None
        first, second = (weight > 0).sum((0, 2)).view(2, -1).sum(1).tolist()
        assert first != second
    weights = {key: x.flatten().tolist() for key, x in run.agent.state_dict().items()}
    generators = [x.get_state().tolist() for x in (run.collector.generator, run.learner.generator)]
    return {"rows": rows, "weights": weights, "generators": generators}


def write_cores(folder: Path, is_bound: bool) -> None:
    """Write the cores of one of two processes on 16 cores, bound to its own half or to all."""
    rank = int(os.environ["RANK"])
    given = {*range(8 * rank, 8 * rank + 8)} if is_bound else {*range(16)}
    with (
        mock.patch("os.sched_getaffinity", lambda _: given),
        mock.patch("os.sched_setaffinity") as chosen,
        connect_ranks(device="cpu", timeout=600),
    ):
        (folder / f"{rank}").write_text(str(chosen.call_args.args[1]))


def train_noisy(folder: Path) -> None:
    """Train a network whose batch normalization has other statistics in each process."""
    train(tiny(folder / "runs"), make_env=corridor, make_encoder=NoisyEncoder)


def measure_all(folder: Path, chosen: list[str], processes: int) -> None:
    """Train each of the runs as one of several processes; each writes down what it has."""
    rank = int(os.environ["RANK"])
    found = {name: measure(folder, name, processes, rank) for name in chosen}
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
