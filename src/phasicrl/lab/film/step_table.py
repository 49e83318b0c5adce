"""Every step of evaluated episodes, as rows of CSV. Kind: effects (writes into a file)."""

from __future__ import annotations

import csv
from collections import defaultdict
from typing import IO, Any

import torch
from torch import Tensor

from phasicrl.config import Levels, PolicyKind
from phasicrl.envs.protocol import TimeStep
from phasicrl.models.distributions import Policy
from phasicrl.session.evaluation import UnderWay


class StepTable:
    """Every step of the episodes that an evaluation counts, as a row of CSV, episode by episode.

    Columns: `levels`, `policy`, `env`, `episode` (of that environment, from 0), `step` (from 1),
    `reward`, `return` (of the episode so far), `entropy` (nats), for each continuous component k
    `std_k`, before a squash, and for each component k of an action `mean_k`, the policy's mean (of
    a discrete component the likeliest option), and `action_k`, what was taken, before it was
    clipped, squashed or rescaled.

    Args:
        file: open for writing, with `newline=""`.
        only_first: keep the first episode of the first environment alone that counts.
    """

    def __init__(self, file: IO[str], *, only_first: bool = False) -> None:
        self._rows = csv.writer(file)
        self._has_head, self._only_first, self._has_episode = False, only_first, False
        self._of_episode: dict[int, list[tuple[Any, ...]]] = defaultdict(list)  # by environment

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
        rows = list(zip(*columns.values(), strict=True))
        kept, ended = under_way.are_counted.clone(), step.terminated | step.truncated
        if self._only_first:
            kept[int(not self._has_episode) :] = False
        for env in kept.nonzero().flatten().tolist():
            self._of_episode[env].append(rows[env])
        # An episode that was cut by a fault does not count.
        cut = step.info.get("cut", torch.zeros_like(ended))
        for env in (kept & ended).nonzero().flatten().tolist():
            of_episode = self._of_episode.pop(env)
            if not cut[env]:
                self._rows.writerows(of_episode)
                self._has_episode = True
