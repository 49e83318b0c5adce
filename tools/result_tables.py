"""Tables of measured results, made from the files in benchmarks/results.

Pieces of pages that are otherwise written by hand.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import batch_invariance, levels
from phasicrl.cli import parse_config
from phasicrl.envs.procgen import GAMES
from phasicrl.lab.analysis.plot import Curve, Task, reference_curves
from phasicrl.lab.analysis.scores import PROCGEN_BOUNDS, normalized
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.lab.experiments.trials import RETURN
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.bootstrap import bootstrap_interval

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
sys.path.append(str(RESULTS.parent))  # where scripts import each other by name
import scaling  # noqa: E402  # pyright: ignore[reportMissingImports]
import scaling_model  # noqa: E402  # pyright: ignore[reportMissingImports]

RUN_SUITES = (
    "fig2", "fig3", "value-epochs", "fig4", "fig5", "fig6", "fig7", "fig8", "fig9", "skip-aux",
    "n-aux", "details", "ppo-details", "penalties", "rates", "mva", "tricks", "tricks-one-out",
)  # fmt: skip
"""Suites whose small form has been run, on some of their tasks."""
_SWEEPS = "the-ppg-papers-sweeps"
PLACES = {
    "details": "details-of-the-code-source-000",
    "ppo-details": "details-of-ppo-on-which-codes-differ",
    "penalties": "clipping-and-penalties-on-rewards-that-are-not-normalized-source-001",
    "mva": "the-reports-findings-source-004",
    "tricks": "ppo-trick-by-trick-source-003",
    "tricks-one-out": "ppo-without-one-of-its-tricks",
}
"""Headings in docs/experiments.md below which a suite is; of the others: `_SWEEPS`."""
_IN_WORDS = {"invertedpendulum": "InvertedPendulum", "cartpole": "CartPole"}
"""Tasks whose names have capitals inside."""

TASKS = (
    # environment, file, preset without its ending, fields, return below which a run has failed,
    # what others reached
    ("CartPole-v1", "cartpole", "cartpole", "", 475, "Zoo 500 at 100k (one run)"),
    ("Acrobot-v1", "acrobot", "acrobot", "", -100, "CleanRL −86 at 500k, Zoo −73.5 at 1M"),
    ("MountainCar-v0", "mountaincar", "mountaincar", "", -150,
     "Zoo −110 at 1M (one run), CleanRL −200 at 500k"),
    ("LunarLander-v3", "lunarlander", "lunarlander", "", 200, "Zoo 242 at 1M (v2, one run)"),
    ("Pendulum-v1", "pendulum", "pendulum", "", -200, "Zoo −172 at 100k (one run, gSDE)"),
    ("InvertedPendulum-v5", "invertedpendulum", "invertedpendulum", "", 950,
     "source 004: 1000 reached; CleanRL 963 at 1M"),
    ("InvertedDoublePendulum-v5", "inverteddoublependulum", "inverteddoublependulum", "", 9000,
     "Tianshou 9,231 at 1M"),
    ("Reacher-v5", "reacher_100k", "reacher", " --total-env-steps 100_000", -8,
     "source 004: −8.6 at 100k"),
    ("Reacher-v5", "reacher", "reacher", "", -5, "Tianshou −4.1 at 1M"),
    ("Swimmer-v5", "swimmer", "swimmer", "", 100,
     "Zoo 282 at 1M (v3, one run), Spinning Up 120, Tianshou 67"),
    ("HalfCheetah-v5", "halfcheetah", "halfcheetah", "", 3000,
     "Zoo 5,819 (one run), Tianshou 5,784, CleanRL 1,443 at 1M"),
    ("Hopper-v5", "hopper", "hopper", "", 2000, "Tianshou 2,609 at 1M"),
    ("Walker2d-v5", "walker2d", "walker2d", "", 2000, "Tianshou 3,589 at 1M"),
    ("Ant-v5", "ant", "ant", "", 1500, "Tianshou 3,258, Zoo 1,327 (v3, one run) at 1M"),
    ("CartPole-v1 without velocities", "cartpole_masked_velocity", "cartpole-masked-velocity", "",
     475, "contrib's PPO with LSTM 500"),
    ("Pendulum-v1 without velocity", "pendulum_masked_velocity", "pendulum-masked-velocity", "",
     -300, "contrib's PPO with LSTM −218"),
)  # fmt: skip


ZOO_ACROBOT = (
    "--env.id gymnasium:Acrobot-v1 --env.num-envs 16 --ppo.num-steps 256 "
    "--ppo.policy-epochs 4 --ppo.value-epochs 4 --ppo.num-minibatches 64 "
    "--ppo.gae-lambda 0.94 --obs-norm.no-from-first-rollout "
    "--reward-norm.per step --total-env-steps 1_000_000"
)
"""RL-Zoo's settings for Acrobot, where they differ from Stable-Baselines3's defaults."""
COMPATIBLE = (
    # preset with fields, environment, what its own code base published
    ("compat-cleanrl-ppo", "CartPole-v1",
     "490.0 ± 6.1 in training (docs/benchmark/ppo.md, 3 seeds)"),
    ("compat-cleanrl-ppo --env.id gymnasium:Acrobot-v1", "Acrobot-v1",
     "−86.4 ± 1.3 in training (likewise)"),
    ("compat-cleanrl-ppo --env.id gymnasium:MountainCar-v0", "MountainCar-v0",
     "−200 in training (likewise)"),
    ("compat-cleanrl-ppo-continuous --env.id envpool:InvertedPendulum-v4", "InvertedPendulum-v4",
     "963.1 ± 22.2 in training (ppo_continuous_action.md, 3 seeds)"),
    ("compat-cleanrl-ppo-continuous", "HalfCheetah-v4", "1,442.6 ± 46.0 in training (likewise)"),
    ("compat-sb3-ppo", "CartPole-v1", "none with the defaults"),
    (f"compat-sb3-ppo {ZOO_ACROBOT}", "Acrobot-v1, settings of RL-Zoo",
     "−73.5 ± 18.2 greedy (RL-Zoo, one run; the spread is of episodes)"),
    ("compat-spinningup-ppo", "HalfCheetah-v4",
     "about 1,670 (v3, its page's curve, as Tianshou reads it)"),
    ("compat-mva-ppo", "InvertedPendulum-v5", "1,000 reached (source 004, one run)"),
)  # fmt: skip


REACHER = "reacher-ppo --total-env-steps 100_000"
"""What the changes to Reacher's settings start from."""


