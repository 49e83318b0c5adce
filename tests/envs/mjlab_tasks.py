"""Tasks of mjlab for the tests, over its balanced pole. Kind: state (its registry)."""

# pyright: reportMissingImports=false

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

SHORT, LONG, NOISY, FINITE = "Test-Short", "Test-Long", "Test-Noisy", "Test-Finite"
LIMIT = 4
"""Steps of an episode, of `LONG` a thousand. Environment 1 falls after `FALL` steps, and in `NOISY`
also environment 0 with the time limit."""
FALL = 3


def fall(env: Any, steps: dict[int, int]) -> Tensor:
    """End the episodes of some environments after a number of steps."""
    at = [steps.get(index, 10_000) for index in range(env.num_envs)]
    return env.episode_length_buf >= torch.tensor(at)


def draw_all(env: Any, env_ids: Any) -> None:
    """Draw from generators as domain randomization does at construction."""
    env.drawn = float(torch.rand(1)), float(np.random.rand())


@functools.cache
def register_mjlab_tasks() -> None:
    """Register the tasks; skip the test if mjlab is not installed."""
    pytest.importorskip(
        "phasicrl.envs.mjlab", reason="make .peers/mjlab/.ready", exc_type=ImportError
    )
    from mjlab.managers.event_manager import EventTermCfg
    from mjlab.managers.termination_manager import TerminationTermCfg
    from mjlab.tasks.registry import load_env_cfg, load_rl_cfg, register_mjlab_task
    from mjlab.utils.noise import UniformNoiseCfg

    for name in (SHORT, LONG, NOISY, FINITE):
        cfg, rl = (load("Mjlab-Cartpole-Balance") for load in (load_env_cfg, load_rl_cfg))
        if name != LONG:
            cfg.episode_length_s = LIMIT * cfg.sim.mujoco.timestep * cfg.decimation
            falling = {1: FALL} | ({0: LIMIT} if name == NOISY else {})
            cfg.terminations["fell"] = TerminationTermCfg(fall, params={"steps": falling})
        if name == NOISY:
            cfg.events["draw"] = EventTermCfg(draw_all, mode="startup")
            group = cfg.observations["actor"]
            group.enable_corruption = True
            for term in group.terms.values():
                term.noise = UniformNoiseCfg(-0.1, 0.1)
        cfg.is_finite_horizon = name == FINITE
        register_mjlab_task(name, cfg, cfg, rl)
