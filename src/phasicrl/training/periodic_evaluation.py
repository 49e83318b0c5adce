"""Periodic evaluation of the agent during a run. Kind: effects (steps environments)."""

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
    expand_levels,
    load_lab_object,
    make_evaluation_envs,
    mean_return_and_length,
    run_agent,
)

_MAX_ENVS = 16


class PeriodicEvaluation:
    """Evaluation every `evaluation.every_iterations` iterations of a run.

    Args:
        config: options of the run.
        files: run directory, for films and tables of steps.
        log: log of the run, for tables of steps and warnings.
        world: processes of the run, which share the episodes.
        user: custom objects by the names of `train`'s arguments.

    Raises:
        ImportError: films or steps are requested, and the lab is not installed.
    """

    def __init__(
        self,
        config: Config,
        files: RunDirectory,
        log: MetricsLog,
        world: World,
        user: Mapping[str, Any],
    ) -> None:
        self._config, self._world = config, world
        self._user = {name: user[name] for name in ("make_env", "make_vector_env")}
        self._episodes = math.ceil(config.evaluation.episodes / world.size)
        self._recorder: Any = None
        if world.is_first and (config.evaluation.film or config.evaluation.steps):
            self._recorder = load_lab_object("Recorder")(config, files, log, **self._user)

    def is_due(self, iteration: int, env_steps: int) -> bool:
        """Return whether to evaluate after this iteration, as after the last one of a run."""
        every = self._config.evaluation.every_iterations
        is_over = env_steps >= self._config.budget
        return every is not None and (iteration % every == 0 or is_over)

    def evaluate(self, agent: Agent, env_steps: int) -> Record:
        """Run episodes on the levels in `evaluation.levels`, and return their metrics.

        Args:
            agent: copy of the agent on the CPU.
            env_steps: environment steps of the run so far.
        """
        kinds = expand_levels(self._config.evaluation.levels)
        with self._world.sync_errors("an evaluation"):
            episodes = [self._run_episodes(levels, agent) for levels in kinds]
        first, *others = zip(*self._world.all_gather_object(episodes), strict=True)
        mean_return, mean_length = mean_return_and_length(first)
        record: Record = {"evaluation/return": mean_return, "evaluation/length": mean_length}
        for train_episodes in others:
            train_return, _ = mean_return_and_length(train_episodes)
            record["evaluation/train_return"] = train_return
            record["evaluation/gap"] = train_return - mean_return
        if self._recorder is not None:
            self._recorder.write(agent, env_steps, derive_seed(self._config.seed, "validation"))
        return record

    def _run_episodes(self, levels: Levels, agent: Agent) -> Episodes:
        """Run this process's episodes on one kind of levels; the first kind is recorded."""
        evaluation, seed = self._config.evaluation, self._config.seed
        recorder = self._recorder if levels == expand_levels(evaluation.levels)[0] else None
        # All evaluations have the same seeds; they differ between processes, and from those of
        # `evaluate`, which may judge the best weights.
        others = () if self._world.is_first else (self._world.rank,)
        env_seed, num_envs = (
            derive_seed(seed, "validation", *others),
            min(self._episodes, _MAX_ENVS),
        )
        envs = make_evaluation_envs(
            self._config, num_envs=num_envs, levels=levels, seed=env_seed, **self._user
        )
        with closing(envs):
            return run_agent(
                agent, envs, episodes=self._episodes, policy=evaluation.policy,
                seed=self._config.seed, precision=self._config.compute.policy_precision,
                on_step=None if recorder is None else recorder.on_step,
            )  # fmt: skip
