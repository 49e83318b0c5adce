"""Work on a sweep: start its trials, several at a time, until none is left. Kind: effects.

Any number of processes on any number of machines may do so at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from phasicrl.config import ASKED_IMPORTS, module_of, refuse_unasked_import
from phasicrl.host.signals import PREEMPTED, Preempted, Signals, ToldToEnd
from phasicrl.sweeps.attempts import (
    LEASE,
    TAKEN,
    TAKEN_OVER,
    Attempt,
    Watch,
    all_attempts,
    attempt_at,
    this_machine,
)
from phasicrl.sweeps.search import Search
from phasicrl.sweeps.sweep import LOGS, Sweep, SweepTrial

PROGRAM = (sys.executable, "-m", "phasicrl.sweeps.trial")
"""Trains one trial."""
_GLANCE, _SCAN = 0.1, 2.0
"""Seconds between two looks at one's own processes, and at the folder."""


@dataclass(slots=True)
class _Child:
    """A process that trains, or tries to get, a trial."""

    process: subprocess.Popen[bytes]
    attempt: Attempt
    share: str | None
    log: IO[bytes]


class FailedTrialsError(RuntimeError):
    """Trials that failed too often are left."""

    exit_code = 1


OnTrial = Callable[[str, str], None]
"""Is told the id of a trial that ended here, and how."""


class Worker:
    """Trains what is left of a sweep; see `work_on_sweep` for the arguments.

    `imports` are modules to import first, here and where trials are trained: a job of a cluster
    has not read the command line that asked for them.

    Raises:
        ValueError: numbers that cannot be, or not a sweep.
    """

    def __init__(
        self,
        directory: Path,
        *,
        jobs: int | None = None,
        gpus: Sequence[str] = (),
        per_gpu: int = 1,
        retries: int = 2,
        wait: bool = True,
        cores: int | None = None,
        lease: float = LEASE,
        imports: Sequence[str] = (),
        on_trial: OnTrial = lambda id, outcome: None,
    ) -> None:
        numbers = {"jobs": 1 if jobs is None else jobs, "per_gpu": per_gpu, "lease": lease}
        for name, value in numbers.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if retries < 0:
            raise ValueError(f"retries is {retries}; give 0 or more")
        names = [name for word in gpus for name in word.split(",") if name]
        if names and jobs is not None:
            raise ValueError(
                f"jobs is {jobs}, but with gpus there are per_gpu jobs on each of them"
            )
        self._free: list[str | None] = [*names * per_gpu] or [None] * (jobs or 1)
        self._jobs, self._cores, self._lease = len(self._free), cores, lease
        self._retries, self._wait, self._on_trial = retries, wait, on_trial
        self._imports = [*ASKED_IMPORTS, *imports]
        for module in imports:
            importlib.import_module(module)
        self._sweep, self._watch = Sweep(directory), Watch(lease)
        self._children: list[_Child] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._told: list[BaseException] = []
        self._stopping = self._others_run = False

    def run(self) -> None:
        """Train until nothing is left.

        Raises:
            FailedTrialsError: but for trials that failed too often.
            Preempted: SIGTERM came; all that was under way is saved and can be gone on with.
            KeyboardInterrupt: SIGINT came, likewise.
            RuntimeError: the program that trains cannot be started.
        """
        signals, scanned = Signals(self._note), 0.0
        signals.install()
        try:
            while not self._told:
                ended = self._reap()
                if ended or (self._free and time.monotonic() - scanned >= _SCAN):
                    self._start_trials()
                    scanned = time.monotonic()
                    if not self._children and not self._others_run:
                        break
                time.sleep(_GLANCE)
        finally:
            signals.hold()
            self.stop()
            signals.remove()
        for error in self._told:
            raise Preempted(str(error)) if isinstance(error, ToldToEnd) else error
        if self._failed:
            raise FailedTrialsError(
                f"{len(self._failed)} trials failed more than {self._retries} times: "
                f"{', '.join(sorted(self._failed))}; {self._sweep.path / LOGS} says why, "
                "and more retries go on with them"
            )

    def _note(self, error: BaseException) -> bool:
        """Keep a signal for the loop: raised where it came, a destructor could lose it."""
        self._told.append(error)
        return True

    def stop(self) -> None:
        """End what is under way here, each with a checkpoint, and wait for it."""
        self._stopping = True
        for child in self._children:
            child.process.terminate()
        for child in self._children:
            child.process.wait()
        self._reap()

    def _start_trials(self) -> None:
        """Start as many of the trials that are left as there is room for."""
        self._others_run = False
        self._failed.clear()
        for trial, attempt in self._left():
            if not self._free:
                return
            self._children.append(self._start(trial, attempt))

    def _left(self) -> Iterator[tuple[SweepTrial, Attempt]]:
        """Trials that nobody works on, and what would be the next attempt at each."""
        attempts, own = all_attempts(self._sweep.path), {c.attempt.trial for c in self._children}
        for trial in self._sweep.trials():
            if trial.id in self._finished or trial.id in own:
                continue
            before = attempts.get(trial.id, [])
            state, failures = self._watch.state(before)
            if state == "done":
                self._finished.add(trial.id)
            elif state == "running":
                alive = self._watch.has_seen_alive(before[-1])
                self._others_run = self._others_run or self._wait or not alive
            elif failures <= self._retries:
                number = before[-1].number if before else 0
                yield trial, attempt_at(self._sweep.path, trial.id, number + 1)
            else:
                self._failed.add(trial.id)

    def _start(self, trial: SweepTrial, attempt: Attempt) -> _Child:
        """Start the program that trains a trial."""
        words = [str(self._sweep.path), trial.id, str(attempt.number)]
        words += ["--jobs", str(self._jobs), "--lease", str(self._lease)]
        if self._cores is not None:
            words += ["--cores", str(self._cores)]
        # A trial of a search that has not begun may choose any environment of it.
        configs = [trial.config] if trial.config else Search.read(self._sweep.path).in_each_env()
        for config in configs:
            refuse_unasked_import(config)
        named = filter(None, (module_of(config.env.id) for config in configs))
        for module in dict.fromkeys([*self._imports, *named]):
            words += ["--import", module]
        share = self._free.pop(0)
        env = dict(os.environ) | ({} if share is None else {"CUDA_VISIBLE_DEVICES": share})
        log = (self._sweep.path / LOGS / f"{attempt.path.stem}.txt").open("ab")
        process = subprocess.Popen(
            [*PROGRAM, *words],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env,
            start_new_session=True,  # Ctrl-C is for this process, which tells its children
        )  # fmt: skip
        return _Child(process, attempt, share, log)

    def _reap(self) -> bool:
        """Note what came of processes that have ended; returns whether there were any."""
        ended = [child for child in self._children if child.process.poll() is not None]
        for child in ended:
            self._children.remove(child)
            self._free.append(child.share)
            child.log.close()
            assert child.process.stdin is not None
            child.process.stdin.close()
            if child.process.returncode not in (TAKEN, TAKEN_OVER):
                self._on_trial(child.attempt.trial, self._outcome(child))
        return bool(ended)

    def _outcome(self, child: _Child) -> str:
        """What came of a trial, which is written down for a process that could not do so."""
        code, path = child.process.returncode, child.attempt.path
        about = child.attempt.read() if path.exists() else {}
        if (about.get("machine"), about.get("pid")) != (this_machine(), child.process.pid):
            if self._stopping:
                return "released"
            raise RuntimeError(f"a trial cannot be started; {child.log.name} says why")
        if "outcome" not in about:
            was_told = self._stopping or code in (-signal.SIGTERM, PREEMPTED)
            about["outcome"] = "released" if was_told else "failed"
            child.attempt.write(about | {"error": f"it ended with {code}"})
        return about["outcome"]


