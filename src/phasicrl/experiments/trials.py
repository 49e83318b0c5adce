"""Trials: configurations over seeds, several at a time, and the tables of what they reached.

Kind: effects (trains, writes files).

Settings are chosen on seeds below `FIRST_REPORT_SEED` and reported on the others. No table has
both.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from phasicrl.algorithm import OnIteration, resume, train
from phasicrl.config import ASKED_IMPORTS, Config, defaults, refuse_idle
from phasicrl.envs.make import make_envs, resolve
from phasicrl.execution.plan import Plan
from phasicrl.experiments.evaluate import evaluate
from phasicrl.host.machine import num_cores
from phasicrl.host.signals import when_parent_ends
from phasicrl.optimize import DivergedError
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import make_agent, task_of
from phasicrl.session.crash import CRASH_FILE
from phasicrl.session.run import Run
from phasicrl.session.warm_start import take_over

T = TypeVar("T")
Row = dict[str, Any]

FIRST_REPORT_SEED = 101
"""Seeds below are for choosing, the others for reporting."""
RETURN = "charts/episodic_return_100"
"""What curves are made of."""
VALUE_LOSS = "losses/value_loss"
_POINTS = 40
LEARNING_COLUMNS = (
    "preset", "seed", "env", "env_steps", "seconds", "return_100", "steps_to_threshold",
    "greedy_mean", "greedy_min", "sampled_mean", "commit",
)  # fmt: skip
"""Columns of `learning_row`."""
RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True)
class Trial:
    """One run that is to be trained.

    Attributes:
        label: what is trained, in words, apart from the seed.
        config: its configuration, with its seed.
    """

    label: tuple[str, ...]
    config: Config

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from the other trials of a table."""
        return (*self.label, str(self.config.seed))


def over_seeds(label: tuple[str, ...], config: Config, seeds: Iterable[int]) -> list[Trial]:
    """The same configuration with each of the seeds."""
    return [Trial(label, replace(config, seed=seed)) for seed in seeds]


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A CSV file with the rows of trials, compressed if its name ends with `.gz`.

    Attributes:
        path: of the file, which need not be there yet.
        columns: its header.
        label: the columns that a trial's label fills; `seed` is another column.
    """

    path: Path
    columns: Sequence[str]
    label: tuple[str, ...] = ("preset",)

    def rows(self) -> list[dict[str, str]]:
        """What the file has by now."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        text = (gzip.decompress(data) if self.path.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))

    def rows_of(self, trials: Iterable[Trial]) -> list[dict[str, str]]:
        """The rows that these trials made."""
        asked = {trial.key for trial in trials}
        return [row for row in self.rows() if self._key(row) in asked]

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials that the file has no row of.

        Raises:
            ValueError: seeds for choosing and seeds for reporting would come together in it.
        """
        there = {self._key(row) for row in self.rows()}
        seeds = [*(trial.config.seed for trial in trials), *(int(key[-1]) for key in there)]
        if len({seed >= FIRST_REPORT_SEED for seed in seeds}) > 1:
            chosen = f"seeds below {FIRST_REPORT_SEED}, on which settings are chosen"
            way = "and others, which are reported; write them to another file"
            raise ValueError(f"{self.path} would have {chosen}, {way}")
        return [trial for trial in trials if trial.key not in there]

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows of one trial; the file is kept in the order of labels and seeds."""
        given = [{name: str(value) for name, value in row.items()} for row in rows]
        everything = [*self.rows(), *given]
        order = list(dict.fromkeys(self._key(row)[:-1] for row in everything))
        everything.sort(key=lambda row: (order.index(self._key(row)[:-1]), int(row["seed"])))
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
        data = text.getvalue().encode()
        # Without a time inside, the same rows are the same bytes.
        self.path.write_bytes(gzip.compress(data, mtime=0) if self.path.suffix == ".gz" else data)

    def _key(self, row: dict[str, str]) -> tuple[str, ...]:
        """The key of the trial that made a row."""
        return (*(row[name] for name in self.label), row["seed"])


