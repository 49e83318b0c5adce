"""The processes of a run: what they exchange and agree on. Kind: effects (network).

Each of them, a rank, has its share of the environments, and everything that they experience. What
is learned is the same in all. `torchrun` starts them, finds them and starts them again; here they
meet (`join`). A run of one process has a `World` of one, to which all of this is nothing.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")
_NAMING_SECONDS = 5.0
"""How long processes wait for each other's last word, to find out which one is missing."""
_WORLDS = itertools.count()
"""Numbers of the worlds of this process, the same in all of them: they train one after another."""
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What `torchrun` tells each process by."""


class RankError(RuntimeError):
    """Another process of the run failed, or does not answer; the message says which one."""

    exit_code = 6


class World:
    """The world of a run of one process.

    Attributes:
        rank: number of this process, from 0.
        size: how many there are.
        local_rank: number of this process among those of its machine, from 0.
        local_size: how many of them are on this machine.
    """

    rank, size, local_rank, local_size = 0, 1, 0, 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes what the run has only one of."""
        return self.rank == 0

    def share(self, count: int, what: str) -> int:
        """This process's part of `count` things.

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
        """The places of this process's part of `count` things that stand in order of the ranks."""
        part = count // self.size
        return slice(self.rank * part, (self.rank + 1) * part)

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype by their means over all processes, in one message."""

    def mean_of(self, record: dict[str, float]) -> dict[str, float]:
        """The means of numbers over all processes, which have the same names."""
        return record

    def cat(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, `[B / size, …]` each, one after the other: `[B, …]`."""
        return tensor

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in order; anything that can be pickled."""
        return [value]

    def of_first(self, value: T) -> T:
        """The value that the first process has."""
        return value

    def any(self, is_true: bool) -> bool:
        """Whether it is true in any process."""
        return is_true

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """At the end of the block all processes know whether it failed in one of them.

        Args:
            what: was done, for the message.

        Raises:
            RankError: it failed elsewhere. In the process where it failed, what it raised.
        """
        yield

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first process."""

    def require_same(self, what: str, describe: Callable[[], dict[str, Any]]) -> None:
        """Compare the processes with each other.

        Args:
            what: is compared, for the message.
            describe: names and values; called only where there is something to compare with.

        Raises:
            RankError: they differ; the message has the names and the values.
        """

    def ask_to_end(self, error: BaseException) -> bool:
        """Have all processes raise this error where they next exchange something.

        Returns:
            Whether they will; a single process may raise it at once.
        """
        return False

    def forget_requests(self) -> None:
        """End by what has happened, not by a request that came meanwhile."""

    def tell_failure(self, error: BaseException) -> None:
        """Leave word of why this process fails, for those who miss it."""

    def all_are_here(self) -> bool:
        """Whether all processes have come to this place, after whatever happened before it."""
        return True

    def close(self) -> None:
        """Leave the others."""

    def __enter__(self) -> Self:
        """Use as a context: left at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self.close()


ALONE = World()
"""The world of whatever is done by one process."""


@dataclass(frozen=True)
class _Place:
    """What `torchrun` says of a process."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def read(cls) -> _Place | None:
        """From the environment's variables; None where nobody started several processes.

        Raises:
            ValueError: they are incomplete, or no numbers.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        launched = dist.is_torchelastic_launched() or "MASTER_ADDR" in os.environ
        if not launched or size == "1":
            return None
        missing = [name for name in _VARIABLES if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE is {size}, but {' and '.join(missing)} not set; "
                "start the processes with torchrun, or unset WORLD_SIZE to train with one"
            )
        rank = os.environ["RANK"]
        local = os.environ.get("LOCAL_RANK", "0"), os.environ.get("LOCAL_WORLD_SIZE", "1")
        try:
            return cls(int(rank), int(size), *map(int, local))
        except ValueError:
            raise ValueError(
                f"RANK is {rank!r} and WORLD_SIZE is {size!r}; they must be numbers, "
                "as torchrun sets them"
            ) from None


def join(*, device: str, timeout: float) -> World:
    """Meet the other processes of the run, if `torchrun` or the like has started several.

    Args:
        device: `auto`, `cpu`, `cuda`: gloo carries tensors of CPUs, NCCL those of GPUs.
        timeout: seconds to wait for the others, here and in every exchange.

    Raises:
        ValueError: the processes were started in a way that cannot work.
        RankError: the others did not come.
    """
    place = _Place.read()
    if place is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"a process group of {dist.get_world_size()} is there, but the variables that say "
                f"who is who are not; set {', '.join(_VARIABLES)}, LOCAL_RANK and LOCAL_WORLD_SIZE "
                "as torchrun does"
            )
        return ALONE
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    _require_backends(on_gpu)
    if on_gpu and place.local_size > torch.cuda.device_count():
        raise ValueError(
            f"{place.local_size} processes on this machine, but {torch.cuda.device_count()} GPUs; "
            "start one for each GPU (torchrun --nproc-per-node), or say --compute.device cpu"
        )
    if on_gpu:
        torch.cuda.set_device(place.local_rank)
    limit, backend = timedelta(seconds=timeout), "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if dist.is_initialized():  # by the program that calls us, perhaps for GPUs alone
        theirs = distributed_c10d._get_default_store()
        group = dist.new_group(backend=backend, timeout=limit)
        assert isinstance(group, dist.ProcessGroup)
        return Ranks(place, dist.PrefixStore(f"phasicrl-{next(_WORLDS)}", theirs), group)
    try:
        store = _meeting_place(limit)
        about = {"store": store, "rank": place.rank, "world_size": place.size}
        dist.init_process_group(backend, **about, timeout=limit)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(
            f"rank {place.rank} of {place.size} waited {timeout:.0f} s for the others at {address} "
            f"({str(error).splitlines()[0]}); check that all machines were started, with the same "
            "--rdzv-endpoint, --nnodes and --nproc-per-node, and that they reach this address"
        ) from error
    return Ranks(place, store, None)


_STORES: list[dist.Store] = []
"""Where the processes of this program meet: one place for all worlds, one after another."""


def _meeting_place(limit: timedelta) -> dist.Store:
    """A store that the processes of the next world share, and no other world uses."""
    if not _STORES:
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))
        _STORES.append(store)
    _STORES[0].set_timeout(limit)
    return dist.PrefixStore(f"phasicrl-{next(_WORLDS)}", _STORES[0])


def _require_backends(on_gpu: bool) -> None:
    """Refuse a PyTorch that cannot carry what is to be carried."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise ValueError("this build of PyTorch has no gloo, which several processes need")
    if on_gpu and not dist.is_nccl_available():
        raise ValueError(
            "this build of PyTorch has no NCCL, which several GPUs need; "
            "install one that has it, or say --compute.device cpu"
        )


