"""Write the tables of measured results on the pages from the files in benchmarks/results."""

from __future__ import annotations

import csv
import gzip
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import batch_invariance, scaling
from phasicrl.cli import parse_config
from phasicrl.envs.envpool import GAMES
from phasicrl.lab.analysis.curves import Curve, Task
from phasicrl.lab.analysis.references import read_reference_curves
from phasicrl.lab.analysis.scores import PROCGEN_BOUNDS, scale_score
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.lab.experiments.trials import RETURN
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.bootstrap import bootstrap_mean_interval

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Row = dict[str, str]
Cells = Iterable[Sequence[object]]

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
    # environment, file, preset without its ending, fields, what others reached
    ("CartPole-v1", "cartpole", "cartpole", "", "Zoo 500 at 100k (one run)"),
    ("Acrobot-v1", "acrobot", "acrobot", "", "CleanRL −86 at 500k, Zoo −73.5 at 1M"),
    ("MountainCar-v0", "mountaincar", "mountaincar", "",
     "Zoo −110 at 1M (one run), CleanRL −200 at 500k"),
    ("LunarLander-v3", "lunarlander", "lunarlander", "", "Zoo 242 at 1M (v2, one run)"),
    ("Pendulum-v1", "pendulum", "pendulum", "", "Zoo −172 at 100k (one run, gSDE)"),
    ("InvertedPendulum-v5", "invertedpendulum", "invertedpendulum", "",
     "source 004: 1000 reached; CleanRL 963 at 1M"),
    ("InvertedDoublePendulum-v5", "inverteddoublependulum", "inverteddoublependulum", "",
     "Tianshou 9,231 at 1M"),
    ("Reacher-v5", "reacher_100k", "reacher", " --total-env-steps 100_000",
     "source 004: −8.6 at 100k"),
    ("Reacher-v5", "reacher", "reacher", "", "Tianshou −4.1 at 1M"),
    ("Swimmer-v5", "swimmer", "swimmer", "",
     "Zoo 282 at 1M (v3, one run), Spinning Up 120, Tianshou 67"),
    ("HalfCheetah-v5", "halfcheetah", "halfcheetah", "",
     "Zoo 5,819 (one run), Tianshou 5,784, CleanRL 1,443 at 1M"),
    ("Hopper-v5", "hopper", "hopper", "", "Tianshou 2,609 at 1M"),
    ("Walker2d-v5", "walker2d", "walker2d", "", "Tianshou 3,589 at 1M"),
    ("Ant-v5", "ant", "ant", "", "Tianshou 3,258, Zoo 1,327 (v3, one run) at 1M"),
    ("CartPole-v1 without velocities", "cartpole_masked_velocity", "cartpole-masked-velocity", "",
     "contrib's PPO with LSTM 500"),
    ("Pendulum-v1 without velocity", "pendulum_masked_velocity", "pendulum-masked-velocity", "",
     "contrib's PPO with LSTM −218"),
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


# --- reading and grouping


def read(name: str) -> list[Row]:
    """Return the rows of a result file, compressed or not."""
    path = RESULTS / f"{name}.csv"
    packed = path.with_suffix(".csv.gz")
    text = gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text()
    return list(csv.DictReader(text.splitlines()))


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


def greedy(file: str, **where: str) -> list[float]:
    """Return the greedy return of each seed of one setting."""
    rows = (row for row in read(file) if all(row[key] == where[key] for key in where))
    return column(rows, "greedy_mean")


# --- cells


def table(head: Sequence[object], rows: Cells) -> str:
    """Format a table of Markdown."""

    def line(cells: Sequence[object]) -> str:
        return f"|{''.join(f' {cell} |' if cell != '' else ' |' for cell in cells)}\n"

    return line(head) + f"|{'---|' * len(head)}\n" + "".join(map(line, rows))


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


def short_mean(values: list[float]) -> str:
    """Format a mean; a dash if there is none."""
    if not values:
        return "–"
    digits = 0 if abs(np.mean(values)) >= 20 else 1
    return f"{np.mean(values):,.{digits}f}".replace("-", "−")


