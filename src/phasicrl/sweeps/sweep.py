"""The folder of a sweep: its trials as files, and what they have come to. Kind: effects (files).

`trials/ID.json` is a trial: a configuration and its seed; or a place in a search, for which
settings are still to be chosen. `attempts/` says who trains what (`attempts.py`), `logs/` has what
they print, `runs/` the run directories, whose names follow from what is trained.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phasicrl.analysis.compare import Units, bounds_of, compare_curves
from phasicrl.analysis.plot import task_of
from phasicrl.config import Config, shown
from phasicrl.config_io import read_json, write_json
from phasicrl.experiments.run_suite import COLUMNS, SuiteResult, suite_curves
from phasicrl.experiments.trials import (
    RESULT_FILE,
    RETURN,
    ResultTable,
    ready,
    refuse_mixed_seeds,
    refuse_untrainable,
)
from phasicrl.runs.directory import RunDirectory
from phasicrl.sweeps.attempts import ATTEMPTS

TRIALS, LOGS, RESULTS = "trials", "logs", "results.csv"
SEEDS = (1, 2, 3)
"""Of a sweep that is not told others: settings are chosen on them."""
_LABEL = ("task", "arm", "budget")
_OF_THE_SWEEP = {
    "seed": "give --seeds (from Python, seeds)",
    "name": "leave it out, an arm is called what is set in it",
    "output_dir": "leave it out, the runs are in its folder `runs`",
    "log.console": "leave it out, its folder `logs` has what the runs print",
}
"""Knobs that a sweep sets itself, and what to do instead."""


@dataclass(frozen=True, slots=True)
class SweepTrial:
    """What one process trains at a time.

    Attributes:
        id: names its files.
        arm: what is trained, in words, apart from environment and seed.
        config: the configuration; None in a search that has not chosen it yet.
        seeds: one, or in a search those that are trained side by side.
        slot: its place in a search; None in a grid.
    """

    id: str
    arm: str
    config: Config | None
    seeds: tuple[int, ...]
    slot: int | None = None


def configs_of(
    trial: SweepTrial, folder: Path, *, jobs: int = 1, cores: int | None = None
) -> list[Config]:
    """The configurations of a trial's runs, each as it is trained in a sweep's folder."""
    if trial.config is None:
        return []
    config = ready(trial.config, trial.config.name, jobs, folder, cores=cores)
    if trial.slot is not None:  # two places of a search may have drawn the same settings
        config = replace(config, output_dir=str(Path(config.output_dir) / trial.id))
    return [replace(config, seed=seed) for seed in trial.seeds]


def grid_trial(arm: str, config: Config, seed: int) -> SweepTrial:
    """A trial of a grid; its id follows from what is trained."""
    name = ready(config, config.name, 1, Path()).name
    id = f"{name}-{config.total_env_steps}-s{seed}"
    return SweepTrial(id, arm, replace(config, seed=seed), (seed,))


class Sweep:
    """The folder of a sweep.

    Args:
        path: of the folder.

    Raises:
        ValueError: it has no trials.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._grid: dict[str, SweepTrial] = {}
        if not (path / TRIALS).is_dir():
            way = f"`phasicrl sweep create {path} PRESET` makes one"
            raise ValueError(f"{path} is not the folder of a sweep, it has no trials; {way}")

    def trials(self) -> list[SweepTrial]:
        """All trials, seed by seed, so that what has been trained is a whole comparison."""
        found = [self.trial(path.stem) for path in (self.path / TRIALS).glob("*.json")]
        return sorted(found, key=lambda trial: (trial.seeds[0], trial.id))

    def trial(self, id: str) -> SweepTrial:
        """One trial.

        Raises:
            ValueError: its file is damaged.
        """
        if id not in self._grid:
            path = self.path / TRIALS / f"{id}.json"
            tree = read_json(path)
            try:
                config = tree["config"] and Config.from_json(json.dumps(tree["config"]))
                trial = SweepTrial(id, tree["arm"], config, tuple(tree["seeds"]), tree["slot"])
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path}: {error}") from None
            if trial.slot is not None:  # a search writes its configuration later
                return trial
            self._grid[id] = trial
        return self._grid[id]

    def write(self, trial: SweepTrial) -> None:
        """Write the file of a trial, replacing what was there at once."""
        config = trial.config and json.loads(trial.config.to_json())
        tree = dataclasses.asdict(trial) | {"config": config}
        write_json(self.path / TRIALS / f"{trial.id}.json", tree)

    def runs(self, trial: SweepTrial) -> list[RunDirectory | None]:
        """The newest run of each seed of a trial; None where there is none yet."""
        found = (RunDirectory.of(config) for config in configs_of(trial, self.path))
        return [runs[-1] if runs else None for runs in found]


def open_sweep(path: Path, trials: Iterable[SweepTrial]) -> int:
    """Add trials to the sweep in a folder, which is made if need be; what is there stays as it is.

    Returns:
        How many were added.
    """
    for part in (TRIALS, ATTEMPTS, LOGS):
        (path / part).mkdir(parents=True, exist_ok=True)
    sweep = Sweep(path)
    new = [trial for trial in trials if not (path / TRIALS / f"{trial.id}.json").exists()]
    for trial in new:
        sweep.write(trial)
    return len(new)


