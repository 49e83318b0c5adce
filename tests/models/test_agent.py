"""The agent: which loss reaches which network, and that all ways to evaluate it agree."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl.algorithm import resume, train
from phasicrl.config import ModelConfig, ObsNormConfig, PPOConfig, ValueNormConfig, ValuePath
from phasicrl.models.agent import Agent, AgentOutput
from phasicrl.phases import AuxiliaryLoss, PolicyPhaseLoss
from phasicrl.rollout import AuxiliarySamples, PolicySamples
from phasicrl.training import build
from phasicrl.training.acting import load
from phasicrl.training.evaluate import evaluate
from tests.helpers import OBS_NORM, Corridor, assert_same, assert_same_run, stop_at, tiny, tiny_aux

S, L, A = 3, 4, 5
VALUE_PATHS: tuple[ValuePath, ...] = get_args(ValuePath)
VECTORS = gym.spaces.Box(-1, 1, (6,), np.float32)
PICTURES = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
ACTIONS = gym.spaces.Discrete(A)
LEGS = gym.spaces.Tuple((VECTORS, gym.spaces.Discrete(3)))
TREE = gym.spaces.Dict({"eye": PICTURES, "legs": LEGS, "mode": gym.spaces.MultiBinary(2)})
MIXED = gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-2, 2, (2,), np.float32)))
NEVER = torch.zeros(S, L, dtype=torch.bool)
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}
every_path = pytest.mark.parametrize("value_path", VALUE_PATHS)


def make_agent(
    value_path: ValuePath = "separate", space: gym.Space[Any] = VECTORS,
    actions: gym.Space[Any] = ACTIONS, *, model: dict[str, Any] | None = None,
    auxiliary: bool = True, seed: int = 0, **options: Any,
) -> Agent:  # fmt: skip
    """Make an agent with networks of one layer, or a small IMPALA network for images."""
    encoder: dict[str, Any] = {"encoder": "mlp" if space is VECTORS else "impala"}
    model = {"hidden_sizes": (8,), "channels": (4, 4), **encoder, **(model or {})}
    config, generator = ModelConfig(value_path=value_path, **model), Generator().manual_seed(seed)
    return Agent(space, actions, config, generator=generator, auxiliary=auxiliary, **options)


def recurrent(value_path: ValuePath = "separate", memory: str = "lstm") -> Agent:
    model = {"channels": (4,), "memory": memory, "memory_size": 6}
    return make_agent(value_path, TREE, MIXED, model=model)


def observations(space: gym.Space[Any] = VECTORS) -> Tensor:
    generator = Generator().manual_seed(1)
    if space is PICTURES:
        return torch.randint(0, 256, (S, L, 16, 16, 3), dtype=torch.uint8, generator=generator)
    return torch.randn(S, L, 6, generator=generator)


def stored(agent: Agent) -> Tensor:
    """Return random observations of `TREE` in the form in which a rollout has them."""
    TREE.seed(0)
    samples, utils = [TREE.sample() for _ in range(S * L)], gym.vector.utils
    batch = utils.concatenate(TREE, samples, utils.create_empty_array(TREE, S * L))
    return torch.from_numpy(agent.reader.layout.pack(batch, S * L)).unflatten(0, (S, L))


def ask(agent: Agent, obs: Tensor) -> AgentOutput:
    return agent(obs, NEVER[:, : obs.shape[1]], agent.initial_state(S))


def values_of(output: AgentOutput) -> Tensor:
    """Return V and the auxiliary value, `[2, S, L]`."""
    assert output.aux_value is not None
    return torch.stack([output.value, output.aux_value])


def reached(agent: Agent, loss: Tensor) -> set[str]:
    """Return the agent's parts that get a gradient from a loss: first words of their names."""
    names, parameters = zip(*agent.named_parameters(), strict=True)
    loss = loss.square().sum()
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(names, gradients, strict=True)
    return {name.split(".")[0] for name, x in pairs if x is not None and x.any()}


