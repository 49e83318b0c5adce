"""The agent: which loss reaches which network, and that all ways to ask it agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl.algorithm import train
from phasicrl.config import (
    AuxConfig,
    ModelConfig,
    ObsNormConfig,
    PPOConfig,
    Statistics,
    ValueNormConfig,
    ValuePath,
)
from phasicrl.models.agent import Agent, AgentOutput
from phasicrl.phases import AuxiliaryLoss, PolicyPhaseLoss
from phasicrl.rollout import AuxiliarySamples, PolicySamples
from phasicrl.session.evaluate import evaluate
from tests.helpers import OBS_NORM, VALUE_NORM, Corridor, tiny

S, L, A = 3, 4, 5
VALUE_PATHS: tuple[ValuePath, ...] = get_args(ValuePath)
VECTORS = gym.spaces.Box(-1, 1, (6,), np.float32)
PICTURES = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
ACTIONS = gym.spaces.Discrete(A)
SMALL = ModelConfig(encoder="mlp", hidden_sizes=(8,))


def make_agent(
    value_path: ValuePath = "separate",
    *,
    images: bool = False,
    auxiliary: bool = True,
    seed: int = 0,
) -> Agent:
    encoder: Any = {"encoder": "impala", "channels": (4, 4)} if images else {"encoder": "mlp"}
    config = ModelConfig(value_path=value_path, hidden_sizes=(8,), **encoder)
    space = PICTURES if images else VECTORS
    return Agent(
        space, ACTIONS, config, generator=Generator().manual_seed(seed), auxiliary=auxiliary
    )


def observations(*, images: bool = False) -> Tensor:
    generator = Generator().manual_seed(1)
    if images:
        return torch.randint(0, 256, (S, L, 16, 16, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(S, L, 6, generator=generator)


def ask(agent: Agent, obs: Tensor, action_mask: Tensor | None = None) -> AgentOutput:
    first = torch.zeros(obs.shape[:2], dtype=torch.bool)
    return agent(obs, first, agent.initial_state(len(obs)), action_mask)


def reached(agent: Agent, loss: Tensor) -> set[str]:
    """Parts of the agent to which a loss sends a gradient: their names' first words."""
    names, parameters = zip(*agent.named_parameters(), strict=True)
    gradients = torch.autograd.grad(
        loss.square().sum(), parameters, allow_unused=True, retain_graph=True
    )
    return {
        name.split(".")[0]
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and gradient.any()
    }


@pytest.mark.parametrize(
    ("value_path", "in_policy_phase", "in_aux_phase"),
    [
        ("separate", {"value_encoder"}, {"value_encoder"}),
        ("detached", set(), set()),
        ("shared_in_aux", set(), {"encoder"}),
        ("shared", {"encoder"}, {"encoder"}),
    ],
)
def test_each_loss_reaches_the_networks_of_its_value_path_and_phase(
    value_path: ValuePath, in_policy_phase: set[str], in_aux_phase: set[str]
) -> None:
    agent, obs = make_agent(value_path), observations()
    output = ask(agent, obs)
    assert output.aux_value is not None
    assert reached(agent, output.policy.dist_params) == {"encoder", "policy_head"}
    assert reached(agent, output.aux_value) == {"encoder", "aux_value_head"}
    numbers, first, state = (
        torch.randn(S, L),
        torch.zeros(S, L, dtype=torch.bool),
        torch.zeros(S, 0),
    )
    action = torch.zeros(S, L, dtype=torch.long)
    seen, old = (obs, first, state, None, numbers), output.policy.dist_params.detach()
    of_policy = PolicySamples(*seen, action, numbers, numbers, numbers)
    for with_policy in (True, False):
        loss = PolicyPhaseLoss(agent, PPOConfig(), with_policy, with_value=True)
        _, terms = loss(of_policy, torch.tensor(0.0))
        assert reached(agent, terms["losses/value_loss"]) == {"value_head", *in_policy_phase}
    _, terms = AuxiliaryLoss(agent, AuxConfig(epochs=6))(AuxiliarySamples(*seen, old))
    assert reached(agent, terms["losses/aux/real_value_loss"]) == {"value_head", *in_aux_phase}


