"""Write the tables of measured results on the pages from the files in benchmarks/results."""

import gzip
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import batch_invariance, scaling
from benchmarks.compare_reference import windows
from phasicrl.cli import parse_config
from phasicrl.envs.envpool import PROCGEN_GAMES
from phasicrl.lab.analysis.curves import Curve, Task, read_curves
from phasicrl.lab.analysis.references import read_reference_curves
from phasicrl.lab.analysis.scores import PROCGEN_BOUNDS, scale_score
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.lab.experiments.trials import RETURN, ResultTable
from phasicrl.presets import PRESETS
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.bootstrap import bootstrap_mean_interval

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Row = dict[str, str]
Cells = Iterable[Sequence[object]]

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
    # environment, file, what others reached
    ("CartPole-v1", "cartpole", "Zoo 500 at 100k (one run)"),
    ("Acrobot-v1", "acrobot", "CleanRL −86 at 500k, Zoo −73.5 at 1M"),
    ("MountainCar-v0", "mountaincar", "Zoo −110 at 1M (one run), CleanRL −200 at 500k"),
    ("LunarLander-v3", "lunarlander", "Zoo 242 at 1M (v2, one run)"),
    ("Pendulum-v1", "pendulum", "Zoo −172 at 100k (one run, gSDE)"),
    ("InvertedPendulum-v5", "invertedpendulum", "source 004: 1000 reached; CleanRL 963 at 1M"),
    ("InvertedDoublePendulum-v5", "inverteddoublependulum", "Tianshou 9,231 at 1M"),
    ("Reacher-v5", "reacher_100k", "source 004: −8.6 at 100k"),
    ("Reacher-v5", "reacher", "Tianshou −4.1 at 1M"),
    ("Swimmer-v5", "swimmer", "Zoo 282 at 1M (v3, one run), Spinning Up 120, Tianshou 67"),
    ("HalfCheetah-v5", "halfcheetah",
     "Zoo 5,819 (one run), Tianshou 5,784, CleanRL 1,443 at 1M"),
    ("Hopper-v5", "hopper", "Tianshou 2,609 at 1M"),
    ("Walker2d-v5", "walker2d", "Tianshou 3,589 at 1M"),
    ("Ant-v5", "ant", "Tianshou 3,258, Zoo 1,327 (v3, one run) at 1M"),
    ("CartPole-v1 without velocities", "cartpole_masked_velocity", "contrib's PPO with LSTM 500"),
    ("Pendulum-v1 without velocity", "pendulum_masked_velocity", "contrib's PPO with LSTM −218"),
)  # fmt: skip


COMPATIBLE = (
    # preset, environment, what its own code base published
    ("compat-cleanrl-ppo", "CartPole-v1",
     "490.0 ± 6.1 in training (docs/benchmark/ppo.md, 3 seeds)"),
    ("compat-cleanrl-ppo", "Acrobot-v1", "−86.4 ± 1.3 in training (likewise)"),
    ("compat-cleanrl-ppo", "MountainCar-v0", "−200 in training (likewise)"),
    ("compat-cleanrl-ppo-continuous", "InvertedPendulum-v4",
     "963.1 ± 22.2 in training (ppo_continuous_action.md, 3 seeds)"),
    ("compat-cleanrl-ppo-continuous", "HalfCheetah-v4", "1,442.6 ± 46.0 in training (likewise)"),
    ("compat-sb3-ppo", "CartPole-v1", "none with the defaults"),
    ("compat-sb3-ppo", "Acrobot-v1, settings of RL-Zoo",
     "−73.5 ± 18.2 greedy (RL-Zoo, one run; the spread is of episodes)"),
    ("compat-spinningup-ppo", "HalfCheetah-v4",
     "about 1,670 (v3, its page's curve, as Tianshou reads it)"),
    ("compat-mva-ppo", "InvertedPendulum-v5", "1,000 reached (source 004, one run)"),
)  # fmt: skip


REACHER = "reacher-ppo --total-env-steps 100_000"
"""Settings on Reacher that the tricks change."""


# --- reading and grouping


def read(name: str) -> list[Row]:
    """Return the rows of a result file, compressed or not."""
    (path,) = RESULTS.glob(f"{name}.csv*")
    return _read_table(path)


@cache
def _read_table(path: Path) -> list[Row]:
    return ResultTable(path, ()).read()


def read_json(name: str) -> Any:
    """Return a result file's object."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def group(rows: Iterable[Any], *columns: str) -> dict[Any, list[Any]]:
    """Group rows by a column, or by several, in the order in which they appear."""
    groups: dict[Any, list[Any]] = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        groups.setdefault(key if len(columns) > 1 else key[0], []).append(row)
    return groups


def column(rows: Iterable[Row], name: str) -> list[float]:
    """Return a column's numbers."""
    return [float(row[name]) for row in rows]


