"""Agent: encoders, memory and heads with one forward contract. Kind: state (a module)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from phasicrl.config import ActionConfig, ModelConfig, ObsNormConfig, Precision, ValueNormConfig
from phasicrl.distributed import World
from phasicrl.models.distributions import Policy
from phasicrl.models.encoders import ObservationReader, autocast, build_encoder, check_image_scale
from phasicrl.models.heads import PolicyHead
from phasicrl.models.init import Initializer
from phasicrl.models.memory import Memory, make_memory
from phasicrl.normalize import ValueNormalizer
from phasicrl.spaces import map_leaves, select_keys

EncoderFactory = Callable[[gym.Space[Any]], nn.Module]
"""Function that makes a custom encoder for an observation space.

The encoder maps observations `[N, …]` to features `[N, D]`, and has an attribute `num_features`, D.
For `Dict` and `Tuple` spaces its input is a dict or a tuple of tensors."""
HeadFactory = Callable[[str, int, int], nn.Module | None]
"""Function of a head's name, number of features D and number of outputs M that makes the head.

The head maps features `[S, L, D]` to `[S, L, M]`. The name is `policy`, for the outputs that
`PolicyHead` lists, or `value` or `aux_value`, for a value. None stands for the linear layer of
`ModelConfig`."""


@dataclass(frozen=True, slots=True)
class AgentOutput:
    """Output of the agent for S sequences of L steps.

    Attributes:
        policy: distribution over actions, `[S, L]`.
        value: values V, `[S, L]`.
        aux_value: values of the auxiliary head on the policy's features, `[S, L]`; None without an
            auxiliary head.
        state: memory state after the last step, `[S, H]`.
    """

    policy: Policy
    value: Float[Tensor, "S L"]
    aux_value: Float[Tensor, "S L"] | None
    state: Float[Tensor, "S H"]


class Agent(nn.Module):
    """Policy, value and auxiliary value heads on one or two networks of encoder and memory.

    Encoders run in the requested precision, memory and heads in fp32. Networks by
    `model.value_path`:

    - `separate`: two networks; the value head is on the second.
    - `detached`: one network without gradient from the value head; only the auxiliary head trains
      it on values.
    - `shared_in_aux`: one network with the value head's gradient in the auxiliary phase only.
    - `shared`: one network with the value head's gradient in both phases.

    Source: PPG paper, figures 1 and 7; OPPG ppg.py:66-155.

    Args:
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        config: options of the networks.
        action: options of continuous actions.
        obs_norm: options of observation normalization.
        value_norm: options of value normalization.
        generator: random generator of the initial weights.
        auxiliary: whether there is an auxiliary value head; made last, so that other weights do not
            depend on it.
        make_encoder: function that makes a custom encoder, in place of `config.encoder`.
        make_head: function that makes custom heads, in place of linear layers.

    Raises:
        ValueError: the spaces do not fit the encoder or the heads.
    """

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], config: ModelConfig,
        *, action: ActionConfig = ActionConfig(), obs_norm: ObsNormConfig = ObsNormConfig(),
        value_norm: ValueNormConfig = ValueNormConfig(), generator: Generator, auxiliary: bool,
        make_encoder: EncoderFactory | None = None, make_head: HeadFactory | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.value_path, self.config = config.value_path, config
        self.reader = ObservationReader(observation_space, obs_norm)
        self._checks_images = make_encoder is None and not self.reader.normalizer
        self.check_image_scale()

        def new_encoder(config: ModelConfig) -> nn.Module:
            space = select_keys(observation_space, config.policy_obs)
            if make_encoder is None:
                return build_encoder(space, config, generator)
            custom: Any = make_encoder(space)
            if not hasattr(getattr(custom, "num_features", None), "__index__"):
                given = f"make_encoder returned a {type(custom).__name__} without num_features"
                raise ValueError(f"{given}; expected the width of its features, an integer")
            layout, width = self.reader.layout, int(custom.num_features)
            for number in (2, 1):  # `squeeze` would remove the axis of a single observation
                stored = torch.zeros(number, *layout.shape, dtype=getattr(torch, layout.dtype.name))
                inputs = select_keys(self.reader(stored), config.policy_obs)
                in_shape = map_leaves(space, lambda part: tuple(part.shape), inputs)
                self._check_net("make_encoder", custom, inputs, in_shape, (number, width))
            return custom

        def new_memory(encoder: Any) -> Memory:
            return make_memory(int(encoder.num_features), config, generator)

        def new_head(name: str, memory: Memory, num_outputs: int = 1) -> Any:
            size, out_shape = memory.num_features, (2, 3, num_outputs)
            if make_head and (head := make_head(name, size, num_outputs)) is not None:
                inputs, in_shape = torch.zeros(2, 3, size), (2, 3, size)
                return self._check_net(f"make_head({name!r}, …)", head, inputs, in_shape, out_shape)
            scale = config.policy_head_scale if name == "policy" else config.value_head_scale
            return Initializer(config.heads_init, generator)(nn.Linear(size, num_outputs), scale)

        value_activation = config.value_activation or config.activation
        value_config = replace(config, activation=value_activation, policy_obs=config.value_obs)
        self.encoder = new_encoder(config)
        self.value_encoder = new_encoder(value_config) if self.value_path == "separate" else None
        self.memory = memory = new_memory(self.encoder)
        self.value_memory = None if self.value_encoder is None else new_memory(self.value_encoder)
        self.policy_head = PolicyHead(action_space, action, partial(new_head, "policy", memory))
        self.value_head = new_head("value", self.value_memory or memory)
        self.aux_value_head = new_head("aux_value", memory) if auxiliary else None
        self.value_normalizer = self._make_value_normalizer(value_norm)
        for parameter in self.parameters():  # dense, since the fused Adam ignores strides
            parameter.data = parameter.data.clone()

    def _make_value_normalizer(self, norm: ValueNormConfig) -> ValueNormalizer | None:
        """Make the normalizer of values, which rescales the value heads; None if it is off.

        Raises:
            ValueError: a value head is not one linear layer with a bias.
        """
        if norm.statistics == "none":
            return None
        value_heads: list[Any] = [self.value_head, self.aux_value_head or self.value_head]
        if any(type(head) is not nn.Linear or head.bias is None for head in value_heads):
            given = f"value_norm.statistics is {norm.statistics}"
            raise ValueError(f"{given}; expected none, or value heads nn.Linear with a bias")
        return ValueNormalizer(statistics=norm.statistics, decay=norm.decay)

    @torch.no_grad()
    def _check_net(self, maker: str, net: Any, inputs: Any, in_shape: Any, out_shape: Any) -> Any:
        """Check that a custom network is new, and its output for some steps; return the network.

        Raises:
            ValueError: the network has a role already, it fails, or its output has another type or
                shape.
        """
        if any(net is each for each in self.modules()):
            raise ValueError(f"{maker} returned one network twice; expected a new one at each call")
        rule = f"a Tensor of floats of shape {out_shape} for inputs of shape {in_shape}"
        versions = [(x, x._version) for x in tree_leaves(inputs) if not x.is_inference()]
        try:
            output = net.eval()(inputs)
        except Exception as error:
            raise ValueError(f"the network of {maker} raises {error!r}; expected {rule}") from error
        shape, dtype = (getattr(output, name, "") for name in ("shape", "dtype"))
        if not isinstance(output, Tensor) or not output.is_floating_point() or shape != out_shape:
            given = f"{type(output).__name__} {dtype} {tuple(shape)}"
            raise ValueError(f"the network of {maker} returns {given}; expected {rule}")
        if any(x._version != version for x, version in versions):  # as in x /= 255
            raise ValueError(f"the network of {maker} writes into its inputs; expected new tensors")
        return net.train()

    def check_image_scale(self, stored: Shaped[Tensor, "N *shape"] | None = None) -> None:
        """Check that no network reads floats as large as bytes, see `encoders.check_image_scale`.

        Args:
            stored: observations `[N, …]`; None to check the bounds of the space.
        """
        is_float = any(len(x.shape) == 3 and x.dtype != "uint8" for x in self.reader.layout.leaves)
        obs = self.reader.layout.unpack(stored) if stored is not None and is_float else None
        for keys in {self.config.policy_obs, self.config.value_obs} if self._checks_images else ():
            check_image_scale(select_keys(self.reader.layout.space, keys), self.config.encoder, obs)

    @property
    def state_size(self) -> int:
        """Width H of the memory state: of the policy network, then of a separate value network."""
        return sum(memory.state_size for memory in (self.memory, self.value_memory) if memory)

    def initial_state(self, num_sequences: int) -> Float[Tensor, "S H"]:
        """Return the memory state before the first step, `[S, H]`."""
        return torch.zeros(num_sequences, self.state_size, device=self.policy_head.order.device)

    def params_per_network(self) -> list[list[nn.Parameter]]:
        """Return the parameters of the policy's network, and of the value network if separate."""
        if self.value_path != "separate":
            return [list(self.parameters())]
        policy, value = [], []
        for name, parameter in self.named_parameters():
            is_value = name.startswith(("value_encoder.", "value_memory.", "value_head."))
            (value if is_value else policy).append(parameter)
        return [policy, value]

    def forward(
        self, obs: Shaped[Tensor, "S L *shape"], first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"], action_mask: Bool[Tensor, "S L A"] | None = None,
        *, precision: Precision = "fp32", in_aux_phase: bool = False,
    ) -> AgentOutput:  # fmt: skip
        """Compute policy and values of S sequences of L steps; L is 1 when acting.

        Args:
            obs: stored observations, `[S, L, …]`.
            first: whether a step is the first of its episode, `[S, L]`; the memory is reset before.
            state: memory state before the first step, `[S, H]`.
            action_mask: allowed actions, `[S, L, A]`; None if all are.
            precision: precision of the encoders.
            in_aux_phase: whether the auxiliary loss is computed, for `shared_in_aux`.
        """
        inputs = self.reader(obs.flatten(0, 1))
        return self.forward_normalized(
            inputs, first, state, action_mask, precision=precision, in_aux_phase=in_aux_phase
        )

    def forward_normalized(
        self, inputs: Any, first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"],
        action_mask: Bool[Tensor, "S L A"] | None = None,
        *, precision: Precision = "fp32", in_aux_phase: bool = False,
    ) -> AgentOutput:  # fmt: skip
        """Compute policy and values from `ObservationReader`'s output `[S·L, …]`, see `forward`."""
        encode = partial(self._encode, inputs, first, state, precision)
        features, policy_state = encode(self.encoder, self.memory)
        if self.value_encoder is not None and self.value_memory is not None:
            value_features, value_state = encode(self.value_encoder, self.value_memory)
        else:
            value_state = state[:, self.memory.state_size :]
            paths = ("shared", "shared_in_aux") if in_aux_phase else ("shared",)
            value_features = features if self.value_path in paths else features.detach()
        policy = self.policy_head(features, action_mask)
        value = self._value_of(self.value_head, value_features)
        aux_head = self.aux_value_head
        aux_value = None if aux_head is None else self._value_of(aux_head, features)
        state = torch.cat([policy_state, value_state], dim=-1)
        return AgentOutput(policy, value, aux_value, state)

    def value(
        self, obs: Shaped[Tensor, "S L *shape"], first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"], *, precision: Precision = "fp32",
    ) -> Float[Tensor, "S L"]:  # fmt: skip
        """Compute only the values `[S, L]`, see `forward`."""
        if self.value_encoder is None or self.value_memory is None:
            return self.forward(obs, first, state, precision=precision).value
        inputs, memory = self.reader(obs.flatten(0, 1)), self.value_memory
        features, _ = self._encode(inputs, first, state, precision, self.value_encoder, memory)
        return self._value_of(self.value_head, features)

    def policy(
        self, obs: Shaped[Tensor, "S L *shape"], first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"], action_mask: Bool[Tensor, "S L A"] | None = None,
        *, precision: Precision = "fp32",
    ) -> tuple[Policy, Float[Tensor, "S H"]]:  # fmt: skip
        """Compute only the policy `[S, L]` and the next memory state `[S, H]`, see `forward`.

        The columns of the state that belong to a separate value network are returned unchanged.
        """
        inputs = self.reader(obs.flatten(0, 1))
        features, updated = self._encode(inputs, first, state, precision, self.encoder, self.memory)
        state = torch.cat([updated, state[:, self.memory.state_size :]], dim=-1)
        return self.policy_head(features, action_mask), state

    @torch.no_grad()
    def update_value_statistics(self, target: Float[Tensor, "..."]) -> bool:
        """Update the value normalizer with targets `[…]`; return whether it was the first update.

        The first update rescales no head, so that the caller has to convert stored values by
        `denormalize`: an untrained head starts at the targets' mean and deviation. With unchanged
        values near 0 it would start `μ / σ` deviations off.

        Later updates rescale the heads so that values are unchanged up to rounding (Pop-Art: van
        Hasselt et al. 2016, "Learning values across many orders of magnitude", equation 9). An
        output `o` means `σ o + μ`; when (μ, σ) become (μ', σ'), the head becomes `w' = σ w / σ'`
        and `b' = (σ b + μ − μ') / σ'`. Otherwise targets would bootstrap from shifted values and
        shift the statistics further.

        Adam's moments are not rescaled; they are forgotten within 1 / (1 − β₂) steps, and σ'/σ is
        soon near 1.
        """
        if (normalizer := self.value_normalizer) is None:
            return False
        # All statistics are zero before the first update.
        is_first = not any(each.any() for each in normalizer.moments.buffers())
        old_mean, old_std = normalizer.mean.double(), normalizer.std.double()
        normalizer.update(target)
        if is_first:
            return True
        mean, std = normalizer.mean.double(), normalizer.std.double()
        for head in (self.value_head, self.aux_value_head):
            if head is not None:
                # In place, because compiled steps and optimizers refer to these tensors.
                head.weight.copy_(head.weight.double() * (old_std / std))
                head.bias.copy_((head.bias.double() * old_std + old_mean - mean) / std)
        return False

    def divide_by_value_std(self, value: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Divide values or targets `[…]` by the targets' standard deviation, if normalized.

        The mean is not subtracted: losses depend on differences of values only.
        """
        return value if self.value_normalizer is None else value / self.value_normalizer.std

    def _encode(
        self, inputs: Any, first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"],
        precision: Precision, encoder: nn.Module, memory: Memory,
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S K"]]:  # fmt: skip
        """Return the features of one network, and its next memory state."""
        split, is_policy = self.memory.state_size, memory is self.memory
        memory_state = state[:, :split] if is_policy else state[:, split:]
        inputs = select_keys(inputs, self.config.policy_obs if is_policy else self.config.value_obs)
        with autocast(precision, first.device):
            features = encoder(inputs).float()
        return memory(features.unflatten(0, first.shape), first, memory_state)

    def _value_of(self, head: nn.Module, features: Float[Tensor, "S L D"]) -> Float[Tensor, "S L"]:
        """Compute the values of a head, in the units of normalized rewards."""
        value = head(features).squeeze(-1).float()
        return value if self.value_normalizer is None else self.value_normalizer.denormalize(value)


@torch.no_grad()
def diagnose_networks(
    agent: Agent, obs: Shaped[Tensor, "N *shape"], *, precision: Precision, world: World
) -> dict[str, float]:
    """Measure the fractions of dormant features and of clipped inputs.

    Args:
        agent: networks to measure.
        obs: stored observations of this process, `[N, …]`.
        precision: precision of the encoder.
        world: processes whose observations are measured together.
    """
    gpus = [obs.device] if obs.is_cuda else []
    with autocast(precision, obs.device), torch.random.fork_rng(gpus):  # networks may draw
        inputs = select_keys(agent.reader(obs), agent.config.policy_obs)
        # In training, dropout would draw numbers, and batch normalization count these samples.
        modes = [(module, module.training) for module in agent.encoder.modules()]
        features = agent.encoder.eval()(inputs).float().abs().mean(0)
    for module, is_training in modes:
        module.training = is_training
    dormant = dormant_fraction(world.all_gather_cat(features[None]).mean(0))
    record = {"network/dormant_fraction": float(dormant)}
    if agent.reader.normalizer is not None:
        clipped = {"observations/clipped_fraction": agent.reader.clipped_fraction(obs)}
        record |= world.average_record(clipped)
    return record


def dormant_fraction(mean_abs: Float[Tensor, " D"], *, tau: float = 0.025) -> Float[Tensor, ""]:
    """Return the fraction of units whose activation is at most τ times the average, 0-d.

    All units are dormant if every activation is 0.

    Source: Sokar et al. 2023, "The dormant neuron phenomenon in deep reinforcement learning",
    definition 3.1, with τ = 0.025.

    Args:
        mean_abs: mean absolute activation of each unit, `[D]`.
        tau: threshold τ.
    """
    return (mean_abs <= tau * mean_abs.mean()).float().mean()
