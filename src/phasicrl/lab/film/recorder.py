"""Records of a run's periodic evaluations: tables of steps, and films.

Kind: effects (steps environments, writes files).
"""

from __future__ import annotations

import io
from typing import Any

from phasicrl.config import Config, Precision
from phasicrl.lab.film.filming import Film, film_episodes
from phasicrl.lab.film.step_table import StepTable
from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from phasicrl.seeding import derive_seed
from phasicrl.session.evaluation import levels_in


class Recorder:
    """Records the first episode of each periodic evaluation, as the configuration requests.

    Args:
        config: configuration of the run.
        files: run directory, where tables and films are written.
        log: receives the tables and the warnings.
        own: `make_env` or `make_vector_env`, see `evaluate`.
    """

    def __init__(self, config: Config, files: RunDirectory, log: MetricsLog, **own: Any) -> None:
        self._config, self._files, self._log, self._own = config, files, log, own
        self._films = config.evaluation.film
        self._start_table()

    def _start_table(self) -> None:
        self._text = io.StringIO(newline="")
        self._table = StepTable(self._text, only_first=True)

    def on_step(self, *step: Any) -> None:
        """Add one step of the environments to the table, if steps are recorded."""
        if self._config.evaluation.steps:
            self._table.add(levels_in(self._config.evaluation.levels)[0], *step)

    def write(self, agent: Agent, env_steps: int, precision: Precision) -> None:
        """Write the table and the film of an evaluation; a failure is a warning.

        Args:
            agent: evaluated agent, on the CPU.
            env_steps: environment steps of the run so far.
            precision: precision of the encoders.
        """
        if self._config.evaluation.steps:
            self._write_steps(env_steps)
        if self._films:
            self._film(agent, env_steps, precision)

    def _write_steps(self, env_steps: int) -> None:
        path = self._files.path / "evaluations" / f"{env_steps:012d}.csv"
        text = self._text.getvalue()
        self._start_table()
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            self._log.message(f"warning: no table of steps: {error}")
        else:
            self._log.episode(path, env_steps=env_steps)

    def _film(self, agent: Agent, env_steps: int, precision: Precision) -> None:
        evaluation = self._config.evaluation
        film = Film(
            policy=evaluation.policy, levels=levels_in(evaluation.levels)[0],
            seed=derive_seed(self._config.seed, "validation"), overlay=evaluation.overlay,
        )  # fmt: skip
        output = self._files.path / "videos" / f"{env_steps:012d}.mp4"
        try:
            film_episodes(
                lambda _: agent, self._config, output, film, precision=precision, **self._own
            )
        except Exception as error:  # the environment's renderer may raise any error
            self._films = isinstance(error, OSError)  # a full disk may have room later
            self._log.message(f"warning: no film: {error}")
