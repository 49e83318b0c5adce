"""Evaluation of a trained agent on episodes it has not trained on. Kind: effects (steps environments of its own)."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import gymnasium as gym
import numpy as np
import torch
from torch import Generator, Tensor

from phasicrl.config import Config, EnvConfig, Precision
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
        """Numbers for people and programs: mean, standard deviation, median, and the 95 % bootstrap interval of the mean."""
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
        self._kind = ""
        self._episode = torch.zeros(0, dtype=torch.int64)

    def begin(self, kind: PolicyKind, num_envs: int) -> None:
        """Episodes of freshly reset environments follow."""
        self._kind, self._episode = kind, torch.zeros(num_envs, dtype=torch.int64)

    def add(self, policy: Policy, action: Tensor, step: TimeStep, returns: Tensor, lengths: Tensor, *, counted: Tensor) -> None:
        """One step of B environments.

        Args:
            policy: what actions were chosen from, `[B, 1]`.
            action: the actions, `[B, 1, …]`.
            step: what came of them.
            returns: of the episodes so far, this step included, `[B]`.
            lengths: the same of their steps.
            counted: which environments' episodes count; the others have had their share, `[B]`.
        """
        num_envs = len(returns)
        means, actions = (values.reshape(num_envs, -1) for values in (policy.mode(), action))
        stds = [""] * num_envs if policy.mean_std is None else policy.mean_std.reshape(num_envs).tolist()
        if not self._has_head:
            parts = [f"{what}_{k}" for what in ("mean", "action") for k in range(actions.shape[1])]
            self._rows.writerow(["policy", "env", "episode", "step", "reward", "return", "entropy", "std", *parts])
            self._has_head = True
        rewards = step.reward.numpy()  # which writes as few digits as a float32 has
        columns = (means, actions, self._episode, lengths, returns, policy.entropy().reshape(num_envs))
        rows = zip(rewards, stds, *(column.tolist() for column in columns), strict=True)
        for env, (reward, std, mean, taken, episode, length, so_far, entropy) in enumerate(rows):
            if counted[env]:
                self._rows.writerow([self._kind, env, episode, length, reward, so_far, entropy, std, *mean, *taken])
        self._episode[step.terminated | step.truncated] += 1


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
    config = files.config_for(make_env=make_env, make_vector_env=make_vector_env, make_encoder=make_encoder)
    results: list[Evaluation] = []
    with nullcontext() if steps_file is None else steps_file.open("w", newline="") as file:
        table, precision = None if file is None else StepTable(file), acting_precision(files)
        for policy in policies:
            envs = make_evaluation_envs(
                config, num_envs=min(episodes, 16), levels=levels, seed=seed, make_env=make_env, make_vector_env=make_vector_env
            )
            try:
                agent = load_agent(files, config, envs, make_encoder=make_encoder)
                generator = Generator().manual_seed(seed)
                results.append(play(agent, envs, episodes=episodes, policy=policy, generator=generator, table=table, precision=precision))
            finally:
                envs.close()
    return results


def make_evaluation_envs(
    config: Config,
    *,
    num_envs: int,
    levels: Levels,
    seed: int,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
) -> VectorEnv:
    """Environments like the run's, of whole games and with seeds that training never uses."""
    env: EnvConfig = dataclasses.replace(for_evaluation(config.env), num_envs=num_envs)
    if levels == "unseen":
        env = dataclasses.replace(env, num_levels=0, start_level=0)
    return make_envs(env, seed=derive_seed(seed, "evaluation"), make_env=make_env, make_vector_env=make_vector_env)


def acting_precision(files: RunDirectory) -> Precision:
    """The precision in which a run's policy acted, by its plan."""
    return "fp32" if files.plan is None else files.plan.precision["policy"]


def load_agent(files: RunDirectory, config: Config, envs: VectorEnv, *, make_encoder: EncoderFactory | None = None) -> Agent:
    """The agent of a run with the weights that were saved last.

    Raises:
        ValueError: there are none yet, or they are those of another network.
    """
    weights = files.weights()
    agent = make_agent(config, envs, make_encoder=make_encoder)
    try:
        agent.load_state_dict(weights)
    except RuntimeError as error:
        hint = "" if make_encoder else "; a run with an encoder of your own needs `make_encoder` here too"
        raise ValueError(f"the weights in {files.path} do not fit the network that config.json describes{hint}: {error}") from None
    return agent.eval()


@torch.inference_mode()
def play(
    agent: Agent,
    envs: VectorEnv,
    *,
    episodes: int,
    policy: PolicyKind,
    generator: Generator,
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
        generator: source of sampled actions.
        on_obs: shown every batch of observations, the last ones of episodes included.
        table: gets every step.
        precision: of the encoders; a run's own is that of `acting_precision`.
    """
    share = torch.full((envs.num_envs,), episodes // envs.num_envs)
    share[: episodes % envs.num_envs] += 1
    obs, first = envs.reset(), torch.ones(envs.num_envs, dtype=torch.bool)
    state = agent.initial_state(envs.num_envs)
    running, length = torch.zeros(envs.num_envs, dtype=torch.float64), torch.zeros(envs.num_envs, dtype=torch.int64)
    returns: list[float] = []
    lengths: list[int] = []
    on_obs(obs)
    if table is not None:
        table.begin(policy, envs.num_envs)
    while (share > 0).any():
        mask = None if envs.action_mask is None else envs.action_mask.unsqueeze(1)
        distribution, state = agent.policy(obs.unsqueeze(1), first.unsqueeze(1), state, mask, precision=precision)
        action = distribution.mode() if policy == "greedy" else distribution.sample(generator)
        step = envs.step(agent.policy_head.env_action(action[:, 0]))
        running += step.reward
        length += 1
        if table is not None:
            table.add(distribution, action, step, running, length, counted=share > 0)
        first = step.terminated | step.truncated
        counted = first & (share > 0)
        returns += running[counted].tolist()
        lengths += length[counted].tolist()
        share[counted] -= 1
        running[first], length[first] = 0, 0
        obs = step.obs
        if step.final_obs is not None:
            last = obs.clone()
            last[first] = step.final_obs[first]
            on_obs(last)
        on_obs(obs)
    return Evaluation(policy, tuple(returns), tuple(lengths))
