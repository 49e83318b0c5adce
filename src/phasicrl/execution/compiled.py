"""Many kernels as one call: functions of tensors, compiled for a CPU or recorded on a GPU. Kind: effects (runs a C++ compiler)."""

from __future__ import annotations

import importlib
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from phasicrl.execution.streams import beside


def can_fuse() -> bool:
    """Whether there is a C++ compiler, which Inductor needs at run time."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def fuse(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """Compile a function of tensors: what it does to tensors of these shapes, dtypes and strides becomes one call.

    It may write into its inputs, and no other input may share memory with one that it writes into. The result checks nothing: other
    shapes than those of `inputs` are read as if they were the same. Compiled code is kept on the machine, so that the same function
    takes seconds instead of tens of seconds the next time.

    Raises:
        Exception: of many kinds, where the function looks at values (a packed sequence's lengths) or the compiler fails.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's about PyTorch
        graph = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        inductor = importlib.import_module("torch._inductor")  # takes a second, which most programs can do without
        return inductor.compile(graph, list(inputs), options={"cpp_wrapper": True})


Recorder = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]
"""Runs a function of no arguments for its outputs, and returns them with what computes them anew, in place."""


def capture(function: Callable[..., Any], inputs: Sequence[Tensor], *, num_kept: int, record: Recorder | None = None) -> Callable[..., Any]:
    """Record a function of tensors on a GPU, so that all its kernels are launched as one (a CUDA graph).

    As with `fuse` nothing is checked. What is returned is overwritten by the next call.

    Args:
        function: may write into its inputs; must not look at values.
        inputs: like those to come; some on the CPU, perhaps.
        num_kept: so many of the first inputs are the same tensors in every call, and are used where they lie; others are copied in.
        record: records the kernels; a CUDA graph unless given.

    Raises:
        RuntimeError: the function does something that cannot be recorded.
    """
    device = inputs[0].device
    if record is None:
        record = partial(_record, device=device)
    copies = [torch.empty_like(tensor, device=device).copy_(tensor) for tensor in inputs[num_kept:]]
    with torch.no_grad(), beside(torch.cuda.Stream(device) if device.type == "cuda" else None):
        outputs, replay = record(lambda: function(*inputs[:num_kept], *copies))
        for tensor in (outputs,) if isinstance(outputs, Tensor) else outputs:
            tensor.zero_()  # so that a replay that does nothing cannot look right

    def call(*given: Tensor) -> Any:
        torch._foreach_copy_(copies, list(given[num_kept:]))
        replay()
        return outputs

    return call


def _record(function: Callable[[], Any], *, device: torch.device) -> tuple[Any, Callable[[], None]]:
    """Record a CUDA graph, after calls on a stream of their own in which kernels are chosen and workspaces made."""
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


class Borrowed(nn.Module):
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
        return functional_call(self, {f"module.{name}": tensor for name, tensor in tensors.items()}, (function,))


def total_norm(tensors: list[Tensor], *, at_once: bool) -> Tensor:
    """The norm of all numbers together; `at_once` by kernels that take many tensors, else by one for each."""
    if at_once:
        return torch.stack(torch._foreach_norm(tensors)).norm()
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum().sqrt()


def scale(tensors: list[Tensor], factor: Tensor, *, at_once: bool) -> list[Tensor]:
    """Each times a 0-d factor."""
    return list(torch._foreach_mul(tensors, factor)) if at_once else [tensor * factor for tensor in tensors]


def _laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, in memory as the parameter is; a convolution may give it in another order than channels_last."""
    return gradient if gradient.stride() == parameter.stride() else torch.empty_like(parameter).copy_(gradient)


def adam_(
    parameters: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    *,
    rate: Tensor,
    betas: tuple[float, float],
    eps: float,
    only_if: Tensor,
    at_once: bool,
) -> None:
    """One step of Adam in place, as PyTorch's fused one does it (Kingma & Ba 2015, algorithm 1; torch/optim/adam.py).

    Args:
        parameters: are moved.
        gradients: of the loss.
        first: running means of gradients.
        second: running means of squared gradients.
        steps: number of steps before this one, 0-d.
        rate: step size, 0-d.
        betas: decays of the two means.
        eps: is added to the root of the second mean.
        only_if: nothing changes unless this is true, 0-d: a gradient that is not finite would spoil weights and means for good.
        at_once: by PyTorch's kernel for many tensors, else in plain operations, which a compiler fuses with what is around them.
    """
    beta1, beta2 = betas
    if at_once:
        # The kernel walks all of them side by side, whatever their strides: with another layout weights would get the steps of others.
        gradients = [_laid_out_as(parameter, gradient) for parameter, gradient in zip(parameters, gradients, strict=True)]
        torch._foreach_add_(steps, only_if.to(steps[0].dtype))
        torch._fused_adam_(
            parameters, gradients, first, second, [], steps,
            lr=rate, beta1=beta1, beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False,
            found_inf=(~only_if).float(),
        )  # fmt: skip
        return
    for parameter, gradient, mean, mean_square, step in zip(parameters, gradients, first, second, steps, strict=True):
        new_mean = mean.lerp(gradient, 1 - beta1)
        new_square = (mean_square * beta2).addcmul(gradient, gradient, value=1 - beta2)
        count = step.double() + 1  # 1 − 0.999 in single precision has three digits
        size = (rate / (1 - beta1**count)).to(parameter.dtype)
        root = (1 - beta2**count).sqrt().to(parameter.dtype)
        moved = parameter - size * new_mean / (new_square.sqrt() / root + eps)
        for old, new in ((parameter, moved), (mean, new_mean), (mean_square, new_square), (step, step + 1)):
            old.copy_(torch.where(only_if, new, old))
