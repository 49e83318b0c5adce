"""Processes of a run (ranks) and their collective operations. Kind: effects (network).

Each rank steps an equal number of environments; all train the same networks. `torchrun` starts and
restarts the processes, `connect_ranks` connects them. With `SINGLE_PROCESS`, the world of a run of
one process, collective operations do nothing.
"""

import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

T = TypeVar("T")
_WORLD_IDS = itertools.count()
"""Ids of the worlds of this process, equal on all ranks because runs follow one another."""


class RankError(RuntimeError):
    """Failure of another rank, or of the connection to it."""

    exit_code = 6


@dataclass(eq=False)
class World:
    """Processes of a run. All ranks must call the same methods in the same order.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        group: process group of PyTorch; None in a run of one process.
        has_shared_error: whether all ranks know the error that ends the run.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    has_shared_error: bool = False
    _end_request: BaseException | None = None
    _is_lost: bool = False

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes the files of the run."""
        return self.rank == 0

    def local_slice(self, count: int) -> slice:
        """Return this rank's slice of `count` items; `count` is a multiple of `size`."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_reduce_mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype in place by their means over all ranks."""
        if self.group is None:
            return
        # The last number of the message is positive if a rank requests the end of the run.
        request = tensors[0].new_full((1,), float(self._end_request is not None))
        message = torch.cat([*(tensor.detach().reshape(-1) for tensor in tensors), request])
        self._run_collective(dist.all_reduce, message)
        *means, request = message.div_(self.size).split([*(t.numel() for t in tensors), 1])
        for tensor, mean in zip(tensors, means, strict=True):
            tensor.detach().copy_(mean.view(tensor.shape))
        # On a GPU, reading the number would wait; the next exchange of objects raises instead.
        if request.device.type == "cpu" and float(request) > 0:
            self.all_reduce_any(False)

    def average_record(self, record: dict[str, float]) -> dict[str, float]:
        """Return the mean over all ranks of each number in a record of metrics."""
        means = torch.tensor(list(record.values()), dtype=torch.float64)
        self.all_reduce_mean_([means])
        return dict(zip(record, means.tolist(), strict=True))

    def all_gather_cat(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors of all ranks, `[B / size, …]` each, to `[B, …]`."""
        if self.group is None:
            return tensor
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run_collective(dist.all_gather, parts, tensor)
        return torch.cat(parts)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the picklable values of all ranks, in order."""
        if self.group is None:
            return [value]
        values_by_rank: list[Any] = [None] * self.size
        self._run_collective(dist.all_gather_object, values_by_rank, value)
        return values_by_rank

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's picklable value on all ranks."""
        values = [value]
        if self.group is not None:
            self._run_collective(dist.broadcast_object_list, values)
        return values[0]

    def all_reduce_any(self, is_true: bool) -> bool:
        """Return whether a condition is true on any rank.

        The error of `request_end`, if a rank has called it, is raised on all ranks.
        """
        answers = self.all_gather_object((is_true, self._end_request))
        self._raise_request([request for _, request in answers])
        return any(answer for answer, _ in answers)

    @contextmanager
    def sync_errors(self, what: str) -> Iterator[None]:
        """Raise an error on all ranks at the end of the block if the block failed on one of them.

        Args:
            what: name of the operation, for the message.

        Raises:
            RankError: the block failed on another rank.
        """
        local_error: BaseException | None = None
        try:
            yield
        except (Exception, SystemExit) as error:
            if self._is_lost:
                raise
            local_error = error
        text = None if local_error is None else f"{type(local_error).__name__}: {local_error}"
        answers = self.all_gather_object((text, self._end_request))
        self.has_shared_error = any(text is not None for text, _ in answers)
        if local_error is not None:
            raise local_error
        for rank, (text, _) in enumerate(answers):
            if text is not None:
                raise RankError(f"{what} failed on rank {rank} of {self.size}: {text}")
        self._raise_request([request for _, request in answers])

    def check_same(self, what: str, get_values: Callable[[], dict[str, Any]]) -> None:
        """Check that `get_values()`, values by name, is equal on all ranks.

        Args:
            what: name of what is compared, for the message.
            get_values: function that returns the values; not called in a run of one process.

        Raises:
            RankError: a value differs; the message lists all.
        """
        first, *others = self.all_gather_object(get_values() if self.group is not None else {})
        for rank, values in enumerate(others, start=1):
            listed = ", ".join(
                f"{name} is {first.get(name)!r} on rank 0 and {values.get(name)!r} on rank {rank}"
                for name in {**first, **values}
                if first.get(name) != values.get(name)
            )
            if listed:
                raise RankError(f"the processes differ in {what}: {listed}")

    def request_end(self, error: BaseException | None) -> bool:
        """Make all ranks raise an error at their next exchange; None cancels the request.

        Returns:
            False for one process.
        """
        self._end_request = error if self.group is not None else None
        return self.group is not None

    def _raise_request(self, end_requests: list[BaseException | None]) -> None:
        """Raise the error of the lowest rank that requested an end, if any did."""
        for rank, request in enumerate(end_requests):
            if request is not None:
                self.has_shared_error = True
                raise type(request)(f"{request} on rank {rank}")

    def _run_collective(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Call an operation of `torch.distributed`.

        Raises:
            RankError: the connection to another rank was lost.
        """
        try:
            operation(*arguments, group=self.group)
        except RuntimeError as error:
            self._is_lost = True
            given = f"rank {self.rank} of {self.size} lost the connection to the others"
            text = f"{given} ({str(error).splitlines()[0]})"
            raise RankError(f"{text}. torchrun reports which process failed.") from error


SINGLE_PROCESS = World()
"""World of a run of one process."""


@cache
def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Return the store of all worlds, the rank of this process and the number of processes."""
    return next(dist.rendezvous("env://", timeout=timeout))


@contextmanager
def connect_ranks(*, device: str, timeout: float) -> Iterator[World]:
    """Connect the processes that `torchrun` has started, until the end of the block.

    Processes of a machine that have the same cores divide them, if there are enough.

    Args:
        device: `auto`, `cpu` or `cuda`: gloo exchanges tensors of CPUs, NCCL those of GPUs.
        timeout: seconds to wait for other processes, here and in every exchange.

    Raises:
        RankError: some processes did not connect in time.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield SINGLE_PROCESS
        return
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and (device != "auto" or local_rank < torch.cuda.device_count()):
        torch.cuda.set_device(local_rank)
    limit, backend = timedelta(seconds=timeout), "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        shared, rank, size = _rendezvous(limit)
        store = dist.PrefixStore(f"phasicrl-{next(_WORLD_IDS)}", shared)
        if dist.is_initialized():  # by the calling program, perhaps for GPUs only
            group = dist.new_group(backend=backend, timeout=limit)
        else:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
            group = dist.group.WORLD
    except RuntimeError as error:
        given = f"not all {os.environ['WORLD_SIZE']} processes connected within {timeout:.0f} s"
        text = f"{given} ({str(error).splitlines()[0]})"
        raise RankError(f"{text}. Start all of them with the same options of torchrun.") from error
    world, cores = World(rank, size, group), sorted(os.sched_getaffinity(0))
    try:
        here = platform.node(), os.environ.get("GROUP_RANK"), cores
        places = world.all_gather_object(here)
        sharing = [other for other in range(size) if places[other] == here]
        if share := len(cores) // len(sharing):
            first = sharing.index(rank) * share
            os.sched_setaffinity(0, cores[first : first + share])
        yield world
    finally:
        if not world._is_lost:  # closing a lost connection would wait
            dist.destroy_process_group(world.group)
        os.sched_setaffinity(0, cores)
