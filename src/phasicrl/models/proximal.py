"""Proximal policy of PPO-EWMA: an average of the policy's weights. Kind: state.

PPO's old policy has two roles: it drew the actions, and updates are clipped around it. With an
average of the weights in the second role, the speed of the policy's change depends on the number of
samples and not on the batch size (Hilton, Cobbe and Schulman 2021, "Batch size-invariance for
policy optimization", arXiv 2110.00641).
"""

import copy
from typing import Any

import torch
from torch import Tensor

from phasicrl.models.agent import Agent


class ProximalPolicy:
    """Exponentially weighted average of an agent's policy (openai/ppo-ewma, ppg.py:169-190).

    The weights after each gradient step count `decay` times as much as those after the next one;
    the initial weights count `decay` times as much as those after the first step.

    Args:
        agent: trained agent, whose weights are averaged and observation statistics shared.
        decay: decay of the average; 0 equals the agent after each step.

    Attributes:
        agent: copy of the trained agent, with the averaged weights.
    """

    def __init__(self, agent: Agent, decay: float) -> None:
        self.agent = copy.deepcopy(agent).requires_grad_(False)
        self.agent.reader = agent.reader
        self._decay, self._total = decay, 1.0

    @torch.no_grad()
    def update(self, agent: Agent) -> None:
        """Add the agent's weights to the average, after a gradient step of the policy."""
        self._total = 1 + self._decay * self._total
        # The policy's network is the first; a separate value network is not averaged.
        average, weights = (list[Tensor](x.params_per_network()[0]) for x in (self.agent, agent))
        torch._foreach_lerp_(average, weights, 1 / self._total)

    def reset(self, agent: Agent) -> None:
        """Restart the average at the agent's weights, as after an auxiliary phase."""
        self._total = 0.0
        self.update(agent)

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights and the average's denominator to save."""
        return {"agent": self.agent.state_dict(), "total": self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average and its denominator from the result of `state_dict`."""
        self.agent.load_state_dict(state["agent"])
        self._total = state["total"]
