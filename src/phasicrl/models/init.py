"""Initial weights. Kind: state (fills modules in place from an explicit generator)."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor, nn

from phasicrl.config import Initialization


def initialize(layer: nn.Linear | nn.Conv2d, scheme: Initialization, *, scale: float, generator: Generator) -> None:
    """Fill a layer's weights by `scheme` and set its bias to zero (`torch` keeps PyTorch's random bias).

    - `normalized`: PyTorch's default draw, then each output unit's weight vector is divided by its
      L2 norm and multiplied by `scale` (OPPG torch_util.py:327-351): axis 1 for dense layers, axes
      1 to 3 for convolutions.
    - `orthogonal`: orthogonal matrix times `scale` (Baselines, CleanRL).
    - `glorot`: uniform within ± √(6 / (fan_in + fan_out)); no scale, as in Baselines' convolutions.
    - `torch`: PyTorch's default draw of weights and bias; no scale.
    """
    bound = 1 / math.sqrt(_fan_in(layer.weight))
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        if layer.bias is not None:
            layer.bias.uniform_(-bound, bound, generator=generator)
            if scheme != "torch":
                layer.bias.zero_()
        if scheme == "normalized":
            axes = tuple(range(1, layer.weight.ndim))
            layer.weight.mul_(scale / layer.weight.norm(dim=axes, p=2, keepdim=True))
        elif scheme == "orthogonal":
            nn.init.orthogonal_(layer.weight, gain=scale, generator=generator)
        elif scheme == "glorot":
            nn.init.xavier_uniform_(layer.weight, generator=generator)


def _fan_in(weight: Tensor) -> int:
    """Inputs of one output unit."""
    return math.prod(weight.shape[1:])