def greedy(file: str, preset: str) -> list[float]:
    """Return the greedy return of each seed of one setting."""
    return column((row for row in read(file) if row["preset"] == preset), "greedy_mean")


# --- cells


def table(rows: Cells) -> str:
    """Format a table of Markdown whose first row is its head."""
    head, *others = (
        f"|{''.join(f' {cell} |' if cell != '' else ' |' for cell in row)}\n" for row in rows
    )
    return f"{head}|{'---|' * (head.count(' |'))}\n{''.join(others)}"


def number(value: float, scale: list[float]) -> str:
    """Format with as many digits as the size of the values deserves."""
    largest = max(map(abs, scale))
    digits = 2 if largest < 20 else 1 if largest < 200 else 0
    return f"{round(value, digits) + 0.0:,.{digits}f}".replace("-", "−")  # no −0


def reached(values: list[float]) -> str:
    """Format mean, interval and worst seed; a dash if there is no seed."""
    if not values:
        return "–"
    mean = number(float(np.mean(values)), values)
    if len(values) == 1:
        return mean
    if len(set(values)) == 1:
        return f"{mean}, all {len(values)}"
    low, high, least = (number(x, values) for x in (*bootstrap_mean_interval(values), min(values)))
    return f"{mean} [{low}, {high}], least {least}"


def spread(values: list[float]) -> str:
    """Format median, least and most."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def mean_and_span(values: list[float]) -> str:
    """Format mean, worst and best, to three digits or whole numbers."""
    three = (statistics.fmean(values), min(values), max(values))
    shown = [f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}" for x in three]
    return "{} [{}, {}]".format(*shown).replace("-", "−")


def pair_of_means(pair: Iterable[list[float]], form: str = "") -> str:
    """Format a mean, and another one in brackets."""
    means = [float(np.mean(values)) for values in pair]
    shown = (f"{x:{form or (',.0f' if abs(x) >= 20 else ',.1f')}}" for x in means)
    return "{} ({})".format(*shown).replace("-", "−")


def difference(ours: list[float], theirs: list[float]) -> str:
    """Format the difference of two means with the 95 % interval of Welch's t."""
    if len(ours) < 2 or len(theirs) < 2:
        return "–"
    mean = float(np.mean(ours) - np.mean(theirs))
    if len({*ours}) == len({*theirs}) == 1:
        return f"{mean:.0f}"
    bounds = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    low, high = (number(x, ours) for x in bounds)
    return f"{number(mean, ours)} [{low}, {high}]"


# --- learning


def tasks() -> Cells:
    """Yield what presets reach: PPO, the first in each file, PPG and the difference."""
    yield "environment", "steps", "seeds", "seconds", "PPO", "PPG", "PPG − PPO", "others"
    for env, file, others in TASKS:
        first, rows = read(file)[0], group(read(file), "preset")
        names = [first["preset"].replace("-ppo", x) for x in ("-ppo", "-ppg")]
        ppo, ppg = (greedy(file, name) for name in names)
        times = (statistics.median(column(rows[name], "seconds")) for name in names if name in rows)
        seconds = ", ".join(f"{time:.0f}" for time in times)
        seeds = ", ".join(f"{len(values)}" for values in (ppo, ppg) if values)
        steps = f"{int(first['env_steps']) // 100_000 * 100}k".replace("1000k", "1M")
        yield env, steps, seeds, seconds, reached(ppo), reached(ppg), difference(ppg, ppo), others


def compatible() -> Cells:
    """Yield what presets named after other code bases reach, and what those published."""
    yield (
        "preset", "environment", "steps", "seeds", "last 100 training episodes", "greedy",
        "published",
    )  # fmt: skip
    runs = {
        (preset.split()[0], env.partition(":")[2]): rows
        for (preset, env), rows in group(read("compat"), "preset", "env").items()
    }
    for preset, env, published in COMPATIBLE:
        rows = runs[preset, env.partition(",")[0]]
        ends = (reached(column(rows, end)) for end in ("return_100", "greedy_mean"))
        yield f"`{preset}`", env, f"{int(rows[0]['env_steps']):,}", len(rows), *ends, published


def reacher_tricks() -> Cells:
    """Yield what Reacher reaches with one thing changed, worst first."""
    yield "changed", "greedy, mean [95 %]", "difference"
    base = greedy("selection/reacher_100k", REACHER)
    yield "nothing", reached(base), ""
    changed = group(read("selection/reacher_tricks"), "preset")
    by_mean = {name: column(rows, "greedy_mean") for name, rows in changed.items()}
    for name, values in sorted(by_mean.items(), key=lambda item: float(np.mean(item[1]))):
        title = name.removeprefix(REACHER).strip()
        yield f"`{title}`", reached(values), difference(values, base)


