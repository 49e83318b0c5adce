"""Encoders: stored observations `[N, …]` to features `[N, D]`. Kind: state (modules).

Images are stored as the environment returns them, `[N, H, W, C]` uint8. Inside the encoder,
`permute` makes them channels_last without a copy, the fastest layout for convolutions.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from gymnasium.spaces.utils import flatdim
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ModelConfig, ObsNormConfig, Precision
from phasicrl.distributed import SINGLE_PROCESS, World
from phasicrl.models.init import Initializer
from phasicrl.normalize import ObservationNormalizer
from phasicrl.spaces import ObservationLayout, get_nvec, get_part, is_image, leaves

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "elu": nn.ELU}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which encoders run in this precision."""
    if precision == "fp32":
        return nullcontext()
    # Without cache, because a CUDA graph would keep using old weights.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class ResidualBlock(nn.Module):
    """Residual block `x + conv(relu(conv(relu(x))))` of 3×3 convolutions (Espeholt et al. 2018)."""

    def __init__(self, channels: int, init: Initializer, normalized_scale: float) -> None:
        super().__init__()
        self.conv0 = init.fill_hidden(nn.Conv2d(channels, channels, 3, padding=1), normalized_scale)
        self.conv1 = init.fill_hidden(nn.Conv2d(channels, channels, 3, padding=1), normalized_scale)

    def forward(self, x: Float[Tensor, "N C H W"]) -> Float[Tensor, "N C H W"]:
        """Apply the block to images `[N, C, H, W]`."""
        return x + self.conv1(functional.relu(self.conv0(functional.relu(x))))


