"""Compare returns and speed on mjlab's cartpole with rsl_rl's own PPO, over seeds.

usage: .peers/mjlab/bin/python benchmarks/mjlab_cartpole.py OUT.csv [--seeds 10] [--iterations 60]
for example: .peers/mjlab/bin/python benchmarks/mjlab_cartpole.py benchmarks/results/mjlab.csv

Both train on `Mjlab-Cartpole-Balance` with 1,024 environments on the CPU and the settings that
mjlab gives rsl_rl for it, but that ours trains the logarithm of the deviation. All episodes start
in the first step, and end at the limit of 1,000 steps only. A row is the mean reward of a step over
an iteration of 32 steps, and the iteration's time, without a display and files. Trainers alternate,
and a run that the file has is not repeated.
"""

import contextlib
import dataclasses
import io
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro

from phasicrl import Config, train
from phasicrl.lab.experiments import trials
from phasicrl.system.machine import find_commit, num_cores

TASK, NUM_ENVS, NUM_STEPS = "Mjlab-Cartpole-Balance", 1024, 32
COLUMNS = ("trainer", "seed", "env_steps", "reward", "seconds", "commit")
CONFIG = Config(name="mjlab-cartpole").with_updates({
    "env.id": f"mjlab:{TASK}", "env.num_envs": NUM_ENVS, "model.encoder": "mlp",
    "model.hidden_sizes": (64, 64), "model.activation": "elu", "model.init": "torch",
    "model.head_init": "torch", "model.value_path": "separate",
    "model.policy_obs": ("actor",), "model.value_obs": ("critic",),
    "ppo.num_steps": NUM_STEPS, "ppo.gamma": 0.99, "ppo.gae_lambda": 0.95, "ppo.policy_epochs": 5,
    "ppo.value_epochs": 5, "ppo.num_minibatches": 4, "ppo.minibatch_by": "transitions",
    "ppo.learning_rate": 1e-3, "ppo.schedule": "adaptive_kl", "ppo.schedule_kl": 0.01,
    "ppo.entropy_coef": 0.01, "ppo.value_coef": 2.0, "ppo.value_clip": 0.2,
    "ppo.max_grad_norm": 1.0, "ppo.advantage_norm": "batch", "ppo.advantage_std": "unbiased",
    "reward_norm.per": "none", "compute.device": "cpu", "compute.compile": "on",
    "log.console": "off", "log.tensorboard": False, "checkpoint.every_minutes": None,
})  # fmt: skip
Points = list[tuple[float, float]]
"""Mean reward of a step and time, by iteration."""


def train_ours(config: Config) -> Points:
    """Train with phasicrl."""
    points: Points = []

    def note(run: Any, record: dict[str, float]) -> None:
        points.append((float(run.buffer.rollouts.reward.mean()), time.perf_counter()))

    train(config, callbacks=note)
    return points


def train_rsl_rl(config: Config) -> Points:
    """Train with rsl_rl, by mjlab's own runner and settings."""
    from mjlab.envs import ManagerBasedRlEnv  # pyright: ignore[reportMissingImports]
    from mjlab.rl import (  # pyright: ignore[reportMissingImports]
        MjlabOnPolicyRunner,
        RslRlVecEnvWrapper,
    )
    from mjlab.tasks import registry  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(num_cores())
    env_config, settings = registry.load_env_cfg(TASK), registry.load_rl_cfg(TASK)
    env_config.scene.num_envs, env_config.seed = NUM_ENVS, config.seed
    envs = RslRlVecEnvWrapper(ManagerBasedRlEnv(env_config, device="cpu"))
    runner = MjlabOnPolicyRunner(envs, dataclasses.asdict(settings), None, "cpu")
    step, update, rewards, points = envs.step, runner.alg.update, list[float](), list[Any]()

    def noted_step(action: torch.Tensor) -> Any:
        result = step(action)
        rewards.append(float(result[1].mean()))
        return result

    def noted_update() -> Any:
        result = update()
        points.append((sum(rewards[-NUM_STEPS:]) / NUM_STEPS, time.perf_counter()))
        return result

    envs.step, runner.alg.update = noted_step, noted_update
    runner.learn(config.num_iterations)
    return points


def train_once(trial: trials.Trial) -> list[trials.Row]:
    """Train, and return a row for each iteration."""
    ours = trial.label_parts[0] == "phasicrl"
    with contextlib.redirect_stdout(io.StringIO()):
        points = (train_ours if ours else train_rsl_rl)(trial.config)
    times, commit = [point[1] for point in points], find_commit() or "unknown"
    seconds = [float("nan"), *(b - a for a, b in pairwise(times))]
    return [
        dict(zip(COLUMNS, (*trial.key, number * NUM_ENVS * NUM_STEPS, f"{reward:.5f}",
                           f"{second:.3f}", commit), strict=True))
        for number, ((reward, _), second) in enumerate(zip(points, seconds, strict=True), 1)
    ]  # fmt: skip


def main(out: Path, /, seeds: int = 10, iterations: int = 60) -> None:
    """Train what the file lacks."""
    table = trials.ResultTable(out, COLUMNS, label_columns=("trainer",))
    config = CONFIG.with_updates({"total_env_steps": iterations * NUM_ENVS * NUM_STEPS})
    numbers = range(trials.FIRST_REPORT_SEED, trials.FIRST_REPORT_SEED + seeds)
    for seed in numbers:
        for trainer in ("phasicrl", "rsl_rl"):
            wanted = trials.vary_seed((trainer,), config, [seed])
            for trial in trials.run_missing_trials(table, wanted, train_once, 1):
                print(*trial.key, flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
