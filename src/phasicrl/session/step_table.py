"""Every step of evaluated episodes, as rows of CSV. Kind: effects (writes into a file)."""

from __future__ import annotations

import csv
from itertools import compress
from typing import IO, Any

from torch import Tensor

from phasicrl.config import Levels, PolicyKind
from phasicrl.envs.protocol import TimeStep
from phasicrl.models.distributions import Policy
from phasicrl.session.evaluation import UnderWay


class StepTable:
    """Every step of the episodes that an evaluation counts, as a row of CSV.

    Columns: `levels`, `policy`, `env`, `episode` (of that environment, from 0), `step` (from 1),
    `reward`, `return` (of the episode so far), `entropy` (nats), for each continuous component k
    `std_k`, before a squash, and for each component k of an action `mean_k`, the policy's mean (of
    a discrete component the likeliest option), and `action_k`, what was taken, before it was
    clipped, squashed or rescaled.

    Args:
        file: open for writing, with `newline=""`.
        only_first: keep the first episode of the first environment alone.
    """

    def __init__(self, file: IO[str], *, only_first: bool = False) -> None:
        self._rows = csv.writer(file)
        self._has_head, self._only_first = False, only_first

    def add(
        self,
        levels: Levels,
        kind: PolicyKind,
        policy: Policy,
        action: Tensor,
        step: TimeStep,
        under_way: UnderWay,
    ) -> None:
        """One step of B environments.

        Args:
            levels: that they play.
            kind: how actions were chosen.
            policy: what they were chosen from, `[B, 1]`.
            action: the actions, `[B, 1, …]`.
            step: what came of them.
            under_way: the episodes so far, this step included.
        """
        num_envs, stds = len(action), policy.stds
        columns: dict[str, Any] = {
            "levels": [levels] * num_envs,
            "policy": [kind] * num_envs,
            "env": range(num_envs),
            "episode": under_way.numbers.tolist(),
            "step": under_way.lengths.tolist(),
            "reward": step.reward.numpy(),  # which writes as few digits as a float32 has
            "return": under_way.returns.tolist(),
            "entropy": policy.entropy().flatten().tolist(),
        }
        for what, values in (("std", stds), ("mean", policy.mode()), ("action", action)):
            if values is None:
                continue
            parts = values.reshape(num_envs, -1).T.tolist()
            columns |= {f"{what}_{k}": part for k, part in enumerate(parts)}
        if not self._has_head:
            self._rows.writerow(columns)
            self._has_head = True
        rows = zip(*columns.values(), strict=True)
        kept = under_way.are_counted
        if self._only_first:
            kept = kept & (under_way.numbers == 0)
            kept[1:] = False
        self._rows.writerows(compress(rows, kept.tolist()))