class ImpalaCNN(nn.Module):
    """IMPALA network (Espeholt et al. 2018, figure 3; OPPG impala_cnn.py).

    Stacks of a convolution, a max-pool and residual blocks are followed by dense layers. With
    64×64×3 images, channels (16, 32, 32), two blocks and 256 features it has 622,144 parameters.

    Raises:
        ValueError: the image is too small for the number of stacks.
    """

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        init = Initializer(config.init, generator)
        self.channels_first = has_channels_first(shape, config.image_layout)
        height, width, in_channels = (*shape[1:], shape[0]) if self.channels_first else shape
        self.reading = f"{in_channels} channels of {height}×{width}"
        # OPPG impala_cnn.py:63-65, 131: residual scale sqrt(1/sqrt(stacks) / sqrt(blocks)); 1.0 for
        # the first convolution of a stack.
        residual = (len(config.channels) * max(config.blocks, 1)) ** -0.25
        stacks = []
        for channels in config.channels:
            if min(height, width) < 2:
                given = f"model.channels is {config.channels}, and images are {shape}"
                raise ValueError(f"{given}; expected fewer stacks, each of which halves the image")
            first = init.fill_hidden(nn.Conv2d(in_channels, channels, 3, padding=1), 1.0)
            # 3×3 windows with stride 2: H×W becomes ⌈H/2⌉×⌈W/2⌉. `symmetric` pads both sides;
            # TensorFlow's `same` pads an even size at its end only.
            is_same = config.pooling == "same"
            pool = nn.MaxPool2d(3, 2, (height % 2, width % 2) if is_same else 1, ceil_mode=is_same)
            blocks = [ResidualBlock(channels, init, residual) for _ in range(config.blocks)]
            stacks.append(nn.Sequential(first, pool, *blocks))
            height, width, in_channels = (height + 1) // 2, (width + 1) // 2, channels
        self.stacks = nn.Sequential(*stacks)
        self.dense = DenseLayers(height * width * in_channels, config, init, "relu")
        self.num_features = self.dense.num_features
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode images `[N, H, W, C]` or `[N, C, H, W]` as features `[N, D]`."""
        x = functional.relu(self.stacks(scale_image(obs, self.channels_first)))
        return self.dense(x.flatten(1))


class NatureCNN(nn.Module):
    """Network of Mnih et al. 2015: convolutions 32×8/4, 64×4/2, 64×3/1, then dense layers.

    Raises:
        ValueError: the image is smaller than 36×36.
    """

    def __init__(self, shape: tuple[int, ...], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        init = Initializer(config.init, generator)
        self.channels_first = has_channels_first(shape, config.image_layout)
        height, width, in_channels = (*shape[1:], shape[0]) if self.channels_first else shape
        self.reading = f"{in_channels} channels of {height}×{width}"
        if min(height, width) < 36:
            given = f"model.encoder is nature, and images are {height}×{width}"
            raise ValueError(f"{given}; expected at least 36×36. Use model.encoder impala")
        layers: list[nn.Module] = []
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv2d(in_channels, channels, kernel, stride)
            layers += [init.fill_hidden(conv, 1.0), nn.ReLU()]
            height, width = ((side - kernel) // stride + 1 for side in (height, width))
            in_channels = channels
        self.convolutions = nn.Sequential(*layers)
        self.dense = DenseLayers(height * width * in_channels, config, init, "relu")
        self.num_features = self.dense.num_features
        self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, obs: Shaped[Tensor, "N *shape"]) -> Float[Tensor, "N D"]:
        """Encode images `[N, H, W, C]` or `[N, C, H, W]` as features `[N, D]`."""
        return self.dense(self.convolutions(scale_image(obs, self.channels_first)).flatten(1))


class DenseLayers(nn.Module):
    """Dense layers, each followed by an optional LayerNorm and a non-linearity."""

    def __init__(self, width: int, config: ModelConfig, init: Initializer, activation: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in config.hidden_sizes:
            layers.append(init.fill_hidden(nn.Linear(width, size), 1.4))
            if config.layer_norm:
                layers.append(nn.LayerNorm(size))
            layers.append(ACTIVATIONS[activation]())
            width = size
        self.layers, self.num_features = nn.Sequential(*layers), width

    def forward(self, x: Float[Tensor, "N I"]) -> Float[Tensor, "N D"]:
        """Apply the layers in order to vectors `[N, I]`."""
        return self.layers(x)


CNNS = {"impala": ImpalaCNN, "nature": NatureCNN}


class CombinedEncoder(nn.Module):
    """Encoder of vectors, and of observations with several parts.

    Each image has its network; all other parts are concatenated, discrete ones as one-hot vectors,
    and share dense layers. The features of all are concatenated.

    Raises:
        ValueError: `model.encoder` is for images, and there are none; or it is `mlp`, and there are
            images.
    """

    def __init__(self, space: gym.Space[Any], config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        images = [(path, part) for path, part in leaves(space) if is_image(part)]
        self.image_paths = [path for path, _ in images]
        self.non_image_parts = [(path, part) for path, part in leaves(space) if not is_image(part)]
        if (config.encoder == "mlp") == bool(images):
            given = f"model.encoder is {config.encoder}, and observation_space is {space}"
            rule = "impala or nature for images (uint8, three axes), mlp where there are none"
            raise ValueError(f"{given}; expected {rule}")
        init = Initializer(config.init, generator)
        cnns = [CNNS[config.encoder](tuple(x.shape or ()), config, generator) for _, x in images]
        self.images = nn.ModuleList(cnns)
        width = sum(flatdim(part) for _, part in self.non_image_parts)
        self.dense = DenseLayers(width, config, init, config.activation) if width else None
        networks = [*cnns, self.dense] if self.dense else cnns
        self.num_features = sum(network.num_features for network in networks)

    def forward(self, obs: Any) -> Float[Tensor, "N D"]:
        """Encode a dict or tuple of tensors `[N, …]`, or one tensor, as features `[N, D]`."""
        pairs = zip(self.images, self.image_paths, strict=True)
        features = [cnn(get_part(obs, path)) for cnn, path in pairs]
        if self.dense is not None:
            numbers = [to_vector(get_part(obs, path), part) for path, part in self.non_image_parts]
            features.append(self.dense(_concatenate(numbers)))
        return _concatenate(features)


class ObservationReader(nn.Module):
    """Conversion of stored observations to the inputs of encoders.

    Rows of bytes become dicts and tuples of tensors; numbers are normalized if `obs_norm` is on.

    Raises:
        ValueError: `obs_norm` is on, and the observations have no numbers.
    """

    def __init__(self, space: gym.Space[Any], norm: ObsNormConfig) -> None:
        super().__init__()
        self.layout = ObservationLayout(space)
        all_boxes = [(path, box) for path, box in leaves(space) if isinstance(box, gym.spaces.Box)]
        self.boxes = [(path, box) for path, box in all_boxes if not is_image(box)]
        self.normalizer: ObservationNormalizer | None = None
        if norm.statistics != "none":
            size = sum(flatdim(part) for _, part in self.boxes)
            if not size:
                given = f"obs_norm.statistics is {norm.statistics}, observation_space is {space}"
                raise ValueError(f"{given}; expected none for observations without vectors")
            self.normalizer = ObservationNormalizer(
                size, statistics=norm.statistics, decay=norm.decay, clip=norm.clip
            )

    def forward(self, stored: Shaped[Tensor, "N *shape"]) -> Any:
        """Unpack and normalize observations: a tensor, or a dict or tuple of tensors, `[N, …]`."""
        return self.normalize(self.layout.unpack(stored))

    def normalize(self, obs: Any) -> Any:
        """Normalize observations in the structure of their space, `[N, …]`."""
        if self.normalizer is None:
            return obs
        numbers = self.normalizer(self._cat_boxes(obs))
        if not self.layout.is_tree:
            return numbers.reshape(obs.shape)
        widths = [flatdim(part) for _, part in self.boxes]
        pairs = zip(self.boxes, numbers.split(widths, -1), strict=True)
        values = {leaf.path: get_part(obs, leaf.path) for leaf in self.layout.leaves}
        values |= {path: x.reshape(x.shape[0], *part.shape) for (path, part), x in pairs}
        return self.layout.assemble(values)

    def update(self, stored: Shaped[Tensor, "B T *shape"], world: World = SINGLE_PROCESS) -> None:
        """Update the statistics, if any, with a rollout's observations of all processes."""
        if self.normalizer is not None:
            self.normalizer.update(self._cat_boxes(self.layout.unpack(stored.flatten(0, 1))), world)

    def clipped_fraction(self, stored: Shaped[Tensor, "N *shape"]) -> float:
        """Return the fraction of normalized numbers at ± clip; 0 before the first `update`."""
        norm = self.normalizer
        assert norm is not None, "no observations are normalized"
        numbers = norm(self._cat_boxes(self.layout.unpack(stored)))
        return float(((numbers <= norm.low) | (numbers >= norm.high)).float().mean())

    def _cat_boxes(self, obs: Any) -> Float[Tensor, "N V"]:
        """Concatenate the parts of observations that are normalized, `[N, V]`."""
        return _concatenate([to_vector(get_part(obs, path), box) for path, box in self.boxes])


