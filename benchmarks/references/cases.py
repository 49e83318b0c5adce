"""The comparisons: a program of a reference with its settings, and our preset of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from references import playback
from references.playback import BUTTONS, FEW, FORCES, PICTURE, VECTOR, Recording, record

MISTAKE = "AGREEMENT_MISTAKE"
"""Environment variable that makes our value loss wrong by a part, to show how a mistake looks."""

SINGLE = {
    "encoder": ("pi_enc",),
    "policy_head.linear": ("pi_head",),
    "value_head": ("pi_vhead",),
    "aux_value_head": ("aux_vf_head",),
}
DUAL = SINGLE | {"value_encoder": ("vf_enc",), "value_head": ("vf_vhead",)}
TANH_64 = {
    "encoder": ("actor.0", "actor.2"), "value_encoder": ("critic.0", "critic.2"),
    "policy_head.linear": ("actor.4",), "value_head": ("critic.4",),
}  # fmt: skip
IMPALA = {
    "encoder": ("network",),
    "policy_head.linear": ("actor",),
    "value_head": ("critic",),
    "aux_value_head": ("aux_critic",),
}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: name of the comparison.
        reference: name of the reference code.
        program: program of it.
        preset: our preset.
        names: beginnings of our parameters' names, each with one or more of theirs.
        iterations: number of updates.
        num_envs: B.
        num_steps: T.
        recording: arguments of `playback.record`.
        changes: changes of the preset, besides those that make it small.
        settings: settings of their program.
        counts_from: weight of a variance of 1 in their initial reward statistics; ours start alike.
        minibatches: number in an epoch of the policy phase.
        ranks: number of processes of ours.
        as_it_is: known differences are left.
        initial: compare the norms of initial weights, which do not depend on chance.
        value_gradient_in_aux: stop their value gradient in the policy phase only.
        by_design: reason of a difference that is meant.
    """

    name: str
    reference: str
    program: str
    preset: str
    names: Mapping[str, tuple[str, ...]]
    iterations: int
    num_envs: int
    num_steps: int
    recording: Mapping[str, Any]
    changes: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts_from: float | None = 1e-4
    minibatches: int = 8
    ranks: int = 1
    as_it_is: bool = False
    initial: bool = True
    value_gradient_in_aux: bool = False
    by_design: str = ""

    def experience(self) -> Recording:
        """Make the recording."""
        return record(
            num_steps=self.iterations * self.num_steps, num_envs=self.num_envs, **self.recording
        )

    @property
    def budget(self) -> int:
        """Return the number of environment steps."""
        return self.iterations * self.num_envs * self.num_steps


_PICTURES = {"spaces": (PICTURE, BUTTONS), "ends": "rules"}
_PHASES = {"aux.every": 2, "aux.epochs": 2, "aux.num_minibatches": 2, "ppo.num_minibatches": 4}
_PUBLISHED = {"reward_norm.gamma": 0.99, "ppo.num_minibatches": 4}
_CONTINUOUS = {
    "encoder": ("actor_mean.0", "actor_mean.2"), "policy_head.linear": ("actor_mean.4",),
    "policy_head.log_std": ("actor_logstd",),
    "value_encoder": ("critic.0", "critic.2"), "value_head": ("critic.4",),
}  # fmt: skip
_SB3 = {
    "encoder": ("mlp_extractor.policy_net",), "value_encoder": ("mlp_extractor.value_net",),
    "policy_head.linear": ("action_net",),
    "value_head": ("value_net",),
}  # fmt: skip
_SPINNING_UP = {
    "encoder": ("pi.mu_net.0", "pi.mu_net.2"), "value_encoder": ("v.v_net.0", "v.v_net.2"),
    "policy_head.linear": ("pi.mu_net.4",),
    "policy_head.log_std": ("pi.log_std",), "value_head": ("v.v_net.4",),
}  # fmt: skip
_RSL_RL = {
    "encoder": ("actor.mlp.0", "actor.mlp.2"), "policy_head.linear": ("actor.mlp.4",),
    "policy_head.log_std": ("actor.distribution.log_std_param",),
    "value_encoder": ("critic.mlp.0", "critic.mlp.2"), "value_head": ("critic.mlp.4",),
}  # fmt: skip
# One update: from the second on, rounding decides whether the KL of the first minibatch, before any
# step, is 0, which leaves the learning rate alone, or above, which raises it.
_LEGGED = {
    "ppo.policy_epochs": 1, "ppo.value_epochs": 1, "ppo.num_minibatches": 32,
    "ppo.schedule": "adaptive_kl", "ppo.schedule_kl": 0.02, "ppo.learning_rate": 1e-3,
    "ppo.adam_eps": 1e-8, "ppo.advantage_norm": "batch", "ppo.advantage_std": "unbiased",
    "ppo.value_coef": 2.0, "ppo.value_clip": 0.2, "ppo.entropy_coef": 0.01,
    "ppo.max_grad_norm": 1.0, "ppo.grad_norm_of": "networks", "ppo.bootstrap_truncation": False,
    "obs_norm.statistics": "none", "reward_norm.per": "none",
}  # fmt: skip
_START = (
    "running moments begin there with a variance of 1 that counts as 1e-4 samples, "
    "and with nothing here"
)
_STALE = (
    "its first auxiliary step of each phase takes the last policy gradient along, "
    "which is not set to zero: a bug"
)
_ROUNDING = (
    "compiled, the divergence's gradient at the old policy, from which Adam of an auxiliary phase "
    "starts, is rounding, and uncompiled exactly zero"
)
_EPSILON = "ours adds 1e-8 to the deviation that advantages are divided by, and theirs adds nothing"

