"""Measure rollouts from a pure simulator by the number of steps in one compiled call.

usage: python benchmarks/steps_per_call.py OUT.csv [--rounds 5]

CartPole as tensors (examples/tensor_cartpole.py) with the networks of `cartpole-ppo`. Each row is
the median time of a step over 20 rollouts of 128 steps, and the time of the first rollout, in which
the call is compiled, without a cache. Settings alternate; nothing else may run.
"""

import csv
import importlib
import statistics
import sys
import tempfile
from pathlib import Path

import torch._inductor.config
import tyro

from phasicrl import get_preset, train
from phasicrl.system.machine import find_commit
from phasicrl.training import fused

NUM_STEPS, NUM_ROLLOUTS = 128, 20


def measure(simulator: type, num_envs: int, size: int, threads: int) -> tuple[float, float]:
    """Return the time of a step in microseconds, and that of the first rollout in seconds."""
    fused.MAX_STEPS_PER_CALL, seconds = size, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        config = get_preset("cartpole-ppo").with_updates({
            "env.id": "tensor-cartpole", "env.num_envs": num_envs, "ppo.num_steps": NUM_STEPS,
            "ppo.policy_epochs": 1, "ppo.value_epochs": 1, "output_dir": folder,
            "total_env_steps": (NUM_ROLLOUTS + 1) * NUM_STEPS * num_envs,
            "compute.compile": "on", "compute.num_threads": threads, "log.console": "off",
        })  # fmt: skip
        train(
            config,
            make_vector_env=simulator,
            callbacks=lambda _, record: seconds.append(record["time/rollout"]),
        )
    return statistics.median(seconds[1:]) / NUM_STEPS * 1e6, seconds[0]


def main(
    out: Path, /, *, rounds: int = 5, sizes: tuple[int, ...] = (1, 2, 4, 8, 16), threads: int = 1,
    num_envs: tuple[int, ...] = (4, 64, 2048),
) -> None:  # fmt: skip
    """Write one row per round and setting."""
    torch._inductor.config.force_disable_caches = True
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    simulator, commit = importlib.import_module("tensor_cartpole").TensorCartPole, find_commit()
    with out.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["round", "num_envs", "steps_per_call", "step_us", "first_s", "commit"])
        for each in range(rounds):
            for number in num_envs:
                for size in sizes:
                    step, seconds = measure(simulator, number, size, threads)
                    rows.writerow([each, number, size, f"{step:.1f}", f"{seconds:.1f}", commit])
                    file.flush()


if __name__ == "__main__":
    tyro.cli(main)
