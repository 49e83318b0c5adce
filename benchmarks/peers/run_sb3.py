"""Train Stable-Baselines3's PPO, and print a mark after each iteration.

usage: run_sb3.py [--marks NUMBER] BACKEND TASK NUM_ENVS STEPS SEED SETTINGS

With `--marks` it stops after so many iterations, whatever the budget.

BACKEND is `gymnasium` (their `make_vec_env`, as their documentation has it) or `envpool` (the same
pool of environments that we step). SETTINGS is JSON: arguments of their PPO; `normalize` asks for
their `VecNormalize`, and `linear` lets the learning rate, and the clip range if it is in the list,
fall to zero. Time limits are bootstrapped, as they always do.
"""

import json
import math
import os
import sys
import time
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

words, most = sys.argv[1:], math.inf
if words[0] == "--marks":
    most, words = int(words[1]), words[2:]
backend, task = words[:2]
num_envs, total, seed = map(int, words[2:5])
settings = json.loads(words[5])
THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
torch.set_num_threads(THREADS)


class Pool(VecEnv):
    """EnvPool as one of their vector environments.

    Ended environments are reset at once, by mask.
    """

    def __init__(self) -> None:
        import envpool

        self.pool: Any = envpool.make_gymnasium(
            task,
            num_envs=num_envs,
            num_threads=1 if "CartPole" in task else min(THREADS, num_envs),
            seed=seed,
        )
        space = self.pool.observation_space
        space = type(space)(
            space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32
        )
        super().__init__(num_envs, space, self.pool.action_space)

    def reset(self) -> np.ndarray:
        return self.pool.reset()[0].astype(np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        obs, reward, terminated, truncated, _ = self.pool.step(self.actions)
        obs, done = obs.astype(np.float32), terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(num_envs)]
        if done.any():
            for env in np.flatnonzero(done):
                infos[env] = {
                    "terminal_observation": obs[env].copy(),
                    "TimeLimit.truncated": bool(truncated[env]),
                }
            obs[done] = self.pool.reset(options={"reset_mask": done})[0].astype(np.float32)
        return obs, reward.astype(np.float32), done, infos

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **options: Any
    ) -> list[Any]:
        return [None] * num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * num_envs


class Mark(BaseCallback):
    """Callback that prints a mark for each iteration."""

    def _on_rollout_start(self) -> None:
        returns = [episode["r"] for episode in self.model.ep_info_buffer or []]
        print(
            f"@ {self.num_timesteps} {time.time()} {np.mean(returns) if returns else float('nan')}",
            flush=True,
        )
        if self.num_timesteps >= most * num_envs * self.model.n_steps:
            sys.exit()

    def _on_step(self) -> bool:
        return True


env: VecEnv = (
    VecMonitor(Pool()) if backend == "envpool" else make_vec_env(task, n_envs=num_envs, seed=seed)
)
if settings.pop("normalize", False):
    env = VecNormalize(env)
for name in settings.pop("linear", []):
    settings[name] = lambda left, start=settings[name]: left * start
model = PPO("MlpPolicy", env, seed=seed, device="cpu", **settings)
model.learn(total, callback=Mark())
print(f"@ {model.num_timesteps} {time.time()} nan", flush=True)
