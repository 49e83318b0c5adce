"""Tables of the steps of evaluation episodes, and records of periodic evaluations.

Kind: effects (steps environments, writes files).
"""

import csv
import io
from collections import defaultdict
from typing import IO, Any

import torch
from torch import Tensor

from phasicrl import Config
from phasicrl.config import ActionSelection, Levels
from phasicrl.lab.film.filming import film_episodes
from phasicrl.models.agent import Agent
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.evaluate import SavedAgent


class StepTable:
    """CSV table with a row for each step of the counted evaluation episodes.

    Columns: `levels` (unseen, train), `policy` (greedy, sampled), `env`, `episode` (of that
    environment, from 0), `step` (from 1), `reward`, `return` (of the episode so far), `entropy`
    (nats), `std_k` of the k-th continuous component (from 0), and of the k-th of all `mean_k`, the
    policy's mean (or likeliest option, if discrete), and `action_k`. Standard deviations, means and
    actions are before clip, squash and rescaling.

    Args:
        file: file opened for writing with `newline=""`.
        only_first: write the first counted episode of the first environment only.
    """

    def __init__(self, file: IO[str], *, only_first: bool = False) -> None:
        self._writer = csv.writer(file)
        self._has_head, self._only_first, self._has_episode = False, only_first, False
        self._rows: dict[int, list[tuple[Any, ...]]] = defaultdict(list)  # of open episodes

    def add(
        self, levels: Levels, action_selection: ActionSelection, policy: Any, action: Tensor,
        step: Any, tracker: Any,
    ) -> None:  # fmt: skip
        """Add one step of B environments.

        Args:
            levels: levels of the environments.
            action_selection: sampled or greedy actions.
            policy: distributions of the actions, `[B, 1]`.
            action: actions, `[B, 1, …]`.
            step: `TimeStep` of the environments.
            tracker: `EpisodeTracker` that has counted the step.
        """
        num_envs = len(action)
        values_by_column: dict[str, Any] = {
            "levels": [levels] * num_envs,
            "policy": [action_selection] * num_envs,
            "env": range(num_envs),
            "episode": tracker.indices.tolist(),
            "step": tracker.lengths.tolist(),
            "reward": step.reward.numpy(),  # which writes as few digits as a float32 has
            "return": tracker.returns.tolist(),
            "entropy": policy.entropy().flatten().tolist(),
        }
        for name, values in (("std", policy.stds), ("mean", policy.mode()), ("action", action)):
            parts = [] if values is None else values.reshape(num_envs, -1).T.tolist()
            values_by_column |= {f"{name}_{k}": part for k, part in enumerate(parts)}
        if not self._has_head:
            self._writer.writerow(values_by_column)
            self._has_head = True
        rows = list(zip(*values_by_column.values(), strict=True))
        counted, ended = tracker.unfinished_envs.clone(), step.terminated | step.truncated
        if self._only_first:
            counted[int(not self._has_episode) :] = False
        # An episode that was cut by a failure does not count.
        cut = step.info.get("cut", torch.zeros_like(ended))
        for env in counted.nonzero().flatten().tolist():
            self._rows[env].append(rows[env])
            if ended[env]:
                episode = self._rows.pop(env)
                if not cut[env]:
                    self._writer.writerows(episode)
                    self._has_episode = True


class EvalRecorder:
    """Recorder of the first episode of each periodic evaluation.

    Args:
        config: configuration of the run.
        run_directory: run directory for tables and films.
        log: `MetricsLog` for tables and warnings.
        env_objects: custom `make_env` and `make_vector_env`, or None.
    """

    def __init__(self, config: Config, run_directory: RunDirectory, log: Any,
                 **env_objects: Any) -> None:  # fmt: skip
        self._saved, self._log = SavedAgent(run_directory, config, env_objects, {}), log
        self._options, self._is_filming = config.evaluation, config.evaluation.film
        self._levels: Levels = "train" if self._options.levels == "train" else "unseen"
        self._table: StepTable | None = None

    def on_step(self, *step: Any) -> None:
        """Add one step of the environments to the table, if steps are recorded."""
        if not self._options.steps:
            return
        if self._table is None:
            self._text = io.StringIO(newline="")
            self._table = StepTable(self._text, only_first=True)
        self._table.add(self._levels, *step)

    def write(self, agent: Agent, env_steps: int, seed: int) -> None:
        """Write the table and the film of an evaluation; a failure is a warning.

        Args:
            agent: evaluated agent, on the CPU.
            env_steps: environment steps of the run so far.
            seed: seed of the evaluation.
        """
        folder = self._saved.run_directory.path
        if self._table is not None:
            self._table = None
            path = folder / "evaluations" / f"{env_steps:012d}.csv"
            try:
                path.parent.mkdir(exist_ok=True)
                path.write_text(self._text.getvalue(), encoding="utf-8", newline="")
                self._log.write_step_table_to_tensorboard(path, env_steps=env_steps)
            except OSError as error:
                self._log.show_message(f"warning: no table of steps: {error}")
        if not self._is_filming:
            return
        try:
            film_episodes(
                self._saved, lambda _: agent, folder / "videos" / f"{env_steps:012d}.mp4",
                policy=self._options.policy, levels=self._levels, overlay=True, seed=seed,
            )  # fmt: skip
        except Exception as error:  # the environment's renderer may raise any error
            self._is_filming = isinstance(error, OSError)  # a full disk may have room later
            self._log.show_message(f"warning: no film: {error}")
