"""Sweeps: folders with a trial for each configuration and seed, and their training.

Kind: effects (trains, writes files).

`ID/trial.json` is the configuration of a trial, `ID/runs/` has its run directories, and
`ID/outcome.json` is the outcome of a finished trial. A process locks the folder `ID` in training.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from phasicrl import Config, get_preset
from phasicrl.config_io import read_instance, read_json, write_json
from phasicrl.lab.analysis.curves import format_setting, label_configs, make_task
from phasicrl.lab.experiments import trials
from phasicrl.lab.sweeps import grid
from phasicrl.presets import PRESETS
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.lock import RunLock
from phasicrl.system.machine import import_optional


def add_trials(
    directory: Path,
    presets: Sequence[str],
    *,
    values: Path | None = None,
    seeds: Sequence[int] = grid.DEFAULT_SEEDS,
    total_env_steps: int | None = None,
    make_env: str | None = None,
) -> int:
    """Write a trial for each preset, combination of values and seed, without training.

    Args:
        directory: Directory of the sweep; existing trials stay.
        presets: Names of presets.
        values: JSON file with a list of values for each option: `{"ppo.clip": [0.1, 0.2]}`.
        seeds: Seeds of the runs: below 101 to choose settings, from 101 on to report them.
        total_env_steps: Budget of each run, also if `values` has some; none: that of its preset.
        make_env: Function that makes the environment, as MODULE:FUNCTION.

    Returns:
        Number of new trials.

    Raises:
        ValueError: values cannot be trained, the sweep would have seeds for choosing and seeds for
            reporting, or the directory has a search. Nothing is written then.
    """
    if not presets or not seeds:
        rule = "at least one of each, after the folder"
        raise ValueError(f"presets or seeds is empty; expected {rule}")
    if (directory / grid.SEARCH_FILE).exists():
        raise ValueError(f"directory is {directory}, with a search; expected a new folder")
    lists = read_json(values) if values else {}
    if total_env_steps is not None:
        lists["total_env_steps"] = [total_env_steps]
    if make_env is not None:
        import_module(make_env.partition(":")[0])
        lists["env.id"] = [f"gymnasium:{make_env}"]
    grid.check_value_lists(lists)
    arms = [arm for preset in presets for arm in grid.make_grid_arms(get_preset(preset), lists)]
    used = [read_instance(Config, path).seed for path in directory.glob(f"*/{grid.TRIAL_FILE}")]
    trials.check_seeds_of_one_kind(directory, [*used, *seeds])
    trials.check_arms(arms)
    configs = [replace(config, seed=seed) for (_, config), seed in itertools.product(arms, seeds)]
    added = 0
    for config in configs:
        name = trials.prepare_trial_config(config, config.name, directory).name
        path = directory / f"s{config.seed:03d}-{name}-{config.total_env_steps}" / grid.TRIAL_FILE
        if not path.exists():
            grid.write_dataclass(path, config)
            added += 1
    return added


def list_trial_folders(directory: Path) -> list[Path]:
    """Return the directories of a sweep's trials, seed by seed.

    Raises:
        ValueError: the directory has no trials.
    """
    folders = sorted(path.parent for path in directory.glob(f"*/{grid.TRIAL_FILE}"))
    if not folders:
        raise ValueError(f"{directory} has no trials; expected a sweep of `phasicrl sweep make`")
    return folders


def run_sweep(
    directory: Path, *, jobs: int = 1, shard: str = "1/1", ray: tuple[str, ...] | None = None,
    cpus: int = 1, gpus: float = 0.0, on_trial: Callable[[str, str], None] = lambda id, state: None,
) -> None:  # fmt: skip
    """Train or resume the unfinished trials of a sweep or a search.

    Trials of other processes are skipped. SIGTERM and Ctrl-C stop all with a checkpoint.

    Args:
        directory: Directory of the sweep.
        jobs: Number of trials at a time on this machine; they share the cores.
        shard: I/N trains every N-th trial from the I-th on, on one of N machines.
        ray: Address of a Ray cluster that trains each trial as a task; empty: the current one.
        cpus: Number of cores of each trial on Ray.
        gpus: Number of GPUs of each trial on Ray, or a fraction.
        on_trial: called with name (and settings) and state of each finished trial.

    Raises:
        ValueError: a number is out of its range, or the directory is not a sweep.
        FailedTrialsError: some trials failed; all others were trained.
    """
    first, _, number = shard.partition("/")
    if not (first.isdecimal() and number.isdecimal() and 1 <= int(first) <= int(number)):
        raise ValueError(f"shard is {shard!r}; expected I/N with I from 1 to N, such as 1/4")
    folders = list_trial_folders(directory.resolve())[int(first) - 1 :: int(number)]
    for folder in folders:
        read_instance(Config, folder / grid.TRIAL_FILE).check_imports()
    if is_search := (directory / grid.SEARCH_FILE).is_file():  # it may come from somebody else
        from phasicrl.lab.sweeps.search import Search

        search = read_instance(Search, directory / grid.SEARCH_FILE)
        importing = {"env", "env.id", "imports"} & search.values.keys()
        grid.make_grid_arms(search.base, {path: search.values[path] for path in importing})
    unfinished = (x for x in folders if read_trial_outcome(x).state in ("pending", "stopped"))
    if ray is None:
        train = partial(train_trial, threads=trials.get_threads_per_job(jobs))
        outcomes = trials.run_in_processes(unfinished, train, jobs=jobs)
    else:
        outcomes = _run_on_ray(unfinished, ray[0] if ray else "auto", cpus, gpus)
    arms = {status.id: status.arm for status in get_trial_statuses(directory)}
    for folder, state in trials.yield_successes(outcomes):
        if is_search:  # the settings were chosen when the trial began
            arms = {status.id: status.arm for status in get_trial_statuses(directory)}
        on_trial(f"{folder.name} ({arms[folder.name]})", state)


def train_trial(folder: Path, *, threads: int | None = None) -> str:
    """Train or resume a trial; return its state, `running` in another process."""
    try:
        lock = RunLock(folder)
    except ValueError:
        return "running"
    with closing(lock):
        if not (folder / grid.OUTCOME_FILE).is_file():
            write_json(folder / grid.OUTCOME_FILE, _train_locked(folder, threads))
        return read_instance(grid.Outcome, folder / grid.OUTCOME_FILE).state


def _train_locked(folder: Path, threads: int | None) -> grid.Outcome:
    """Train or resume a trial locked by this process."""
    if (folder.parent / grid.SEARCH_FILE).is_file():
        from phasicrl.lab.sweeps.search import train_search_trial

        return train_search_trial(folder, threads=threads)
    config = read_instance(Config, folder / grid.TRIAL_FILE)
    config = trials.prepare_trial_config(config, config.name, folder, threads=threads)
    return grid.Outcome("diverged" if "diverged" in trials.train_or_resume(config).card else "done")


def _run_on_ray(
    folders: Iterable[Path], address: str, cpus: int, gpus: float
) -> Iterator[tuple[Path, str | trials.Failure]]:
    """Train each trial as a task of a Ray cluster, which restarts tasks of lost nodes."""
    ray = import_optional("ray", "this needs Ray", "ray")
    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    task = ray.remote(num_cpus=cpus, num_gpus=gpus, scheduling_strategy="SPREAD")(train_trial)
    running = {task.remote(folder, threads=cpus): folder for folder in folders}
    try:
        while running:
            (ended,), _ = ray.wait([*running], num_returns=1)
            try:
                outcome = ray.get(ended)
            except ray.exceptions.RayError as error:
                outcome = trials.Failure(str(error).strip().splitlines()[-1])
            yield running.pop(ended), outcome
    finally:
        for each in running:  # none, unless interrupted: then each saves its run
            ray.cancel(each)
        if running:
            ray.wait([*running], num_returns=len(running))


def read_trial_outcome(folder: Path) -> grid.Outcome:
    """Read the outcome of a trial; without one, the state pending, running or stopped."""
    if (folder / grid.OUTCOME_FILE).is_file():
        return read_instance(grid.Outcome, folder / grid.OUTCOME_FILE)
    if RunLock.is_held(folder):
        return grid.Outcome("running")
    return grid.Outcome("stopped" if any(folder.glob("runs/*")) else "pending")


class TrialStatus(NamedTuple):
    """Progress of a trial.

    Attributes:
        id: name of the trial's directory.
        arm: settings that differ among the trials; the name of the preset if none does. In a
            search, what is wrong with settings that do not fit, or that there are none yet.
        task: environment.
        state: pending, running, stopped, or the state of its outcome.
        env_steps: environment steps of its runs so far.
        return_100: last mean return of 100 episodes, averaged over its runs; None without one.
        score: score of its outcome.
        shared_settings_text: name of the preset and settings that all trials share.
        import_flags: options of the command line that import its modules.
    """

    id: str
    arm: str
    task: str
    state: str
    env_steps: int
    return_100: float | None
    score: float | None
    shared_settings_text: str
    import_flags: str


def get_trial_statuses(directory: Path) -> list[TrialStatus]:
    """Return state, steps and last return of each trial in a sweep.

    Args:
        directory: Directory of the sweep.

    Raises:
        ValueError: the directory is not a sweep, or a file in it is damaged.
    """
    configs = {x: read_instance(Config, x / grid.TRIAL_FILE) for x in list_trial_folders(directory)}
    tasks = {folder: make_task(config.env.id, config) for folder, config in configs.items()}
    outcomes = {folder: read_trial_outcome(folder) for folder in configs}
    # In a search, the file of a trial that has not begun or cannot be made has the base's options.
    is_search = (directory / grid.SEARCH_FILE).is_file()
    notes = {x: outcome.reason or "no settings yet" for x, outcome in outcomes.items()
             if outcome.reason or (is_search and outcome.state == "pending")}  # fmt: skip
    arms = {x: arm for x, arm in label_configs(configs, tasks).items() if x not in notes}
    known = {folder: config for folder, config in configs.items() if folder not in notes} or configs
    first, *others = [_format_changes_from_preset(config) for config in known.values()]
    shared = ", ".join(text for text in first if all(text in other for other in others))
    return [
        TrialStatus(x.name, arm, str(tasks[x]), *_read_trial_progress(x, outcomes[x]), shared,
                    configs[x].import_flags)
        for x, arm in (arms | notes).items()
    ]  # fmt: skip


def _format_changes_from_preset(config: Config) -> list[str]:
    """List the name of a configuration, and the options that differ from its preset."""
    usual = (PRESETS[config.name].config if config.name in PRESETS else Config()).values()
    return [config.name, *(
        format_setting(path, value) for path, value in config.values().items()
        if path not in ("name", "seed", "env.id") and value != usual.get(path)
    )]  # fmt: skip


def _read_trial_progress(
    folder: Path, outcome: grid.Outcome
) -> tuple[str, int, float | None, float | None]:
    """Return state, steps, last return and score of the trial in a directory."""
    steps, returns = 0, list[float]()
    for run in folder.glob("runs/*"):
        rows = RunDirectory(run).last_rows(5)  # in the last of which no episode may have ended
        steps += rows[-1]["env_steps"] if rows else 0
        last = [row[trials.RETURN] for row in rows if isinstance(row.get(trials.RETURN), float)]
        returns += last[-1:]
    return outcome.state, steps, sum(returns) / len(returns) if returns else None, outcome.score
