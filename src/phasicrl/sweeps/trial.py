"""The program that trains one trial of a sweep, in a process of its own. Kind: effects.

`sweeps.work` starts it. It holds the claim to the trial itself, so that the claim ends when the
training does, whatever happens to the process that started it.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from phasicrl.sweeps.attempts import LEASE, TAKEN, Claim, attempt_at


def train_trial(directory: Path, id: str, *, jobs: int, cores: int | None) -> dict[str, Any]:
    """Train a trial, or go on with it; returns what is to be noted of it."""
    from phasicrl.experiments.trials import measure_once, reached
    from phasicrl.sweeps.sweep import Sweep, configs_of

    sweep = Sweep(directory)
    trial = sweep.trial(id)
    if trial.slot is not None:
        from phasicrl.sweeps.search import run_slot

        return run_slot(sweep, trial, jobs=jobs, cores=cores)
    (config,) = configs_of(trial, directory, jobs=jobs, cores=cores)
    return {"diverged": math.isnan(measure_once(config, reached)["greedy_mean"])}


def _end_with_parent() -> None:
    """End in order when the process that started this one is gone: its end of our input closes."""
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read, whose lock would abort a process that ends
    os.kill(os.getpid(), signal.SIGTERM)


def main(words: list[str] | None = None) -> int:
    """Claim a trial, train it, and say what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("id")
    parser.add_argument("attempt", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cores", type=int)
    parser.add_argument("--lease", type=float, default=LEASE)
    parser.add_argument("--import", dest="modules", action="append", default=[])
    given = parser.parse_args(words)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's, to the job that started this
    try:
        claim = Claim(attempt_at(given.directory, given.id, given.attempt), lease=given.lease)
    except FileExistsError:
        return TAKEN
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        from phasicrl.envs.watchdog import end_process, last_resort

        for module in given.modules:
            importlib.import_module(module)
        with last_resort(end_process):
            said = train_trial(given.directory, given.id, jobs=given.jobs, cores=given.cores)
    except (KeyboardInterrupt, SystemExit) as error:  # told to end; the run is saved
        claim.end("released")
        return error.code if isinstance(error, SystemExit) and type(error.code) is int else 130
    except BaseException as error:
        traceback.print_exc()
        claim.end("failed", error=f"{type(error).__name__}: {error}")
        return 1
    claim.end("done", **said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
