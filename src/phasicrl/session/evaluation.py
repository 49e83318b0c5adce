"""Episodes that an agent does not train on: played in the middle of a run, and after it.

Kind: effects (steps environments of its own).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from phasicrl.config import Config, EnvConfig, EvaluatedLevels, Levels, PolicyKind, Precision
from phasicrl.envs.make import for_evaluation, make_envs, resolve
from phasicrl.envs.protocol import TimeStep, VectorEnv
from phasicrl.models.agent import Agent, AgentOutput
from phasicrl.models.distributions import Policy
from phasicrl.seeding import derive_seed


def load_from_lab(name: str) -> Any:
    """Return what the lab registers in the entry-point group `phasicrl.lab`.

    Raises:
        ImportError: the lab is not installed.
    """
    for found in entry_points(group="phasicrl.lab", name=name):
        return found.load()
    raise ImportError("films and tables of steps need the lab: pip install 'phasicrl[lab]'")


class Episodes(NamedTuple):
    """Finished episodes: undiscounted returns in the environment's own reward, and lengths."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]


def mean_episode(parts: Iterable[Episodes]) -> tuple[float, float]:
    """Mean return and length over the episodes of all parts."""
    returns, lengths = (list(chain.from_iterable(numbers)) for numbers in zip(*parts, strict=True))
    return statistics.fmean(returns), statistics.fmean(lengths)


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

    def end(self, ended: Tensor, cut: Tensor) -> None:
        """In these environments, `[B]` bool, another episode begins.

        Those that were `cut` by a fault, `[B]` bool, do not count.
        """
        counted = ended & self.are_counted & ~cut
        reached = (self.returns[counted].tolist(), self.lengths[counted].tolist())
        self.finished += zip(*reached, strict=True)
        self._left[counted] -= 1
        self.numbers[ended] += 1
        self.returns[ended], self.lengths[ended] = 0, 0


OnStep = Callable[[PolicyKind, Policy, Tensor, TimeStep, UnderWay], None]


def levels_in(levels: EvaluatedLevels) -> tuple[Levels, ...]:
    """The levels to play, one after the other: unseen ones first."""
    return ("unseen", "train") if levels == "both" else (levels,)


def refuse_levels(levels: EvaluatedLevels, env: EnvConfig | None) -> None:
    """Refuse levels where one evaluation would come twice: there are none, or it knows all.

    Args:
        levels: that are asked for.
        env: what the agent was trained on; of an environment of one's own, None, nothing is known.
    """
    if levels == "unseen" or env is None:
        return
    if resolve(env.id)[0] != "procgen":
        what = f"levels is {levels}, which has no effect without a game of Procgen (procgen:NAME)"
    elif env.num_levels == 0:
        what = f"levels is {levels}, but the agent was trained on all levels (env.num_levels 0)"
    else:
        return
    raise ValueError(f"{what}; leave it at unseen (--levels unseen)")


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
        env = replace(env, num_levels=0)
    return make_envs(env, seed=derive_seed(seed, "evaluation"), **own)


class Seen(NamedTuple):
    """What B environments show, and what is remembered of them: all that a policy acts on.

    Attributes:
        obs: as stored, `[B, *shape]`.
        first: where an episode begins, `[B]`.
        state: the memory's, `[B, H]`.
        action_mask: what is allowed, `[B, M]`, if anything is not.
    """

    obs: Tensor
    first: Tensor
    state: Tensor
    action_mask: Tensor | None


OnLast = Callable[[Tensor, Tensor], None]
"""Told what B environments show where episodes have ended, `[B, …]`, and which these are, `[B]`."""
OnChoice = Callable[[Seen, AgentOutput, Tensor], None]
"""Told what was seen, what the agent said of it, `[B, 1]`, and the actions, `[B, 1, …]`."""
Act = Callable[[Seen], tuple[Tensor, Tensor]]
"""From what is seen to what the environments get, `[B, …]`, and the memory's next state."""