@pytest.mark.parametrize(("value_path", "in_policy_phase", "in_aux_phase"), [
    ("separate", {"value_encoder"}, {"value_encoder"}),
    ("detached", set(), set()),
    ("shared_in_aux", set(), {"encoder"}),
    ("shared", {"encoder"}, {"encoder"}),
])  # fmt: skip
def test_each_loss_reaches_the_networks_of_its_value_path_and_phase(
    value_path: ValuePath, in_policy_phase: set[str], in_aux_phase: set[str]
) -> None:
    agent, obs = make_agent(value_path), observations()
    output = ask(agent, obs)
    assert output.aux_value is not None
    assert reached(agent, output.policy.dist_params) == {"encoder", "policy_head"}
    assert reached(agent, output.aux_value) == {"encoder", "aux_value_head"}
    numbers, action = torch.randn(S, L), torch.zeros(S, L, dtype=torch.long)
    seen, old = (obs, NEVER, torch.zeros(S, 0), None, numbers), output.policy.dist_params.detach()
    of_policy = PolicySamples(*seen, action, numbers, numbers, numbers)
    for trains_policy in (True, False):
        loss = PolicyPhaseLoss(agent, PPOConfig(), trains_policy, trains_value=True)
        _, terms = loss(of_policy, *torch.zeros(3))
        assert reached(agent, terms["losses/value_loss"]) == {"value_head", *in_policy_phase}
    _, terms = AuxiliaryLoss(agent, tiny_aux())(AuxiliarySamples(*seen, old))
    assert reached(agent, terms["losses/aux/real_value_loss"]) == {"value_head", *in_aux_phase}


@every_path
def test_the_auxiliary_head_changes_no_other_initial_weight(value_path: ValuePath) -> None:
    plain = make_agent(value_path, auxiliary=False)
    without, with_head = plain.state_dict(), make_agent(value_path).state_dict()
    assert ask(plain, observations()).aux_value is None
    assert with_head.keys() - without.keys() == {"aux_value_head.weight", "aux_value_head.bias"}
    assert all(torch.equal(with_head[name], value) for name, value in without.items())
    assert not torch.equal(with_head["aux_value_head.weight"], with_head["value_head.weight"])


@pytest.mark.parametrize("space", [VECTORS, PICTURES], ids=["vectors", "pictures"])
@every_path
def test_all_calls_agree_and_sequences_are_their_steps(value_path: ValuePath, space: Any) -> None:
    agent, obs = make_agent(value_path, space), observations(space)
    state, output = agent.initial_state(S), ask(agent, obs)
    policy, next_state = agent.policy(obs, NEVER, state)
    assert torch.equal(policy.dist_params, output.policy.dist_params)
    assert torch.equal(agent.value(obs, NEVER, state), output.value)
    assert next_state.shape == output.state.shape == (S, 0)
    steps = [ask(agent, obs[:, t : t + 1]) for t in range(L)]
    values = torch.cat([values_of(step) for step in steps], dim=2)
    torch.testing.assert_close(values, values_of(output), **CLOSE)
    params = torch.cat([step.policy.dist_params for step in steps], dim=1)
    torch.testing.assert_close(params, output.policy.dist_params, **CLOSE)
    assert output.value.unique().numel() > S * L // 2


def test_policy_and_value_alone_spare_the_other_network() -> None:
    agent, obs, calls = make_agent(), observations(), []
    assert agent.value_encoder is not None
    agent.encoder.register_forward_hook(lambda *_: calls.append("policy"))
    agent.value_encoder.register_forward_hook(lambda *_: calls.append("value"))
    agent.value(obs, NEVER, agent.initial_state(S))
    assert calls == ["value"]
    agent.policy(obs, NEVER, agent.initial_state(S))
    assert calls == ["value", "policy"]


def make_custom_encoder(num_features: Any = 7) -> nn.Module:
    """Make a user's encoder."""
    encoder: Any = nn.Sequential(nn.Linear(6, 7))
    if num_features is not None:
        encoder.num_features = num_features
    return encoder


