"""Run directory: reading and writing the files of a run. Kind: effects (files).

Only functions on tensors and checkpoints import torch, so that `phasicrl plot` starts quickly.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phasicrl import config_io
from phasicrl.config import EXECUTION_OPTIONS, Config, format_value
from phasicrl.config_io import SCHEMA, atomic_write, read_instance, read_json, write_json

if TYPE_CHECKING:
    from torch import Tensor


CONFIG_FILE, CARD_FILE, METRICS_FILE = "config.json", "card.json", "metrics.jsonl"
EPOCHS_FILE = "epochs.jsonl"
AGENTS_FOLDER = Path(__file__).parents[1] / "agents"
"""Agents that come with phasicrl, by their presets."""
WeightsKind = Literal["last", "best"]
WEIGHTS_FILE, BEST_FILE = "agent.safetensors", "best.safetensors"
_WEIGHTS_FILES: dict[WeightsKind, str] = {"last": WEIGHTS_FILE, "best": BEST_FILE}
POSITION_FIELDS = ("env_steps", "iteration", "phase")
"""Fields of a row of metrics that give its position in the run."""
USER_OBJECTS = {
    "make_env": "environment", "make_vector_env": "environment", "make_encoder": "encoder",
    "make_head": "head", "mask_actions": "mask", "callbacks": "callbacks", "schedule": "schedule",
}  # fmt: skip
"""Arguments of `train` for custom objects, and their kinds. Callbacks are not in `card.json`."""


def get_user_objects(
    given: Mapping[str, Any], names: Collection[str] = USER_OBJECTS
) -> dict[str, Any]:
    """Return the custom objects by name, with None for those of `names` that are not given.

    Raises:
        TypeError: an object has another name.
        ValueError: an object other than `callbacks` is not callable.
    """
    for name, value in given.items():
        if name not in names:
            hint = config_io.suggest_name(name, names)
            if name == "total_env_steps":
                hint = ". Set it in the Config; phasicrl.resume(RUN, total_env_steps=…) trains on"
            raise TypeError(f"{name} is given; expected {', '.join(names)}{hint}")
        if value is not None and name != "callbacks" and not callable(value):
            raise ValueError(f"{name} is {value!r}; expected a function or a class")
    return {**dict.fromkeys(names), **given}


_CARD_TYPES: dict[str, type[Any]] = {"run": str, "env_steps": int, "resumed": list, "command": list}
_CARD_TYPES |= dict.fromkeys(("own", "spaces", "machine", "versions"), dict)
"""Types of the entries of `card.json` that are read again."""
_MUTABLE_OPTIONS = (*EXECUTION_OPTIONS, "stop_at_return")
"""Path prefixes of options that may change when a run is resumed."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Directory of one run, and access to its files.

    Attributes:
        path: path of the directory; `~` is the home directory.
    """

    path: Path

    def __post_init__(self) -> None:
        """Convert a text to a path.

        Raises:
            ValueError: it is neither a text nor a path.
        """
        if not isinstance(self.path, str | PathLike):
            raise ValueError(f"run_dir is of type {type(self.path).__name__}; expected a path")
        object.__setattr__(self, "path", Path(self.path).expanduser().absolute())

    @classmethod
    def make(cls, config: Config) -> RunDirectory:
        """Make a new directory in `output_dir`.

        Raises:
            ValueError: the directory cannot be made.
        """
        folder = Path(config.output_dir).expanduser()
        stem = f"{RunDirectory.format_folder_prefix(config)}_{datetime.now():%Y%m%d-%H%M%S}"
        for number in itertools.count(1):
            path = folder / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(parents=True)
            except OSError as error:
                if path.is_dir():
                    continue
                rule = f"a folder in which {path} can be made ({error.strerror}). Choose another"
                raise ValueError(f"output_dir is {config.output_dir}; expected {rule}") from None
            break
        return cls(path)

    @staticmethod
    def format_folder_prefix(config: Config, separator: str = "_") -> str:
        """Return experiment, environment and seed, with which names of folders begin."""
        env = re.sub(r"[<>/]+", "-", config.env.id.rpartition(":")[2])[:100]
        return separator.join([config.name, env, f"s{config.seed}"])

    @staticmethod
    def find_matching_runs(config: Config) -> list[RunDirectory]:
        """Find the runs of this experiment, seed and length in `output_dir`, oldest first.

        Those of other versions of phasicrl, whose configuration has another schema, are skipped.
        """

        def make_run_key(config: Config) -> tuple[object, ...]:
            return config.identity(), config.name, config.seed, config.total_env_steps

        pattern = f"{glob.escape(RunDirectory.format_folder_prefix(config))}_*/{CONFIG_FILE}"
        runs, wanted = list[RunDirectory](), make_run_key(config)
        for file in sorted(Path(config.output_dir).expanduser().glob(pattern)):
            if (schema := read_json(file).get("schema", SCHEMA)) != SCHEMA:
                warnings.warn(f"{file} is skipped: schema is {schema}, not {SCHEMA}", stacklevel=2)
            elif make_run_key((run := RunDirectory(file.parent)).config) == wanted:
                runs.append(run)
        return runs

    @classmethod
    def find(cls, path_or_preset: Path | str) -> RunDirectory:
        """Return the run directory at a path, or that of an agent of phasicrl, by its preset."""
        given = cls(path_or_preset)  # pyright: ignore[reportArgumentType]
        agent = cls(AGENTS_FOLDER / path_or_preset)
        return agent if agent.has_config and not given.has_config else given

    @property
    def has_config(self) -> bool:
        """True for the directory of a run, which has `config.json`."""
        return (self.path / CONFIG_FILE).is_file()

    @property
    def config(self) -> Config:
        """Configuration of the run.

        Raises:
            ValueError: the directory has no configuration, or one that cannot be read.
        """
        self._check_is_run()
        return read_instance(Config, self.path / CONFIG_FILE)

    @property
    def output_folder(self) -> Path:
        """Folder for new files: the run directory, or for an agent of phasicrl `./NAME`."""
        return Path(self.path.name) if self.path.parent == AGENTS_FOLDER else self.path

    def load_config(self, **user_objects: object) -> Config:
        """Return the configuration after checking that the run can be used.

        Args:
            user_objects: custom objects, or None, by the names in `USER_OBJECTS`.

        Raises:
            ValueError: the configuration is missing, cannot be read, or imports a module that the
                user has not imported; a custom object is missing; or the directory contains links.
        """
        self._check_is_run()
        self.reject_special_files()
        for name, used in dict(self.card.get("own") or {}).items():
            kind = USER_OBJECTS.get(name)
            names = [other for other in user_objects if USER_OBJECTS[other] == kind]
            if names and all(user_objects[other] is None for other in names):
                raise ValueError(
                    f"{self.path} was trained with {name}={used}; expected the same {kind}. Give "
                    f"{'--make-env MODULE:FUNCTION, or ' * (kind == 'environment')}"
                    f"{' or '.join(f'{other}=…' for other in names)} in a call from Python, such "
                    "as phasicrl.train, phasicrl.resume, phasicrl.evaluate or phasicrl.load"
                )
        (config := self.config).check_imports(self.path / CONFIG_FILE)
        return config

    @property
    def env_id(self) -> str:
        """Id of the run's environment with its back end, such as `gymnasium:CartPole-v1`."""
        return str(self.card.get("environment") or self.config.env.id)

    @property
    def card(self) -> dict[str, Any]:
        """Content of `card.json`, such as versions, machine and seed; empty without the file.

        Raises:
            ValueError: the card is damaged.
        """
        path = self.path / CARD_FILE
        card = read_json(path) if path.exists() else {}
        for name, kind in _CARD_TYPES.items():
            if not isinstance(card.get(name) or kind(), kind):
                given = f"{path} is damaged: {name} is {card[name]!r}"
                raise ValueError(f"{given}; expected {kind.__name__}. Restore or remove the file")
        return card

    def write_card(self, card: dict[str, Any]) -> None:
        """Replace `card.json` atomically."""
        write_json(self.path / CARD_FILE, card)

    def write_config(self, config: Config) -> None:
        """Replace `config.json` atomically."""
        write_json(self.path / CONFIG_FILE, config)

    def metrics(self, *names: str) -> list[dict[str, float]]:
        """Read `metrics.jsonl` as a list of rows, one for each iteration; null is NaN.

        An incomplete last line is ignored. Lines of one iteration are merged.

        Args:
            names: metrics to return besides `POSITION_FIELDS`, since all metrics of a long run are
                a gigabyte; none returns all.

        Raises:
            ValueError: the directory has no metrics yet, or a line before the last is damaged.
        """
        rows: list[dict[str, float]] = []
        damaged, wanted, path = 0, {*names, *POSITION_FIELDS}, self.path / METRICS_FILE
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if damaged:
                    given = f"line {damaged} of {path} is damaged"
                    raise ValueError(f"{given}; expected a JSON object. Remove or restore it")
                if (row := _parse_json_row(line)) is None:
                    damaged = number
                    continue
                selected = {name: row[name] for name in row if not names or name in wanted}
                values = {name: math.nan if x is None else x for name, x in selected.items()}
                if rows and rows[-1]["iteration"] == values["iteration"]:
                    rows[-1].update(values)
                else:
                    rows.append(values)
        if not rows:
            self._check_is_run()
            raise ValueError(f"{self.path} has no data; expected a finished iteration. Train on")
        return rows

    def last_rows(self, count: int) -> list[dict[str, Any]]:
        """Read the last rows of `metrics.jsonl`, at most `count`, from the end of the file.

        Rows may have 64 KiB each, some 1,500 metrics.
        """
        path = self.path / METRICS_FILE
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 65_536 * count))
            lines = file.read().decode(errors="replace").splitlines()[-count:]
        return [row for line in lines if (row := _parse_json_row(line)) is not None]

    @property
    def checkpoint_folder(self) -> Path:
        """Directory of the run's checkpoints."""
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> list[Path]:
        """Paths of the run's complete checkpoints, oldest first."""
        from phasicrl.runs.checkpoint import list_checkpoints

        return list_checkpoints(self.checkpoint_folder)

    def load_weights(self, which: WeightsKind = "last") -> dict[str, Tensor]:
        """Read the agent's `last` weights, or the `best` by the run's evaluations.

        Raises:
            ValueError: there are no weights yet, or the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        from phasicrl.runs.checkpoint import hash_tensors

        if which not in (*_WEIGHTS_FILES,):
            raise ValueError(f"weights is {which!r}; expected last or best")
        path = self.path / _WEIGHTS_FILES[which]
        if not path.is_file():
            self._check_is_run()
            when = "after the first checkpoint or at the end of the run. Train on"
            if which == "best":
                when = "after an evaluation of the run (evaluation.every_iterations)"
            raise ValueError(f"{self.path} has no {path.name}; expected {when}")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in list(file.keys())}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); expected weights. Restore it") from None
        if metadata.get("sha256") != hash_tensors(weights, metadata.get("env_steps", "")):
            raise ValueError(f"{path} is damaged; expected the weights as saved. Restore it")
        return weights

    def weights_env_steps(self, which: WeightsKind = "last") -> int:
        """Return the number of environment steps after which the weights were saved."""
        from safetensors import safe_open

        with safe_open(self.path / _WEIGHTS_FILES[which], "pt") as file:
            return int((file.metadata() or {})["env_steps"])

    def save_weights(
        self, weights: dict[str, Tensor], *, env_steps: int, which: WeightsKind = "last"
    ) -> None:
        """Replace the agent's weights atomically."""
        from phasicrl.runs.checkpoint import hash_tensors, save_tensors

        steps = str(env_steps)
        metadata = {"env_steps": steps, "sha256": hash_tensors(weights, steps)}
        separate = {name: weight.clone() for name, weight in weights.items()}  # of tied layers
        with atomic_write(self.path / _WEIGHTS_FILES[which]) as temporary:
            save_tensors(separate, temporary, metadata=metadata)

    def reject_special_files(self) -> None:
        """Check that the directory, its folders and its checkpoints have no links or special files.

        Symbolic links could lead out of the directory, and reading a pipe could block. Other deeper
        levels and `wandb` are not checked.

        Raises:
            ValueError: there is a link or another special file.
        """
        names: list[str] = []
        for pattern in ("*", "*/*", "checkpoints/*/*"):
            # Unlike `Path.glob`, this allows a checkpoint to be deleted meanwhile.
            names += glob.glob(pattern, root_dir=self.path, include_hidden=True)
        for path in map(self.path.joinpath, names):
            if "wandb" in path.parts:  # Weights & Biases links its newest files
                continue
            is_special = path.is_fifo() or path.is_socket() or path.is_char_device()
            if path.is_symlink() or is_special or path.is_block_device():
                what = "link" if path.is_symlink() else "special file"
                raise ValueError(f"{path} is a {what}; expected files and folders only. Remove it")

    def check_changes(
        self, old_config_json: str, now: Config, own: dict[str, str], *, accept: bool
    ) -> list[str]:
        """List options that differ from a checkpoint's, and custom objects that have other names.

        Changes of `_MUTABLE_OPTIONS` are left out.

        Args:
            old_config_json: configuration of the checkpoint.
            now: configuration in config.json, with the length that `resume` was given, if any.
            own: custom objects as described in card.json.
            accept: whether differences are accepted.

        Returns:
            A text for each, with both values.

        Raises:
            ValueError: options differ, besides a length given to `resume`, and are not accepted.
        """
        used = self.card.get("own") or {}
        old, new = Config.from_json(old_config_json).values() | used, now.values() | own
        changes = {
            path: f"{path} was {format_value(old.get(path))} and is {format_value(new.get(path))}"
            for path in {**old, **new}
            if old.get(path) != new.get(path) and not path.startswith(_MUTABLE_OPTIONS)
        }
        # The length was given to `resume`, now or before a crash, and not edited in the file.
        in_file, on_card = self.config.total_env_steps, self.card.get("total_env_steps")
        is_given = in_file in (on_card, old["total_env_steps"])
        allowed = {*USER_OBJECTS, *["total_env_steps"] * is_given}
        refused = [changes[path] for path in changes if path not in allowed]
        if refused and not accept:
            given = f"{self.path / CONFIG_FILE} has changed since the checkpoint"
            rule = "no changes. Restore it, or set accept_config_changes"
            raise ValueError(f"{given} ({', '.join(refused)}); expected {rule}")
        return [*changes.values()]

    def check_spaces(
        self, spaces: Mapping[str, str], trained: Mapping[str, str] = {},
        name: str = "this environment",
    ) -> None:  # fmt: skip
        """Check that environments have the spaces of the training; warn of other bounds.

        EnvPool's and Gymnasium's form of an environment may have floats of different widths.

        Args:
            spaces: parts of the spaces of the environments, from `describe_spaces`.
            trained: those of the training; empty for those in `card.json`.
            name: name of the environments, for the message.

        Raises:
            ValueError: kind or shape of a part differs; the message has both.
        """
        source = "the training has" if trained else f"{self.path / CARD_FILE} says"
        trained = trained or self.card.get("spaces") or spaces
        if trained.keys() != spaces.keys():
            old, new = (", ".join(f"{part} {x[part]}" for part in x) for x in (trained, spaces))
            raise ValueError(f"{source} {old}, and {name} has {new}; expected the same")
        both = [(part, str(trained[part]), spaces[part]) for part in spaces]
        wide = "float64", "float32"  # read as float32, and given as the environment wants it
        text = "; ".join(
            f"{source} {part} {before}, and {name} has {now}"
            for part, before, now in both if before.replace(*wide) != now.replace(*wide)
        )  # fmt: skip
        if any(old.split(" of ")[0] != new.split(" of ")[0] for _, old, new in both):
            raise ValueError(f"{text}; expected the same")
        if text:
            warnings.warn(text, stacklevel=2)

    def _check_is_run(self) -> None:
        """Check that the directory is a run directory.

        Raises:
            ValueError: the directory has no configuration.
        """
        if self.has_config:
            return
        names = ", ".join(sorted(path.name for path in AGENTS_FOLDER.iterdir()))
        hint = f"a folder that `phasicrl train` made, or an agent ({names})"
        if inside := next(self.path.glob(f"*/{CONFIG_FILE}"), None):
            hint = f"a run directory in it, such as {inside.parent}, or for plots {self.path}/*"
        text = f"{self.path} is not a run directory, it has no {CONFIG_FILE}"
        raise ValueError(f"{text}; expected {hint}")


def _parse_json_row(line: str) -> dict[str, Any] | None:
    """Parse a row of metrics; return None if it is incomplete, or if values are not numbers."""
    try:
        row = json.loads(line)
        is_valid = all(x is None or math.isfinite(x) for x in row.values())
        return row if is_valid and row["env_steps"] >= 0 <= row["iteration"] else None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return None