def blocks() -> dict[str, str]:
    """Every table by the name that its place in a page has."""
    return {
        "baselines": baselines_table(),
        "first-rollouts": first_rollouts_table(),
        "tasks": tasks_table(),
        "quickstart": quickstart_table(),
        "batch-invariance": batch_invariance_table(),
        "suites": suites_table(),
        "two-ppos": two_ppos_table(),
        **{f"suite-{name}": suite_table(name) for name in RUN_SUITES},
        "rungs": rungs_table(),
        "paper-early": paper_early_table(),
        "trading": trading_table(),
        "compatible": compatible_table(),
        "reward-norm": reward_norm_table(),
        "fresh": fresh_table(),
        "faults": faults_table(),
        "reacher-tricks": reacher_tricks_table(),
        "speed": speed_table(),
        "speed-in-short": short_speed_table(),
        "large": large_table(),
        "levels": levels_table(),
        "precision": precision_table(),
        "bench": bench_table(),
        "pieces": pieces_table(),
        "memory": memory_table(),
        "compiled": compiled_table(),
        "contention": contention_table(),
        "scaling": scaling_table(),
        "scaling-model": scaling_model_table(),
        "agreement": agreement_table("float64"),
        "agreement-float32": agreement_table("float32"),
        "agreement-by-design": by_design_table(),
        **{
            f"findings-{name}": findings_table(f"selection/findings_{name}")
            for name in ("reacher", "rewards", "inverted", "pendulum", "mva")
        },
    }


PROCESSES = {
    "procgen-ppo": "Procgen, PPO", "procgen-ppg": "Procgen, PPG",
    "cartpole-ppo": "CartPole, 64 environments", "halfcheetah-ppo": "HalfCheetah",
}  # fmt: skip
"""Runs of benchmarks/scaling.py, and what the page calls them."""


def scaling_table() -> str:
    """Two processes beside one: medians of the rounds, and the ratio of each round."""
    text = _head(
        "run", "steps per second, one process", "two", "ratio (least to most of the rounds)",
        "in messages of gradients", "with waiting",
    )  # fmt: skip
    for run, title in PROCESSES.items():
        one, two = (
            {row["round"]: {name: float(row[name]) for name in
                            ("steps_per_second", "seconds", "exchanges", "message")}
             for row in read("scaling") if (row["run"], row["processes"]) == (run, processes)}
            for processes in "12"
        )  # fmt: skip
        ratios = [two[x]["steps_per_second"] / one[x]["steps_per_second"] for x in one]
        rates = [statistics.median(row["steps_per_second"] for row in rows.values())
                 for rows in (one, two)]  # fmt: skip
        config = parse_config(scaling.RUNS[run].split())
        steps = scaling_model.gradient_steps(config)
        shares = (
            [steps * row["message"] / row["seconds"] for row in two.values()],
            [row["exchanges"] / row["seconds"] for row in two.values()],
        )
        text += _row(
            title, *(f"{rate:,.0f}" for rate in rates),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{statistics.median(share):.1%}" for share in shares),
        )  # fmt: skip
    return text


def scaling_model_table() -> str:
    """Of k times the speed of one process, what the model says k processes reach."""
    sizes = (2, 4, 8, 64, 512)
    text = _head("a rank is", "link", *map(str, sizes))
    speedups: dict[tuple[str, str], dict[int, float]] = {}
    for row in scaling_model.table(RESULTS / "scaling.csv"):
        speedups.setdefault((row["rank"], row["network"]), {})[row["processes"]] = row["speedup"]
    for (rank, network), found in speedups.items():
        text += _row(rank, network, *(f"{found[size] / size:.0%}" for size in sizes))
    return text


def faults_table() -> str:
    """What held of the faults that `make test-faults` injects."""
    text = _head("fault", "what is injected, and what has to hold", "held", "commit")
    for row in read("faults"):
        held = f"{int(row['held']):,} of {int(row['tried']):,}"
        text += _row(row["fault"], row["what"], held, f"`{row['commit']}`")
    return text


def suites_table() -> str:
    """What can be run with `phasicrl suite`."""
    text = _head("suite", "what it compares", "tasks, small", "steps, small")
    for name, suite in SUITES.items():
        steps = f"{suite.small_steps:,}" if suite.small_steps else "of the task"
        text += _row(f"`{name}`", suite.about, ", ".join(suite.small), steps)
    return text


def trading_table() -> str:
    """What masks and a heuristic are worth to the trader of the examples."""
    marks = {5: 12_500, 20: 50_000}  # points of 40 over 100,000 steps
    rows = read("trading")
    text = _head(
        "", *(f"after {steps:,} steps" for steps in marks.values()), "at the end", "greedy"
    )
    for arm in dict.fromkeys(row["arm"] for row in rows):
        runs = [row for row in rows if row["arm"] == arm]
        curves = [row["curve"].split() for row in runs]
        told = [[float(curve[point - 1]) for curve in curves] for point in marks]
        told += [[float(row[name]) for row in runs] for name in ("return_100", "greedy_mean")]
        text += _row(arm, *(_mean_and_span(values) for values in told))
    return text


EARLY = {
    "PPG": "ppg", "PPO": "ppo", "PPG, KL penalty": "ppgkl", "PPG, one network": "ppgsingle",
    "E_π = 3": "e-pi-3", "E_π = 6": "e-pi-6", "E_aux = 1": "e-aux-1", "E_aux = 9": "e-aux-9",
    "N_π = 2": "n-pi-2", "N_π = 8": "n-pi-8",
}  # fmt: skip
"""Of the paper's experiments: what a page calls them, and what its files do."""


def _on_all_games(reference: str, *experiments: str) -> list[Curve]:
    """Published curves of Procgen's games, hard."""
    ends = {Task(f"procgen:{game}", "hard"): 1e9 for game in GAMES}
    return reference_curves(Path(reference), RETURN, ends=ends, experiments=experiments)


def _game(curve: Curve) -> str:
    return curve.env_id.removeprefix("procgen:")


