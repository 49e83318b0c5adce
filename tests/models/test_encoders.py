"""Encoders: sizes by hand, networks against their formulas, both image layouts, refusals."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ModelConfig
from phasicrl.models import encoders
from phasicrl.models.encoders import ImpalaCNN, NatureCNN, build_encoder
from tests.models.test_init import layers_of

SMALL = {"channels": (4, 6), "blocks": 2, "hidden_sizes": (10,)}


def make(kind: type[Any], shape: tuple[int, ...], **model: Any) -> Any:
    return kind(shape, ModelConfig(**{**SMALL, **model}), generator=Generator().manual_seed(0))


def impala(*shape: int, **model: Any) -> ImpalaCNN:
    return make(ImpalaCNN, shape, **model)


def dense(*shape: int, **model: Any) -> Any:
    config = ModelConfig(encoder="mlp", **model)
    space = gym.spaces.Box(-np.inf, np.inf, shape, np.float32)
    return build_encoder(space, config, generator=Generator().manual_seed(0))


def images(number: int, *shape: int) -> Tensor:
    generator = Generator().manual_seed(1)
    return torch.randint(0, 256, (number, *shape), dtype=torch.uint8, generator=generator)


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_impala_has_the_shapes_and_the_parameters_of_the_source() -> None:
    encoder = ImpalaCNN((64, 64, 3), ModelConfig(), generator=Generator().manual_seed(0))
    x, shapes = torch.zeros(2, 3, 64, 64), []
    for stack in encoder.stacks:
        x = stack(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 32, 8, 8)]
    (dense,) = layers_of(encoder, nn.Linear)
    assert (dense.in_features, dense.out_features) == (2048, 256)
    assert num_parameters(encoder) == 622_144
    assert encoder(images(2, 64, 64, 3)).shape == (2, 256) == (2, encoder.num_features)


@pytest.mark.parametrize(
    ("blocks", "hidden_sizes", "expected"),
    [(1, (10,), 224 + 1168 + 1290), (0, (10,), 224 + 1290), (1, (10, 7), 224 + 1168 + 1290 + 77)],
)
def test_width_and_depth(blocks: int, hidden_sizes: tuple[int, ...], expected: int) -> None:
    # 8×8×3 through one stack of 8 channels: convolutions 3·8·9 + 8, then in a block 2 (8·8·9 + 8),
    # dense 4·4·8·10 + 10 and 10·7 + 7.
    encoder = impala(8, 8, 3, channels=(8,), blocks=blocks, hidden_sizes=hidden_sizes)
    assert num_parameters(encoder) == expected
    assert encoder(images(2, 8, 8, 3)).shape == (2, encoder.num_features) == (2, hidden_sizes[-1])


@pytest.mark.parametrize(("height", "width"), [(16, 16), (10, 7)])
def test_impala_computes_its_formula(height: int, width: int) -> None:
    # The activation is that of the encoder `mlp`.
    encoder = impala(height, width, 3, image_layout="channels_last", activation="tanh")
    for parameter in encoder.parameters():  # biases too, which start at zero
        nn.init.normal_(parameter, std=0.3, generator=Generator().manual_seed(parameter.numel()))
    weights = [parameter.double() for parameter in encoder.parameters()]
    obs = images(3, height, width, 3)

    def conv(x: Tensor, index: int) -> Tensor:
        return functional.conv2d(x, weights[2 * index], weights[2 * index + 1], padding=1)

    # OPPG impala_cnn.py: convolution, max-pool, then x + conv(relu(conv(relu(x)))) twice, in each
    # stack; relu, dense, relu.
    x = obs.permute(0, 3, 1, 2).double() / 255
    for stack in range(2):
        x = functional.max_pool2d(conv(x, 5 * stack), kernel_size=3, stride=2, padding=1)
        for block in range(2):
            index = 5 * stack + 1 + 2 * block
            x = x + conv(conv(x.relu(), index).relu(), index + 1)
    expected = (x.relu().flatten(1) @ weights[-2].T + weights[-1]).relu()
    assert (x < 0).any()  # the ReLU before the dense layer matters
    torch.testing.assert_close(encoder(obs), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("height", "width", "pooling", "expected"), [
    # Rows and columns −1…1 and 1…3.
    (4, 4, "symmetric", [[16, 15], [12, 11]]),
    # TensorFlow pads an even size by one at the end only: rows and columns 0…2 and 2…4,
    (4, 4, "same", [[16, 14], [8, 6]]),
    # and an odd size by one on both sides: rows and columns −1…1, 1…3 and 3…5.
    (5, 5, "same", [[25, 24, 22], [20, 19, 17], [10, 9, 7]]),
    (5, 4, "same", [[20, 18], [16, 14], [8, 6]]),
    (4, 5, "same", [[20, 19, 17], [10, 9, 7]]),
])  # fmt: skip
def test_pooling_by_hand(height: int, width: int, pooling: str, expected: list[list[int]]) -> None:
    """A stack of no blocks, whose convolution passes on an image that is brightest upper left."""
    shape = (height, width, 1)
    encoder = impala(
        *shape, image_layout="channels_last", channels=(1,), blocks=0, pooling=pooling,
        hidden_sizes=(),
    )  # fmt: skip
    (conv,) = layers_of(encoder, nn.Conv2d)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(9)[4].view(1, 1, 3, 3))
    features = encoder(torch.arange(height * width, 0, -1, dtype=torch.float32).reshape(1, *shape))
    assert features.view(len(expected), -1).tolist() == expected
    assert encoder.num_features == features.shape[1]


@pytest.mark.parametrize("kind", [ImpalaCNN, NatureCNN])
def test_bytes_and_floats_in_both_layouts_give_the_same_features(kind: type[Any]) -> None:
    obs = images(3, 40, 36, 3)
    nchw = obs.permute(0, 3, 1, 2).contiguous()
    from_nhwc, from_nchw = make(kind, (40, 36, 3)), make(kind, (3, 40, 36))
    features = from_nhwc(obs)
    assert features.unique().numel() > 3
    for other in (from_nchw(nchw), from_nchw(nchw.float() / 255), from_nhwc(obs.float() / 255)):
        torch.testing.assert_close(other, features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(36, 40, 3), (3, 36, 40)])
@pytest.mark.parametrize("kind", [ImpalaCNN, NatureCNN])
def test_convolutions_and_weights_are_channels_last(kind: type[Any], shape: Any) -> None:
    """The layout in which they are fastest; another one is right too, and slower."""
    encoder, seen, last = make(kind, shape), [], {"memory_format": torch.channels_last}

    def look(module: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.extend(x.is_contiguous(**last) for x in (inputs[0], module.weight, output))

    for convolution in layers_of(encoder, nn.Conv2d):
        convolution.register_forward_hook(look)
    encoder(torch.zeros(2, *shape, dtype=torch.uint8))
    assert len(seen) >= 9 and all(seen)


def test_encoding_leaves_the_observations_alone() -> None:
    # Floats in the layout of the convolutions need no copy; a division in place would then change
    # the rollout.
    for obs in (images(2, 16, 16, 3), torch.rand(2, 16, 16, 3), torch.rand(2, 3, 16, 16)):
        copy = obs.clone()
        impala(*obs.shape[1:])(obs)
        assert torch.equal(obs, copy)


@pytest.mark.parametrize(("shape", "channels"), [
    ((64, 64, 3), 3), ((3, 64, 64), 3), ((84, 60, 4), 4), ((4, 84, 60), 4), ((84, 84, 1), 1),
    ((9, 84, 84), 9), ((84, 84, 16), 16), ((2, 8, 9), 2),
])  # fmt: skip
def test_layouts_are_distinguished_by_their_channels(shape: Any, channels: int) -> None:
    encoder: Any = impala(*shape)
    assert encoder.stacks[0][0].in_channels == channels
    assert encoder(images(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("shape", [(17, 8, 8), (8, 8, 8), (12, 10, 10), (7, 7, 3), (8, 8, 17)])
def test_layouts_in_doubt_are_asked_for(shape: Any) -> None:
    first, last = f"{shape[0]} channels", f"{shape[2]} channels"
    with pytest.raises(ValueError, match=f"image_layout .*{first}.*{last}"):
        impala(*shape)
    obs = images(2, *shape)
    by_first = impala(*shape, image_layout="channels_first")
    by_last = impala(*obs.permute(0, 2, 3, 1).shape[1:], image_layout="channels_last")
    torch.testing.assert_close(by_first(obs), by_last(obs.permute(0, 2, 3, 1)))
    against_the_guess: Any = impala(4, 20, 12, image_layout="channels_last")
    assert against_the_guess.stacks[0][0].in_channels == 12


@pytest.mark.parametrize(("size", "num_inputs"), [(84, 3136), (64, 1024), (36, 64)])
def test_nature_sizes(size: int, num_inputs: int) -> None:
    # 84 → 20 → 9 → 7, 64 → 15 → 6 → 4, 36 → 8 → 3 → 1, times 64 channels.
    encoder = make(NatureCNN, (size, size, 4), hidden_sizes=(5,))
    convolutions = (4 * 32 * 64 + 32) + (32 * 64 * 16 + 64) + (64 * 64 * 9 + 64)
    assert num_parameters(encoder) == convolutions + num_inputs * 5 + 5
    assert encoder(images(2, size, size, 4)).shape == (2, 5)


def test_nature_computes_its_formula() -> None:
    encoder, obs = make(NatureCNN, (36, 40, 3), activation="tanh"), images(2, 36, 40, 3)
    weights = [parameter.double() for parameter in encoder.parameters()]
    x = obs.permute(0, 3, 1, 2).double() / 255
    for index, stride in enumerate((4, 2, 1)):
        x = functional.conv2d(x, weights[2 * index], weights[2 * index + 1], stride=stride).relu()
    expected = (x.flatten(1) @ weights[6].T).relu().float()
    torch.testing.assert_close(encoder(obs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu", "elu"])
def test_mlp_computes_its_formula(activation: str) -> None:
    mlp = dense(4, hidden_sizes=(8, 5), activation=activation)
    obs = torch.randn(3, 4, dtype=torch.float64, generator=Generator().manual_seed(0))
    first, second = layers_of(mlp, nn.Linear)
    function: Callable[[Tensor], Tensor] = getattr(functional, activation)
    torch.testing.assert_close(mlp(obs), function(second(function(first(obs.float())))))
    assert mlp.num_features == 5


def test_an_mlp_flattens_and_may_have_no_layers() -> None:
    mlp, obs = dense(2, 3, hidden_sizes=()), torch.arange(12).reshape(2, 2, 3)
    assert mlp(obs).tolist() == obs.flatten(1).tolist() and mlp.num_features == 6


def test_layer_norm_stands_between_each_dense_layer_and_its_activation() -> None:
    mlp = dense(4, hidden_sizes=(64, 32), activation="tanh", layer_norm=True)
    before_tanh = mlp(torch.randn(3, 4, generator=Generator().manual_seed(0))).double().atanh()
    zeros = torch.zeros(3, dtype=torch.float64)
    torch.testing.assert_close(before_tanh.mean(1), zeros, rtol=0, atol=1e-4)
    torch.testing.assert_close(before_tanh.var(1, correction=0), zeros + 1, rtol=1e-3, atol=0)
    networks = mlp, dense(4), impala(16, 16, 3, layer_norm=True)
    assert [len(layers_of(each, nn.LayerNorm)) for each in networks] == [2, 0, 1]


@pytest.mark.parametrize(
    ("kind", "shape", "match"),
    [(ImpalaCNN, (8, 8, 3), "fewer stacks"), (NatureCNN, (35, 40, 3), "model.encoder impala")],
)
def test_unfit_observations_are_refused(kind: type[Any], shape: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(kind, shape, channels=(4,) * 4)
    assert impala(8, 8, 3, channels=(4,) * 3).num_features == 10  # the smallest that fits


PICTURE = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
OTHER = gym.spaces.Box(0, 255, (8, 12, 1), np.uint8)
NUMBERS = gym.spaces.Box(-1, 1, (2, 2), np.float32)


@pytest.mark.parametrize(("space", "obs", "expected"), [
    (gym.spaces.Discrete(3), [2, 0], [[0, 0, 1], [1, 0, 0]]),
    (gym.spaces.MultiDiscrete([2, 3]), [[1, 0], [0, 2]], [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]),
    (gym.spaces.MultiBinary(3), [[1, 0, 1]], [[1, 0, 1]]),
    (NUMBERS, [[[0.0, 1], [2, 3]]], [[0, 1, 2, 3]]),
])  # fmt: skip
def test_finite_sets_become_one_hot(
    space: gym.Space[Any], obs: list[Any], expected: list[Any]
) -> None:
    assert encoders.to_vector(torch.tensor(obs), space).tolist() == expected
    if space is not NUMBERS:
        config = ModelConfig(encoder="mlp", hidden_sizes=(5,))
        encoder = build_encoder(space, config, generator=Generator().manual_seed(0))
        assert encoder(torch.tensor(obs)).shape == (len(obs), 5)


def test_a_tree_of_images_and_numbers_is_encoded_part_by_part() -> None:
    eye = gym.spaces.Tuple((PICTURE, gym.spaces.Discrete(3)))
    space = gym.spaces.Dict({"a": eye, "b": OTHER, "c": NUMBERS})
    config = ModelConfig(channels=(4,), blocks=1, hidden_sizes=(7,), activation="tanh")
    encoder: Any = build_encoder(space, config, generator=Generator().manual_seed(0))
    assert type(encoder).__name__ == "CombinedEncoder"
    generator, seen = Generator().manual_seed(1), [images(5, *PICTURE.shape), images(5, 8, 12, 1)]
    kind = torch.randint(0, 3, (5,), generator=generator)
    numbers = torch.randn(5, 2, 2, generator=generator)
    features = encoder({"a": (seen[0], kind), "b": seen[1], "c": numbers})
    assert features.shape == (5, encoder.num_features) and encoder.num_features == 3 * 7
    rows = torch.cat([functional.one_hot(kind, 3).float(), numbers.flatten(1)], dim=1)
    expected = [cnn(obs) for cnn, obs in zip(encoder.images, seen, strict=True)]
    expected.append(torch.tanh(encoder.dense.layers[0](rows)))
    torch.testing.assert_close(features, torch.cat(expected, dim=1))


@pytest.mark.parametrize(
    ("part", "encoder"), [(PICTURE, "mlp"), (NUMBERS, "impala"), (NUMBERS, "nature")]
)
def test_an_encoder_that_fits_no_observation_is_refused(part: gym.Space[Any], encoder: Any) -> None:
    for space in (part, gym.spaces.Dict({"x": part})):
        with pytest.raises(ValueError, match="expected impala or nature"):
            build_encoder(space, ModelConfig(encoder=encoder), generator=Generator())
