"""The processes of a run: what they exchange and agree on. Kind: effects (network).

Each process, called a rank, has its share of the environments and learns the same as the others.
`torchrun` starts them, finds them and starts them again; `join` connects them. A run of one process
has the world `ALONE`, in which nothing is exchanged.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")
_NAMING_SECONDS = 5.0
"""How long processes wait for each other's last word, to find out which one is missing."""
_WORLDS = itertools.count()
"""Numbers of the worlds of this process, the same in all of them: they train one after another."""


class RankError(RuntimeError):
    """Another process of the run failed, or does not answer; the message says which one."""

    exit_code = 6


@dataclass(eq=False)
class World:
    """The processes of a run, each with the same methods called in the same order.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        local_size: how many of them are on this machine.
        store: where processes leave words for each other; None in a run of one process.
        group: carries what they exchange; None in a run of one process.
    """

    rank: int = 0
    size: int = 1
    local_size: int = 1
    store: Any = None
    group: Any = None
    _ending: BaseException | None = None
    _is_lost: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run has only one of."""
        return self.rank == 0

    def share(self, count: int, what: str) -> int:
        """Return this process's part of `count` things.

        Raises:
            ValueError: they cannot be divided equally; `what` they are is named.
        """
        part, rest = divmod(count, self.size)
        if rest:
            nearest = max(count // self.size, 1) * self.size
            raise ValueError(
                f"{what} is {count:,}, which {self.size} processes cannot share equally; "
                f"try {nearest:,}"
            )
        return part

    def own(self, count: int) -> slice:
        """Return the places of this process's part of `count` things in order of the ranks."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their means over all processes, in one message."""
        if self.group is None:
            return
        # The last number of the message asks to end.
        asks = tensors[0].new_full((1,), float(self._ending is not None))
        message = torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), asks])
        self._exchange(lambda: dist.all_reduce(message, group=self.group))
        message.div_(self.size)
        *parts, asks = message.split([*(tensor.numel() for tensor in tensors), 1])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        # Reading the number on a GPU would wait for it: there requests are seen after an auxiliary
        # epoch, and with the metrics of an iteration.
        if asks.device.type == "cpu" and float(asks) > 0:
            self._end_if_asked(self.gather(self._ending))

    def mean_of(self, record: dict[str, float]) -> dict[str, float]:
        """Return the means of numbers over all processes, which have the same names."""
        if self.group is None:
            return record
        means = torch.tensor(list(record.values()), dtype=torch.float64)
        self.mean_([means])
        return dict(zip(record, means.tolist(), strict=True))

    def cat(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all processes, `[B / size, …]` each, to `[B, …]`."""
        if self.group is None:
            return tensor
        parts = [torch.empty_like(tensor.contiguous()) for _ in range(self.size)]
        self._exchange(lambda: dist.all_gather(parts, tensor.contiguous(), group=self.group))
        return torch.cat(parts)

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in order; anything that can be pickled."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def of_first(self, value: T) -> T:
        """Return the value that the first process has."""
        values = [value]
        if self.group is not None:
            self._exchange(lambda: dist.broadcast_object_list(values, group=self.group))
        return values[0]

    def any(self, is_true: bool) -> bool:
        """Return whether it is true in any process; raise if one was asked to end."""
        answers = self.gather((is_true, self._ending))
        self._end_if_asked([ending for _, ending in answers])
        return any(answer for answer, _ in answers)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Let all processes know at the end of the block whether it failed in one of them.

        Args:
            what: was done, for the message.

        Raises:
            RankError: it failed elsewhere. In the process where it failed, what it raised; without
                a failure, what one of the processes was asked to end by.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._is_lost:
                raise
            failure = error
        words = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = self.gather((words, self._ending))
        if failure is not None:
            raise failure
        for rank, (words, _) in enumerate(answers):
            if words is not None:
                raise RankError(f"{what} failed on rank {rank} of {self.size}: {words}")
        self._end_if_asked([ending for _, ending in answers])

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first process."""
        for tensor in tensors if self.group is not None else ():
            whole = tensor.detach().contiguous()
            self._exchange(lambda: dist.broadcast(whole, 0, group=self.group))  # noqa: B023
            tensor.detach().copy_(whole)

    def require_same(self, what: str, describe: Callable[[], dict[str, Any]]) -> None:
        """Compare the processes with each other.

        Args:
            what: is compared, for the message.
            describe: names and values; called only where there is something to compare with.

        Raises:
            RankError: they differ; the message has the names and the values.
        """
        if self.group is None:
            return
        first, *others = self.gather(describe())
        for rank, values in enumerate(others, start=1):
            listed = ", ".join(
                f"{name} is {first.get(name)!r} on rank 0 and {values.get(name)!r} on rank {rank}"
                for name in {**first, **values}
                if first.get(name) != values.get(name)
            )
            if listed:
                raise RankError(f"the processes differ in {what}: {listed}")

    def ask_to_end(self, error: BaseException) -> bool:
        """Have all processes raise this error where they next exchange something.

        Returns:
            Whether they will; a single process may raise it at once.
        """
        if self.group is not None:
            self._ending = error
        return self.group is not None

    def forget_requests(self) -> None:
        """End by what has happened, not by a request that came meanwhile."""
        self._ending = None

    def tell_failure(self, error: BaseException) -> None:
        """Leave word of why this process fails, for those who miss it."""
        if self.store is not None:
            with suppress(RuntimeError):  # the store is gone with the process that held it
                self.store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    def all_are_here(self) -> bool:
        """Return whether all processes have come to this place, whatever happened before it."""
        return self.group is None or not (self._is_lost or self._find_missing("end"))

    def _end_if_asked(self, endings: list[BaseException | None]) -> None:
        """Raise what the first of the processes was asked to end by, if one was."""
        for rank, ending in enumerate(endings):
            if ending is not None:
                self._ending = None
                raise type(ending)(f"{ending} on rank {rank}")

    def _exchange(self, exchange: Callable[[], Any]) -> None:
        """Exchange something, or say who is missing."""
        try:
            exchange()
        except RuntimeError as error:
            self._is_lost = True
            words = f"rank {self.rank} of {self.size} has lost the connection to the others"
            if missing := self._find_missing("lost"):
                why = "; ".join(filter(None, missing.values())) or "it has died, or hangs"
                names = " and ".join(map(str, missing))
                words = f"no answer from rank {names} of {self.size}: {why}"
            raise RankError(f"{words} ({str(error).splitlines()[0]})") from error

    def _find_missing(self, place: str) -> dict[int, str]:
        """Leave word of coming to a place; return who does not come, with the reasons they left."""
        missing = {rank: "" for rank in range(self.size) if rank != self.rank}
        is_answered = threading.Event()

        def ask() -> None:
            limit = time.monotonic() + _NAMING_SECONDS
            with suppress(RuntimeError):
                self.store.set(f"{place}/{self.rank}", "")
                while missing and time.monotonic() < limit:
                    for rank in list(missing):
                        if self.store.check([f"{place}/{rank}"]):
                            del missing[rank]
                    time.sleep(0.05)
                for rank in missing:
                    if self.store.check([f"failed/{rank}"]):
                        missing[rank] = self.store.get(f"failed/{rank}").decode()
                is_answered.set()

        # In a thread of its own: a store whose machine does not answer blocks without end.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(2 * _NAMING_SECONDS)
        # The store is gone with the process that held it: the first one, or all of them.
        return missing if is_answered.is_set() or self.is_first else {0: ""}


ALONE = World()
"""The world of whatever is done by one process."""


@cache
def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of all worlds, this process's rank, and the number of processes."""
    return next(dist.rendezvous("env://", timeout=timeout))


@contextmanager
def join(*, device: str, timeout: float) -> Iterator[World]:
    """Connect the processes that `torchrun` or the like has started; leave at the block's end.

    Each process of a machine gets cores of its own, if there are enough.

    Args:
        device: `auto`, `cpu`, `cuda`: gloo carries tensors of CPUs, NCCL those of GPUs.
        timeout: seconds to wait for the others, here and in every exchange.

    Raises:
        ValueError: the variables that name the processes are missing.
        RankError: the others did not come.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"torch.distributed is initialized with {dist.get_world_size()} processes, but "
                "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE are "
                "not set; start the processes with torchrun"
            )
        yield ALONE
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(local_rank)
    limit, backend = timedelta(seconds=timeout), "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        shared, rank, size = _rendezvous(limit)
        store = dist.PrefixStore(f"phasicrl-{next(_WORLDS)}", shared)
        if dist.is_initialized():  # by the program that calls us, perhaps for GPUs alone
            group = dist.new_group(backend=backend, timeout=limit)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            group = dist.group.WORLD
    except RuntimeError as error:
        raise RankError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} waited {timeout:.0f} s for "
            f"the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} "
            f"({str(error).splitlines()[0]}); check that all machines were started, with the same "
            "--rdzv-endpoint, --nnodes and --nproc-per-node, and that they reach this address"
        ) from error
    cores = sorted(os.sched_getaffinity(0))
    if each := len(cores) // local_size:
        os.sched_setaffinity(0, cores[local_rank * each : (local_rank + 1) * each])
    world = World(rank, size, local_size, store, group)
    try:
        yield world
    finally:
        # What is lost cannot be left in order: that would wait for those who do not answer.
        if not world._is_lost:
            dist.destroy_process_group(world.group)
        os.sched_setaffinity(0, cores)