def difference(ours: list[float], theirs: list[float]) -> str:
    """Format the difference of two means with the 95 % interval of Welch's t."""
    if len(ours) < 2 or len(theirs) < 2:
        return "–"
    mean = float(np.mean(ours) - np.mean(theirs))
    variances = [float(np.var(values, ddof=1)) / len(values) for values in (ours, theirs)]
    if not sum(variances):
        return f"{mean:.0f}"
    both = zip(variances, (ours, theirs), strict=True)
    freedom = sum(variances) ** 2 / sum(v**2 / (len(values) - 1) for v, values in both)
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(sum(variances))
    low, high = (number(x, ours) for x in (mean - half, mean + half))
    return f"{number(mean, ours)} [{low}, {high}]"


# --- learning


def tasks_reached() -> Cells:
    """What the presets reach: PPO, PPG and the difference."""
    for env, file, preset, fields, others in TASKS:
        rows = read(file)
        ppo, ppg = (greedy(file, preset=f"{preset}-{x}{fields}") for x in ("ppo", "ppg"))
        seeds = ", ".join(f"{len(values)}" for values in (ppo, ppg) if values)
        steps = f"{int(rows[0]['env_steps']) // 100_000 * 100}k".replace("1000k", "1M")
        yield env, steps, seeds, reached(ppo), reached(ppg), difference(ppg, ppo), others


def compatible() -> Cells:
    """What presets named after other code bases reach, and what those published."""
    runs = group(read("compat"), "preset")
    for label, env, published in COMPATIBLE:
        rows = runs[label]
        steps, last = f"{int(rows[0]['env_steps']):,}", column(rows, "return_100")
        ends = reached(last), reached(column(rows, "greedy_mean"))
        yield f"`{label.split()[0]}`", env, steps, len(rows), *ends, published


def reacher_tricks() -> Cells:
    """What Reacher reaches with one thing changed, worst first."""
    base = greedy("selection/reacher_100k", preset=REACHER)
    yield "nothing", reached(base), ""
    changed = group(read("selection/reacher_tricks"), "preset")
    by_mean = {name: column(rows, "greedy_mean") for name, rows in changed.items()}
    for name, values in sorted(by_mean.items(), key=lambda item: float(np.mean(item[1]))):
        title = name.removeprefix(REACHER).strip()
        yield f"`{title}`", reached(values), difference(values, base)


def trading() -> Cells:
    """What masks and a heuristic are worth to the trader of the examples."""
    for arm, rows in group(read("trading"), "arm").items():
        curves = [row["curve"].split() for row in rows]
        # Points 5 and 20 of 40 over 100,000 steps.
        values = [[float(curve[point - 1]) for curve in curves] for point in (5, 20)]
        values += [column(rows, name) for name in ("return_100", "greedy_mean")]
        yield arm, *map(mean_and_span, values)


@cache
def _suites(folder: Path) -> dict[str, dict[tuple[str, ...], list[Row]]]:
    """Return the rows of every suite by task, arm and budget."""
    return {
        path.stem.removesuffix("-small"): group(rows, "task", "arm", "budget")
        for path in sorted(folder.glob("*.csv"))
        for rows in [list(csv.DictReader(path.read_text().splitlines()))]
    }


def suite_runs(name: str) -> dict[tuple[str, str], list[Row]]:
    """Return the runs of a suite by arm and task, with further seeds from other suites.

    Two arms are the same configuration if the curves of all seeds that both have are equal.
    """
    suites, runs = _suites(RESULTS / "suites"), dict[tuple[str, str], list[Row]]()
    for (task, arm, budget), own in suites[name].items():
        by_seed = {row["seed"]: row for row in own}
        for other in suites.values():
            for (its_task, _, its_budget), rows in other.items():
                common = [row for row in rows if row["seed"] in by_seed]
                same = all(row["curve"] == by_seed[row["seed"]]["curve"] for row in common)
                if (its_task, its_budget) == (task, budget) and common and same:
                    by_seed = {row["seed"]: row for row in rows} | by_seed
        runs[arm, task] = list(by_seed.values())
    return runs


def arrow(mine: list[float], theirs: list[float]) -> str:
    """Return an arrow if all seeds are apart, and that is less likely than 5 % by chance."""
    if 2 / math.comb(len(mine) + len(theirs), len(mine)) > 0.05:
        return ""
    return " ↑" * (min(mine) > max(theirs)) + " ↓" * (max(mine) < min(theirs))