def work_on_sweep(
    directory: Path,
    *,
    jobs: int | None = None,
    gpus: Sequence[str] = (),
    per_gpu: int = 1,
    retries: int = 2,
    wait: bool = True,
    cores: int | None = None,
    lease: float = LEASE,
    on_trial: OnTrial = lambda id, outcome: None,
) -> None:
    """Train the trials of a sweep or a search that are left, beside any other process that does.

    What was cut off goes on from its last checkpoint. SIGTERM and Ctrl-C end it with a checkpoint
    of all that is under way.

    Args:
        directory: Of the sweep.
        jobs: Trials at a time, each in a process of its own; they share the cores. None: one.
        gpus: GPUs by number, for example `0,1`; each trial sees one of them.
        per_gpu: Trials at a time on each GPU.
        retries: How often a trial that failed is tried again, from its last checkpoint.
        wait: Stay until the trials of other processes are finished, in case one of them dies; else
            only until each of them has given a sign of life.
        cores: That the jobs share; none: all of this machine's.
        lease: Seconds without a sign of life after which another machine's trial is taken over;
            the same for all processes.
        on_trial: told the id of each trial that ended here, and how: done, failed or released.

    Raises:
        ValueError: numbers that cannot be, or not a sweep.
        FailedTrialsError: nothing is left but trials that failed too often.
    """
    Worker(
        directory, jobs=jobs, gpus=gpus, per_gpu=per_gpu, retries=retries, wait=wait, cores=cores,
        lease=lease, on_trial=on_trial,
    ).run()  # fmt: skip
