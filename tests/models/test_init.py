"""Initial weights: norms, orthogonality and bounds; they follow from the generator alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl.config import Initialization, ModelConfig
from phasicrl.models.agent import Agent
from phasicrl.models.encoders import ImpalaCNN, NatureCNN
from phasicrl.models.init import Initializer

SCHEMES: tuple[Initialization, ...] = get_args(Initialization)
LAYERS = {"dense": lambda: nn.Linear(40, 12), "convolution": lambda: nn.Conv2d(5, 12, 3)}


def initialized(
    layer: nn.Linear | nn.Conv2d, scheme: Initialization, *, scale: float = 1.0, seed: int = 0
) -> nn.Linear | nn.Conv2d:
    return Initializer(scheme, Generator().manual_seed(seed))(layer, scale)


def unit_norms(weight: Tensor) -> Tensor:
    """L2 norm of each output unit's weights, in float64."""
    return weight.detach().double().flatten(1).norm(dim=1)


def assert_all_norms(weight: Tensor, expected: float) -> None:
    assert (unit_norms(weight) - expected).abs().max().item() < 1e-6


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]


def dense_layers(module: nn.Module) -> list[nn.Linear]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Linear)]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("scale", [0.1, 1.4])
def test_normalized_gives_every_output_unit_the_norm_of_the_scale(kind: str, scale: float) -> None:
    layer = initialized(LAYERS[kind](), "normalized", scale=scale)
    assert_all_norms(layer.weight, scale)
    weights = layer.weight.detach().flatten(1)
    # Drawn one by one, not one vector for all units.
    assert weights.unique().numel() == weights.numel()


def test_normalized_impala_has_the_norms_of_the_source() -> None:
    encoder = ImpalaCNN((64, 64, 3), ModelConfig(), generator=Generator().manual_seed(0))
    layers = convolutions(encoder)
    assert len(layers) == 15
    for number, layer in enumerate(layers):
        # Three stacks: a first convolution of norm 1, then two blocks of two with √(1/√3 / √2).
        assert_all_norms(
            layer.weight, 1.0 if number % 5 == 0 else math.sqrt(1 / math.sqrt(3) / math.sqrt(2))
        )
    assert unit_norms(layers[1].weight).mean().item() == pytest.approx(0.63894, abs=1e-5)
    (dense,) = dense_layers(encoder)
    assert_all_norms(dense.weight, 1.4)
    assert all(
        not layer.bias.any()
        for layer in (*dense_layers(encoder), *layers)
        if layer.bias is not None
    )


@pytest.mark.parametrize(
    ("channels", "blocks", "scale"),
    [((8, 8), 2, 4**-0.25), ((8,), 1, 1.0), ((4, 4, 4), 3, 9**-0.25)],
)
def test_the_scale_of_residual_convolutions_follows_depth(
    channels: tuple[int, ...], blocks: int, scale: float
) -> None:
    encoder = ImpalaCNN(
        (16, 16, 3),
        ModelConfig(channels=channels, blocks=blocks),
        generator=Generator().manual_seed(0),
    )
    for number, layer in enumerate(convolutions(encoder)):
        assert_all_norms(layer.weight, 1.0 if number % (1 + 2 * blocks) == 0 else scale)


def test_normalized_nature_has_convolutions_of_one_and_dense_layers_of_1_4() -> None:
    encoder = NatureCNN(
        (64, 64, 3), ModelConfig(hidden_sizes=(32, 16)), generator=Generator().manual_seed(0)
    )
    for layer in convolutions(encoder):
        assert_all_norms(layer.weight, 1.0)
    for layer in dense_layers(encoder):
        assert_all_norms(layer.weight, 1.4)


def make_agent(config: ModelConfig) -> Agent:
    space = gym.spaces.Box(-1, 1, (6,), np.float32)
    return Agent(
        space, gym.spaces.Discrete(5), config, generator=Generator().manual_seed(0), auxiliary=True
    )


@pytest.mark.parametrize("init", ["normalized", "orthogonal"])
def test_heads_have_the_scales_of_the_configuration(init: Initialization) -> None:
    # A row of an orthogonal matrix has norm 1, so both schemes give rows of the norm of the scale.
    agent = make_agent(
        ModelConfig(
            encoder="mlp",
            hidden_sizes=(32,),
            init=init,
            policy_head_scale=0.01,
            value_head_scale=0.7,
        )
    )
    assert agent.aux_value_head is not None
    heads = {0.01: [agent.policy_head.linear], 0.7: [agent.value_head, agent.aux_value_head]}
    for scale, layers in heads.items():
        for layer in layers:
            assert_all_norms(layer.weight, scale)
            assert not layer.bias.any()


def test_heads_of_the_paper_have_norm_0_1() -> None:
    agent = make_agent(ModelConfig(encoder="mlp"))
    assert agent.aux_value_head is not None
    for head in (agent.policy_head.linear, agent.value_head, agent.aux_value_head):
        assert_all_norms(head.weight, 0.1)