def suite(name: str) -> str:
    """What a suite's arms reached on each task, over seeds.

    Each is compared with the first arm of the task, in the ladder of tricks with the one before.
    """
    runs = suite_runs(name)
    names, arms = list(dict.fromkeys(task for _, task in runs)), dict.fromkeys(a for a, _ in runs)
    against: dict[str, list[list[float]]] = {}

    def cell(arm: str, task: str) -> str:
        if (arm, task) not in runs:  # a trick that the task cannot have
            return "–"
        of = runs[arm, task]
        over = [float(np.nanmean(np.array(row["curve"].split(), float))) for row in of]
        values = [over, *(column(of, end) for end in ("return_100", "greedy_mean"))]
        base = against.setdefault(task, values)
        if name == "tricks":
            against[task] = values
        shown = (
            mean_and_span(mine) + arrow(mine, theirs)
            for mine, theirs in zip(values, base, strict=True)
        )
        return f"{'; '.join(shown)} ({len(of)})"

    head = ("arm", *(f"{task}: over the run; at its end; greedy (seeds)" for task in names))
    return table(head, [(arm, *(cell(arm, task) for task in names)) for arm in arms])


def task_name(task: str) -> str:
    """Return a page's name of a task of a suite."""
    name = task.rpartition(":")[2].partition("-")[0]
    return _IN_WORDS.get(name, name[0].upper() + name[1:])


def without(trick: str, task: str) -> str:
    """Format the greedy return without a trick, and with all of them."""
    runs = group(read("suites/tricks-one-out-small"), "task", "arm")
    if (task, f"without {trick}") not in runs:
        return "–"
    means = (
        f"{np.mean(column(runs[task, arm], 'greedy_mean')):.0f}".replace("-", "−")
        for arm in (f"without {trick}", "everything")
    )
    return "{} ({})".format(*means)


def beside(name: str, arm_without: str, arm_with: str) -> str:
    """Format the greedy returns of a suite without a trick, and with it, on each task."""
    runs = suite_runs(name)
    pairs = {
        task: [runs[arm, task] for arm in (arm_without, arm_with) if (arm, task) in runs]
        for task in dict.fromkeys(task for _, task in runs)
    }
    shown = [
        "{} {} ({})".format(
            task_name(task), *(short_mean(column(one, "greedy_mean")) for one in pair)
        )
        for task, pair in pairs.items()
        if len(pair) == 2
    ]
    return f"[{name}](../experiments.md#{PLACES.get(name, _SWEEPS)}): {', '.join(shown) or '–'}"


def on_reacher(change: str) -> str:
    """Format what Reacher reaches with a change, and without it."""
    values = greedy("selection/reacher_tricks", preset=f"{REACHER} {change}")
    base = greedy("selection/reacher_100k", preset=REACHER)
    return f"{np.mean(values):.1f} ({np.mean(base):.1f})".replace("-", "−") if values else "–"


def trained(preset: str) -> str:
    """Describe how a preset was trained on fresh seeds: seeds, result and command."""
    found = []
    for path in sorted(RESULTS.glob("*.csv")):
        rows = [row for row in read(path.stem) if "greedy_mean" in row and "preset" in row]
        for label, runs in group(rows, "preset").items():
            name, _, fields = label.partition(" ")
            if name != preset:
                continue
            seeds, steps = len(runs), int(runs[0]["env_steps"])
            words = f'"{preset}:{fields}"' if fields else preset
            found.append(
                f"{seeds} seed{'s' * (seeds > 1)}{f' with `{fields}`' if fields else ''}, "
                f"{steps:,} steps: greedy {reached(column(runs, 'greedy_mean'))} "
                f"(`python benchmarks/learning.py benchmarks/results/{path.name} {words}"
                f"{'' if seeds == 10 else f' --seeds {seeds}'}`)"
            )
    for folder in sorted({path.parent.parent for path in RESULTS.glob("*/*/card.json")}):
        runs = [RunDirectory(path.parent) for path in sorted(folder.glob("*/card.json"))]
        of_preset = [{"game": run.config.env.id, "seed": f"{run.card['seed']}"}
                     for run in runs if run.config.name == preset]  # fmt: skip
        for game, of in sorted(group(of_preset, "game").items()):
            seeds = ", ".join(sorted(run["seed"] for run in of))
            place = f"(`benchmarks/results/{folder.name}`)"
            found.append(f"{game}, seed{'s' * (len(of) > 1)} {seeds} {place}")
    return f"Trained: {'; '.join(found)}." if found else "Not trained here."


# --- published curves