@every_path
def test_a_custom_encoder_replaces_the_configured_one(value_path: ValuePath) -> None:
    made: list[nn.Module] = []

    def make_encoder(_: gym.Space[Any]) -> nn.Module:
        made.append(make_custom_encoder())
        return made[-1]

    model = {"encoder": "impala"}  # for images
    agent = make_agent(value_path, model=model, make_encoder=make_encoder)
    assert made == [agent.encoder] + [agent.value_encoder] * (value_path == "separate")
    assert agent.policy_head.linear.in_features == 7
    assert ask(agent, observations()).value.shape == (S, L)


@pytest.mark.parametrize("num_features", [None, "7", 7.0])
def test_a_custom_encoder_without_its_width_is_refused(num_features: Any) -> None:
    with pytest.raises(ValueError, match="num_features"):
        make_agent(make_encoder=lambda _: make_custom_encoder(num_features))


class Encoder(nn.Module):
    """A user's encoder of `LEGS`, which reads `key` and returns the width given."""

    num_features = 4

    def __init__(self, key: int = 0, width: int = 4) -> None:
        super().__init__()
        self.key, self.width = key, width

    def forward(self, obs: Any) -> Tensor:
        return obs[self.key][:, : self.width]


def make_head(name: str, num_features: int, num_outputs: int) -> nn.Module | None:
    """Make two layers for policy and value; the auxiliary value has the usual head."""
    if name == "aux_value":
        return None
    return nn.Sequential(nn.Linear(num_features, 3), nn.Tanh(), nn.Linear(3, num_outputs))


@every_path
def test_custom_heads_feed_the_distribution_and_the_values(value_path: ValuePath) -> None:
    asked: list[tuple[str, int, int]] = []

    def make(*about: Any) -> nn.Module | None:
        asked.append(about)
        return make_head(*about)

    agent = make_agent(value_path, actions=MIXED, make_head=make)
    assert asked == [("policy", 8, 5), ("value", 8, 1), ("aux_value", 8, 1)]
    assert type(agent.aux_value_head) is nn.Linear
    with torch.no_grad():
        agent.policy_head.linear[2].weight.zero_()
        agent.policy_head.linear[2].bias.copy_(torch.tensor([0.0, 1, 2, 0.25, -0.5]))
        agent.value_head[2].weight.zero_()
        agent.value_head[2].bias.fill_(7)
    output, logits = ask(agent, observations()), torch.tensor([0.0, 1, 2])
    expected = torch.cat([logits.log_softmax(0), torch.tensor([0.25, -0.5, 1, 1])])
    torch.testing.assert_close(output.policy.dist_params, expected.expand(S, L, 7))
    assert (output.value == 7).all()


class Converted(nn.Module):
    """A network with a function of its output."""

    def __init__(self, network: nn.Module, convert: Callable[[Tensor], Any], *_: Any) -> None:
        super().__init__()
        self.network, self.convert = network, convert
        self.num_features = np.prod(np.array([2, 2]))

    def forward(self, inputs: Any) -> Any:
        return self.convert(self.network(inputs))


def make_converted(which: str, convert: Any, name: str, size: int, num: int) -> nn.Module | None:
    return Converted(nn.Linear(size, num), convert) if name == which else None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "ndarray float32": lambda x: x.numpy(), "tuple": lambda x: (x, None),
    "Tensor torch.int64": lambda x: x.long(), "Tensor torch.complex64": lambda x: x + 0j,
    "Tensor torch.bool": lambda x: x > 0, "NoneType": lambda x: None,
}  # fmt: skip


