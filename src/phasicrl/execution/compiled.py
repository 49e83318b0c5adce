"""Functions of tensors, compiled for a CPU or a GPU.

Kind: effects (runs a C++ compiler).
"""

from __future__ import annotations

import importlib
import shutil
import warnings
from collections.abc import Callable, Sequence
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


def compile_for_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for a GPU: PyTorch records its kernels as CUDA graphs.

    The next call of any function that was compiled so overwrites what is returned.
    """
    compiled = torch.compile(function, mode="reduce-overhead")

    def call(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return call


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
            self._call = compile_(call, example)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Evaluate."""
        return self._call(*self._own, *inputs)
