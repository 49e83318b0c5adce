"""Search for settings with Optuna. Kind: effects.

`search.json` is the search space. The study is `study.log`, a journal shared by any number of
processes. A process that locks a trial gets settings from the study, or those of an interrupted
process.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from phasicrl import Config, get_preset
from phasicrl.config_io import read_instance, read_json
from phasicrl.lab.analysis.scores import interquartile_mean
from phasicrl.lab.experiments import trials as runner
from phasicrl.lab.sweeps import grid
from phasicrl.runs.checkpoint import CheckpointError
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.lock import RunInUseError
from phasicrl.system.machine import import_optional

optuna = import_optional("optuna", "a search needs Optuna")
STUDY_FILE, _SLOT_ATTR = "study.log", "slot"


@dataclass(frozen=True, slots=True)
class Search:
    """Search space of options, as in `search.json`.

    Attributes:
        base: configuration to which the sampled options of each trial are applied.
        values: list of choices or range of each option, see `make_optuna_distribution`.
        seeds: seeds with which every trial is trained.
        rungs: number of equal parts of the budget; after each, a trial reports its score and may be
            pruned.
    """

    base: Config = field(default_factory=Config)
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seeds: tuple[int, ...] = grid.DEFAULT_SEEDS
    rungs: int = 5

    def __post_init__(self) -> None:
        """Check that there is something to search."""
        grid.check_value_lists(self.values)
        if not self.values or not self.seeds or self.rungs < 1:
            given = f"{len(self.values)} options, {len(self.seeds)} seeds, {self.rungs} rungs"
            raise ValueError(f"the search has {given}; expected at least 1 of each")


def make_optuna_distribution(values: list[Any]) -> Any:
    """Make Optuna's distribution of the values of an option.

    Args:
        values: `["log", LOW, HIGH]` or `["uniform", LOW, HIGH]`, integers between integers, see
            `write_search`; else a list of choices.

    Raises:
        ValueError: the bounds have no number between them.
    """
    match values:
        case ["log" | "uniform" as scale, int(low), int(high)]:
            return optuna.distributions.IntDistribution(low, high, log=scale == "log")
        case ["log" | "uniform" as scale, int() | float() as low, int() | float() as high]:
            return optuna.distributions.FloatDistribution(low, high, log=scale == "log")
        case _:  # as text, since Optuna has no lists
            return optuna.distributions.CategoricalDistribution([*map(json.dumps, values)])


def write_search(
    directory: Path, preset: str, values: Path, *, trials: int = 20,
    seeds: Sequence[int] = grid.DEFAULT_SEEDS, rungs: int = 5,
) -> int:  # fmt: skip
    """Write a search for settings with Optuna, or add trials to one, without training.

    Args:
        directory: Directory of the search.
        preset: Preset to which the sampled options of each trial are applied.
        values: JSON file with the values of each option: `["log", 1e-5, 1e-3]`,
            `["uniform", 1, 6]`, or a list of choices.
        trials: Number of settings in total.
        seeds: Seeds of each trial, below 101.
        rungs: Parts of the budget; after each a trial worse than the median of the others is
            pruned. 1: none is pruned.

    Returns:
        Number of new trials.

    Raises:
        ValueError: seeds are for reporting, there is nothing to search, values cannot be trained,
            or the directory has another sweep. Nothing is written then.
        ImportError: Optuna is not installed.
    """
    if trials < 1:
        raise ValueError(f"trials is {trials}; expected at least 1")
    if wrong := [seed for seed in seeds if not 0 <= seed < runner.FIRST_REPORT_SEED]:
        rule = f"0 to {runner.FIRST_REPORT_SEED - 1}, on which settings are chosen"
        raise ValueError(f"seeds has {wrong[0]}; expected {rule}")
    search = Search(get_preset(preset), read_json(values), tuple(sorted({*seeds})), rungs)
    checked = list[tuple[str, Config]]()
    for path, listed in search.values.items():
        try:
            is_choice = hasattr(make_optuna_distribution(listed), "choices")
        except ValueError as error:
            raise ValueError(f"{path} is {listed}; expected bounds for Optuna ({error})") from None
        arms = grid.make_grid_arms(search.base, {path: listed if is_choice else listed[1:]})
        checked += arms
        if not is_choice or path == "init_from":  # integers for a float, a path from elsewhere
            listed[len(listed) - len(arms) :] = [config.values()[path] for _, config in arms]
    runner.check_arms(checked)
    file, there = directory / grid.SEARCH_FILE, {*directory.glob(f"*/{grid.TRIAL_FILE}")}
    if there and not (file.exists() and read_instance(Search, file) == search):
        raise ValueError(f"directory is {directory}, with another sweep; expected a new folder")
    grid.write_dataclass(file, search)
    new = {directory / f"{slot:04d}" / grid.TRIAL_FILE for slot in range(trials)} - there
    for path in new:
        grid.write_dataclass(path, search.base)
    return len(new)


def open_study(directory: Path, *, seed: int = 0) -> Any:
    """Open the Optuna study in the directory of a search, or create one.

    Args:
        directory: directory of the search.
        seed: seed of the sampler, different for each trial.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = directory / STUDY_FILE
    lock = optuna.storages.journal.JournalFileOpenLock(str(path))
    file = optuna.storages.journal.JournalFileBackend(str(path), lock)
    lock.acquire()
    try:  # Optuna cannot read beyond a line that a full disk has cut
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()
    storage = optuna.storages.JournalStorage(file)
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    options = {"study_name": "search", "direction": "maximize", "load_if_exists": True}
    return optuna.create_study(storage=storage, sampler=sampler, **options)


