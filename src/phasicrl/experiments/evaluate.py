"""Evaluation of a trained agent on episodes it has not trained on.

Kind: effects (steps environments of its own).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import IO, Any, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor

from phasicrl.config import Config, Precision
from phasicrl.envs.make import for_evaluation, make_envs
from phasicrl.envs.protocol import TimeStep, VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.experiments.statistics import bootstrap_interval
from phasicrl.models.agent import Agent, EncoderFactory
from phasicrl.models.distributions import Policy
from phasicrl.runs.build import make_agent
from phasicrl.runs.directory import RunDirectory
from phasicrl.seeding import derive_seed

PolicyKind = Literal["greedy", "sampled"]
Levels = Literal["unseen", "train"]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Finished episodes under one way of choosing actions.

    Attributes:
        policy: `greedy` takes the most likely action, `sampled` draws one.
        returns: undiscounted return of each episode, in the environment's own reward.
        lengths: steps of each episode.
    """

    policy: PolicyKind
    returns: tuple[float, ...]
    lengths: tuple[int, ...]

    @property
    def mean_return(self) -> float:
        """Mean over episodes."""
        return float(np.mean(self.returns))

    def to_dict(self) -> dict[str, float | int | str | list[float]]:
        """Numbers for people and programs; the interval is the mean's, by the bootstrap."""
        returns = np.array(self.returns)
        return {
            "policy": self.policy,
            "episodes": len(returns),
            "mean_return": self.mean_return,
            "std_return": float(returns.std()),
            "median_return": float(np.median(returns)),
            "interval_95": list(bootstrap_interval(returns)),
            "mean_length": float(np.mean(self.lengths)),
        }


class StepTable:
    """Every step of the episodes that an evaluation counts, as a row of CSV.

    Columns: `policy`, `env`, `episode` (of that environment, from 0), `step` (from 1), `reward`,
    `return` (of the episode so far), `entropy` (nats), `std` (mean over continuous components,
    before a squash; empty without them), and for each component k of an action `mean_k`, the
    policy's mean (of a discrete component the likeliest option), and `action_k`, what was taken,
    before it was clipped, squashed or rescaled.

    Args:
        file: open for writing, with `newline=""`.
    """

    def __init__(self, file: IO[str]) -> None:
        self._rows = csv.writer(file)
        self._has_head = False

    def add(
        self, kind: PolicyKind, policy: Policy, action: Tensor, step: TimeStep, under_way: UnderWay
    ) -> None:
        """One step of B environments.

        Args:
            kind: how actions were chosen.
            policy: what they were chosen from, `[B, 1]`.
            action: the actions, `[B, 1, …]`.
            step: what came of them.
            under_way: the episodes so far, this step included.
        """
        num_envs, std = len(action), policy.mean_std
        columns: dict[str, Any] = {
            "policy": [kind] * num_envs,
            "env": range(num_envs),
            "episode": under_way.numbers.tolist(),
            "step": under_way.lengths.tolist(),
            "reward": step.reward.numpy(),  # which writes as few digits as a float32 has
            "return": under_way.returns.tolist(),
            "entropy": policy.entropy().flatten().tolist(),
            "std": [""] * num_envs if std is None else std.flatten().tolist(),
        }
        for what, values in (("mean", policy.mode()), ("action", action)):
            parts = values.reshape(num_envs, -1).T.tolist()
            columns |= {f"{what}_{k}": part for k, part in enumerate(parts)}
        if not self._has_head:
            self._rows.writerow(columns)
            self._has_head = True
        rows = zip(*columns.values(), strict=True)
        self._rows.writerows(compress(rows, under_way.are_counted.tolist()))


