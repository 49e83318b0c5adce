"""Every option of a run, as frozen dataclasses. Imports no torch, so that `--help` is fast.

A group is always there and has a value that switches it off. Numbers that follow from others are
properties. `num_envs`, batch and minibatch sizes are global. Codes that an option reproduces are
named in its sentence (OPPG = openai/phasic-policy-gradient, CleanRL = vwxyzjn/cleanrl, Baselines =
openai/baselines).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from phasicrl import config_io
from phasicrl.config_io import ConfigError, nearest_name

Encoder = Literal["impala", "nature", "mlp"]
ValuePath = Literal["separate", "detached", "shared_in_aux", "shared"]
Initialization = Literal["normalized", "orthogonal", "glorot", "torch"]
Activation = Literal["relu", "tanh", "gelu"]
MinibatchUnit = Literal["segments", "transitions"]
Statistics = Literal["moments", "ema"]
OptionValue = str | int | float | bool
Precision = Literal["fp32", "bf16"]
PolicyKind = Literal["greedy", "sampled"]
Levels = Literal["unseen", "train"]
EvaluatedLevels = Literal["unseen", "train", "both"]
ProcgenDistribution = Literal["easy", "hard", "extreme", "memory", "exploration"]

_RANGES: dict[str, Callable[[float], bool]] = {
    "a number above 0": lambda x: 0 < x < math.inf,
    "0 or a number above it": lambda x: 0 <= x < math.inf,
    "a number from 0 to 1": lambda x: 0 <= x <= 1,
    "a number from 0 to below 1": lambda x: 0 <= x < 1,
}
_Int = Annotated[int, "a number above 0"]
_Count = Annotated[int, "0 or a number above it"]
_Float = Annotated[float, "a number above 0"]
_Weight = Annotated[float, "0 or a number above it"]
_Share = Annotated[float, "a number from 0 to 1"]
_Decay = Annotated[float, "a number from 0 to below 1"]


@functools.cache
def _ranges(group: type) -> dict[str, str]:
    """Return the range of each option of a group that has one."""
    hints = typing.get_type_hints(group, include_extras=True)
    return {
        name: text
        for name, hint in hints.items()
        for member in (hint, *typing.get_args(hint))
        for text in getattr(member, "__metadata__", ())
    }


class _Group:
    """A group of options. Raises all problems with their values at once."""

    __slots__ = ()
    _prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        """Check the values."""
        problems: list[str] = []
        for name, text in _ranges(type(self)).items():
            value = getattr(self, name)
            parts = typing.cast(tuple[Any, ...], value if isinstance(value, tuple) else (value,))
            if not all(x is None or isinstance(x, str) or _RANGES[text](x) for x in parts):
                problems.append(f"{self._prefix}{name} is {value}; expected {text}")
        if problems := problems or list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with values that are each in their range."""
        yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvConfig(_Group):
    """Which environments, and how many (ours; options that begin with Procgen are its own)."""

    _prefix: ClassVar[str] = "env."
    id: str = "procgen:starpilot"
    """`procgen:starpilot`, `envpool:Ant-v4`, `gymnasium:CartPole-v1`, or a bare id."""
    num_envs: _Int = 64
    """Number of environments (B), over all processes."""
    num_threads: _Int | None = None
    """Threads of EnvPool; none: one per core, and one alone for classic control."""
    max_restarts: _Count = 0
    """Maximum environment failures. A failed environment is recreated, its episode truncated."""
    parallel: Literal["sync", "processes"] = "sync"
    """Step Gymnasium environments one after the other, or in a process each."""
    action_masks: bool = True
    """Obey the environment's action masks, if it has any (source 003)."""
    observe: tuple[int, ...] | None = None
    """Components of an observation vector that the agent sees, such as `0 2`; none: all."""
    heuristic_mask_steps: _Count = 100_000
    """Steps at the start of training in which `mask_actions` holds (source 003)."""
    options: Mapping[str, OptionValue] = field(default_factory=dict[str, OptionValue], hash=False)
    """Options of the environment itself, `KEY=VALUE …`; added to those of the preset."""
    distribution: ProcgenDistribution = "easy"
    """Procgen: difficulty of the levels."""
    num_levels: _Count = 0
    """Procgen: number of distinct training levels; 0: unlimited."""

    def _problems(self) -> Iterator[str]:
        if not self.id or not self.id.isprintable():
            yield f"env.id is {self.id!r}; expected printable text. `phasicrl envs` lists ids"
        for key, value in dict[str, Any](self.options).items():
            if not isinstance(value, OptionValue):
                yield f"env.options has {key} = {value!r}; expected a text, a number or a boolean"


