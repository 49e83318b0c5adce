"""The policy that updates are kept near to: an average of the weights so far. Kind: state.

PPO's "old" policy has two purposes: it drew the actions, and updates are kept near to it. Only the
first one needs the policy that drew them. With an average in the second place, how fast the policy
moves depends on the number of samples, not on how often new ones are collected (Hilton, Cobbe and
Schulman 2021, "Batch size-invariance for policy optimization", arXiv 2110.00641).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from phasicrl.models.agent import Agent


class ProximalPolicy:
    """The exponentially weighted average of an agent's policy (openai/ppo-ewma, ppg.py:169-190).

    After n steps the weights of `k` steps ago count `decay^k`, those at the beginning as much as
    those after one step.

    Args:
        agent: whose weights are averaged; it lends its statistics of observations.
        decay: 0 is the agent itself after each step, near 1 a long average.

    Attributes:
        agent: has the averaged weights.
    """

    def __init__(self, agent: Agent, decay: float) -> None:
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        self.agent.reader = agent.reader
        self._decay, self._total = decay, 1.0

    @torch.no_grad()
    def follow(self, agent: Agent) -> None:
        """Take the weights after a step of the policy into the average."""
        self._total = 1 + self._decay * self._total
        # The policy's network is the first; a value network of its own is not asked.
        average, weights = (list[Tensor](each.networks()[0]) for each in (self.agent, agent))
        torch._foreach_lerp_(average, weights, 1 / self._total)

    def reset(self, agent: Agent) -> None:
        """Begin the average anew: an auxiliary phase is no step of the policy."""
        self._total = 0.0
        self.follow(agent)

    def state_dict(self) -> dict[str, Any]:
        """Everything that must survive."""
        return {"agent": self.agent.state_dict(), "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back `state_dict`."""
        self.agent.load_state_dict(state["agent"])
        self._total = state["total"]
