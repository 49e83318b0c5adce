"""The ladder: what each trick of PPO is worth, by adding them one by one, or taking one away.

Kind: effects (trains).

The rungs are those of the PPO-tricks document (source S122), from REINFORCE up. Every rung is a
configuration that differs from the one below in the fields named here; nothing else about the runs
differs.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from phasicrl.algorithm import train
from phasicrl.analysis.statistics import bootstrap_interval
from phasicrl.config import NEEDS, Config, ObsNormConfig, Task, ValueNormConfig, refuse_idle
from phasicrl.envs.make import make_envs
from phasicrl.experiments.evaluate import evaluate
from phasicrl.experiments.trials import Trial, measure_once, over_seeds, run_trials
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import make_agent, task_of

Mode = Literal["ladder", "leave-one-out"]


@dataclass(frozen=True, slots=True)
class Trick:
    """One rung: the fields that switch it on, and those without it.

    Attributes:
        name: what the rung adds.
        on: fields by path with their values from this rung upwards.
        off: the same fields on the rungs below.
    """

    name: str
    on: dict[str, Any]
    off: dict[str, Any]


TRICKS = (
    Trick(
        "baseline",
        {"ppo.baseline": True},
        {"ppo.baseline": False, "ppo.estimator": "monte_carlo", "value_norm": None},
    ),
    Trick(
        "clipping",
        {
            "ppo.objective": "surrogate",
            "ppo.clip": 0.2,
            "ppo.policy_epochs": 8,
            "ppo.value_epochs": 8,
            "ppo.num_minibatches": 8,
        },
        {
            "ppo.objective": "log_prob",
            "ppo.clip": None,
            "ppo.policy_epochs": 1,
            "ppo.value_epochs": 1,
            "ppo.num_minibatches": 1,
        },
    ),
    Trick(
        "TD(λ)", {"ppo.estimator": "gae", "ppo.gae_lambda": 0.95}, {"ppo.estimator": "monte_carlo"}
    ),
    Trick(
        "initialization",
        {"model.init": "orthogonal", "model.head_init": "orthogonal"},
        {"model.init": "torch", "model.head_init": "torch"},
    ),
    Trick(
        "advantage normalization",
        {"ppo.advantage_norm": "minibatch"},
        {"ppo.advantage_norm": "none"},
    ),
    Trick("state normalization", {"obs_norm": ObsNormConfig(statistics="ema")}, {"obs_norm": None}),
    Trick(
        "return normalization",
        {"value_norm": ValueNormConfig(statistics="ema")},
        {"value_norm": None},
    ),
    Trick("gradient clipping", {"ppo.max_grad_norm": 0.5}, {"ppo.max_grad_norm": None}),
    Trick("entropy bonus", {"ppo.entropy_coef": 0.01}, {"ppo.entropy_coef": 0.0}),
    Trick("action masking", {"env.action_masks": True}, {"env.action_masks": False}),
)
"""In the order of the document. Return normalization is that of value targets, as there.

