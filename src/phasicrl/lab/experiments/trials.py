"""Trials: configurations over seeds, trained in separate processes, and result tables.

Kind: effects (trains, writes files).

Settings are chosen on seeds below `FIRST_REPORT_SEED` and reported on others; no table has both.
"""

import csv
import gzip
import io
import itertools
import math
import multiprocessing
import os
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from phasicrl import Config, evaluate, train
from phasicrl.config_io import atomic_write
from phasicrl.lab.analysis.curves import extract_points, make_digest
from phasicrl.runs.directory import RunDirectory
from phasicrl.system.machine import num_cores
from phasicrl.system.signals import SignalHandler, call_on_parent_exit
from phasicrl.training.build import preview_run

Item = TypeVar("Item")
T = TypeVar("T")
Row = dict[str, Any]

FIRST_REPORT_SEED = 101
"""First seed for reporting; settings are chosen on smaller seeds."""
RETURN = "charts/episodic_return_100"
"""Metric of the curves."""
VALUE_LOSS = "losses/value_loss"


class Trial(NamedTuple):
    """One run to train.

    Attributes:
        label_parts: description of the run without the seed.
        config: configuration with the seed.
    """

    label_parts: tuple[str, ...]
    config: Config

    @property
    def key(self) -> tuple[str, ...]:
        """Label and seed, unique in a table."""
        return (*self.label_parts, str(self.config.seed))

    def __str__(self) -> str:
        """Format label and seed."""
        return ", ".join(self.key)


RunTrial = Callable[[Trial], list[Row]]
"""Function that runs a trial and returns its rows."""


def vary_seed(label_parts: tuple[str, ...], config: Config, seeds: Iterable[int]) -> list[Trial]:
    """Make a trial for each seed."""
    return [Trial(label_parts, replace(config, seed=seed)) for seed in seeds]


def check_seeds_of_one_kind(path: Path, seeds: Iterable[int]) -> None:
    """Check that `path` does not have both seeds for choosing and seeds for reporting.

    Raises:
        ValueError: some seeds are below `FIRST_REPORT_SEED`, and others are not.
    """
    if len({seed >= FIRST_REPORT_SEED for seed in seeds}) > 1:
        both = f"seeds below {FIRST_REPORT_SEED}, on which settings are chosen, and reported ones"
        raise ValueError(f"{path} has {both}; expected one kind. Separate them")


@dataclass(frozen=True, slots=True)
class ResultTable:
    """CSV table of trials' results, read and added to; compressed if its name ends with `.gz`.

    The label columns and the seed identify a trial.

    Attributes:
        path: file, which need not exist yet.
        columns: names of the columns.
        label_columns: columns of a trial's label, without `seed`.
    """

    path: Path
    columns: Sequence[str]
    label_columns: tuple[str, ...] = ("preset",)

    def read(self) -> list[dict[str, str]]:
        """Read the rows of the file; a missing file has none."""
        if not self.path.is_file():
            return []
        data = self.path.read_bytes()
        text = (gzip.decompress(data) if self.path.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))

    def read_rows_of(self, trials: Iterable[Trial]) -> list[dict[str, str]]:
        """Read the rows of the given trials, in the order of the file."""
        wanted = {trial.key for trial in trials}
        return [row for row in self.read() if self._get_key(row) in wanted]

    def find_missing(self, trials: Sequence[Trial]) -> list[Trial]:
        """Find the trials without a row in the file.

        Raises:
            ValueError: the file would mix seeds for choosing with seeds for reporting.
        """
        there = {self._get_key(row) for row in self.read()}
        seeds = [*(trial.config.seed for trial in trials), *(int(key[-1]) for key in there)]
        check_seeds_of_one_kind(self.path, seeds)
        return [trial for trial in trials if trial.key not in there]

    def add(self, rows: Iterable[Row]) -> None:
        """Add the rows of a trial, and order all rows by label and seed."""
        everything = [*self.read(), *({name: str(row[name]) for name in row} for row in rows)]
        order = list(dict.fromkeys(self._get_key(row)[:-1] for row in everything))
        everything.sort(key=lambda row: (order.index(self._get_key(row)[:-1]), int(row["seed"])))
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
        data = text.getvalue().encode()
        # Without a time inside, the same rows are the same bytes.
        packed = gzip.compress(data, mtime=0) if self.path.suffix == ".gz" else data
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(packed)

    def _get_key(self, row: dict[str, str]) -> tuple[str, ...]:
        """Return the key of a row's trial."""
        return (*(row[name] for name in self.label_columns), row["seed"])