def test_separate_networks_share_no_parameter_and_start_differently() -> None:
    agent = make_agent("separate", images=True)
    assert agent.value_encoder is not None
    policy, value = (list(encoder.parameters()) for encoder in (agent.encoder, agent.value_encoder))
    assert not {parameter.data_ptr() for parameter in policy} & {
        parameter.data_ptr() for parameter in value
    }
    assert all(not torch.equal(a, b) for a, b in zip(policy, value, strict=True) if a.ndim > 1)


@pytest.mark.parametrize("value_path", ["detached", "shared_in_aux", "shared"])
def test_single_networks_have_one_encoder_and_start_alike(value_path: ValuePath) -> None:
    agent = make_agent(value_path)
    assert agent.value_encoder is None
    assert {name.split(".")[0] for name, _ in agent.named_parameters()} == {
        "encoder",
        "policy_head",
        "value_head",
        "aux_value_head",
    }
    # They differ in what their gradients reach, not in what they compute.
    shared = ask(make_agent("shared"), observations())
    assert torch.equal(ask(agent, observations()).value, shared.value)


@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_the_auxiliary_head_changes_no_other_initial_weight(value_path: ValuePath) -> None:
    without, with_head = (
        make_agent(value_path, auxiliary=auxiliary).state_dict() for auxiliary in (False, True)
    )
    assert with_head.keys() - without.keys() == {"aux_value_head.weight", "aux_value_head.bias"}
    assert all(torch.equal(with_head[name], value) for name, value in without.items())
    assert not torch.equal(with_head["aux_value_head.weight"], with_head["value_head.weight"])


def test_without_auxiliary_phase_there_is_no_auxiliary_value() -> None:
    assert ask(make_agent(auxiliary=False), observations()).aux_value is None


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_all_ways_to_ask_agree(value_path: ValuePath, images: bool) -> None:
    agent, obs = make_agent(value_path, images=images), observations(images=images)
    first, state = torch.zeros(S, L, dtype=torch.bool), agent.initial_state(S)
    output = ask(agent, obs)
    policy, next_state = agent.policy(obs, first, state)
    assert torch.equal(policy.dist_params, output.policy.dist_params)
    assert torch.equal(agent.value(obs, first, state), output.value)
    assert next_state.shape == output.state.shape == (S, 0)


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_sequences_are_their_steps_one_by_one(value_path: ValuePath, images: bool) -> None:
    agent, obs = make_agent(value_path, images=images), observations(images=images)
    whole = ask(agent, obs)
    assert whole.value.shape == (S, L)
    assert whole.policy.dist_params.shape == (S, L, A)
    steps = [ask(agent, obs[:, t : t + 1]) for t in range(L)]
    assert whole.aux_value is not None
    aux_values = [step.aux_value for step in steps if step.aux_value is not None]
    torch.testing.assert_close(
        torch.cat([step.value for step in steps], dim=1), whole.value, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(torch.cat(aux_values, dim=1), whole.aux_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.cat([step.policy.dist_params for step in steps], dim=1),
        whole.policy.dist_params,
        rtol=1e-5,
        atol=1e-6,
    )
    assert whole.value.unique().numel() > S * L // 2


def test_the_mask_reaches_the_policy() -> None:
    agent, obs = make_agent(), observations()
    mask = torch.rand(S, L, A, generator=Generator().manual_seed(2)) < 0.5
    mask[..., 0] = True
    policy, _ = agent.policy(obs, torch.zeros(S, L, dtype=torch.bool), agent.initial_state(S), mask)
    for log_probs in (ask(agent, obs, mask).policy.dist_params, policy.dist_params):
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

    def make_encoder(space: gym.Space[Any]) -> nn.Module:
        made.append(OwnEncoder(space.shape or ()))
        return made[-1]

    config = ModelConfig(value_path=value_path)  # its encoder is for images
    agent = Agent(
        VECTORS,
        ACTIONS,
        config,
        generator=Generator().manual_seed(0),
        auxiliary=True,
        make_encoder=make_encoder,
    )
    assert made == [agent.encoder] + [agent.value_encoder] * (value_path == "separate")
    assert agent.policy_head.linear.in_features == 7
    assert ask(agent, observations()).value.shape == (S, L)


@pytest.mark.parametrize("num_features", [None, "7", 7.0])
def test_an_own_encoder_without_its_width_is_refused(num_features: Any) -> None:
    with pytest.raises(ValueError, match="OwnEncoder needs an integer attribute num_features"):
        Agent(
            VECTORS, ACTIONS, SMALL, generator=Generator(), auxiliary=False,
            make_encoder=lambda space: OwnEncoder(space.shape or (), num_features)
        )  # fmt: skip


@pytest.mark.parametrize("space", [gym.spaces.Text(4), gym.spaces.Sequence(VECTORS)])
def test_actions_of_other_kinds_are_refused_with_what_is_supported(space: gym.Space[Any]) -> None:
    with pytest.raises(ValueError, match="supported"):
        Agent(VECTORS, space, SMALL, generator=Generator(), auxiliary=False)


TREE = gym.spaces.Dict(
    {
        "eye": PICTURES,
        "legs": gym.spaces.Tuple((VECTORS, gym.spaces.Discrete(3))),
        "mode": gym.spaces.MultiBinary(2),
    }
)
MIXED = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-2, 2, (2,), np.float32)))