def _share_cores(place: _Place) -> None:
    """Give each process of this machine cores of its own, if there are enough.

    Threads of PyTorch and of environments follow from the cores that a process may use.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // place.local_size
    if each:
        first = place.local_rank * each
        os.sched_setaffinity(0, cores[first : first + each])


class Ranks(World):
    """Several processes, each with the same methods called in the same order.

    Args:
        place: of this process.
        store: where processes leave words for each other.
        group: that carries what they exchange; None: the default one.
    """

    def __init__(self, place: _Place, store: dist.Store, group: dist.ProcessGroup | None) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._store = store
        self._group = group
        self._ending: BaseException | None = None
        self._is_lost = False
        self._failures: dict[int, str] = {}
        self._cores = os.sched_getaffinity(0)
        _share_cores(place)

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """See `World`. The last number of the message asks to end."""
        first = tensors[0]
        asks = first.new_full((1,), float(self._ending is not None))
        message = torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), asks])
        self._exchange(lambda: dist.all_reduce(message, group=self._group))
        message.div_(self.size)
        *parts, asks = message.split([*(tensor.numel() for tensor in tensors), 1])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.detach().copy_(part.view(tensor.shape))
        # A GPU is not waited for at each step: there it is asked after an auxiliary epoch, and with
        # the metrics of an iteration.
        if asks.device.type == "cpu" and float(asks) > 0:
            self._end_if_asked(self.gather(self._ending))

    def mean_of(self, record: dict[str, float]) -> dict[str, float]:
        """See `World`."""
        means = torch.tensor(list(record.values()), dtype=torch.float64)
        self.mean_([means])
        return dict(zip(record, means.tolist(), strict=True))

    def cat(self, tensor: Tensor) -> Tensor:
        """See `World`."""
        tensor = tensor.contiguous()
        sent = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        rooms = [torch.empty_like(sent) for _ in range(self.size)]
        self._exchange(lambda: dist.all_gather(rooms, sent, group=self._group))
        return torch.cat(rooms).view(tensor.dtype)

    def gather(self, value: T) -> list[T]:
        """See `World`."""
        rooms: list[Any] = [None] * self.size
        self._exchange(lambda: dist.all_gather_object(rooms, value, group=self._group))
        return rooms

    def of_first(self, value: T) -> T:
        """See `World`."""
        room: list[Any] = [value]
        self._exchange(lambda: dist.broadcast_object_list(room, group=self._group))
        return room[0]

    def any(self, is_true: bool) -> bool:
        """See `World`. A process that was asked to end says so here, too."""
        said = self.gather((is_true, self._ending))
        self._end_if_asked([ending for _, ending in said])
        return any(found for found, _ in said)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """See `World`. A process that was asked to end says so here, too."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._is_lost:
                raise
            failure = error
        words = None if failure is None else f"{type(failure).__name__}: {failure}"
        said = self.gather((words, self._ending))
        if failure is not None:
            raise failure
        for rank, (words, _) in enumerate(said):
            if words is not None:
                raise RankError(f"{what} failed on rank {rank} of {self.size}: {words}")
        self._end_if_asked([ending for _, ending in said])

    def copy_first_(self, tensors: Sequence[Tensor]) -> None:
        """See `World`."""
        for tensor in tensors:
            whole = tensor.detach().contiguous()
            self._exchange(lambda: dist.broadcast(whole, 0, group=self._group))  # noqa: B023
            tensor.detach().copy_(whole)

    def require_same(self, what: str, describe: Callable[[], dict[str, Any]]) -> None:
        """See `World`."""
        first, *others = self.gather(describe())
        for rank, said in enumerate(others, start=1):
            differ = [name for name in {**first, **said} if first.get(name) != said.get(name)]
            if differ:
                listed = ", ".join(
                    f"{name} is {first.get(name)!r} on rank 0 and {said.get(name)!r} on rank {rank}"
                    for name in differ
                )
                raise RankError(f"the processes differ in {what}: {listed}")

    def ask_to_end(self, error: BaseException) -> bool:
        """See `World`."""
        self._ending = error
        return True

    def forget_requests(self) -> None:
        """See `World`."""
        self._ending = None

    def tell_failure(self, error: BaseException) -> None:
        """See `World`."""
        with suppress(RuntimeError):  # the store is gone with the process that held it
            self._store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")

    def all_are_here(self) -> bool:
        """See `World`."""
        return not self._is_lost and not self._silent("end")

    def close(self) -> None:
        """See `World`."""
        # What is lost cannot be left in order: that would wait for those who do not answer.
        if dist.is_initialized() and not self._is_lost:
            dist.destroy_process_group(self._group)
        os.sched_setaffinity(0, self._cores)

    def _end_if_asked(self, said: list[BaseException | None]) -> None:
        """Raise what the first of the processes was asked to end by, if one was."""
        for rank, ending in enumerate(said):
            if ending is not None:
                self._ending = None
                raise type(ending)(f"{ending} on rank {rank}")

    def _exchange(self, exchange: Callable[[], Any]) -> None:
        """Exchange something, or say who is missing."""
        try:
            exchange()
        except RuntimeError as error:
            self._is_lost = True
            raise RankError(f"{self._missing()} ({str(error).splitlines()[0]})") from error

    def _missing(self) -> str:
        """Who does not answer any more, in words."""
        if silent := self._silent("lost"):
            names = " and ".join(map(str, silent))
            why = "; ".join(self._failures.values()) or "it has died, or hangs"
            return f"no answer from rank {names} of {self.size}: {why}"
        return f"rank {self.rank} of {self.size} has lost the connection to the others"

    def _silent(self, place: str) -> list[int]:
        """Leave word that this process has come to a place; returns those who do not come."""
        found: list[list[int]] = []
        # In a thread of its own: a store whose machine does not answer blocks without end.
        asking = threading.Thread(
            target=lambda: found.append(self._who_is_silent(place)), daemon=True
        )
        asking.start()
        asking.join(2 * _NAMING_SECONDS)
        others = [rank for rank in range(self.size) if rank != self.rank]
        return found[0] if found else [0] if self.rank else others

    def _who_is_silent(self, place: str) -> list[int]:
        """The same, while the store answers."""
        limit = time.monotonic() + _NAMING_SECONDS
        silent = [rank for rank in range(self.size) if rank != self.rank]
        try:
            self._store.set(f"{place}/{self.rank}", socket.gethostname())
            while silent and time.monotonic() < limit:
                silent = [rank for rank in silent if not self._store.check([f"{place}/{rank}"])]
                time.sleep(0.05)
            for rank in silent:
                if self._store.check([f"failed/{rank}"]):
                    self._failures[rank] = self._store.get(f"failed/{rank}").decode()
        except RuntimeError:  # the process that held the store is gone: the first one, or all of it
            return [0] if self.rank else silent
        return silent
