"""Initial weights: norms, orthogonality and bounds; they follow from the generator alone."""

import math
from typing import Any, get_args

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
FAN_IN, FAN_OUT = {"dense": 40, "convolution": 9 * 5}, {"dense": 12, "convolution": 9 * 12}


def initialized(layer: Any, scheme: Initialization, *, scale: float = 1.0) -> Any:
    return Initializer(scheme, Generator().manual_seed(0))(layer, scale)


def assert_all_norms(weight: Tensor, expected: float) -> None:
    """Check the L2 norm of each output unit's weights."""
    assert (weight.detach().double().flatten(1).norm(dim=1) - expected).abs().max().item() < 1e-6


def assert_orthogonal(weight: Tensor, gain: float) -> None:
    """Check that the rows, or the columns if there are fewer, are orthogonal with this norm."""
    matrix = weight.detach().flatten(1)
    matrix = matrix if len(matrix) <= matrix.shape[1] else matrix.T
    expected = gain**2 * torch.eye(len(matrix))
    torch.testing.assert_close(matrix @ matrix.T, expected, rtol=1e-5, atol=1e-5 * gain**2)


def assert_uniform(values: Tensor, bound: float, least: float = 0.97) -> None:
    assert least * bound < values.abs().max().item() <= bound
    assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.25)


def layers_of(module: nn.Module, kind: type[Any]) -> list[Any]:
    return [layer for layer in module.modules() if isinstance(layer, kind)]


def make_encoder(kind: type[Any], size: int, **model: Any) -> nn.Module:
    return kind((size, size, 3), ModelConfig(**model), generator=Generator().manual_seed(0))


@pytest.mark.parametrize(("channels", "blocks", "scale"), [
    ((16, 32, 32), 2, math.sqrt(1 / math.sqrt(3) / math.sqrt(2))),  # the source's
    ((8, 8), 2, 4**-0.25),
    ((8,), 1, 1.0),
    ((4, 4, 4), 3, 9**-0.25),
])  # fmt: skip
def test_normalized_impala_has_its_norms(channels: Any, blocks: int, scale: float) -> None:
    """The first convolution of a stack has norm 1, those of its blocks follow the depth."""
    encoder = make_encoder(ImpalaCNN, 16, channels=channels, blocks=blocks)
    convolutions, (dense,) = layers_of(encoder, nn.Conv2d), layers_of(encoder, nn.Linear)
    assert len(convolutions) == len(channels) * (1 + 2 * blocks)
    for number, layer in enumerate(convolutions):
        assert_all_norms(layer.weight, 1.0 if number % (1 + 2 * blocks) == 0 else scale)
    assert_all_norms(dense.weight, 1.4)
    assert not any(layer.bias.any() for layer in (dense, *convolutions))


def test_normalized_nature_has_convolutions_of_one_and_dense_layers_of_1_4() -> None:
    encoder = make_encoder(NatureCNN, 64, hidden_sizes=(32, 16))
    for kind, norm in ((nn.Conv2d, 1.0), (nn.Linear, 1.4)):
        for layer in layers_of(encoder, kind):
            assert_all_norms(layer.weight, norm)


def make_agent(**model: Any) -> Agent:
    space, config = gym.spaces.Box(-1, 1, (6,), np.float32), ModelConfig(encoder="mlp", **model)
    generator = Generator().manual_seed(0)
    return Agent(space, gym.spaces.Discrete(5), config, generator=generator, auxiliary=True)


def heads_of(agent: Agent) -> list[nn.Linear]:
    assert agent.aux_value_head is not None
    return [agent.policy_head.linear, agent.value_head, agent.aux_value_head]


def test_heads_of_the_paper_have_norm_0_1() -> None:
    for head in heads_of(make_agent()):
        assert_all_norms(head.weight, 0.1)


@pytest.mark.parametrize("init", ["glorot", "torch"])
def test_heads_of_schemes_without_a_scale_are_orthogonal(init: Initialization) -> None:
    agent = make_agent(hidden_sizes=(32,), init=init, policy_head_scale=0.01)
    assert_orthogonal(agent.policy_head.linear.weight, 0.01)


@pytest.mark.parametrize("head_init", SCHEMES)
def test_heads_have_their_own_scales_and_scheme(head_init: Initialization) -> None:
    """For 32 features; five actions and a value. The encoder before them keeps its scheme."""
    model = {"hidden_sizes": (32,), "init": "orthogonal"}
    model |= {"policy_head_scale": 0.02, "value_head_scale": 0.7}
    agent, usual = make_agent(**model, head_init=head_init), make_agent(**model)
    for ours, theirs in zip(agent.encoder.parameters(), usual.encoder.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for layer, scale in zip(heads_of(agent), (0.02, 0.7, 0.7), strict=True):
        weight, outputs = layer.weight.detach(), len(layer.weight)
        if head_init == "orthogonal":
            assert_orthogonal(weight, scale)
        elif head_init == "normalized":
            assert_all_norms(weight, scale)
        else:  # these have no scale: uniform up to a bound
            bound = math.sqrt(6 / (32 + outputs)) if head_init == "glorot" else 1 / math.sqrt(32)
            assert_uniform(weight, bound, least=0.85)
        assert bool(layer.bias.any()) == (head_init == "torch")


@pytest.mark.parametrize(
    "layer", [nn.Linear(40, 12), nn.Linear(12, 40), nn.Conv2d(5, 12, 3), nn.Conv2d(1, 12, 3)],
    ids=str,
)  # fmt: skip
def test_orthogonal_rows_or_columns_have_the_gain(layer: nn.Linear | nn.Conv2d) -> None:
    layer = initialized(layer, "orthogonal", scale=1.7)
    assert_orthogonal(layer.weight, 1.7)
    assert layer.bias is not None and not layer.bias.any()


def test_hidden_layers_of_an_orthogonal_network_have_gain_root_two() -> None:
    encoder = make_encoder(ImpalaCNN, 16, channels=(8, 8), hidden_sizes=(32,), init="orthogonal")
    for layer in (*layers_of(encoder, nn.Conv2d), *layers_of(encoder, nn.Linear)):
        assert_orthogonal(layer.weight, math.sqrt(2))


@pytest.mark.parametrize("kind", LAYERS)
def test_glorot_and_torch_are_uniform_within_their_bounds_and_have_no_scale(kind: str) -> None:
    glorot, default = (initialized(LAYERS[kind](), x, scale=5.0) for x in ("glorot", "torch"))
    assert_uniform(glorot.weight, math.sqrt(6 / (FAN_IN[kind] + FAN_OUT[kind])))
    assert_uniform(default.weight, 1 / math.sqrt(FAN_IN[kind]))
    assert not glorot.bias.any()
    assert 0.5 < default.bias.abs().max().item() * math.sqrt(FAN_IN[kind]) <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_follow_from_the_generator_alone(scheme: Initialization) -> None:
    space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    config = ModelConfig(channels=(4, 4), hidden_sizes=(8,), init=scheme)

    def weights(seed: int, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        generator = Generator().manual_seed(seed)
        agent = Agent(space, gym.spaces.Discrete(5), config, generator=generator, auxiliary=True)
        return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(weights(0, 1), weights(0, 2))
        assert not torch.equal(weights(0, 1), weights(1, 1))