EARLY = {
    "PPG": "ppg", "PPO": "ppo", "PPG, KL penalty": "ppgkl", "PPG, one network": "ppgsingle",
    "E_π = 3": "e-pi-3", "E_π = 6": "e-pi-6", "E_aux = 1": "e-aux-1", "E_aux = 9": "e-aux-9",
    "N_π = 2": "n-pi-2", "N_π = 8": "n-pi-8",
}  # fmt: skip
"""Of the paper's experiments: what a page calls them, and what its files do."""


def on_all_games(reference: str, *experiments: str) -> list[Curve]:
    """Return published curves of Procgen's games, hard."""
    ends = {Task(f"procgen:{game}", "hard"): 1e9 for game in GAMES}
    return read_reference_curves(Path(reference), RETURN, ends=ends, experiments=experiments)


def game_of(curve: Curve) -> str:
    """Return the game of a curve."""
    return curve.task.env_id.removeprefix("procgen:")


MARKS = (1, 2, 5, 10, 25, 99)
"""Millions of steps."""


def paper_early() -> Cells:
    """The paper's normalized returns early in training: means over 16 games and their runs."""
    curves = on_all_games("ppg-paper", *EARLY.values())
    for name, experiment in EARLY.items():
        scores = [
            [scale_score(float(np.interp(mark * 1e6, curve.steps, run)), bounds) for mark in MARKS]
            for curve in curves
            if curve.label == experiment
            for bounds in [PROCGEN_BOUNDS["hard"][game_of(curve)]]
            for run in curve.runs
        ]
        yield name, *(number(mean, [1.0]) for mean in np.mean(scores, axis=0))


def two_ppos() -> Cells:
    """PPO of the PPG paper and of Baselines after 100M steps on hard levels."""
    for name, curves in (
        ("PPO of the PPG paper", on_all_games("ppg-paper", "ppo")),
        ("PPO of Baselines", on_all_games("baselines-final", "hard")),
    ):
        ends = {game_of(x): float(np.interp(1e8, x.steps, x.mean)) for x in curves}
        scores = [scale_score(ends[game], PROCGEN_BOUNDS["hard"][game]) for game in GAMES]
        yield name, f"{statistics.fmean(scores):.3f}", *(f"{ends[x]:.1f}" for x in sorted(GAMES))


QUANTITIES = {
    "value_loss": ("value loss", "losses/value_loss", 3),
    "approx_kl": ("KL, nats", "losses/approx_kl", 4),
    "clipped_fraction": ("clipped fraction", "losses/clipfrac", 4),
    "entropy": ("entropy, nats", "losses/entropy", 3),
}
"""Columns of the published curves: what the page calls them, our metric, and how many digits."""


def first_rollouts(count: int = 6) -> Cells:
    """Means of the first rollouts: least and most of the published runs, and of ours."""
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


def baselines() -> str:
    """Ours among the published runs, and how many of the windows lie within their span."""
    path = RESULTS.parents[1] / "docs" / "figures" / "baselines.csv"
    rows = list(csv.DictReader(path.read_text().splitlines()))

    def cell(window: list[Row]) -> str:
        bold = ("**" if row["within_min_max"] == "True" else "" for row in window)
        far = (" !" * (row["within_95_prediction"] == "False") for row in window)
        shown = (f"{b}{row['ours']}{b}{f}" for b, row, f in zip(bold, window, far, strict=True))
        return f"{', '.join(shown)} ({window[0]['published_min']} to {window[0]['published_max']})"

    lines = [
        (game, metric.rpartition("/")[2].removesuffix("_100").replace("_", " "),
         *map(cell, group(of, "steps").values()))
        for (game, metric), of in group(rows, "env", "metric").items()
    ]  # fmt: skip
    fresh = sorted({row["seed"] for row in rows} - {FOUND_ON}, key=int)
    counts = [
        (" and ".join(seeds), *(
            f"{sum(row[name] == 'True' for row in of)} of {len(of)}"
            for name in ("within_min_max", "within_95_prediction")
        ))
        for seeds in (fresh, [FOUND_ON])
        for of in [[row for row in rows if row["seed"] in seeds]]
    ]  # fmt: skip
    head = ("seeds of ours", "windows within the span of the published three",
            "within the 95 % interval for one more")  # fmt: skip
    windows = group(rows, "steps")
    return table(("game", "quantity", *windows), lines) + "\n" + table(head, counts)


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
        "values",
        "log-prob",
        "rewards",
        "advantages",
        "value targets",
    ),
    "loss of every gradient step": ("losses",),
    "weights, by how far they have moved; learning rate": ("weights after", "learning rate"),
    "Adam's moments": ("Adam's",),
}
"""Columns of its table, with beginnings of the quantities that are in each."""


