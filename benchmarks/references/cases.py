"""What is compared: each reference's program with settings of its own, and ours with the preset that says it does the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from references.playback import BUTTONS, FEW, FORCES, PICTURE, VECTOR, Recording, record

SINGLE = {"encoder": ("pi_enc",), "policy_head.linear": ("pi_head",), "value_head": ("pi_vhead",), "aux_value_head": ("aux_vf_head",)}
DUAL = SINGLE | {"value_encoder": ("vf_enc",), "value_head": ("vf_vhead",)}
TANH_64 = {
    "encoder": ("actor.0", "actor.2"), "value_encoder": ("critic.0", "critic.2"), "policy_head.linear": ("actor.4",), "value_head": ("critic.4",),
}  # fmt: skip
IMPALA = {"encoder": ("network",), "policy_head.linear": ("actor",), "value_head": ("critic",), "aux_value_head": ("aux_critic",)}


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        name: of it.
        reference: whose program.
        program: which one, or how it is set.
        preset: ours.
        names: where our weights are in theirs: beginnings of parameters' names, each for one or more of theirs.
        iterations: number of updates.
        num_envs: B.
        num_steps: T.
        recording: arguments of `playback.record`.
        changes: of the preset, beside what makes it small.
        settings: of theirs.
        counts_from: the weight with which a variance of 1 enters their reward statistics; ours are then begun likewise.
        minibatches: of an epoch of the policy phase.
        as_it_is: nothing is done about what is known to be different.
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
    as_it_is: bool = False

    def experience(self) -> Recording:
        """What both learn from."""
        return record(num_steps=self.iterations * self.num_steps, num_envs=self.num_envs, **self.recording)

    @property
    def budget(self) -> int:
        """Environment steps."""
        return self.iterations * self.num_envs * self.num_steps


_PICTURES = {"spaces": (PICTURE, BUTTONS), "ends": "rules"}
CASES = (
    Case(
        "OpenAI PPG, two networks", "openai-ppg", "dual", "procgen-ppg-paper", DUAL, 3, 8, 8, _PICTURES,
        {"aux.every": 2, "aux.epochs": 2, "aux.num_minibatches": 2},
        {"arch": "dual", "n_pi": 2, "n_aux_epochs": 2},
    ),
    Case(
        "CleanRL ppo.py", "cleanrl", "ppo.py", "compat-cleanrl-ppo", TANH_64, 3, 4, 32, {"spaces": (VECTOR, FEW), "ends": "both"}, minibatches=4,
    ),
    Case(
        "CleanRL ppo_continuous_action.py", "cleanrl", "ppo_continuous_action.py", "compat-cleanrl-ppo-continuous",
        TANH_64 | {"policy_head.linear": ("actor_mean.4",), "policy_head.log_std": ("actor_logstd",), "encoder": ("actor_mean.0", "actor_mean.2")},
        3, 1, 256, {"spaces": (VECTOR, FORCES), "ends": "both"}, {"obs_norm": None}, minibatches=32,
    ),
    Case(
        "CleanRL ppo_procgen.py", "cleanrl", "ppo_procgen.py", "compat-cleanrl-ppo-procgen", IMPALA, 2, 8, 8, _PICTURES,
    ),
    Case(
        "CleanRL ppg_procgen.py", "cleanrl", "ppg_procgen.py", "compat-cleanrl-ppg", IMPALA, 3, 8, 8, _PICTURES,
        {"aux.every": 2, "aux.epochs": 2, "aux.num_minibatches": 2}, {"n_iteration": 2, "e_auxiliary": 2},
    ),
    Case(
        "Stable-Baselines3 PPO", "sb3", "PPO", "compat-sb3-ppo",
        {
            "encoder": ("mlp_extractor.policy_net",), "value_encoder": ("mlp_extractor.value_net",), "policy_head.linear": ("action_net",),
            "value_head": ("value_net",),
        },
        3, 2, 128, {"spaces": (VECTOR, FEW), "ends": "both"}, {"env.num_envs": 2}, minibatches=32,
    ),
    Case(
        "Spinning Up ppo", "spinning-up", "ppo", "compat-spinningup-ppo",
        {
            "encoder": ("pi.mu_net.0", "pi.mu_net.2"), "value_encoder": ("v.v_net.0", "v.v_net.2"), "policy_head.linear": ("pi.mu_net.4",),
            "policy_head.log_std": ("pi.log_std",), "value_head": ("v.v_net.4",),
        },
        3, 1, 128, {"spaces": (VECTOR, FORCES), "ends": "limit", "limit": 12, "rollout": 128}, minibatches=1,
    ),
)  # fmt: skip
