"""Episodes that an agent does not train on. Kind: effects (steps environments of its own)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from phasicrl.config import Config, EnvConfig, EvaluatedLevels, Levels, PolicyKind, Precision
from phasicrl.envs.make import make_envs, resolve
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
    """Return mean return and length over the episodes of all parts."""
    returns, lengths = (list(chain.from_iterable(numbers)) for numbers in zip(*parts, strict=True))
    return statistics.fmean(returns), statistics.fmean(lengths)


class EpisodeTracker:
    """Returns and lengths of the current episodes of B environments, and of finished ones.

    Args:
        num_envs: B.
        episodes: number of episodes that count; every environment has its share of them.
    """

    def __init__(self, num_envs: int, episodes: int) -> None:
        self._left = torch.full((num_envs,), episodes // num_envs)
        self._left[: episodes % num_envs] += 1
        self.numbers, self.lengths = torch.zeros(2, num_envs, dtype=torch.int64)
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.finished: list[tuple[float, int]] = []

    @property
    def are_counted(self) -> Tensor:
        """Environments whose current episode counts, `[B]`."""
        return self._left > 0

    def add(self, reward: Tensor) -> None:
        """Add a step of every environment."""
        self.returns += reward
        self.lengths += 1

    def end(self, ended: Tensor, cut: Tensor) -> None:
        """Start new episodes where `ended`, `[B]` bool; those `cut` by a fault do not count."""
        counted = ended & self.are_counted & ~cut
        reached = (self.returns[counted].tolist(), self.lengths[counted].tolist())
        self.finished += zip(*reached, strict=True)
        self._left[counted] -= 1
        self.numbers[ended] += 1
        self.returns[ended], self.lengths[ended] = 0, 0


OnStep = Callable[[PolicyKind, Policy, Tensor, TimeStep, EpisodeTracker], None]
"""Called after every step with kind of policy, distributions, actions, step and episodes so far."""


def levels_in(levels: EvaluatedLevels) -> tuple[Levels, ...]:
    """Return the levels to evaluate, one after the other."""
    return ("unseen", "train") if levels == "both" else (levels,)


def check_levels(levels: EvaluatedLevels, env: EnvConfig | None) -> None:
    """Refuse levels that equal the unseen ones: no game of Procgen, or trained on all levels.

    Args:
        levels: requested levels.
        env: environment of the training; None for one of the user's.
    """
    if levels == "unseen" or env is None:
        return
    is_procgen = resolve(env.id)[0] == "procgen"
    if not is_procgen or env.num_levels == 0:
        why = "but the agent was trained on all levels (env.num_levels 0)"
        if not is_procgen:
            why = "which has no effect without a game of Procgen (procgen:NAME)"
        raise ValueError(f"levels is {levels}, {why}. Leave it at unseen.")


def make_evaluation_envs(
    config: Config, *, num_envs: int, levels: Levels, seed: int, **user: Any
) -> VectorEnv:
    """Make environments like the run's, of whole games and with seeds that training never uses.

    Args:
        config: configuration of the run.
        num_envs: number of environments.
        levels: see `evaluate`.
        seed: see `evaluate`.
        user: `make_env` or `make_vector_env`, see `evaluate`.
    """
    env = replace(config.env, num_envs=num_envs)
    if levels == "unseen":
        env = replace(env, num_levels=0)
    return make_envs(env, seed=derive_seed(seed, "evaluation"), whole_games=True, **user)


class AgentInput(NamedTuple):
    """Everything that a policy acts on.

    Attributes:
        obs: observations as stored, `[B, *shape]`.
        first: whether an episode begins, `[B]`.
        state: state of the memory, `[B, H]`.
        action_mask: allowed actions, `[B, M]`; None if all are.
    """

    obs: Tensor
    first: Tensor
    state: Tensor
    action_mask: Tensor | None


OnLast = Callable[[Tensor, Tensor], None]
"""Called with observations `[B, …]`, the last ones where episodes ended, and these ends `[B]`."""
OnChoice = Callable[[AgentInput, AgentOutput, Tensor], None]
"""Called before each step with the inputs, the agent's output `[B, 1]` and actions `[B, 1, …]`."""
Act = Callable[[AgentInput], tuple[Tensor, Tensor]]
"""Maps inputs to the environments' actions `[B, …]` and the next state of the memory."""


def play_episodes(
    act: Act, envs: VectorEnv, state: Tensor, *, episodes: int,
    on_last: OnLast = lambda obs, ended: None,
    on_step: Callable[[TimeStep, EpisodeTracker], None] = lambda step, tracker: None,
) -> Episodes:  # fmt: skip
    """Act until every environment has finished its share of `episodes`.

    Args:
        act: chooses actions.
        envs: new environments.
        state: initial state of the memory, `[B, H]`.
        episodes: total number of episodes.
        on_last: see `OnLast`.
        on_step: called after every step, with the episodes so far.
    """
    tracker = EpisodeTracker(envs.num_envs, episodes)
    first = torch.ones(envs.num_envs, dtype=torch.bool)
    inputs = AgentInput(envs.reset(), first, state, envs.action_mask)
    while tracker.are_counted.any():
        action, state = act(inputs)
        step = envs.step(action)
        tracker.add(step.reward)
        on_step(step, tracker)
        ended = step.terminated | step.truncated
        tracker.end(ended, step.info.get("cut", torch.zeros_like(ended)))
        if step.final_obs is not None and ended.any():
            last = step.obs.clone()
            last[ended] = step.final_obs[ended]
            on_last(last, ended)
        inputs = AgentInput(step.obs, ended, state, envs.action_mask)
    returns, lengths = zip(*tracker.finished, strict=True)
    return Episodes(returns, lengths)


@torch.inference_mode()
def play(
    agent: Agent, envs: VectorEnv, *, episodes: int, policy: PolicyKind, seed: int,
    on_choice: OnChoice | None = None, on_step: OnStep | None = None,
    on_last: OnLast = lambda obs, ended: None, precision: Precision = "fp32",
) -> Episodes:  # fmt: skip
    """Run an agent until every environment has finished its share of `episodes`.

    Args:
        agent: policy and value networks.
        envs: new environments.
        episodes: total number of episodes.
        policy: way of choosing actions.
        seed: seed of sampled actions.
        on_choice: see `OnChoice`; the environments can still be drawn.
        on_step: see `OnStep`.
        on_last: see `OnLast`.
        precision: precision of the encoders.
    """
    generator = Generator().manual_seed(seed)
    chosen: list[Any] = []  # distributions and actions of the latest step

    def act(inputs: AgentInput) -> tuple[Tensor, Tensor]:
        obs, first, state, mask = inputs
        arguments = (obs.unsqueeze(1), first.unsqueeze(1), state,
                     None if mask is None else mask.unsqueeze(1))  # fmt: skip
        output = None if on_choice is None else agent(*arguments, precision=precision)
        if output is None:  # nothing needs the values
            distribution, state = agent.policy(*arguments, precision=precision)
        else:
            distribution, state = output.policy, output.state
        action = distribution.mode() if policy == "greedy" else distribution.sample(generator)
        chosen[:] = distribution, action
        if on_choice is not None and output is not None:
            on_choice(inputs, output, action)
        return agent.policy_head.env_action(action[:, 0]), state

    def after_step(step: TimeStep, tracker: EpisodeTracker) -> None:
        if on_step is not None:
            distribution, action = chosen
            on_step(policy, distribution, action, step, tracker)

    state = agent.initial_state(envs.num_envs)
    return play_episodes(act, envs, state, episodes=episodes, on_last=on_last, on_step=after_step)