def run_trials(
    trials: Sequence[Trial], measure: Callable[[Trial], T], *, jobs: int = 1
) -> Iterator[tuple[Trial, T]]:
    """Measure each trial and give what came out, as soon as it is there.

    Args:
        trials: what to run.
        measure: trains one and says what it reached; with several jobs it must be picklable.
        jobs: trials at a time, each in a process of its own; 1: one after the other in this one.
    """
    if jobs == 1:
        yield from ((trial, measure(trial)) for trial in trials)
        return
    # Never "fork": threads of PyTorch and EnvPool may hold locks at that moment.
    spawn = multiprocessing.get_context("spawn")
    stop, others = spawn.Event(), multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        jobs, mp_context=spawn, initializer=_begin, initargs=(stop, ASKED_IMPORTS)
    )
    try:
        pending = {pool.submit(_measured, measure, trial): trial for trial in trials}
        for done in as_completed(pending):
            yield pending[done], done.result()
    except BaseException:
        # One trial has failed, or nobody waits any more: the others save their runs and end.
        stop.set()
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_stop: Event | None = None
"""In a process of `run_trials`: whether those that have not begun stay so."""


def _begin(stop: Event, modules: Sequence[str]) -> None:
    """Prepare a process for trials.

    It is told to end when the one that started it is gone, killed for example: it would finish its
    trial first, for nobody.
    """
    global _stop
    _stop = stop
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    for module in modules:
        importlib.import_module(module)


def _measured(measure: Callable[[Trial], T], trial: Trial) -> T:
    """What came out of a trial; without a parent nobody asks, and the process ends for good.

    It would go on with the next trial that it has been handed already.
    """
    if _stop is not None and _stop.is_set():
        raise CancelledError
    try:
        return measure(trial)
    except SystemExit as told:
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():
            os._exit(told.code if isinstance(told.code, int) else 1)
        raise


def fill_table(
    table: ResultTable,
    trials: Sequence[Trial],
    measure: Callable[[Trial], list[Row]],
    jobs: int = 1,
) -> Iterator[Trial]:
    """Run the trials that a table lacks; gives each as soon as its rows are written.

    A run that was cut off has no row, so that the same call goes on where it was stopped.

    Raises:
        ValueError: seeds for choosing and seeds for reporting would come together in the table, or
            a trial is there twice.
    """
    counted = Counter(trial.key for trial in trials)
    twice = [key for key, number in counted.items() if number > 1]
    if twice:
        raise ValueError(f"{', '.join(twice[0])} is asked for twice; name each task and seed once")
    for trial, rows in run_trials(table.missing(trials), measure, jobs=jobs):
        table.add(rows)
        yield trial


def learning_row(trial: Trial, *, threshold: float) -> list[Row]:
    """Train, and say in one row what was reached: at the end of training, and evaluated.

    Args:
        trial: the run.
        threshold: the return whose first time, as a mean of 100 training episodes, is noted.
    """
    run = train(trial.config)
    files = RunDirectory(run.directory)
    metric = "charts/episodic_return_100"
    reached = (row for row in files.metrics(metric) if row.get(metric, float("-inf")) >= threshold)
    steps_to_threshold = int(next(reached, {"env_steps": 0})["env_steps"])
    greedy, sampled = evaluate(run.directory, episodes=20)
    row: Row = {
        "preset": trial.label[0],
        "seed": trial.config.seed,
        "env": run.envs.name,
        "env_steps": run.env_steps,
        "seconds": round(run.seconds, 1),
        "return_100": round(run.collector.episodes.recent_mean, 2),
        "steps_to_threshold": steps_to_threshold or "",
        "greedy_mean": greedy.mean_return,
        "greedy_min": min(greedy.returns),
        "sampled_mean": sampled.mean_return,
        "commit": files.card["commit"],
    }
    return [row]


