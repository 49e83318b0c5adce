"""A search for settings with Optuna, whose trials are trials of a sweep. Kind: effects.

The study lives in `study.log`, a journal that any number of processes share. The sweep has as many
places (`SweepTrial.slot`) as trials are wanted. Who holds the claim to a place asks the study for a
trial, or goes on with the one that an earlier holder got; so nothing is lost with a process.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from phasicrl.analysis.scores import interquartile_mean
from phasicrl.config import Config, refuse_unasked_import, shown
from phasicrl.config_io import read_json, write_json
from phasicrl.experiments.trials import (
    FIRST_REPORT_SEED,
    RETURN,
    measure_once,
    reached,
    refuse_untrainable,
    train_unless_diverged,
)
from phasicrl.host.machine import optional_module
from phasicrl.learner import Record
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.run import Run
from phasicrl.sweeps.sweep import (
    SEEDS,
    TRIALS,
    Sweep,
    SweepTrial,
    configs_of,
    grid,
    open_sweep,
    with_whole_paths,
)

if TYPE_CHECKING:
    import optuna

SEARCH, STUDY = "search.json", "study.log"
_SLOT, _CONFIG = "slot", "config"
GRACE_SECONDS = 30
"""A lock of the study that is older belongs to nobody any more."""
_NUMBER = r"[-+]?[\d_]+(?:\.[\d_]*)?(?:e[-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?({_NUMBER}):({_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Space:
    """The values that a knob may take in a search.

    Attributes:
        choices: any of these; if empty, a number between the bounds.
        low: lower bound; if both bounds are whole, so are the values.
        high: upper bound, which is one of the values.
        log: whether each factor is as likely as another, in place of each difference.
    """

    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    log: bool = False

    def __post_init__(self) -> None:
        """Refuse bounds between which there is nothing."""
        if not self.choices and (self.low >= self.high or (self.log and self.low <= 0)):
            given = f"{'log:' * self.log}{self.low:g}:{self.high:g}"
            raise ValueError(f"the space {given} has no values; give LOW:HIGH, or log: above zero")

    @staticmethod
    def parse(text: str, read: Callable[[str], Any]) -> Space:
        """Read `LOW:HIGH`, `log:LOW:HIGH` or values with commas between them.

        Args:
            text: what was given.
            read: from the text of one value to the value.
        """
        if match := _RANGE.fullmatch(text):
            return Space(low=read(match[2]), high=read(match[3]), log=match[1] is not None)
        return Space(choices=tuple(read(word) for word in text.split(",")))

    def ends(self) -> tuple[Any, ...]:
        """Values that stand for all: each choice, or both bounds."""
        return self.choices or (self.low, self.high)

    def suggest(self, trial: optuna.Trial, path: str) -> Any:
        """The trial's value, or a new one; Optuna knows choices by their text."""
        if self.choices:
            by_text = {shown(choice): choice for choice in self.choices}
            return by_text[trial.suggest_categorical(path, list(by_text))]
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(path, self.low, self.high, log=self.log)
        return trial.suggest_float(path, self.low, self.high, log=self.log)