def paper_early_table() -> str:
    """The paper's normalized returns early in training: means over 16 games and their runs."""
    curves = _on_all_games("ppg-paper", *EARLY.values())
    marks = (1, 2, 5, 10, 25, 99)
    text = _head("paper's setting", *(f"{mark}M" for mark in marks))
    for name, experiment in EARLY.items():
        scores = [
            [normalized(float(np.interp(mark * 1e6, curve.steps, run)), bounds) for mark in marks]
            for curve in curves
            if curve.label == experiment
            for bounds in [PROCGEN_BOUNDS["hard"][_game(curve)]]
            for run in curve.runs
        ]
        text += _row(name, *(_number(mean, [1.0]) for mean in np.mean(scores, axis=0)))
    return text


def two_ppos_table() -> str:
    """PPO of the PPG paper and of Baselines after 100M steps on hard levels."""
    found = {
        name: {_game(curve): float(np.interp(1e8, curve.steps, curve.mean)) for curve in curves}
        for name, curves in (
            ("PPO of the PPG paper", _on_all_games("ppg-paper", "ppo")),
            ("PPO of Baselines", _on_all_games("baselines-final", "hard")),
        )
    }
    text = _head("", "normalized mean", *sorted(GAMES))
    for name, returns in found.items():
        scores = [normalized(returns[game], PROCGEN_BOUNDS["hard"][game]) for game in GAMES]
        cells = (f"{returns[game]:.1f}" for game in sorted(GAMES))
        text += _row(name, f"{statistics.fmean(scores):.3f}", *cells)
    return text


def suite_table(name: str) -> str:
    """What a suite's arms reached on each task, over seeds.

    An arrow says that every seed is above, or below, every one of the arm that it is held against:
    the first that the task has, or with rungs the one before it.
    """
    rows = read(f"suites/{name}-small")
    tasks, arms = ([*dict.fromkeys(row[key] for row in rows)] for key in ("task", "arm"))
    text = _head("arm", *(f"{task}: over the run; at its end; greedy" for task in tasks))
    against: dict[str, list[list[float]]] = {}
    for arm in arms:
        cells = []
        for task in tasks:
            runs = [row for row in rows if (row["arm"], row["task"]) == (arm, task)]
            if not runs:  # a trick that the task cannot have
                cells.append("–")
                continue
            told = _returns(runs)
            base = against.setdefault(task, told)
            cells.append("; ".join(_mean_and_span(mine) + _apart(mine, theirs)
                                   for mine, theirs in zip(told, base, strict=True)))  # fmt: skip
            if name == "tricks":
                against[task] = told
        text += _row(arm, *cells)
    return text


def _returns(runs: list[dict[str, str]]) -> list[list[float]]:
    """Of an arm's seeds: over the whole run, at its end, greedily."""
    curves = [np.array(row["curve"].split(), float) for row in runs]
    ends = [[float(row[column]) for row in runs] for column in ("return_100", "greedy_mean")]
    return [[float(np.nanmean(curve)) for curve in curves], *ends]


def _apart(values: list[float], others: list[float]) -> str:
    """An arrow if all values are above, or below, all others."""
    if min(values) > max(others):
        return " ↑"
    return " ↓" if max(values) < min(others) else ""


def _mean_and_span(values: list[float]) -> str:
    """Mean, worst and best, to three digits or whole numbers."""
    shown = [f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}" for x in (
        statistics.fmean(values), min(values), max(values))]  # fmt: skip
    return "{} [{}, {}]".format(*shown).replace("-", "−")


def batch_invariance_table() -> str:
    """The mean return over a run for each size of the batch, with the rules and without."""
    rows = read("batch_invariance")
    sizes = batch_invariance.SIZES
    names = ("batch" if size == 1 else f"batch / {size}" for size in sizes)
    text = _head("task", "settings; mean return over a run [95 %]", *names)
    for task in batch_invariance.TASKS:
        for arm in batch_invariance.ARMS:
            found = batch_invariance.by_size(rows, task, arm)
            cells = ("{:.0f} [{:.0f}, {:.0f}]".format(*found[size]) for size in sizes)
            text += _row(task, arm, *(cell.replace("-", "−") for cell in cells))
    return text


def fresh_table() -> str:
    """The README's commands on bare machines: of each suite, Python and command the last try."""
    with (RESULTS / "fresh.csv").open() as file:
        last = {
            (row["suite"], row["python"].rpartition(".")[0], row["command"]): row
            for row in csv.DictReader(file)
        }
    table = _head(
        "system", "Python", "EnvPool", "PyTorch", "command", "result", "seconds", "commit"
    )
    for row in sorted(
        last.values(), key=lambda row: [int(part) for part in row["python"].split(".")]
    ):
        result = "passed" if row["exit"] == "0" else f"failed ({row['exit']})"
        table += _row(
            row["suite"],
            row["python"],
            row["envpool"],
            row["torch"],
            f"`{row['command']}`",
            result,
            row["seconds"],
            row["commit"],
        )
    return table


FOUND_ON = "1"
"""The seed of the comparison with published runs that was looked at beforehand.

Details of the original were found out with it.
"""


QUANTITIES = {
    "value_loss": ("value loss", "losses/value_loss", 3),
    "approx_kl": ("KL, nats", "losses/approx_kl", 4),
    "clipped_fraction": ("clipped fraction", "losses/clipfrac", 4),
    "entropy": ("entropy, nats", "losses/entropy", 3),
}
"""Columns of the published curves: what the page calls them, our metric, and how many digits."""


def first_rollouts_table(count: int = 6) -> str:
    """Means of the first rollouts: least and most of the published runs, and of ours."""
    folder = RESULTS / "baselines"
    published: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in read("baselines/published"):
        published.setdefault((row["game"], row["run"]), []).append(row)
    text = _head("game", "quantity", "published, three runs", "ours, three seeds")
    for game in ("starpilot", "bigfish"):
        theirs = [rows for (name, _), rows in published.items() if name == game]
        files = sorted(folder.glob(f"{game}_s*/metrics.jsonl"))
        ours = [list(map(json.loads, path.read_text().splitlines())) for path in files]
        for column, (title, metric, digits) in QUANTITIES.items():
            cells = []
            for runs, name in ((theirs, column), (ours, metric)):
                means = [statistics.mean(float(row[name]) for row in run[:count]) for run in runs]
                cells.append(f"{min(means):.{digits}f} to {max(means):.{digits}f}")
            text += _row(game, title, *cells)
    return text