def recurrent(
    value_path: ValuePath = "separate", *, memory: Any = "lstm", **settings: Any
) -> Agent:
    config = ModelConfig(
        value_path=value_path,
        encoder="impala",
        channels=(4,),
        hidden_sizes=(8,),
        memory=memory,
        memory_size=6,
    )
    return Agent(
        TREE, MIXED, config, generator=Generator().manual_seed(0), auxiliary=True, **settings
    )


def stored(agent: Agent) -> Tensor:
    """Random observations of `TREE` as they lie in a rollout."""
    TREE.seed(0)
    samples = [TREE.sample() for _ in range(S * L)]
    batch = gym.vector.utils.concatenate(
        TREE, samples, gym.vector.utils.create_empty_array(TREE, S * L)
    )
    return torch.from_numpy(agent.reader.layout.pack(batch, S * L)).unflatten(0, (S, L))


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_with_memory_sequences_are_their_steps_one_by_one_for_policy_and_values(
    value_path: ValuePath, memory: str
) -> None:
    agent = recurrent(value_path, memory=memory)
    obs = stored(agent)
    first = torch.rand(S, L, generator=Generator().manual_seed(3)) < 0.3
    first[0] = False
    state = torch.randn(S, agent.state_size, generator=Generator().manual_seed(4))
    whole = agent(obs, first, state)
    now = state
    for t in range(L):
        one = agent(obs[:, t : t + 1], first[:, t : t + 1], now)
        alone, after = agent.policy(obs[:, t : t + 1], first[:, t : t + 1], now)
        for got, expected in (
            (one.value[:, 0], whole.value[:, t]),
            (agent.value(obs[:, t : t + 1], first[:, t : t + 1], now)[:, 0], whole.value[:, t]),
            (one.policy.dist_params[:, 0], whole.policy.dist_params[:, t]),
            (alone.dist_params[:, 0], whole.policy.dist_params[:, t]),
        ):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            after[:, : agent.memory.state_size], one.state[:, : agent.memory.state_size]
        )
        now = one.state
    torch.testing.assert_close(now, whole.state, rtol=1e-5, atol=1e-6)
    # The state matters.
    assert not torch.allclose(
        agent(obs, first, torch.zeros_like(state)).value[0], whole.value[0], atol=1e-4
    )


def test_two_networks_have_memories_of_their_own() -> None:
    agent = recurrent("separate")
    assert agent.state_size == 4 * 6 and recurrent("detached").state_size == 2 * 6
    obs, first = stored(agent), torch.zeros(S, L, dtype=torch.bool)
    state = torch.randn(S, agent.state_size, generator=Generator().manual_seed(4))
    of_value = torch.cat([state[:, :12], -state[:, 12:]], dim=-1)
    before, after = agent(obs, first, state), agent(obs, first, of_value)
    assert torch.equal(before.policy.dist_params, after.policy.dist_params)
    assert not torch.allclose(before.value, after.value, atol=1e-4)