def ready(
    config: Config, stem: str, jobs: int, output_dir: Path, *, cores: int | None = None
) -> Config:
    """A configuration for a run among others: named by what it is, quiet, with its share of cores.

    Args:
        config: of the run.
        stem: how the name begins; what is behind the last colon counts.
        jobs: runs at a time.
        output_dir: its folder `runs` gets the run directory.
        cores: that the jobs share; none: all of this machine's.
    """
    changes: dict[str, Any] = {"log.console": "off", "output_dir": str(output_dir / "runs")}
    if jobs > 1 or cores is not None:
        threads = max(1, (cores or num_cores()) // jobs)
        if not config.compute.device.startswith("cuda"):  # else it has no effect, and is refused
            changes["compute.num_threads"] = threads
        if resolve(config.env.id)[0] != "gymnasium":
            changes["env.num_threads"] = threads
    # Knobs that are as by default do not count: a version that has more of them finds its runs.
    usual = defaults()
    told = {knob: value for knob, value in config.identity().items() if value != usual.get(knob)}
    digest = hashlib.sha256(json.dumps(told, default=str, sort_keys=True).encode()).hexdigest()
    changes["name"] = f"{stem.rpartition(':')[2].replace('/', '-')}-{digest[:10]}"
    return config.changed(changes)


def refuse_untrainable(arms: Sequence[tuple[str, Config]]) -> None:
    """Refuse configurations that their environments cannot train; an environment is made of each.

    So are those that begin with a run's weights, of which none fits.

    Raises:
        ValueError: the message names the arm.
    """
    by_env: dict[Any, list[tuple[str, Config]]] = defaultdict(list)
    for arm, config in arms:
        by_env[config.env].append((arm, config))
    for env, members in by_env.items():
        arm = members[0][0]
        try:
            with closing(make_envs(env, num_envs=1, seed=0)) as envs:
                for name, config in members:
                    arm = name
                    refuse_idle(config, task_of(envs))
                    agent = make_agent(config, envs)
                    if config.init_from is not None:
                        take_over(agent, config.init_from)
        except ValueError as error:
            raise ValueError(f"{arm}: {error}") from None


def train_or_resume(
    config: Config, *, plan: Plan | None = None, on_iteration: OnIteration | None = None
) -> Run:
    """Go on with the newest run of this experiment, seed and length; train if there is none."""
    begun = [files for files in RunDirectory.of(config) if files.checkpoints]
    if begun:
        return resume(begun[-1].path, on_iteration=on_iteration)
    return train(config, plan=plan, on_iteration=on_iteration)


def train_unless_diverged(
    config: Config, *, on_iteration: OnIteration | None = None
) -> RunDirectory:
    """As `train_or_resume`; a run that diverges, or did so before, stays where it was."""
    begun = RunDirectory.of(config)
    if begun and (begun[-1].path / CRASH_FILE).is_file():
        return begun[-1]
    try:
        return RunDirectory(train_or_resume(config, on_iteration=on_iteration).directory)
    except DivergedError:
        return RunDirectory.of(config)[-1]


def measure_once(config: Config, measure: Callable[[Path], Row]) -> Row:
    """What a run reached, by an earlier measurement if there is one.

    Args:
        config: of the run; its `output_dir` is searched for runs of it.
        measure: what is kept of a run directory, whose run is finished or has diverged.
    """
    for there in RunDirectory.of(config):
        if (there.path / RESULT_FILE).is_file():
            return json.loads((there.path / RESULT_FILE).read_text())
    directory = train_unless_diverged(config).path
    row = measure(directory)
    RunDirectory(directory).write_json(RESULT_FILE, row)
    return row


def curve_grid(budget: int) -> NDArray[np.float64]:
    """The steps at which a curve is kept."""
    return np.linspace(0.0, budget, _POINTS + 1)[1:]


def reached(directory: Path, make_env: Callable[[], gym.Env] | None = None) -> Row:
    """What a run has come to; one that diverged stays where it was.

    Args:
        directory: of the run.
        make_env: makes its environment, if that is one of your own.
    """
    files = RunDirectory(directory)
    diverged = (directory / CRASH_FILE).is_file()
    is_blank = diverged and not files.last_rows(1)  # in its first iteration
    rows = [] if is_blank else files.metrics(RETURN, VALUE_LOSS, "time/total")
    losses = [row[VALUE_LOSS] for row in rows if math.isfinite(row.get(VALUE_LOSS, math.nan))]
    returns = [(row["env_steps"], row[RETURN]) for row in rows if RETURN in row]
    curve = []
    for at in curve_grid(files.config.total_env_steps):
        seen = [value for steps, value in returns if steps <= at + files.config.batch_size / 2]
        curve.append(seen[-1] if seen else math.nan)
    greedy = math.nan
    if not diverged:
        greedy = evaluate(directory, policies=("greedy",), make_env=make_env)[0].mean_return
    return {
        "env_steps": int(rows[-1]["env_steps"]) if rows else 0,
        "return_100": round(returns[-1][1] if returns else math.nan, 3),
        "greedy_mean": round(greedy, 3),
        "value_loss": f"{np.mean(losses) if losses else math.nan:.4g}",
        "seconds": round(sum(row["time/total"] for row in rows), 1),
        "commit": files.card.get("commit") or "unknown",
        "curve": " ".join(f"{value:.5g}" for value in curve),
    }