def baselines_table() -> str:
    """Ours window by window among the published runs.

    Then how many of the windows lie within their span and within the 95 % interval for one more.
    """
    rows = list(
        csv.DictReader(
            (RESULTS.parents[1] / "docs" / "figures" / "baselines.csv").read_text().splitlines()
        )
    )
    windows, seeds = (
        list(dict.fromkeys(row["steps"] for row in rows)),
        sorted({row["seed"] for row in rows}, key=int),
    )
    text = _head("game", "quantity", *windows)
    for game, metric in dict.fromkeys((row["env"], row["metric"]) for row in rows):
        cells = []
        for window in windows:
            of_window = [
                row
                for row in rows
                if (row["env"], row["metric"], row["steps"]) == (game, metric, window)
            ]
            shown = [
                (f"**{row['ours']}**" if row["within_min_max"] == "True" else row["ours"])
                + " !" * (row["within_95_prediction"] == "False")
                for row in sorted(of_window, key=lambda row: int(row["seed"]))
            ]
            cells.append(
                f"{', '.join(shown)} "
                f"({of_window[0]['published_min']} to {of_window[0]['published_max']})"
            )
        text += _row(game, metric.rpartition("/")[2].removesuffix("_100").replace("_", " "), *cells)
    text += "\n" + _head(
        "seeds of ours",
        "windows within the span of the published three",
        "within the 95 % interval for one more",
    )
    fresh = [seed for seed in seeds if seed != FOUND_ON]
    for title, some in ((" and ".join(fresh), fresh), (FOUND_ON, [FOUND_ON])):
        of_seeds = [row for row in rows if row["seed"] in some]
        if of_seeds:
            counts = [
                f"{sum(row[name] == 'True' for row in of_seeds)} of {len(of_seeds)}"
                for name in ("within_min_max", "within_95_prediction")
            ]
            text += f"| {title} | {' | '.join(counts)} |\n"
    return text


def tasks_table() -> str:
    """What the presets reach: PPO, PPG and the difference.

    Where no fresh seeds were trained, what the seeds reached on which settings were chosen, marked.
    """
    text = _head("environment", "steps", "PPO", "failed", "PPG", "failed", "PPG − PPO", "others")
    for env, file, preset, fields, least, others in TASKS:
        fresh = read(file)
        for rows, mark in ((fresh, ""), (read(f"selection/{file}") if not fresh else [], " †")):
            found = {
                ending: greedy_means(rows, f"{preset}-{ending}{fields}")
                for ending in ("ppo", "ppg")
            }
            if not any(found.values()):
                continue
            steps = next(int(row["env_steps"]) for row in rows)
            cells = [
                cell
                for values in found.values()
                for cell in (reached(values) + mark * bool(values), failed(values, least))
            ]
            gap = difference(found["ppg"], found["ppo"])
            text += (
                f"| {env} | {steps // 100_000 * 100}k | {' | '.join(cells)} | {gap} | {others} |\n"
            )
    return text.replace("1000k", "1M")


def compatible_table() -> str:
    """What presets named after other code bases reach, beside what these published."""
    rows = read("compat")
    text = _head(
        "preset",
        "environment",
        "steps",
        "seeds",
        "last 100 training episodes",
        "greedy",
        "published",
    )
    for label, env, published in COMPATIBLE:
        mine = [row for row in rows if row["preset"] == label]
        if mine:
            training = reached([float(row["return_100"]) for row in mine])
            greedy = reached(greedy_means(mine, label))
            text += _row(
                f"`{label.split()[0]}`",
                env,
                f"{int(mine[0]['env_steps']):,}",
                len(mine),
                training,
                greedy,
                published,
            )
    return text


def quickstart_table() -> str:
    """What `make train` made: time, where it went, and the return over training."""
    text = _head(
        "seed",
        "commit",
        "minutes",
        "rollouts, policy phases, auxiliary phases",
        "return of 100 training episodes: first, best, last",
    )
    for folder in sorted((RESULTS / "quickstart").glob("*/")):
        card, rows = RunDirectory(folder).card, RunDirectory(folder).metrics()
        parts = [
            sum(
                value
                for row in rows
                for name in names
                if math.isfinite(value := row.get(name, 0.0))
            )
            for names in (("time/rollout",), ("time/policy", "time/value"), ("time/auxiliary",))
        ]
        everything = (row.get("charts/episodic_return_100", math.nan) for row in rows)
        returns = [value for value in everything if math.isfinite(value)]
        shares = ", ".join(f"{part / sum(parts):.0%}" for part in parts)
        text += _row(
            card["seed"],
            card["commit"],
            f"{card['seconds'] / 60:.1f}",
            shares,
            f"{returns[0]:.2f}, {max(returns):.2f}, {returns[-1]:.2f}",
        )
    return text


def reward_norm_table() -> str:
    """PPG on CartPole with and without normalized rewards: greedy, and in training."""
    rows = read("cartpole") or read("selection/cartpole")
    text = _head("rewards", "greedy, mean [95 %]", "last 100 training episodes")
    for title, label in (
        ("normalized (`cartpole-ppg`)", "cartpole-ppg"),
        ("as they are (`--reward-norm.per none`)", "cartpole-ppg --reward-norm.per none"),
    ):
        training = [float(row["return_100"]) for row in rows if row["preset"] == label]
        text += f"| {title} | {reached(greedy_means(rows, label))} | {reached(training)} |\n"
    return text


def failed(values: list[float], least: float) -> str:
    """How many runs ended below a return."""
    limit = f"{least:,}".replace("-", "−")
    return (
        f"{sum(value < least for value in values)} of {len(values)} (below {limit})"
        if values
        else "–"
    )


