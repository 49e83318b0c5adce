"""The files of a run: the one reader and writer of a run directory. Kind: effects (files).

torch is imported only where tensors are read or written, so that `phasicrl plot` is quick.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phasicrl.config import Config, check_imports, format_value
from phasicrl.config_io import read_json, read_text, replacing, to_tree, write_json

if TYPE_CHECKING:
    from torch import Tensor


CONFIG_FILE, CARD_FILE, METRICS_FILE = "config.json", "card.json", "metrics.jsonl"
EPOCHS_FILE = "epochs.jsonl"
WEIGHTS_FILE, BEST_FILE = "agent.safetensors", "best.safetensors"
WeightsKind = Literal["last", "best"]
PLACE = ("env_steps", "iteration", "phase")
"""What says where a row of metrics belongs."""
OWN_OBJECTS = {
    "make_env": "environment",
    "make_vector_env": "environment",
    "make_encoder": "encoder",
    "mask_actions": "mask",
}
"""What a user may pass as an object: the argument's name, and the word for it in `card.json`."""
_MAY_CHANGE = (
    "name", "output_dir", "env.num_threads", "env.parallel", "env.max_restarts",
    "compute", "log", "checkpoint", "evaluation",
)  # fmt: skip
"""How the paths of knobs begin that may change between two parts of a run."""
_CARD_TYPES = {
    "run": str, "command": list, "resumed": list, "own": list, "env_steps": int, "machine": dict,
    "versions": dict,
}  # fmt: skip
"""Types of the values in `card.json` that are more than shown."""


