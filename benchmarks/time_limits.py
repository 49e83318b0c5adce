"""Measure what a value function learns at time limits, on a task whose values are known by hand.

usage: python benchmarks/time_limits.py OUT.csv [--rsl-rl PYTHON] [--seeds 5] [--jobs 1]

A ring of 8 cells: each step goes to the next cell, whatever the action, and the one into cell 0
pays 1. Half of the episodes start in cell 0, the others anywhere; all are cut after 8 steps. The
truth is `V(i) = γ^(7 - i) / (1 - γ^8)`. In the second task, `both`, the step into cell 0 ends the
episode, which in those that started there is also the step of the time limit, so that both flags
are set: `V(i) = γ^(7 - i)`.

PYTHON is one that has rsl_rl and phasicrl, such as that of `make .peers/mjlab/.ready`. Each run is
a process of its own, and one that the file has is not repeated.
"""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from gymnasium.spaces import Box, Dict
from torch import Tensor

from phasicrl import Config, train
from phasicrl.lab.analysis.scores import MEASURES, estimate
from phasicrl.lab.experiments import trials
from phasicrl.system.machine import find_commit

CELLS = 8
GAMMA, LAMBDA, NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES, WIDTH = 0.9, 0.95, 16, 32, 5, 4, 32
LEARNING_RATE = 1e-3
CONFIG = Config(name="ring", total_env_steps=51_200).with_updates({
    "env.id": "ring", "env.num_envs": NUM_ENVS, "model.encoder": "mlp",
    "model.hidden_sizes": (WIDTH,), "model.activation": "tanh", "model.value_path": "separate",
    "ppo.num_steps": NUM_STEPS, "ppo.gamma": GAMMA, "ppo.gae_lambda": LAMBDA,
    "ppo.policy_epochs": EPOCHS, "ppo.value_epochs": EPOCHS, "ppo.num_minibatches": MINIBATCHES,
    "ppo.minibatch_by": "transitions", "ppo.entropy_coef": 0, "ppo.max_grad_norm": 1,
    "ppo.learning_rate": LEARNING_RATE, "ppo.value_coef": 2, "reward_norm.per": "none",
    "compute.device": "cpu", "compute.compile": "off", "compute.num_threads": 1,
    "log.console": "off", "log.tensorboard": False, "checkpoint.every_minutes": None,
})  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "final observation": {},
    "no final observation": {},
    "ppo.truncation_value rsl_rl": {"ppo.truncation_value": "rsl_rl"},
    "ppo.no-bootstrap-truncation": {"ppo.bootstrap_truncation": False},
    "rsl_rl": {},
}
COLUMNS = "task", "arm", "seed", "error", "bias", "left_out", "values", "env_steps", "commit"
Groups = dict[str, Tensor]


class Ring:
    """Environments on the ring, as a `Simulator` that never resets in its steps."""

    device = "cpu"
    single_observation_space = Dict({"policy": Box(0, 1, (CELLS,), np.float32)})
    single_action_space = Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, num_envs: int, *, ends: bool, seed: int) -> None:
        self.num_envs, self._ends = num_envs, ends
        self._random = torch.Generator().manual_seed(seed)
        self._cell, self._time = torch.zeros(2, num_envs, dtype=torch.int64)
        self.reset_rows(torch.ones(num_envs, dtype=torch.bool))

    def reset(self, *, seed: int | None = None) -> tuple[Groups, dict[str, Any]]:
        return self.reset_rows(torch.ones(self.num_envs, dtype=torch.bool))

    def step(self, action: Tensor) -> tuple[Groups, Tensor, Tensor, Tensor, dict[str, Any]]:
        self._cell, self._time = (self._cell + 1) % CELLS, self._time + 1
        paid, truncated = self._cell == 0, self._time == CELLS
        return self.observe(), paid.float(), paid & self._ends, truncated, {}

    def reset_rows(self, ended: Tensor) -> tuple[Groups, dict[str, Any]]:
        start = torch.randint(2 * CELLS, (self.num_envs,), generator=self._random)
        start[start >= CELLS] = 0
        self._cell, self._time = start.where(ended, self._cell), self._time * ~ended
        return self.observe(), {}

    def observe(self) -> Groups:
        return {"policy": torch.eye(CELLS)[self._cell]}


class VecRing:
    """`Ring` with rsl_rl's interface: reset in the step, final observation lost."""

    device, num_actions, max_episode_length, cfg = "cpu", 1, CELLS, None

    def __init__(self, ring: Ring, pack: Callable[[Groups], Any] = dict) -> None:
        self._ring, self._pack, self.num_envs = ring, pack, ring.num_envs
        self.episode_length_buf = torch.zeros(ring.num_envs, dtype=torch.int64)

    def get_observations(self) -> Any:
        return self._pack(self._ring.observe())

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
        _, reward, terminated, truncated, _ = self._ring.step(actions)
        ended = terminated | truncated
        self._ring.reset_rows(ended)
        return self.get_observations(), reward, ended.long(), {"time_outs": truncated}