def trading() -> Cells:
    """Yield returns of the examples' trader, with and without masks and a heuristic."""
    yield "", "after 12,500 steps", "after 50,000 steps", "at the end", "greedy"
    for arm, rows in group(read("trading"), "arm").items():
        curves = [row["curve"].split() for row in rows]
        # Points 5 and 20 of 40 over 100,000 steps.
        values = [[float(curve[point - 1]) for curve in curves] for point in (5, 20)]
        values += [column(rows, name) for name in ("return_100", "greedy_mean")]
        yield arm, *map(mean_and_span, values)


@cache
def _suites(folder: Path) -> dict[str, dict[tuple[str, ...], list[Row]]]:
    """Return the rows of every suite whose small form has been run by task, arm and budget."""
    return {
        path.stem.removesuffix("-small"): group(_read_table(path), "task", "arm", "budget")
        for path in sorted(folder.glob("*.csv"))
    }


def suite_runs(name: str) -> dict[tuple[str, str], list[Row]]:
    """Return the runs of a suite by arm and task, with further seeds from other suites.

    Two arms are the same configuration if the curves of all seeds that both have are equal.
    """
    return _suite_runs(RESULTS / "suites", name)


@cache
def _suite_runs(folder: Path, name: str) -> dict[tuple[str, str], list[Row]]:
    suites, runs = _suites(folder), dict[tuple[str, str], list[Row]]()
    for (task, arm, budget), own in suites[name].items():
        by_seed = {row["seed"]: row for row in own}
        for other in suites.values():
            for (its_task, _, its_budget), rows in other.items():
                if (its_task, its_budget) != (task, budget):
                    continue
                common = [row for row in rows if row["seed"] in by_seed]
                if common and all(row["curve"] == by_seed[row["seed"]]["curve"] for row in common):
                    by_seed = {row["seed"]: row for row in rows} | by_seed
        runs[arm, task] = list(by_seed.values())
    return runs


def arrow(mine: list[float], theirs: list[float]) -> str:
    """Return an arrow if all seeds are apart, and that is less likely than 5 % by chance."""
    if 2 / math.comb(len(mine) + len(theirs), len(mine)) > 0.05:
        return ""
    return " ↑" * (min(mine) > max(theirs)) + " ↓" * (max(mine) < min(theirs))


def suite(name: str) -> Cells:
    """Yield what a suite's arms reached on each task, over seeds.

    Each is compared with the first arm of the task, in the ladder of tricks with the one before.
    """
    runs = suite_runs(name)
    arms, tasks = (list(dict.fromkeys(each)) for each in zip(*runs, strict=True))
    yield "arm", *(f"{task}: over the run; at its end; greedy (seeds)" for task in tasks)
    against: dict[str, list[list[float]]] = {}

    def cell(rows: list[Row], task: str) -> str:
        over = [float(np.nanmean(np.array(row["curve"].split(), float))) for row in rows]
        values = [over, *(column(rows, end) for end in ("return_100", "greedy_mean"))]
        base = against.setdefault(task, values)
        if name == "tricks":
            against[task] = values
        shown = (
            mean_and_span(mine) + arrow(mine, theirs)
            for mine, theirs in zip(values, base, strict=True)
        )
        return f"{'; '.join(shown)} ({len(rows)})"

    for arm in arms:
        # A task cannot have every trick.
        yield arm, *(cell(runs[arm, x], x) if (arm, x) in runs else "–" for x in tasks)


def task_name(task: str) -> str:
    """Return a page's name of a task of a suite."""
    name = task.rpartition(":")[2].partition("-")[0]
    return _IN_WORDS.get(name, name[0].upper() + name[1:])


def without_and_with(name: str, *arms: str) -> dict[str, list[list[float]]]:
    """Return the greedy returns of an arm without a trick, and with it, on each task of a suite."""
    runs = suite_runs(name)
    return {
        task: [column(runs[arm, task], "greedy_mean") for arm in arms]
        for task in dict.fromkeys(task for _, task in runs)
        if all((arm, task) in runs for arm in arms)
    }


def one_out(trick: str, task: str) -> str:
    """Format the greedy return without a trick, and with all of them."""
    pairs = without_and_with("tricks-one-out", f"without {trick}", "everything")
    return pair_of_means(pairs[task], ",.0f") if task in pairs else "–"


def format_suite(name: str, *arms: str) -> str:
    """Format the greedy returns of a suite without a trick, and with it, on each task."""
    pairs = without_and_with(name, *arms).items()
    shown = ", ".join(f"{task_name(task)} {pair_of_means(pair)}" for task, pair in pairs)
    return f"[{name}](../experiments.md#{PLACES.get(name, _SWEEPS)}): {shown or '–'}"


