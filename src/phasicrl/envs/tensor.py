"""Environments of simulators that hand over tensors, thousands at once. Kind: effects."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from phasicrl.config import EnvConfig
from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.checks import (
    MASK,
    Invalid,
    check_tuple,
    close_env,
    convert_errors,
    has_mask,
    make_properties,
    refuse_late_mask,
    warn_of_extra_obs_keys,
)
from phasicrl.envs.protocol import EnvError, RestoreMethod, TimeStep
from phasicrl.spaces import (
    ActionLayout,
    ObservationLayout,
    format_location,
    get_leaf_nvec,
    get_nvec,
    get_part,
    get_start,
)

CHECK_EVERY = {"cpu": 1}
"""Number of steps between checks of the numbers; 16 elsewhere, since a check waits for a GPU."""

_CHECKED = "reward or flag", "obs", "obs at an episode's end", MASK
"""Names of the numbers that are checked, for messages."""


class Simulator(Protocol):
    """B environments with the interface of Gymnasium's `VectorEnv`, and tensors for arrays.

    `reset(seed=…)` returns observations and `info`; `step(action)` returns observations, rewards,
    terminated, truncated and `info`. Observations `[B, …]` (or a dict or tuple of them), actions,
    rewards `[B]` and flags `[B]` bool are on one device. `info`, or a dict of observations, may
    have the entry `action_mask`, `[B, A]` bool. Tensors may be views of the simulator's memory:
    they are copied.

    An episode's end is handled in one of two ways:

    - `step` never resets, and there is a method `reset_rows(ended)`. It resets the environments
      where `ended` `[B]` is true, and returns observations and `info` of all environments, of which
      only those of ended episodes are read.
    - `step` resets ended environments, and returns their final observations as `info["final_obs"]`,
      `[B, …]`, valid in the rows of ended episodes. If it cannot, `has_final_obs` is False.

    A simulator whose `get_state()` returns tensors by name, from which `set_state(state)` restores
    all environments, is resumed exactly. What it draws from PyTorch's global generators is saved
    without its help. If steps and resets do nothing else than to compute new tensors from those of
    the state, with operations of PyTorch, an attribute `is_pure` of True lets several of them be
    compiled together with the policy. Neither they nor `set_state` may write into tensors.

    Attributes:
        num_envs: number of environments B.
        device: device of all tensors.
        single_observation_space: observation space of one environment.
        single_action_space: action space of one environment.
    """


class TensorVectorEnv:
    """`VectorEnv` over a simulator.

    PyTorch's global generators have a state of their own in its calls, so that neither side changes
    the other's random numbers. Only in `run_fused_steps` networks draw from that state, too, for
    dropout.

    Attributes:
        obs: current observations `[B, …]`; None before the first reset.
        is_open: whether `close` has not been called.
        has_final_obs: whether the final observations of ended episodes are handed over.
        is_pure: whether `run_fused_steps` and `step_from` can be used, see `Simulator`.
    """

    is_open = True

    def __init__(self, simulator: Any, config: EnvConfig, local: EnvSlice) -> None:
        """Reset the simulator; the first `reset` returns that result.

        Raises:
            ValueError: the spaces are not supported.
            EnvError: the simulator cannot be reset.
        """
        self.name, self.num_envs = config.id, simulator.num_envs
        self.device = torch.empty(0, device=simulator.device).device  # with its index
        self.action_mask: Tensor | None = None
        self._simulator: Any = simulator
        self.has_final_obs: bool = getattr(simulator, "has_final_obs", True)
        can_save = hasattr(simulator, "get_state") and hasattr(simulator, "set_state")
        self.restore_method: RestoreMethod = "snapshot" if can_save else "none"
        self.is_pure = can_save and self.has_final_obs and getattr(simulator, "is_pure", False)
        self._properties = properties = make_properties(config.id, simulator, "single_")
        self.observation_space = properties.observation_space
        self.action_space = properties.action_space
        self._layout = ObservationLayout(self.observation_space)
        # First number and number of choices of each discrete part of an observation.
        upload = partial(torch.as_tensor, device=self.device)
        ranges = {x.path: (get_start(x.space), get_leaf_nvec(x.space)) for x in self._layout.leaves}
        self._ranges = {x: [*map(upload, pair)] for x, pair in ranges.items() if pair[1].any()}
        self._actions = ActionLayout(self.action_space)
        seed = local.base_seed + local.first_index
        # States of the global generators in the simulator's calls, by type of device.
        devices = {"cpu": torch.device("cpu"), self.device.type: self.device}
        self._rng_state = {x: Generator(devices[x]).manual_seed(seed).get_state() for x in devices}
        self._num_steps = 0
        self._true = torch.ones((), dtype=torch.bool, device=self.device)
        self._unchecked: list[Tensor] = []  # whether numbers are valid `[4]`, for each step
        self.obs: Tensor | None = None
        self._widths = list(get_nvec(self.action_space)) if config.action_masks else []
        with self._guard_call("reset()"):
            obs, info = check_tuple(simulator.reset(seed=seed), 2)
            self._has_extra = warn_of_extra_obs_keys(config.id, properties, obs)
            has_masks = self._widths and (properties.mask_source or has_mask(info, simulator))
            self.mask_size = sum(self._widths) if has_masks else 0
            self._first_obs = (*self._pack_obs(obs), self._read_mask(obs, info))
        if can_save:
            with self._guard_call("get_state()"):
                if not all(isinstance(x, Tensor) for x in simulator.get_state().values()):
                    raise Invalid("returned other values than tensors; expected them by name")

    def reset(self) -> Tensor:
        """Reset every environment and return the first observations `[B, …]`."""
        if self._first_obs is None:
            with self._guard_call("reset()"):
                obs, info = check_tuple(self._simulator.reset(), 2)
                self._first_obs = *self._pack_obs(obs), self._read_mask(obs, info)
        (self.obs, is_valid, self.action_mask), self._first_obs = self._first_obs, None
        checks = [self._true, is_valid, self._true, self._has_choices(self.action_mask)]
        self.raise_unless_valid(torch.stack(checks)[None], "reset()")
        return self.obs

    def step(self, action: Tensor) -> TimeStep:
        """Step every environment with its action `[B]` or `[B, K]`, and reset ended ones."""
        if self.obs is None:
            raise EnvError(f"{self.name}: step() before reset() or after close(). Call reset()")
        self._num_steps += 1
        if self.device.type == "cpu":  # else the check would wait for the device
            allowed = None if self.action_mask is None else self.action_mask.numpy()
            self._actions.check(self.name, action.numpy(), self.num_envs, action_mask=allowed)
        describe = self._actions.describe_out_of_bounds
        with self._guard_call("step()", lambda: describe(action.numpy(force=True))):
            step, is_valid, self.action_mask = self._advance(action)
            self.obs = step.obs
            self._unchecked.append(is_valid)
        if len(self._unchecked) >= CHECK_EVERY.get(self.device.type, 16):
            self.check()
        return step

    def check(self) -> None:
        """Check the numbers of the steps since the last check."""
        if self._unchecked:
            is_valid, self._unchecked = torch.stack(self._unchecked), []
            self.raise_unless_valid(is_valid)

    def _advance(self, action: Tensor) -> tuple[TimeStep, Tensor, Tensor | None]:
        """Step the simulator, and reset the ended environments.

        Returns:
            The step, whether its numbers are valid `[4]`, see `_CHECKED`, and the action masks or
            None.
        """
        result = self._simulator.step(self._actions.unflatten_tensor(action))
        given_obs, *given, info = check_tuple(result, 5)
        names = ("reward", "terminated", "truncated")
        reward, *flags = (self._check_and_copy(x, (), n) for x, n in zip(given, names, strict=True))
        terminated, truncated = (flag.bool() for flag in flags)
        ended, reward = terminated | truncated, reward.float()
        numeric_flags = (flag == flag.bool() for flag in flags if flag.dtype != torch.bool)
        are_valid = torch.cat([reward.isfinite(), *numeric_flags])
        (obs, is_valid), mask = self._pack_obs(given_obs), self._read_mask(given_obs, info)
        final_obs, end_is_valid = None, self._true
        if not self.is_pure and self._num_steps == 1 and not self._has_extra:
            warn_of_extra_obs_keys(self.name, self._properties, given_obs)
        # A pure simulator is compiled without branches, and resets in each step; on a GPU, reading
        # the flags would wait.
        may_have_ended = self.is_pure or self.device.type != "cpu" or bool(ended.any())
        if may_have_ended and hasattr(self._simulator, "reset_rows"):
            final_obs = obs
            given_obs, info = check_tuple(self._simulator.reset_rows(ended), 2)
            # Rows that go on keep what the step returned: a reset may change them, too.
            first, end_is_valid = self._pack_obs(given_obs, ended, "obs after reset_rows()")
            first_mask = self._read_mask(given_obs, info)
            obs = torch.where(_expand(ended, obs), first, obs)
            if mask is not None and first_mask is not None:
                mask = torch.where(_expand(ended, mask), first_mask, mask)
        elif may_have_ended and self.has_final_obs:
            given_final = info.get("final_obs", info.get("final_observation"))  # as ManiSkill
            if given_final is not None:
                final_obs, end_is_valid = self._pack_obs(given_final, ended, "info['final_obs']")
                paths = [leaf.path for leaf in self._layout.leaves]
                pairs = ((get_part(given_final, path), get_part(given_obs, path)) for path in paths)
                # Views of one memory are one, too; tracing knows nothing of them.
                same = (x is y if self.is_pure else x.data_ptr() == y.data_ptr() for x, y in pairs)
                if all(same) and (self.is_pure or ended.any()):
                    raise Invalid("returned obs as info['final_obs']; expected a copy of the end")
            elif self.is_pure or ended.any():
                text = "returned no info['final_obs']; expected it, or a method reset_rows"
                raise Invalid(f"{text}, or has_final_obs = False")
        # Where both flags are set, the episode ended by its rules.
        truncated = truncated & ~terminated
        step = TimeStep(
            obs=obs, reward=reward, terminated=terminated, truncated=truncated, final_obs=final_obs
        )
        checks = [are_valid.all(), is_valid, end_is_valid, self._has_choices(mask)]
        return step, torch.stack(checks), mask

    def run_fused_steps(
        self, call: Callable[..., tuple[Tensor, ...]], extra_inputs: list[Tensor], num_steps: int
    ) -> tuple[Tensor, ...]:
        """Make steps of an `is_pure` simulator in one call; return all but the next state.

        Args:
            call: function of `extra_inputs` and a state, see `step_from`, that returns results and
                the next state.
            extra_inputs: further inputs.
            num_steps: number of steps that `call` makes.
        """
        self._num_steps += num_steps
        state = self._simulator.get_state()
        current = [x for x in (self.obs, self.action_mask) if x is not None]
        with self._use_generators():
            outputs = call([*extra_inputs, *current, *state.values()])
        start, end = (len(outputs) - n for n in (len(current) + len(state), len(state)))
        self.obs, self.action_mask = (*outputs[start:end], None)[:2]
        self._simulator.set_state(dict(zip(state, outputs[end:], strict=True)))
        return outputs[:start]

    def step_from(
        self, state: Sequence[Tensor], action: Tensor
    ) -> tuple[TimeStep, Tensor, tuple[Tensor, ...]]:
        """Step a pure simulator from a state; return the step, its validity and the next state.

        Args:
            state: observations, action masks if there are any, and the simulator's own state.
            action: actions `[B]` or `[B, K]`.
        """
        with convert_errors(f"{self.name}: step()"):
            names = self._simulator.get_state()
            simulator_state = state[len(state) - len(names) :]
            self._simulator.set_state(dict(zip(names, simulator_state, strict=True)))
            step, is_valid, mask = self._advance(action)
            masks = [] if mask is None else [mask]
            return step, is_valid, (step.obs, *masks, *self._simulator.get_state().values())

    def raise_unless_valid(self, is_valid: Tensor, call_name: str = "step()") -> None:
        """Check that all numbers of the last steps are valid.

        Raises:
            EnvError: `is_valid`, `[T, 4]` for the names in `_CHECKED`, is false somewhere.
        """
        if not is_valid.all():
            first = int(is_valid.all(1).int().argmin())
            steps_ago = len(is_valid) - 1 - first
            wrong = [name for name, each in zip(_CHECKED, is_valid[first], strict=True) if not each]
            error = EnvError(
                f"{self.name}: {call_name} returned in step {self._num_steps - steps_ago} a wrong "
                f"{' or '.join(wrong)}: a number that is not finite as float32, outside its space "
                "or no flag, or a mask that allows nothing; repair the simulator"
            )
            error.steps_ago = steps_ago
            raise error

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state that restores the environments exactly; None without one."""
        if self.obs is None or self.restore_method == "none":
            return None
        current = {"obs": self.obs, "mask": self.action_mask}
        return {"simulator": self._simulator.get_state(), "random": self._rng_state} | current

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        """Restore the result of `state_dict`, and return the current observations `[B, …]`."""
        if self.mask_size and state["mask"] is None:
            raise EnvError(f"{self.name}: the checkpoint has no action masks")
        with self._guard_call("set_state()"):
            self._simulator.set_state({k: x.to(self.device) for k, x in state["simulator"].items()})
        self._rng_state |= {x: state["random"][x] for x in self._rng_state if x in state["random"]}
        self._first_obs = None
        self.action_mask = state["mask"].to(self.device) if self.mask_size else None
        self.obs = obs = state["obs"].to(self.device)
        return obs

    def close(self) -> None:
        """Close the simulator; further calls do nothing."""
        simulator, self._simulator, self.obs, self.is_open = self._simulator, None, None, False
        if hasattr(simulator, "close"):
            close_env(self.name, simulator)

    @contextmanager
    def _guard_call(self, call_name: str, get_violation: Callable[[], str] = str) -> Iterator[None]:
        """Call the simulator: with separate random numbers, and its errors named."""
        with convert_errors(f"{self.name}: {call_name}", get_violation), self._use_generators():
            yield

    @contextmanager
    def _use_generators(self) -> Iterator[None]:
        """Give PyTorch's global generators the states that they have in the simulator's calls."""
        gpus = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            torch.set_rng_state(self._rng_state["cpu"])
            for gpu in gpus:
                torch.cuda.set_rng_state(self._rng_state["cuda"], gpu)
            yield
            self._rng_state["cpu"] = torch.get_rng_state()
            for gpu in gpus:
                self._rng_state["cuda"] = torch.cuda.get_rng_state(gpu)

    def _pack_obs(
        self, obs: Any, rows: Tensor | None = None, obs_name: str = "obs"
    ) -> tuple[Tensor, Tensor]:
        """Copy observations `[B, …]` in their storage format; return whether `rows` are valid."""
        parts, checks = [], []
        for leaf in self._layout.leaves:
            name = f"{obs_name}{format_location(leaf.path)}"
            dtype = getattr(torch, leaf.dtype.name)
            given = self._check_and_copy(get_part(obs, leaf.path), leaf.shape, name)
            part = given.to(dtype)
            valid = part.isfinite() if dtype.is_floating_point else part == given
            if leaf.path in self._ranges:
                start, num = self._ranges[leaf.path]
                part = part - start
                valid = valid & (part >= 0) & (part < num)
            parts.append(part)
            valid = valid if rows is None else valid | ~_expand(rows, valid)
            checks.append(valid.all())
        is_valid = torch.stack(checks).all()
        if not self._layout.is_tree:
            return parts[0], is_valid
        parts = [part.reshape(self.num_envs, -1).view(torch.uint8) for part in parts]
        return torch.cat(parts, 1), is_valid

    def _check_and_copy(self, value: Any, shape: tuple[int, ...], name: str) -> Tensor:
        """Return a copy of a tensor `[B, *shape]`, which the simulator may change later."""
        shape = (self.num_envs, *shape)
        if not isinstance(value, Tensor) or value.shape != shape or value.is_complex():
            given = f"of type {type(value).__name__}"
            if isinstance(value, Tensor):
                given = f"of shape {tuple(value.shape)}" + " and complex" * value.is_complex()
            raise Invalid(f"returned {name} {given}; expected a tensor of shape {shape}")
        return value.detach().to(self.device, copy=True, memory_format=torch.contiguous_format)

    def _has_choices(self, mask: Tensor | None) -> Tensor:
        """Return whether masks allow something in each discrete component, 0-d; true for None."""
        if mask is None:
            return self._true
        return torch.stack([each.any(1).all() for each in mask.split(self._widths, 1)]).all()

    def _read_mask(self, obs: Any, info: Mapping[str, Any]) -> Tensor | None:
        mask = get_part(obs, (MASK,)) if self._properties.mask_source else info.get(MASK)
        if self.mask_size:
            return self._check_and_copy(mask, (self.mask_size,), MASK) > 0
        return refuse_late_mask(info) if self._widths else None


@contextmanager
def use_torch_seed(local: EnvSlice) -> Iterator[None]:
    """Seed PyTorch's global generators until the end of the block, in which a simulator is made."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(local.seeds()[0])  # other numbers than in the first reset
        yield


def _expand(rows: Tensor, like: Tensor) -> Tensor:
    """Return `rows` `[B]` as `[B, 1, …]`, with as many axes as `like`."""
    return rows.view(-1, *(1,) * (like.dim() - 1))