def true_values(task: str) -> np.ndarray:
    """Return V of each cell."""
    once = GAMMA ** np.arange(CELLS - 1, -1, -1)
    return once if task == "both" else once / (1 - GAMMA**CELLS)


def train_ours(task: str, arm: str, config: Config) -> tuple[list[float], float]:
    """Return V of each cell after training, and the fraction of steps that were left out."""

    def make_vector_env(num_envs: int) -> Ring | VecRing:
        ring = Ring(num_envs, ends=task == "both", seed=config.seed)
        return VecRing(ring) if arm == "no final observation" else ring

    run = train(config, make_vector_env=make_vector_env)
    cells = {"policy": np.eye(CELLS, dtype=np.float32)}
    obs = torch.from_numpy(run.agent.reader.layout.pack(cells, CELLS))[:, None]
    first = torch.ones(CELLS, 1, dtype=torch.bool)
    with torch.no_grad():
        values = run.agent.value(obs, first, run.agent.initial_state(CELLS)).flatten().tolist()
    learned = [row.get("charts/learned_fraction", 1.0) for row in run.files.metrics()]
    return values, 1 - float(np.mean(learned))


def train_rsl_rl(task: str, seed: int, iterations: int) -> list[float]:
    """Return V of each cell after rsl_rl's own training, in the Python that has it."""
    from rsl_rl.runners import OnPolicyRunner  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    def pack(groups: Groups) -> TensorDict:
        return TensorDict(groups, batch_size=[len(groups["policy"])])

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network = {"class_name": "MLPModel", "hidden_dims": [WIDTH], "activation": "tanh"}
    normal = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "scalar"}
    settings = {
        "num_steps_per_env": NUM_STEPS, "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": normal}, "critic": network,
        "algorithm": {
            "class_name": "PPO", "num_learning_epochs": EPOCHS, "num_mini_batches": MINIBATCHES,
            "clip_param": 0.2, "gamma": GAMMA, "lam": LAMBDA, "value_loss_coef": 1.0,
            "entropy_coef": 0.0, "learning_rate": LEARNING_RATE, "max_grad_norm": 1.0,
            "use_clipped_value_loss": False, "schedule": "fixed", "rnd_cfg": None,
        },
    }  # fmt: skip
    ring = Ring(NUM_ENVS, ends=task == "both", seed=seed)
    runner = OnPolicyRunner(VecRing(ring, pack), settings, log_dir=None, device="cpu")
    runner.learn(iterations)
    with torch.no_grad():
        return runner.alg.critic(pack({"policy": torch.eye(CELLS)})).flatten().tolist()


def measure(trial: trials.Trial, *, rsl_rl: str | None) -> list[trials.Row]:
    """Train, and compare the values with the truth; returns one row."""
    (task, arm), config, left_out = trial.label_parts, trial.config, 0.0
    if arm == "rsl_rl":
        call = f"train_rsl_rl({task!r}, {config.seed}, {config.num_iterations})"
        code = f"import time_limits as t, json; print(json.dumps(t.{call}))"
        command = [str(Path(str(rsl_rl)).absolute()), "-c", code]
        out = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=True)
        values = json.loads(out.stdout.splitlines()[-1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            changes = ARMS[arm] | {"output_dir": folder}
            values, left_out = train_ours(task, arm, config.with_updates(changes))
    difference = np.array(values) - true_values(task)
    return [{
        "task": task, "arm": arm, "seed": config.seed, "env_steps": config.total_env_steps,
        "error": f"{np.abs(difference).mean():.4f}", "bias": f"{difference.mean():.4f}",
        "left_out": f"{left_out:.4f}", "values": " ".join(f"{value:.3f}" for value in values),
        "commit": find_commit() or "unknown",
    }]  # fmt: skip


def main(output: Path, /, rsl_rl: str | None = None, seeds: int = 5, jobs: int = 1) -> None:
    """Train every arm on both tasks with every seed, and print means with 95 % intervals."""
    table = trials.ResultTable(output, COLUMNS, label_columns=("task", "arm"))
    arms = [(task, arm) for task in ("limit", "both") for arm in ARMS if arm != "rsl_rl" or rsl_rl]
    numbers = range(trials.FIRST_REPORT_SEED, trials.FIRST_REPORT_SEED + seeds)
    wanted = [trial for label in arms for trial in trials.vary_seed(label, CONFIG, numbers)]
    run_trial = functools.partial(measure, rsl_rl=rsl_rl)
    for trial in trials.run_missing_trials(table, wanted, run_trial, jobs):
        print(*trial.key, flush=True)
    print("| task | trained by | mean error | bias | steps left out |\n|---|---|---|---|---|")
    for label in arms:
        rows = table.read_rows_of(trials.vary_seed(label, CONFIG, numbers))
        columns = [[float(row[name]) for row in rows] for name in ("error", "bias", "left_out")]
        error, bias = (estimate(np.array(x)[:, None], MEASURES["mean"]) for x in columns[:2])
        print(f"| {' | '.join(label)} | {error} | {bias} | {np.mean(columns[2]):.1%} |")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