def on_reacher(change: str) -> str:
    """Format what Reacher reaches with a change, and without it."""
    values = greedy("selection/reacher_tricks", f"{REACHER} {change}")
    base = greedy("selection/reacher_100k", REACHER)
    return pair_of_means((values, base), ".1f") if values else "–"


def describe_runs(preset: str) -> dict[str, Any]:
    """Return all runs of a preset, with a description and a place: their command or folder.

    `seeds` and `mean` are of the greedy returns with the preset's own options.
    """
    found: dict[str, Any] = {"seeds": 0, "mean": 0.0, "runs": []}
    for path in sorted(RESULTS.glob("*.csv")):
        rows = [row for row in read(path.stem) if row.get("preset", "").split(" ")[0] == preset]
        for label, runs in group(rows, "preset").items():
            fields, returns = label.partition(" ")[2], column(runs, "greedy_mean")
            seeds, steps = len(runs), int(runs[0]["env_steps"])
            if not fields:
                mean = float(f"{statistics.fmean(returns):.4g}")
                found |= {"seeds": seeds, "mean": mean}
            words = f'"{preset}:{fields}"' if fields else preset
            found["runs"].append((
                f"{seeds} seed{'s' * (seeds > 1)}{f' with `{fields}`' if fields else ''}, "
                f"{steps:,} steps: greedy {reached(returns)}",
                f"python benchmarks/learning.py benchmarks/results/{path.name} {words}"
                f"{'' if seeds == 10 else f' --seeds {seeds}'}",
            ))  # fmt: skip
    kept = group(_kept_runs(preset), "folder", "game", "options")
    for (folder, game, options), runs in kept.items():
        seeds = ", ".join(run["seed"] for run in runs)
        steps = max(int(run["steps"]) for run in runs)
        budget = PRESETS[preset].config.total_env_steps
        found["runs"].append((
            f"{game}{f' with `{options}`' if options else ''}, {steps:,} "
            f"{f'of {budget:,} ' if steps < 0.9 * budget else ''}steps, "
            f"seed{'s' * (len(runs) > 1)} {seeds}: in training {reached(column(runs, 'return'))}",
            f"benchmarks/results/{folder}",
        ))  # fmt: skip
    return found


_NO_OPTION = r"seed|name|output-dir|total-env-steps|env\.(?:id|num-threads)|log\.|checkpoint\."
_CHANGED = re.compile(rf"--(?!{_NO_OPTION}|compute\.(?!\w+-precision))\S+(?: (?!--)\S+)?")
"""Flags of a command that change what is computed."""


def _kept_runs(preset: str) -> Iterable[Row]:
    """Yield the runs of a preset whose folders are kept."""
    for path in sorted(RESULTS.rglob("card.json")):
        run, (metrics,) = RunDirectory(path.parent), path.parent.glob("metrics.jsonl*")
        command = " ".join(run.card["command"]) + " "
        name = re.search(r" train (\S+)", command)  # none: trained by a script
        if (name[1] if name else run.config.name) != preset:
            continue
        data = metrics.read_bytes()
        text = gzip.decompress(data) if metrics.suffix == ".gz" else data
        last = json.loads(text.splitlines()[-1])
        yield {
            "folder": str(path.parents[1].relative_to(RESULTS)),
            "game": run.env_id.removeprefix("procgen:"), "seed": f"{run.card['seed']}",
            "options": " ".join(_CHANGED.findall(command)),
            "steps": f"{last['env_steps']}", "return": f"{last[RETURN]}",
        }  # fmt: skip


# --- published curves


EARLY = {
    "PPG": "ppg", "PPO": "ppo", "PPG, KL penalty": "ppgkl", "PPG, one network": "ppgsingle",
    "E_π = 3": "e-pi-3", "E_π = 6": "e-pi-6", "E_aux = 1": "e-aux-1", "E_aux = 9": "e-aux-9",
    "N_π = 2": "n-pi-2", "N_π = 8": "n-pi-8",
}  # fmt: skip
"""Experiments of the paper: name on the page, and name in its files."""


def on_all_games(reference: str, *experiments: str) -> list[Curve]:
    """Return published curves of Procgen's games, hard."""
    ends = {Task(f"procgen:{game}", "hard"): 1e9 for game in PROCGEN_GAMES}
    return read_reference_curves(Path(reference), RETURN, end_by_task=ends, experiments=experiments)


def game_of(curve: Curve) -> str:
    """Return the game of a curve."""
    return curve.task.env_id.removeprefix("procgen:")


MARKS = (1, 2, 5, 10, 25, 99)
"""Millions of steps."""


