"""Evaluations in the middle of a run: on a copy of the agent, in environments of their own.

Kind: effects (steps environments, writes files).
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from phasicrl.config import Config, Levels, Precision
from phasicrl.distributed import World
from phasicrl.envs.protocol import VectorEnv
from phasicrl.learner import Record
from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from phasicrl.seeding import derive_seed
from phasicrl.session.evaluation import (
    Episodes,
    levels_in,
    make_evaluation_envs,
    mean_episode,
    play,
)
from phasicrl.session.filming import Film, film_episodes
from phasicrl.session.step_table import StepTable

_MOST_ENVS = 16
"""Side by side."""


class Validation:
    """What `config.evaluation` asks for.

    Args:
        config: of the run.
        files: its directory, which gets tables of steps and films.
        log: gets the steps, and says what could not be written.
        world: the processes that train it, which share the episodes.
        own: what the user brought, by the names of `train`'s arguments.
    """

    def __init__(
        self,
        config: Config,
        files: RunDirectory,
        log: MetricsLog,
        world: World,
        own: Mapping[str, Any],
    ) -> None:
        self._config, self._files, self._log, self._world = config, files, log, world
        self._own = {name: own[name] for name in ("make_env", "make_vector_env")}
        self._episodes = math.ceil(config.evaluation.episodes / world.size)
        self._films = config.evaluation.film and world.is_first

    def is_due(self, iteration: int, env_steps: int) -> bool:
        """After every so many iterations, and at the end, if at all."""
        every = self._config.evaluation.every_iterations
        is_over = env_steps >= self._config.budget
        return every is not None and (iteration % every == 0 or is_over)

    def play(self, agent: Agent, env_steps: int, precision: Precision) -> Record:
        """Play the episodes, on the levels that are asked for, and report their means.

        Args:
            agent: a copy on the CPU.
            env_steps: of the run so far.
            precision: in which the encoders act.
        """
        kinds = levels_in(self._config.evaluation.levels)
        with self._world.together("an evaluation"):
            played = [self._play_on(levels, agent, env_steps, precision) for levels in kinds]
        of_all, *of_all_trained = zip(*self._world.gather(played), strict=True)
        mean_return, mean_length = mean_episode(of_all)
        record: Record = {"evaluation/return": mean_return, "evaluation/length": mean_length}
        for trained in of_all_trained:
            train_return, _ = mean_episode(trained)
            record["evaluation/train_return"] = train_return
            record["evaluation/gap"] = train_return - mean_return
        if self._films:
            self._film(agent, env_steps, precision)
        return record

    def _play_on(
        self, levels: Levels, agent: Agent, env_steps: int, precision: Precision
    ) -> Episodes:
        """Play this process's episodes; keep the steps of the very first, if that is wished."""
        knobs = self._config.evaluation
        keeps = knobs.steps and self._world.is_first and levels == levels_in(knobs.levels)[0]
        text = io.StringIO(newline="")
        table = StepTable(text, only_first=True)
        with closing(self._make_envs(levels)) as envs:
            played = play(
                agent, envs, episodes=self._episodes, policy=knobs.policy, seed=self._config.seed,
                on_step=partial(table.add, levels) if keeps else None, precision=precision,
            )  # fmt: skip
        if keeps:
            self._write_steps(text.getvalue(), env_steps)
        return played

    def _write_steps(self, text: str, env_steps: int) -> None:
        """Write a table of steps, and draw it; a full disk is no reason to lose the run."""
        path = self._files.path / "evaluations" / f"{env_steps:012d}.csv"
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="")
        except OSError as error:
            self._log.message(f"warning: no table of steps: {error}")
        else:
            self._log.episode(path, env_steps=env_steps)

    def _make_envs(self, levels: Levels) -> VectorEnv:
        """The same ones each time.

        Their seed is another than that of `evaluate`: what chose the best weights does not judge
        them. Each process has a part of the episodes, with seeds of its own.
        """
        others = () if self._world.is_first else (self._world.rank,)
        return make_evaluation_envs(
            self._config,
            num_envs=min(self._episodes, _MOST_ENVS),
            levels=levels,
            seed=derive_seed(self._config.seed, "validation", *others),
            **self._own,
        )

    def _film(self, agent: Agent, env_steps: int, precision: Precision) -> None:
        """Film one episode; a film that cannot be made is no reason to lose the run."""
        knobs = self._config.evaluation
        seed = derive_seed(self._config.seed, "validation")
        levels = levels_in(knobs.levels)[0]
        wanted = Film(policy=knobs.policy, levels=levels, seed=seed, overlay=knobs.overlay)
        output = self._files.path / "videos" / f"{env_steps:012d}.mp4"
        try:
            film_episodes(
                lambda _: agent, self._config, output, wanted, precision=precision, **self._own
            )
        except Exception as error:  # what draws is the environment's, and may fail in any way
            self._films = isinstance(error, OSError)  # a disk may have room later
            self._log.message(f"warning: no film: {error}")
