"""Tasks of mjlab, by their ids there. Kind: effects."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import torch
import warp  # pyright: ignore[reportMissingImports]
from torch import Tensor

from phasicrl.envs.bridge import EnvSlice
from phasicrl.envs.options import convert_options
from phasicrl.envs.rsl_rl import infer_space, make_unbounded

warp.config.log_level = 30  # warnings only; set before the tasks are imported
from mjlab.envs import ManagerBasedRlEnv  # noqa: E402  # pyright: ignore[reportMissingImports]
from mjlab.tasks import registry  # noqa: E402  # pyright: ignore[reportMissingImports]


def list_names() -> list[str]:
    """Return the ids of mjlab's registered tasks."""
    return registry.list_tasks()


def make_simulator(name: str, options: dict[str, Any], local: EnvSlice) -> MjlabSimulator:
    """Make the environments of a task.

    Args:
        name: id of the task.
        options: `device`, by default the current GPU if there is one, and `play`, whether to use
            the task's settings for watching.
        local: environments of this rank.
    """
    usual = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    defaults = {"device": usual, "play": False}
    options = defaults | convert_options(f"mjlab:{name}", options, defaults)
    config = registry.load_env_cfg(name, play=options["play"])
    config.scene.num_envs, config.auto_reset, config.seed = local.num_envs, False, None
    # Terrains draw from NumPy's global generator; the caller seeds and restores those of PyTorch.
    state = np.random.get_state()
    np.random.seed(local.seeds()[0])
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # three pages of tables
            envs = ManagerBasedRlEnv(config, options["device"])
    finally:
        np.random.set_state(state)
    return MjlabSimulator(envs, local.steps_before)


class MjlabSimulator:
    """`Simulator` over a `ManagerBasedRlEnv` that leaves resets to its caller.

    It draws from PyTorch's global generators only, so that `reset` needs no seed.
    """

    def __init__(self, envs: Any, steps_before: int) -> None:
        self._envs, self.close, self._steps_before = envs, envs.close, steps_before
        self.num_envs, self.device = envs.num_envs, envs.device
        self.single_observation_space = infer_space(envs.observation_space)
        self.single_action_space = make_unbounded(*envs.single_action_space.shape)

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset every environment."""
        obs = self._envs.reset()[0]
        # Curricula read it; at the first reset it must be 0, or levels of terrains would rise.
        self._envs.common_step_counter = max(self._envs.common_step_counter, self._steps_before)
        return obs, {}

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Step with `[B, K]`, without resets; the end of a finite horizon is a termination."""
        obs, reward, terminated, truncated, _ = self._envs.step(action)
        if self._envs.cfg.is_finite_horizon:
            terminated = terminated | truncated
        return obs, reward, terminated, truncated, {}

    def reset_rows(self, ended: Tensor) -> tuple[Any, dict[str, Any]]:
        """Reset environments that `ended` `[B]`; return all observations, others with new noise."""
        rows = ended.nonzero().squeeze(1)
        obs = self._envs.reset(env_ids=rows)[0] if len(rows) else self._envs.obs_buf
        return obs, {}
