"""Encoders: observations `[N, …]` in their own dtype to features `[N, D]`. Kind: state (modules).

Images arrive as the environment gives them, `[N, H, W, C]` bytes, and stay so until inside the
encoder: `permute` makes them channels_last without a copy, the layout in which the convolutions are
fastest.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import gymnasium as gym
import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ModelConfig, ObsNormConfig, Precision
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.models.init import Initializer
from phasicrl.normalize import ObservationNormalizer
from phasicrl.spaces import ObservationLayout, at_path, choices, is_image, leaves

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def in_precision(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Meanwhile encoders run in this precision."""
    if precision == "fp32":
        return nullcontext()
    # Nothing is kept between calls: a recorded step would go on with old weights.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class ResidualBlock(nn.Module):
    """`x + conv(relu(conv(relu(x))))`, 3×3 convolutions (Espeholt et al. 2018, figure 3)."""

    def __init__(self, channels: int, init: Initializer, normalized: float) -> None:
        super().__init__()
        self.conv0 = init.hidden(_conv(channels, channels), normalized)
        self.conv1 = init.hidden(_conv(channels, channels), normalized)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """Add the two convolutions' output to `x`."""
        return x + self.conv1(functional.relu(self.conv0(functional.relu(x))))


class ImpalaCNN(nn.Module):
    """The IMPALA network of Procgen's baselines (OPPG impala_cnn.py).

    Stacks of convolution, max-pool and residual blocks, then dense layers.
    For 64×64×3 images, channels (16, 32, 32), two blocks and 256 features: 622,144 parameters.

    Raises:
        ValueError: the image is too small for so many stacks.
    """

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        init = Initializer(config.init, generator)
        height, width, in_channels = image_shape(shape)
        # OPPG impala_cnn.py:63-65, 131: residual scale sqrt(1/sqrt(stacks) / sqrt(blocks)); 1.0 for
        # the first convolution of a stack.
        residual = (len(config.channels) * max(config.blocks, 1)) ** -0.25
        stacks = []
        for channels in config.channels:
            if min(height, width) < 2:
                many = f"model.channels {config.channels} halves the {shape} image too often"
                raise ValueError(f"{many}; give fewer stacks")
            first = init.hidden(_conv(in_channels, channels), 1.0)
            # Maxima of 3×3 windows, two apart: H×W becomes ⌈H/2⌉×⌈W/2⌉. `symmetric` pads both
            # sides; TensorFlow's `same` pads an even size at its end only.
            is_same = config.pooling == "same"
            pool = nn.MaxPool2d(3, 2, (height % 2, width % 2) if is_same else 1, ceil_mode=is_same)
            blocks = [ResidualBlock(channels, init, residual) for _ in range(config.blocks)]
            stacks.append(nn.Sequential(first, pool, *blocks))
            height, width, in_channels = (height + 1) // 2, (width + 1) // 2, channels
        self.stacks = nn.Sequential(*stacks)
        self.dense = Dense(height * width * in_channels, config, init, "relu")
        self.num_features = self.dense.num_features
        _to_channels_last(self)

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode images."""
        x = functional.relu(self.stacks(scaled_image(obs)))
        return self.dense(x.flatten(1))


class NatureCNN(nn.Module):
    """The network of Mnih et al. (2015): convolutions 32×8/4, 64×4/2, 64×3/1, then dense layers.

    Raises:
        ValueError: the image is smaller than 36×36.
    """

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        init = Initializer(config.init, generator)
        height, width, in_channels = image_shape(shape)
        if min(height, width) < 36:
            small = f"the Nature network needs images of at least 36×36, these are {height}×{width}"
            raise ValueError(f"{small}; use model.encoder impala")
        layers: list[nn.Module] = []
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv2d(in_channels, channels, kernel, stride)
            layers += [init.hidden(conv, 1.0), nn.ReLU()]
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
            in_channels = channels
        self.convolutions = nn.Sequential(*layers)
        self.dense = Dense(height * width * in_channels, config, init, "relu")
        self.num_features = self.dense.num_features
        _to_channels_last(self)

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode images."""
        return self.dense(self.convolutions(scaled_image(obs)).flatten(1))