def trained(preset: str) -> str:
    """What is known of a preset's learning, in one sentence.

    Seeds, result and command of the runs on fresh seeds, or that there are none.
    """
    found = []
    for path in sorted(RESULTS.glob("*.csv")):
        rows = read(path.stem)
        for label in dict.fromkeys(
            row["preset"]
            for row in rows
            if row.get("preset", "").split(" ")[0] == preset and "greedy_mean" in row
        ):
            values = greedy_means(rows, label)
            fields = label.removeprefix(preset).strip()
            steps = next(int(row["env_steps"]) for row in rows if row["preset"] == label)
            words = f'"{preset}:{fields}"' if fields else preset
            with_fields = f" with `{fields}`" if fields else ""
            found.append(
                f"{len(values)} seed{'s' * (len(values) > 1)}{with_fields}, {steps:,} steps: "
                f"greedy {reached(values)} "
                f"(`python benchmarks/learning.py benchmarks/results/{path.name} {words}"
                f"{'' if len(values) == 10 else f' --seeds {len(values)}'}`)"
            )
    for folder in sorted({path.parent.parent for path in RESULTS.glob("*/*/card.json")}):
        of_game: dict[str, list[str]] = {}
        for run in (RunDirectory(path.parent) for path in folder.glob("*/card.json")):
            if run.config.name == preset:
                of_game.setdefault(run.config.env.id, []).append(f"{run.card['seed']}")
        for game, seeds in sorted(of_game.items()):
            found.append(
                f"{game}, seed{'s' * (len(seeds) > 1)} {', '.join(sorted(seeds))} "
                f"(`benchmarks/results/{folder.name}`)"
            )
    if found:
        return f"Trained: {'; '.join(found)}."
    labels = {
        row["preset"]
        for path in (RESULTS / "selection").glob("*.csv")
        for row in read(f"selection/{path.stem}")
    }
    chosen_on = any(label.split(" ")[0] == preset for label in labels)
    return (
        "Trained on selection seeds only (`benchmarks/results/selection`)."
        if chosen_on
        else "Not trained here."
    )


def contention_table() -> str:
    """Medians of steps per second beside other work, with the range of the rounds.

    Beside them their shares of the older code's rate alone.
    """
    rows = [row for row in read("contention") if float(row["seconds"])]
    situations = {
        "alone": "alone",
        "nice 19": "beside a loop of nice 19",
        "equal": "beside a loop of the same priority",
        "session": "beside a loop in a session of its own",
        "two": "two at once, together",
    }
    text = _head("work", "code", *situations.values())
    rates: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        rates.setdefault((row["work"], row["code"], row["situation"]), []).append(
            float(row["steps_per_second"])
        )
    for work, code in dict.fromkeys(
        (row["work"], row["code"])
        for row in sorted(rows, key=lambda row: (row["work"], row["code"] != "before"))
    ):
        whole = statistics.median(rates[work, "before", "alone"])
        cells = [rates.get((work, code, name)) for name in situations]
        shown = [
            f"{statistics.median(cell):,.0f}{spread_of(cell)}: "
            f"{statistics.median(cell) / whole:.0%}"
            if cell
            else "–"
            for cell in cells
        ]
        text += f"| {work} | {code} | {' | '.join(shown)} |\n"
    return text


def spread_of(values: list[float]) -> str:
    """The least and the largest of several."""
    return f" ({min(values):,.0f} to {max(values):,.0f})" if len(values) > 1 else ""


def findings_table(file: str) -> str:
    """What each named setting of a file reached: greedy, and in training."""
    rows = read(file)
    text = _head("setting", "greedy, mean [95 %]", "last 100 training episodes")
    for label in dict.fromkeys(row["preset"] for row in rows):
        name = label.partition("--name ")[2].split()[0]
        training = [float(row["return_100"]) for row in rows if row["preset"] == label]
        text += _row(
            name, reached(greedy_means(rows, label)), _number(float(np.mean(training)), training)
        )
    return text


def reacher_tricks_table() -> str:
    """What Reacher reaches with one thing changed, worst first."""
    base = greedy_means(read("selection/reacher_100k"), REACHER)
    rows = read("selection/reacher_tricks")
    changed = {
        name: greedy_means(rows, name) for name in dict.fromkeys(row["preset"] for row in rows)
    }
    text = _head("changed", "greedy, mean [95 %]", "difference")
    text += f"| nothing | {reached(base)} | |\n" if base else ""
    for name, values in sorted(changed.items(), key=lambda item: float(np.mean(item[1]))):
        text += _row(
            f"`{name.removeprefix(REACHER).strip()}`", reached(values), difference(values, base)
        )
    return text


PEERS = ("CleanRL", "SB3", "PureJaxRL")
SHORT = (
    # title, work, which of ours, which of theirs: on the same environments, but for PureJaxRL's,
    # which are its own
    ("CartPole, 4 environments of EnvPool", "cartpole", "phasicrl", ("SB3, EnvPool",
     "PureJaxRL ppo.py")),
    ("the same of Gymnasium", "cartpole", "phasicrl, Gymnasium", ("CleanRL ppo.py",
     "SB3, Gymnasium")),
    ("CartPole, 64 environments of EnvPool", "cartpole64", "phasicrl", ("SB3, EnvPool",
     "PureJaxRL ppo.py")),
    ("the same, ours with `--compute.compile on`", "cartpole64", "phasicrl, compiled",
     ("SB3, EnvPool", "PureJaxRL ppo.py")),
    ("CartPole, 64 environments of Gymnasium", "cartpole64", "phasicrl, Gymnasium",
     ("CleanRL ppo.py", "SB3, Gymnasium")),
    ("the same, ours with `--compute.compile on`", "cartpole64", "phasicrl, Gymnasium, compiled",
     ("CleanRL ppo.py", "SB3, Gymnasium")),
    ("HalfCheetah, 1 environment of EnvPool", "halfcheetah", "phasicrl, 1 environment",
     ("SB3, 1 environment",)),
    ("the same of Gymnasium", "halfcheetah", "phasicrl, 1 environment, Gymnasium",
     ("CleanRL ppo_continuous_action.py",)),
    ("HalfCheetah, 16 environments of EnvPool", "halfcheetah", "phasicrl, 16 environments",
     ("SB3, 16 environments",)),
    ("Procgen, PPO", "procgen-ppo", "phasicrl, fp32", ("CleanRL ppo_procgen.py",)),
    ("the same, CleanRL given our allocator's setting", "procgen-ppo", "phasicrl, fp32",
     ("CleanRL ppo_procgen.py, memory kept",)),
    ("Procgen, PPO, ours in bf16", "procgen-ppo", "phasicrl, bf16", ("CleanRL ppo_procgen.py",)),
    ("the same, CleanRL given our allocator's setting", "procgen-ppo", "phasicrl, bf16",
     ("CleanRL ppo_procgen.py, memory kept",)),
    ("Procgen, PPG, one network", "procgen-ppg", "phasicrl, one network",
     ("CleanRL ppg_procgen.py",)),
    ("Procgen, PPG, one network, auxiliary phase in bf16", "procgen-ppg-bf16",
     "phasicrl, one network, auxiliary phase bf16", ("CleanRL ppg_procgen.py",)),
    ("Procgen, PPG, one network, both phases in bf16", "procgen-ppg-bf16",
     "phasicrl, one network, both phases bf16", ("CleanRL ppg_procgen.py",)),
    ("Procgen, PPG, two networks (CleanRL's has one)", "procgen-ppg", "phasicrl, two networks",
     ("CleanRL ppg_procgen.py",)),
    ("Procgen, PPG, two networks, auxiliary phase in bf16", "procgen-ppg-bf16",
     "phasicrl, two networks, auxiliary phase bf16", ("CleanRL ppg_procgen.py",)),
    ("Procgen, PPG, two networks, both phases in bf16", "procgen-ppg-bf16",
     "phasicrl, two networks, both phases bf16", ("CleanRL ppg_procgen.py",)),
)  # fmt: skip
"""What the README shows of the works of benchmarks/versus.py."""


