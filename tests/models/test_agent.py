"""The agent: which loss reaches which network, and that all ways to ask it agree."""

from __future__ import annotations

from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl.config import ModelConfig, ValuePath
from phasicrl.models.agent import Agent, AgentOutput

S, L, A = 3, 4, 5
VALUE_PATHS: tuple[ValuePath, ...] = get_args(ValuePath)
VECTORS = gym.spaces.Box(-1, 1, (6,), np.float32)
PICTURES = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
ACTIONS = gym.spaces.Discrete(A)
SMALL = ModelConfig(encoder="mlp", hidden_sizes=(8,))


def make_agent(value_path: ValuePath = "separate", *, pictures: bool = False, auxiliary: bool = True, seed: int = 0) -> Agent:
    encoder: Any = {"encoder": "impala", "channels": (4, 4)} if pictures else {"encoder": "mlp"}
    config = ModelConfig(value_path=value_path, hidden_sizes=(8,), **encoder)
    space = PICTURES if pictures else VECTORS
    return Agent(space, ACTIONS, config, generator=Generator().manual_seed(seed), auxiliary=auxiliary)


def observations(*, pictures: bool = False) -> Tensor:
    generator = Generator().manual_seed(1)
    if pictures:
        return torch.randint(0, 256, (S, L, 16, 16, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(S, L, 6, generator=generator)


def ask(agent: Agent, obs: Tensor, action_mask: Tensor | None = None) -> AgentOutput:
    first = torch.zeros(obs.shape[:2], dtype=torch.bool)
    return agent(obs, first, agent.initial_state(len(obs)), action_mask)


def reached(agent: Agent, loss: Tensor) -> set[str]:
    """Parts of the agent to which a loss sends a gradient: their names' first words."""
    names, parameters = zip(*agent.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss.square().sum(), parameters, allow_unused=True, retain_graph=True)
    return {name.split(".")[0] for name, gradient in zip(names, gradients, strict=True) if gradient is not None and gradient.any()}


@pytest.mark.parametrize(
    ("value_path", "by_value"),
    [("separate", {"value_encoder", "value_head"}), ("detached", {"value_head"}), ("shared", {"encoder", "value_head"})],
)
def test_each_loss_reaches_the_networks_of_its_value_path(value_path: ValuePath, by_value: set[str]) -> None:
    agent = make_agent(value_path)
    output = ask(agent, observations())
    assert output.aux_value is not None
    assert reached(agent, output.value) == by_value
    assert reached(agent, output.policy.log_probs) == {"encoder", "policy_head"}
    assert reached(agent, output.aux_value) == {"encoder", "aux_value_head"}


def test_separate_networks_share_no_parameter_and_start_differently() -> None:
    agent = make_agent("separate", pictures=True)
    assert agent.value_encoder is not None
    policy, value = (list(encoder.parameters()) for encoder in (agent.encoder, agent.value_encoder))
    assert not {parameter.data_ptr() for parameter in policy} & {parameter.data_ptr() for parameter in value}
    assert all(not torch.equal(a, b) for a, b in zip(policy, value, strict=True) if a.ndim > 1)


@pytest.mark.parametrize("value_path", ["detached", "shared"])
def test_single_networks_have_one_encoder_and_start_alike(value_path: ValuePath) -> None:
    agent = make_agent(value_path)
    assert agent.value_encoder is None
    assert {name.split(".")[0] for name, _ in agent.named_parameters()} == {"encoder", "policy_head", "value_head", "aux_value_head"}
    # They differ in what their gradients reach, not in what they compute.
    shared = ask(make_agent("shared"), observations())
    assert torch.equal(ask(agent, observations()).value, shared.value)


@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_the_auxiliary_head_changes_no_other_initial_weight(value_path: ValuePath) -> None:
    without, with_head = (make_agent(value_path, auxiliary=auxiliary).state_dict() for auxiliary in (False, True))
    assert with_head.keys() - without.keys() == {"aux_value_head.weight", "aux_value_head.bias"}
    assert all(torch.equal(with_head[name], value) for name, value in without.items())
    assert not torch.equal(with_head["aux_value_head.weight"], with_head["value_head.weight"])


def test_without_auxiliary_phase_there_is_no_auxiliary_value() -> None:
    assert ask(make_agent(auxiliary=False), observations()).aux_value is None


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_all_ways_to_ask_agree(value_path: ValuePath, pictures: bool) -> None:
    agent, obs = make_agent(value_path, pictures=pictures), observations(pictures=pictures)
    first, state = torch.zeros(S, L, dtype=torch.bool), agent.initial_state(S)
    output = ask(agent, obs)
    policy, next_state = agent.policy(obs, first, state)
    assert torch.equal(policy.log_probs, output.policy.log_probs)
    assert torch.equal(agent.value(obs, first, state), output.value)
    assert next_state.shape == output.state.shape == (S, 0)


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_sequences_are_their_steps_one_by_one(value_path: ValuePath, pictures: bool) -> None:
    agent, obs = make_agent(value_path, pictures=pictures), observations(pictures=pictures)
    whole = ask(agent, obs)
    assert whole.value.shape == (S, L)
    assert whole.policy.log_probs.shape == (S, L, A)
    steps = [ask(agent, obs[:, t : t + 1]) for t in range(L)]
    assert whole.aux_value is not None
    aux_values = [step.aux_value for step in steps if step.aux_value is not None]
    torch.testing.assert_close(torch.cat([step.value for step in steps], dim=1), whole.value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat(aux_values, dim=1), whole.aux_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.cat([step.policy.log_probs for step in steps], dim=1), whole.policy.log_probs, rtol=1e-5, atol=1e-6)
    assert whole.value.unique().numel() > S * L // 2


def test_the_mask_reaches_the_policy() -> None:
    agent, obs = make_agent(), observations()
    mask = torch.rand(S, L, A, generator=Generator().manual_seed(2)) < 0.5
    mask[..., 0] = True
    policy, _ = agent.policy(obs, torch.zeros(S, L, dtype=torch.bool), agent.initial_state(S), mask)
    for log_probs in (ask(agent, obs, mask).policy.log_probs, policy.log_probs):
        assert torch.equal(log_probs.exp() > 0, mask)


def test_separate_questions_spare_the_other_network() -> None:
    agent, obs, calls = make_agent("separate"), observations(), []
    assert agent.value_encoder is not None
    agent.encoder.register_forward_hook(lambda *_: calls.append("policy"))
    agent.value_encoder.register_forward_hook(lambda *_: calls.append("value"))
    first, state = torch.zeros(S, L, dtype=torch.bool), agent.initial_state(S)
    agent.value(obs, first, state)
    assert calls == ["value"]
    agent.policy(obs, first, state)
    assert calls == ["value", "policy"]


class OwnEncoder(nn.Module):
    """A user's encoder."""

    def __init__(self, obs_shape: tuple[int, ...], num_features: Any = 7) -> None:
        super().__init__()
        self.linear = nn.Linear(obs_shape[0], 7)
        if num_features is not None:
            self.num_features = num_features

    def forward(self, obs: Tensor) -> Tensor:
        return self.linear(obs)


@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_an_own_encoder_takes_the_place_of_the_configured_one(value_path: ValuePath) -> None:
    made: list[nn.Module] = []

    def make_encoder(obs_shape: tuple[int, ...]) -> nn.Module:
        made.append(OwnEncoder(obs_shape))
        return made[-1]

    config = ModelConfig(value_path=value_path)  # its encoder is for pictures
    agent = Agent(VECTORS, ACTIONS, config, generator=Generator().manual_seed(0), auxiliary=True, make_encoder=make_encoder)
    assert made == [agent.encoder] + [agent.value_encoder] * (value_path == "separate")
    assert agent.policy_head.linear.in_features == 7
    assert ask(agent, observations()).value.shape == (S, L)


@pytest.mark.parametrize("num_features", [None, "7", 7.0])
def test_an_own_encoder_without_its_width_is_refused(num_features: Any) -> None:
    with pytest.raises(ValueError, match="OwnEncoder needs an integer attribute num_features"):
        Agent(
            VECTORS, ACTIONS, SMALL, generator=Generator(), auxiliary=False, make_encoder=lambda shape: OwnEncoder(shape, num_features)
        )  # fmt: skip


@pytest.mark.parametrize("space", [gym.spaces.Discrete(4), gym.spaces.MultiBinary(3), gym.spaces.Dict({"a": VECTORS})])
def test_observations_of_other_kinds_are_refused_with_what_is_supported(space: gym.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"observations of the kind .* are not supported; supported: Box"):
        Agent(space, ACTIONS, SMALL, generator=Generator(), auxiliary=False)


def test_actions_of_other_kinds_are_refused_with_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"actions of the kind .* are not supported; supported: Discrete"):
        Agent(VECTORS, gym.spaces.Box(-1, 1, (2,)), SMALL, generator=Generator(), auxiliary=False)


def test_an_encoder_that_does_not_fit_the_observations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--model\.encoder mlp"):
        Agent(VECTORS, ACTIONS, ModelConfig(encoder="impala"), generator=Generator(), auxiliary=False)
