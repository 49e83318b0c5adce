"""Evaluation of a trained agent. Kind: effects (steps environments of its own)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.config import Config, EvaluatedLevels, Levels, PolicyKind
from phasicrl.config_io import write_json
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.session import evaluation
from phasicrl.session.bootstrap import bootstrap_interval
from phasicrl.session.build import make_agent


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Finished episodes under one way of choosing actions.

    Attributes:
        policy: `greedy` takes the most likely action, `sampled` draws one.
        returns: undiscounted return of each episode, in the environment's own reward.
        lengths: steps of each episode.
        levels: levels of Procgen.
    """

    policy: PolicyKind
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    levels: Levels = "unseen"

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    def to_dict(self) -> dict[str, float | int | str | list[float]]:
        """Return a summary; the interval is the mean's, by the bootstrap."""
        returns = np.array(self.returns)
        return {
            "policy": self.policy,
            "levels": self.levels,
            "episodes": len(returns),
            "mean_return": self.mean_return,
            "std_return": float(returns.std()),
            "median_return": float(np.median(returns)),
            "interval_95": list(bootstrap_interval(returns)),
            "mean_length": float(np.mean(self.lengths)),
        }


def generalization_gaps(results: Sequence[Evaluation]) -> dict[PolicyKind, float]:
    """Return the mean return on training levels minus that on unseen ones, by policy."""
    unseen = {each.policy: each.mean_return for each in results if each.levels == "unseen"}
    return {
        each.policy: each.mean_return - unseen[each.policy]
        for each in results
        if each.levels == "train" and each.policy in unseen
    }


def evaluate(
    run_dir: Path | str,
    *,
    episodes: int = 100,
    policies: Sequence[PolicyKind] = ("greedy", "sampled"),
    levels: EvaluatedLevels = "unseen",
    seed: int = 0,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    weights: WeightsKind = "last",
    steps_file: Path | None = None,
    json: Path | None = None,
) -> list[Evaluation]:
    """Evaluate an agent on episodes that it has not trained on.

    Every environment has the same number of episodes (or one more), so that short episodes are not
    favored. Seeds are the same for every run, and none that training used.

    Args:
        run_dir: Run directory.
        episodes: Episodes for each policy.
        policies: Ways of choosing actions, one after the other.
        levels: Procgen: the full distribution of levels, those of the training, or both.
        seed: Seed of environments and sampled actions.
        make_env: as for `train`.
        make_vector_env: as for `train`.
        make_encoder: as for `train`.
        weights: The last weights, or the best by the evaluations of the run.
        steps_file: CSV file for every step (`phasicrl.lab.film.recorder`).
        json: JSON file for the results.

    Raises:
        ValueError: not a run directory, no weights yet, or levels where all are of one kind.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; expected at least 1")
    files = RunDirectory(Path(run_dir))
    user = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**user, make_encoder=make_encoder)
    evaluation.refuse_levels(levels, None if any(user.values()) else config.env)
    how: Any = {"episodes": episodes, "seed": seed, "precision": config.compute.policy_precision}
    results = []
    with nullcontext() if steps_file is None else steps_file.open("w", newline="") as file:
        table = None if file is None else evaluation.load_from_lab("StepTable")(file)
        for which, policy in product(evaluation.levels_in(levels), policies):
            envs = evaluation.make_evaluation_envs(
                config, num_envs=min(episodes, 16), levels=which, seed=seed, **user
            )
            on_step = None if table is None else partial(table.add, which)
            with closing(envs):
                agent = load_agent(files, config, envs, make_encoder, weights)
                played = evaluation.play(agent, envs, policy=policy, on_step=on_step, **how)
            results.append(Evaluation(policy, *played, levels=which))
    if json is not None:
        rows = [result.to_dict() for result in results]
        gaps = generalization_gaps(results)
        write_json(json, {"run": str(run_dir), "results": rows, "gap": gaps})
    return results


def load_agent(
    files: RunDirectory,
    config: Config,
    envs: VectorEnv,
    make_encoder: EncoderFactory | None,
    which: WeightsKind = "last",
) -> Agent:
    """Load the agent of a run with its last weights, or its best.

    Raises:
        ValueError: there are no weights yet, or they do not fit the network.
    """
    agent = make_agent(config, envs, make_encoder=make_encoder)
    try:
        agent.load_state_dict(files.weights(which))
    except RuntimeError as error:
        raise ValueError(
            f"the weights in {files.path} do not fit the network of config.json "
            f"(a network of your own needs make_encoder): {error}"
        ) from None
    return agent.eval()