def paper_early() -> Cells:
    """Yield the paper's normalized returns early in training: means over 16 games and runs."""
    yield "paper's setting", *(f"{mark}M" for mark in MARKS)
    curves = on_all_games("ppg-paper", *EARLY.values())
    for name, experiment in EARLY.items():
        scores = [
            [scale_score(float(np.interp(mark * 1e6, curve.steps, run)), bounds) for mark in MARKS]
            for curve in curves
            if curve.label == experiment
            for bounds in [PROCGEN_BOUNDS["hard"][game_of(curve)]]
            for run in curve.values
        ]
        yield name, *(number(mean, [1.0]) for mean in np.mean(scores, axis=0))


def two_ppos() -> Cells:
    """Yield PPO of the PPG paper and of Baselines after 100M steps on hard levels."""
    games = sorted(PROCGEN_GAMES)
    yield "", "normalized mean", *games
    for name, curves in (
        ("PPO of the PPG paper", on_all_games("ppg-paper", "ppo")),
        ("PPO of Baselines", on_all_games("baselines-final", "hard")),
    ):
        ends = {game_of(x): float(np.interp(1e8, x.steps, x.mean)) for x in curves}
        scores = [scale_score(ends[game], PROCGEN_BOUNDS["hard"][game]) for game in games]
        yield name, f"{statistics.fmean(scores):.3f}", *(f"{ends[game]:.1f}" for game in games)


QUANTITIES = {
    "value_loss": ("value loss", "losses/value_loss", 3),
    "approx_kl": ("KL, nats", "losses/approx_kl", 4),
    "clipped_fraction": ("clipped fraction", "losses/clipfrac", 4),
    "entropy": ("entropy, nats", "losses/entropy", 3),
}
"""Columns of the published curves: what the page calls them, our metric, and how many digits."""


def first_rollouts(count: int = 6) -> Cells:
    """Yield means of the first rollouts: least and most of the published runs, and of ours."""
    yield "game", "quantity", "published, three runs", "ours, three seeds"
    published = group(read("baselines/published"), "game", "run")
    for game in ("starpilot", "bigfish"):
        theirs = [rows for (name, _), rows in published.items() if name == game]
        files = sorted((RESULTS / "baselines").glob(f"{game}_s*/metrics.jsonl"))
        ours = [list(map(json.loads, path.read_text().splitlines())) for path in files]
        for name, (title, metric, digits) in QUANTITIES.items():
            cells = []
            for runs, key in ((theirs, name), (ours, metric)):
                means = [statistics.mean(column(run[:count], key)) for run in runs]
                cells.append(f"{min(means):.{digits}f} to {max(means):.{digits}f}")
            yield game, title, *cells


FOUND_ON = "1"
"""Seed of the comparison with published runs with which details of the original were found."""


def baselines_windows() -> list[Row]:
    """Return the windows of steps in which our runs are compared with published ones."""
    path = RESULTS.parents[1] / "docs" / "figures" / "baselines.csv"
    return ResultTable(path, ()).read()


def baselines() -> Cells:
    """Yield our runs among the published ones."""
    yield "game", "quantity", *group(baselines_windows(), "steps")

    def cell(window: list[Row]) -> str:
        bold = ("**" if row["within_min_max"] == "True" else "" for row in window)
        far = (" !" * (row["within_95_prediction"] == "False") for row in window)
        shown = (f"{b}{row['ours']}{b}{f}" for b, row, f in zip(bold, window, far, strict=True))
        return f"{', '.join(shown)} ({window[0]['published_min']} to {window[0]['published_max']})"

    for (game, metric), rows in group(baselines_windows(), "env", "metric").items():
        title = metric.rpartition("/")[2].removesuffix("_100").replace("_", " ")
        yield game, title, *map(cell, group(rows, "steps").values())


def baselines_in_short() -> Cells:
    """Yield how many windows lie within the span of the published runs, and near it."""
    yield (
        "seeds of ours", "windows within the span of the published three",
        "within the 95 % interval for one more",
    )  # fmt: skip
    by_seed = group(baselines_windows(), "seed")
    fresh = sorted(by_seed.keys() - {FOUND_ON}, key=int)
    for seeds in (fresh, [FOUND_ON]):
        rows = [row for seed in seeds for row in by_seed[seed]]
        counts = (
            sum(row[name] == "True" for row in rows)
            for name in ("within_min_max", "within_95_prediction")
        )
        yield " and ".join(seeds), *(f"{count} of {len(rows)}" for count in counts)


PPG_RUNS = {
    name: RESULTS / "procgen-25m" / "runs" / f"procgen-ppg-single-paper{ending}"
    for name, ending in {
        "8 of 32, seed 101": "_starpilot_s101",
        "all 32, seed 101": "-all32_starpilot_s101",
        "all 32, seed 102, policy in fp32": "-all32-fp32_starpilot_s102",
    }.items()
}
"""Our runs of PPG on StarPilot; names begin with the iterations of an auxiliary epoch."""
PPG_WINDOW = 250_000
"""Steps over which CleanRL's curves of PPG are averaged."""
PPG_END = 5_000_000
"""Steps up to which they are compared."""