@pytest.mark.parametrize(("value_path", "count"), [("separate", 2), ("detached", 1), ("shared", 1)])
def test_every_parameter_belongs_to_one_network(value_path: ValuePath, count: int) -> None:
    agent = recurrent(value_path)
    networks = agent.networks()
    assert len(networks) == count
    assert sorted(id(p) for network in networks for p in network) == sorted(
        id(p) for p in agent.parameters()
    )
    if count == 2:
        obs, first = stored(agent), torch.zeros(S, L, dtype=torch.bool)
        agent(obs, first, agent.initial_state(S)).value.sum().backward()
        assert all(p.grad is None for p in networks[0]) and all(
            p.grad is not None for p in networks[1]
        )


def test_the_value_network_may_have_another_non_linearity() -> None:
    config = ModelConfig(
        encoder="mlp", hidden_sizes=(8,), activation="relu", value_activation="tanh"
    )
    agent = Agent(VECTORS, ACTIONS, config, generator=Generator(), auxiliary=False)
    kinds = [
        [type(m) for m in e.modules() if isinstance(m, nn.ReLU | nn.Tanh)]
        for e in (agent.encoder, agent.value_encoder)
        if e
    ]
    assert kinds == [[nn.ReLU], [nn.Tanh]]


@pytest.mark.parametrize("tree", [False, True])
def test_observed_numbers_are_normalized_and_nothing_else_is(tree: bool) -> None:
    norm = ObsNormConfig(statistics="moments", clip=1.5)
    space = TREE if tree else VECTORS
    config = ModelConfig(encoder="impala" if tree else "mlp", channels=(4,), hidden_sizes=(8,))
    agent = Agent(space, ACTIONS, config, generator=Generator(), auxiliary=False, obs_norm=norm)
    obs = stored(agent) if tree else 3 + 2 * observations()
    flat = obs.flatten(0, 1)

    def numbers() -> Tensor:
        read = agent.reader(flat)
        return read["legs"][0] if tree else read

    raw = numbers().clone()
    agent.reader.update(obs)
    expected = ((raw - raw.mean(0)) / (raw.var(0, correction=0) + 1e-8).sqrt()).clamp(-1.5, 1.5)
    torch.testing.assert_close(numbers(), expected, rtol=1e-4, atol=1e-5)
    if tree:
        now, before = agent.reader(flat), agent.reader.layout.unpack(flat)
        assert torch.equal(now["eye"], before["eye"]) and torch.equal(now["mode"], before["mode"])
        assert torch.equal(now["legs"][1], before["legs"][1])
    # Part of the weights.
    assert any(name.startswith("reader.normalizer") for name in agent.state_dict())


def test_normalizing_numbers_that_are_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="obs_norm"):
        Agent(
            PICTURES,
            ACTIONS,
            ModelConfig(channels=(4,)),
            generator=Generator(),
            auxiliary=False,
            obs_norm=OBS_NORM,
        )


def test_normalized_values_are_said_in_the_units_of_the_rewards() -> None:
    config = ModelConfig(encoder="mlp", hidden_sizes=(8,))
    agents = [
        Agent(
            VECTORS,
            ACTIONS,
            config,
            generator=Generator().manual_seed(0),
            auxiliary=True,
            value_norm=norm,
        )
        for norm in (ValueNormConfig(), VALUE_NORM)
    ]
    plain, normalized = agents
    assert normalized.value_normalizer is not None
    normalized.value_normalizer.update(torch.tensor([[10.0, 30.0]]))  # mean 20, deviation 10
    before, after = (ask(agent, observations()) for agent in agents)
    assert before.aux_value is not None and after.aux_value is not None
    torch.testing.assert_close(after.value, 20 + 10 * before.value)
    torch.testing.assert_close(after.aux_value, 20 + 10 * before.aux_value)
    torch.testing.assert_close(normalized.in_value_units(after.value), before.value + 2)
    assert plain.in_value_units(before.value) is before.value


