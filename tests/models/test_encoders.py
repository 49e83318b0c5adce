"""Encoders: sizes by hand, the IMPALA network against its formula, both image layouts, TensorFlow's
padding, refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from phasicrl.config import ModelConfig
from phasicrl.models.encoders import (
    ENCODERS,
    MLP,
    ImpalaCNN,
    NatureCNN,
    TreeEncoder,
    as_numbers,
    encoder_for,
    image_shape,
    num_numbers,
)

SMALL = ModelConfig(channels=(4, 6), blocks=2, hidden_sizes=(10,))


def impala(obs_shape: tuple[int, ...] = (16, 16, 3), config: ModelConfig = SMALL) -> ImpalaCNN:
    return ImpalaCNN(obs_shape, config, generator=Generator().manual_seed(0))


def images(number: int, *shape: int) -> Tensor:
    return torch.randint(
        0, 256, (number, *shape), dtype=torch.uint8, generator=Generator().manual_seed(1)
    )


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_impala_has_the_shapes_and_the_parameters_of_the_source() -> None:
    encoder = ImpalaCNN((64, 64, 3), ModelConfig(), generator=Generator().manual_seed(0))
    x, shapes = torch.zeros(2, 3, 64, 64), []
    for stack in encoder.stacks:
        x = stack(x)
        shapes.append(tuple(x.shape))
    assert shapes == [(2, 16, 32, 32), (2, 32, 16, 16), (2, 32, 8, 8)]
    (dense,) = [layer for layer in encoder.modules() if isinstance(layer, nn.Linear)]
    assert (dense.in_features, dense.out_features) == (2048, 256)
    assert num_parameters(encoder) == 622_144
    assert encoder.num_features == 256
    assert encoder(images(2, 64, 64, 3)).shape == (2, 256)


def test_width_and_depth_are_knobs() -> None:
    # 8×8×3 through one stack of 8 channels with one block: convolutions 3·8·9 + 8, then 2 (8·8·9 +
    # 8), dense 4·4·8·10 + 10.
    encoder = impala((8, 8, 3), ModelConfig(channels=(8,), blocks=1, hidden_sizes=(10,)))
    assert num_parameters(encoder) == 224 + 1168 + 1290
    without_blocks = impala((8, 8, 3), ModelConfig(channels=(8,), blocks=0, hidden_sizes=(10,)))
    assert num_parameters(without_blocks) == 224 + 1290
    two_dense = impala((8, 8, 3), ModelConfig(channels=(8,), blocks=1, hidden_sizes=(10, 7)))
    assert num_parameters(two_dense) == 224 + 1168 + 1290 + 77
    assert two_dense.num_features == 7
    assert without_blocks(images(2, 8, 8, 3)).shape == (2, 10)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (10, 7)])
def test_impala_computes_its_formula(height: int, width: int) -> None:
    encoder = impala((height, width, 3))
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


def pooled(image: Tensor, pooling: Any) -> list[list[float]]:
    """One max-pool, seen from outside.

    A stack with no blocks, whose convolution passes the image on, and no dense layer.
    """
    height, width = image.shape
    encoder = impala(
        (height, width, 1), ModelConfig(channels=(1,), blocks=0, pooling=pooling, hidden_sizes=())
    )
    (conv,) = [layer for layer in encoder.modules() if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        conv.weight.zero_()
        conv.weight[0, 0, 1, 1] = 1
        features = encoder(image[None, :, :, None])
    assert encoder.num_features == features.shape[1]
    return features.reshape(-1, (width + 1) // 2).tolist()


def falling(height: int, width: int) -> Tensor:
    """A image that is brightest at the upper left: 16 15 14 13 / 12 11 10 9 / …"""
    return torch.arange(height * width, 0, -1, dtype=torch.float32).reshape(height, width)


def test_symmetric_pooling_by_hand() -> None:
    # Rows and columns −1…1 and 1…3.
    assert pooled(falling(4, 4), "symmetric") == [[16, 15], [12, 11]]


def test_same_pooling_is_tensorflows_by_hand() -> None:
    # TensorFlow pads an even size by one at the end only: rows and columns 0…2 and 2…4.
    assert pooled(falling(4, 4), "same") == [[16, 14], [8, 6]]


def test_same_pooling_of_odd_sizes_is_tensorflows_by_hand() -> None:
    # TensorFlow pads an odd size by one on both sides: rows and columns −1…1, 1…3 and 3…5.
    assert pooled(falling(5, 5), "same") == [[25, 24, 22], [20, 19, 17], [10, 9, 7]]
    assert pooled(falling(5, 4), "same") == [[20, 18], [16, 14], [8, 6]]
    assert pooled(falling(4, 5), "same") == [[20, 19, 17], [10, 9, 7]]


@pytest.mark.parametrize("pooling", ["symmetric", "same"])
def test_images_of_84_pixels_fit_the_dense_layer(pooling: Any) -> None:
    encoder = impala(
        (84, 84, 1), ModelConfig(channels=(2, 2, 2), blocks=0, hidden_sizes=(5,), pooling=pooling)
    )
    assert encoder(images(1, 84, 84, 1)).shape == (1, 5)


@pytest.mark.parametrize(
    "make", [impala, lambda shape: NatureCNN(shape, SMALL, generator=Generator().manual_seed(0))]
)
def test_bytes_and_floats_in_both_layouts_give_the_same_features(
    make: Callable[[tuple[int, ...]], nn.Module],
) -> None:
    obs = images(3, 40, 36, 3)
    nchw = obs.permute(0, 3, 1, 2).contiguous()
    from_nhwc, from_nchw = make((40, 36, 3)), make((3, 40, 36))
    features = from_nhwc(obs)
    assert features.unique().numel() > 3
    for other in (from_nchw(nchw), from_nchw(nchw.float() / 255), from_nhwc(obs.float() / 255)):
        torch.testing.assert_close(other, features, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(36, 40, 3), (3, 36, 40)])
@pytest.mark.parametrize(
    "make", [impala, lambda shape: NatureCNN(shape, SMALL, generator=Generator().manual_seed(0))]
)
def test_every_convolution_gets_channels_last_and_has_its_weights_so(
    make: Callable[[tuple[int, ...]], nn.Module], shape: tuple[int, ...]
) -> None:
    """The layout in which they are fastest; another one is right too, and slower."""
    encoder, seen = make(shape), []

    def look(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.Conv2d)
        seen.append(
            [
                x.is_contiguous(memory_format=torch.channels_last)
                for x in (inputs[0], module.weight, output)
            ]
        )

    for module in encoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(look)
    encoder(torch.zeros(2, *shape, dtype=torch.uint8))
    assert len(seen) >= 3 and all(map(all, seen))


def test_encoding_leaves_the_observations_alone() -> None:
    # Floats in the layout of the convolutions need no copy; a division in place would then change
    # the rollout.
    for obs in (images(2, 16, 16, 3), torch.rand(2, 16, 16, 3), torch.rand(2, 3, 16, 16)):
        copy = obs.clone()
        impala(tuple(obs.shape[1:]))(obs)
        assert torch.equal(obs, copy)


def test_images_as_wide_as_high_are_told_apart_by_their_channels() -> None:
    assert image_shape((64, 64, 3)) == image_shape((3, 64, 64)) == (64, 64, 3)
    assert image_shape((84, 60, 4)) == image_shape((4, 84, 60)) == (84, 60, 4)


@pytest.mark.parametrize("kind", ENCODERS)
def test_features_do_not_depend_on_what_else_is_in_the_batch(kind: str) -> None:
    obs = (
        torch.randn(6, 20, generator=Generator().manual_seed(0))
        if kind == "mlp"
        else images(6, 40, 40, 3)
    )
    encoder = ENCODERS[kind](tuple(obs.shape[1:]), SMALL, generator=Generator().manual_seed(0))
    whole = encoder(obs)
    parts = torch.cat([encoder(part) for part in obs.split([1, 2, 3])])
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    assert (whole[0] != whole[1]).any()


@pytest.mark.parametrize(("size", "num_inputs"), [(84, 3136), (64, 1024), (36, 64)])
def test_nature_sizes(size: int, num_inputs: int) -> None:
    # 84 → 20 → 9 → 7, 64 → 15 → 6 → 4, 36 → 8 → 3 → 1, times 64 channels.
    encoder = NatureCNN(
        (size, size, 4),
        ModelConfig(encoder="nature", hidden_sizes=(5,)),
        generator=Generator().manual_seed(0),
    )
    assert num_parameters(encoder) == (4 * 32 * 64 + 32) + (32 * 64 * 16 + 64) + (
        64 * 64 * 9 + 64
    ) + (num_inputs * 5 + 5)
    assert encoder(images(2, size, size, 4)).shape == (2, 5)


def test_nature_computes_its_formula() -> None:
    encoder = NatureCNN((36, 40, 3), SMALL, generator=Generator().manual_seed(0))
    weights = [parameter.double() for parameter in encoder.parameters()]
    obs = images(2, 36, 40, 3)
    x = obs.permute(0, 3, 1, 2).double() / 255
    for index, stride in enumerate((4, 2, 1)):
        x = functional.conv2d(x, weights[2 * index], weights[2 * index + 1], stride=stride).relu()
    torch.testing.assert_close(
        encoder(obs), (x.flatten(1) @ weights[6].T).relu().float(), rtol=1e-4, atol=1e-5
    )


def make_mlp(num_inputs: int, **settings: Any) -> MLP:
    return MLP(
        (num_inputs,), ModelConfig(encoder="mlp", **settings), generator=Generator().manual_seed(0)
    )


@pytest.mark.parametrize("activation", ["relu", "tanh", "gelu"])
def test_mlp_computes_its_formula(activation: Any) -> None:
    mlp = make_mlp(4, hidden_sizes=(8, 5), activation=activation)
    obs = torch.randn(3, 4, dtype=torch.float64, generator=Generator().manual_seed(0))
    first, second = (layer for layer in mlp.modules() if isinstance(layer, nn.Linear))
    function: Callable[[Tensor], Tensor] = getattr(
        functional if activation == "gelu" else torch, activation
    )
    torch.testing.assert_close(mlp(obs), function(second(function(first(obs.float())))))
    assert mlp.num_features == 5


def test_an_mlp_flattens_and_may_have_no_layers() -> None:
    mlp = MLP(
        (2, 3), ModelConfig(encoder="mlp", hidden_sizes=()), generator=Generator().manual_seed(0)
    )
    assert mlp(torch.arange(12).reshape(2, 2, 3)).tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]
    assert mlp.num_features == 6


def test_layer_norm_stands_between_each_dense_layer_and_its_activation() -> None:
    mlp = make_mlp(4, hidden_sizes=(64, 32), activation="tanh", layer_norm=True)
    assert sum(isinstance(layer, nn.LayerNorm) for layer in mlp.modules()) == 2
    before_tanh = mlp(torch.randn(3, 4, generator=Generator().manual_seed(0))).double().atanh()
    torch.testing.assert_close(
        before_tanh.mean(1), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        before_tanh.var(1, correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-3, atol=0
    )
    assert not any(isinstance(layer, nn.LayerNorm) for layer in make_mlp(4).modules())
    assert (
        sum(
            isinstance(layer, nn.LayerNorm)
            for layer in impala(config=ModelConfig(layer_norm=True)).modules()
        )
        == 1
    )


def test_images_that_are_too_small_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"halves the \(4, 4, 3\) image too often; give fewer stacks"
    ):
        impala((4, 4, 3), ModelConfig(channels=(4, 4, 4)))
    assert impala((4, 4, 3), ModelConfig(channels=(4, 4))).num_features == 256
    with pytest.raises(
        ValueError, match=r"at least 36×36, these are 35×40; use --model\.encoder impala"
    ):
        NatureCNN((35, 40, 3), SMALL, generator=Generator())


@pytest.mark.parametrize("encoder", [ImpalaCNN, NatureCNN])
@pytest.mark.parametrize("shape", [(4,), (64, 64)])
def test_image_encoders_refuse_vectors_and_say_what_to_use(
    encoder: type[ImpalaCNN] | type[NatureCNN], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"are not images; use --model\.encoder mlp"):
        encoder(shape, SMALL, generator=Generator())


def test_dense_layers_alone_refuse_images_and_say_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"are images; use --model\.encoder impala or nature"):
        MLP((64, 64, 3), SMALL, generator=Generator())


PICTURE, OTHER = (
    gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
    gym.spaces.Box(0, 255, (8, 12, 1), np.uint8),
)
NUMBERS = gym.spaces.Box(-1, 1, (2, 2), np.float32)


def test_members_of_finite_sets_become_one_hot_vectors() -> None:
    assert as_numbers(torch.tensor([2, 0]), gym.spaces.Discrete(3)).tolist() == [
        [0, 0, 1],
        [1, 0, 0],
    ]
    two = gym.spaces.MultiDiscrete([2, 3])
    assert as_numbers(torch.tensor([[1, 0], [0, 2]]), two).tolist() == [
        [0, 1, 1, 0, 0],
        [1, 0, 0, 0, 1],
    ]
    assert as_numbers(
        torch.tensor([[1, 0, 1]], dtype=torch.uint8), gym.spaces.MultiBinary(3)
    ).tolist() == [[1, 0, 1]]
    assert as_numbers(torch.arange(8.0).view(2, 2, 2), NUMBERS).tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert [
        num_numbers(space)
        for space in (gym.spaces.Discrete(3), two, gym.spaces.MultiBinary(3), NUMBERS)
    ] == [3, 5, 3, 4]


def test_a_tree_of_images_and_numbers_is_encoded_part_by_part() -> None:
    space = gym.spaces.Dict(
        {"a": gym.spaces.Tuple((PICTURE, gym.spaces.Discrete(3))), "b": OTHER, "c": NUMBERS}
    )
    config = ModelConfig(channels=(4,), blocks=1, hidden_sizes=(7,), activation="tanh")
    encoder = encoder_for(space, config, generator=Generator().manual_seed(0))
    assert isinstance(encoder, TreeEncoder)
    generator = Generator().manual_seed(1)
    images = [
        torch.randint(0, 256, (5, *part.shape), dtype=torch.uint8, generator=generator)
        for part in (PICTURE, OTHER)
    ]
    kind, numbers = (
        torch.randint(0, 3, (5,), generator=generator),
        torch.randn(5, 2, 2, generator=generator),
    )
    features = encoder({"a": (images[0], kind), "b": images[1], "c": numbers})
    assert features.shape == (5, encoder.num_features) and encoder.num_features == 3 * 7
    for index in range(2):
        torch.testing.assert_close(
            features[:, 7 * index : 7 * index + 7], encoder.images[index](images[index])
        )
    linear = encoder.dense.layers[0]  # type: ignore[union-attr]
    expected = torch.tanh(
        linear(torch.cat([functional.one_hot(kind, 3).float(), numbers.flatten(1)], dim=1))
    )  # type: ignore[operator]
    torch.testing.assert_close(features[:, 14:], expected)


@pytest.mark.parametrize(
    "space", [gym.spaces.Discrete(4), gym.spaces.MultiBinary(3), gym.spaces.MultiDiscrete([2, 3])]
)
def test_finite_sets_alone_go_through_dense_layers(space: gym.Space[Any]) -> None:
    encoder = encoder_for(
        space, ModelConfig(encoder="mlp", hidden_sizes=(5,)), generator=Generator().manual_seed(0)
    )
    obs = torch.from_numpy(np.stack([np.asarray(space.sample()) for _ in range(6)]))
    assert encoder(obs).shape == (6, 5)


@pytest.mark.parametrize(("part", "encoder"), [(PICTURE, "mlp"), (NUMBERS, "impala")])
def test_a_tree_refuses_an_encoder_that_fits_none_of_it(part: gym.Space[Any], encoder: Any) -> None:
    with pytest.raises(ValueError, match="use impala or nature if images are among them, else mlp"):
        encoder_for(
            gym.spaces.Dict({"x": part}), ModelConfig(encoder=encoder), generator=Generator()
        )
