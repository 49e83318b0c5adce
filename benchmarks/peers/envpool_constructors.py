"""EnvPool behind `procgen.ProcgenEnv` (gym 0.23's vector interface).

CleanRL's scripts call that, so that both trainers step the same environments.
Finished ones are reset at once, by mask, as the original does.
"""

import os
import runpy
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

ROOT = Path(__file__).parents[2]
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))


def install() -> None:
    """Replace the constructors."""
    module: Any = types.ModuleType("procgen")
    module.ProcgenEnv = procgen_env
    sys.modules["procgen"] = module


def procgen_env(
    *, num_envs: int, env_name: str, num_levels: int, start_level: int, distribution_mode: str
) -> Any:
    """Make the environment that `procgen.ProcgenEnv` would.

    Observations `{"rgb": [B, 64, 64, 3]}`, four answers to a step, a list of infos.
    """
    import gym

    # Before EnvPool is imported; the file depends on nothing.
    libraries = runpy.run_path(str(ROOT / "src" / "phasicrl" / "envs" / "native.py"))
    libraries["load_envpool_libraries"]()
    libraries["load_qt"]()
    import envpool

    pool = envpool.make_gymnasium(
        f"{env_name.capitalize()}{distribution_mode.capitalize()}-v0", num_envs=num_envs,
        num_threads=THREADS, seed=0, num_levels=num_levels,
        start_level=start_level, channel_first=False,
    )  # fmt: skip

    class ProcgenEnv(gym.Env):
        observation_space = gym.spaces.Dict({"rgb": gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)})
        action_space = gym.spaces.Discrete(15)
        metadata: ClassVar[dict[str, Any]] = {"render.modes": []}
        num_envs: int

        def reset(self) -> dict[str, np.ndarray]:
            return {"rgb": pool.reset()[0]}

        def step(
            self, action: np.ndarray
        ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, list[dict[str, Any]]]:
            obs, reward, terminated, truncated, _ = pool.step(action.astype(np.int32))
            done = terminated | truncated
            if done.any():
                obs[done], _ = pool.reset(options={"reset_mask": done})
            return {"rgb": obs}, reward, done, [{} for _ in done]

    env = ProcgenEnv()
    env.num_envs = num_envs
    return env