def steps(act: Act, envs: VectorEnv, state: Tensor) -> Iterator[tuple[Seen, TimeStep]]:
    """Act in environments without an end: what was seen, and what came of it.

    Args:
        act: chooses actions.
        envs: freshly made; they are reset here.
        state: the memory's before the first step, `[B, H]`.
    """
    first = torch.ones(envs.num_envs, dtype=torch.bool)
    seen = Seen(envs.reset(), first, state, envs.action_mask)
    while True:
        action, state = act(seen)
        step = envs.step(action)
        yield seen, step
        seen = Seen(step.obs, step.terminated | step.truncated, state, envs.action_mask)


def play_episodes(
    act: Act,
    envs: VectorEnv,
    state: Tensor,
    *,
    episodes: int,
    on_last: OnLast = lambda obs, ended: None,
    on_step: Callable[[TimeStep, UnderWay], None] = lambda step, under_way: None,
) -> Episodes:
    """Act until every environment has had its share of `episodes`.

    Args:
        act: chooses actions.
        envs: freshly made; they are reset here.
        state: the memory's before the first step, `[B, H]`.
        episodes: in total.
        on_last: shown observations that nobody acts on: where an episode ended, those of all
            environments with its last one among them.
        on_step: told of every step, and of the episodes so far, this step included.
    """
    under_way = UnderWay(envs.num_envs, episodes)
    for _, step in steps(act, envs, state):
        under_way.add(step.reward)
        on_step(step, under_way)
        ended = step.terminated | step.truncated
        under_way.end(ended, step.info.get("cut", torch.zeros_like(ended)))
        if step.final_obs is not None and ended.any():
            last = step.obs.clone()
            last[ended] = step.final_obs[ended]
            on_last(last, ended)
        if not under_way.are_counted.any():
            break
    returns, lengths = zip(*under_way.finished, strict=True)
    return Episodes(returns, lengths)


@torch.inference_mode()
def play(
    agent: Agent,
    envs: VectorEnv,
    *,
    episodes: int,
    policy: PolicyKind,
    seed: int,
    on_choice: OnChoice | None = None,
    on_step: OnStep | None = None,
    on_last: OnLast = lambda obs, ended: None,
    precision: Precision = "fp32",
) -> Episodes:
    """Play until every environment has had its share of `episodes`.

    Args:
        agent: acts.
        envs: freshly made; they are reset here.
        episodes: in total.
        policy: how actions are chosen.
        seed: of sampled actions.
        on_choice: told of every choice before the environments go on: they can still be drawn.
        on_step: told of every step: what it was chosen from, the action, what came of it.
        on_last: see `play_episodes`.
        precision: of the encoders.
    """
    generator = Generator().manual_seed(seed)
    chosen: tuple[Policy, Tensor] | None = None  # the latest: from what, and the action

    def act(seen: Seen) -> tuple[Tensor, Tensor]:
        nonlocal chosen
        obs, first = seen.obs.unsqueeze(1), seen.first.unsqueeze(1)
        mask = None if seen.action_mask is None else seen.action_mask.unsqueeze(1)
        inputs = (obs, first, seen.state, mask)
        said = None if on_choice is None else agent(*inputs, precision=precision)
        if said is None:  # values are not asked for
            distribution, state = agent.policy(*inputs, precision=precision)
        else:
            distribution, state = said.policy, said.state
        action = distribution.mode() if policy == "greedy" else distribution.sample(generator)
        chosen = distribution, action
        if on_choice is not None and said is not None:
            on_choice(seen, said, action)
        return agent.policy_head.env_action(action[:, 0]), state

    def tell(step: TimeStep, under_way: UnderWay) -> None:
        if on_step is not None and chosen is not None:
            on_step(policy, *chosen, step, under_way)

    state = agent.initial_state(envs.num_envs)
    return play_episodes(act, envs, state, episodes=episodes, on_last=on_last, on_step=tell)
