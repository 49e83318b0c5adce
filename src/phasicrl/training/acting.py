"""A trained agent that acts in a loop of the user. Kind: state (its memory)."""

from collections.abc import Mapping
from contextlib import closing
from operator import itemgetter
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Generator
from torch.utils._pytree import tree_map

from phasicrl.config import Config, Precision
from phasicrl.envs.checks import MASK
from phasicrl.envs.protocol import VectorEnv
from phasicrl.masks import find_first_blocked, flatten_mask, to_numeric
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.runs.checkpoint import MANIFEST_FILE
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.spaces import ActionLayout, get_nvec, get_part, map_leaves, take_first
from phasicrl.training.build import EvaluationObjects
from phasicrl.training.evaluate import SavedAgent
from phasicrl.training.evaluation import AgentInput, choose_actions


class TrainedAgent:
    """Trained agent for one environment or B of them, with the memory of their episodes.

    Observations and actions are those of the environment, one or a batch: arrays `[B, …]`, also
    within a `Dict` or `Tuple`.

    Attributes:
        network: policy and value networks, on the CPU.
        observation_space: observation space of one environment, as the networks read it.
        action_space: action space of one environment.

    Args:
        network: policy and value networks.
        envs: environments of the agent, for their spaces.
        config: options of the training run.
        seed: seed of sampled actions.
    """

    def __init__(self, network: Agent, envs: VectorEnv, config: Config, seed: int) -> None:
        self.network, self.action_space = network, envs.action_space
        self.observation_space, self._mask_size = envs.observation_space, envs.mask_size
        self._layout, self._actions = network.reader.layout, ActionLayout(envs.action_space)
        self._obs_indices, self._nvec = config.env.observe, get_nvec(envs.action_space)
        self._precision: Precision = config.compute.policy_precision
        self._generator = Generator().manual_seed(int(seed) % 2**64)
        self._first, self._state = torch.ones(0, dtype=torch.bool), torch.zeros(0, 0)

    def reset(self, done: Any = True) -> None:
        """Start new episodes in the environments that are `done`, bool or `[B]`; else in all.

        Raises:
            ValueError: `done` has another length and is not true everywhere, or other values.
        """
        flags = np.asarray(done, object)
        is_all = flags.size > 0 and np.isin(flags, (1,)).all()
        num_envs = len(self._first) if self.network.state_size and not is_all else 0
        if (num_envs and flags.ndim and flags.size != num_envs) or not np.isin(flags, (0, 1)).all():
            rule = f"True or False, or one for each of {num_envs or 'B'} environments"
            raise ValueError(f"done is {done!r}; expected {rule}. reset() is for all")
        ended = torch.from_numpy(flags.astype(bool).reshape(-1)[:num_envs])
        self._first = self._first | ended if num_envs else self._first[:0]

    @torch.inference_mode()
    def act(self, obs: Any, *, deterministic: bool = True, mask: Any = None) -> Any:
        """Choose actions, and update the memory of the episodes.

        Args:
            obs: one observation, or a batch.
            deterministic: choose the most likely action, or sample one.
            mask: allowed actions, in any format of `phasicrl.masks.flatten_mask`; for a batch one
                for each environment. An entry `action_mask` of the observation is found.

        Returns:
            An action of `action_space`, or a batch.

        Raises:
            ValueError: an observation or a mask has another format, the mask is missing, or the
                number of environments changes without a reset.
        """
        inputs, is_batch = self._read(obs, mask)
        generator = None if deterministic else self._generator
        _, action, self._state = choose_actions(self.network, inputs, generator, self._precision)
        self._first = torch.zeros_like(inputs.first)
        actions = self._actions.unflatten(self.network.policy_head.env_action(action[:, 0]).numpy())
        return actions if is_batch else take_first(self.action_space, actions)

    @torch.inference_mode()
    def value(self, obs: Any) -> Any:
        """Return the value of an observation, or values `[B]`, in units of normalized rewards."""
        (obs, first, state, _), is_batch = self._read(obs, None, needs_mask=False)
        values = self.network.value(obs[:, None], first[:, None], state, precision=self._precision)
        return values[:, 0].numpy() if is_batch else float(values)

    @torch.inference_mode()
    def distribution(self, obs: Any, *, mask: Any = None) -> Policy:
        """Return the action distributions `[B]`, see `act`; B is 1 for one observation."""
        inputs, _ = self._read(obs, mask)
        policy, *_ = choose_actions(self.network, inputs, None, self._precision)
        return self.network.policy_head.distribution(policy.dist_params[:, 0])

    def _read(self, obs: Any, mask: Any, *, needs_mask: bool = True) -> tuple[AgentInput, bool]:
        """Convert observations and masks to inputs, and return whether they are a batch."""
        is_found = mask is None and self._mask_size and isinstance(obs, Mapping)
        mask = obs.get(MASK) if is_found else mask
        arrays, observe = map_leaves(self.observation_space, to_numeric, obs), self._obs_indices
        parts = [get_part(arrays, leaf.path) for leaf in self._layout.leaves]
        if any(x is None or (observe and x.shape[-1:] <= (max(observe),)) for x in parts):
            rule = "a whole observation or a batch, which env.reset() and env.step() return first"
            raise ValueError(f"obs is of type {type(obs).__name__}; expected {rule}")
        arrays = arrays[..., list(observe)] if observe else arrays
        pairs = zip(parts, self._layout.leaves, strict=True)
        is_batch = all(part.ndim > len(leaf.shape) for part, leaf in pairs)
        num_envs = len(parts[0]) if is_batch else 1
        if not is_batch:
            arrays = map_leaves(self.observation_space, lambda part: part[None], arrays)
            mask = None if mask is None else [mask]
        elif is_found and isinstance(mask, Mapping | tuple):  # batched part by part
            mask = [tree_map(itemgetter(i), mask) for i in range(num_envs)]
        stored, masks = self._layout.pack(arrays, num_envs), None
        if invalid := self._layout.find_invalid(stored):
            raise ValueError(f"obs has {invalid[1]}; expected finite values of observation_space")
        if needs_mask and self._mask_size and mask is None:
            raise ValueError("mask is missing; expected the allowed actions. Give mask=…")
        if needs_mask and mask is not None:
            array = np.zeros(0) if isinstance(mask, Mapping) else to_numeric(mask)
            is_single = array is not None and array.ndim < 2
            rows = [] if is_single else [flatten_mask(self.action_space, each) for each in mask]
            if len(rows) != num_envs or find_first_blocked(self._nvec, np.stack(rows)):
                rule = "a mask for each observation, with one allowed choice in each component"
                raise ValueError(f"mask is {mask}; expected {rule}")
            masks = torch.from_numpy(np.stack(rows))
        first, state = self._first, self._state
        if not len(first) or not self.network.state_size:
            first = torch.ones(num_envs, dtype=torch.bool)
            state = self.network.initial_state(num_envs)
        elif len(first) != num_envs:
            given = f"{num_envs} observations are given after {len(first)}"
            raise ValueError(f"{given}; expected as many. Call reset() first")
        return AgentInput(torch.from_numpy(stored.copy()), first, state, masks), is_batch


def load(
    path: Path | str, *, weights: WeightsKind = "last", seed: int = 0,
    **user_objects: Unpack[EvaluationObjects],
) -> TrainedAgent:  # fmt: skip
    """Load a trained agent, to act in a loop of your own.

    Args:
        path: run directory, package of `release`, checkpoint, or the preset of an agent that comes
            with phasicrl, such as `cartpole-ppg`.
        weights: last weights, or best weights by the evaluations during the run.
        seed: seed of sampled actions.
        user_objects: custom environments and networks, see `train`.

    Raises:
        ValueError: there is no agent, its weights are damaged, or a custom object is missing.
    """
    path = RunDirectory.find(path).path.absolute()
    checkpoint = path if (path / MANIFEST_FILE).is_file() else None
    if checkpoint and weights != "last":
        raise ValueError(f"weights is {weights!r}; expected last, the only ones of a checkpoint")
    saved = SavedAgent.from_run(path.parents[1] if checkpoint else path, **user_objects)
    with closing(saved.make_envs(1, "unseen", seed)) as envs:
        network = saved.load_agent(envs, weights, checkpoint=checkpoint)
        return TrainedAgent(network, envs, saved.config, seed)