def published_ppg() -> Cells:
    """Yield mean returns on StarPilot of our runs of PPG and of CleanRL's, and their differences.

    The interval of a difference is that of Student's t with equal variances, so that one run of
    ours is enough for it.
    """
    ours = {name: read_curves([run], "charts/episodic_return")[0] for name, run in PPG_RUNS.items()}
    groups = {
        group: [curve for name, curve in ours.items() if name.startswith(group)]
        for group in ("8 of 32", "all 32")
    }
    lasts = {
        group: int(min(x.steps[-1] for x in curves) // PPG_WINDOW) * PPG_WINDOW
        for group, curves in groups.items()
    }
    until = {x.task: float(PPG_END) for x in ours.values()}
    ends = range(1_000_000, PPG_END + 1, 1_000_000)
    titles = (f"{group}, 2M–{last / 1e6:g}M" for group, last in lasts.items())
    yield "runs", *(f"to {end // 1_000_000}M" for end in ends[1:]), *titles

    def means(curve: Curve, edges: Sequence[int]) -> np.ndarray:
        return np.array([windows(edges, curve.steps, run) for run in curve.values])

    def cells(curve: Curve) -> list[str]:
        columns = means(curve, [end for end in ends if end <= curve.steps[-1]]).T
        texts = (", ".join(f"{mean:.1f}" for mean in column) for column in columns)
        return [*texts, *("" for _ in ends[len(columns) + 1 :])]

    for name, curve in ours.items():
        yield f"ours, {name}", *cells(curve), *("" for _ in lasts)
    published = read_reference_curves(Path("cleanrl-ppg"), RETURN, end_by_task=until)
    (ppo,) = read_reference_curves(Path("baselines-easy"), RETURN, end_by_task=until)
    grid = np.arange(0.0, PPG_END + 1, 10_000)  # its points are ever further apart
    values = np.array([np.interp(grid, ppo.steps, run) for run in ppo.values])
    published.append(replace(ppo, label="OpenAI Baselines' PPO", steps=grid, values=values))
    for theirs in published:
        gaps = list[str]()
        for group, last in lasts.items():
            mine, other = (
                np.concatenate([means(x, [2_000_000, last])[:, 0] for x in curves])
                for curves in (groups[group], [theirs])
            )
            gap = mine.mean() - other.mean()
            low, high = stats.ttest_ind(mine, other).confidence_interval()
            parts = (round(float(x), 1) + 0 for x in (gap, low, high))  # 0 in place of −0
            gaps.append("{:.1f} [{:.1f}, {:.1f}]".format(*parts).replace("-", "−"))
        yield theirs.label, *cells(theirs), *gaps


# --- agreement with other programs


PROGRAMS = {
    "openai-ppg": "OpenAI PPG",
    "cleanrl": "CleanRL",
    "sb3": "Stable-Baselines3",
    "rsl-rl": "rsl_rl",
    "spinning-up": "Spinning Up",
    "baselines": "Baselines",
    "formulas": "formulas",
    "ourselves": "ours, uncompiled in one process",
}
"""References of benchmarks/agreement.py."""
AGREEMENT = {
    "rollout: values, log-probabilities, rewards, advantages, targets": (
        "values", "log-prob", "rewards", "advantages", "value targets",
    ),
    "loss of every gradient step": ("losses",),
    "weights, by how far they have moved; learning rate": ("weights after", "learning rate"),
    "Adam's moments": ("Adam's",),
}  # fmt: skip
"""Columns of its table, with beginnings of the quantities that are in each."""


def agreement_rows(*, by_design: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that are meant to differ, or the others, by program of theirs."""
    rows = [row for row in read_json("agreement")["rows"] if bool(row["by_design"]) == by_design]
    cases = group(rows, "reference", "program")
    return {f"{PROGRAMS[name]}: `{program}`": of for (name, program), of in cases.items()}


def agreement(precision: str, *, by_design: bool = False) -> Cells:
    """Yield the largest difference from a reference in one precision, and the noise."""
    yield "theirs", *(("why ours differs",) if by_design else ("ours", "updates")), *AGREEMENT
    noise = precision.replace("float", "noise")
    for program, rows in agreement_rows(by_design=by_design).items():
        cells = []
        for names in AGREEMENT.values():
            some = [row for row in rows if row["quantity"].startswith(names)]
            worst = max(some, key=lambda row: row[precision], default=None)
            cells.append(f"{worst[precision]:.0e} ({worst[noise]:.0e})" if worst else "–")
        about = [rows[0]["by_design"]] if by_design else [
            f"`{rows[0]['preset']}`", rows[0]["updates"]]  # fmt: skip
        yield program, *about, *(cell.replace("0e+00", "0") for cell in cells)


# --- speed


WORKS = {
    "cartpole": "CartPole, 4 environments", "cartpole64": "CartPole, 64 environments",
    "tensors": "CartPole as tensors, 4", "tensors64": "CartPole as tensors, 64",
    "tensors2048": "CartPole as tensors, 2,048", "gymnax2048": "CartPole in gymnax, 2,048",
    "halfcheetah": "HalfCheetah",
    "procgen-ppo": "Procgen, PPO", "procgen-ppg": "Procgen, PPG",
    "procgen-ppg-bf16": "Procgen, PPG",
}  # fmt: skip
"""Works of benchmarks/versus.py in which all have the same settings."""


def pairs(work: str) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Return the rates of each of ours and each of theirs, and their ratio."""
    rows = read_json(f"versus/{work}")["summary"]
    rates = {row["contestant"]: f"{row['rate']:,.0f}" for row in rows}
    return {
        (ours, row["contestant"]): (rates[ours], rates[row["contestant"]], ratio_text(ratio))
        for row in rows
        for ours, ratio in row["ratios"].items()
    }


def speed() -> Cells:
    """Yield whole training loops on the same environments, except PureJaxRL's."""
    yield "work", "ours", "steps/s", "theirs", "steps/s", "ratio"
    for work, title in WORKS.items():
        for (ours, theirs), (rate, other_rate, ratio) in pairs(work).items():
            gymnasium = theirs in GYMNASIUM or "Gymnasium" in theirs
            if ("Gymnasium" in ours) == gymnasium:
                yield title, ours, rate, theirs, other_rate, ratio


GYMNASIUM = ("CleanRL ppo.py", "CleanRL ppo_continuous_action.py")
"""Contestants on Gymnasium whose names do not say so."""


def ratio_text(ratio: dict[str, Any]) -> str:
    """Format a ratio and its interval; `equal` if the interval contains 1."""
    middle, (low, high) = ratio["ratio"], ratio["interval"]
    word = "equal" if low <= 1 <= high else f"{middle:.2f}×"
    return f"{word} [{low:.2f}, {high:.2f}]"


SHORT = (
    # title, work, which of ours, which of theirs
    ("CartPole, 4 environments of EnvPool", "cartpole", "phasicrl", "SB3, EnvPool"),
    ("HalfCheetah, 1 environment of Gymnasium", "halfcheetah",
     "phasicrl, 1 environment, Gymnasium", "CleanRL ppo_continuous_action.py"),
    ("Procgen, PPG with one network", "procgen-ppg", "phasicrl, one network",
     "CleanRL ppg_procgen.py"),
    ("Procgen, PPO, CleanRL with our allocator setting", "procgen-ppo", "phasicrl, fp32",
     "CleanRL ppo_procgen.py, memory kept"),
    ("CartPole as tensors, 4 environments", "tensors", "phasicrl, tensors", "PureJaxRL ppo.py"),
    ("CartPole as tensors, 2,048", "tensors2048", "phasicrl, tensors", "PureJaxRL ppo.py"),
)  # fmt: skip
"""Works of benchmarks/versus.py in the README's table."""


def speed_in_short() -> Cells:
    """Yield rates of ours and of another, and their ratio."""
    yield "work", "phasicrl, steps/s", "other", "steps/s", "ratio"
    for title, work, ours, theirs in SHORT:
        rate, other_rate, ratio = pairs(work)[ours, theirs]
        yield title, rate, theirs.split()[0].strip(","), other_rate, ratio


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


def bench() -> Cells:
    """Yield reports of `phasicrl bench`."""
    yield (
        "", "steps/s (slowest to fastest)", "of the bare networks, uncompiled", "GFLOP/s",
        "where the time goes", "memory of the process",
    )  # fmt: skip
    for name, title in BENCHES.items():
        report = read_json(f"bench/{name}")
        (rate,) = (rate for rate in report["rates"] if rate["name"] == "whole loop")
        yield (
            title, "{per_second:,.0f} ({low:,.0f} to {high:,.0f})".format(**rate),
            f"{report['share_of_limit']:.0%}",
            f"{report['gflops_per_step'] * rate['per_second']:,.0f}",
            ", ".join(f"{part} {share:.0%}" for part, share in report["split"].items()),
            f"{report['peak_memory'] / 1e9:.1f} GB",
        )  # fmt: skip


def make_encoder_rows() -> Cells:
    """Yield images per second by micro-batch and precision, and bf16's errors."""
    yield (
        "micro-batch", "fp32, images/s forward and backward", "bf16", "error of bf16: features",
        "gradients",
    )  # fmt: skip
    cases = group(read("encoder"), "size", "precision", "memory", "run", "name")
    for size in ("16", "32", "64", "128", "256", "512"):
        fp32, bf16, *errors = (
            column(cases[size, precision, "kept", "eager", name], "value")
            for precision, name in (
                ("fp32", "rate"), ("bf16", "rate"), ("bf16", "features"), ("bf16", "gradients"),
            )
        )  # fmt: skip
        yield size, spread(fp32), spread(bf16), *(f"{statistics.median(x):.1%}" for x in errors)


PROCESSES = {
    "procgen-ppo": "Procgen, PPO", "procgen-ppg": "Procgen, PPG",
    "cartpole-ppo": "CartPole, 64 environments", "halfcheetah-ppo": "HalfCheetah",
}  # fmt: skip
"""Runs of benchmarks/scaling.py, and what the page calls them."""


def several_processes() -> Cells:
    """Yield two processes beside one: medians of the rounds, and the ratio of each round."""
    yield (
        "run", "steps per second, one process", "two", "ratio (least to most of the rounds)",
        "in messages of gradients", "with waiting",
    )  # fmt: skip
    rows = sorted(read("scaling"), key=lambda row: int(row["round"]))
    by_run = group(rows, "run", "processes")
    for run, title in PROCESSES.items():
        one, two = (column(by_run[run, count], "steps_per_second") for count in "12")
        ratios = np.divide(two, one)
        steps = scaling.gradient_steps(parse_config(scaling.RUNS[run].split()))
        seconds, exchanges, message = (
            np.array(column(by_run[run, "2"], name)) for name in ("seconds", "exchanges", "message")
        )
        yield (
            title, *(f"{np.median(rates):,.0f}" for rates in (one, two)),
            f"{np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{np.median(time / seconds):.1%}" for time in (steps * message, exchanges)),
        )  # fmt: skip


def large() -> Cells:
    """Yield time and memory of large runs: medians."""
    yield "what", "seconds", "memory"
    for rows in group(read("large"), "what").values():
        command = rows[0]["command"]
        shown = f"`phasicrl {command}`" if command.startswith("train") else f"`phasicrl` {command}"
        seconds, used = (statistics.median(column(rows, x)) for x in ("seconds", "gigabytes"))
        yield shown, f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}", f"{used:.1f} GB"