def short_speed_table() -> str:
    """Medians of steps per second side by side, with the ratio of ours to theirs."""
    text = (
        f"| steps per second | phasicrl | {' | '.join(PEERS)} |\n|---|---|{'---|' * len(PEERS)}\n"
    )
    for title, work, ours, theirs in SHORT:
        rows = {row["contestant"]: row for row in _summary(work)}
        if ours not in rows:
            continue
        cells = {
            row["contestant"].split()[0].strip(","): row
            for row in rows.values()
            if row["contestant"] in theirs
        }
        others = [
            f"{cells[peer]['rate']:,.0f} ({_times(cells[peer]['ratios'][ours]['ratio'])})"
            if peer in cells
            else "–"
            for peer in PEERS
        ]
        text += f"| {title} | **{rows[ours]['rate']:,.0f}** | {' | '.join(others)} |\n"
    if rows := _summary("cartpole-475"):
        seconds = {
            peer: row["seconds_to_threshold"]
            for row in rows
            for peer in ("phasicrl", *PEERS)
            if row["contestant"].startswith(peer)
        }
        cells = [
            "–" if (value := seconds.get(name)) is None else f"{value:.1f} s"
            for name in ("phasicrl", *PEERS)
        ]
        text += _row(
            "CartPole, from the start of the process to 475, settings of each",
            f"**{cells[0]}**",
            *cells[1:],
        )
    return text


def _times(ratio: float) -> str:
    """A ratio, with two digits behind the point where a tenth would hide who is faster."""
    return f"{ratio:.2f}×" if ratio < 2 else f"{ratio:.1f}×"


def _summary(work: str) -> list[dict[str, Any]]:
    """What a work of benchmarks/versus.py found; nothing if it was not run."""
    path = RESULTS / "versus" / f"{work}.json"
    return json.loads(path.read_text())["summary"] if path.is_file() else []


def precision_table() -> str:
    """What benchmarks/precision.py found.

    By game and precision the last quarter of training, mean over seeds, with the range for the
    return.
    """
    rows = read("selection/precision")
    metrics = (
        "charts/episodic_return_100",
        "losses/entropy",
        "losses/approx_kl",
        "losses/explained_variance",
        "losses/aux/kl_loss",
        "gradients/policy_norm",
    )
    text = _row(
        "game",
        "precision",
        "seeds",
        "return at the end (least to most)",
        "entropy",
        "KL, policy phase",
        "explained variance",
        "KL, auxiliary phase",
        "gradient norm",
    )
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for game, setting in dict.fromkeys((row["game"], row["setting"]) for row in rows):
        runs: dict[str, list[dict[str, str]]] = {}
        for row in rows:
            if (row["game"], row["setting"]) == (game, setting):
                runs.setdefault(row["seed"], []).append(row)
        late = {
            seed: [
                row for row in of_run if int(row["env_steps"]) > 0.75 * int(of_run[-1]["env_steps"])
            ]
            for seed, of_run in runs.items()
        }
        ends = [float(of_run[-1][metrics[0]]) for of_run in runs.values()]
        cells = [f"{np.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"]
        for metric in metrics[1:]:
            means = [
                np.mean([float(row[metric]) for row in of_run if row[metric]])
                for of_run in late.values()
            ]
            cells.append(f"{np.mean(means):.3g}")
        text += f"| {game} | {setting} | {len(runs)} | {' | '.join(cells)} |\n"
    return text


def _way(name: str) -> str:
    """Which of ours, if there are several."""
    return f" ({name.removeprefix('phasicrl, ')})" if name != "phasicrl" else ""


def large_table() -> str:
    """Measurements of benchmarks/large.py: medians."""
    text = _head("what", "seconds", "memory")
    by_what: dict[str, list[dict[str, str]]] = {}
    for row in read("large"):
        by_what.setdefault(row["what"], []).append(row)
    for rows in by_what.values():
        command = rows[0]["command"]
        shown = f"`phasicrl {command}`" if command.startswith("train") else f"`phasicrl` {command}"
        seconds, memory = (
            statistics.median(float(row[name]) for row in rows) for name in ("seconds", "gigabytes")
        )
        text += _row(shown, f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}",
                     f"{memory:.1f} GB")  # fmt: skip
    return text


def levels_table() -> str:
    """Last evaluations of benchmarks/levels.py: means over seeds, and least to most."""
    rows = read("levels")
    last = max((int(row["env_steps"]) for row in rows), default=0)
    text = _head("trained on", "seeds", "return on these", "on all levels", "gap")
    for number in sorted({int(row["levels"]) for row in rows}):
        found = [row for row in rows
                 if (row["levels"], row["env_steps"]) == (str(number), str(last))]  # fmt: skip
        cells = []
        for name in levels.METRICS:
            values = [float(row[name]) for row in found]
            shown = (statistics.mean(values), min(values), max(values))
            mean, low, high = (_number(value, values) for value in shown)
            cells.append(f"{mean} ({low} to {high})")
        text += _row(f"{number} levels", len(found), *cells)
    return text


def speed_table() -> str:
    """Whole training loops side by side: every result file of benchmarks/versus.py."""
    text = _head(
        "work",
        "",
        "steps per second, median (slowest to fastest)",
        "ratio of phasicrl's [95 %, or range if fewer than 5 rounds]",
        "seconds to 475",
    )
    for path in sorted((RESULTS / "versus").glob("*.json")):
        result = json.loads(path.read_text())
        for row in result["summary"]:
            ratios = ", ".join(
                f"{ratio['ratio']:.1f} [{ratio['interval'][0]:.1f}, {ratio['interval'][1]:.1f}]"
                + _way(name)
                for name, ratio in row["ratios"].items()
            )
            seconds = (
                f"{row['seconds_to_threshold']:.1f}"
                if row["seconds_to_threshold"] is not None
                else "–"
            )
            rate = f"{row['rate']:,.0f} ({row['least']:,.0f} to {row['most']:,.0f})"
            text += _row(result["work"], row["contestant"], rate, ratios or "–", seconds)
    return text