class Failure(NamedTuple):
    """Reason why a trial failed: its error, or the exit code of its process."""

    reason: str


class FailedTrialsError(RuntimeError):
    """Failures of some trials, raised after all other trials have finished."""

    exit_code = 1


def run_in_processes(
    items: Iterable[Item], function: Callable[[Item], T], *, jobs: int = 1
) -> Iterator[tuple[Item, T | Failure]]:
    """Call a function on each item in a separate process, and yield items with results.

    Results are yielded as they arrive, with a `Failure` in place of that of a failed item.

    SIGTERM, Ctrl-C and closing the iterator end all processes, each after saving its run.

    Args:
        items: picklable items, read one by one as processes can start.
        function: picklable function that trains an item and returns the result.
        jobs: number of processes at a time.

    Raises:
        PreemptedExit: SIGTERM arrived.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    # Never "fork": threads of PyTorch and EnvPool may hold locks at that moment.
    spawn, waiting = multiprocessing.get_context("spawn"), iter(items)
    running: dict[Any, tuple[Item, Any]] = {}
    # What the user has imported, as by --import, may have registered environments.
    registered: dict[str, Any] = {}
    for name, spec in gym.registry.items():
        with suppress(Exception):  # functions within functions cannot be sent
            ForkingPickler.dumps(spec)
            registered[name] = spec
    # Raised by the loop, since an exception inside a destructor would be lost.
    pending_interrupts: list[BaseException] = []
    with SignalHandler(lambda error: pending_interrupts.append(error) is None) as signals:
        try:
            while not pending_interrupts:
                for item in itertools.islice(waiting, jobs - len(running)):
                    receiver, sender = spawn.Pipe(duplex=False)
                    given = sender, function, item, registered
                    child = spawn.Process(target=_run_and_send, args=given)
                    child.start()
                    sender.close()
                    running[receiver] = item, child
                if not running:
                    return
                ready_receivers: list[Any] = wait([*running], timeout=0.2)
                for receiver in ready_receivers:
                    item, child = running.pop(receiver)
                    try:
                        outcome = receiver.recv()
                    except EOFError:
                        child.join()
                        outcome = Failure(f"its process ended with exit code {child.exitcode}")
                    child.join()
                    yield item, outcome
        finally:
            signals.ignore_further()
            for _, child in running.values():
                child.terminate()
            for _, child in running.values():
                child.join()
        raise pending_interrupts[0]


def _run_and_send(
    sender: Connection, function: Callable[[Any], Any], item: Any, registered: dict[str, Any]
) -> None:
    """Send the result of `function`, or its error, to the parent process."""
    gym.registry.update(registered)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, too, and sends SIGTERM
    call_on_parent_exit(lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        outcome = function(item)
    except Exception as error:
        has_code = hasattr(error, "exit_code")  # expected, such as an environment's error
        if not (isinstance(error, ValueError | OSError | ImportError) or has_code):
            traceback.print_exc()
        outcome = Failure(f"{type(error).__name__}: {error}")
    sender.send(outcome)


def yield_successes(outcomes: Iterable[tuple[Item, T | Failure]]) -> Iterator[tuple[Item, T]]:
    """Yield the items with their results, then raise an error if some have failed.

    Raises:
        FailedTrialsError: there were failures; the message, after all results, lists them.
    """
    failure_lines: list[str] = []
    for item, outcome in outcomes:
        if isinstance(outcome, Failure):
            failure_lines.append(f"\n  {item}: {outcome.reason}")
        else:
            yield item, outcome
    if failure_lines:
        number = f"{len(failure_lines)} trials failed; the same command tries them again:"
        raise FailedTrialsError(number + "".join(failure_lines))


def run_missing_trials(
    table: ResultTable, trials: Sequence[Trial], run_trial: RunTrial, jobs: int = 1
) -> Iterator[Trial]:
    """Run the trials that are missing in a table, and yield each after its rows are written.

    An interrupted or failed run has no row: the same call resumes it.

    Raises:
        ValueError: the table would mix seeds for choosing with seeds for reporting, or a trial is
            given twice.
        FailedTrialsError: some trials failed; all others have their rows.
    """
    if twice := [key for key, number in Counter(map(str, trials)).items() if number > 1]:
        raise ValueError(f"trials has {twice[0]} twice; expected each task and seed once")
    outcomes = run_in_processes(table.find_missing(trials), run_trial, jobs=jobs)
    for trial, rows in yield_successes(outcomes):
        table.add(rows)
        yield trial


def prepare_trial_config(
    config: Config, stem: str, output_dir: Path, *, threads: int | None = None
) -> Config:
    """Prepare a configuration for a run among others: named by its options, without displays.

    Args:
        config: configuration of the run.
        stem: beginning of the name, after its last colon.
        output_dir: parent of the folder `runs` of run directories.
        threads: number of threads of the run and of EnvPool; None: chosen for this machine.
    """
    changes: dict[str, Any] = {"log.console": "off", "output_dir": str(output_dir / "runs")}
    if threads is not None:  # without effect on a GPU, and for Gymnasium's environments
        changes |= {"compute.num_threads": threads, "env.num_threads": threads}
    changes["name"] = f"{stem.rpartition(':')[2].replace('/', '-')}-{make_digest(config)}"
    return config.with_updates(changes)


def get_threads_per_job(jobs: int) -> int | None:
    """Return the number of threads of each of several parallel runs; None, the default, for one."""
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; expected at least 1")
    return None if jobs == 1 else max(1, num_cores() // jobs)


def check_arms(arms: Iterable[tuple[str, Config]]) -> None:
    """Check that configurations can be trained, and give each warning of theirs once.

    Raises:
        ValueError: an arm cannot be trained; the message names it.
    """
    first_arms: dict[str, str] = {}
    for arm, config in arms:
        try:
            for message in preview_run(config).warnings:
                first_arms.setdefault(message.removeprefix("warning: "), arm)
        except ValueError as error:
            raise ValueError(f"{arm}: {error}") from None
    for message, arm in first_arms.items():
        warnings.warn(f"{message} (as in {arm})", stacklevel=2)


def train_or_resume(config: Config, **options: Any) -> RunDirectory:
    """Train or resume a run with options of `train`; return it, or a diverged one unchanged."""

    def find_diverged_run() -> RunDirectory | None:
        runs = RunDirectory.find_matching_runs(config)
        return next((run for run in runs[-1:] if "diverged" in run.card), None)

    if run := find_diverged_run():
        return run
    try:
        return RunDirectory(train(config, resume="auto", **options).directory)
    except ValueError:
        if run := find_diverged_run():
            return run
        raise


def make_curve_steps(budget: int) -> NDArray[np.float64]:
    """Return the 40 environment steps of a curve, equally spaced from budget / 40 to budget."""
    return np.linspace(0.0, budget, 41)[1:]


def summarize_run(directory: Path, make_env: Callable[[], gym.Env] | None = None) -> Row:
    """Summarize a run as a row of results; a diverged run keeps its last return.

    Args:
        directory: run directory.
        make_env: function that makes the environment of the run, if it is custom.
    """
    files = RunDirectory(directory)
    # A run that diverged in its first iteration has no rows.
    rows = files.metrics(RETURN, VALUE_LOSS, "time/total") if files.last_rows(1) else []
    losses, (steps, returns) = extract_points(rows, VALUE_LOSS)[1], extract_points(rows, RETURN)
    grid = make_curve_steps(files.config.total_env_steps) + files.config.batch_size / 2
    # The latest return at each step of the grid; NaN before the first one.
    curve = np.append(math.nan, returns)[np.searchsorted(steps, grid, side="right")]
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
