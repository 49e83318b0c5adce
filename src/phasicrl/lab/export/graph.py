"""Policy as one graph for other tools. Kind: state (a module without effects)."""

from functools import reduce
from operator import getitem
from typing import Any

import torch
from torch import Tensor, nn

from phasicrl.models.agent import Agent


class AgentGraph(nn.Module):
    """Policy and value of B environments, with normalization, masks and memory.

    Inputs, tensors `[B, …]` in this order:
    - `obs`: observation; numbers as float32, images and other bytes as uint8, members of finite
      sets as int64 from zero. A `Dict` or `Tuple` space has one input for each part: `obs/KEY`.
    - `first` bool and `state` float, only with a memory: true where an episode begins, and
      `new_state` of the step before, which is ignored there.
    - `action_mask` bool `[B, M]`, only of environments with masks: allowed options.

    Outputs:
    - `action`: the most likely action, clipped, squashed and rescaled for the environment.
    - `log_probs` `[B, M]`: of the options of all discrete components, in the order of a mask.
    - `mean`, `std` `[B, n]`: of the continuous components, before squash and clip.
    - `value` `[B]`: V, in units of the rewards that were learned from.
    - `new_state` `[B, H]`: only with a memory.

    Args:
        agent: agent in evaluation mode, on the CPU.
        has_masks: true for environments with masks.
    """

    def __init__(self, agent: Agent, *, has_masks: bool) -> None:
        super().__init__()
        self.agent, self.has_masks = agent, has_masks
        self.has_memory = agent.state_size > 0
        self._paths = [leaf.path for leaf in agent.reader.layout.leaves]

    @property
    def input_docs(self) -> dict[str, str]:
        """Names and descriptions of the exported policy's inputs, in order."""
        about = {
            _format_name(leaf.path): f"observed, {_format_shape(*leaf.shape)} {leaf.dtype}"
            for leaf in self.agent.reader.layout.leaves
        }
        if self.has_memory:
            about["first"] = f"where an episode begins, {_format_shape()} bool"
            before = "new_state of the step before; any where first is true"
            about["state"] = f"{before}, {_format_shape(self.agent.state_size)} float32"
        if self.has_masks:
            shape = _format_shape(self.agent.policy_head.mask_size)
            about["action_mask"] = f"true where an option is allowed, {shape} bool"
        return about

    @property
    def output_docs(self) -> dict[str, str]:
        """Names and descriptions of the exported policy's outputs, in order."""
        head = self.agent.policy_head
        about = {"action": "most likely action for the environment, options from zero"}
        if head.mask_size:
            about["log_probs"] = "log-probability of each option, in a mask's order"
        if head.num_continuous:
            continuous = "of the continuous components, before squash and clip"
            about |= {"mean": continuous, "std": continuous}
        about["value"] = "expected discounted return, in units of the rewards learned"
        return about | ({"new_state": "the memory's"} if self.has_memory else {})

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Map tensors in the order of `input_docs` to tensors in the order of `output_docs`."""
        count = len(self._paths)
        parts, others = dict(zip(self._paths, inputs[:count], strict=True)), list(inputs[count:])
        mask = others.pop().unsqueeze(1) if self.has_masks else None
        if not self.has_memory:
            num_envs = inputs[0].shape[0]
            others = [torch.zeros(num_envs, dtype=torch.bool), torch.zeros(num_envs, 0)]
        first, state = others
        read = self.agent.reader.normalize(self.agent.reader.layout.assemble(parts))
        output = self.agent.forward_normalized(read, first.unsqueeze(1), state, mask)
        action = self.agent.policy_head.env_action(output.policy.mode()[:, 0])
        head = self.agent.policy_head
        log_probs, mean, std = head.split_log_probs_means_stds(output.policy.dist_params[:, 0])
        numbers = [log_probs] * (head.mask_size > 0) + [mean, std] * (head.num_continuous > 0)
        return (action, *numbers, output.value[:, 0], *([output.state] if self.has_memory else []))


def get_inputs_by_name(
    layout: Any, obs: Tensor, first: Tensor, state: Tensor, action_mask: Tensor | None
) -> dict[str, Tensor]:
    """Return an agent's inputs as a dict with an exported policy's names.

    Args:
        layout: `ObservationLayout` of the stored observations.
        obs: stored observations, `[B, *shape]`.
        first: true where an episode begins, `[B]`.
        state: state of the memory, `[B, H]`.
        action_mask: allowed actions, `[B, M]`; None if all are.
    """
    tree = layout.unpack(obs)
    named = {_format_name(leaf.path): reduce(getitem, leaf.path, tree) for leaf in layout.leaves}
    named |= {"first": first, "state": state}
    return named if action_mask is None else named | {"action_mask": action_mask}


def _format_name(path: tuple[str | int, ...]) -> str:
    """Format the name of the input for a part of an observation."""
    return "/".join(["obs", *map(str, path)])


def _format_shape(*sizes: int) -> str:
    """Format the shape of a batch."""
    return f"[{', '.join(('B', *map(str, sizes)))}]"