def train_search_trial(folder: Path, *, threads: int | None) -> grid.Outcome:
    """Train or resume a trial of a search, which this process has locked; return its outcome."""
    search, slot = read_instance(Search, folder.parent / grid.SEARCH_FILE), int(folder.name)
    study = open_study(folder.parent, seed=slot)
    interrupted = [each for each in study.trials if each.user_attrs.get(_SLOT_ATTR) == slot]
    if interrupted:
        trial = optuna.Trial(study, interrupted[0]._trial_id)
    else:
        trial = study.ask({path: make_optuna_distribution(x) for path, x in search.values.items()})
        trial.set_user_attr(_SLOT_ATTR, slot)
    frozen = study.trials[trial.number]
    if not frozen.state.is_finished():
        try:
            frozen = _run_trial(folder, search, study, trial, threads)
        except (RunInUseError, CheckpointError):  # which may pass
            raise
        except ValueError as error:  # values that do not go together, or have no score
            trial.set_user_attr("error", str(error))
            frozen = study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return grid.Outcome(frozen.state.name.lower(), frozen.value, frozen.user_attrs.get("error", ""))


def _run_trial(folder: Path, search: Search, study: Any, trial: Any, threads: int | None) -> Any:
    """Train all seeds of a trial, and report to the study; return Optuna's record of the trial.

    All seeds are trained to the end of a rung before the next rung, so that the reported score is
    the interquartile mean over the seeds after equal steps.

    Raises:
        ValueError: the values of the trial cannot be trained, or a seed has no return.
    """
    decoded = {path: json.loads(x) if isinstance(x, str) else x for path, x in trial.params.items()}
    arm, config = grid.make_arm(search.base, decoded)
    grid.write_dataclass(folder / grid.TRIAL_FILE, replace(config, seed=search.seeds[0]))
    config = runner.prepare_trial_config(config, config.name, folder, threads=threads)
    runs = [replace(config, seed=seed) for seed in search.seeds]
    reported, score = study.trials[trial.number].intermediate_values, math.nan
    for rung in range(1, search.rungs + 1):
        env_steps = math.ceil(config.budget * rung / search.rungs)
        step = math.ceil(search.base.budget * rung / search.rungs)  # equal in trials of any budget
        if step < max(reported, default=0):
            continue  # reported by an interrupted process
        scores = np.array([score_run(_train_until(run, env_steps), env_steps) for run in runs])
        score = math.nan if np.isnan(scores).any() else float(interquartile_mean(scores[:, None]))
        if step not in reported and math.isfinite(score):
            trial.report(score, step)
        if rung < search.rungs and trial.should_prune():
            return study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    if not math.isfinite(score):
        raise ValueError(f"{arm}: score is {score}; expected an episode's end with each seed")
    return study.tell(trial, score)


def _train_until(config: Config, env_steps: int) -> RunDirectory:
    """Train a run to a number of steps, unless it is there or has diverged."""
    for run in RunDirectory.find_matching_runs(config)[-1:]:
        if (rows := run.last_rows(1)) and rows[-1]["env_steps"] >= env_steps:
            return run
    return runner.train_or_resume(
        config, callbacks=lambda run, _: "stop" if run.env_steps >= env_steps else None
    )


def score_run(run_directory: RunDirectory, env_steps: int) -> float:
    """Return a run's last mean return until `env_steps`, or its own lowest one if it diverged.

    NaN if no episode has ended.
    """
    rows = run_directory.metrics(runner.RETURN) if run_directory.last_rows(1) else []
    end = env_steps + run_directory.config.batch_size
    returns = [x[runner.RETURN] for x in rows if runner.RETURN in x and x["env_steps"] < end]
    if not returns:
        return math.nan
    has_diverged = "diverged" in run_directory.card and rows[-1]["env_steps"] < env_steps
    return min(returns) if has_diverged else returns[-1]
