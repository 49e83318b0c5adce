"""Every knob, once. Kind: data. Imports no torch, so that `--help` is quick.

`None` means "off" and nothing else. Numbers that follow from others are properties, never fields
that are filled in later. `num_envs`, batch and minibatch sizes are global. Sources: semantics of
the reference codes are named where a knob reproduces one of them (OPPG =
openai/phasic-policy-gradient, CleanRL = vwxyzjn/cleanrl, Baselines = openai/baselines).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NoReturn

from phasicrl import config_io
from phasicrl.config_io import ConfigError, nearest_name

Encoder = Literal["impala", "nature", "mlp"]
ValuePath = Literal["separate", "detached", "shared_in_aux", "shared"]
Initialization = Literal["normalized", "orthogonal", "glorot", "torch"]
Activation = Literal["relu", "tanh", "gelu"]
MinibatchBy = Literal["segments", "transitions"]
Statistics = Literal["moments", "ema"]
Backend = Literal["procgen", "envpool", "gymnasium", "own", "vector"]
OptionValue = str | int | float | bool
Precision = Literal["fp32", "bf16"]
PolicyKind = Literal["greedy", "sampled"]
Levels = Literal["unseen", "train"]
EvaluatedLevels = Literal["unseen", "train", "both"]
ProcgenDistribution = Literal["easy", "hard", "extreme", "memory", "exploration"]


def _not_positive(owner: str, **values: float | None) -> Iterator[str]:
    """Problems with numbers that must be above zero and finite; `None` is "off" and passes."""
    for name, value in values.items():
        if value is not None and not 0 < value < math.inf:
            yield f"{owner}.{name} is {value}; it must be above zero{_finite(value)}"


def _negative(owner: str, **values: float | None) -> Iterator[str]:
    """Problems with numbers that must not be negative, and finite; `None` is "off" and passes."""
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            yield f"{owner}.{name} is {value}; it must not be below zero{_finite(value)}"


def _beyond_one(owner: str, **values: float | None) -> Iterator[str]:
    """Problems with numbers that must lie between 0 and 1; `None` is "off" and passes."""
    for name, value in values.items():
        if value is not None and not 0 <= value <= 1:
            yield f"{owner}.{name} is {value}; it must lie between 0 and 1"


def _no_decay(owner: str, **values: float | None) -> Iterator[str]:
    """Problems with shares of what was before that would never be renewed."""
    for name, value in values.items():
        if value is not None and not 0 <= value < 1:
            yield f"{owner}.{name} is {value}; it must be at least 0 and below 1"


def _finite(value: float) -> str:
    return "" if math.isfinite(value) else ", and a finite number"


def _too_many(owner: str, most: int, **values: int | None) -> Iterator[str]:
    """Problems with numbers that no machine has so many of; `None` is "off" and passes."""
    for name, value in values.items():
        if value is not None and value > most:
            yield f"{owner}.{name} is {value:,}; at most {most:,} make sense"


MOST_THREADS, MOST_ENVS, MOST_STEPS = 1024, 2**20, 2**53
MOST_UNITS, MOST_BLOCKS = 2**16, 1000
"""Beyond these numbers a typing error is likelier than a machine that can do it."""


class Options(dict[str, OptionValue]):
    """Options of an environment by name; they cannot be changed, so that they have a hash."""

    def __hash__(self) -> int:  # type: ignore[override]  # a plain dict has none
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type[Options], tuple[dict[str, OptionValue]]]:
        return Options, (dict(self),)

    def _refuse_change(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "options of a configuration cannot be changed; "
            "make another one with dataclasses.replace"
        )

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = (
        _refuse_change  # type: ignore[assignment]
    )


class _Checked:
    """A group of knobs that refuses impossible values, all of them at once."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig(_Checked):
    """Which environments, and how many (ours; options that begin with Procgen are its own)."""

    id: str = "procgen:starpilot"
    """`procgen:starpilot`, `envpool:Ant-v4`, `gymnasium:CartPole-v1`, or a bare id."""
    num_envs: int = 64
    """Environments that are stepped together, over all processes (B)."""
    num_threads: int | None = None
    """Threads of EnvPool; off: one per core, and one alone for classic control."""
    max_restarts: int = 0
    """Failures after which environments are made anew and their episodes cut; one more ends all."""
    parallel: Literal["sync", "processes"] = "sync"
    """Gymnasium environments are stepped one after the other, or in a process each."""
    action_masks: bool = True
    """Obey the environment's action masks, if any (source 003); off: every action is tried."""
    observe: tuple[int, ...] | None = None
    """Components of an observation vector that are seen, `0 2` for example; off: all."""
    heuristic_mask_steps: int = 100_000
    """Steps at the start of training in which `mask_actions` holds (source 003)."""
    options: Mapping[str, OptionValue] = field(default_factory=Options)
    """Options of the environment itself, `KEY=VALUE …`; evaluations and films have them too."""
    distribution: ProcgenDistribution = "easy"
    """Procgen: difficulty of the levels."""
    num_levels: int = 0
    """Procgen: number of distinct training levels; 0 is the full distribution."""

    def __post_init__(self) -> None:
        """Refuse impossible sizes."""
        _Checked.__post_init__(self)
        # Whoever gave a plain dict may change that later.
        object.__setattr__(self, "options", Options(self.options))

    def _problems(self) -> Iterator[str]:
        if not self.id or not self.id.isprintable():
            what = "has characters that cannot be seen" if self.id else "is empty"
            yield f"env.id {what}; `phasicrl envs` lists what can be trained"
        yield from _not_positive("env", num_envs=self.num_envs, num_threads=self.num_threads)
        yield from _too_many("env", MOST_ENVS, num_envs=self.num_envs)
        yield from _negative("env", max_restarts=self.max_restarts)
        yield from _too_many("env", MOST_THREADS, num_threads=self.num_threads)
        yield from _negative(
            "env",
            num_levels=self.num_levels,
            heuristic_mask_steps=self.heuristic_mask_steps,
        )
        for key, value in dict[str, Any](self.options).items():  # a user's may be anything
            if not isinstance(value, str | int | float):
                expected = "a text, a number, True or False was expected"
                yield f"env.options has {key} = {value!r}; {expected}"