PROGRAMS = {
    "openai-ppg": "OpenAI PPG",
    "cleanrl": "CleanRL",
    "sb3": "Stable-Baselines3",
    "spinning-up": "Spinning Up",
    "baselines": "Baselines",
}
"""References of benchmarks/agreement.py."""
AGREEMENT = {
    "rollout: values, log-probabilities, rewards, advantages, targets": (
        "values",
        "log-prob",
        "rewards",
        "advantages",
        "value targets",
    ),
    "loss of every gradient step": ("losses",),
    "weights, by how far they have moved": ("weights after",),
    "Adam's moments": ("Adam's",),
}
"""Columns of its table, with beginnings of the quantities that are in each."""


def agreement_rows(*, by_design: bool) -> list[tuple[str, list[dict[str, Any]]]]:
    """What benchmarks/agreement.py found, by program of theirs.

    Those that are meant to differ, or the others.
    """
    path = RESULTS / "agreement.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if bool(row["by_design"]) == by_design:
            cases.setdefault(f"{PROGRAMS[row['reference']]}: `{row['program']}`", []).append(row)
    return list(cases.items())


def agreement_table(precision: str) -> str:
    """Largest difference between a reference's numbers and ours in one precision, and the noise."""
    text = _head("theirs", "ours", "updates", *AGREEMENT)
    for program, rows in agreement_rows(by_design=False):
        cells = _agreement_cells(rows, precision)
        text += (
            f"| {program} | `{rows[0]['preset']}` | {rows[0]['updates']} | {' | '.join(cells)} |\n"
        )
    return text


def by_design_table() -> str:
    """What differs by design, and by how much, in float64."""
    text = _head("theirs", "why ours differs", *AGREEMENT)
    for program, rows in agreement_rows(by_design=True):
        cells = _agreement_cells(rows, "float64")
        text += f"| {program} | {rows[0]['by_design']} | {' | '.join(cells)} |\n"
    return text


def _agreement_cells(rows: list[dict[str, Any]], precision: str) -> list[str]:
    """A program's cells, one for each column."""
    return [
        _difference_and_noise([row for row in rows if row["quantity"].startswith(names)], precision)
        for names in AGREEMENT.values()
    ]


def _difference_and_noise(rows: list[dict[str, Any]], precision: str) -> str:
    """The largest difference of several quantities, and the noise of that one."""
    if not rows:
        return "–"
    bits = precision.removeprefix("float")
    worst = max(rows, key=lambda row: row[precision])
    return f"{worst[precision]:.0e} ({worst[f'noise{bits}']:.0e})".replace("0e+00", "0")


BENCHES = {
    "procgen-ppo-fp32": "`procgen-ppo`, 16 environments",
    "procgen-ppo-bf16": "the same with `--compute.policy-precision bf16`",
    "procgen-ppg-single": (
        "`procgen-ppg-single`, 16 environments, 128 steps, auxiliary phase in bf16"
    ),
    "cartpole4-on": "`compat-cleanrl-ppo`, CartPole of EnvPool, 4 environments, compiled",
    "cartpole4-off": "the same, eager",
    "cartpole64-on": "the same, 64 environments, compiled",
    "halfcheetah16-on": (
        "`compat-cleanrl-ppo-continuous`, HalfCheetah of EnvPool, 16 environments, compiled"
    ),
    "procgen-ppo-zen3": "`procgen-ppo`, 16 environments, on a Zen 3 without AVX-512",
}
"""Reports of `phasicrl bench` in benchmarks/results/bench."""


def bench_table() -> str:
    """What `phasicrl bench` found on this machine."""
    text = _head(
        "",
        "steps/s (slowest to fastest)",
        "of the bare networks, not as one call",
        "GFLOP/s",
        "where the time goes",
        "memory of the process",
    )
    for name, title in BENCHES.items():
        path = RESULTS / "bench" / f"{name}.json"
        if not path.is_file():
            continue
        report = json.loads(path.read_text())
        rate = next(rate for rate in report["rates"] if rate["name"] == "whole loop")
        split = ", ".join(f"{part} {share:.0%}" for part, share in report["split"].items())
        text += (
            f"| {title} | {rate['per_second']:,.0f} "
            f"({rate['low']:,.0f} to {rate['high']:,.0f}) | {report['share_of_limit']:.0%} "
            f"| {report['gflops_per_step'] * rate['per_second']:,.0f} "
            f"| {split} | {report['peak_memory'] / 1e9:.1f} GB |\n"
        )
    return text


def pieces_table() -> str:
    """Rates of benchmarks/encoder.py by size of the pieces and precision, and bf16's errors."""
    cases = {key: rates for key, rates in _encoder_rates().items() if key[2:] == ("kept", "eager")}
    sizes = sorted({int(size) for size, precision, *_ in cases if precision == "bf16"})
    text = _head(
        "micro-batch",
        "fp32, images/s forward and backward",
        "bf16",
        "error of bf16: features",
        "gradients",
    )
    for size in map(str, sizes):
        cells = [
            _median_and_range(cases[size, precision, "kept", "eager"]["rate"])
            for precision in ("fp32", "bf16")
        ]
        errors = cases[size, "bf16", "kept", "eager"]
        cells += [f"{statistics.median(errors[name]):.1%}" for name in ("features", "gradients")]
        text += f"| {size} | {' | '.join(cells)} |\n"
    return text


def memory_table() -> str:
    """What keeping freed memory does to the rate."""
    cases = _encoder_rates()
    text = _head("micro-batch", "default: images/s", "memory kept", "ratio")
    for size in [size for size, _, memory, _ in cases if memory == "default"]:
        default, kept = (
            cases[size, "fp32", memory, "eager"]["rate"] for memory in ("default", "kept")
        )
        ratio = statistics.median(ours / theirs for ours, theirs in zip(kept, default, strict=True))
        text += (
            f"| {size} | {_median_and_range(default)} | {_median_and_range(kept)} | {ratio:.2f} |\n"
        )
    return text