def build_encoder(space: gym.Space[Any], config: ModelConfig, generator: Generator) -> nn.Module:
    """Make the encoder that `config.encoder` names, for an observation space.

    It is `mlp` if `config.policy_obs` selects parts without images.
    """
    if config.policy_obs is not None and not any(is_image(part) for _, part in leaves(space)):
        config = replace(config, encoder="mlp")
    if isinstance(space, gym.spaces.Box) and len(space.shape) == 3 and config.encoder != "mlp":
        return CNNS[config.encoder](space.shape, config, generator)
    return CombinedEncoder(space, config, generator)


def check_image_scale(space: gym.Space[Any], encoder: str, obs: Any = None) -> None:
    """Check that images that are not divided by 255, as those of uint8 are, are at most 100.

    Such are arrays of three axes of another dtype, and of two axes of uint8.

    Args:
        space: observation space.
        encoder: `model.encoder`; `mlp`: with one long axis alone, of 8 and more, it is no image.
        obs: observations to check instead of the bounds of `space`; None: the bounds.

    Raises:
        ValueError: such an image has numbers above 100.
    """
    for path, part in leaves(space):
        num_axes = 2 if part.dtype == "uint8" else 3
        if not isinstance(part, gym.spaces.Box) or len(part.shape) != num_axes:
            continue
        if encoder == "mlp" and sorted(part.shape)[-2] < 8:
            continue
        high = float((part.high if obs is None else get_part(obs, path)).max())
        if high > 100 and (obs is not None or high < 2**16):
            given = f"observation_space has {part}, an image of {part.dtype} up to {high:g}"
            rule = "three axes of uint8, which is divided by 255, or at most 1"
            raise ValueError(f"{given}; expected {rule}. Or use obs_norm.statistics moments")


def to_vector(obs: Shaped[Tensor, "N *shape"], space: gym.Space[Any]) -> Float[Tensor, "N V"]:
    """Convert a part of N observations to vectors `[N, V]`, one-hot for discrete components."""
    rows = obs.unsqueeze(-1).flatten(1)  # scalars become rows of one number
    if not isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        return rows.float()
    pairs = zip(rows.unbind(-1), get_nvec(space), strict=True)
    return torch.cat([functional.one_hot(x.long(), width).float() for x, width in pairs], dim=-1)


def _concatenate(rows: list[Tensor]) -> Float[Tensor, "N V"]:
    """Concatenate the rows of several parts; those of one are returned without a copy."""
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


def has_channels_first(shape: tuple[int, ...], layout: str) -> bool:
    """Return whether images of a shape are read as channels, height, width.

    `auto` takes an axis for the channels if no other can be: one of 1 to 4, or a multiple of 3 or 4
    (stacked images), before or behind two axes that are longer, and at least 8.

    Args:
        shape: three axes of an image.
        layout: `model.image_layout`.

    Raises:
        ValueError: the layout is `auto`, and the shape does not tell it.
    """
    for first, channels, sides in ((True, shape[0], shape[1:]), (False, shape[2], shape[:2])):
        is_usual = channels <= 4 or channels % 3 == 0 or channels % 4 == 0
        if layout == "auto" and is_usual and min(sides) >= max(8, channels + 1):
            return first
    if layout == "auto":
        a, b, c = shape
        rule = f"channels_first ({a} channels, {b}×{c}) or channels_last ({c} channels, {a}×{b})"
        raise ValueError(f"model.image_layout is auto, and images are {shape}; expected {rule}")
    return layout == "channels_first"


def scale_image(obs: Shaped[Tensor, "N *shape"], channels_first: bool) -> Float[Tensor, "N C H W"]:
    """Convert images to floats `[N, C, H, W]`, channels_last in memory; divide bytes by 255."""
    x = obs if channels_first else obs.permute(0, 3, 1, 2)
    # A `permute` view of NHWC bytes is channels_last already, so that one pass converts it.
    floats = x.to(torch.float32, memory_format=torch.channels_last)
    return floats.div_(255) if obs.dtype == torch.uint8 else floats
