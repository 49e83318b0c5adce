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
        self, config: Config, files: RunDirectory, log: MetricsLog, world: World,
        user: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._config, self._world = config, world
        self._user = {name: user[name] for name in ("make_env", "make_vector_env")}
        self._episodes = math.ceil(config.evaluation.episodes / world.size)
        self._recorder: Any = None
        if world.is_first and (config.evaluation.film or config.evaluation.steps):
            self._recorder = load_lab_object("Recorder")(config, files, log, **self._user)

    def is_due(self, iteration: int, env_steps: int) -> bool:
        """Return whether to evaluate after this iteration; if at all, also after a run's last."""
        every = self._config.evaluation.every_iterations
        return every is not None and (iteration % every == 0 or env_steps >= self._config.budget)

    def evaluate(self, agent: Agent, env_steps: int) -> Record:
        """Run episodes on the levels and environments of the options, and return their metrics.

        Args:
            agent: copy of the agent on the CPU.
            env_steps: environment steps of the run so far.
        """
        kinds = expand_levels(self._config.evaluation.levels)
        env_ids = self._config.evaluation.env_ids
        cases: list[tuple[Levels, Config]] = [(levels, self._config) for levels in kinds]
        cases.extend((kinds[0], self._config.with_updates({"env.id": each})) for each in env_ids)
        with self._world.sync_errors("an evaluation"):
            episodes = [self._run_episodes(*case, agent) for case in cases]
        parts = zip(*self._world.all_gather_object(episodes), strict=True)
        (mean_return, mean_length), *means = map(mean_return_and_length, parts)
        record: Record = {"evaluation/return": mean_return, "evaluation/length": mean_length}
        for _ in kinds[1:]:
            train_return, _ = means.pop(0)
            record["evaluation/train_return"] = train_return
            record["evaluation/gap"] = train_return - mean_return
        for env_id, each in zip(env_ids, means, strict=True):
            record[f"evaluation/{env_id}/return"], record[f"evaluation/{env_id}/length"] = each
        if self._recorder is not None:
            self._recorder.write(agent, env_steps, derive_seed(self._config.seed, "validation"))
        return record

    def _run_episodes(self, levels: Levels, config: Config, agent: Agent) -> Episodes:
        """Run this process's episodes on one environment and kind of levels; record the first."""
        is_own = config is self._config
        is_first = is_own and levels == expand_levels(config.evaluation.levels)[0]
        recorder, user = self._recorder if is_first else None, self._user if is_own else {}
        # All evaluations have the same seeds; they differ between processes, and from those of
        # `evaluate`, which may judge the best weights.
        others = () if self._world.is_first else (self._world.rank,)
        seed = derive_seed(config.seed, "validation", *others)
        num_envs = min(self._episodes, _MAX_ENVS)
        envs = make_evaluation_envs(config, num_envs=num_envs, levels=levels, seed=seed, **user)
        with closing(envs):
            return run_agent(
                agent, envs, episodes=self._episodes, policy=config.evaluation.policy,
                seed=config.seed, precision=config.compute.policy_precision,
                on_step=None if recorder is None else recorder.on_step,
            )  # fmt: skip
