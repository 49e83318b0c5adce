"""Options of a run, as frozen dataclasses. Imports no torch, so that `--help` is fast.

Each optional group has a value that switches it off. Derived numbers are properties. `num_envs`,
batch and minibatch sizes are global. An option's text names the code that it reproduces (OPPG =
openai/phasic-policy-gradient, CleanRL = vwxyzjn/cleanrl, Baselines = openai/baselines); `(ours)`
marks an option that no paper or reference code has.
"""

import ast
import functools
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self, cast, get_args, get_type_hints

from phasicrl import config_io
from phasicrl.config_io import ConfigError, convert, get_types, suggest_name

ValuePath = Literal["separate", "detached", "shared_in_aux", "shared"]
Initialization = Literal["normalized", "orthogonal", "glorot", "torch"]
Activation = Literal["relu", "tanh", "gelu", "elu"]
MinibatchUnit = Literal["segments", "transitions"]
Statistics = Literal["moments", "ema"]
OptionValue = str | int | float | bool
Precision = Literal["fp32", "bf16"]
ActionSelection = Literal["greedy", "sampled"]
Levels = Literal["unseen", "train"]
EvaluatedLevels = Literal["unseen", "train", "both"]
ProcgenDistribution = Literal["easy", "hard", "extreme", "memory", "exploration"]

ScheduleFunction = Callable[[float], Mapping[str, float]]
"""Function of the progress of a run, 0 to 1, that returns values of some options by path."""
DECAY_FUNCTIONS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: math.cos(math.pi * progress / 2) ** 2,  # (1 + cos) / 2 may be 0
}
"""Factor of an option by the progress of a run, 0 to 1, for each schedule that changes it."""
_RANGE_CHECKS: dict[str, Callable[[float], bool]] = {
    "a number above 0": lambda x: 0 < x < math.inf,
    "0 or a number above it": lambda x: 0 <= x < math.inf,
    "a finite number": math.isfinite,
    "a number from 0 to 1": lambda x: 0 <= x <= 1,
    "a number from 0 to below 1": lambda x: 0 <= x < 1,
}
_PositiveInt = Annotated[int, "a number above 0"]
_NonNegativeInt = Annotated[int, "0 or a number above it"]
_PositiveFloat = Annotated[float, "a number above 0"]
_NonNegativeFloat = Annotated[float, "0 or a number above it"]
_Share = Annotated[float, "a number from 0 to 1"]
_Decay = Annotated[float, "a number from 0 to below 1"]


@functools.cache
def _get_range_texts(group_type: type) -> dict[str, str]:
    """Return the allowed range of each number in a group, as text by option."""
    hints = get_type_hints(group_type, include_extras=True)
    return {
        name: text
        for name, hint in hints.items()
        for member in (hint, *get_args(hint))
        for text in getattr(member, "__metadata__", ())
    }