def grid(
    bases: Mapping[str, Config], settings: Mapping[str, Sequence[Any]]
) -> list[tuple[str, Config]]:
    """Every combination of values on top of each configuration, each with its name.

    The environment is not part of the name: an arm is compared on all of them.

    Args:
        bases: configurations by name.
        settings: values by the path of a knob, such as `ppo.clip`.

    Raises:
        ValueError: unknown knobs, knobs that a sweep sets itself, or values that do not go
            together; the message names the arm.
    """
    for path in settings.keys() & _OF_THE_SWEEP.keys():
        raise ValueError(f"a sweep sets {path} itself; {_OF_THE_SWEEP[path]}")
    arms = []
    for name, base in bases.items():
        for values in itertools.product(*settings.values()):
            changes = dict(zip(settings, values, strict=True))
            words = [f"{path}={shown(x)}" for path, x in changes.items() if path != "env.id"]
            arm = " ".join([name, *words]).strip()
            try:
                arms.append((arm, base.changed(changes, reset_idle=True, keep=changes)))
            except ValueError as error:
                raise ValueError(f"{arm}: {error}") from None
    return arms


def create_sweep(
    directory: Path, arms: Sequence[tuple[str, Config]], *, seeds: Sequence[int] = SEEDS
) -> tuple[int, int]:
    """Write a sweep, or add to one: a trial for each arm and seed. Nothing is trained yet.

    Args:
        directory: Of the sweep. What it has by now is not repeated.
        arms: names and configurations, as `grid` makes them.
        seeds: Of the runs: 1 to 10 to choose settings by, from 101 on to report them.

    Returns:
        How many trials were added, and how many the sweep has.

    Raises:
        ValueError: no arm or no seed, one that comes twice, an arm that cannot be trained, two that
            are the same experiment, or seeds for choosing and seeds for reporting in one sweep;
            nothing was written.
    """
    if not arms or not seeds:
        given = f"{len(arms)} presets or configurations, {len(seeds)} seeds"
        raise ValueError(f"there is nothing to train ({given}); give at least 1 of each")
    if twice := [seed for seed, times in Counter(seeds).items() if times > 1]:
        raise ValueError(f"seed {twice[0]} is given twice; give each seed once")
    arms = [(arm, with_whole_paths(config)) for arm, config in arms]
    trials = [grid_trial(arm, config, seed) for seed in seeds for arm, config in arms]
    by_id: dict[str, SweepTrial] = {}
    for trial in trials:
        if (other := by_id.setdefault(trial.id, trial)) is not trial:
            same = f"{trial.arm!r} and {other.arm!r} are one experiment, seed {trial.seeds[0]}"
            raise ValueError(f"{same}; leave one of them out")
    there = Sweep(directory).trials() if (directory / TRIALS).is_dir() else []
    if any(trial.slot is not None for trial in there):
        raise ValueError(f"{directory} has a search; give the grid a folder of its own")
    given = [trial.seeds[0] for trial in (*there, *trials)]
    refuse_mixed_seeds(directory, given, "give each kind a folder of its own")
    refuse_untrainable(arms)
    added = open_sweep(directory, trials)
    return added, len({trial.id for trial in (*there, *trials)})


def with_whole_paths(config: Config) -> Config:
    """The configuration for whoever trains it, in whatever folder that is."""
    if config.init_from is None:
        return config
    return replace(config, init_from=str(Path(config.init_from).resolve()))


def sweep_results(directory: Path, *, units: Units = "raw") -> SuiteResult:
    """Write a row for each finished run to `results.csv`, and compare the arms.

    Args:
        directory: Of the sweep.
        units: Of scores: as they are, or normalized by Procgen's bounds.

    Raises:
        ValueError: not a sweep, none of its runs is finished, or the units are not a run's.
    """
    sweep, found = Sweep(directory), {}
    trials = sweep.trials()
    for trial in trials:
        for files in sweep.runs(trial):
            if files is not None and (files.path / RESULT_FILE).is_file():
                config = files.config
                task = task_of(files.env_id, config)
                bounds_of(task, units)  # or refuse them
                about = (str(task), trial.arm, config.total_env_steps)
                row = dict(zip(_LABEL, about, strict=True)) | {"seed": config.seed}
                result = json.loads((files.path / RESULT_FILE).read_text())
                found[*about, config.seed] = row | result  # drawn twice it is one experiment
    if not found:
        raise ValueError(f"no run of {directory} is finished; `phasicrl sweep work` trains them")
    table = ResultTable(directory / RESULTS, COLUMNS, _LABEL)
    table.path.unlink(missing_ok=True)
    table.add(list(found.values()))
    comparison = compare_curves(suite_curves(table.rows()), metric=RETURN, units=units)
    if any(trial.slot is not None for trial in trials):
        # The scores that settings were chosen by do not say which are better: fresh seeds do.
        comparison = replace(comparison, overall=())
    return SuiteResult(comparison, (table.path,))