Rewards are never normalized here.
"""


@dataclass(frozen=True, slots=True)
class Rung:
    """What the runs of one configuration reached.

    Attributes:
        name: of the rung.
        greedy: mean return of the greedy policy at the end, one number per seed.
        last_100: mean return of the last 100 training episodes, one number per seed.
    """

    name: str
    greedy: tuple[float, ...]
    last_100: tuple[float, ...]

    def row(self) -> dict[str, Any]:
        """Numbers for a table."""
        low, high = bootstrap_interval(self.greedy)
        return {
            "rung": self.name,
            "seeds": len(self.greedy),
            "greedy_mean": float(np.mean(self.greedy)),
            "interval_low": low,
            "interval_high": high,
            "greedy_min": min(self.greedy),
            "last_100_mean": float(np.mean(self.last_100)),
        }


def missing(trick: Trick, task: Task) -> str | None:
    """What a trick needs and a task does not have, in words; None where it applies.

    That may be numbers to normalize, or action masks.
    """
    for need in NEEDS:
        concerns = need.task is not None and not trick.on.keys().isdisjoint(need.paths.split())
        if concerns and not need.is_met(None, task):
            return need.words
    return None


def rungs(base: Config, *, mode: Mode = "ladder", task: Task) -> list[tuple[str, Config]]:
    """The configurations to train, by name.

    Knobs that have no effect on a rung are at their defaults there.

    Args:
        base: everything that the tricks leave open: environment, network sizes, budget, learning
            rate.
        mode: tricks added one by one from REINFORCE, or all of them and then all but one.
        task: what is known of the environment; tricks that do not apply to it are left out.
    """
    tricks = [trick for trick in TRICKS if missing(trick, task) is None]
    all_on: dict[str, Any] = {"aux": None}
    all_off = dict(all_on)
    for trick in tricks:
        all_on |= trick.on
    for trick in reversed(tricks):  # where two name one field, the lower rung decides
        all_off |= trick.off
    if mode == "leave-one-out":
        changes = [(f"without {trick.name}", all_on | trick.off) for trick in tricks]
        changes.insert(0, ("everything", all_on))
    else:
        changes = [("REINFORCE", all_off)]
        for trick in tricks:
            changes.append((f"+ {trick.name}", changes[-1][1] | trick.on))
    return [(name, base.changed(fields, reset_idle=True)) for name, fields in changes]


def run_ladder(
    env: str = "CartPole-v1",
    *,
    seeds: int = 5,
    leave_one_out: bool = False,
    total_env_steps: int | None = None,
    jobs: int = 1,
    output_dir: Path = Path("runs/ladder"),
    on_run: Callable[[str, int, float], None] = lambda name, seed, reached: None,
    say: Callable[[str], None] = lambda sentence: None,
) -> list[Rung]:
    """Train PPO trick by trick, from REINFORCE up, with several seeds each.

    All rungs are checked before the first is trained.

    Args:
        env: Id of the environment; its observations must not be images.
        seeds: Runs for each rung, with the seeds from 1 on.
        leave_one_out: The other way round: all tricks, and then all but one.
        total_env_steps: Budget of each run; none: 100,000.
        jobs: Runs at a time, each on one thread.
        output_dir: Gets the runs, the table as CSV and the figure; runs that are there already are
            not repeated.
        on_run: told of every run: rung, seed, mean greedy return.
        say: told which tricks are left out, and why.

    Raises:
        ValueError: fewer than one seed or job, or an environment on which some rung cannot be
            trained; nothing was trained.
    """
    if min(seeds, jobs) < 1:
        raise ValueError(f"seeds is {seeds} and jobs is {jobs}; give at least 1 of each")
    changes = {"env.id": env, "reward_norm": None, "checkpoint.every_minutes": None}
    if total_env_steps is not None:
        changes["total_env_steps"] = total_env_steps
    base = get_preset("classic-ppo").changed({**changes, "log.console": "off"})
    mode: Mode = "leave-one-out" if leave_one_out else "ladder"
    steps = _checked_rungs(base, mode, say)
    trials: list[Trial] = []
    for index, (name, config) in enumerate(steps):
        named = config.changed({"name": f"{mode}-{index:02d}", "output_dir": str(output_dir)})
        trials += over_seeds((name,), named, range(1, seeds + 1))
    reached: dict[tuple[str, ...], tuple[float, float]] = {}
    for trial, result in run_trials(trials, _trained, jobs=jobs):
        reached[trial.key] = result
        on_run(trial.label[0], trial.config.seed, result[0])
    found = []
    for name, _ in steps:
        results = [reached[trial.key] for trial in trials if trial.label == (name,)]
        found.append(Rung(name, *zip(*results, strict=True)))
    with (output_dir / f"{mode}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0].row()))
        writer.writeheader()
        writer.writerows(rung.row() for rung in found)
    return found


def draw_ladder(found: Sequence[Rung], path: Path, *, title: str) -> None:
    """Draw every rung's seeds, mean and 95 % interval, the first at the top.

    The name's ending says whether it is drawn as SVG or PNG.

    Raises:
        ImportError: matplotlib is not installed; the message names the extra.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        way = "pip install 'phasicrl[plot]'"
        raise ImportError(f"the figure needs matplotlib ({error}); {way}") from error
    figure = Figure(figsize=(7.5, 0.45 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    interval = {"linewidth": 4, "solid_capstyle": "butt", "alpha": 0.5}
    for height, rung in enumerate(found):
        row, heights = rung.row(), [height] * len(rung.greedy)
        axes.plot(rung.greedy, heights, "o", color="0.65", markersize=4, zorder=2)
        ends = [row["interval_low"], row["interval_high"]]
        axes.plot(ends, [height] * 2, color="tab:blue", **interval)
        axes.plot(row["greedy_mean"], height, "D", color="tab:blue", markersize=6, zorder=3)
    axes.set_yticks(range(len(found)), [rung.name for rung in found])
    axes.invert_yaxis()
    axes.set_xlabel("mean return of the greedy policy after training")
    legend = "(gray: seeds; blue: mean and its 95 % interval)"
    axes.set_title(f"{title} {legend}", fontsize="medium", loc="right")
    axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _checked_rungs(
    base: Config, mode: Mode, say: Callable[[str], None]
) -> list[tuple[str, Config]]:
    """The rungs for the environment of `base`, each of which can be trained there."""
    envs = make_envs(base.env, num_envs=1, seed=0)
    with closing(envs):
        task = dataclasses.replace(task_of(envs), has_masks=envs.mask_size > 0)
        for trick in TRICKS:
            if (words := missing(trick, task)) is not None:
                say(f"{trick.name} is left out: it has no effect without {words}")
        steps = rungs(base, mode=mode, task=task)
        for name, config in steps:
            try:
                refuse_idle(config, task)
                make_agent(config, envs)
            except ValueError as error:
                raise ValueError(f"the rung {name!r} cannot be trained: {error}") from None
    return steps


def _trained(trial: Trial) -> tuple[float, float]:
    """Greedy and last training return of a run, which is trained unless it is there already."""
    row = measure_once(trial.config, _train_and_evaluate)
    return row["greedy"], row["last_100"]


def _train_and_evaluate(config: Config) -> tuple[Path, dict[str, float]]:
    """Train a run; returns its directory and what it reached."""
    directory = train(config).directory
    metric = "charts/episodic_return_100"
    returns = [row.get(metric) for row in RunDirectory(directory).metrics(metric)]
    greedy = evaluate(directory, episodes=20, policies=("greedy",))[0].mean_return
    last = next((value for value in reversed(returns) if value is not None), float("nan"))
    return directory, {"greedy": greedy, "last_100": last}
