"""Evaluation of a trained agent on episodes it has not trained on.

Kind: effects (steps environments of its own).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import gymnasium as gym
import numpy as np

from phasicrl.config import Config, EvaluatedLevels, Levels, PolicyKind
from phasicrl.config_io import write_json
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.session.bootstrap import bootstrap_interval
from phasicrl.session.build import make_agent
from phasicrl.session.evaluation import (
    levels_in,
    load_from_lab,
    make_evaluation_envs,
    play,
    refuse_levels,
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Finished episodes under one way of choosing actions.

    Attributes:
        policy: `greedy` takes the most likely action, `sampled` draws one.
        returns: undiscounted return of each episode, in the environment's own reward.
        lengths: steps of each episode.
        levels: that were played.
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
        """Numbers for people and programs; the interval is the mean's, by the bootstrap."""
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
    """How much higher the mean return is on the training's levels, where both were played."""
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
    """Play episodes that the agent has not trained on, and report their returns.

    Every environment plays the same number of episodes (or one more), so that short episodes are
    not favored. Seeds are a stream of their own: the same for every run, and none that training
    used.

    Args:
        run_dir: Run directory.
        episodes: Episodes for each policy.
        policies: Ways of choosing actions, one after the other.
        levels: Procgen: the full distribution of levels, those of the training, or both, the unseen
            ones first.
        seed: Another seed, other episodes.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: what training was given, for runs on a vector environment of your own.
        make_encoder: what training was given, for runs with a network of your own.
        weights: The last that were saved, or the best by the evaluations of the run.
        json: JSON file for the results.
        steps_file: CSV file, which gets a row for each step (`phasicrl.lab.film.recorder`).

    Raises:
        ValueError: not a run directory, no weights yet, or levels where all are of one kind.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; give at least 1")
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own, make_encoder=make_encoder)
    refuse_levels(levels, None if any(own.values()) else config.env)
    results = []
    with nullcontext() if steps_file is None else steps_file.open("w", newline="") as file:
        table = None if file is None else load_from_lab("StepTable")(file)
        for which, policy in product(levels_in(levels), policies):
            envs = make_evaluation_envs(
                config, num_envs=min(episodes, 16), levels=which, seed=seed, **own
            )
            with closing(envs):
                played = play(
                    load_agent(files, config, envs, make_encoder, weights),
                    envs,
                    episodes=episodes,
                    policy=policy,
                    seed=seed,
                    on_step=None if table is None else partial(table.add, which),
                    precision=config.compute.policy_precision,
                )
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
    """The agent of a run with the weights that were saved last, or with its best ones.

    Raises:
        ValueError: there are none yet, or they are those of another network.
    """
    weights = files.weights(which)
    agent = make_agent(config, envs, make_encoder=make_encoder)
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        hint = "; a run with an encoder of your own needs `make_encoder` here too"
        what = f"the weights in {files.path} do not fit the network that config.json describes"
        raise ValueError(f"{what}{'' if make_encoder else hint}: {error}") from None
    return agent.eval()