def each_once(runs: Iterable[Path]) -> list[Path]:
    """Run directories without those that have come before, under whatever path."""
    first: dict[Path, Path] = {}
    for run in runs:
        first.setdefault(run.resolve(), run)
    return list(first.values())


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The folder of one run.

    Attributes:
        path: of the folder.
    """

    path: Path

    @classmethod
    def make(cls, config: Config) -> RunDirectory:
        """Make a new folder under `output_dir` and write the configuration into it.

        Raises:
            ValueError: it cannot be made there.
        """
        stem = f"{_stem(config)}_{datetime.now():%Y%m%d-%H%M%S}"
        path, number = Path(config.output_dir) / stem, 1
        while True:
            try:
                path.mkdir(parents=True)
                break
            except OSError as error:
                if not path.is_dir():
                    raise ValueError(
                        f"cannot make the run directory {path}: {error.strerror}; "
                        "choose another output_dir"
                    ) from None
            number += 1
            path = path.with_name(f"{stem}-{number}")
        made = cls(path)
        made.write_config(config)
        return made

    @staticmethod
    def of(config: Config) -> list[RunDirectory]:
        """Find the runs under `output_dir` of this experiment, seed and length, oldest first."""

        def key(config: Config) -> tuple[object, ...]:
            return config.identity(), config.name, config.seed, config.total_env_steps

        pattern = f"{glob.escape(_stem(config))}_*/{CONFIG_FILE}"
        files = sorted(Path(config.output_dir).glob(pattern))
        runs = [RunDirectory(file.parent) for file in files]
        return [run for run in runs if key(run.config) == key(config)]

    @property
    def config(self) -> Config:
        """The configuration of the run.

        Raises:
            ValueError: not a run directory, or its configuration cannot be read.
        """
        self._check()
        return read_config(self.path / CONFIG_FILE)

    def config_for(self, **given: object) -> Config:
        """The configuration, for somebody who is about to use what it names.

        Args:
            given: by the names in `OWN_OBJECTS`, what is brought of one's own, or None.

        Raises:
            ValueError: not a run directory, its configuration cannot be read or names a module that
                nobody asked for, the run had an object of its user's own that is missing here, or
                something in its directory is a link, which could lead anywhere.
        """
        self._check()
        self.refuse_special_files()
        for what in self.card.get("own", ()):
            ways = [way for way, of in OWN_OBJECTS.items() if of == what and way in given]
            if ways and all(given[argument] is None for argument in ways):
                way = " or ".join(f"{argument}=…" for argument in ways)
                raise ValueError(
                    f"{self.path} was trained with a user-defined {what}; "
                    f"call this from Python with {way}"
                )
        config = self.config
        try:
            check_imports(config)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from None
        return config

    @property
    def env_id(self) -> str:
        """Which environment the run trains in, however its id was spelled.

        Raises:
            ValueError: not a run directory, or its configuration or card cannot be read.
        """
        return str(self.card.get("environment") or self.config.env.id)

    @property
    def card(self) -> dict[str, Any]:
        """What is known of how the run was made; nothing if it has no card.

        Raises:
            ValueError: it is damaged.
        """
        path = self.path / CARD_FILE
        card = read_json(path) if path.exists() else {}
        for name, kind in _CARD_TYPES.items():
            if name in card and not isinstance(card[name], kind):
                raise ValueError(
                    f"{path} is damaged: {name} is {card[name]!r}; expected {kind.__name__}. "
                    "Restore the file or remove it"
                )
        return card

    def write_card(self, card: dict[str, Any]) -> None:
        """Write what is known of how the run was made, replacing the file at once."""
        self.write_json(CARD_FILE, card)

    def write_config(self, config: Config) -> None:
        """Write the configuration, replacing the file at once."""
        self.write_json(CONFIG_FILE, to_tree(config))

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Write an object as a file of the run, replacing what was there at once."""
        write_json(self.path / name, value)

    def metrics(self, *names: str) -> list[dict[str, float]]:
        """Read the rows of `metrics.jsonl`: null is NaN; a last line torn by a crash is left out.

        Args:
            names: of the metrics that are wanted, beside those that say where a row belongs; none
                is all. A long run has a gigabyte of them.

        Raises:
            ValueError: not a run directory, no rows yet, or a line before the last is damaged.
        """
        rows: list[dict[str, float]] = []
        damaged, wanted = 0, {*names, *PLACE}
        for number, line in enumerate(self._lines(), start=1):
            if damaged:
                where = f"line {damaged} of {self.path / METRICS_FILE}"
                raise ValueError(f"{where} is damaged; remove it, or restore the file")
            row = _read_row(line)
            if row is None:
                damaged = number  # or torn, if it is the last: the process died while it wrote
                continue
            if names:
                row = {name: row[name] for name in row if name in wanted}
            rows.append({name: math.nan if x is None else x for name, x in row.items()})
        if not rows:
            raise ValueError(
                f"{self.path} has no data yet: its first iteration is not finished; "
                "leave it out or try again later"
            )
        return rows

    def last_rows(self, count: int) -> list[dict[str, Any]]:
        """The last rows of `metrics.jsonl`, at most so many, without a look at those before."""
        path = self.path / METRICS_FILE
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096 * count))
            lines = file.read().decode(errors="replace").splitlines()[-count:]
        return [row for line in lines if (row := _read_row(line)) is not None]

    def _lines(self) -> Iterator[str]:
        """Yield the lines of `metrics.jsonl`; none if a run has just begun."""
        path = self.path / METRICS_FILE
        if not path.is_file():
            return self._check()
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from lines

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        from phasicrl.runs.checkpoint import checkpoints

        return checkpoints(self.checkpoint_folder)

    def weights(self, which: WeightsKind = "last") -> dict[str, Tensor]:
        """Read the agent's weights that were saved last, or the best by the run's evaluations.

        Raises:
            ValueError: there are none yet, or the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        from phasicrl.runs.checkpoint import digest_of_tensors

        path = self.path / (WEIGHTS_FILE if which == "last" else BEST_FILE)
        if not path.is_file():
            self._check()
            when = "with the first checkpoint and at the end of the run"
            if which == "best":
                when = "by the evaluations of a run (evaluation.every_iterations)"
            raise ValueError(f"{self.path} has no {path.name} yet: it is written {when}")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                names = list(file.keys())  # it is no mapping
                weights = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if about.get("sha256") != digest_of_tensors(weights, about.get("env_steps", "")):
            raise ValueError(
                f"{path} is damaged: it was changed since it was saved (its SHA-256 is another)"
            )
        return weights

    def steps_of_weights(self, which: WeightsKind = "last") -> int:
        """The environment steps after which the weights were saved."""
        from safetensors import safe_open

        with safe_open(self.path / (WEIGHTS_FILE if which == "last" else BEST_FILE), "pt") as file:
            return int((file.metadata() or {})["env_steps"])

    def save_weights(
        self, weights: dict[str, Tensor], *, env_steps: int, which: WeightsKind = "last"
    ) -> None:
        """Write the agent's weights, replacing the file at once, never in part."""
        from phasicrl.runs.checkpoint import digest_of_tensors, save_tensors

        steps = str(env_steps)
        about = {"env_steps": steps, "sha256": digest_of_tensors(weights, steps)}
        file = WEIGHTS_FILE if which == "last" else BEST_FILE
        with replacing(self.path / file) as temporary:
            save_tensors(weights, temporary, about=about)

    def refuse_special_files(self) -> None:
        """Refuse links, which lead elsewhere, and pipes, which block whoever opens them."""
        for path in (*self.path.glob("*"), *self.path.glob("*/*")):
            if "wandb" in path.parts:  # Weights & Biases links its newest files
                continue
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                what = "link" if path.is_symlink() else "special file"
                raise ValueError(f"{path} is a {what}; a run directory may hold none: remove it")

    def refuse_changes(self, config: str) -> None:
        """Refuse a configuration that is not the one that a checkpoint was trained with.

        Args:
            config: of the checkpoint, as JSON.

        Raises:
            ValueError: every knob that has changed, with both values.
        """
        before, now = Config.from_json(config).values(), self.config.values()
        changed = [
            f"{path} was {format_value(before.get(path))} and is {format_value(now.get(path))}"
            for path in {**before, **now}
            if before.get(path) != now.get(path) and not path.startswith(_MAY_CHANGE)
        ]
        if changed:
            raise ValueError(
                f"{self.path / CONFIG_FILE} has changed since the checkpoint was saved: "
                f"{', '.join(changed)}; put it back, or say --accept-config-changes"
            )

    def _check(self) -> None:
        """Refuse a folder that no run made."""
        if (self.path / CONFIG_FILE).is_file():
            return
        hint = "give folders that `phasicrl train` made"
        if self.path.is_dir() and any(self.path.glob(f"*/{CONFIG_FILE}")):
            hint = f"it holds run directories: give {self.path}/*"
        raise ValueError(f"{self.path} is not a run directory, it has no {CONFIG_FILE}; {hint}")


def read_config(file: Path) -> Config:
    """Read a configuration from a file.

    Raises:
        ValueError: it cannot be read as one; the message names the file.
        OSError: there is no such file.
    """
    try:
        return Config.from_json(read_text(file))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_row(line: str) -> dict[str, Any] | None:
    """Read a line of a file of metrics; None if it is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("env_steps")) is int
    return row if is_row and all(map(_is_metric, row.values())) else None


def _is_metric(value: object) -> bool:
    """Check for a number that fits into a float, or null."""
    is_number = type(value) is float or (type(value) is int and abs(value) < 2**1023)
    return value is None or is_number


def _stem(config: Config) -> str:
    """How the names of a configuration's directories begin: experiment, environment, seed."""
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    return f"{config.name}_{env}_s{config.seed}"
