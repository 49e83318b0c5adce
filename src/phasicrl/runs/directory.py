"""The files of a run: the one reader and writer of a run directory. Kind: effects (files).

Only what reads or writes tensors imports torch, so that `phasicrl plot` starts quickly.
"""

from __future__ import annotations

import glob
import itertools
import json
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from phasicrl.config import Config, check_imports, format_value
from phasicrl.config_io import atomic_write, read_json, read_options, write_json

if TYPE_CHECKING:
    from torch import Tensor


CONFIG_FILE, CARD_FILE, METRICS_FILE = "config.json", "card.json", "metrics.jsonl"
EPOCHS_FILE = "epochs.jsonl"
WeightsKind = Literal["last", "best"]
WEIGHTS_FILE, BEST_FILE = "agent.safetensors", "best.safetensors"
_WEIGHTS: dict[WeightsKind, str] = {"last": WEIGHTS_FILE, "best": BEST_FILE}
PLACE = ("env_steps", "iteration", "phase")
"""Fields of a row of metrics that give its place in the run."""
USER_OBJECTS = {
    "make_env": "environment", "make_vector_env": "environment", "make_encoder": "encoder",
    "mask_actions": "mask",
}  # fmt: skip
"""Arguments of `train` for objects of the user, and the words for them in `card.json`."""
_MAY_CHANGE = (
    "name", "output_dir", "env.num_threads", "env.parallel", "env.max_restarts",
    "compute", "log", "checkpoint", "evaluation",
)  # fmt: skip
"""Beginnings of the paths of options that may change when a run is resumed."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The folder of one run.

    Attributes:
        path: path of the folder.
    """

    path: Path

    @classmethod
    def make(cls, config: Config) -> RunDirectory:
        """Make a new folder under `output_dir` and write the configuration into it.

        Raises:
            ValueError: it cannot be made there.
        """
        stem = f"{_stem(config)}_{datetime.now():%Y%m%d-%H%M%S}"
        for number in itertools.count(1):
            path = Path(config.output_dir) / (stem if number == 1 else f"{stem}-{number}")
            try:
                path.mkdir(parents=True)
            except OSError as error:
                if path.is_dir():
                    continue
                raise ValueError(
                    f"output_dir is {config.output_dir}; {path} cannot be made there: "
                    f"{error.strerror}. Choose another."
                ) from None
            break
        made = cls(path)
        try:
            made.write_config(config)
        except BaseException:
            shutil.rmtree(path)
            raise
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
        return read_options(Config, self.path / CONFIG_FILE)

    def config_for(self, **given: object) -> Config:
        """Return the configuration after checking that the run can be used here.

        Args:
            given: objects of the user, or None, by the names in `USER_OBJECTS`.

        Raises:
            ValueError: not a run directory; its configuration cannot be read, or imports a module
                that the user did not name; an object that the run was trained with is missing; or
                there are links in the directory.
        """
        self._check()
        self.check_special_files()
        for what in self.card.get("own", ()):
            ways = [way for way, of in USER_OBJECTS.items() if of == what and way in given]
            if ways and all(given[argument] is None for argument in ways):
                raise ValueError(
                    f"{self.path} was trained with a user-defined {what}; "
                    f"call this from Python with {' or '.join(f'{way}=…' for way in ways)}"
                )
        config = self.config
        try:
            check_imports(config)
        except ValueError as error:
            raise ValueError(f"{self.path / CONFIG_FILE}: {error}") from None
        return config

    @property
    def env_id(self) -> str:
        """Full id of the run's environment."""
        return str(self.card.get("environment") or self.config.env.id)

    @property
    def card(self) -> dict[str, Any]:
        """How the run was made: versions, machine, seed; empty without a card.

        Raises:
            ValueError: the card is damaged.
        """
        path = self.path / CARD_FILE
        return read_json(path) if path.exists() else {}

    def write_card(self, card: dict[str, Any]) -> None:
        """Replace `card.json` atomically."""
        write_json(self.path / CARD_FILE, card)

    def write_config(self, config: Config) -> None:
        """Replace `config.json` atomically."""
        write_json(self.path / CONFIG_FILE, config)

    def metrics(self, *names: str) -> list[dict[str, float]]:
        """Read the rows of `metrics.jsonl`: null is NaN; a torn last line is left out.

        Args:
            names: metrics to keep, besides the fields of `PLACE`; none keeps all. A long run has a
                gigabyte of them.

        Raises:
            ValueError: not a run directory, no rows yet, or a line before the last is damaged.
        """
        rows: list[dict[str, float]] = []
        torn, wanted, path = 0, {*names, *PLACE}, self.path / METRICS_FILE
        with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, start=1):
                if torn:
                    raise ValueError(f"line {torn} of {path} is damaged. Remove it or restore it.")
                if (row := _read_row(line)) is None:
                    torn = number
                    continue
                kept = row.items() if not names else ((n, row[n]) for n in row if n in wanted)
                rows.append({name: math.nan if x is None else x for name, x in kept})
        if not rows:
            self._check()
            raise ValueError(
                f"{self.path} has no data yet: its first iteration is not finished. Try it later."
            )
        return rows

    def last_rows(self, count: int) -> list[dict[str, Any]]:
        """Read the last rows of `metrics.jsonl`, at most `count`, without those before."""
        path = self.path / METRICS_FILE
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096 * count))
            lines = file.read().decode(errors="replace").splitlines()[-count:]
        return [row for line in lines if (row := _read_row(line)) is not None]

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        from phasicrl.runs.checkpoint import checkpoints

        return checkpoints(self.checkpoint_folder)

    def weights(self, which: WeightsKind = "last") -> dict[str, Tensor]:
        """Read the agent's last weights, or the best by the run's evaluations.

        Raises:
            ValueError: there are none yet, or the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        from phasicrl.runs.checkpoint import digest_of_tensors

        path = self.path / _WEIGHTS[which]
        if not path.is_file():
            self._check()
            when = "with the first checkpoint and at the end of the run"
            if which == "best":
                when = "by the evaluations of a run (evaluation.every_iterations)"
            raise ValueError(f"{self.path} has no {path.name} yet: it is written {when}")
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                weights = {name: file.get_tensor(name) for name in list(file.keys())}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        if about.get("sha256") != digest_of_tensors(weights, about.get("env_steps", "")):
            raise ValueError(f"{path} is damaged: it was changed since it was saved")
        return weights

    def steps_of_weights(self, which: WeightsKind = "last") -> int:
        """Return the environment steps after which the weights were saved."""
        from safetensors import safe_open

        with safe_open(self.path / _WEIGHTS[which], "pt") as file:
            return int((file.metadata() or {})["env_steps"])

    def save_weights(
        self, weights: dict[str, Tensor], *, env_steps: int, which: WeightsKind = "last"
    ) -> None:
        """Replace the agent's weights atomically."""
        from phasicrl.runs.checkpoint import digest_of_tensors, save_tensors

        steps = str(env_steps)
        about = {"env_steps": steps, "sha256": digest_of_tensors(weights, steps)}
        with atomic_write(self.path / _WEIGHTS[which]) as temporary:
            save_tensors(weights, temporary, about=about)

    def check_special_files(self) -> None:
        """Refuse links, which lead elsewhere, and pipes, which block whoever opens them."""
        for path in (*self.path.glob("*"), *self.path.glob("*/*")):
            if "wandb" in path.parts:  # Weights & Biases links its newest files
                continue
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                what = "link" if path.is_symlink() else "special file"
                raise ValueError(f"{path} is a {what}; a run directory may hold none: remove it")

    def check_unchanged(self, config: str) -> None:
        """Refuse a configuration other than the checkpoint's.

        Args:
            config: configuration of the checkpoint, as JSON.

        Raises:
            ValueError: every option that has changed, with both values.
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
                f"{', '.join(changed)}. Restore it, or accept the changes "
                "(resume --accept-config-changes)."
            )

    def _check(self) -> None:
        """Refuse a folder that is not a run directory."""
        if (self.path / CONFIG_FILE).is_file():
            return
        hint = "give folders that `phasicrl train` made"
        if any(self.path.glob(f"*/{CONFIG_FILE}")):
            hint = f"it holds run directories: give {self.path}/*"
        raise ValueError(f"{self.path} is not a run directory, it has no {CONFIG_FILE}; {hint}")


def _read_row(line: str) -> dict[str, Any] | None:
    """Read a row of metrics; None if the line is torn."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and "env_steps" in row else None


def _stem(config: Config) -> str:
    """Return the beginning of a run directory's name: experiment, environment, seed."""
    env = config.env.id.rpartition(":")[2].replace("/", "-")
    return f"{config.name}_{env}_s{config.seed}"