class MLP(nn.Module):
    """Dense layers over vectors."""

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        init = Initializer(config.init, generator)
        self.dense = Dense(math.prod(shape), config, init, config.activation)
        self.num_features = self.dense.num_features

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode vectors."""
        return self.dense(_as_rows(obs).float())


class Dense(nn.Module):
    """Dense layers, each followed by an optional LayerNorm and a non-linearity."""

    def __init__(
        self, num_inputs: int, config: ModelConfig, init: Initializer, activation: str
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in config.hidden_sizes:
            layers.append(init.hidden(nn.Linear(num_inputs, size), 1.4))
            if config.layer_norm:
                layers.append(nn.LayerNorm(size))
            layers.append(ACTIVATIONS[activation]())
            num_inputs = size
        self.layers = nn.Sequential(*layers)
        self.num_features = num_inputs

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        """Apply the layers in order."""
        return self.layers(x)


ENCODERS = {"impala": ImpalaCNN, "nature": NatureCNN, "mlp": MLP}


class TreeEncoder(nn.Module):
    """For observations of several parts, or of other things than numbers.

    Each image goes through a network of its own, everything else side by side through dense layers;
    the features of all are concatenated. Members of a finite set become one-hot vectors.

    Raises:
        ValueError: the configured encoder is one for images and there are none, or the other way
            round.
    """

    def __init__(self, space: gym.Space[Any], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        images = [(path, part) for path, part in leaves(space) if is_image(part)]
        self.image_paths = [path for path, _ in images]
        self.numbers = [(path, part) for path, part in leaves(space) if not is_image(part)]
        if (config.encoder == "mlp") == bool(images):
            misfit = f"model.encoder {config.encoder} does not fit the observations {space}"
            raise ValueError(f"{misfit}; use impala or nature if images are among them, else mlp")
        kind, init = ENCODERS[config.encoder], Initializer(config.init, generator)
        cnns = [kind(tuple(part.shape or ()), config, generator) for _, part in images]
        self.images = nn.ModuleList(cnns)
        width = sum(num_numbers(part) for _, part in self.numbers)
        self.dense = Dense(width, config, init, config.activation) if width else None
        own = [*cnns, self.dense] if self.dense else cnns
        self.num_features = sum(part.num_features for part in own)

    def forward(self, obs: Any) -> Float[Tensor, "N D"]:
        """Encode a tree of observations `[N, …]`."""
        pairs = zip(self.images, self.image_paths, strict=True)
        features = [cnn(at_path(obs, path)) for cnn, path in pairs]
        if self.dense is not None:
            numbers = [as_numbers(at_path(obs, path), part) for path, part in self.numbers]
            features.append(self.dense(torch.cat(numbers, dim=-1)))
        return torch.cat(features, dim=-1)


class ObservationReader(nn.Module):
    """From stored observations to what encoders read.

    Bytes of a tree become its tensors; observed numbers are normalized if so wished.

    Raises:
        ValueError: there is nothing to normalize.
    """

    def __init__(self, space: gym.Space[Any], norm: ObsNormConfig) -> None:
        super().__init__()
        self.layout = ObservationLayout(space)
        boxes = [(path, box) for path, box in leaves(space) if isinstance(box, gym.spaces.Box)]
        self.parts = [(path, box) for path, box in boxes if not is_image(box)]
        self.normalizer: ObservationNormalizer | None = None
        if norm.statistics != "none":
            size = sum(num_numbers(part) for _, part in self.parts)
            if not size:
                nothing = f"obs_norm normalizes observed numbers, and there are none in {space}"
                raise ValueError(f"{nothing}; set obs_norm.statistics to none")
            self.normalizer = ObservationNormalizer(
                size, statistics=norm.statistics, decay=norm.decay, clip=norm.clip
            )

    def forward(self, stored: Shaped[Tensor, "N *shape"]) -> Any:
        """A tensor, or for `Dict` and `Tuple` spaces a tree of tensors, `[N, …]`."""
        return self.normalized(self.layout.unpack(stored))

    def normalized(self, obs: Any) -> Any:
        """The same for observations in the structure of their space, `[N, …]`."""
        if self.normalizer is None:
            return obs
        return self._with_numbers(obs, self.normalizer(self._numbers(obs)))

    def update(self, stored: Shaped[Tensor, "B T *shape"], world: World = SINGLE_PROCESS) -> None:
        """Take a rollout's observations, and those of other processes, into the statistics.

        If there are any.
        """
        if self.normalizer is not None:
            self.normalizer.update(self._numbers(self.layout.unpack(stored.flatten(0, 1))), world)

    def clipped_fraction(self, stored: Shaped[Tensor, "N *shape"]) -> float:
        """Share of the observed numbers that are clipped; 0 before there are statistics."""
        norm = self.normalizer
        assert norm is not None, "no observations are normalized"
        numbers = norm(self._numbers(self.layout.unpack(stored)))
        return float(((numbers <= norm.low) | (numbers >= norm.high)).float().mean())

    def _numbers(self, obs: Any) -> Float[Tensor, "N V"]:
        """The numbers that are normalized, side by side."""
        return torch.cat([_as_rows(at_path(obs, path)).float() for path, _ in self.parts], dim=-1)

    def _with_numbers(self, obs: Any, numbers: Float[Tensor, "N V"]) -> Any:
        """The tree with these numbers in place of its own."""
        widths = [num_numbers(part) for _, part in self.parts]
        pairs = zip(self.parts, numbers.split(widths, -1), strict=True)
        values = {leaf.path: at_path(obs, leaf.path) for leaf in self.layout.leaves}
        values |= {
            path: x.unflatten(-1, part.shape) if part.shape else x.squeeze(-1)
            for (path, part), x in pairs
        }
        return self.layout.assemble(values)


def encoder_for(space: gym.Space[Any], config: ModelConfig, generator: Generator) -> nn.Module:
    """Make the encoder that `config` names, for a space of observations."""
    if isinstance(space, gym.spaces.Box):
        rank, is_mlp = len(space.shape), config.encoder == "mlp"
        if rank < 3 if is_mlp else rank == 3:
            return ENCODERS[config.encoder](space.shape, config, generator)
    return TreeEncoder(space, config, generator)


def num_numbers(space: gym.Space[Any]) -> int:
    """Width of `as_numbers`."""
    if isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        return sum(choices(space))
    return math.prod(space.shape or ())


def as_numbers(obs: Shaped[Tensor, "N *shape"], space: gym.Space[Any]) -> Float[Tensor, "N V"]:
    """A part of an observation as a vector; members of finite sets one-hot."""
    if not isinstance(space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
        return _as_rows(obs).float()
    columns = obs.unsqueeze(-1).flatten(1).unbind(-1)
    pairs = zip(columns, choices(space), strict=True)
    return torch.cat([functional.one_hot(x.long(), width).float() for x, width in pairs], dim=-1)


def _as_rows(obs: Shaped[Tensor, "N *shape"]) -> Shaped[Tensor, "N V"]:
    """Each observation's numbers side by side; a single number is one as well."""
    return obs.unsqueeze(-1) if obs.dim() == 1 else obs.flatten(1)


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return height, width and channels of `[H, W, C]` images.

    `[C, H, W]` is recognized by its channels, which are fewer than both other axes.
    """
    a, b, c = shape
    return (b, c, a) if a < min(b, c) else (a, b, c)


def scaled_image(obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N C H W"]:
    """Bytes of either layout to floats in [0, 1], channels_last in memory."""
    x = obs if obs.shape[1] < min(obs.shape[2:]) else obs.permute(0, 3, 1, 2)
    # A `permute` view of NHWC bytes is channels_last already: this is one pass from bytes to
    # floats.
    floats = x.to(torch.float32, memory_format=torch.channels_last)
    return floats.div_(255) if obs.dtype == torch.uint8 else floats


def _to_channels_last(module: nn.Module) -> None:
    """Lay convolution weights out as the images are, so that no call has to."""
    for parameter in module.parameters():
        if parameter.ndim == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def _conv(num_inputs: int, num_outputs: int) -> nn.Conv2d:
    """A 3×3 convolution that keeps the size."""
    return nn.Conv2d(num_inputs, num_outputs, kernel_size=3, padding=1)