def agreement_rows(*, by_design: bool) -> dict[str, list[dict[str, Any]]]:
    """Return the rows that are meant to differ, or the others, by program of theirs."""
    rows = [row for row in read_json("agreement")["rows"] if bool(row["by_design"]) == by_design]
    cases = group(rows, "reference", "program")
    return {f"{PROGRAMS[name]}: `{program}`": of for (name, program), of in cases.items()}


def agreement(precision: str, *, by_design: bool = False) -> Cells:
    """Largest difference between a reference's numbers and ours in one precision, and the noise."""
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
    "tensors2048": "CartPole as tensors, 2,048", "halfcheetah": "HalfCheetah",
    "procgen-ppo": "Procgen, PPO", "procgen-ppg": "Procgen, PPG",
    "procgen-ppg-bf16": "Procgen, PPG",
}  # fmt: skip
"""Works of benchmarks/versus.py in which all have the same settings."""


def speed() -> Cells:
    """Whole training loops side by side on the same environments, but for PureJaxRL's."""
    for work, title in WORKS.items():
        rows = read_json(f"versus/{work}")["summary"]
        rates = {row["contestant"]: f"{row['rate']:,.0f}" for row in rows}
        for row in rows:
            theirs = row["contestant"]
            gymnasium = theirs in GYMNASIUM or "Gymnasium" in theirs
            for ours, ratio in row["ratios"].items():
                if ("Gymnasium" in ours) == gymnasium:
                    yield title, ours, rates[ours], theirs, rates[theirs], ratio_text(ratio)


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
)  # fmt: skip
"""What the README shows of the works of benchmarks/versus.py."""


def short_speed() -> Cells:
    """Rates of ours and of another, and their ratio."""
    for title, work, ours, theirs in SHORT:
        rows = {row["contestant"]: row for row in read_json(f"versus/{work}")["summary"]}
        rates = [f"{rows[name]['rate']:,.0f}" for name in (ours, theirs)]
        name, ratio = theirs.split()[0].strip(","), rows[theirs]["ratios"][ours]
        yield title, rates[0], name, rates[1], ratio_text(ratio)


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
    """Reports of `phasicrl bench`."""
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


def encoder_rates() -> dict[tuple[str, ...], list[float]]:
    """Measurements of benchmarks/encoder.py by case and name, in the order of the repeats."""
    cases = group(read("encoder"), "size", "precision", "memory", "run", "name")
    return {case: column(rows, "value") for case, rows in cases.items()}


def pieces() -> Cells:
    """Images per second by size of the micro-batch and precision, and bf16's errors."""
    cases = encoder_rates()
    for size in ("16", "32", "64", "128", "256", "512"):
        rates = (cases[size, kind, "kept", "eager", "rate"] for kind in ("fp32", "bf16"))
        errors = (cases[size, "bf16", "kept", "eager", x] for x in ("features", "gradients"))
        yield size, *map(spread, rates), *(f"{statistics.median(x):.1%}" for x in errors)


PROCESSES = {
    "procgen-ppo": "Procgen, PPO", "procgen-ppg": "Procgen, PPG",
    "cartpole-ppo": "CartPole, 64 environments", "halfcheetah-ppo": "HalfCheetah",
}  # fmt: skip
"""Runs of benchmarks/scaling.py, and what the page calls them."""


def several_processes() -> Cells:
    """Two processes beside one: medians of the rounds, and the ratio of each round."""
    rows = group(read("scaling"), "run", "processes")
    for run, title in PROCESSES.items():
        one, two = (sorted(rows[run, count], key=lambda row: int(row["round"])) for count in "12")
        rates = [column(some, "steps_per_second") for some in (one, two)]
        ratios = [b / a for a, b in zip(*rates, strict=True)]
        steps = scaling.gradient_steps(parse_config(scaling.RUNS[run].split()))
        seconds = column(two, "seconds")
        shares = [x / each for x, each in zip(column(two, "exchanges"), seconds, strict=True)]
        messages = [
            steps * x / each for x, each in zip(column(two, "message"), seconds, strict=True)
        ]
        yield (
            title, *(f"{statistics.median(rate):,.0f}" for rate in rates),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{statistics.median(share):.1%}" for share in (messages, shares)),
        )  # fmt: skip