OPPG = Case(
    "train_fn, two networks", "openai-ppg", "train.py", "procgen-ppg-paper", DUAL, 5, 8, 8,
    _PICTURES, _PHASES,
    {"n_pi": 2, "n_aux_epochs": 2}, minibatches=4,
)  # fmt: skip
PPG_SCRIPT = Case(
    "ppg_procgen.py", "cleanrl", "ppg_procgen.py", "compat-cleanrl-ppg", IMPALA, 5, 8, 8, _PICTURES,
    {"aux.every": 2, "aux.epochs": 2, "aux.num_minibatches": 2},
    {"n_iteration": 2, "e_auxiliary": 2},
)  # fmt: skip
SPINNING_UP = Case(
    "ppo", "spinning-up", "ppo.py", "compat-spinningup-ppo", _SPINNING_UP, 3, 1, 128,
    {"spaces": (VECTOR, FORCES), "ends": "limit", "limit": 12, "rollout": 128}, minibatches=1,
    initial=False,
)  # fmt: skip
BASELINES = Case(
    "VecNormalize and Runner", "baselines", "vec_normalize.py, runner.py",
    "compat-baselines-ppo-procgen", {}, 1, 8, 32, _PICTURES,
    settings={"gamma": 0.999, "reward_gamma": 0.99}, initial=False,
)  # fmt: skip
_SMALL = _PHASES | {
    "env.observe": None, "env.num_envs": 4, "ppo.num_steps": 32, "ppo.policy_epochs": 2,
    "ppo.value_epochs": 2, "ppo.schedule": "constant", "ppo.recompute_advantages": False,
}  # fmt: skip
_FORCES = {"spaces": (VECTOR, FORCES)}
_EMA = {"obs_norm.statistics": "ema", "obs_norm.decay": 0.7, "obs_norm.from_first_rollout": False}
_LAST = {"aux.iterations_per_epoch": 1, "aux.iterations_from": "last"}
_FEATURES: tuple[tuple[str, str, dict[str, Any], dict[str, Any]], ...] = (
    ("LSTM in both networks", "cartpole-masked-velocity-ppg", {}, {}),
    ("masks", "classic-ppg", {"masked": True, "spaces": (VECTOR, BUTTONS)}, {}),
    ("normal distributions", "pendulum-ppg", _FORCES, {"obs_norm.statistics": "none"}),
    ("normalized observations", "pendulum-ppg", _FORCES, {}),
    ("normalized observations, by ema, from the second rollout", "pendulum-ppg", _FORCES, _EMA),
    ("normalized values", "classic-ppg", {}, {"value_norm.statistics": "moments"}),
    ("normalized values, by ema, of plain rewards", "classic-ppg", {},
     {"value_norm.statistics": "ema", "value_norm.decay": 0.7, "reward_norm.per": "none"}),
    ("PPO-EWMA", "classic-ppg", {}, {"ppo.proximal_decay": 0.9, "ppo.clip": 0.02}),
    ("adaptive_kl", "classic-ppg", {}, {"ppo.schedule": "adaptive_kl", "ppo.schedule_kl": 0.002}),
    ("recomputed targets", "classic-ppg", {}, {"aux.recompute_targets": True}),
    ("a part of a phase, N < N_π", "classic-ppg", {}, {"aux.iterations_per_epoch": 1}),
    ("the last rollout of a phase, N < N_π", "classic-ppg", {}, _LAST),
)  # fmt: skip
FORMULAS = Case(
    "PPG", "formulas", "formulas.py", "classic-ppg", {}, 5, 4, 32,
    {"spaces": (VECTOR, FEW), "ends": "both"}, _SMALL, counts_from=None, initial=False,
)  # fmt: skip
_PLAIN = _SMALL | {"aux.learning_rate": 5e-3}  # so that divergences are no mere rounding
OURSELVES = replace(
    FORMULAS, name="beside compiled steps", reference="ourselves", program="ours.py",
    changes=_PLAIN | {"compute.compile": "on"}, minibatches=4, by_design=_ROUNDING,
)  # fmt: skip
CASES = (
    OPPG,
    replace(
        OPPG, name="train_fn --arch detach", preset="procgen-ppg-single", names=SINGLE,
        iterations=3, changes=_PHASES | _PUBLISHED,
        settings={**OPPG.settings, "arch": "detach"},
    ),
    replace(
        OPPG, name="train_fn --arch detach, in the policy phase only",
        preset="procgen-ppg-single-paper", names=SINGLE, iterations=3, changes=_PHASES | _PUBLISHED,
        settings={**OPPG.settings, "arch": "detach"}, value_gradient_in_aux=True,
    ),
    replace(
        OPPG, name="train_fn --kl_penalty 1 --clip_param 0", preset="procgen-ppg-kl", iterations=3,
        changes=_PHASES | _PUBLISHED,
        settings={**OPPG.settings, "kl_penalty": 1.0, "clip_param": 0.0},
    ),
    replace(
        OPPG, name="train_fn --arch shared, three epochs, no auxiliary phase",
        preset="procgen-ppo-paper", names=SINGLE, iterations=2,
        changes=_PUBLISHED,
        settings={"arch": "shared", "n_epoch_pi": 3, "n_epoch_vf": 3, "n_aux_epochs": 0, "n_pi": 0},
    ),
    Case(
        "ppo.py", "cleanrl", "ppo.py", "compat-cleanrl-ppo", TANH_64, 3, 4, 32,
        {"spaces": (VECTOR, FEW), "ends": "both"}, minibatches=4,
    ),
    Case(
        "ppo_continuous_action.py", "cleanrl", "ppo_continuous_action.py",
        "compat-cleanrl-ppo-continuous", _CONTINUOUS, 3, 1, 256,
        {"spaces": (VECTOR, FORCES), "ends": "both"}, {"obs_norm.statistics": "none"},
        minibatches=32,
    ),
    Case(
        "ppo_procgen.py", "cleanrl", "ppo_procgen.py", "compat-cleanrl-ppo-procgen", IMPALA,
        2, 8, 8, _PICTURES, initial=False,
    ),
    Case(
        "ppo_atari_lstm.py", "cleanrl", "ppo_atari_lstm.py", "compat-cleanrl-ppo-atari",
        IMPALA | {"memory": ("lstm",)}, 2, 8, 16,
        _PICTURES | {"spaces": (playback.SCREEN, BUTTONS)},
        {"model.memory": "lstm", "ppo.reward_clip": None, "env.options": {}}, minibatches=4,
    ),
    PPG_SCRIPT,
    replace(
        PPG_SCRIPT, name="ppg_procgen.py, stale gradient and all", iterations=3, as_it_is=True,
        by_design=_STALE,
    ),
    Case(
        "PPO", "sb3", "PPO", "compat-sb3-ppo", _SB3, 3, 2, 128,
        {"spaces": (VECTOR, FEW), "ends": "both"}, minibatches=32,
    ),
    Case(
        "MaskablePPO", "sb3", "MaskablePPO", "compat-sb3-ppo", _SB3, 3, 2, 128,
        {"spaces": (VECTOR, BUTTONS), "ends": "both", "masked": True}, minibatches=32,
    ),
    Case(
        "PPO, adaptive learning rate", "rsl-rl", "algorithms/ppo.py",
        "compat-cleanrl-ppo-continuous", _RSL_RL, 1, 4, 64,
        {"spaces": (VECTOR, FORCES), "ends": "rules"}, _LEGGED, {"desired_kl": 0.02},
        minibatches=32, initial=False,
    ),
    SPINNING_UP,
    replace(SPINNING_UP, name="ppo, without 1e-8", iterations=1, as_it_is=True, by_design=_EPSILON),
    BASELINES,
    replace(
        BASELINES, name="VecNormalize and Runner, from their start", counts_from=None,
        by_design=_START,
    ),
    FORMULAS,
    *(replace(FORMULAS, name=name, preset=preset, changes=_SMALL | changes,
              recording={**FORMULAS.recording, **recording})
      for name, preset, recording, changes in _FEATURES),
    OURSELVES,
    replace(OURSELVES, name="beside two processes", changes=_PLAIN, ranks=2, by_design=""),
)  # fmt: skip
