"""Files of a sweep's trials, and grids of configurations. Kind: effects (writes files)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from phasicrl import Config
from phasicrl.config import format_value
from phasicrl.config_io import write_json
from phasicrl.runs.directory import RunDirectory

TRIAL_FILE, OUTCOME_FILE, SEARCH_FILE = "trial.json", "outcome.json", "search.json"
DEFAULT_SEEDS = (1, 2, 3)
"""Default seeds of a sweep, for choosing settings."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a finished trial, as in `outcome.json`.

    Attributes:
        state: `done` or `diverged`; in a search Optuna's `complete`, `pruned` or `fail`.
        score: in a search, interquartile mean over the seeds of the return; else None.
        reason: in a search, why the chosen settings could not be trained; else empty.
    """

    state: str = "done"
    score: float | None = None
    reason: str = ""


def check_value_lists(values: Mapping[str, Any]) -> None:
    """Raise a ValueError if an option's values are no list, or an empty one."""
    for path, listed in values.items():
        if not isinstance(listed, list) or not listed:
            raise ValueError(f"{path} is {listed!r}; expected a list of values")


def make_grid_arms(base: Config, values: Mapping[str, Sequence[Any]]) -> list[tuple[str, Config]]:
    """Make an arm, name and configuration, for each combination of values, see `make_arm`.

    Raises:
        ValueError: see `make_arm`; two arms differ only in how they are executed or recorded; or
            the module of an environment is not imported.
    """
    arms = [make_arm(base, dict(zip(values, x, strict=True))) for x in product(*values.values())]
    names: dict[str, str] = {}
    for name, config in arms:
        config.check_imports()
        other = names.setdefault(f"{config.identity()} {config.total_env_steps}", name)
        if other != name:
            rule = "values that change what is learned. Make a sweep for each"
            raise ValueError(f"{other} and {name} are one experiment; expected {rule}")
    return arms


def make_arm(base: Config, values: Mapping[str, Any]) -> tuple[str, Config]:
    """Make an arm with these values of options, and name it by all but the environment.

    Raises:
        ValueError: an option is unknown or set by the sweep, or values do not fit together; the
            message names the arm.
    """
    changes = {path: tuple(x) if isinstance(x, list) else x for path, x in values.items()}
    words = [f"{path}={format_value(x)}" for path, x in changes.items() if path != "env.id"]
    arm = " ".join([base.name, *words])
    try:
        if taken := [x for x in ("seed", "name", "output_dir", "log.console") if x in changes]:
            raise ValueError(f"{taken[0]} is set by the sweep; expected others. Leave it out")
        config = base.with_updates(changes)
    except ValueError as error:
        raise ValueError(f"{arm}: {error}") from None
    if config.init_from and (path := RunDirectory(Path(config.init_from)).path).exists():
        config = replace(config, init_from=str(path.resolve()))  # whatever the current folder is
    return arm, config


def write_dataclass(path: Path, value: Any) -> None:
    """Write a dataclass as a JSON file, and create its parent directory if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, value)