@dataclass(frozen=True, slots=True)
class Search:
    """What is searched, as `search.json` has it.

    Attributes:
        base: the configuration that the settings are put into.
        spaces: by path.
        seeds: each trial trains all of them.
        rungs: equal parts of the budget; after each the seeds' scores are reported.
    """

    base: Config
    spaces: Mapping[str, Space]
    seeds: tuple[int, ...]
    rungs: int

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        spaces = {
            path: [list(x) if isinstance(x, tuple) else x for x in space.choices]
            if space.choices else {"low": space.low, "high": space.high, "log": space.log}
            for path, space in self.spaces.items()
        }  # fmt: skip
        base = json.loads(self.base.to_json())
        return {"base": base, "spaces": spaces, "seeds": list(self.seeds), "rungs": self.rungs}

    @staticmethod
    def read(folder: Path) -> Search:
        """The search in a sweep's folder.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        path = folder / SEARCH
        if not path.exists():
            if (folder / TRIALS).is_dir():
                way = f"`phasicrl sweep results {folder}` compares its arms"
                raise ValueError(f"{folder} is a grid; {way}, a search needs a folder of its own")
            way = f"`phasicrl sweep search {folder} PRESET --space …` makes one"
            raise ValueError(f"{folder} has no search; {way}")
        tree = read_json(path)
        spaces = {
            name: Space(**given) if isinstance(given, dict)
            else Space(tuple(tuple(x) if isinstance(x, list) else x for x in given))
            for name, given in tree["spaces"].items()
        }  # fmt: skip
        base = Config.from_json(json.dumps(tree["base"]))
        return Search(base, spaces, tuple(tree["seeds"]), tree["rungs"])

    def config(self, changes: Mapping[str, Any]) -> Config:
        """The configuration with these settings, for the first of the seeds."""
        given = {**changes, "seed": self.seeds[0]}
        return self.base.changed(given, reset_idle=True, keep=given)

    def in_each_env(self) -> list[Config]:
        """The base in each environment that a trial may choose."""
        if "env.id" not in self.spaces:
            return [self.base]
        ids = self.spaces["env.id"].choices
        return [self.base.changed({"env.id": id}, reset_idle=True) for id in ids]


def create_search(
    directory: Path,
    base: Config,
    spaces: Mapping[str, Space],
    *,
    trials: int = 20,
    seeds: Sequence[int] = SEEDS,
    rungs: int = 5,
) -> tuple[int, int]:
    """Write a search for settings, or give one more trials. Nothing is trained yet.

    Args:
        directory: Of the search.
        base: what the settings are put into.
        spaces: by the path of a knob, such as `ppo.clip`.
        trials: How many settings are tried in all.
        seeds: Of the runs of each trial, below 101.
        rungs: Parts of the budget; after each a trial is given up if it is worse than the median
            of the others there. 1: none is given up.

    Returns:
        How many trials were added, and how many the search has.

    Raises:
        ValueError: seeds for reporting or one that comes twice, nothing to search, values that
            cannot be trained, or another search or a grid in the same folder; nothing was written.
        ImportError: Optuna is not installed.
    """
    _optuna()
    if bad := [seed for seed in seeds if seed >= FIRST_REPORT_SEED]:
        why = "settings are chosen on seeds below, and reported on the others"
        raise ValueError(f"a search on seed {bad[0]} would use it up; give seeds below "
                         f"{FIRST_REPORT_SEED}: {why}")  # fmt: skip
    if len(set(seeds)) < len(seeds):
        given = " ".join(map(str, seeds))
        raise ValueError(f"the seeds are {given}, and one that comes twice would count twice; "
                         "give each once")  # fmt: skip
    if trials < 1 or rungs < 1 or not seeds or not spaces:
        given = f"{trials} trials, {rungs} rungs, {len(seeds)} seeds, {len(spaces)} spaces"
        raise ValueError(f"there is nothing to search ({given}); give at least 1 of each")
    base, spaces = with_whole_paths(base), dict(spaces)
    for path, space in spaces.items():
        arms = [(a, with_whole_paths(c)) for a, c in grid({"": base}, {path: space.ends()})]
        refuse_untrainable(arms)
        if path == "init_from":
            spaces[path] = Space(tuple(config.init_from for _, config in arms))
    search = Search(base, spaces, tuple(seeds), rungs)
    if (directory / TRIALS).is_dir() and Search.read(directory).to_dict() != search.to_dict():
        way = "give it a folder of its own, or the same preset, spaces, seeds and rungs"
        raise ValueError(f"{directory} has another search; {way}")
    new = [SweepTrial(f"slot-{slot:04d}", "", None, search.seeds, slot) for slot in range(trials)]
    directory.mkdir(parents=True, exist_ok=True)
    # Before the first trial, which needs it; the same content, whoever writes it.
    write_json(directory / SEARCH, search.to_dict())
    added = open_sweep(directory, new)
    return added, len(Sweep(directory).trials())


def open_study(folder: Path, *, slot: int = 0) -> optuna.Study:
    """The study of a search.

    Args:
        folder: of the search.
        slot: whoever works on another one draws other numbers.
    """
    optuna = _optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Optuna's lock is a link to the file: through a relative one it would not be found again, and a
    # lock that a killed process has left would hold for ever.
    journal = _journal(optuna.storages.journal, (folder / STUDY).absolute())
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(journal),
        study_name="search",
        direction="maximize",
        load_if_exists=True,
        sampler=optuna.samplers.TPESampler(seed=slot, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(),
    )


def _journal(optuna_journal: Any, path: Path) -> Any:
    """Optuna's journal in a file, which goes on after a full disk or a kill amid a line.

    Optuna itself would put the next line behind that, and read neither.
    """
    lock = optuna_journal.JournalFileSymlinkLock(str(path), grace_period=GRACE_SECONDS)

    class Journal(optuna_journal.JournalFileBackend):
        def append_logs(self, logs: list[dict[str, Any]]) -> None:
            lock.acquire()
            try:
                _cut_unfinished_line(path)
            finally:
                lock.release()
            super().append_logs(logs)

    return Journal(str(path), lock)


def _cut_unfinished_line(path: Path) -> None:
    with path.open("rb+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        if file.read() not in (b"", b"\n"):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def run_slot(sweep: Sweep, place: SweepTrial, *, jobs: int, cores: int | None) -> dict[str, Any]:
    """Train the trial of a place, or go on with it; its process holds the claim to the place.

    All seeds are trained to the end of a rung before any goes on, so that what is reported is the
    interquartile mean over the seeds after equal steps.

    Returns:
        What is to be noted of it.

    Raises:
        ValueError: an environment whose module nobody here has asked for.
    """
    optuna, search = _optuna(), Search.read(sweep.path)
    assert place.slot is not None, "it is the trial of a grid"
    study = open_study(sweep.path, slot=place.slot)
    trial = _trial_of(study, place.slot)
    frozen = study.trials[trial.number]
    if frozen.state.is_finished():  # its holder ended before it could say so
        return {"trial": trial.number}
    changes = {path: space.suggest(trial, path) for path, space in search.spaces.items()}
    try:
        config = search.config(changes)
    except ValueError as error:  # these values do not go together
        trial.set_user_attr("error", str(error))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        return {"trial": trial.number, "infeasible": str(error)}
    refuse_unasked_import(config)
    trial.set_user_attr(_CONFIG, config.to_json())
    place = replace(place, arm=_arm(changes), config=config)
    sweep.write(place)
    runs, value = configs_of(place, sweep.path, jobs=jobs, cores=cores), math.nan
    last = max(frozen.intermediate_values, default=0)  # what an earlier holder has reported
    for rung in range(1, search.rungs + 1):
        until = math.ceil(config.budget * rung / search.rungs)
        scores = [_score(_train_until(run, until), until) for run in runs]
        value = float(interquartile_mean(np.array(scores)[:, None]))
        if until not in frozen.intermediate_values and math.isfinite(value):
            trial.report(value, until)
        # Optuna judges by the last report, and has judged those before.
        if last <= until and rung < search.rungs and trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return {"trial": trial.number, "pruned": until}
    for run in runs:
        measure_once(run, reached)
    if math.isfinite(value):
        study.tell(trial, value)
    else:
        trial.set_user_attr("error", "no episode was finished, perhaps since it diverged")
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    return {"trial": trial.number}


def _trial_of(study: optuna.Study, slot: int) -> optuna.Trial:
    """The trial of a place: the one that an earlier holder of it got, or a new one."""
    for frozen in study.get_trials(deepcopy=False):
        if frozen.user_attrs.get(_SLOT) == slot:
            return _optuna().Trial(study, frozen._trial_id)
    trial = study.ask()
    trial.set_user_attr(_SLOT, slot)
    return trial


def _train_until(config: Config, until: int) -> RunDirectory:
    """Train a run until a number of steps, unless it has come so far or has diverged there."""

    def stop(run: Run, record: Record) -> Literal["stop"] | None:
        return "stop" if run.env_steps >= until else None

    there = RunDirectory.of(config)
    if there and _env_steps(there[-1]) >= until:
        return there[-1]
    return train_unless_diverged(config, on_iteration=stop)


def _env_steps(files: RunDirectory) -> int:
    """How far a run has come."""
    return files.last_rows(1)[-1]["env_steps"] if files.last_rows(1) else 0


def _score(files: RunDirectory, until: int) -> float:
    """The return of a run after so many steps; one that diverged has its lowest return.

    NaN if no episode has ended.
    """
    if not files.last_rows(1):
        return math.nan
    batch, rows = files.config.batch_size, files.metrics(RETURN)
    seen = [row[RETURN] for row in rows if RETURN in row and row["env_steps"] < until + batch]
    if not seen:
        return math.nan
    return min(seen) if rows[-1]["env_steps"] < until else seen[-1]


def _arm(changes: Mapping[str, Any]) -> str:
    """Settings in words: exactly, since results of the same arm are taken for one experiment."""
    return " ".join(f"{path}={shown(x)}" for path, x in changes.items())


@dataclass(frozen=True, slots=True)
class Best:
    """What a search has found so far.

    Attributes:
        number: of the trial.
        value: interquartile mean of the return over the seeds, at the end of the budget.
        config: for `train --from`.
    """

    number: int
    value: float
    config: Config


def best_of_search(directory: Path, *, export: Path | None = None) -> Best:
    """The best trial of a search so far.

    Args:
        directory: Of the search.
        export: A file that gets its configuration, for `phasicrl train --from FILE`.

    Raises:
        ValueError: not a search, or none of its trials is finished.
        ImportError: Optuna is not installed.
    """
    Search.read(directory)
    study = open_study(directory)
    try:
        trial = study.best_trial
    except ValueError:
        way = f"`phasicrl sweep work {directory}` trains them"
        raise ValueError(f"no trial of {directory} is finished; {way}") from None
    assert trial.value is not None, "Optuna's best trial has a value"
    best = Best(trial.number, trial.value, Config.from_json(trial.user_attrs[_CONFIG]))
    if export is not None:
        export.write_text(best.config.to_json() + "\n", encoding="utf-8")
    return best


def _optuna() -> Any:
    return optional_module("optuna", "a search needs Optuna", "search")