def large() -> Cells:
    """Time and memory of large runs: medians."""
    for rows in group(read("large"), "what").values():
        command = rows[0]["command"]
        shown = f"`phasicrl {command}`" if command.startswith("train") else f"`phasicrl` {command}"
        seconds, used = (statistics.median(column(rows, x)) for x in ("seconds", "gigabytes"))
        yield shown, f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.1f}", f"{used:.1f} GB"


def sizes_of_the_batch() -> Cells:
    """The mean return over a run for each size of the batch, with the rules and without."""
    rows = read("batch_invariance")
    for task in batch_invariance.TASKS:
        for arm in batch_invariance.ARMS:
            found = batch_invariance.by_size(rows, task, arm).values()
            cells = ("{:.0f} [{:.0f}, {:.0f}]".format(*three) for three in found)
            yield task, arm, *(cell.replace("-", "−") for cell in cells)


def faults() -> Cells:
    """What held of the faults that `make test-faults` injects."""
    for row in read("faults"):
        held = f"{int(row['held']):,} of {int(row['tried']):,}"
        yield row["fault"], row["what"], held, f"`{row['commit']}`"


def suites() -> Cells:
    """What can be run with `phasicrl suite`."""
    for name, each in SUITES.items():
        steps = f"{each.small_steps:,}" if each.small_steps else "of the task"
        yield f"`{name}`", each.description, ", ".join(each.small), steps


TABLES: dict[str, tuple[str, Callable[[], Cells]]] = {
    "first-rollouts": ("game|quantity|published, three runs|ours, three seeds", first_rollouts),
    "tasks": ("environment|steps|seeds|PPO|PPG|PPG − PPO|others", tasks_reached),
    "compatible": (
        "preset|environment|steps|seeds|last 100 training episodes|greedy|published", compatible),
    "reacher-tricks": ("changed|greedy, mean [95 %]|difference", reacher_tricks),
    "trading": ("|after 12,500 steps|after 50,000 steps|at the end|greedy", trading),
    "paper-early": ("paper's setting|1M|2M|5M|10M|25M|99M", paper_early),
    "two-ppos": (
        "|normalized "
        "mean|bigfish|bossfight|caveflyer|chaser|climber|coinrun|dodgeball|fruitbot|heist|jumper|leaper|maze|miner|ninja|plunder|starpilot",
        two_ppos),
    "agreement": (
        "theirs|ours|updates|rollout: values, log-probabilities, rewards, advantages, "
        "targets|loss of every gradient step|weights, by how far they have moved|Adam's moments",
        partial(agreement, "float64")),
    "agreement-float32": (
        "theirs|ours|updates|rollout: values, log-probabilities, rewards, advantages, "
        "targets|loss of every gradient step|weights, by how far they have moved|Adam's moments",
        partial(agreement, "float32")),
    "agreement-by-design": (
        "theirs|why ours differs|rollout: values, log-probabilities, rewards, advantages, "
        "targets|loss of every gradient step|weights, by how far they have moved|Adam's moments",
        partial(agreement, "float64", by_design=True)),
    "speed": ("work|ours|steps/s|theirs|steps/s|ratio", speed),
    "speed-in-short": ("work|phasicrl, steps/s|other|steps/s|ratio", short_speed),
    "bench": (
        "|steps/s (slowest to fastest)|of the bare networks, uncompiled|GFLOP/s|where the "
        "time goes|memory of the process", bench),
    "pieces": (
        "micro-batch|fp32, images/s forward and backward|bf16|error of bf16: features|gradients",
        pieces),
    "scaling": (
        "run|steps per second, one process|two|ratio (least to most of the rounds)|in messages of "
        "gradients|with waiting", several_processes),
    "large": ("what|seconds|memory", large),
    "batch-invariance": (
        "task|settings; mean return over a run [95 %]|batch|batch / 2|batch / 4|batch / 8",
        sizes_of_the_batch),
    "faults": ("fault|what is injected, and what has to hold|held|commit", faults),
    "suites": ("suite|what it compares|tasks, small|steps, small", suites),
}  # fmt: skip
"""By name: the head of a table, split at `|`, and its rows."""


def blocks() -> dict[str, str]:
    """Return every table by the name of its place on a page."""
    return {
        **{name: table(head.split("|"), rows()) for name, (head, rows) in TABLES.items()},
        **{f"suite-{name}": suite(name) for name in RUN_SUITES},
        "baselines": baselines(),
    }