def sizes_of_the_batch() -> Cells:
    """Yield the mean return over a run for each batch size, with the rules and without."""
    yield (
        "task", "settings; mean return over a run [95 %]", "batch", "batch / 2", "batch / 4",
        "batch / 8",
    )  # fmt: skip
    rows = read("batch_invariance")
    for task, arm in itertools.product(batch_invariance.TASKS, batch_invariance.ARMS):
        found = batch_invariance.by_size(rows, task, arm).values()
        cells = ("{:.0f} [{:.0f}, {:.0f}]".format(*three) for three in found)
        yield task, arm, *(cell.replace("-", "−") for cell in cells)


def faults() -> Cells:
    """Yield the faults that `make test-faults` injects, and how many held."""
    yield "fault", "what is injected, and what has to hold", "held", "commit"
    for row in read("faults"):
        held = f"{int(row['held']):,} of {int(row['tried']):,}"
        yield row["fault"], row["what"], held, f"`{row['commit']}`"


def suites() -> Cells:
    """Yield the suites that `phasicrl suite` can run."""
    yield "suite", "what it compares", "tasks, small", "steps, small"
    for name, each in SUITES.items():
        steps = f"{each.small_steps:,}" if each.small_steps else "of the task"
        yield f"`{name}`", each.description, ", ".join(each.small_tasks), steps


TABLES: dict[str, Callable[[], Cells]] = {
    "first-rollouts": first_rollouts,
    "tasks": tasks,
    "compatible": compatible,
    "reacher-tricks": reacher_tricks,
    "trading": trading,
    "paper-early": paper_early,
    "two-ppos": two_ppos,
    "baselines": baselines,
    "baselines-in-short": baselines_in_short,
    "published-ppg": published_ppg,
    "agreement": partial(agreement, "float64"),
    "agreement-float32": partial(agreement, "float32"),
    "agreement-by-design": partial(agreement, "float64", by_design=True),
    "speed": speed,
    "speed-in-short": speed_in_short,
    "bench": bench,
    "pieces": make_encoder_rows,
    "scaling": several_processes,
    "large": large,
    "batch-invariance": sizes_of_the_batch,
    "faults": faults,
    "suites": suites,
}
"""By the name of a place on a page: the head of its table, and its rows."""


def blocks() -> dict[str, str]:
    """Return every table by the name of its place on a page."""
    of_suites = {f"suite-{name}": partial(suite, name) for name in _suites(RESULTS / "suites")}
    return {name: table(rows()) for name, rows in (TABLES | of_suites).items()}