class _Group:
    """Group of options, whose constructor raises all problems with their values at once."""

    __slots__ = ()
    _prefix: ClassVar[str] = ""
    """Beginning of the paths of the group's options, such as `env.`; by the name of its class."""

    def __init_subclass__(cls) -> None:
        words = re.sub("(?<=[a-z])(?=[A-Z])", "_", cls.__name__.removesuffix("Config")).lower()
        cls._prefix = f"{words}." * bool(words)  # RewardNormConfig: `reward_norm.`

    def __new__(cls, *given: Any, **values: Any) -> Self:
        """Check the names of the options that the constructor gets.

        Raises:
            ConfigError: an option is unknown (the message suggests one), or has no name.
        """
        call = f"{cls.__name__}({next(iter(get_types(cls)))}=…)"
        problems = [f"{value!r} has no name; expected {call}" for value in given]
        unknown = [cls._prefix + name for name in values if name not in get_types(cls)]
        problems += [f"unknown option {x}{suggest_name(x, get_defaults())}" for x in unknown]
        if problems:
            raise ConfigError(problems)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check and convert the values of all options of the group."""
        problems: list[str] = []
        for name, kind in get_types(type(self)).items():
            path, text = f"{self._prefix}{name}", _get_range_texts(type(self)).get(name)
            try:
                value = convert(kind, getattr(self, name), path)
            except ValueError as error:
                problems.append(str(error))
                continue
            object.__setattr__(self, name, value)
            parts = cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,))
            if text and not all(isinstance(x, str | None) or _RANGE_CHECKS[text](x) for x in parts):
                problems.append(f"{path} is {value}; expected {text}")
        if problems := problems or list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        """Yield problems with combinations of values that are each in their range."""
        yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig(_Group):
    """Options of the environments (ours unless noted; Procgen: for its games only)."""

    id: str = "procgen:starpilot"
    """Id of the environment, such as `procgen:coinrun`, `envpool:Ant-v4` or `CartPole-v1`."""
    num_envs: _PositiveInt = 64
    """Number of environments B, over all processes."""
    num_threads: _PositiveInt | None = None
    """Number of EnvPool's threads; none: one per core, or one for classic control and toy text."""
    max_restarts: _NonNegativeInt = 0
    """Maximum number of failures; a failed environment is replaced, its episode truncated."""
    vectorization: Literal["sync", "async"] = "sync"
    """Execution of Gymnasium environments.
    `sync`: one after the other.
    `async`: at the same time, each in its process."""
    action_masks: bool = True
    """Use the environment's action masks, if it has any (source 003); EnvPool's are not read."""
    observe: tuple[int, ...] | None = None
    """Components of observation vectors that the agent observes, such as `0 2`; none: all."""
    heuristic_mask_steps: _NonNegativeInt = 100_000
    """Number of steps at the start of training with the masks of `mask_actions` (source 003)."""
    options: Mapping[str, OptionValue] = field(default_factory=dict[str, OptionValue], hash=False)
    """Options of the environment, `KEY=VALUE …`, in addition to those of the preset."""
    distribution: ProcgenDistribution = "easy"
    """Procgen: difficulty of the levels."""
    num_levels: _NonNegativeInt = 0
    """Procgen: number of distinct training levels; 0: unlimited."""

    def _problems(self) -> Iterator[str]:
        if not self.id or not self.id.isprintable():
            yield f"env.id is {self.id!r}; expected printable text. `phasicrl envs` lists ids"
        for key, value in dict[str, Any](self.options).items():
            if not isinstance(value, OptionValue) or repr(value) in ("inf", "-inf", "nan"):
                yield f"env.options has {key} = {value!r}; expected a text, bool or finite number"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_Group):
    """Options of the networks."""

    value_path: ValuePath = "separate"
    """Networks of policy and value function.
    `separate`: two networks (PPG paper).
    `detached`: one network, without the value gradient (OPPG).
    `shared_in_aux`: one network, with the value gradient in the auxiliary phase only (PPG paper).
    `shared`: one network, with the value gradient in both phases."""
    encoder: Literal["impala", "nature", "mlp"] = "impala"
    """Network from observations to features.
    `impala`: residual convolutions (Espeholt et al. 2018).
    `nature`: three convolutions (Mnih et al. 2015).
    `mlp`: dense layers, for vectors."""
    image_layout: Literal["auto", "channels_first", "channels_last"] = "auto"
    """Axis of an image that holds its channels (ours).
    `auto`: the first or the last one if the other two are longer, and no doubt is left.
    `channels_first`: channels, height, width.
    `channels_last`: height, width, channels."""
    channels: tuple[_PositiveInt, ...] = (16, 32, 32)
    """IMPALA: output channels of each stack (OPPG: 16 32 32)."""
    blocks: _NonNegativeInt = 2
    """IMPALA: number of residual blocks in each stack (OPPG: 2)."""
    pooling: Literal["symmetric", "same"] = "symmetric"
    """IMPALA: padding of max-pools.
    `symmetric`: on both sides (OPPG).
    `same`: as in TensorFlow (Baselines)."""
    hidden_sizes: tuple[_PositiveInt, ...] = (256,)
    """Widths of dense layers, in an `mlp` or after convolutions (OPPG: 256; Baselines: 64 64)."""
    activation: Activation = "relu"
    """Activation function of dense layers on vectors (Baselines: tanh); for images it is ReLU."""
    value_activation: Activation | None = None
    """Activation function of a separate value network (source 004); none: the policy network's."""
    layer_norm: bool = False
    """Normalize the outputs of dense layers before their activation function (source 000)."""
    init: Initialization = "normalized"
    """Initial weights of hidden layers.
    `normalized`: unit rows times a scale (OPPG).
    `orthogonal`: orthogonal, with gain √2 (CleanRL).
    `glorot`: uniform (Baselines' IMPALA).
    `torch`: PyTorch's default."""
    head_init: Initialization | None = None
    """Initial weights of the heads, see `model.init`; none: `normalized` if `model.init` is (OPPG),
    else `orthogonal`."""
    policy_head_scale: _PositiveFloat = 0.1
    """Scale of the policy head's initial weights: 0.1 in PPG (OPPG), 0.01 in PPO (Baselines)."""
    value_head_scale: _PositiveFloat = 0.1
    """Scale of the value heads' initial weights: 0.1 in PPG (OPPG), 1 in PPO (Baselines)."""
    policy_obs: tuple[str, ...] | None = None
    """Keys of dictionary observations that the policy reads, as `actor` (rsl_rl); none: all."""
    value_obs: tuple[str, ...] | None = None
    """Keys that a separate value network reads, as `critic` (rsl_rl); none: all."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """Memory after each encoder.
    `none`: no memory.
    `lstm`: LSTM (Hochreiter 1997; contrib).
    `gru`: GRU."""
    memory_size: _PositiveInt = 128
    """Width of the memory's output (contrib: 256; CleanRL: 128)."""

    @property
    def heads_init(self) -> Initialization:
        """Initialization of the heads: `head_init`, or its default for `init`."""
        return self.head_init or ("normalized" if self.init == "normalized" else "orthogonal")

    def _problems(self) -> Iterator[str]:
        if not self.channels:
            yield "model.channels is empty; expected a width for each stack, such as 16 32 32"
        if () in (self.policy_obs, self.value_obs):
            yield "model.policy_obs or model.value_obs is empty; expected keys, or none for all"
        if self.value_path != "separate" and self.policy_obs != self.value_obs:
            given = f"model.policy_obs is {self.policy_obs}, model.value_obs is {self.value_obs}"
            yield f"{given}; expected equal ones in one network. Use model.value_path separate"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionConfig(_Group):
    """Options of continuous actions: normal distributions of independent components."""

    mean: Literal["raw", "tanh"] = "raw"
    """Mean of the distribution.
    `raw`: the network's output.
    `tanh`: its tanh, in [−1, 1] (source 004)."""
    std: Literal["parameter", "softplus", "softplus_tanh", "exp", "fixed", "range"] = "parameter"
    """Standard deviation of the distribution.
    `parameter`: trained, independent of observations (Baselines).
    `softplus`: softplus of a network output (Acme).
    `softplus_tanh`: softplus of the tanh of a network output (source 004).
    `exp`: exponential of a network output.
    `fixed`: constant.
    `range`: constant share of the action range (source 004)."""
    std_value: _PositiveFloat = 1.0
    """Initial standard deviation (Baselines: 1), to which those of a network output add
    `min_std`; with `fixed` its value, with `range` the share."""
    min_std: _PositiveFloat = 1e-6
    """Minimum of trained standard deviations (Acme: 1e-6)."""
    max_std: _PositiveFloat | None = None
    """Maximum of trained standard deviations (ours); none: no limit."""
    squash: Literal["none", "clip", "tanh"] = "none"
    """Restriction of actions to the action range.
    `none`: no restriction.
    `clip`: clipped in the environment only (CleanRL).
    `tanh`: tanh of a normal distribution (Haarnoja et al. 2018)."""
    rescale: bool = False
    """Map [−1, 1] linearly to the action range (source 004); always on with `tanh`."""

    def _problems(self) -> Iterator[str]:
        if self.mean == "tanh" and self.squash == "tanh":
            yield "action.mean and action.squash are both tanh; expected at most one of them"
        is_trained, high = self.std not in ("fixed", "range"), self.max_std or math.inf
        if is_trained and not self.min_std <= self.std_value <= high:
            rule = f"a number from {self.min_std} (action.min_std) to {high} (action.max_std)"
            yield f"action.std_value is {self.std_value}; expected {rule}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(_Group):
    """Options of the policy phase: rollouts, advantages, epochs and losses."""

    num_steps: _PositiveInt = 256
    """Number of steps T of each environment in a rollout (PPG paper: 256)."""
    collect_by: Literal["steps", "episodes"] = "steps"
    """Steps of a rollout to train on.
    `steps`: all.
    `episodes`: those of complete episodes that begin in the first half (source 003); the auxiliary
    phase trains on all."""
    max_episodes: _PositiveInt | None = None
    """Maximum number of complete episodes per rollout (source 003); none: no limit."""
    gamma: _Share = 0.999
    """Discount factor γ (PPG paper: 0.999)."""
    reward_clip: _PositiveFloat | None = None
    """Bound of rewards before normalization, ± this (Atari, Mnih et al. 2015: 1); none: off."""
    estimator: Literal["gae", "n_step", "monte_carlo"] = "gae"
    """Estimator of advantages.
    `gae`: generalized advantage estimation (Schulman et al. 2016).
    `n_step`: n-step returns minus values (source 003).
    `monte_carlo`: returns to the end of the episode minus values (source 003)."""
    gae_lambda: _Share = 0.95
    """λ of generalized advantage estimation (Schulman et al. 2016, eq. 16)."""
    value_target: Literal["gae", "monte_carlo"] = "gae"
    """Value targets with the estimator `gae`.
    `gae`: values plus advantages (Schulman et al. 2016).
    `monte_carlo`: returns to the end of the episode (Spinning Up)."""
    n_step: _PositiveInt = 5
    """Number of rewards in `n_step` returns (source 003)."""
    baseline: bool = True
    """Subtract values from returns; off: no value function, as in REINFORCE (Williams 1992)."""
    recompute_advantages: bool = False
    """Recompute values, advantages and targets before each epoch after the first (Tianshou)."""
    bootstrap_truncation: bool = True
    """Bootstrap at time limits (Pardo et al. 2018); off: treat them as terminations (OPPG)."""
    truncation_value: Literal["final_obs", "rsl_rl"] = "final_obs"
    """Value of a truncated episode's end.
    `final_obs`: of its final observation (Pardo et al. 2018).
    `rsl_rl`: of the observation before its last step, which is biased (rsl_rl)."""
    policy_epochs: _PositiveInt = 1
    """Number of policy epochs E_π over each rollout (PPO paper, algorithm 1; PPG paper: 1)."""
    value_epochs: _NonNegativeInt = 1
    """Number of value epochs E_V over each rollout (PPG paper: 1)."""
    epoch_order: Literal["value_first", "policy_first"] = "value_first"
    """Order of policy and value epochs.
    `value_first`: joint epochs if E_π = E_V, else value epochs, then policy epochs (OPPG).
    `policy_first`: policy epochs, then value epochs (PPG paper)."""
    num_minibatches: _PositiveInt = 8
    """Number of minibatches per epoch (PPO paper, algorithm 1; PPG paper: 8)."""
    minibatch_by: Literal["auto", MinibatchUnit] = "segments"
    """Unit that is shuffled into minibatches.
    `auto`: `segments` with a memory, else `transitions` (ours).
    `segments`: all steps of an environment in a rollout (OPPG).
    `transitions`: single steps (Baselines, CleanRL)."""
    objective: Literal["surrogate", "log_prob"] = "surrogate"
    """Objective of the policy.
    `surrogate`: probability ratio times advantage (PPO paper, eq. 6).
    `log_prob`: log-probability times advantage, as in REINFORCE (Williams 1992)."""
    clip: _PositiveFloat | None = 0.2
    """Clip range ε of the probability ratio (PPO paper, eq. 7); none: no clipping."""
    clip_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the clip range.
    `constant`: no change (OPPG).
    `linear`, `cosine`: decay to zero (Baselines; ours)."""
    kl_penalty: _NonNegativeFloat = 0.0
    """Weight of the penalty on the KL divergence from the old policy (PPO paper, eq. 8)."""
    kl_estimate: Literal["sampled", "exact"] = "sampled"
    """Divergence in the KL penalty.
    `sampled`: half the mean squared log-ratio (OPPG).
    `exact`: KL(old ‖ new) in closed form."""
    kl_penalty_target: _PositiveFloat | None = None
    """Target KL by which the penalty's weight adapts (PPO paper, section 4); none: constant."""
    epoch_kl: Literal["k3", "k1"] = "k3"
    """Estimate of the KL after an epoch.
    `k3`: mean of ratio − 1 − log ratio (SB3).
    `k1`: mean of −log ratio (Spinning Up)."""
    target_kl: _PositiveFloat | None = None
    """KL above which policy epochs stop (CleanRL; Spinning Up: 0.015); none: no early stop."""
    proximal_decay: _Decay | None = None
    """Decay of the average of weights that updates are clipped around (ppo-ewma); none: clip
    around the policy that acted."""
    entropy_coef: _NonNegativeFloat = 0.01
    """Weight of the entropy bonus (PPO paper, eq. 9; PPG paper: 0.01)."""
    entropy_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Schedule of the weight of the entropy bonus.
    `constant`: no change (OPPG).
    `linear`, `cosine`: decay to zero (ours)."""
    value_coef: _NonNegativeFloat = 1.0
    """Weight of the value loss, half the squared error (OPPG: 1, its vfcoef of 0.5)."""
    value_clip: _PositiveFloat | None = None
    """Clip range of a value's change since the rollout (Baselines, CleanRL: 0.2); none: off."""
    advantage_norm: Literal["batch", "minibatch", "none"] = "batch"
    """Normalization of advantages.
    `batch`: over all steps of a rollout (OPPG).
    `minibatch`: over each minibatch (Baselines).
    `none`: off."""
    advantage_std: Literal["biased", "unbiased"] = "biased"
    """Standard deviation of n advantages.
    `biased`: divide by n (OPPG, Baselines).
    `unbiased`: divide by n − 1 (CleanRL, SB3)."""
    advantage_decay: _Decay = 0.0
    """Weight of earlier rollouts in the statistics of advantages (ppo-ewma); 0: none."""
    learning_rate: _PositiveFloat = 5e-4
    """Learning rate of Adam (PPG paper: 5e-4)."""
    value_learning_rate: _PositiveFloat | None = None
    """Learning rate of a separate value network (Spinning Up: 1e-3); none: `ppo.learning_rate`."""
    schedule: Literal["constant", "linear", "cosine", "adaptive_kl"] = "constant"
    """Learning-rate schedule.
    `constant`: no change (OPPG).
    `linear`, `cosine`: decay to zero (Baselines; ours).
    `adaptive_kl`: by the analytic KL of each minibatch, before its gradient step (rsl_rl)."""
    schedule_kl: _PositiveFloat = 0.01
    """Target KL of `adaptive_kl`, which changes the rate by factors of 1.5 (rsl_rl)."""
    adam_betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Adam's β₁ and β₂, in both phases (ppo-ewma)."""
    adam_eps: _PositiveFloat = 1e-8
    """Adam's ε: 1e-8 in PPG (OPPG), 1e-5 in PPO (Baselines)."""
    adam_eps_hat: bool = False
    """Add ε before the bias of the second moment is corrected, as TensorFlow does (Baselines)."""
    max_grad_norm: _PositiveFloat | None = None
    """Maximum norm of the gradient (Baselines: 0.5; none in OPPG); none: no clipping."""
    grad_norm_of: Literal["networks", "agent"] = "networks"
    """Gradient norm to clip with two networks.
    `networks`: the norm of each network.
    `agent`: the common norm (CleanRL)."""

    def _problems(self) -> Iterator[str]:
        if not self.baseline and self.estimator != "monte_carlo":
            yield f"ppo.estimator is {self.estimator}; expected monte_carlo without ppo.baseline"
        if self.objective == "log_prob" and (self.clip is not None or self.policy_epochs != 1):
            given = f"ppo.clip is {self.clip} and ppo.policy_epochs {self.policy_epochs}"
            rule = "none and 1 with ppo.objective log_prob. Set ppo.value_epochs to 1, too"
            yield f"{given}; expected {rule}"

    @property
    def epoch_kinds(self) -> tuple[tuple[bool, bool], ...]:
        """Losses of a rollout's epochs in order, as flags (policy, value).

        With `value_first` all have both losses if E_π = E_V; else value epochs come first (OPPG
        ppo.py:222-245). With `policy_first` policy epochs come first (PPG paper, algorithm 1).
        """
        policy = ((True, False),) * self.policy_epochs
        value = ((False, True),) * self.value_epochs
        if not self.baseline:
            return policy
        if self.epoch_order == "policy_first":
            return policy + value
        if self.policy_epochs == self.value_epochs:
            return ((True, True),) * self.policy_epochs
        return value + policy

    @property
    def uses_epoch_kl(self) -> bool:
        """Return whether the KL measured after an epoch stops epochs or adapts the penalty."""
        return self.target_kl is not None or self.kl_penalty_target is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxConfig(_Group):
    """Options of the auxiliary phase of PPG."""

    epochs: _NonNegativeInt = 0
    """Number of auxiliary epochs E_aux (PPG paper: 6); 0: no auxiliary phase, which is PPO."""
    every: _PositiveInt = 32
    """Number of policy iterations N_π before each auxiliary phase (PPG paper: 32)."""
    run_every: _PositiveInt = 1
    """Run every k-th auxiliary phase only, and drop the data of the others (source 000: 2)."""
    num_minibatches: _PositiveInt = 16
    """Number of minibatches per epoch and policy iteration (PPG paper: 16)."""
    iterations_per_epoch: _PositiveInt | None = None
    """Amount of data in an auxiliary epoch, in policy iterations (source 001); none: all N_π."""
    iterations_from: Literal["phase", "last"] = "phase"
    """Data of an auxiliary epoch with `aux.iterations_per_epoch`.
    `phase`: random data of the whole phase (source 001).
    `last`: the last iterations only, which is worse (source 001)."""
    recompute_targets: bool = False
    """Recompute value targets at the start of the auxiliary phase (source 001)."""
    minibatch_by: Literal["auto", MinibatchUnit] = "segments"
    """Unit that is shuffled into minibatches.
    `auto`: `segments` with a memory, else `transitions` (ours).
    `segments`: all steps of an environment in a rollout (OPPG, CleanRL).
    `transitions`: single steps."""
    beta_clone: _NonNegativeFloat = 1.0
    """Weight β of the KL divergence from the policy before the phase (PPG paper: 1)."""
    value_coef: _NonNegativeFloat = 1.0
    """Weight of the value loss in the auxiliary phase (0: PPG paper, figure 9)."""
    optimizer: Literal["own", "shared"] = "own"
    """Optimizer of the auxiliary phase.
    `own`: a separate Adam (OPPG).
    `shared`: the Adam of the policy phase (CleanRL)."""
    learning_rate: _PositiveFloat = 5e-4
    """Learning rate of a separate Adam (PPG paper: 5e-4); not used with `shared`."""
    max_grad_norm: _PositiveFloat | None = None
    """Maximum norm of each network's gradient (CleanRL: 0.5); none: no clipping."""

    def _problems(self) -> Iterator[str]:
        if (self.iterations_per_epoch or 0) > self.every:
            given = f"aux.iterations_per_epoch is {self.iterations_per_epoch}"
            yield f"{given}; expected at most aux.every, {self.every}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNormConfig(_Group):
    """Options of reward normalization, by the deviation of the running discounted return."""

    per: Literal["none", "rollout", "step"] = "none"
    """Normalization of rewards.
    `none`: off.
    `rollout`: by statistics that are updated once per rollout (OPPG).
    `step`: by statistics that are updated at each step (Baselines, CleanRL)."""
    gamma: _Share | None = None
    """Discount factor of the running return (OPPG, Baselines: 0.99); none: `ppo.gamma`."""
    clip: _PositiveFloat = 10.0
    """Bound of normalized rewards, ± this (OPPG, Baselines: 10)."""
    reset_at: Literal["end", "termination"] = "end"
    """Reset of the running return.
    `end`: at each end of an episode (OPPG).
    `termination`: at terminations only (Gymnasium)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsNormConfig(_Group):
    """Options of observation normalization; its statistics are saved as weights."""

    statistics: Literal["none", Statistics] = "none"
    """Statistics of observations.
    `none`: no normalization.
    `moments`: mean and variance of all observations so far (Baselines).
    `ema`: exponentially weighted mean and variance (source 003)."""
    decay: _Decay = 0.999
    """`ema`: weight of the earlier statistics at each rollout (source 003)."""
    from_first_rollout: bool = True
    """Normalize the first rollout by its statistics (ours); off: train on raw observations."""
    clip: _PositiveFloat = 10.0
    """Bound of normalized observations, ± this (Baselines: 10)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueNormConfig(_Group):
    """Options of value target normalization, with rescaled value heads (Pop-Art)."""

    statistics: Literal["none", Statistics] = "none"
    """Statistics of value targets.
    `none`: no normalization.
    `moments`: mean and variance of all targets so far.
    `ema`: exponentially weighted mean and variance (source 003)."""
    decay: _Decay = 0.999
    """`ema`: weight of the earlier statistics at each rollout (source 003)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeConfig(_Group):
    """Options of execution: devices, threads, precision; they change rounding only (ours)."""

    device: str = "auto"
    """Device: `cpu`, `cuda`, `cuda:1`, or `auto` for a GPU if there is one and observations are
    images or minibatches have 1,024 samples."""
    num_threads: _PositiveInt | None = None
    """Number of PyTorch's threads; none: all cores for images and large minibatches, else one."""
    take_turns: bool = True
    """Compute in turns with other runs on the same cores, which is faster."""
    micro_batch: _PositiveInt | Literal["auto"] | None = "auto"
    """Number of images per pass through the network; `auto`: 64 on a CPU (128 in bf16), or all on a
    GPU and in compiled steps; none: all of a minibatch. Batch normalization
    is computed over one pass."""
    policy_precision: Precision = "fp32"
    """Precision of the encoders in rollouts and the policy phase; heads and losses use fp32."""
    aux_precision: Precision = "fp32"
    """Precision of the encoders in the auxiliary phase."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compilation of gradient steps and acting.
    `auto`: in runs for which it saves time.
    `on`: always.
    `off`: never."""
    deterministic: bool = False
    """Use deterministic kernels only; on a GPU, this is slower."""
    rank_timeout: _PositiveFloat = 600.0
    """Maximum time in seconds that processes of a run wait for each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(_Group):
    """Options of the console, files and services that get the metrics (ours)."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress on the console.
    `auto`: `live` on a terminal, `plain` elsewhere.
    `live`: a progress bar.
    `plain`: lines of text.
    `off`: neither progress nor messages; commands still print the results."""
    console_metrics: tuple[str, ...] = ()
    """Names of further metrics on the console, such as your own."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    epochs: bool = False
    """Write the metrics of each epoch into `epochs.jsonl`."""
    wandb: bool = False
    """Send the metrics to Weights & Biases (extra `wandb`): to the project of the variable
    WANDB_PROJECT, by default `phasicrl`, and the team or user of WANDB_ENTITY."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(_Group):
    """Options of checkpoints: when, and how many are kept (ours)."""

    every_minutes: _NonNegativeFloat | None = 5.0
    """Minutes between checkpoints; 0: one per iteration; none: no checkpoints by time."""
    every_iterations: _PositiveInt | None = None
    """Iterations between checkpoints; none: no checkpoints by iterations. With `every_minutes` none
    as well, only the end of the run is saved."""
    keep: _PositiveInt = 2
    """Number of checkpoints to keep."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(_Group):
    """Options of periodic evaluations of the agent during training (ours)."""

    every_iterations: _PositiveInt | None = None
    """Iterations between evaluations, which save the best weights in `best.safetensors`; none:
    off."""
    episodes: _PositiveInt = 20
    """Number of episodes per evaluation, with the same seeds each time."""
    policy: ActionSelection = "greedy"
    """Kind of actions.
    `greedy`: the most likely one.
    `sampled`: a random one."""
    env_ids: tuple[str, ...] = ()
    """Ids of further environments to evaluate on, with the spaces of the training environment."""
    levels: EvaluatedLevels = "unseen"
    """Procgen: levels to evaluate on.
    `unseen`: the full distribution of levels.
    `train`: the training levels.
    `both`: both, and the difference of their returns."""
    steps: bool = False
    """Write every step of the first episode, in `evaluations/` and to TensorBoard."""
    film: bool = False
    """Record an episode of each evaluation in `videos/`, with return, value and policy below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(_Group):
    """Configuration of a run: all options, in groups."""

    name: str = "custom"
    """Name of the experiment, in names of run directories and in plots (ours)."""
    seed: _NonNegativeInt = 1
    """Seed of all random numbers (ours)."""
    total_env_steps: _PositiveInt = 25_000_000
    """Budget in environment steps, over all environments (ours)."""
    budget_rounding: Literal["up", "down"] = "up"
    """Rounding of the budget to whole rollouts.
    `up`: the last rollout may exceed it (OPPG, SB3).
    `down`: the last rollout is left out (CleanRL)."""
    stop_at_return: Annotated[float, "a finite number"] | None = None
    """Mean return of the last 100 episodes at which the run stops; it can be resumed (ours)."""
    output_dir: str = "runs"
    """Folder for run directories (ours)."""
    init_from: str | None = None
    """Run directory with initial weights; those that fit are used (ours)."""
    imports: tuple[str, ...] = ()
    """Modules to import, which may register environments (ours)."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    aux: AuxConfig = field(default_factory=AuxConfig)
    reward_norm: RewardNormConfig = field(default_factory=RewardNormConfig)
    obs_norm: ObsNormConfig = field(default_factory=ObsNormConfig)
    value_norm: ValueNormConfig = field(default_factory=ValueNormConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def _problems(self) -> Iterator[str]:
        ppo, aux, name = self.ppo, self.aux, self.name
        if not (re.fullmatch(r"[^./\\][^/\\]{0,99}", name) and name.isprintable()):
            rule = "1 to 100 printable characters without / and \\, and no dot as the first"
            yield f"name is {name!r}; expected {rule}"
        yield from ["output_dir is empty; expected a folder, such as ."] * (not self.output_dir)
        if self.budget <= 0:
            rule = f"{self.batch_size} or more, a whole rollout, with budget_rounding down"
            yield f"total_env_steps is {self.total_env_steps}; expected {rule}"
        groups = [("ppo", ppo, 1), ("aux", aux, aux.every)]
        for owner, group, iterations in groups if self.has_auxiliary_phase else groups[:1]:
            items, what = self.env.num_envs, "env.num_envs"
            unit = self.get_shuffle_unit(group)
            if unit == "transitions" and self.model.memory != "none":
                yield f"{owner}.minibatch_by is transitions; expected segments with a memory"
                unit = "segments"
            if unit == "transitions":
                items, what = items * ppo.num_steps, what + " × ppo.num_steps"
            if items % group.num_minibatches:
                divisors = [n for n in range(1, items + 1) if items % n == 0]
                nearest = sorted(divisors, key=lambda n: abs(n - group.num_minibatches))
                better = " or ".join(map(str, nearest[:2]))
                of = f" of each of {iterations} iterations" if iterations > 1 else ""
                rule = f"a divisor of the {items} {unit} ({what}){of}, such as {better}"
                yield f"{owner}.num_minibatches is {group.num_minibatches}; expected {rule}"
        if not ppo.baseline and self.has_auxiliary_phase:
            yield f"aux.epochs is {aux.epochs}; expected 0 without ppo.baseline"
        if ppo.advantage_norm == "minibatch" and self.batch_size == ppo.num_minibatches:
            reason = "ppo.advantage_norm minibatch needs more than 1 sample. Or set it to batch"
            yield f"ppo.num_minibatches is {ppo.num_minibatches}; expected fewer, because {reason}"
        if (ppo.advantage_norm, ppo.advantage_std, self.batch_size) == ("batch", "unbiased", 1):
            yield "ppo.advantage_std is unbiased; expected biased for a batch of 1 step"

    def get_shuffle_unit(self, options: PPOConfig | AuxConfig) -> MinibatchUnit:
        """Return the unit that a phase shuffles into minibatches; `auto` depends on the memory."""
        auto_unit: MinibatchUnit = "transitions" if self.model.memory == "none" else "segments"
        return auto_unit if options.minibatch_by == "auto" else options.minibatch_by

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that a run imports: `imports`, and M of each id `gymnasium:M:Id`."""
        ids = (self.env.id, *self.evaluation.env_ids)
        found = (re.match(r"gymnasium:(.+):", env_id) for env_id in ids)
        return tuple(dict.fromkeys([*self.imports, *(match[1] for match in found if match)]))

    @property
    def import_flags(self) -> str:
        """Options of a command line that import `modules`, each with a space before it."""
        return "".join(f" --import {module}" for module in self.modules)

    @property
    def batch_size(self) -> int:
        """Number of environment steps in a rollout over all environments, N = B·T."""
        return self.env.num_envs * self.ppo.num_steps

    @property
    def budget(self) -> int:
        """End of run and schedules: `total_env_steps`, or whole rollouts (`budget_rounding`)."""
        rest = self.total_env_steps % self.batch_size if self.budget_rounding == "down" else 0
        return self.total_env_steps - rest

    @property
    def num_iterations(self) -> int:
        """Number of iterations (rollout, policy phase) of a run; the last may exceed the budget."""
        return -(-self.budget // self.batch_size)

    @property
    def has_auxiliary_phase(self) -> bool:
        """Return whether the run is PPG rather than PPO."""
        return self.aux.epochs > 0

    @property
    def rollouts_per_phase(self) -> int:
        """Number of rollouts in a phase: N_π with an auxiliary phase, else 1."""
        return self.aux.every if self.has_auxiliary_phase else 1

    @property
    def aux_phase_interval(self) -> int:
        """Number of policy iterations from one auxiliary phase to the next."""
        return self.aux.every * self.aux.run_every if self.has_auxiliary_phase else 1

    @property
    def num_gradient_steps(self) -> int:
        """Maximum number of gradient steps of a run."""
        steps = self.num_iterations * len(self.ppo.epoch_kinds) * self.ppo.num_minibatches
        per_epoch = self.aux.num_minibatches * (self.aux.iterations_per_epoch or self.aux.every)
        return steps + self.num_iterations // self.aux_phase_interval * self.aux.epochs * per_epoch

    @property
    def reward_norm_gamma(self) -> float:
        """Discount factor of the running return: `reward_norm.gamma`, by default `ppo.gamma`."""
        return self.ppo.gamma if self.reward_norm.gamma is None else self.reward_norm.gamma

    def with_updates(self, changes: Mapping[str, Any]) -> "Config":
        """Return the configuration with new values of some options, by paths such as `ppo.gamma`.

        Raises:
            ValueError: an option does not exist, or values are invalid.
        """
        changes_by_group: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            if path not in get_defaults() and path not in self.__dataclass_fields__:
                raise ValueError(f"unknown option {path}{suggest_name(path, get_defaults())}")
            group, _, name = path.rpartition(".")
            changes_by_group.setdefault(group, {})[name] = value
        updates = changes_by_group.pop("", {})
        problems: list[str] = []
        for group, values in changes_by_group.items():
            try:
                if hasattr(old := updates.get(group, getattr(self, group)), "__dataclass_fields__"):
                    updates[group] = replace(old, **values)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return replace(self, **updates)

    def with_scheduled_values(self, schedule: ScheduleFunction | None, progress: float) -> "Config":
        """Return the configuration with the current values of the options that follow schedules.

        Args:
            schedule: function of the user, which takes precedence over named schedules.
            progress: spent share of the budget of environment steps.

        Raises:
            ValueError: `schedule` returns no mapping, another option, or an invalid value.
        """
        values, rate = self.values(), self.ppo.schedule
        names = {
            "ppo.learning_rate": rate, "ppo.value_learning_rate": rate, "aux.learning_rate": rate,
            "ppo.clip": self.ppo.clip_schedule, "ppo.entropy_coef": self.ppo.entropy_schedule,
        }  # fmt: skip
        custom: Any = schedule(progress) if schedule else {}
        if not isinstance(custom, Mapping) or custom.keys() - names.keys():
            raise ValueError(f"schedule returns {custom!r}; expected a dict of {', '.join(names)}")
        if rate == "adaptive_kl" and "ppo.learning_rate" in custom:
            rule = "constant with a rate of schedule=…"
            raise ValueError(f"ppo.schedule is adaptive_kl; expected {rule}")
        decays = {path: DECAY_FUNCTIONS.get(name) for path, name in names.items()}
        named = {key: values[key] * f(progress) for key, f in decays.items() if f and values[key]}
        return self.with_updates({**named, **custom}) if named or custom else self

    def identity(self) -> dict[str, Any]:
        """Return the options that define an experiment, by dotted path.

        Runs of one experiment may differ in seed, length, imports and `EXECUTION_OPTIONS`.
        """
        values = self.values()
        return {path: values[path] for path in values if not path.startswith(_NOT_IDENTITY)}

    def values(self) -> dict[str, Any]:
        """Return every option by its dotted path, including each of `env.options`."""
        values = {f"env.options.{key}": value for key, value in self.env.options.items()}
        for part in fields(self):
            value = getattr(self, part.name)
            if is_dataclass(value):
                values |= {f"{part.name}.{x.name}": getattr(value, x.name) for x in fields(value)}
            else:
                values[part.name] = value
        del values["env.options"]
        return values

    def check_imports(self, config_name: object = "the configuration") -> None:
        """Check that the user has imported what this configuration, from a file, would import.

        Raises:
            ValueError: a module of `imports` or of an environment's id has not been imported.
        """
        for module in self.modules:
            if module not in sys.modules:
                given = f"{config_name} imports the module {module}"
                rule = "one that is imported already. If you trust it, import it first"
                raise ValueError(f"{given}; expected {rule}, or add --import {module}")

    def to_json(self) -> str:
        """Return the configuration as indented JSON."""
        return json.dumps(config_io.to_dict(self), indent=2)

    @staticmethod
    def from_json(text: str) -> "Config":
        """Read a configuration from the JSON of `to_json`.

        Raises:
            ValueError: the text is not JSON or of another schema, a field is unknown (with the
                nearest name), or a value has a wrong type.
        """
        return config_io.from_json(Config, text)


EXECUTION_OPTIONS = (
    "name", "output_dir", "env.num_threads", "env.vectorization", "env.max_restarts", "compute",
    "log", "checkpoint", "evaluation",
)  # fmt: skip
"""Path prefixes of options that say how a run is executed and recorded."""
_NOT_IDENTITY = (*EXECUTION_OPTIONS, "seed", "total_env_steps", "imports")
"""Path prefixes of options that do not define the experiment, see `Config.identity`."""


@functools.cache
def get_defaults() -> dict[str, Any]:
    """Return the default of every option by its dotted path, such as `ppo.clip`."""
    return Config().values() | {"env.options": {}}


def format_value(value: Any) -> str:
    """Format the value of an option as on the command line."""
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return " ".join(f"{key}={item}" for key, item in items) or "none"
    if isinstance(value, tuple):
        return " ".join(map(str, cast(tuple[Any, ...], value)))
    return "none" if value is None else str(value)


@functools.cache
def get_option_docs(group: type) -> Mapping[str, str]:
    """Return the description of each option of a group, the string below it in this file."""
    (tree,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for above, below in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(above.target)] = inspect.cleandoc(ast.literal_eval(below.value))
    return docs