PROCGEN_FIELDS = ("distribution", "num_levels")
"""Fields of `EnvConfig` that only Procgen understands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_Checked):
    """The networks."""

    value_path: ValuePath = "separate"
    """`separate` networks (PPG paper), or one, which the value gradient reaches in: `detached` no
    phase (OPPG), `shared_in_aux` the auxiliary phase (figure 7), `shared` both."""
    encoder: Encoder = "impala"
    """`impala` (Espeholt et al. 2018), `nature` (Mnih et al. 2015), or `mlp` for vectors."""
    channels: tuple[int, ...] = (16, 32, 32)
    """IMPALA: output channels of each stack; as many stacks as numbers (OPPG: 16 32 32)."""
    blocks: int = 2
    """IMPALA: residual blocks in each stack (OPPG: 2)."""
    pooling: Literal["symmetric", "same"] = "symmetric"
    """IMPALA: padding of max-pools: on both sides (OPPG) or TensorFlow's (Baselines)."""
    hidden_sizes: tuple[int, ...] = (256,)
    """Widths of dense layers, after convolutions or of an `mlp` (OPPG: 256; Baselines: 64 64)."""
    activation: Activation = "relu"
    """Non-linearity between dense layers of an `mlp` (Baselines: tanh); for images it is ReLU."""
    value_activation: Activation | None = None
    """The same for a value network of its own (source 004); off: as the policy's."""
    layer_norm: bool = False
    """Normalize each dense layer's output before its non-linearity (source 000)."""
    init: Initialization = "normalized"
    """Initial weights: OPPG's, orthogonal (gain √2), Glorot's (Baselines' IMPALA), PyTorch's."""
    head_init: Initialization | None = None
    """The same for the heads; off: `normalized` if `init` is (OPPG), else `orthogonal`."""
    policy_head_scale: float = 0.1
    """Scale of the policy head's initial weights: 0.1 in PPG (OPPG), 0.01 in PPO (Baselines)."""
    value_head_scale: float = 0.1
    """Scale of the value heads' initial weights: 0.1 in PPG (OPPG), 1 in PPO (Baselines)."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """Memory after the encoder (Hochreiter 1997), also of a value network of its own (contrib)."""
    memory_size: int = 128
    """Width of the memory's output (contrib: 256; CleanRL: 128)."""

    @property
    def heads(self) -> Initialization:
        """Initial weights of the heads."""
        return self.head_init or ("normalized" if self.init == "normalized" else "orthogonal")

    def _problems(self) -> Iterator[str]:
        for name in ("channels", "hidden_sizes"):
            sizes = getattr(self, name)
            if not all(0 < size <= MOST_UNITS for size in sizes):
                range_of = f"every width must be above zero, and at most {MOST_UNITS:,}"
                yield f"model.{name} is {sizes}; {range_of}"
        if not self.channels:
            yield "model.channels is empty; give a width for each stack, for example 16 32 32"
        yield from _negative("model", blocks=self.blocks)
        yield from _too_many("model", MOST_BLOCKS, blocks=self.blocks)
        yield from _too_many("model", MOST_UNITS, memory_size=self.memory_size)
        yield from _not_positive(
            "model",
            policy_head_scale=self.policy_head_scale,
            value_head_scale=self.value_head_scale,
            memory_size=self.memory_size,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionConfig(_Checked):
    """Continuous actions: a normal distribution of independent components."""

    mean: Literal["raw", "tanh"] = "raw"
    """The mean as the network gives it, or through a tanh, to [−1, 1] (source 004)."""
    std: Literal["parameter", "softplus", "softplus_tanh", "exp", "fixed", "range"] = "parameter"
    """Trained (Baselines), from features (Acme), fixed, or a share of the range (source 004)."""
    std_value: float = 1.0
    """Where trained ones start (Baselines: 1); the fixed one; or the share of high − low."""
    min_std: float = 1e-6
    """Added to deviations from the features, which could reach zero without (Acme: 1e-6)."""
    squash: Literal["none", "clip", "tanh"] = "none"
    """Draws as they are, clipped to the range (CleanRL), or their tanh (Haarnoja et al. 2018)."""
    rescale: bool = False
    """Act in [−1, 1], stretched to the action range (source 004); always so with `tanh`."""

    def _problems(self) -> Iterator[str]:
        yield from _not_positive("action", std_value=self.std_value, min_std=self.min_std)
        if self.mean == "tanh" and self.squash == "tanh":
            yield (
                "action.mean tanh and action.squash tanh would squash twice, and the ends of the "
                "range could not be reached; choose one"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(_Checked):
    """The policy phase: rollouts, advantages and the epochs over them."""

    num_steps: int = 256
    """Time steps of each environment in a rollout (T; PPG paper: 256)."""
    collect_by: Literal["steps", "episodes"] = "steps"
    """Learn from all steps, or from whole episodes (source 003) that begin in the first half."""
    max_episodes: int | None = None
    """Of the whole episodes of a rollout learn from the first so many (source 003); none: all."""
    gamma: float = 0.999
    """Discount factor γ (PPG paper: 0.999)."""
    reward_clip: float | None = None
    """Clip rewards to ± this before any normalization (Atari, Mnih et al. 2015: 1)."""
    estimator: Literal["gae", "n_step", "monte_carlo"] = "gae"
    """GAE (Schulman et al. 2016), n rewards and a value, or rewards to the end (source 003)."""
    gae_lambda: float = 0.95
    """λ of generalized advantage estimation (Schulman et al. 2016, eq. 16)."""
    value_target: Literal["gae", "monte_carlo"] = "gae"
    """What values learn under `gae`: V + A, or rewards to the episode's end (Spinning Up)."""
    n_step: int = 5
    """Rewards before the value in `n_step` returns (source 003)."""
    baseline: bool = True
    """Advantages are returns minus values; off: no values, as in REINFORCE (Williams 1992)."""
    recompute_advantages: bool = False
    """Compute values, advantages and targets anew before each further epoch (Tianshou)."""
    bootstrap_truncation: bool = True
    """Bootstrap at a time limit (Pardo et al. 2018); off: it is a termination (OPPG)."""
    policy_epochs: int = 1
    """Passes over a rollout with the policy loss (E_π; PPO paper, algorithm 1; PPG paper: 1)."""
    value_epochs: int = 1
    """Passes over each rollout with the value loss (E_V; PPG paper: 1)."""
    epoch_order: Literal["value_first", "policy_first"] = "value_first"
    """Joint if E_π = E_V, else values first (OPPG); or never joint, policy first (PPG paper)."""
    num_minibatches: int = 8
    """Minibatches in one pass (PPO paper, algorithm 1; PPG paper: 8)."""
    minibatch_by: MinibatchBy = "segments"
    """Deal out whole segments (OPPG), or shuffled transitions (Baselines, CleanRL)."""
    objective: Literal["surrogate", "log_prob"] = "surrogate"
    """`surrogate`: ratios (PPO paper, eq. 6), `log_prob`: REINFORCE (Williams 1992)."""
    clip: float | None = 0.2
    """Clip range ε of the probability ratio (PPO paper, eq. 7); off: the plain surrogate."""
    kl_penalty: float = 0.0
    """Weight of the penalty on the divergence from the rollout's policy (PPO paper, eq. 8)."""
    kl_estimate: Literal["sampled", "exact"] = "sampled"
    """The penalty: half the mean squared log-ratio (OPPG), or KL(old ‖ new) in closed form."""
    kl_penalty_target: float | None = None
    """Adapt the penalty's weight towards this divergence (PPO paper, section 4)."""
    epoch_kl: Literal["k3", "k1"] = "k3"
    """The divergence after an epoch is k3 (SB3), or k1, the mean −log ratio (Spinning Up)."""
    target_kl: float | None = None
    """No further policy epochs once the divergence is above this (CleanRL; Spinning Up: 0.015)."""
    proximal_decay: float | None = None
    """Decay of the average of weights that updates stay near to (ppo-ewma); off: the old policy."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus (PPO paper, eq. 9; PPG paper: 0.01)."""
    value_coef: float = 1.0
    """Weight of half the squared error of values (OPPG: 1, which is its vfcoef of 0.5)."""
    value_clip: float | None = None
    """Clip range of the value's change from the rollout's (Baselines, CleanRL: 0.2)."""
    advantage_norm: Literal["batch", "minibatch", "none"] = "batch"
    """Normalize advantages over the whole batch (OPPG), over each minibatch (Baselines), or not."""
    advantage_std: Literal["biased", "unbiased"] = "biased"
    """Their deviation: of n samples by n (OPPG, Baselines), or by n − 1 (CleanRL, SB3)."""
    advantage_decay: float = 0.0
    """Share of older statistics that normalize advantages (ppo-ewma); 0: those of the batch."""
    learning_rate: float = 5e-4
    """Adam's step size (PPG paper: 5e-4)."""
    value_learning_rate: float | None = None
    """Step size of a value network of its own (Spinning Up: 1e-3); off: the same."""
    schedule: Literal["constant", "linear", "adaptive_kl"] = "constant"
    """Rates: constant (OPPG), falling to zero (Baselines), or adapted to the KL (rsl_rl)."""
    schedule_kl: float = 0.01
    """`adaptive_kl`: rates follow this divergence, by factors of 1.5 (rsl_rl)."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """Decays of Adam's means of gradients and of their squares, in both phases (ppo-ewma)."""
    adam_eps: float = 1e-8
    """Adam's ε: 1e-8 in PPG (OPPG), 1e-5 in PPO (Baselines)."""
    adam_eps_hat: bool = False
    """Add ε before the second moment's bias is corrected, as TensorFlow does (Baselines)."""
    max_grad_norm: float | None = None
    """Clip the gradient's norm at this value (Baselines: 0.5); off in PPG (OPPG)."""
    grad_norm_of: Literal["networks", "agent"] = "networks"
    """Two networks: clip each gradient by its own norm, or by their common one (CleanRL)."""

    def _problems(self) -> Iterator[str]:
        yield from _not_positive(
            "ppo", num_steps=self.num_steps, num_minibatches=self.num_minibatches, clip=self.clip,
            value_clip=self.value_clip, learning_rate=self.learning_rate, adam_eps=self.adam_eps,
            max_grad_norm=self.max_grad_norm, n_step=self.n_step, max_episodes=self.max_episodes,
            value_learning_rate=self.value_learning_rate, kl_penalty_target=self.kl_penalty_target,
            target_kl=self.target_kl, schedule_kl=self.schedule_kl, reward_clip=self.reward_clip,
            policy_epochs=self.policy_epochs,
        )  # fmt: skip
        yield from _negative(
            "ppo", value_epochs=self.value_epochs, kl_penalty=self.kl_penalty,
            entropy_coef=self.entropy_coef, value_coef=self.value_coef,
        )  # fmt: skip
        yield from _beyond_one("ppo", gamma=self.gamma, gae_lambda=self.gae_lambda)
        yield from _no_decay("ppo", advantage_decay=self.advantage_decay)
        yield from _no_decay("ppo", proximal_decay=self.proximal_decay)
        if not all(0 <= beta < 1 for beta in self.adam_betas):
            yield f"ppo.adam_betas is {self.adam_betas}; both must be at least 0 and below 1"
        if not self.baseline and self.estimator != "monte_carlo":
            needs = f"ppo.estimator {self.estimator} needs values"
            yield f"ppo.baseline is off, but {needs}; use monte_carlo"
        if self.objective == "log_prob" and (self.clip is not None or self.policy_epochs != 1):
            yield (
                "ppo.objective log_prob knows no ratio to clip and holds for one pass only, "
                f"but ppo.clip is {self.clip} and ppo.policy_epochs {self.policy_epochs}; "
                "set --ppo.clip none --ppo.policy-epochs 1 --ppo.value-epochs 1"
            )

    @property
    def epoch_schedule(self) -> tuple[tuple[bool, bool], ...]:
        """The epochs over a rollout, in order, as (policy loss?, value loss?).

        They are joint if E_π = E_V; else value epochs come first (OPPG ppo.py:222-245). In
        Algorithm 1 of the PPG paper policy epochs come first, and none are joint.
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
    def uses_kl(self) -> bool:
        """Whether something is steered by the divergence of an epoch."""
        has_target = self.target_kl is not None or self.kl_penalty_target is not None
        return has_target or self.schedule == "adaptive_kl"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxConfig(_Checked):
    """The auxiliary phase. Without it the algorithm is PPO."""

    every: int = 32
    """Policy iterations before each auxiliary phase (N_π; PPG paper: 32)."""
    epochs: int = 6
    """Passes over the phase's data (E_aux; PPG paper: 6); 0: no phase, so PPO, bit for bit."""
    run_every: int = 1
    """Run only every k-th auxiliary phase; the data of the others is dropped (source 000: 2)."""
    num_minibatches: int = 16
    """Minibatches of one pass per policy iteration (N_a; PPG paper: 16)."""
    iterations_per_epoch: int | None = None
    """Use in each epoch only as much data as N ≤ N_π iterations have (source 001); off: all."""
    iterations_from: Literal["phase", "last"] = "phase"
    """Draw it from the whole phase, or take the last iterations alone: harmful (source 001)."""
    recompute_targets: bool = False
    """Compute V̂ anew when the phase begins, by the value function of then (source 001)."""
    minibatch_by: MinibatchBy = "segments"
    """Deal out whole segments (OPPG, CleanRL), or shuffled transitions."""
    beta_clone: float = 1.0
    """Weight β of the KL divergence from the policy before the phase (PPG paper: 1)."""
    value_coef: float = 1.0
    """Weight of the value network's loss in the phase (0: PPG paper, figure 9)."""
    optimizer: Literal["own", "shared"] = "own"
    """An Adam of its own (OPPG), or the policy phase's (CleanRL)."""
    learning_rate: float = 5e-4
    """Step size of its own Adam (PPG paper: 5e-4); a shared one keeps the policy phase's."""
    max_grad_norm: float | None = None
    """Clip the norm of each network's gradient at this value (CleanRL: 0.5)."""

    def _problems(self) -> Iterator[str]:
        yield from _not_positive(
            "aux", every=self.every, run_every=self.run_every, num_minibatches=self.num_minibatches,
            iterations_per_epoch=self.iterations_per_epoch, learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
        )  # fmt: skip
        yield from _negative(
            "aux", epochs=self.epochs, beta_clone=self.beta_clone, value_coef=self.value_coef
        )
        if self.iterations_per_epoch is not None and self.iterations_per_epoch > self.every:
            yield (
                f"aux.iterations_per_epoch is {self.iterations_per_epoch}, "
                f"more than the {self.every} iterations of a phase (aux.every)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNormConfig(_Checked):
    """Division of rewards by the running standard deviation of the discounted return."""

    gamma: float | None = None
    """Discount of the running return (OPPG, Baselines: 0.99); off: the algorithm's γ."""
    clip: float = 10.0
    """Clip normalized rewards to ± this (OPPG, Baselines: 10)."""
    per: Literal["rollout", "step"] = "rollout"
    """Update statistics a rollout at a time (OPPG) or step by step (Baselines, CleanRL)."""
    reset_at: Literal["end", "termination"] = "end"
    """Drop the running return at each end (OPPG), or at terminations only (Gymnasium)."""

    def _problems(self) -> Iterator[str]:
        yield from _beyond_one("reward_norm", gamma=self.gamma)
        yield from _not_positive("reward_norm", clip=self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsNormConfig(_Checked):
    """Normalization of observed numbers; the statistics are part of the weights."""

    statistics: Statistics = "moments"
    """Mean and variance of all so far (Baselines), or averages over rollouts (source 003)."""
    decay: float = 0.999
    """`ema`: share of the old statistics that a rollout leaves (source 003)."""
    from_first_rollout: bool = True
    """Learn from the first rollout in its own statistics (ours); off: from its raw observations."""
    clip: float = 10.0
    """Clip normalized observations to ± this (Baselines: 10)."""

    def _problems(self) -> Iterator[str]:
        yield from _no_decay("obs_norm", decay=self.decay)
        yield from _not_positive("obs_norm", clip=self.clip)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueNormConfig(_Checked):
    """Normalization of value targets; value heads are rescaled as statistics move (Pop-Art)."""

    statistics: Statistics = "moments"
    """Mean and variance of all targets so far, or averages over rollouts (source 003)."""
    decay: float = 0.999
    """`ema`: share of the old statistics that a rollout leaves (source 003)."""

    def _problems(self) -> Iterator[str]:
        return _no_decay("value_norm", decay=self.decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeConfig(_Checked):
    """How the arithmetic is executed; nothing here changes results, up to rounding (ours)."""

    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`."""
    num_threads: int | None = None
    """Threads of PyTorch; off: all cores for images and large minibatches, else one."""
    take_turns: bool = True
    """Runs that would fill the same cores compute in turns; off: at once, which is slower."""
    micro_batch: int | Literal["auto"] | None = "auto"
    """Images that go through the network at once; `auto`: 64 on a CPU (128 in bf16); off: all."""
    policy_precision: Precision = "fp32"
    """Precision of the encoders in the rollout and the policy phase; all else is fp32."""
    aux_precision: Precision = "fp32"
    """Precision of the encoders in the auxiliary phase."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile gradient steps and acting; `auto`: where that pays."""
    deterministic: bool = False
    """Allow only deterministic kernels; matters on a GPU, where it costs speed."""
    rank_timeout: float = 600.0
    """Seconds that the processes of a run wait for one of them that does not answer."""

    def _problems(self) -> Iterator[str]:
        size = self.micro_batch if isinstance(self.micro_batch, int) else None
        yield from _not_positive(
            "compute",
            num_threads=self.num_threads,
            micro_batch=size,
            rank_timeout=self.rank_timeout,
        )
        yield from _too_many("compute", MOST_THREADS, num_threads=self.num_threads)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is reported, and where (ours)."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` display, `plain` lines, or nothing; `auto`: live on a terminal, plain elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard events, if TensorBoard is installed."""
    epochs: bool = False
    """Write a row for each epoch of each phase too, into `epochs.jsonl`."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too (extra `track`)."""
    wandb_project: str = "phasicrl"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Team or user of Weights & Biases; none: the one that it takes by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(_Checked):
    """When the run's state is saved (ours)."""

    every_minutes: float | None = 5.0
    """Minutes between checkpoints; 0: one each iteration; off: not by the clock."""
    every_iterations: int | None = None
    """Iterations between checkpoints; off: not by count. With both off: only at the end."""
    keep: int = 2
    """Checkpoints that are kept."""

    def _problems(self) -> Iterator[str]:
        yield from _negative("checkpoint", every_minutes=self.every_minutes)
        every, keep = self.every_iterations, self.keep
        yield from _not_positive("checkpoint", every_iterations=every, keep=keep)

    @property
    def while_training(self) -> bool:
        """Whether there are checkpoints before the end."""
        return self.every_minutes is not None or self.every_iterations is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(_Checked):
    """Episodes that are played in the middle of the run, and not trained on (ours)."""

    every_iterations: int | None = None
    """Iterations between evaluations; off: none. The best weights are kept as best.safetensors."""
    episodes: int = 20
    """Episodes of an evaluation, the same ones each time."""
    policy: PolicyKind = "greedy"
    """Take the likeliest action, or draw one."""
    levels: EvaluatedLevels = "unseen"
    """Procgen: the full distribution of levels, those of the training, or both, and their gap."""
    steps: bool = False
    """Keep every step of the first episode: a table in `evaluations/`, and TensorBoard series."""
    film: bool = False
    """Film an episode of each evaluation, in `videos/`."""
    overlay: bool = True
    """Show the return so far, the value and the policy under each image of these films."""

    def _problems(self) -> Iterator[str]:
        every, episodes = self.every_iterations, self.episodes
        yield from _not_positive("evaluation", every_iterations=every, episodes=episodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(_Checked):
    """One run."""

    name: str = "custom"
    """Name of the experiment: begins the run directory's name, groups runs in plots (ours)."""
    seed: int = 1
    """Everything random in the run follows from it (ours)."""
    total_env_steps: int = 25_000_000
    """Budget in steps of single environments (ours)."""
    budget_rounding: Literal["up", "down"] = "up"
    """Whether the last rollout goes over the budget (OPPG, SB3), or is left out (CleanRL)."""
    output_dir: str = "runs"
    """Folder in which the run directory is made (ours)."""
    init_from: str | None = None
    """Run directory whose weights to begin with, as far as they fit; off: new ones (ours)."""
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    action: ActionConfig = field(default_factory=ActionConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    aux: AuxConfig | None = None
    reward_norm: RewardNormConfig | None = None
    obs_norm: ObsNormConfig | None = None
    value_norm: ValueNormConfig | None = None
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        """Refuse what does not go together, and knobs that have no effect."""
        _Checked.__post_init__(self)
        refuse_idle(self)

    def _problems(self) -> Iterator[str]:
        """Values that do not go together, with the numbers and the way out."""
        yield from _negative("config", seed=self.seed)
        yield from _bad_name(self.name)
        if not 0 < self.total_env_steps <= MOST_STEPS:
            yield (
                f"total_env_steps is {self.total_env_steps}; a run needs at least one rollout, "
                f"{self.batch_size} steps here, and at most {MOST_STEPS} make sense"
            )
        elif self.budget <= 0:
            yield (
                f"total_env_steps is {self.total_env_steps}, which budget_rounding down makes "
                f"0 rollouts of {self.batch_size} steps; give {self.batch_size} or more, "
                "or --budget-rounding up"
            )
        yield from self._uneven("ppo", self.ppo.minibatch_by, self.ppo.num_minibatches, 1)
        if (aux := self.aux) is not None:
            yield from self._uneven("aux", aux.minibatch_by, aux.num_minibatches, aux.every)
        of_aux, memory = self.aux or AuxConfig(), self.model.memory
        for owner, by in (("ppo", self.ppo.minibatch_by), ("aux", of_aux.minibatch_by)):
            if memory != "none" and by != "segments":
                yield (
                    f"{owner}.minibatch_by is {by}, but with a memory (model.memory {memory}) "
                    "steps depend on each other; use segments"
                )
        if not self.ppo.baseline and self.aux is not None:
            yield (
                "ppo.baseline is off, but the auxiliary phase distills values; "
                "switch it off with --aux none"
            )
        size = self.batch_size // self.ppo.num_minibatches
        if self.ppo.advantage_norm == "minibatch" and size == 1:
            yield (
                f"ppo.num_minibatches {self.ppo.num_minibatches} leaves {size} sample in a "
                "minibatch, whose advantage would be normalized to 0; "
                "take fewer minibatches, or ppo.advantage_norm batch"
            )
        by_std = (self.ppo.advantage_norm, self.ppo.advantage_std)
        if by_std == ("batch", "unbiased") and self.batch_size == 1:
            yield (
                "ppo.advantage_std is unbiased, but a batch of 1 step has no such deviation; "
                "take longer rollouts, or biased"
            )

    def _uneven(
        self, owner: str, by: MinibatchBy, num_minibatches: int, iterations: int
    ) -> Iterator[str]:
        """The problem with minibatches that do not divide the data evenly."""
        items, what = self.env.num_envs, "env.num_envs"
        if iterations > 1:
            what += f" × {iterations} iterations"
        if by == "transitions":
            items, what = items * self.ppo.num_steps, what + " × ppo.num_steps"
        if items % num_minibatches:
            better = " or ".join(map(str, nearest_divisors(items, num_minibatches)))
            yield (
                f"{items * iterations} {by} ({what}) cannot be dealt out evenly to "
                f"{num_minibatches * iterations} minibatches; "
                f"set {owner}.num_minibatches to {better}, or change env.num_envs"
            )

    @property
    def batch_size(self) -> int:
        """Environment steps of one rollout over all environments (N = B·T)."""
        return self.env.num_envs * self.ppo.num_steps

    @property
    def budget(self) -> int:
        """Steps with which a run is over, and at which falling rates would be zero."""
        left_out = self.total_env_steps % self.batch_size if self.budget_rounding == "down" else 0
        return self.total_env_steps - left_out

    @property
    def num_iterations(self) -> int:
        """Policy iterations until the budget is used up; the last one may go over it."""
        return -(-self.budget // self.batch_size)

    @property
    def has_auxiliary_phase(self) -> bool:
        """Whether this is PPG: no epochs are the same as no auxiliary phase, to the bit."""
        return self.aux is not None and self.aux.epochs > 0

    @property
    def phase_length(self) -> int:
        """Rollouts that are stored together: N_π with an auxiliary phase, else one."""
        return self.aux.every if self.aux is not None and self.has_auxiliary_phase else 1

    @property
    def period(self) -> int:
        """Policy iterations up to and with an auxiliary phase that is run."""
        if self.aux is None or not self.has_auxiliary_phase:
            return 1
        return self.aux.every * self.aux.run_every

    @property
    def num_gradient_steps(self) -> int:
        """Gradient steps of the whole run, at most."""
        steps = self.num_iterations * len(self.ppo.epoch_schedule) * self.ppo.num_minibatches
        if self.aux is not None and self.has_auxiliary_phase:
            per_epoch = self.aux.num_minibatches * (self.aux.iterations_per_epoch or self.aux.every)
            steps += self.num_iterations // self.period * self.aux.epochs * per_epoch
        return steps

    @property
    def aux_passes(self) -> float:
        """How often an observation goes through the networks in auxiliary phases."""
        if self.aux is None or not self.has_auxiliary_phase:
            return 0.0
        per_epoch = self.aux.iterations_per_epoch or self.aux.every
        return self.aux.epochs * per_epoch / self.period

    @property
    def reward_gamma(self) -> float:
        """Discount of the reward normalizer's running return."""
        gamma = None if self.reward_norm is None else self.reward_norm.gamma
        return self.ppo.gamma if gamma is None else gamma

    def changed(
        self, changes: Mapping[str, Any], *, reset_idle: bool = False, keep: Collection[str] = ()
    ) -> Config:
        """The configuration with other values at the given paths, such as `ppo.gamma`.

        Args:
            changes: values by path.
            reset_idle: put knobs that have no effect after these changes back to their defaults, in
                place of refusing them.
            keep: paths of knobs that are refused all the same.

        Raises:
            ValueError: a field that does not exist, or values that do not go together.
        """
        fields: dict[str, Any] = {}
        within: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            name, dot, field_name = path.partition(".")
            if path not in defaults():
                raise ValueError(f"unknown field {path}{nearest_name(path, field_paths())}")
            if dot:
                within.setdefault(name, {})[field_name] = value
            else:
                fields[name] = value
        # All of a group at once: half of them might not go together.
        problems: list[str] = []
        for name, values in within.items():
            group = fields.get(name, getattr(self, name))
            if group is None:
                given = f"{name} is off, so that {', '.join(values)} cannot be set"
                way = f"leave --{name.replace('_', '-')} none out (from Python, give the group)"
                problems.append(f"{given}; {way}")
                continue
            try:
                fields[name] = replace(group, **values)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        try:
            return replace(self, **fields)
        except IdleKnobError as error:
            named = {*keep, *(path.partition(".")[0] for path in keep)}
            idle = [path for path in error.paths if path not in named]
            if not reset_idle or not idle:
                raise
        # Nothing within a group that goes.
        kept = {path: changes[path] for path in changes if path.partition(".")[0] not in idle}
        groups = [path for path in idle if "." not in path]
        reset = {path: defaults()[path] for path in idle if path.partition(".")[0] not in groups}
        reset |= {path: defaults()[path] for path in groups}
        return self.changed(kept | reset, reset_idle=True, keep=keep)

    def identity(self) -> dict[str, Any]:
        """The knobs that make two runs the same experiment, by path; a group that is on is `on`.

        Runs of one experiment may differ in seed and length, and in where and how they run.
        """
        values = self.values()
        return {path: values[path] for path in values if not path.startswith(_NO_DIFFERENCE)}

    def values(self) -> dict[str, Any]:
        """Every knob by its path, each of `env.options` by its own.

        A group is `on`, or None if it is off.
        """
        values = {f"env.options.{key}": value for key, value in self.env.options.items()}
        for path, value in _values(self).items():
            if path != "env.options":
                values[path] = "on" if dataclasses.is_dataclass(value) else value
        return values

    def to_json(self) -> str:
        """The whole configuration as indented JSON."""
        return config_io.to_json(self)

    @staticmethod
    def from_json(text: str) -> Config:
        """Read back `to_json`.

        Raises:
            ValueError: not JSON, another schema, an unknown field (with the nearest name), or a
                value of a wrong type.
        """
        return config_io.from_json(Config, text)


def nearest_divisors(number: int, to: int) -> list[int]:
    """The two divisors of a number that are nearest to another, among those that can be looked at.

    The number may be far too large for its divisors to be counted up to it.
    """
    to = min(to, number)
    reach = range(max(1, to - 10**5), min(number, to + 10**5) + 1)
    near = [n for n in (1, *reach, number) if number % n == 0]
    return sorted(set(near), key=lambda n: (abs(n - to), n))[:2]


def _bad_name(name: str) -> Iterator[str]:
    """The problem with a name that cannot begin a folder's name, or would leave `output_dir`."""
    if not (0 < len(name) <= 100 and name.isprintable()) or name[0] == "." or {*name} & {*"/\\"}:
        yield (
            f"name is {name!r}; it begins the run directory's name, and must have 1 to 100 "
            "characters that can be seen, without / and \\, and no dot as the first"
        )


_NO_DIFFERENCE = (
    "name", "seed", "total_env_steps", "output_dir", "env.num_threads", "env.parallel",
    "env.max_restarts", "compute", "log", "checkpoint", "evaluation",
)  # fmt: skip
"""How the paths of knobs begin that make no other experiment, see `Config.identity`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is known of the environments.

    None is "not known yet", and whatever needs it is not refused.

    Attributes:
        name: of the environments, for messages.
        backend: where they are from; `own` and `vector` are a user's, from Python.
        has_masks: whether they say which actions are allowed.
        has_heuristic: whether a `mask_actions` function was given.
        has_images: whether there are images among the observations.
        has_numbers: whether there is anything but images among them.
        has_floats: whether there are real numbers among them, which can be normalized; members of
            finite sets are one-hot vectors.
        has_continuous_actions: whether there are real numbers among the actions.
    """

    name: str = ""
    backend: Backend | None = None
    has_masks: bool | None = None
    has_heuristic: bool | None = None
    has_images: bool | None = None
    has_numbers: bool | None = None
    has_floats: bool | None = None
    has_continuous_actions: bool | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """What knobs need to have an effect: that `config` or `task` holds, of those that are given.

    Attributes:
        paths: of the knobs, separated by spaces.
        words: what they need, for people: "`paths` has no effect without `words`".
        config: asked of a configuration, whenever one is made.
        task: asked when the environments are known.
    """

    paths: str
    words: str
    config: Callable[[Config], bool] | None = None
    task: Callable[[Task], bool | None] | None = None

    def is_met(self, config: Config | None, task: Task | None) -> bool:
        """Whether the knobs have an effect, or that cannot be said yet."""
        if config is not None and self.config is not None and self.config(config):
            return True
        return self.task is not None and (task is None or self.task(task) is not False)


_PROCGEN_PATHS = " ".join(f"env.{name}" for name in PROCGEN_FIELDS)
_ACTION_PATHS = " ".join(f"action.{part.name}" for part in dataclasses.fields(ActionConfig))
_SCALED = ("normalized", "orthogonal")
NEEDS = (
    Need("env.num_threads", "a task of EnvPool (procgen:NAME or envpool:ID)",
         task=lambda t: t.backend in (None, "procgen", "envpool")),
    Need("env.parallel env.max_restarts", "environments of Gymnasium (gymnasium:ID) or your own",
         task=lambda t: t.backend in (None, "gymnasium", "own")),
    Need("env.action_masks", "an environment that has action masks", task=lambda t: t.has_masks),
    Need("env.heuristic_mask_steps", "a function mask_actions, given from Python",
         task=lambda t: t.has_heuristic),
    Need("env.options", "a task of Procgen, EnvPool or Gymnasium by its id",
         task=lambda t: t.backend in (None, "procgen", "envpool", "gymnasium")),
    Need(_PROCGEN_PATHS, "a game of Procgen (procgen:NAME)",
         task=lambda t: t.backend in (None, "procgen")),
    Need("model.channels model.blocks model.pooling", "model.encoder impala",
         lambda c: c.model.encoder == "impala"),
    Need("model.activation model.value_activation",
         "model.encoder mlp, or numbers beside the images",
         lambda c: c.model.encoder == "mlp", lambda t: t.has_numbers),
    Need("model.activation model.value_activation model.layer_norm",
         "dense layers (model.hidden_sizes)", lambda c: bool(c.model.hidden_sizes)),
    Need("model.value_activation ppo.value_learning_rate ppo.grad_norm_of",
         "model.value_path separate", lambda c: c.model.value_path == "separate"),
    Need("model.policy_head_scale model.value_head_scale",
         "model.head_init normalized or orthogonal", lambda c: c.model.heads in _SCALED),
    Need("model.memory_size", "model.memory lstm or gru", lambda c: c.model.memory != "none"),
    Need(_ACTION_PATHS, "continuous actions", task=lambda t: t.has_continuous_actions),
    Need("action.min_std", "action.std softplus, softplus_tanh or exp",
         lambda c: c.action.std in ("softplus", "softplus_tanh", "exp")),
    Need("action.rescale", "action.squash none or clip, as tanh always stretches",
         lambda c: c.action.squash != "tanh"),
    Need("ppo.gae_lambda ppo.value_target", "ppo.estimator gae",
         lambda c: c.ppo.estimator == "gae"),
    Need("ppo.n_step", "ppo.estimator n_step", lambda c: c.ppo.estimator == "n_step"),
    Need("model.value_activation model.value_head_scale value_norm ppo.value_epochs ppo.value_coef "
         "ppo.value_clip ppo.value_learning_rate ppo.grad_norm_of ppo.recompute_advantages "
         "ppo.bootstrap_truncation ppo.epoch_order", "ppo.baseline", lambda c: c.ppo.baseline),
    Need("ppo.value_coef ppo.value_clip ppo.epoch_order", "ppo.value_epochs above 0",
         lambda c: c.ppo.value_epochs > 0),
    Need("ppo.recompute_advantages", "more than one epoch (ppo.policy_epochs, ppo.value_epochs)",
         lambda c: len(c.ppo.epoch_schedule) > 1),
    Need("ppo.kl_estimate ppo.kl_penalty_target", "ppo.kl_penalty above 0",
         lambda c: c.ppo.kl_penalty > 0),
    Need("evaluation.episodes evaluation.policy evaluation.levels evaluation.steps evaluation.film",
         "evaluation.every_iterations", lambda c: c.evaluation.every_iterations is not None),
    Need("evaluation.overlay", "evaluation.film", lambda c: c.evaluation.film),
    Need("evaluation.levels", "a game of Procgen (procgen:NAME)",
         task=lambda t: t.backend in (None, "procgen")),
    Need("evaluation.levels", "env.num_levels above 0", lambda c: c.env.num_levels > 0,
         lambda t: t.backend != "procgen"),
    Need("ppo.proximal_decay", "ppo.objective surrogate, with ppo.clip or ppo.kl_penalty",
         lambda c: c.ppo.objective == "surrogate" and bool(c.ppo.clip or c.ppo.kl_penalty)),
    Need("ppo.advantage_decay", "ppo.advantage_norm batch",
         lambda c: c.ppo.advantage_norm == "batch"),
    Need("ppo.max_episodes", "ppo.collect_by episodes",
         lambda c: c.ppo.collect_by == "episodes"),
    Need("ppo.advantage_decay", "ppo.collect_by steps", lambda c: c.ppo.collect_by == "steps"),
    Need("ppo.advantage_std", "ppo.advantage_norm batch or minibatch",
         lambda c: c.ppo.advantage_norm != "none"),
    Need("ppo.advantage_std", "ppo.advantage_decay 0", lambda c: not c.ppo.advantage_decay),
    Need("ppo.epoch_kl", "ppo.target_kl, ppo.kl_penalty_target or ppo.schedule adaptive_kl",
         lambda c: c.ppo.uses_kl),
    Need("ppo.target_kl", "ppo.policy_epochs above 1", lambda c: c.ppo.policy_epochs > 1),
    Need("ppo.schedule_kl", "ppo.schedule adaptive_kl", lambda c: c.ppo.schedule == "adaptive_kl"),
    Need("ppo.grad_norm_of", "ppo.max_grad_norm", lambda c: c.ppo.max_grad_norm is not None),
    Need("aux.learning_rate", "aux.optimizer own",
         lambda c: c.aux is not None and c.aux.optimizer == "own"),
    Need("aux.iterations_from", "aux.iterations_per_epoch",
         lambda c: c.aux is not None and c.aux.iterations_per_epoch is not None),
    Need("obs_norm", "real numbers among the observations", task=lambda t: t.has_floats),
    Need("obs_norm.decay", "obs_norm.statistics ema",
         lambda c: c.obs_norm is not None and c.obs_norm.statistics == "ema"),
    Need("value_norm.decay", "value_norm.statistics ema",
         lambda c: c.value_norm is not None and c.value_norm.statistics == "ema"),
    Need("compute.num_threads compute.take_turns",
         "a device that is not a GPU (compute.device)",
         lambda c: not c.compute.device.startswith("cuda")),
    Need("compute.micro_batch", "images among the observations",
         task=lambda t: t.has_images),
    # Of PPO it is true, too, that nothing is done in anything but fp32.
    Need("compute.aux_precision", "an auxiliary phase (aux)",
         lambda c: c.aux is not None),
    Need("log.wandb_project", "log.wandb", lambda c: c.log.wandb),
    Need("log.wandb_entity", "log.wandb", lambda c: c.log.wandb),
)  # fmt: skip
"""Knobs that need something: without it they are refused, unless at their default.

`tests/test_needs.py` lists all others, and fails for a knob that stands in neither list.
"""


class IdleKnobError(ValueError):
    """Knobs that have no effect; `paths` are theirs."""

    def __init__(self, message: str, paths: tuple[str, ...]) -> None:
        super().__init__(message)
        self.paths = paths


def refuse_idle(config: Config, task: Task | None = None) -> None:
    """Refuse knobs that have no effect and are not at their default.

    Args:
        config: whose knobs.
        task: the environments, if they are known by now.

    Raises:
        IdleKnobError: which ones, with the given values and the way out.
    """
    _refuse_idle(_values(config), config, task)


def refuse_idle_env(config: EnvConfig, task: Task) -> None:
    """The same for the knobs of environments alone, where nothing else is known.

    Raises:
        IdleKnobError: which ones, with the given values and the way out.
    """
    _refuse_idle(_paths_of("env", config), None, task)


def _refuse_idle(values: dict[str, Any], config: Config | None, task: Task | None) -> None:
    """Refuse those of the given knobs that have no effect."""
    idle: dict[str, str] = {}
    name = f"{task.name}: " if task and task.name else ""
    changed = {path for path in values if values[path] != defaults()[path]}
    for need in NEEDS:
        for path in need.paths.split():
            if path in changed and path not in idle and not need.is_met(config, task):
                default = defaults()[path]
                idle[path] = (
                    f"{name}{path} is {shown(values[path])}, "
                    f"which has no effect without {need.words}; "
                    f"choose that, or leave {path} at {shown(default)} ({_flag(path, default)})"
                )
    if idle:
        raise IdleKnobError("\n".join(idle.values()), tuple(idle))


def _values(config: Config) -> dict[str, Any]:
    """Every knob that there is in a configuration by its path, and every group that can be off."""
    values: dict[str, Any] = {}
    for part in dataclasses.fields(config):
        group = values[part.name] = getattr(config, part.name)
        if dataclasses.is_dataclass(group):
            values |= _paths_of(part.name, group)
    return values


def _paths_of(name: str, group: Any) -> dict[str, Any]:
    """The knobs of a group by their paths."""
    return {f"{name}.{part.name}": getattr(group, part.name) for part in dataclasses.fields(group)}


@functools.cache
def defaults() -> dict[str, Any]:
    """The default of every knob by its path, and of every group."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(Config)
    for part in dataclasses.fields(Config):
        found[part.name] = _default(part)
        for kind in (hints[part.name], *typing.get_args(hints[part.name])):
            inner = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
            found |= {f"{part.name}.{each.name}": _default(each) for each in inner}
    return found


def _default(part: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass's field."""
    return part.default if part.default_factory is dataclasses.MISSING else part.default_factory()


def shown(value: Any) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, dict):
        options = typing.cast(dict[str, Any], value)
        return " ".join(f"{key}={item}" for key, item in options.items()) or "none"
    if isinstance(value, tuple):
        return " ".join(map(str, typing.cast(tuple[Any, ...], value)))
    return "on" if dataclasses.is_dataclass(value) else "none" if value is None else str(value)


def _flag(path: str, value: Any) -> str:
    """The words of a command line that set a knob."""
    group, dot, name = path.replace("_", "-").rpartition(".")
    if isinstance(value, bool):
        return f"--{group}{dot}{'' if value else 'no-'}{name}"
    return f"--{group}{dot}{name} {shown(value)}"


ASKED_IMPORTS: list[str] = []
"""Modules that the command line was told to import; processes that it starts do so, too."""


def module_of(env_id: str) -> str:
    """The module that Gymnasium's `module:Id` imports; empty if the id names none."""
    back_end, _, name = env_id.partition(":")
    return name.rpartition(":")[0] if back_end == "gymnasium" else ""


def refuse_unasked_import(config: Config) -> None:
    """Refuse an environment whose module nobody here has asked for.

    A configuration that was received must not run code.

    Raises:
        ValueError: `env.id` is Gymnasium's `module:Id`, and the module has not been imported yet.
    """
    module = module_of(config.env.id)
    if module and module not in sys.modules:
        raise ValueError(
            f"env.id {config.env.id} imports the module {module}; "
            f"if you trust it, add --import {module} (from Python, import it)"
        )


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    """The syntax trees of the classes in this file, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def field_texts(kind: type) -> dict[str, str]:
    """What each field of a group is: the strings under them, in this file."""
    texts: dict[str, str] = {}
    for above, below in pairwise(_classes()[kind.__name__].body):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            text = str(value.value) if isinstance(value, ast.Constant) else ""
            texts[above.target.id] = " ".join(text.split())
    return texts


def field_paths() -> list[str]:
    """Every knob by its path: `seed`, `ppo.gamma`."""
    groups = {path.partition(".")[0] for path in defaults() if "." in path}
    return [path for path in defaults() if path not in groups]
