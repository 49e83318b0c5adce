"""Tables of the steps of evaluation episodes, as CSV. Kind: effects (writes into a file)."""

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
    """Writes each step of the counted evaluation episodes as a row of CSV, episode by episode.

    Columns: `levels`, `policy`, `env`, `episode` (of that environment, from 0), `step` (from 1),
    `reward`, `return` (of the episode so far), `entropy` (nats), for each continuous component k
    `std_k`, before a squash, and for each component k of an action `mean_k`, the policy's mean (of
    a discrete component the likeliest option), and `action_k`, the taken action before clip, squash
    and rescaling.

    Args:
        file: open for writing, with `newline=""`.
        only_first: write only the first counted episode of the first environment.
    """

    def __init__(self, file: IO[str], *, only_first: bool = False) -> None:
        self._writer = csv.writer(file)
        self._has_head, self._only_first, self._has_episode = False, only_first, False
        self._rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)  # of open episodes

    def add(
        self,
        levels: Levels,
        kind: PolicyKind,
        policy: Policy,
        action: Tensor,
        step: TimeStep,
        under_way: UnderWay,
    ) -> None:
        """Add one step of B environments.

        Args:
            levels: levels of the environments.
            kind: sampled or greedy actions.
            policy: distributions of the actions, `[B, 1]`.
            action: taken actions, `[B, 1, …]`.
            step: result of the step.
            under_way: the episodes so far, with this step.
        """
        num_envs = len(action)
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
        for name, values in (("std", policy.stds), ("mean", policy.mode()), ("action", action)):
            if values is not None:
                parts = values.reshape(num_envs, -1).T.tolist()
                columns |= {f"{name}_{k}": part for k, part in enumerate(parts)}
        if not self._has_head:
            self._writer.writerow(columns)
            self._has_head = True
        rows = list(zip(*columns.values(), strict=True))
        counted, ended = under_way.are_counted.clone(), step.terminated | step.truncated
        if self._only_first:
            counted[int(not self._has_episode) :] = False
        # An episode that was cut by a fault does not count.
        cut = step.info.get("cut", torch.zeros_like(ended))
        for env in counted.nonzero().flatten().tolist():
            self._rows[env].append(rows[env])
            if ended[env]:
                episode = self._rows.pop(env)
                if not cut[env]:
                    self._writer.writerows(episode)
                    self._has_episode = True
