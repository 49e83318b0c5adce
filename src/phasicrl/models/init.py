"""Initial weights. Kind: state (fills modules in place, from an explicit generator)."""

import math
from dataclasses import dataclass

import torch
from torch import Generator, nn

from phasicrl.config import Initialization

Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True, slots=True)
class Initializer:
    """Filler of layers with initial weights; biases are zero, except with `torch`.

    - `normalized`: PyTorch's default, then the weight vector of each output unit is scaled to the
      L2 norm `scale` (OPPG torch_util.py:327-351): over axis 1 of dense layers, axes 1 to 3 of
      convolutions.
    - `orthogonal`: orthogonal matrix times `scale` (Baselines, CleanRL).
    - `glorot`: uniform within ± √(6 / (fan_in + fan_out)), without scale (Baselines'
      convolutions).
    - `torch`: PyTorch's default weights and biases, without scale.
    """

    scheme: Initialization
    generator: Generator

    def __call__(self, layer: Layer, scale: float) -> Layer:
        """Fill a layer in place and return it."""
        bound = 1 / math.sqrt(layer.weight[0].numel())
        with torch.no_grad():
            layer.weight.uniform_(-bound, bound, generator=self.generator)
            if layer.bias is not None:
                layer.bias.uniform_(-bound, bound, generator=self.generator)
                if self.scheme != "torch":
                    layer.bias.zero_()
            if self.scheme == "normalized":
                axes = tuple(range(1, layer.weight.ndim))
                layer.weight.mul_(scale / layer.weight.norm(dim=axes, p=2, keepdim=True))
            elif self.scheme == "orthogonal":
                nn.init.orthogonal_(layer.weight, gain=scale, generator=self.generator)
            elif self.scheme == "glorot":
                nn.init.xavier_uniform_(layer.weight, generator=self.generator)
        return layer

    def fill_hidden(self, layer: Layer, normalized_scale: float) -> Layer:
        """Fill a hidden layer with scale `normalized_scale` in `normalized`, √2 in `orthogonal`."""
        return self(layer, normalized_scale if self.scheme == "normalized" else math.sqrt(2))
