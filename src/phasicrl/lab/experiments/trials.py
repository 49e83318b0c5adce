"""Trials: configurations over seeds, trained in processes of their own, and result tables.

Kind: effects (trains, writes files).

Settings are chosen on seeds below `FIRST_REPORT_SEED` and reported on the others; no table has
both.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from phasicrl import Config, evaluate, train
from phasicrl.config_io import atomic_write
from phasicrl.envs.make import make_envs
from phasicrl.lab.analysis.curves import finite_points
from phasicrl.runs.directory import RunDirectory
from phasicrl.system.machine import num_cores
from phasicrl.system.signals import Signals, when_parent_ends
from phasicrl.training.build import make_agent

Item = TypeVar("Item")
T = TypeVar("T")
Row = dict[str, Any]

FIRST_REPORT_SEED = 101
"""Settings are chosen on smaller seeds, and reported on the others."""
RETURN = "charts/episodic_return_100"
"""Metric of the curves."""
VALUE_LOSS = "losses/value_loss"


class Trial(NamedTuple):
    """One run to train.

    Attributes:
        label: description of the run, without the seed.
        config: configuration with the seed.
    """

    label: tuple[str, ...]
    config: Config

    @property
    def key(self) -> tuple[str, ...]:
        """Label and seed, which are unique in a table."""
        return (*self.label, str(self.config.seed))

    def __str__(self) -> str:
        """Format the key."""
        return ", ".join(self.key)


Measure = Callable[[Trial], list[Row]]
"""Runs a trial; returns its rows."""


def over_seeds(label: tuple[str, ...], config: Config, seeds: Iterable[int]) -> list[Trial]:
    """Return a trial for each seed."""
    return [Trial(label, replace(config, seed=seed)) for seed in seeds]


def check_seeds(where: Path, seeds: Iterable[int]) -> None:
    """Refuse seeds for choosing and seeds for reporting in one file or folder."""
    if len({seed >= FIRST_REPORT_SEED for seed in seeds}) > 1:
        chosen = f"seeds below {FIRST_REPORT_SEED}, on which settings are chosen"
        raise ValueError(
            f"{where} would have {chosen}, and others, which are reported; separate them"
        )


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A CSV file with the rows of trials, compressed if its name ends with `.gz`.

    Attributes:
        path: file, which need not exist yet.
        columns: header.
        label: columns with the parts of a trial's label; `seed` is another column.
    """

    path: Path
    columns: Sequence[str]
    label: tuple[str, ...] = ("preset",)

    def rows(self) -> list[dict[str, str]]:
        """Read the rows of the file."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        text = (gzip.decompress(data) if self.path.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))

    def rows_of(self, trials: Iterable[Trial]) -> list[dict[str, str]]:
        """Read the rows of these trials."""
        wanted = {trial.key for trial in trials}
        return [row for row in self.rows() if self._key(row) in wanted]

    def missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the trials without a row in the file.

        Raises:
            ValueError: seeds for choosing and seeds for reporting would be in one file.
        """
        there = {self._key(row) for row in self.rows()}
        seeds = [*(trial.config.seed for trial in trials), *(int(key[-1]) for key in there)]
        check_seeds(self.path, seeds)
        return [trial for trial in trials if trial.key not in there]

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows of one trial; rows are ordered by label and seed."""
        everything = [*self.rows(), *({name: str(row[name]) for name in row} for row in rows)]
        order = list(dict.fromkeys(self._key(row)[:-1] for row in everything))
        everything.sort(key=lambda row: (order.index(self._key(row)[:-1]), int(row["seed"])))
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
        data = text.getvalue().encode()
        # Without a time inside, the same rows are the same bytes.
        packed = gzip.compress(data, mtime=0) if self.path.suffix == ".gz" else data
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(packed)

    def _key(self, row: dict[str, str]) -> tuple[str, ...]:
        """Return the key of a row's trial."""
        return (*(row[name] for name in self.label), row["seed"])


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a trial failed: its error, or the exit code of its process."""

    reason: str


class FailedTrialsError(RuntimeError):
    """Some trials failed, the others were run."""

    exit_code = 1


def run_trials(
    items: Iterable[Item], work: Callable[[Item], T], *, jobs: int = 1
) -> Iterator[tuple[Item, T | Failure]]:
    """Call a function on each item in a process of its own; yield results as they arrive.

    A failed item does not stop the others. SIGTERM, Ctrl-C and closing the iterator end all
    processes, each after saving its run.

    Args:
        items: read one by one, each when its process can start; picklable.
        work: trains one item and returns what it reached; picklable.
        jobs: processes at a time.

    Raises:
        Preempted: SIGTERM arrived.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    # Never "fork": threads of PyTorch and EnvPool may hold locks at that moment.
    spawn, waiting = multiprocessing.get_context("spawn"), iter(items)
    running: dict[Any, tuple[Item, Any]] = {}
    # The loop raises what arrives: raised inside a destructor, an exception would be lost.
    received: list[BaseException] = []
    with Signals(lambda error: received.append(error) is None) as signals:
        try:
            while not received:
                for item in itertools.islice(waiting, jobs - len(running)):
                    receiver, sender = spawn.Pipe(duplex=False)
                    child = spawn.Process(target=_run_child, args=(sender, work, item))
                    child.start()
                    sender.close()
                    running[receiver] = item, child
                if not running:
                    return
                ready: list[Any] = wait([*running], timeout=0.2)
                for receiver in ready:
                    item, child = running.pop(receiver)
                    try:
                        outcome = receiver.recv()
                    except EOFError:
                        outcome = None
                    child.join()
                    failure = Failure(f"its process ended with exit code {child.exitcode}")
                    yield item, outcome or failure
        finally:
            signals.hold()
            for _, child in running.values():
                child.terminate()
            for _, child in running.values():
                child.join()
        raise received[0]