PROCGEN_FIELDS = ("distribution", "num_levels")
"""Fields of `EnvConfig` that only Procgen understands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(_Group):
    """The networks."""

    _prefix: ClassVar[str] = "model."
    value_path: ValuePath = "separate"
    """`separate` networks (PPG paper), or one, which the value gradient reaches in: `detached` no
    phase (OPPG), `shared_in_aux` the auxiliary phase (figure 7), `shared` both."""
    encoder: Encoder = "impala"
    """`impala` (Espeholt et al. 2018), `nature` (Mnih et al. 2015), or `mlp` for vectors."""
    channels: tuple[_Int, ...] = (16, 32, 32)
    """IMPALA: output channels of each stack; as many stacks as numbers (OPPG: 16 32 32)."""
    blocks: _Count = 2
    """IMPALA: residual blocks in each stack (OPPG: 2)."""
    pooling: Literal["symmetric", "same"] = "symmetric"
    """IMPALA: padding of max-pools: on both sides (OPPG) or TensorFlow's (Baselines)."""
    hidden_sizes: tuple[_Int, ...] = (256,)
    """Widths of dense layers, after convolutions or of an `mlp` (OPPG: 256; Baselines: 64 64)."""
    activation: Activation = "relu"
    """Non-linearity between dense layers of an `mlp` (Baselines: tanh); for images it is ReLU."""
    value_activation: Activation | None = None
    """Non-linearity of a separate value network (source 004); none: the policy network's."""
    layer_norm: bool = False
    """Normalize each dense layer's output before its non-linearity (source 000)."""
    init: Initialization = "normalized"
    """Initial weights: OPPG's, orthogonal (gain √2), Glorot's (Baselines' IMPALA), PyTorch's."""
    head_init: Initialization | None = None
    """Initial weights of the heads; none: `normalized` if `init` is (OPPG), else `orthogonal`."""
    policy_head_scale: _Float = 0.1
    """Scale of the policy head's initial weights: 0.1 in PPG (OPPG), 0.01 in PPO (Baselines)."""
    value_head_scale: _Float = 0.1
    """Scale of the value heads' initial weights: 0.1 in PPG (OPPG), 1 in PPO (Baselines)."""
    memory: Literal["none", "lstm", "gru"] = "none"
    """Memory after the encoder (Hochreiter 1997), and after a separate value encoder (contrib)."""
    memory_size: _Int = 128
    """Width of the memory's output (contrib: 256; CleanRL: 128)."""

    @property
    def head_scheme(self) -> Initialization:
        """Scheme of the heads' initial weights, with the default filled in."""
        return self.head_init or ("normalized" if self.init == "normalized" else "orthogonal")

    def _problems(self) -> Iterator[str]:
        if not self.channels:
            yield "model.channels is empty; expected a width for each stack, such as 16 32 32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionConfig(_Group):
    """Continuous actions: a normal distribution of independent components."""

    _prefix: ClassVar[str] = "action."
    mean: Literal["raw", "tanh"] = "raw"
    """The mean as the network gives it, or through a tanh, to [−1, 1] (source 004)."""
    std: Literal["parameter", "softplus", "softplus_tanh", "exp", "fixed", "range"] = "parameter"
    """Trained (Baselines), from features (Acme), fixed, or a share of the range (source 004)."""
    std_value: _Float = 1.0
    """Initial value of a trained deviation (Baselines: 1); the fixed one; or the share."""
    min_std: _Float = 1e-6
    """Added to deviations from features, which could reach zero without (Acme: 1e-6)."""
    squash: Literal["none", "clip", "tanh"] = "none"
    """Act with samples as drawn, clipped to the range (CleanRL), or tanh (Haarnoja et al. 2018)."""
    rescale: bool = False
    """Act in [−1, 1], scaled to the action range (source 004); always so with `tanh`."""

    def _problems(self) -> Iterator[str]:
        if self.mean == "tanh" and self.squash == "tanh":
            yield "action.mean and action.squash are both tanh; expected at most one of them"


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOConfig(_Group):
    """The policy phase: rollouts, advantages and the epochs over them."""

    _prefix: ClassVar[str] = "ppo."
    num_steps: _Int = 256
    """Time steps of each environment in a rollout (T; PPG paper: 256)."""
    collect_by: Literal["steps", "episodes"] = "steps"
    """Train on all steps, or on whole episodes (source 003) that begin in the first half."""
    max_episodes: _Int | None = None
    """Maximum complete episodes used per rollout (source 003); none: no limit."""
    gamma: _Share = 0.999
    """Discount factor γ (PPG paper: 0.999)."""
    reward_clip: _Float | None = None
    """Clip rewards to ± this before any normalization (Atari, Mnih et al. 2015: 1)."""
    estimator: Literal["gae", "n_step", "monte_carlo"] = "gae"
    """GAE (Schulman et al. 2016), n rewards and a value, or rewards to the end (source 003)."""
    gae_lambda: _Share = 0.95
    """λ of generalized advantage estimation (Schulman et al. 2016, eq. 16)."""
    value_target: Literal["gae", "monte_carlo"] = "gae"
    """Value targets under `gae`: V + A, or rewards to the episode's end (Spinning Up)."""
    n_step: _Int = 5
    """Rewards before the value in `n_step` returns (source 003)."""
    baseline: bool = True
    """Subtract values from returns; off: no values, as in REINFORCE (Williams 1992)."""
    recompute_advantages: bool = False
    """Recompute values, advantages and targets before each further epoch (Tianshou)."""
    bootstrap_truncation: bool = True
    """Bootstrap at a time limit (Pardo et al. 2018); off: treat it as a termination (OPPG)."""
    policy_epochs: _Int = 1
    """Passes over a rollout with the policy loss (E_π; PPO paper, algorithm 1; PPG paper: 1)."""
    value_epochs: _Count = 1
    """Passes over each rollout with the value loss (E_V; PPG paper: 1)."""
    epoch_order: Literal["value_first", "policy_first"] = "value_first"
    """`value_first`: joint updates if E_π = E_V, else value epochs first (OPPG).
    `policy_first`: policy epochs, then value epochs (PPG paper)."""
    num_minibatches: _Int = 8
    """Minibatches in one pass (PPO paper, algorithm 1; PPG paper: 8)."""
    minibatch_by: MinibatchUnit = "segments"
    """Minibatches of whole segments (OPPG), or of shuffled transitions (Baselines, CleanRL)."""
    objective: Literal["surrogate", "log_prob"] = "surrogate"
    """`surrogate`: ratios (PPO paper, eq. 6), `log_prob`: REINFORCE (Williams 1992)."""
    clip: _Float | None = 0.2
    """Clip range ε of the probability ratio (PPO paper, eq. 7); none: the plain surrogate."""
    kl_penalty: _Weight = 0.0
    """Weight of the penalty on the KL divergence from the old policy (PPO paper, eq. 8)."""
    kl_estimate: Literal["sampled", "exact"] = "sampled"
    """The penalty: half the mean squared log-ratio (OPPG), or KL(old ‖ new) in closed form."""
    kl_penalty_target: _Float | None = None
    """Adapt the penalty's weight towards this divergence (PPO paper, section 4)."""
    epoch_kl: Literal["k3", "k1"] = "k3"
    """Estimate an epoch's KL by k3 (SB3), or by k1, the mean −log ratio (Spinning Up)."""
    target_kl: _Float | None = None
    """Stop policy epochs once the KL exceeds this (CleanRL; Spinning Up: 0.015)."""
    proximal_decay: _Decay | None = None
    """Decay of the average of weights that updates are clipped around (ppo-ewma); none: the
    policy that acted."""
    entropy_coef: _Weight = 0.01
    """Weight of the entropy bonus (PPO paper, eq. 9; PPG paper: 0.01)."""
    value_coef: _Weight = 1.0
    """Weight of half the squared error of values (OPPG: 1, which is its vfcoef of 0.5)."""
    value_clip: _Float | None = None
    """Clip range of the value's change from the rollout's (Baselines, CleanRL: 0.2)."""
    advantage_norm: Literal["batch", "minibatch", "none"] = "batch"
    """Normalize advantages over the whole batch (OPPG), over each minibatch (Baselines), or not."""
    advantage_std: Literal["biased", "unbiased"] = "biased"
    """Divide squared deviations by n (OPPG, Baselines), or by n − 1 (CleanRL, SB3)."""
    advantage_decay: _Decay = 0.0
    """Weight of earlier rollouts in the statistics of advantages (ppo-ewma); 0: this one alone."""
    learning_rate: _Float = 5e-4
    """Adam's step size (PPG paper: 5e-4)."""
    value_learning_rate: _Float | None = None
    """Step size of a separate value network (Spinning Up: 1e-3); none: the same."""
    schedule: Literal["constant", "linear", "adaptive_kl"] = "constant"
    """Learning rate: constant (OPPG), decaying to zero (Baselines), or following the KL (after
    rsl_rl), once an iteration and for all optimizers."""
    schedule_kl: _Float = 0.01
    """`adaptive_kl`: target KL; the rate changes by factors of 1.5 (rsl_rl)."""
    adam_betas: tuple[_Decay, _Decay] = (0.9, 0.999)
    """Adam's β₁ and β₂, in both phases (ppo-ewma)."""
    adam_eps: _Float = 1e-8
    """Adam's ε: 1e-8 in PPG (OPPG), 1e-5 in PPO (Baselines)."""
    adam_eps_hat: bool = False
    """Add ε before the second moment's bias is corrected, as TensorFlow does (Baselines)."""
    max_grad_norm: _Float | None = None
    """Clip the gradient's norm at this value (Baselines: 0.5); none in PPG (OPPG)."""
    grad_norm_of: Literal["networks", "agent"] = "networks"
    """Two networks: clip each gradient by its own norm, or by their common one (CleanRL)."""

    def _problems(self) -> Iterator[str]:
        if not self.baseline and self.estimator != "monte_carlo":
            yield f"ppo.estimator is {self.estimator}; expected monte_carlo without ppo.baseline"
        if self.objective == "log_prob" and (self.clip is not None or self.policy_epochs != 1):
            yield (
                "ppo.objective log_prob has no ratio to clip and holds for one epoch only, "
                f"but ppo.clip is {self.clip} and ppo.policy_epochs {self.policy_epochs}; "
                "set ppo.clip to none, ppo.policy_epochs and ppo.value_epochs to 1"
            )

    @property
    def epoch_schedule(self) -> tuple[tuple[bool, bool], ...]:
        """Epochs over a rollout, in order, as (policy loss?, value loss?).

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
        """Whether the KL of an epoch stops, penalizes or slows the training."""
        has_target = self.target_kl is not None or self.kl_penalty_target is not None
        return has_target or self.schedule == "adaptive_kl"


@dataclass(frozen=True, kw_only=True, slots=True)
class AuxConfig(_Group):
    """The auxiliary phase of PPG."""

    _prefix: ClassVar[str] = "aux."
    epochs: _Count = 0
    """Passes over the phase's data (E_aux; PPG paper: 6); 0: no auxiliary phase, which is PPO."""
    every: _Int = 32
    """Policy iterations before each auxiliary phase (N_π; PPG paper: 32)."""
    run_every: _Int = 1
    """Run only every k-th auxiliary phase; the data of the others is dropped (source 000: 2)."""
    num_minibatches: _Int = 16
    """Minibatches of one pass per policy iteration (N_a; PPG paper: 16)."""
    iterations_per_epoch: _Int | None = None
    """Use in each epoch only as much data as N ≤ N_π iterations have (source 001); none: all."""
    iterations_from: Literal["phase", "last"] = "phase"
    """Draw it from the whole phase, or take the last iterations alone: harmful (source 001)."""
    recompute_targets: bool = False
    """Recompute value targets at the start of the auxiliary phase (source 001)."""
    minibatch_by: MinibatchUnit = "segments"
    """Minibatches of whole segments (OPPG, CleanRL), or of shuffled transitions."""
    beta_clone: _Weight = 1.0
    """Weight β of the KL divergence from the policy before the phase (PPG paper: 1)."""
    value_coef: _Weight = 1.0
    """Weight of the value network's loss in the phase (0: PPG paper, figure 9)."""
    optimizer: Literal["own", "shared"] = "own"
    """A separate Adam (OPPG), or the policy phase's (CleanRL)."""
    learning_rate: _Float = 5e-4
    """Step size of a separate Adam (PPG paper: 5e-4); a shared one keeps the policy phase's."""
    max_grad_norm: _Float | None = None
    """Clip the norm of each network's gradient at this value (CleanRL: 0.5)."""

    def _problems(self) -> Iterator[str]:
        if (self.iterations_per_epoch or 0) > self.every:
            yield (
                f"aux.iterations_per_epoch is {self.iterations_per_epoch}; "
                f"expected at most aux.every, {self.every}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardNormConfig(_Group):
    """Division of rewards by the running standard deviation of the discounted return."""

    _prefix: ClassVar[str] = "reward_norm."
    per: Literal["none", "rollout", "step"] = "none"
    """Off, statistics updated once a rollout (OPPG), or at each step (Baselines, CleanRL)."""
    gamma: _Share | None = None
    """Discount of the running return (OPPG, Baselines: 0.99); none: the algorithm's γ."""
    clip: _Float = 10.0
    """Clip normalized rewards to ± this (OPPG, Baselines: 10)."""
    reset_at: Literal["end", "termination"] = "end"
    """Reset the running return at each end (OPPG), or at terminations only (Gymnasium)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObsNormConfig(_Group):
    """Normalization of observed numbers; the statistics are part of the weights."""

    _prefix: ClassVar[str] = "obs_norm."
    statistics: Literal["none", Statistics] = "none"
    """Off, mean and variance of all so far (Baselines), or averages over rollouts (source 003)."""
    decay: _Decay = 0.999
    """`ema`: weight of the earlier statistics at each rollout (source 003)."""
    from_first_rollout: bool = True
    """Normalize the first rollout by its own statistics (ours); off: train on it as it is."""
    clip: _Float = 10.0
    """Clip normalized observations to ± this (Baselines: 10)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueNormConfig(_Group):
    """Normalization of value targets; value heads are rescaled as statistics move (Pop-Art)."""

    _prefix: ClassVar[str] = "value_norm."
    statistics: Literal["none", Statistics] = "none"
    """Off, mean and variance of all targets so far, or averages over rollouts (source 003)."""
    decay: _Decay = 0.999
    """`ema`: weight of the earlier statistics at each rollout (source 003)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeConfig(_Group):
    """How the arithmetic is executed; nothing here changes results, up to rounding (ours)."""

    _prefix: ClassVar[str] = "compute."
    device: str = "auto"
    """`auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:1`."""
    num_threads: _Int | None = None
    """Threads of PyTorch; none: all cores for images and large minibatches, else one."""
    take_turns: bool = True
    """Let runs that would fill the same cores compute in turns, which is faster."""
    micro_batch: _Int | Literal["auto"] | None = "auto"
    """Images in one pass through the network; `auto`: 64 on a CPU (128 in bf16); none: all."""
    policy_precision: Precision = "fp32"
    """Precision of the encoders in the rollout and the policy phase; all else is fp32."""
    aux_precision: Precision = "fp32"
    """Precision of the encoders in the auxiliary phase."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile gradient steps and acting; `auto`: in runs long enough to pay for it."""
    deterministic: bool = False
    """Allow only deterministic kernels; matters on a GPU, where it costs speed."""
    rank_timeout: _Float = 600.0
    """Seconds that the processes of a run wait for one that does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is reported, and where (ours)."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` display, `plain` lines, or nothing; `auto`: live on a terminal, plain elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    epochs: bool = False
    """Write a row for each epoch of each phase too, into `epochs.jsonl`."""
    wandb: bool = False
    """Send the metrics to Weights & Biases too (extra `wandb`)."""
    wandb_project: str = "phasicrl"
    """Weights & Biases project."""
    wandb_entity: str | None = None
    """Team or user of Weights & Biases; none: its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(_Group):
    """When the run's state is saved (ours)."""

    _prefix: ClassVar[str] = "checkpoint."
    every_minutes: _Weight | None = 5.0
    """Minutes between checkpoints; 0: one each iteration; none: not by the clock."""
    every_iterations: _Int | None = None
    """Iterations between checkpoints; none: not by count. With both none: only at the end."""
    keep: _Int = 2
    """Number of checkpoints that are kept."""

    @property
    def is_periodic(self) -> bool:
        """Return whether checkpoints are saved before the end of the run."""
        return self.every_minutes is not None or self.every_iterations is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig(_Group):
    """Evaluation episodes during the run (ours)."""

    _prefix: ClassVar[str] = "evaluation."
    every_iterations: _Int | None = None
    """Iterations between evaluations; none: off. The best weights go into best.safetensors."""
    episodes: _Int = 20
    """Episodes of an evaluation, the same ones each time."""
    policy: PolicyKind = "greedy"
    """Take the most likely action, or sample one."""
    levels: EvaluatedLevels = "unseen"
    """Procgen: all levels, the training levels, or both, and their gap."""
    steps: bool = False
    """Write every step of the first episode: a table in `evaluations/`, and TensorBoard series."""
    film: bool = False
    """Film an episode of each evaluation, in `videos/`."""
    overlay: bool = True
    """Show the return so far, the value and the policy under each image of these films."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config(_Group):
    """One run."""

    name: str = "custom"
    """Name of the experiment: begins the run directory's name, groups runs in plots (ours)."""
    seed: _Count = 1
    """Seed of all that is random in the run (ours)."""
    total_env_steps: _Int = 25_000_000
    """Budget in steps of single environments (ours)."""
    budget_rounding: Literal["up", "down"] = "up"
    """Whether the last rollout goes over the budget (OPPG, SB3), or is left out (CleanRL)."""
    output_dir: str = "runs"
    """Folder of the run directories (ours)."""
    init_from: str | None = None
    """Run directory whose weights the run starts from, as far as they fit (ours)."""
    imports: tuple[str, ...] = ()
    """Modules that register environments, imported before these are made (ours)."""
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
            yield (
                f"name is {name!r}; expected 1 to 100 printable characters without / and \\, "
                "and no dot as the first"
            )
        if self.budget <= 0:
            yield (
                f"total_env_steps is {self.total_env_steps}, which budget_rounding down makes "
                f"0 rollouts of {self.batch_size} steps; give {self.batch_size} or more"
            )
        groups = [("ppo", ppo, 1), ("aux", aux, aux.every)]
        for owner, group, iterations in groups if self.has_auxiliary_phase else groups[:1]:
            items, what = self.env.num_envs, "env.num_envs"
            if group.minibatch_by == "transitions":
                items, what = items * ppo.num_steps, what + " × ppo.num_steps"
                if self.model.memory != "none":
                    yield f"{owner}.minibatch_by is transitions; expected segments with a memory"
            if items % group.num_minibatches:
                better = " or ".join(map(str, nearest_divisors(items, group.num_minibatches)))
                of = f" of each of {iterations} iterations" if iterations > 1 else ""
                yield (
                    f"{owner}.num_minibatches is {group.num_minibatches}; expected a divisor of "
                    f"the {items} {group.minibatch_by} ({what}){of}, such as {better}"
                )
        if not ppo.baseline and self.has_auxiliary_phase:
            yield "ppo.baseline is off, but an auxiliary phase needs values; set aux.epochs to 0"
        if ppo.advantage_norm == "minibatch" and self.batch_size == ppo.num_minibatches:
            yield (
                f"ppo.num_minibatches is {ppo.num_minibatches}, which leaves 1 sample in a "
                "minibatch to normalize; expected fewer, or ppo.advantage_norm batch"
            )
        if (ppo.advantage_norm, ppo.advantage_std, self.batch_size) == ("batch", "unbiased", 1):
            yield "ppo.advantage_std is unbiased; expected biased for a batch of 1 step"

    @property
    def batch_size(self) -> int:
        """Environment steps of one rollout over all environments (N = B·T)."""
        return self.env.num_envs * self.ppo.num_steps

    @property
    def budget(self) -> int:
        """Steps after which a run ends, and at which falling rates would be zero."""
        left_out = self.total_env_steps % self.batch_size if self.budget_rounding == "down" else 0
        return self.total_env_steps - left_out

    @property
    def num_iterations(self) -> int:
        """Policy iterations of the whole run; the last one may exceed the budget."""
        return -(-self.budget // self.batch_size)

    @property
    def has_auxiliary_phase(self) -> bool:
        """Whether this is PPG."""
        return self.aux.epochs > 0

    @property
    def rollouts_per_phase(self) -> int:
        """Rollouts that are stored together: N_π with an auxiliary phase, else one."""
        return self.aux.every if self.has_auxiliary_phase else 1

    @property
    def aux_phase_interval(self) -> int:
        """Policy iterations from one auxiliary phase to the next."""
        return self.aux.every * self.aux.run_every if self.has_auxiliary_phase else 1

    @property
    def aux_passes(self) -> float:
        """How often an observation goes through the networks in auxiliary phases."""
        return (
            self.aux.epochs
            * (self.aux.iterations_per_epoch or self.aux.every)
            / self.aux_phase_interval
        )

    @property
    def num_gradient_steps(self) -> int:
        """Gradient steps of the whole run, at most."""
        steps = self.num_iterations * len(self.ppo.epoch_schedule) * self.ppo.num_minibatches
        per_epoch = self.aux.num_minibatches * (self.aux.iterations_per_epoch or self.aux.every)
        return steps + self.num_iterations // self.aux_phase_interval * self.aux.epochs * per_epoch

    @property
    def reward_gamma(self) -> float:
        """Discount of the reward normalizer's running return."""
        return self.ppo.gamma if self.reward_norm.gamma is None else self.reward_norm.gamma

    def with_updates(self, changes: Mapping[str, Any]) -> Config:
        """Return the configuration with other values at the given paths, such as `ppo.gamma`.

        Raises:
            ValueError: an option that does not exist, or values that do not go together.
        """
        groups: dict[str, dict[str, Any]] = {}
        for path, value in changes.items():
            if path not in defaults() and path not in self.__dataclass_fields__:
                raise ValueError(f"unknown option {path}{nearest_name(path, defaults())}")
            group, _, name = path.rpartition(".")
            groups.setdefault(group, {})[name] = value
        own = groups.pop("", {})
        problems: list[str] = []
        for group, values in groups.items():  # all of a group at once
            try:
                own[group] = replace(getattr(self, group), **values)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        return replace(self, **own)

    def identity(self) -> dict[str, Any]:
        """Return the options that make two runs the same experiment, by path.

        Runs of one experiment may differ in seed and length, and in where and how they run.
        """
        values = self.values()
        return {path: values[path] for path in values if not path.startswith(_NO_DIFFERENCE)}

    def values(self) -> dict[str, Any]:
        """Return every option by its path, each of `env.options` by its own."""
        values = {f"env.options.{key}": value for key, value in self.env.options.items()}
        for part in dataclasses.fields(self):
            value = getattr(self, part.name)
            if not dataclasses.is_dataclass(value):
                values[part.name] = value
                continue
            for each in dataclasses.fields(value):
                values[f"{part.name}.{each.name}"] = getattr(value, each.name)
        del values["env.options"]
        return values

    def to_json(self) -> str:
        """Return the configuration as indented JSON."""
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
    """Return the two divisors of a number that are nearest to another number."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    return sorted(divisors, key=lambda n: (abs(n - to), n))[:2]


_NO_DIFFERENCE = (
    "name", "seed", "total_env_steps", "output_dir", "imports", "env.num_threads", "env.parallel",
    "env.max_restarts", "compute", "log", "checkpoint", "evaluation",
)  # fmt: skip
"""Beginnings of the paths of options that make no other experiment, see `Config.identity`."""


@functools.cache
def defaults() -> dict[str, Any]:
    """Return the default of every option by its path."""
    return Config().values() | {"env.options": {}}


def format_value(value: Any) -> str:
    """Return a value as it is given on the command line."""
    if isinstance(value, dict):
        items = typing.cast(dict[str, Any], value).items()
        return " ".join(f"{key}={item}" for key, item in items) or "none"
    if isinstance(value, tuple):
        return " ".join(map(str, typing.cast(tuple[Any, ...], value)))
    return "none" if value is None else str(value)


def module_of(env_id: str) -> str:
    """Return the module that Gymnasium's `module:Id` imports, or "" if the id names none."""
    back_end, _, name = env_id.partition(":")
    return name.rpartition(":")[0] if back_end == "gymnasium" else ""


def check_imports(config: Config) -> None:
    """Check that a configuration from a file imports no module that the user has not imported.

    Raises:
        ValueError: a module of `imports` or `env.id` has not been imported yet.
    """
    for module in (*config.imports, module_of(config.env.id)):
        if module and module not in sys.modules:
            raise ValueError(
                f"the configuration imports the module {module}; "
                f"if you trust it, add --import {module} (from Python, import it)"
            )


@functools.cache
def field_texts(group: type) -> Mapping[str, str]:
    """Return the sentence under each option of a group in this file."""
    (tree,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for above, below in pairwise(tree.body):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            text = str(value.value) if isinstance(value, ast.Constant) else ""
            texts[above.target.id] = " ".join(text.split())
    texts.pop("_prefix", None)
    return texts