def test_custom_networks_of_other_floats_are_trained(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    for name in ("policy", "value", "aux_value"):
        train(config, make_env=Corridor, make_head=partial(make_converted, name, Tensor.double))
    size = int(np.prod(Corridor().observation_space.shape or ()))

    def make_encoder(_: Any) -> nn.Module:
        return Converted(nn.Sequential(nn.Flatten(), nn.Linear(size, 4)), Tensor.double)

    run = train(config, make_env=Corridor, make_encoder=make_encoder)
    assert run.agent.memory.num_features == 4


@pytest.mark.parametrize(("arguments", "match"), [
    ({"space": LEGS, "make_encoder": lambda _: Encoder(width=3)},
     r"make_encoder returns Tensor torch\.float32 \(2, 3\); expected .* \(2, 4\) for .* "
     r"\(\(2, 6\), \(2,\)\)$"),
    ({"space": LEGS, "make_encoder": lambda _: Encoder(key=2)},
     r"make_encoder raises IndexError.*; .* shape \(2, 4\) for .* \(\(2, 6\), \(2,\)\)$"),
    ({"make_head": lambda name, size, number: nn.Linear(size, number + 1)},
     r"'policy'.* returns Tensor torch\.float32 \(2, 3, 6\); .* shape \(2, 3, 5\) for "
     r".* \(2, 3, 8\)$"),
    ({"make_head": lambda *about: nn.Linear(3, 1) if about[0] == "value" else None},
     r"'value'.* raises RuntimeError.*; .* shape \(2, 3, 1\) for .* \(2, 3, 8\)$"),
    ({"make_head": partial(make_converted, "value", lambda x: x.squeeze(1).unsqueeze(1))},
     r"'value'.* returns Tensor torch\.float32 \(2, 1, 3, 1\); .* shape \(2, 3, 1\)"),
    ({"space": LEGS, "make_encoder": lambda _: Converted(Encoder(), Tensor.squeeze)},
     r"make_encoder returns Tensor torch\.float32 \(4,\); expected .* \(1, 4\) for .*\(1, 6"),
    ({"space": LEGS, "make_encoder": partial(lambda one, _: one, Encoder())},
     "make_encoder returned one network twice; expected a new one at each call"),
    ({"make_head": partial(lambda one, name, *_: one if "value" in name else None,
                           nn.Linear(8, 1))}, r"make_head\('aux_value', …\) returned one"),
    *(({"space": LEGS, "make_encoder": partial(Converted, Encoder(), convert)},
       rf"make_encoder returns {given}.*; expected a Tensor of floats .*\(2, 4\) for ")
      for given, convert in OUTPUTS.items()),
    *(({"make_head": partial(make_converted, name, convert)},
       rf"make_head\('{name}', …\) returns {given}.*; expected a Tensor of floats")
      for given, convert in OUTPUTS.items() for name in ("policy", "value", "aux_value")),
    ({"make_encoder": lambda _: Converted(nn.Sequential(nn.ReLU(True), nn.Linear(6, 4)), abs)},
     "make_encoder writes into its inputs; expected new tensors"),
    ({"make_head": lambda _, *sizes: nn.Linear(*sizes, bias=False),
      "value_norm": ValueNormConfig(statistics="ema")}, "value heads nn.Linear with a bias"),
    ({"make_head": make_head, "value_norm": ValueNormConfig(statistics="ema")},
     r"value_norm\.statistics is ema; expected none"),
    ({"space": PICTURES, "obs_norm": OBS_NORM}, "obs_norm.statistics is moments"),
    ({"model": {"encoder": "impala"}}, "model.encoder is impala"),
    ({"model": {"policy_obs": ("actor",)}}, r"policy_obs .*actor; expected keys"),
    ({"space": TREE, "model": {"value_obs": ("legs", "arms")}}, "value_obs have legs, arms"),
])  # fmt: skip
def test_networks_and_spaces_that_do_not_fit_are_refused(
    arguments: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        make_agent(**arguments)


def test_linear_value_heads_of_ones_own_are_rescaled() -> None:
    norm = ValueNormConfig(statistics="ema", decay=0.5)
    agent = make_agent(value_norm=norm, make_head=lambda _, *sizes: nn.Linear(*sizes))
    agent.update_value_statistics(torch.tensor([1.0, 3.0]))
    before = ask(agent, observations()).value
    agent.update_value_statistics(torch.tensor([10.0, 60.0]))
    torch.testing.assert_close(ask(agent, observations()).value, before, rtol=1e-4, atol=1e-4)


def test_custom_heads_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    def add_dropout(*about: Any) -> Any:
        head: Any = make_head(*about)
        return head and nn.Sequential(*head, nn.Dropout(0.1))

    config, given = tiny(tmp_path, aux=tiny_aux()), {"make_env": Corridor, "make_head": add_dropout}
    run = train(config, **given)
    with build.start_run(config, **given) as fresh:
        start = fresh.agent.state_dict()
    trained = run.agent.state_dict()
    heads = [name for name in trained if name.startswith(("policy_head.linear.", "value_head."))]
    assert len(heads) == 8 and not any(torch.equal(trained[x], start[x]) for x in heads)
    assert_same_run(resume(train(config, **given, callbacks=stop_at(2)).directory, **given), run)
    agent = load(run.directory, **given)
    assert_same(agent.network.state_dict(), trained)
    obs = agent.observation_space.sample()
    first, state = torch.ones(1, 1).bool(), run.agent.initial_state(1)
    values = run.agent.eval().value(torch.tensor(obs)[None, None], first, state)
    assert agent.value(obs) == pytest.approx(values.item(), rel=1e-6)
    assert len(evaluate(run.directory, episodes=2, **given)) == 2
    with pytest.raises(ValueError, match=r"was trained with make_head=.*expected the same head"):
        evaluate(run.directory, make_env=Corridor)


class Groups(gym.Env[Any, Any]):
    """Episodes of one step; the critic alone sees whether the reward will be 1 or −1."""

    observation_space = gym.spaces.Dict(
        actor=gym.spaces.Box(-1, 1, (2,), np.float32),
        critic=gym.spaces.Box(-1, 1, (3,), np.float32),
    )
    action_space = gym.spaces.Discrete(2)

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self._sign = float(self.np_random.choice([-1, 1]))
        critic = np.full(3, self._sign, np.float32)
        return {"actor": np.zeros(2, np.float32), "critic": critic}, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = self._sign
        return self.reset()[0], reward, True, False, {}


def test_policy_and_value_network_read_their_own_groups_of_observations() -> None:
    model = {"encoder": "mlp", "policy_obs": ("actor",), "value_obs": ("critic",)}
    agent = make_agent(space=Groups.observation_space, actions=Groups.action_space, model=model)
    encoders: list[Any] = [agent.encoder, agent.value_encoder]
    assert [encoder.dense.layers[0].in_features for encoder in encoders] == [2, 3]
    obs = {"actor": torch.rand(S * L, 2), "critic": torch.rand(S * L, 3)}
    outputs = []
    for changed in (None, "actor", "critic"):
        given = {key: x + (key == changed) for key, x in obs.items()}
        output = agent.forward_normalized(given, NEVER, agent.initial_state(S))
        outputs.append((output.policy.dist_params, output.aux_value, output.value))
    (policy, aux, value), actor, critic = outputs
    assert torch.equal(critic[0], policy) and torch.equal(critic[1], aux)
    assert not torch.equal(critic[2], value)
    assert torch.equal(actor[2], value) and not torch.equal(actor[0], policy)


def test_a_policy_that_sees_may_have_a_critic_that_does_not() -> None:
    agent = make_agent(space=TREE, model={"policy_obs": ("eye",), "value_obs": ("legs", "mode")})
    kinds = [type(module).__name__ for module in agent.value_encoder.modules()]  # type: ignore[union-attr]
    assert "Conv2d" not in kinds
    assert "Conv2d" in [type(module).__name__ for module in agent.encoder.modules()]


def test_a_custom_encoder_gets_the_groups_that_are_named(tmp_path: Path) -> None:
    class Joined(nn.Module):
        def __init__(self, space: Any) -> None:
            super().__init__()
            self.num_features = sum(part.shape[0] for part in space.values())
            self.linear = nn.Linear(self.num_features, self.num_features)

        def forward(self, obs: Any) -> Tensor:
            return self.linear(torch.cat(list(obs.values()), -1))

    names: dict[str, Any] = {"model.policy_obs": ("actor",), "model.value_obs": ("critic",)}
    config = tiny(tmp_path, aux=tiny_aux()).with_updates(names)
    run = train(config, make_env=Groups, make_encoder=Joined)
    assert (run.agent.encoder.num_features, run.agent.value_encoder.num_features) == (2, 3)  # type: ignore[union-attr]


@pytest.mark.long
def test_a_critic_with_more_observations_learns_what_the_actor_cannot_see(tmp_path: Path) -> None:
    names: dict[str, Any] = {"model.policy_obs": ("actor",), "model.value_obs": ("critic",)}
    config = tiny(tmp_path, aux=tiny_aux(), total_env_steps=2048).with_updates(
        names | {"ppo.learning_rate": 0.01, "reward_norm.per": "none"}
    )
    agent = load(train(config, make_env=Groups).directory, make_env=Groups)
    for sign in (-1.0, 1.0):
        obs = {"actor": np.zeros(2, np.float32), "critic": np.full(3, sign, np.float32)}
        assert agent.value(obs) == pytest.approx(sign, abs=0.3)
        assert agent.act(obs) in (0, 1)
    with pytest.raises(ValueError, match=r"policy_obs is .*Use model.value_path separate"):
        config.with_updates({"model.value_path": "detached"})


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@every_path
def test_with_memory_sequences_are_their_steps(value_path: ValuePath, memory: str) -> None:
    agent = recurrent(value_path, memory)
    obs, width = stored(agent), agent.memory.state_size
    first = torch.rand(S, L, generator=Generator().manual_seed(3)) < 0.3
    first[0] = False
    state = torch.randn(S, agent.state_size, generator=Generator().manual_seed(4))
    whole, now = agent(obs, first, state), state
    for t in range(L):
        inputs = (obs[:, t : t + 1], first[:, t : t + 1], now)
        one, (alone, after) = agent(*inputs), agent.policy(*inputs)
        for value in (one.value, agent.value(*inputs)):
            torch.testing.assert_close(value[:, 0], whole.value[:, t], **CLOSE)
        for policy in (one.policy, alone):
            params = policy.dist_params[:, 0]
            torch.testing.assert_close(params, whole.policy.dist_params[:, t], **CLOSE)
        torch.testing.assert_close(after[:, :width], one.state[:, :width])
        assert torch.equal(after[:, width:], now[:, width:])
        now = one.state
    torch.testing.assert_close(now, whole.state, **CLOSE)
    forgotten = agent(obs, first, torch.zeros_like(state)).value[0]
    assert not torch.allclose(forgotten, whole.value[0], atol=1e-4)


def test_two_networks_have_their_own_memories() -> None:
    agent = recurrent()
    assert agent.state_size == 4 * 6 and recurrent("detached").state_size == 2 * 6
    obs, state = stored(agent), torch.randn(S, 24, generator=Generator().manual_seed(4))
    of_value = torch.cat([state[:, :12], -state[:, 12:]], dim=-1)
    before, after = agent(obs, NEVER, state), agent(obs, NEVER, of_value)
    assert torch.equal(before.policy.dist_params, after.policy.dist_params)
    assert not torch.allclose(before.value, after.value, atol=1e-4)


@pytest.mark.parametrize(("value_path", "count"), [("separate", 2), ("detached", 1), ("shared", 1)])
def test_every_parameter_belongs_to_one_network(value_path: ValuePath, count: int) -> None:
    agent = recurrent(value_path)
    networks = agent.params_per_network()
    members = [id(p) for network in networks for p in network]
    assert len(networks) == count and sorted(members) == sorted(map(id, agent.parameters()))
    if count == 2:
        ask(agent, stored(agent)).value.sum().backward()
        assert all(p.grad is None for p in networks[0])
        assert all(p.grad is not None for p in networks[1])


def test_the_value_network_may_have_another_non_linearity() -> None:
    agent = make_agent(model={"activation": "relu", "value_activation": "tanh"})
    assert agent.value_encoder is not None
    for encoder, kind in ((agent.encoder, nn.ReLU), (agent.value_encoder, nn.Tanh)):
        assert [kind] == [type(m) for m in encoder.modules() if isinstance(m, nn.ReLU | nn.Tanh)]


@pytest.mark.parametrize("tree", [False, True])
def test_observed_numbers_are_normalized_and_nothing_else_is(tree: bool) -> None:
    space = TREE if tree else VECTORS
    agent = make_agent(space=space, obs_norm=ObsNormConfig(statistics="moments", clip=1.5))
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


@pytest.mark.parametrize("statistics", ["moments", "ema"])
@every_path
def test_values_stay_when_their_statistics_move(statistics: Any, value_path: ValuePath) -> None:
    norm = ValueNormConfig(statistics=statistics, decay=0.5)
    agent, plain = make_agent(value_path, value_norm=norm), make_agent(value_path)
    raw, before = agent.value_normalizer, values_of(ask(plain, observations()))
    assert raw is not None and not plain.update_value_statistics(torch.tensor([1.0, 2.0]))
    assert plain.divide_by_value_std(before) is before
    places = [parameter.data_ptr() for parameter in agent.parameters()]
    # The first targets give the heads their units: mean 20, deviation 10.
    assert agent.update_value_statistics(torch.tensor([[10.0, 30.0]]))
    first = ask(agent, observations())
    torch.testing.assert_close(values_of(first), 20 + 10 * before)
    torch.testing.assert_close(agent.divide_by_value_std(values_of(first)), before + 2)
    # Far away, wide, then hardly any deviation (the floor), then wide again: everything in float32,
    # so in parts of the largest unit.
    for targets in ([-900.0, -700.0], [1e5, -1e5], [3.0, 3.0], [3.0] * 500, [-5.0, 5.0]):
        old_mean = raw.mean.item()
        assert not agent.update_value_statistics(torch.tensor(targets))
        assert raw.mean.item() != old_mean
        now, unit = ask(agent, observations()), max(abs(raw.mean.item()), raw.std.item(), 100)
        torch.testing.assert_close(values_of(now), values_of(first), rtol=0, atol=4e-6 * unit)
        assert torch.equal(now.policy.dist_params, first.policy.dist_params)
    # In place: compiled steps hold them.
    assert [parameter.data_ptr() for parameter in agent.parameters()] == places
    assert all(parameter.requires_grad for parameter in agent.parameters())


def test_rescaled_heads_by_hand() -> None:
    agent = make_agent(value_norm=ValueNormConfig(statistics="ema", decay=0.0))
    agent.update_value_statistics(torch.tensor([10.0, 30.0]))  # μ 20, σ 10
    with torch.no_grad():
        agent.value_head.weight.fill_(2.0)
        agent.value_head.bias.fill_(0.5)
    agent.update_value_statistics(torch.tensor([-5.0, 3.0]))  # μ' −1, σ' 4
    # w' = 10/4 · 2 and b' = (10 · 0.5 + 20 + 1) / 4
    torch.testing.assert_close(agent.value_head.weight, torch.full((1, 8), 5.0))
    torch.testing.assert_close(agent.value_head.bias, torch.tensor([6.5]))


@pytest.mark.parametrize("in_a_dict", [False, True])
@pytest.mark.parametrize("obs_norm", [ObsNormConfig(), OBS_NORM])
def test_one_number_alone_is_an_observation(
    tmp_path: Path, in_a_dict: bool, obs_norm: ObsNormConfig
) -> None:
    battery = gym.spaces.Box(0, 9, (), np.float32)

    class Battery(Corridor):
        def __init__(self) -> None:
            super().__init__()
            more = {"battery": battery, "place": self.observation_space}
            self.observation_space: Any = gym.spaces.Dict(more) if in_a_dict else battery

        def _obs(self) -> Any:
            level, place = np.float32(self._steps), super()._obs()
            return {"battery": level, "place": place} if in_a_dict else level

    run = train(tiny(tmp_path, obs_norm=obs_norm), make_env=Battery)
    for policy in evaluate(run.directory, episodes=2, make_env=Battery):
        assert len(policy.returns) == 2
