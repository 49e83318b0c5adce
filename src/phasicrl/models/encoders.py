"""Encoders: observations `[N, …]` in their own dtype to features `[N, D]`. Kind: state (modules).

Pictures arrive as the environment gives them, `[N, H, W, C]` bytes, and stay so until inside the encoder: `permute` makes them
channels_last without a copy, the layout in which the convolutions are fastest.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import Initialisation, ModelConfig
from phasicrl.models.init import initialise

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


class ResidualBlock(nn.Module):
    """`x + conv(relu(conv(relu(x))))`, 3×3 convolutions that keep the size (Espeholt et al. 2018, figure 3)."""

    def __init__(self, channels: int, *, init: Initialisation, scale: float, generator: Generator) -> None:
        super().__init__()
        self.conv0 = _conv(channels, channels, init=init, scale=scale, generator=generator)
        self.conv1 = _conv(channels, channels, init=init, scale=scale, generator=generator)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """Add the two convolutions' output to `x`."""
        return x + self.conv1(functional.relu(self.conv0(functional.relu(x))))


class ImpalaCNN(nn.Module):
    """The IMPALA network of Procgen's baselines (OPPG impala_cnn.py): stacks of convolution, max-pool and residual blocks, then dense.

    For 64×64×3 pictures, channels (16, 32, 32), two blocks and 256 features: 622,144 parameters.

    Raises:
        ValueError: the picture is too small for so many stacks.
    """

    def __init__(self, obs_shape: tuple[int, ...], config: ModelConfig, *, generator: Generator) -> None:
        super().__init__()
        height, width, in_channels = image_shape(obs_shape)
        # OPPG impala_cnn.py:63-65, 131: residual scale sqrt(1/sqrt(stacks) / sqrt(blocks)); 1.0 for the first convolution of a stack.
        residual_scale = _gain(config.init, normalized=(len(config.channels) * max(config.blocks, 1)) ** -0.25)
        stacks = []
        for channels in config.channels:
            if min(height, width) < 2:
                raise ValueError(f"model.channels {config.channels} halves the {obs_shape} picture too often; give fewer stacks")
            first = _conv(in_channels, channels, init=config.init, scale=_gain(config.init, normalized=1.0), generator=generator)
            blocks = [ResidualBlock(channels, init=config.init, scale=residual_scale, generator=generator) for _ in range(config.blocks)]
            stacks.append(nn.Sequential(first, _pool(config.pooling, height, width), *blocks))
            height, width, in_channels = (height + 1) // 2, (width + 1) // 2, channels
        self.stacks = nn.Sequential(*stacks)
        self.dense = Dense(height * width * in_channels, config, activation="relu", generator=generator)
        self.num_features = self.dense.num_features
        _to_channels_last(self)

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode pictures."""
        x = functional.relu(self.stacks(scaled_image(obs)))
        return self.dense(x.flatten(1))


class NatureCNN(nn.Module):
    """The network of Mnih et al. (2015): convolutions 32×8/4, 64×4/2, 64×3/1, then dense layers.

    Raises:
        ValueError: the picture is smaller than 36×36.
    """

    def __init__(self, obs_shape: tuple[int, ...], config: ModelConfig, *, generator: Generator) -> None:
        super().__init__()
        height, width, in_channels = image_shape(obs_shape)
        if min(height, width) < 36:
            raise ValueError(f"the Nature network needs pictures of at least 36×36, these are {height}×{width}; use --model.encoder impala")
        scale = _gain(config.init, normalized=1.0)
        layers: list[nn.Module] = []
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv2d(in_channels, channels, kernel, stride)
            initialise(conv, config.init, scale=scale, generator=generator)
            layers += [conv, nn.ReLU()]
            height, width, in_channels = (height - kernel) // stride + 1, (width - kernel) // stride + 1, channels
        self.convolutions = nn.Sequential(*layers)
        self.dense = Dense(height * width * in_channels, config, activation="relu", generator=generator)
        self.num_features = self.dense.num_features
        _to_channels_last(self)

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode pictures."""
        return self.dense(self.convolutions(scaled_image(obs)).flatten(1))


class MLP(nn.Module):
    """Dense layers over vectors.

    Raises:
        ValueError: the observations are pictures.
    """

    def __init__(self, obs_shape: tuple[int, ...], config: ModelConfig, *, generator: Generator) -> None:
        super().__init__()
        if len(obs_shape) == 3:
            raise ValueError(f"observations of shape {obs_shape} are pictures; use --model.encoder impala or nature")
        self.dense = Dense(math.prod(obs_shape), config, activation=config.activation, generator=generator)
        self.num_features = self.dense.num_features

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode vectors."""
        return self.dense(obs.flatten(1).float())


class Dense(nn.Module):
    """Dense layers, each followed by an optional LayerNorm and a non-linearity."""

    def __init__(self, num_inputs: int, config: ModelConfig, *, activation: Literal["relu", "tanh", "gelu"], generator: Generator) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in config.hidden_sizes:
            linear = nn.Linear(num_inputs, size)
            initialise(linear, config.init, scale=_gain(config.init, normalized=1.4), generator=generator)
            layers += [linear, *([nn.LayerNorm(size)] if config.layer_norm else []), ACTIVATIONS[activation]()]
            num_inputs = size
        self.layers = nn.Sequential(*layers)
        self.num_features = num_inputs

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        """Apply the layers in order."""
        return self.layers(x)


ENCODERS = {"impala": ImpalaCNN, "nature": NatureCNN, "mlp": MLP}


def image_shape(obs_shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width and channels of `[H, W, C]` pictures; `[C, H, W]` is recognised by its channels, fewer than both other axes.

    Raises:
        ValueError: these observations are not pictures.
    """
    if len(obs_shape) != 3:
        raise ValueError(f"observations of shape {obs_shape} are not pictures; use --model.encoder mlp")
    if obs_shape[0] < min(obs_shape[1:]):
        channels, height, width = obs_shape
    else:
        height, width, channels = obs_shape
    return height, width, channels


def scaled_image(obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N C H W"]:
    """Bytes of either layout to floats in [0, 1], channels_last in memory."""
    x = obs if obs.shape[1] < min(obs.shape[2:]) else obs.permute(0, 3, 1, 2)
    # A `permute` view of NHWC bytes is channels_last already: this is one pass from bytes to floats.
    floats = x.to(torch.float32, memory_format=torch.channels_last)
    return floats.div_(255) if obs.dtype == torch.uint8 else floats


def _to_channels_last(module: nn.Module) -> None:
    """Lay convolution weights out as the pictures are, so that no call has to."""
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _gain(init: Initialisation, *, normalized: float) -> float:
    """Scale for hidden layers: the given one under `normalized`, √2 under `orthogonal` (the others have none)."""
    return normalized if init == "normalized" else math.sqrt(2)


def _conv(num_inputs: int, num_outputs: int, *, init: Initialisation, scale: float, generator: Generator) -> nn.Conv2d:
    """A 3×3 convolution that keeps the size."""
    conv = nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1)
    initialise(conv, init, scale=scale, generator=generator)
    return conv


def _pool(padding: Literal["symmetric", "same"], height: int, width: int) -> nn.MaxPool2d:
    """3×3 max-pool of stride 2 that halves, rounding up.

    TensorFlow's `same` pads an odd size on both sides and an even one at its end only, which is what `ceil_mode` without padding does.
    """
    if padding == "same":
        return nn.MaxPool2d(kernel_size=3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)
    return nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
