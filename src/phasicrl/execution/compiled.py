"""Compilation of functions of tensors, for a CPU or a GPU. Kind: effects (runs a compiler)."""

import importlib
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

TensorFunction = Callable[..., tuple[Tensor, ...]]
"""Function that returns tensors."""


def has_compiler() -> bool:
    """Return whether there is a C++ compiler, which Inductor needs at run time."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def compile_for_shapes(
    function: Callable[..., Any], inputs: list[Tensor], *, fast_tanh: bool = True
) -> Callable[..., Any]:
    """Compile a function of tensors for the shapes, dtypes and strides of example `inputs`.

    Inputs that the function writes to must not share memory with others. The compiled function
    checks nothing: it reads tensors of other shapes as if they had those of `inputs`. Compiled code
    is cached on disk. `fast_tanh` computes tanh by exp, to 2e-7.

    Raises:
        Exception: of any type: the function depends on values, such as the lengths of a packed
            sequence, or the compiler fails.
    """
    with torch.no_grad(), warnings.catch_warnings(action="ignore"):  # PyTorch's about itself
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        inductor = importlib.import_module("torch._inductor")  # takes a second
        # Calls without Python, and the random numbers of eager code.
        config = {"cpp_wrapper": True, "fallback_random": True, "cpp.use_decompose_tanh": fast_tanh}
        return inductor.compile(graph, list(inputs), options=config)


def compile_for_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for a GPU, with CUDA graphs.

    The next call of any function compiled this way overwrites the returned tensors.
    """
    compiled = torch.compile(function, mode="reduce-overhead")

    def call_in_new_graph_step(*inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs)

    return call_in_new_graph_step


@contextmanager
def replace_params(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Give a module other parameters and buffers, by name, for the duration of a block.

    `torch.func.functional_call` does the same, but calls only `forward`.

    Raises:
        ValueError: the module has assigned a buffer: the new one would be lost.
    """
    with stateless._reparametrize_module(module, tensors, tie_weights=True):
        yield
        if lost := [name for name, x in module.named_buffers() if x is not tensors[name]]:
            raise ValueError(f"{lost[0]} is assigned; expected a buffer that is changed in place")


def compile_inference(
    function: TensorFunction, module: nn.Module, inputs: Sequence[Tensor]
) -> TensorFunction:
    """Compile a function that uses a module, without gradient, for the shapes of `inputs`.

    Raises:
        Exception: the function cannot be compiled, see `compile_for_shapes`.
    """
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    weights = [*tensors.values()]  # themselves, because their memory may be replaced

    def call_with_weights(*inputs: Tensor) -> tuple[Tensor, ...]:
        with replace_params(module, dict(zip(tensors, inputs, strict=False))):
            return function(*inputs[len(weights) :])

    with torch.inference_mode(False):
        examples = [*(x.detach() for x in weights), *(x.clone() for x in inputs)]
        compiled = compile_for_shapes(call_with_weights, examples)
    return lambda *inputs: compiled(*weights, *inputs)
