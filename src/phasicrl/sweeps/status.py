"""How far a sweep is: each arm's trials, steps, returns and what is left. Kind: effects (files)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasicrl.experiments.trials import RETURN
from phasicrl.runs.directory import RunDirectory
from phasicrl.sweeps.attempts import Watch, all_attempts
from phasicrl.sweeps.sweep import Sweep, SweepTrial

_ROWS = 5
"""Of a run's metrics: the last ones are looked at."""


@dataclass(frozen=True, slots=True)
class ArmStatus:
    """How far one arm is on one environment.

    Attributes:
        arm: its name; a trial of a search without one has not begun.
        env: environment.
        pending: trials that nobody works on.
        running: trials that somebody works on.
        done: trials that are finished, diverged and given up ones included.
        failed: trials whose last attempt failed, which `work` may try again.
        failures: attempts that failed.
        steps: environment steps of all runs so far.
        total_steps: of all runs at their end.
        returns: the last return of each run that has one, by seed.
        seconds_left: until no trial is pending or running, at the present speed of its running
            trials; None if none is running.
    """

    arm: str
    env: str
    pending: int
    running: int
    done: int
    failed: int
    failures: int
    steps: int
    total_steps: int
    returns: dict[int, float]
    seconds_left: float | None


def sweep_status(directory: Path, *, watch: Watch | None = None) -> list[ArmStatus]:
    """How far each arm of a sweep is.

    Args:
        directory: Of the sweep.
        watch: remembers signs of life of other machines' processes from call to call.

    Raises:
        ValueError: not a sweep.
    """
    sweep, attempts, watch = Sweep(directory), all_attempts(directory), watch or Watch()
    by_arm: dict[tuple[str, str], list[SweepTrial]] = defaultdict(list)
    for trial in sweep.trials():
        by_arm[trial.arm, trial.config.env.id if trial.config else ""].append(trial)
    found = []
    for (arm, env), trials in by_arm.items():
        states = [watch.state(attempts.get(trial.id, [])) for trial in trials]
        count = Counter(state for state, _ in states)
        last = [
            [(files.config.seed, _last(files)) for files in sweep.runs(trial) if files is not None]
            for trial in trials
        ]
        steps = [sum(row.get("env_steps", 0) for _, row in rows) for rows in last]
        totals = [_total_steps(trial) for trial in trials]
        returns = {
            seed: row[RETURN] for rows in last for seed, row in rows if row.get(RETURN) is not None
        }
        busy = [trial for trial, (state, _) in zip(trials, states, strict=True)
                if state == "running"]  # fmt: skip
        left = sum(
            total - taken
            for total, taken, (state, _) in zip(totals, steps, states, strict=True)
            if state in ("pending", "running")  # what diverged or was given up takes no more
        )
        found.append(
            ArmStatus(
                arm=arm,
                env=env,
                pending=count["pending"],
                running=count["running"],
                done=count["done"],
                failed=count["failed"],
                failures=sum(failures for _, failures in states),
                steps=sum(steps),
                total_steps=sum(totals),
                returns=returns,
                seconds_left=_seconds_left(sweep, busy, left),
            )
        )
    return found


def _total_steps(trial: SweepTrial) -> int:
    """The environment steps of a trial's runs at their end; none if it has not begun."""
    if trial.config is None:
        return 0
    return len(trial.seeds) * trial.config.num_iterations * trial.config.batch_size


def _last(files: RunDirectory) -> dict[str, Any]:
    """The newest of each metric of a run."""
    return {
        name: value
        for row in files.last_rows(_ROWS)
        for name, value in row.items()
        if value is not None
    }


def _seconds_left(sweep: Sweep, busy: Sequence[SweepTrial], steps: int) -> float | None:
    """The time that so many steps take at the speed of the newest runs of busy trials."""
    speed = 0.0
    for trial in busy:
        runs = [files for files in sweep.runs(trial) if files is not None]
        # A search trains one seed of a trial at a time.
        speed += max((_last(files).get("charts/SPS", 0.0) for files in runs), default=0.0)
    return steps / speed if speed else None


_COLUMNS = ("arm", "environment", "pending", "running", "done", "failed", "steps", "return", "left")


def _cells(status: ArmStatus) -> tuple[str, ...]:
    """The row of an arm, as `_COLUMNS` has it."""
    from phasicrl.runs.console import duration

    again = f" ({status.failures} attempts)" if status.failures else ""
    returns = ", ".join(f"{value:.4g}" for value in status.returns.values())
    mean = sum(status.returns.values()) / max(1, len(status.returns))
    return (
        status.arm or "not begun", status.env, str(status.pending), str(status.running),
        str(status.done), f"{status.failed}{again}", f"{status.steps:,} of {status.total_steps:,}",
        f"{mean:.4g} ({returns})" if returns else "–",
        "–" if status.seconds_left is None else duration(status.seconds_left),
    )  # fmt: skip


def status_table(statuses: Sequence[ArmStatus], title: str) -> Any:
    """The arms as a table for a terminal; columns in which nothing is yet are left out.

    One environment stands in the title.
    """
    from rich.table import Table
    from rich.text import Text

    rows, envs = [_cells(status) for status in statuses], {status.env for status in statuses}
    alike = {"0", "–", *(envs if len(envs) == 1 else ())}
    title += "".join(f" on {env}" for env in envs & alike)
    table = Table(title=Text(title), title_justify="left")
    kept = [n for n in range(len(_COLUMNS)) if any(row[n] not in alike for row in rows)]
    for number in kept:
        table.add_column(
            _COLUMNS[number], justify="left" if number < 2 else "right", overflow="fold",
            no_wrap=2 <= number <= 4,
        )  # fmt: skip
    for row in rows:
        table.add_row(*(Text(row[number]) for number in kept))
    return table


def lines(statuses: Sequence[ArmStatus]) -> str:
    """The arms as lines with tabs, for a pipe."""
    return "\n".join("\t".join(row) for row in (_COLUMNS, *map(_cells, statuses)))