def _run_child(sender: Connection, work: Callable[[Any], Any], item: Any) -> None:
    """Send what `work` returns, or its error, to the process that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, too, and sends SIGTERM
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        outcome = work(item)
    except Exception as error:
        if not isinstance(error, ValueError | OSError | ImportError):
            traceback.print_exc()
        outcome = Failure(f"{type(error).__name__}: {error}")
    sender.send(outcome)


def raise_failures(outcomes: Iterable[tuple[Item, T | Failure]]) -> Iterator[tuple[Item, T]]:
    """Yield the results among outcomes.

    Raises:
        FailedTrialsError: at the end, if there were failures; the message has each.
    """
    failed: list[str] = []
    for item, outcome in outcomes:
        if isinstance(outcome, Failure):
            failed.append(f"\n  {item}: {outcome.reason}")
        else:
            yield item, outcome
    if failed:
        number = f"{len(failed)} trials failed; the same command resumes them:"
        raise FailedTrialsError(number + "".join(failed))


def fill_table(
    table: ResultTable, trials: Sequence[Trial], measure: Measure, jobs: int = 1
) -> Iterator[Trial]:
    """Run the trials that a table lacks; yield each as soon as its rows are written.

    An interrupted or failed run has no row: the same call resumes it.

    Raises:
        ValueError: seeds for choosing and seeds for reporting would be in one table, or a trial was
            given twice.
        FailedTrialsError: some trials failed; all others have their rows.
    """
    twice = [key for key, number in Counter(map(str, trials)).items() if number > 1]
    if twice:
        raise ValueError(f"{twice[0]} was given twice; name each task and seed once")
    for trial, rows in raise_failures(run_trials(table.missing(trials), measure, jobs=jobs)):
        table.add(rows)
        yield trial


def ready(config: Config, stem: str, output_dir: Path, *, threads: int | None = None) -> Config:
    """Return a configuration for a run among others: named by its options, without displays.

    Args:
        config: configuration of the run.
        stem: start of the name, after its last colon.
        output_dir: folder whose folder `runs` gets the run directory.
        threads: threads of the run and of EnvPool; None: chosen for this machine.
    """
    changes: dict[str, Any] = {"log.console": "off", "output_dir": str(output_dir / "runs")}
    if threads is not None:
        if not config.compute.device.startswith("cuda"):  # else it has no effect, and is refused
            changes["compute.num_threads"] = threads
        if not config.env.id.startswith("gymnasium:"):
            changes["env.num_threads"] = threads
    # Without options at their defaults: a version with more options finds its runs.
    usual = Config().identity()
    own = {path: value for path, value in config.identity().items() if value != usual.get(path)}
    digest = hashlib.sha256(json.dumps(own, default=str, sort_keys=True).encode()).hexdigest()
    changes["name"] = f"{stem.rpartition(':')[2].replace('/', '-')}-{digest[:10]}"
    return config.with_updates(changes)


def threads_of_each(jobs: int) -> int | None:
    """Return the threads of each of several runs that share this machine; None for one run."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1")
    return None if jobs == 1 else max(1, num_cores() // jobs)


def check_trainable(arms: Iterable[tuple[str, Config]]) -> None:
    """Refuse configurations that cannot be trained: make environments and an agent of each.

    Raises:
        ValueError: the message names the arm.
    """
    for arm, config in arms:
        try:
            with closing(make_envs(config.env, num_envs=1, seed=0)) as envs:
                make_agent(config, envs)
            if config.init_from is not None:
                RunDirectory(Path(config.init_from)).weights()
        except ValueError as error:
            raise ValueError(f"{arm}: {error}") from None


def train_unless_diverged(config: Config, **options: Any) -> RunDirectory:
    """Train or resume, with options of `train`; a run that diverged is left as it is."""

    def diverged() -> RunDirectory | None:
        return next((run for run in RunDirectory.of(config)[-1:] if "diverged" in run.card), None)

    if run := diverged():
        return run
    try:
        return RunDirectory(train(config, resume="auto", **options).directory)
    except ValueError:
        if run := diverged():
            return run
        raise


def curve_grid(budget: int) -> NDArray[np.float64]:
    """Return the steps of the points of a curve."""
    return np.linspace(0.0, budget, 41)[1:]


def reached(directory: Path, make_env: Callable[[], gym.Env] | None = None) -> Row:
    """Return the results of a run; a diverged run keeps its last return.

    Args:
        directory: run directory.
        make_env: environment of a run on your own environment.
    """
    files = RunDirectory(directory)
    # A run that diverged in its first iteration has no rows.
    rows = files.metrics(RETURN, VALUE_LOSS, "time/total") if files.last_rows(1) else []
    losses, (steps, returns) = finite_points(rows, VALUE_LOSS)[1], finite_points(rows, RETURN)
    grid = curve_grid(files.config.total_env_steps) + files.config.batch_size / 2
    # Before the first return there is none.
    curve = np.append(returns, math.nan)[np.searchsorted(steps, grid, side="right") - 1]
    greedy = math.nan
    if "diverged" not in files.card:
        greedy = evaluate(directory, policies=("greedy",), make_env=make_env)[0].mean_return
    return {
        "env_steps": int(rows[-1]["env_steps"]) if rows else 0,
        "return_100": round(float(returns[-1]) if len(returns) else math.nan, 3),
        "greedy_mean": round(greedy, 3),
        "value_loss": f"{losses.mean() if len(losses) else math.nan:.4g}",
        "seconds": round(sum(row["time/total"] for row in rows), 1),
        "commit": files.card.get("commit") or "unknown",
        "curve": " ".join(f"{value:.5g}" for value in curve),
    }
