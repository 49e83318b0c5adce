"""Periodic evaluation of the agent during a run, in environments of its own.

Kind: effects (steps environments).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from phasicrl.config import Config, Levels
from phasicrl.distributed import World
from phasicrl.learner import Record
from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from phasicrl.seeding import derive_seed
from phasicrl.training.evaluation import (
    Episodes,
    levels_in,
    load_from_lab,
    make_evaluation_envs,
    mean_episode,
    play,
)

_MAX_ENVS = 16


class PeriodicEvaluation:
    """Runs evaluation episodes every `evaluation.every_iterations` iterations.

    Args:
        config: configuration of the run.
        files: run directory, for films and tables of steps.
        log: receives the steps and the warnings.
        world: training processes, which share the episodes.
        own: the user's objects, by the names of `train`'s arguments.

    Raises:
        ImportError: films or steps are requested, and the lab is not installed.
    """

    def __init__(
        self,
        config: Config,
        files: RunDirectory,
        log: MetricsLog,
        world: World,
        own: Mapping[str, Any],
    ) -> None:
        self._config, self._world = config, world
        self._own = {name: own[name] for name in ("make_env", "make_vector_env")}
        self._episodes = math.ceil(config.evaluation.episodes / world.size)
        self._recorder: Any = None
        if world.is_first and (config.evaluation.film or config.evaluation.steps):
            self._recorder = load_from_lab("Recorder")(config, files, log, **self._own)

    def is_due(self, iteration: int, env_steps: int) -> bool:
        """Return whether the run is evaluated after this iteration; the last one always is."""
        every = self._config.evaluation.every_iterations
        is_over = env_steps >= self._config.budget
        return every is not None and (iteration % every == 0 or is_over)

    def play(self, agent: Agent, env_steps: int) -> Record:
        """Run the episodes on the requested levels and return their means.

        Args:
            agent: a copy on the CPU.
            env_steps: environment steps of the run so far.
        """
        kinds = levels_in(self._config.evaluation.levels)
        with self._world.sync_errors("an evaluation"):
            played = [self._play_on(levels, agent) for levels in kinds]
        of_all, *of_all_trained = zip(*self._world.all_gather_object(played), strict=True)
        mean_return, mean_length = mean_episode(of_all)
        record: Record = {"evaluation/return": mean_return, "evaluation/length": mean_length}
        for trained in of_all_trained:
            train_return, _ = mean_episode(trained)
            record["evaluation/train_return"] = train_return
            record["evaluation/gap"] = train_return - mean_return
        if self._recorder is not None:
            self._recorder.write(agent, env_steps, derive_seed(self._config.seed, "validation"))
        return record

    def _play_on(self, levels: Levels, agent: Agent) -> Episodes:
        """Run this process's episodes; the first levels are recorded."""
        evaluation, seed = self._config.evaluation, self._config.seed
        recorder = self._recorder if levels == levels_in(evaluation.levels)[0] else None
        # The same seeds at each evaluation, but others in each process, and others than those of
        # `evaluate`, which judges the best weights.
        others = () if self._world.is_first else (self._world.rank,)
        env_seed, num_envs = (
            derive_seed(seed, "validation", *others),
            min(self._episodes, _MAX_ENVS),
        )
        envs = make_evaluation_envs(
            self._config, num_envs=num_envs, levels=levels, seed=env_seed, **self._own
        )
        with closing(envs):
            return play(
                agent, envs, episodes=self._episodes, policy=evaluation.policy,
                seed=self._config.seed, precision=self._config.compute.policy_precision,
                on_step=None if recorder is None else recorder.on_step,
            )  # fmt: skip