@pytest.mark.parametrize("init", ["glorot", "torch"])
def test_heads_of_schemes_without_a_scale_are_orthogonal(init: Initialization) -> None:
    agent = make_agent(
        ModelConfig(encoder="mlp", hidden_sizes=(32,), init=init, policy_head_scale=0.01)
    )
    weight = agent.policy_head.linear.weight.detach()
    torch.testing.assert_close(weight @ weight.T, 1e-4 * torch.eye(5), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("head_init", SCHEMES)
def test_heads_may_have_a_scheme_of_their_own(head_init: Initialization) -> None:
    """Worked out by hand for 32 features; five actions and a value.

    The encoder before them keeps its scheme.
    """
    config = ModelConfig(
        encoder="mlp",
        hidden_sizes=(32,),
        init="orthogonal",
        policy_head_scale=0.02,
        value_head_scale=0.7,
    )
    agent, usual = make_agent(replace(config, head_init=head_init)), make_agent(config)
    assert agent.aux_value_head is not None
    assert all(
        torch.equal(weight, usual.encoder.state_dict()[name])
        for name, weight in agent.encoder.state_dict().items()
    )
    for layer, scale in (
        (agent.policy_head.linear, 0.02),
        (agent.value_head, 0.7),
        (agent.aux_value_head, 0.7),
    ):
        weight, outputs = layer.weight.detach(), len(layer.weight)
        gram = weight @ weight.T
        is_orthogonal = bool(
            torch.allclose(gram, scale**2 * torch.eye(outputs), rtol=1e-4, atol=1e-8)
        )
        if head_init in ("normalized", "orthogonal"):
            assert_all_norms(weight, scale)
            assert is_orthogonal == (head_init == "orthogonal" or outputs == 1)
        else:  # these have no scale: uniform up to a bound
            bound = math.sqrt(6 / (32 + outputs)) if head_init == "glorot" else 1 / math.sqrt(32)
            assert 0.85 * bound < weight.abs().max().item() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)
        assert bool(layer.bias.any()) == (head_init == "torch")


@pytest.mark.parametrize(
    "layer",
    [nn.Linear(40, 12), nn.Linear(12, 40), nn.Conv2d(5, 12, 3), nn.Conv2d(1, 12, 3)],
    ids=["wide", "tall", "convolution", "tall convolution"],
)
def test_orthogonal_rows_or_columns_have_the_gain(layer: nn.Linear | nn.Conv2d) -> None:
    matrix = initialized(layer, "orthogonal", scale=1.7).weight.detach().flatten(1)
    square = matrix @ matrix.T if len(matrix) <= matrix.shape[1] else matrix.T @ matrix
    torch.testing.assert_close(square, 1.7**2 * torch.eye(len(square)), rtol=1e-5, atol=1e-5)
    assert not layer.bias.any() if layer.bias is not None else True


def test_hidden_layers_of_an_orthogonal_network_have_gain_root_two() -> None:
    encoder = ImpalaCNN(
        (16, 16, 3),
        ModelConfig(channels=(8, 8), hidden_sizes=(32,), init="orthogonal"),
        generator=Generator().manual_seed(0),
    )
    for layer in (*convolutions(encoder), *dense_layers(encoder)):
        matrix = layer.weight.detach().flatten(1)
        torch.testing.assert_close(
            matrix @ matrix.T, 2 * torch.eye(len(matrix)), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("kind", "fans"), [("dense", 40 + 12), ("convolution", 9 * 5 + 9 * 12)])
def test_glorot_is_uniform_within_its_bound_and_has_no_scale(kind: str, fans: int) -> None:
    layer = initialized(LAYERS[kind](), "glorot", scale=5.0)
    bound = math.sqrt(6 / fans)
    assert 0.97 * bound < layer.weight.abs().max().item() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert layer.bias is not None
    assert not layer.bias.any()


@pytest.mark.parametrize(("kind", "fan_in"), [("dense", 40), ("convolution", 9 * 5)])
def test_torch_is_pytorchs_default_for_weights_and_bias(kind: str, fan_in: int) -> None:
    layer = initialized(LAYERS[kind](), "torch", scale=5.0)
    assert 0.97 / math.sqrt(fan_in) < layer.weight.abs().max().item() <= 1 / math.sqrt(fan_in)
    assert layer.bias is not None
    assert 0.5 / math.sqrt(fan_in) < layer.bias.abs().max().item() <= 1 / math.sqrt(fan_in)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_follow_from_the_generator_alone(scheme: Initialization, kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        weights = []
        for global_seed, seed in ((1, 0), (2, 0), (1, 9)):
            torch.manual_seed(global_seed)
            weights.append(initialized(LAYERS[kind](), scheme, seed=seed).weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_agents_follow_from_the_generator_alone(scheme: Initialization) -> None:
    def weights(seed: int, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        space, config = (
            gym.spaces.Box(0, 255, (16, 16, 3), np.uint8),
            ModelConfig(channels=(4, 4), hidden_sizes=(8,), init=scheme),
        )
        agent = Agent(
            space,
            gym.spaces.Discrete(5),
            config,
            generator=Generator().manual_seed(seed),
            auxiliary=True,
        )
        return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(weights(0, 1), weights(0, 2))
        assert not torch.equal(weights(0, 1), weights(1, 1))
