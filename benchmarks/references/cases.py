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
)  # fmt: skip