class UnderWay:
    """The episodes that B environments are in, and what those that count have reached.

    Args:
        num_envs: B.
        episodes: how many count; every environment has its share of them.
    """

    def __init__(self, num_envs: int, episodes: int) -> None:
        self._left = torch.full((num_envs,), episodes // num_envs)
        self._left[: episodes % num_envs] += 1
        self.numbers, self.lengths = torch.zeros(2, num_envs, dtype=torch.int64)
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.finished: list[tuple[float, int]] = []

    @property
    def are_counted(self) -> Tensor:
        """Which environments have not had their share yet, `[B]`."""
        return self._left > 0

    def add(self, reward: Tensor) -> None:
        """Every environment took a step."""
        self.returns += reward
        self.lengths += 1

    def end(self, ended: Tensor) -> None:
        """In these environments, `[B]` bool, another episode begins."""
        counted = ended & self.are_counted
        reached = (self.returns[counted].tolist(), self.lengths[counted].tolist())
        self.finished += zip(*reached, strict=True)
        self._left[counted] -= 1
        self.numbers[ended] += 1
        self.returns[ended], self.lengths[ended] = 0, 0


def evaluate(
    run_dir: Path | str,
    *,
    episodes: int = 100,
    policies: Sequence[PolicyKind] = ("greedy", "sampled"),
    levels: Levels = "unseen",
    seed: int = 0,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    steps_file: Path | None = None,
) -> list[Evaluation]:
    """Play episodes that the agent has not trained on, and report their returns.

    Every environment plays the same number of episodes (or one more), so that short episodes are
    not favored. Seeds are a stream of their own: the same for every run, and none that training
    used.

    Args:
        run_dir: Run directory.
        episodes: Episodes for each policy.
        policies: Ways of choosing actions, one after the other.
        levels: Procgen: the full distribution of levels, or those of the training.
        seed: Another seed, other episodes.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: what training was given, for runs on a vector environment of your own.
        make_encoder: what training was given, for runs with a network of your own.
        steps_file: gets every step as a row of CSV (`StepTable`).

    Raises:
        ValueError: not a run directory, or one without weights yet.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; give at least 1")
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own, make_encoder=make_encoder)
    results = []
    with nullcontext() if steps_file is None else steps_file.open("w", newline="") as file:
        table = None if file is None else StepTable(file)
        for policy in policies:
            envs = make_evaluation_envs(
                config, num_envs=min(episodes, 16), levels=levels, seed=seed, **own
            )
            with closing(envs):
                result = play(
                    load_agent(files, config, envs, make_encoder),
                    envs,
                    episodes=episodes,
                    policy=policy,
                    seed=seed,
                    table=table,
                    precision=acting_precision(files),
                )
            results.append(result)
    return results


def make_evaluation_envs(
    config: Config, *, num_envs: int, levels: Levels, seed: int, **own: Any
) -> VectorEnv:
    """Environments like the run's, of whole games and with seeds that training never uses.

    Args:
        config: of the run.
        num_envs: how many.
        levels: see `evaluate`.
        seed: see `evaluate`.
        own: `make_env` or `make_vector_env`, see `evaluate`.
    """
    env = replace(for_evaluation(config.env), num_envs=num_envs)
    if levels == "unseen":
        env = replace(env, num_levels=0, start_level=0)
    return make_envs(env, seed=derive_seed(seed, "evaluation"), **own)


def acting_precision(files: RunDirectory) -> Precision:
    """The precision in which a run's policy acted, by its plan."""
    return "fp32" if files.plan is None else files.plan.precision["policy"]


def load_agent(
    files: RunDirectory, config: Config, envs: VectorEnv, make_encoder: EncoderFactory | None
) -> Agent:
    """The agent of a run with the weights that were saved last.

    Raises:
        ValueError: there are none yet, or they are those of another network.
    """
    weights = files.weights()
    agent = make_agent(config, envs, make_encoder=make_encoder)
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        hint = "; a run with an encoder of your own needs `make_encoder` here too"
        what = f"the weights in {files.path} do not fit the network that config.json describes"
        raise ValueError(f"{what}{'' if make_encoder else hint}: {error}") from None
    return agent.eval()


@torch.inference_mode()
def play(
    agent: Agent,
    envs: VectorEnv,
    *,
    episodes: int,
    policy: PolicyKind,
    seed: int,
    on_obs: Callable[[Tensor], None] = lambda obs: None,
    table: StepTable | None = None,
    precision: Precision = "fp32",
) -> Evaluation:
    """Play until every environment has had its share of `episodes`.

    Args:
        agent: acts.
        envs: freshly made; they are reset here.
        episodes: in total.
        policy: how actions are chosen.
        seed: of sampled actions.
        on_obs: shown every batch of observations, the last ones of episodes included.
        table: gets every step.
        precision: of the encoders; a run's own is that of `acting_precision`.
    """
    generator, under_way = Generator().manual_seed(seed), UnderWay(envs.num_envs, episodes)
    obs, first = envs.reset(), torch.ones(envs.num_envs, dtype=torch.bool)
    state = agent.initial_state(envs.num_envs)
    on_obs(obs)
    while under_way.are_counted.any():
        mask = None if envs.action_mask is None else envs.action_mask.unsqueeze(1)
        distribution, state = agent.policy(
            obs.unsqueeze(1), first.unsqueeze(1), state, mask, precision=precision
        )
        action = distribution.mode() if policy == "greedy" else distribution.sample(generator)
        step = envs.step(agent.policy_head.env_action(action[:, 0]))
        under_way.add(step.reward)
        if table is not None:
            table.add(policy, distribution, action, step, under_way)
        first = step.terminated | step.truncated
        under_way.end(first)
        obs = step.obs
        if step.final_obs is not None:
            last = obs.clone()
            last[first] = step.final_obs[first]
            on_obs(last)
        on_obs(obs)
    returns, lengths = zip(*under_way.finished, strict=True)
    return Evaluation(policy, returns, lengths)