def compiled_table() -> str:
    """What compiling the network for images does to the rate."""
    cases = _encoder_rates()
    text = _head("micro-batch", "precision", "eager: images/s", "compiled by Inductor", "ratio")
    for size, precision in [key[:2] for key in cases if key[3] == "compiled"]:
        eager, compiled = (
            cases[size, precision, "kept", run]["rate"] for run in ("eager", "compiled")
        )
        ratio = statistics.median(
            ours / theirs for ours, theirs in zip(compiled, eager, strict=True)
        )
        shown = map(_median_and_range, (eager, compiled))
        text += _row(size, precision, *shown, f"{ratio:.2f}")
    return text


def _encoder_rates() -> dict[tuple[str, str, str, str], dict[str, list[float]]]:
    """Measurements of benchmarks/encoder.py by case and name, in the order of the repeats."""
    cases: dict[tuple[str, str, str, str], dict[str, list[float]]] = {}
    for row in read("encoder"):
        names = cases.setdefault((row["size"], row["precision"], row["memory"], row["run"]), {})
        names.setdefault(row["name"], []).append(float(row["value"]))
    return cases


def _median_and_range(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def without(trick: str, task: str) -> str:
    """The greedy return without a trick, and with all of them; nothing for one that stays in."""
    returns: dict[str, list[float]] = {}
    for row in read("suites/tricks-one-out-small"):
        if row["task"] == task:
            returns.setdefault(row["arm"], []).append(float(row["greedy_mean"]))
    means = {arm: f"{np.mean(values):.0f}".replace("-", "−") for arm, values in returns.items()}
    return (
        f"{means[f'without {trick}']} ({means['everything']})"
        if f"without {trick}" in means
        else "–"
    )


def beside(suite: str, arm_without: str, arm_with: str) -> str:
    """The greedy returns of a suite's arm without a trick, and of that with it, on each task."""
    told: list[str] = []
    rows = read(f"suites/{suite}-small")
    for task in dict.fromkeys(row["task"] for row in rows):
        means = [_greedy(rows, task, arm) for arm in (arm_without, arm_with)]
        if all(means):
            told.append(f"{_task(task)} {means[0]} ({means[1]})")
    return f"[{suite}](experiments.md#{PLACES.get(suite, _SWEEPS)}): {', '.join(told) or '–'}"


def _greedy(rows: list[dict[str, str]], task: str, arm: str) -> str:
    """The mean greedy return of an arm of a suite on a task; nothing if there is none."""
    values = [float(row["greedy_mean"]) for row in rows if (row["task"], row["arm"]) == (task, arm)]
    digits = 0 if values and abs(np.mean(values)) >= 20 else 1
    return f"{np.mean(values):,.{digits}f}".replace("-", "−") if values else ""


def _task(task: str) -> str:
    """What a page calls a task of a suite."""
    name = task.rpartition(":")[2].partition("-")[0]
    return _IN_WORDS.get(name, name[0].upper() + name[1:])


def rungs_table() -> str:
    """What each rung of the suite `tricks` reaches greedily, with all those above it."""
    rows = read("suites/tricks-small")
    tasks, arms = ([*dict.fromkeys(row[key] for row in rows)] for key in ("task", "arm"))
    text = _head("rung", *map(_task, tasks))
    for arm in arms:
        text += _row(arm, *(_greedy(rows, task, arm) or "–" for task in tasks))
    return text


def on_reacher(change: str) -> str:
    """What Reacher reaches with a change, and without it; nothing for one that was not measured."""
    values = greedy_means(read("selection/reacher_tricks"), f"{REACHER} {change}")
    base = greedy_means(read("selection/reacher_100k"), REACHER)
    if not values or not base:
        return "–"
    return f"{np.mean(values):.1f} ({np.mean(base):.1f})".replace("-", "−")


def read(name: str) -> list[dict[str, str]]:
    """The rows of a result file, compressed or not; none if it is not there."""
    path = RESULTS / f"{name}.csv"
    packed = path.with_suffix(".csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.is_file() else ""
    return list(csv.DictReader((path.read_text() if path.is_file() else text).splitlines()))


def greedy_means(rows: list[dict[str, str]], label: str) -> list[float]:
    """The greedy return of each seed of one setting."""
    return [float(row["greedy_mean"]) for row in rows if row["preset"] == label]


def reached(values: list[float]) -> str:
    """Mean, interval and worst seed in a cell."""
    if not values:
        return "–"
    if len(values) == 1:
        return _number(values[0], values)
    low, high = bootstrap_interval(values)
    mean, low, high, least = (
        _number(value, values) for value in (float(np.mean(values)), low, high, min(values))
    )
    return (
        f"{mean} [{low}, {high}], least {least}"
        if len(set(values)) > 1
        else f"{mean}, all {len(values)}"
    )


def difference(ours: list[float], theirs: list[float]) -> str:
    """The difference of two means with the 95 % interval of Welch's t, seeds being independent."""
    if len(ours) < 2 or len(theirs) < 2:
        return "–"
    mean = float(np.mean(ours) - np.mean(theirs))
    variances = [float(np.var(values, ddof=1)) / len(values) for values in (ours, theirs)]
    if not sum(variances):
        return f"{mean:.0f}"
    freedom = sum(variances) ** 2 / sum(
        v**2 / (len(values) - 1) for v, values in zip(variances, (ours, theirs), strict=True)
    )
    half = _student(freedom) * math.sqrt(sum(variances))
    return " ".join(
        (_number(mean, ours), f"[{_number(mean - half, ours)}, {_number(mean + half, ours)}]")
    )


def _student(freedom: float) -> float:
    """97.5 % quantile of Student's t."""
    return float(stats.t.ppf(0.975, freedom))


def _number(value: float, scale: list[float]) -> str:
    """With as many digits as the size of the values deserves."""
    digits = 2 if max(map(abs, scale)) < 20 else 1 if max(map(abs, scale)) < 200 else 0
    text = f"{round(value, digits) + 0.0:,.{digits}f}"  # no −0
    return text.replace("-", "−")


def _head(*names: str) -> str:
    """The first two lines of a table."""
    return f"{_row(*names)}|{'---|' * len(names)}\n"


def _row(*cells: object) -> str:
    """One line of a table."""
    return f"|{''.join(f' {cell} |' if cell != '' else ' |' for cell in cells)}\n"