@pytest.mark.parametrize("statistics", ["moments", "ema"])
@pytest.mark.parametrize("value_path", VALUE_PATHS)
def test_values_stay_what_they_are_when_their_statistics_move(
    statistics: Statistics, value_path: ValuePath
) -> None:
    config = ModelConfig(encoder="mlp", hidden_sizes=(8,), value_path=value_path)
    norm = ValueNormConfig(statistics=statistics, decay=0.5)
    agent = Agent(
        VECTORS,
        ACTIONS,
        config,
        generator=Generator().manual_seed(0),
        auxiliary=True,
        value_norm=norm,
    )
    assert agent.value_normalizer is not None
    places = [parameter.data_ptr() for parameter in agent.parameters()]
    # The first units: mean 20, deviation 10.
    assert agent.update_value_statistics(torch.tensor([[10.0, 30.0]]))
    first, raw = ask(agent, observations()), agent.value_normalizer
    # Far away, wide, then hardly any deviation (the floor), then wide again: everything in float32,
    # so in parts of the largest unit.
    for targets in ([-900.0, -700.0], [1e5, -1e5], [3.0, 3.0], [3.0] * 500, [-5.0, 5.0]):
        old_mean = raw.mean.item()
        assert not agent.update_value_statistics(torch.tensor(targets))
        assert raw.mean.item() != old_mean
        now = ask(agent, observations())
        assert first.aux_value is not None and now.aux_value is not None
        unit = max(abs(raw.mean.item()), raw.std.item(), 100)
        torch.testing.assert_close(now.value, first.value, rtol=0, atol=4e-6 * unit)
        torch.testing.assert_close(now.aux_value, first.aux_value, rtol=0, atol=4e-6 * unit)
        assert torch.equal(now.policy.dist_params, first.policy.dist_params)
    assert [
        parameter.data_ptr() for parameter in agent.parameters()
    ] == places  # in place: compiled steps hold them
    assert all(parameter.requires_grad for parameter in agent.parameters())


def test_rescaled_heads_by_hand() -> None:
    agent = Agent(
        VECTORS,
        ACTIONS,
        SMALL,
        generator=Generator(),
        auxiliary=False,
        value_norm=ValueNormConfig(statistics="ema", decay=0.0),
    )
    agent.update_value_statistics(torch.tensor([10.0, 30.0]))  # μ 20, σ 10
    with torch.no_grad():
        agent.value_head.weight.fill_(2.0)
        agent.value_head.bias.fill_(0.5)
    agent.update_value_statistics(torch.tensor([-5.0, 3.0]))  # μ' −1, σ' 4
    # w' = 10/4 · 2 and b' = (10 · 0.5 + 20 + 1) / 4
    torch.testing.assert_close(agent.value_head.weight, torch.full((1, 8), 5.0))
    torch.testing.assert_close(agent.value_head.bias, torch.tensor([6.5]))


def test_the_first_targets_give_the_heads_their_units() -> None:
    agent = Agent(
        VECTORS,
        ACTIONS,
        SMALL,
        generator=Generator().manual_seed(0),
        auxiliary=True,
        value_norm=VALUE_NORM,
    )
    before = ask(agent, observations())
    assert agent.update_value_statistics(torch.tensor([[-90.0, -70.0]]))
    now = ask(agent, observations())
    assert before.aux_value is not None and now.aux_value is not None
    torch.testing.assert_close(now.value, -80 + 10 * before.value)
    torch.testing.assert_close(now.aux_value, -80 + 10 * before.aux_value)
    plain = make_agent()
    assert not plain.update_value_statistics(torch.tensor([1.0, 2.0]))


def test_an_encoder_that_does_not_fit_the_observations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--model\.encoder mlp"):
        Agent(
            VECTORS, ACTIONS, ModelConfig(encoder="impala"), generator=Generator(), auxiliary=False
        )


@pytest.mark.parametrize("in_a_dict", [False, True])
@pytest.mark.parametrize("obs_norm", [None, OBS_NORM])
def test_one_number_alone_is_an_observation(
    tmp_path: Path, in_a_dict: bool, obs_norm: ObsNormConfig | None
) -> None:
    battery = gym.spaces.Box(0, 9, (), np.float32)

    class Battery(Corridor):
        def __init__(self) -> None:
            super().__init__()
            more = {"battery": battery, "place": self.observation_space}
            space: Any = gym.spaces.Dict(more) if in_a_dict else battery
            self.observation_space = space

        def _obs(self) -> Any:
            level, place = np.float32(self._steps), super()._obs()
            return {"battery": level, "place": place} if in_a_dict else level

    run = train(tiny(tmp_path, obs_norm=obs_norm), make_env=Battery)
    assert run.env_steps == run.config.budget
    for policy in evaluate(run.directory, episodes=2, make_env=Battery):
        assert len(policy.returns) == 2
