"""Many kernels as one call: functions of tensors, compiled for a CPU or recorded on a GPU.

Kind: effects (runs a C++ compiler).
"""

from __future__ import annotations

import importlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which Inductor needs at run time."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def compile_(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a function of tensors, for tensors of these shapes, dtypes and strides.

    What it does to them becomes one call.

    It may write into its inputs, and no other input may share memory with one that it writes into.
    The result checks nothing: other shapes than those of `inputs` are read as if they were the
    same. Compiled code is kept on the machine, so that the same function takes seconds instead of
    tens of seconds the next time.

    Raises:
        Exception: of many kinds, where the function looks at values (a packed sequence's lengths)
            or the compiler fails.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about PyTorch
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        # Takes a second, which most programs can do without.
        inductor = importlib.import_module("torch._inductor")
        return inductor.compile(graph, list(inputs), options={"cpp_wrapper": True})


Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Runs a function of no arguments; returns its outputs, and what computes them anew, in place."""


def capture(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    *,
    num_kept: int,
    record: Recorder | None = None,
) -> Callable[..., Any]:
    """Record a function of tensors on a GPU, so that all its kernels are launched as one.

    The recording is a CUDA graph.
    As with `compile_` nothing is checked. What is returned is overwritten by the next call.

    Args:
        function: may write into its inputs; must not look at values.
        inputs: like those to come; some on the CPU, perhaps.
        num_kept: so many of the first inputs are the same tensors in every call, and are used where
            they lie; others are copied in.
        record: records the kernels; a CUDA graph unless given.

    Raises:
        RuntimeError: the function does something that cannot be recorded.
    """
    device = inputs[0].device
    if record is None:
        record = partial(_record, device=device)
    copies = [torch.empty_like(tensor, device=device).copy_(tensor) for tensor in inputs[num_kept:]]
    with torch.no_grad():
        outputs, replay = record(lambda: function(*inputs[:num_kept], *copies))
        for tensor in (outputs,) if isinstance(outputs, Tensor) else outputs:
            tensor.zero_()  # so that a replay that does nothing cannot look right

    def call(*given: Tensor) -> Any:
        torch._foreach_copy_(copies, list(given[num_kept:]))
        replay()
        return outputs

    return call


def _record(function: Callable[[], Any], *, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Record a CUDA graph.

    Calls on a stream of their own come before: in these kernels are chosen and workspaces made.
    """
    with torch.cuda.device(device):
        before, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        try:
            stream.wait_stream(before)
            with torch.cuda.stream(stream):
                for _ in range(3):
                    function()
            before.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outputs = function()
        except BaseException:
            torch.cuda.set_stream(before)  # a failed recording leaves its own behind
            raise
    return outputs, graph.replay


class Functional(nn.Module):
    """Calls functions that use a module while its parameters and buffers are other tensors.

    Args:
        module: whose tensors are replaced during a call.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        """What `functional_call` calls."""
        return function()

    def call(self, tensors: dict[str, Tensor], function: Callable[[], Any]) -> Any:
        """`function()`, with the module's tensors of these names replaced."""
        named = {f"module.{name}": tensor for name, tensor in tensors.items()}
        return functional_call(self, named, (function,))


def as_one_call(
    function: Callable[..., Any], inputs: Sequence[Tensor], *, num_kept: int
) -> Callable[..., Any]:
    """Compile for a CPU, record on a GPU; `num_kept` inputs are the same tensors in every call."""
    if inputs[0].device.type == "cpu":
        return compile_(function, inputs)
    return capture(function, inputs, num_kept=num_kept)


class CompiledCall:
    """An evaluation in one call.

    Args:
        function: of tensors; uses a module and needs no gradient.
        module: whose tensors it reads.
        inputs: like those to come.

    Raises:
        Exception: of many kinds, where that cannot be traced or compiled.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Tensor, ...]],
        module: nn.Module,
        inputs: Sequence[Tensor],
    ) -> None:
        tensors = dict(chain(module.named_parameters(), module.named_buffers()))
        names, functional = list(tensors), Functional(module)

        def call(*everything: Tensor) -> tuple[Tensor, ...]:
            own, given = everything[: len(names)], everything[len(names) :]
            return functional.call(dict(zip(names, own, strict=True)), lambda: function(*given))

        self._own = [tensor.detach() for tensor in tensors.values()]
        with torch.inference_mode(False):
            example = [*self._own, *(tensor.clone() for tensor in inputs)]
            self._call = as_one_call(call, example, num_kept=len(names))

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Evaluate."""
        return self._call(*self._own, *inputs)
