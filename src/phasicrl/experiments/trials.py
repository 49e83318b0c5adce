"""Trials: configurations over seeds, several at a time, and the tables of what they reached.

Kind: effects (trains, writes files).

Settings are chosen on seeds below `FIRST_REPORT_SEED` and reported on the others. No table has
both.
"""

from __future__ import annotations

import csv
import ctypes
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
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from phasicrl.algorithm import OnIteration, resume, train
from phasicrl.config import ASKED_IMPORTS, Config, defaults, refuse_idle
from phasicrl.config_io import replacing
from phasicrl.envs.make import make_envs, resolve
from phasicrl.envs.watchdog import end_process, last_resort
from phasicrl.experiments.evaluate import evaluate
from phasicrl.host.machine import num_cores
from phasicrl.host.signals import PREEMPTED, when_parent_ends
from phasicrl.optimize import DivergedError
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import make_agent, task_of
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


def refuse_mixed_seeds(where: Path, seeds: Iterable[int], way: str) -> None:
    """Refuse seeds for choosing and seeds for reporting in one place.

    Args:
        where: they would come together.
        seeds: all of them.
        way: out of it, for the message.
    """
    if len({seed >= FIRST_REPORT_SEED for seed in seeds}) > 1:
        chosen = f"seeds below {FIRST_REPORT_SEED}, on which settings are chosen"
        raise ValueError(f"{where} would have {chosen}, and others, which are reported; {way}")


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
        refuse_mixed_seeds(self.path, seeds, "write them to another file")
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
        packed = gzip.compress(data, mtime=0) if self.path.suffix == ".gz" else data
        with replacing(self.path) as temporary:
            temporary.write_bytes(packed)

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
    # A plain byte: whoever is killed while it looks at an Event leaves its lock closed.
    stop, others = spawn.RawValue(ctypes.c_bool, False), multiprocessing.active_children()
    pool = ProcessPoolExecutor(
        jobs, mp_context=spawn, initializer=_begin, initargs=(stop, ASKED_IMPORTS)
    )
    try:
        pending = {pool.submit(_measured, measure, trial): trial for trial in trials}
        for done in as_completed(pending):
            yield pending[done], done.result()
    except BaseException:
        # One trial has failed, or nobody waits any more: the others save their runs and end.
        stop.value = True
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_stop: ctypes.c_bool | None = None
"""In a process of `run_trials`: whether nobody waits for a trial any more."""


def _begin(stop: ctypes.c_bool, modules: Sequence[str]) -> None:
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
    """What came out of a trial; if nobody waits for it any more, the process ends for good.

    It would go on with the next trial that it has been handed already, or wait for one for ever: a
    process that was killed while it waited has left the queue locked.
    """
    _end_if_unasked()
    try:
        with last_resort(end_process):
            return measure(trial)
    finally:
        _end_if_unasked()


def _end_if_unasked() -> None:
    parent = multiprocessing.parent_process()
    assert _stop is not None and parent is not None, "not a process of run_trials"
    if _stop.value or not parent.is_alive():
        os._exit(PREEMPTED)


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


def train_or_resume(config: Config, *, on_iteration: OnIteration | None = None) -> Run:
    """Go on with the newest run of this experiment, seed and length; train if there is none."""
    begun = [files for files in RunDirectory.of(config) if files.checkpoints]
    if begun:
        return resume(begun[-1].path, on_iteration=on_iteration)
    return train(config, on_iteration=on_iteration)


def train_unless_diverged(
    config: Config, *, on_iteration: OnIteration | None = None
) -> RunDirectory:
    """As `train_or_resume`; a run that diverges, or did so before, stays where it was."""
    begun = RunDirectory.of(config)
    if begun and "diverged" in begun[-1].card:
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
    diverged = "diverged" in files.card
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
