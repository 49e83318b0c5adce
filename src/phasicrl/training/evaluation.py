"""Episodes of an agent without training, also during a run. Kind: effects (steps environments)."""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from importlib.metadata import entry_points
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from phasicrl.config import ActionSelection, Config, EnvConfig, EvaluatedLevels, Levels, Precision
from phasicrl.distributed import World
from phasicrl.envs.make import make_envs, resolve_env_id
from phasicrl.envs.protocol import LIMIT_HINT, TimeStep, VectorEnv
from phasicrl.learner import Record
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import MetricsLog
from phasicrl.seeding import derive_seed


def load_lab_entry_point(name: str) -> Any:
    """Load a class or function that `phasicrl.lab` registers as an entry point.

    Raises:
        ImportError: the lab is not installed.
    """
    for entry in entry_points(group="phasicrl.lab", name=name):
        return entry.load()
    raise ImportError("films and tables of steps need the lab: pip install 'phasicrl[lab]'")


class Episodes(NamedTuple):
    """Finished episodes: undiscounted returns in environment rewards, and lengths."""

    returns: tuple[float, ...]
    lengths: tuple[int, ...]


LONG_EPISODE_STEPS, MAX_EPISODE_STEPS = 10_000, 30_000
"""Steps of an episode after which there is a warning, and after which it is cut.

The longest known episodes, of Atari, have 27,000.
"""


class EpisodeTracker:
    """Returns and lengths of current and finished episodes of B environments.

    Args:
        num_envs: number of environments B.
        episodes: number of episodes to count; each environment counts its first
            `episodes / num_envs`, so that short episodes are not favored.
    """

    def __init__(self, num_envs: int, episodes: int) -> None:
        self._left = torch.full((num_envs,), episodes // num_envs)
        self._left[: episodes % num_envs] += 1
        self.indices, self.lengths = torch.zeros(2, num_envs, dtype=torch.int64)
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.finished: list[tuple[float, int]] = []

    @property
    def unfinished_envs(self) -> Tensor:
        """Mask `[B]` of the environments that have not yet finished their number of episodes."""
        return self._left > 0

    def mark_episodes_to_cut(self, name: str, ended: Tensor) -> Tensor:
        """Return the mask `[B]` of counted episodes that do not end; warn of long ones."""
        lengths = self.lengths * self.unfinished_envs
        if lengths.max() == LONG_EPISODE_STEPS:
            text = f"{name}: an episode of the evaluation has {LONG_EPISODE_STEPS:,} steps, and is"
            text += f" cut at {MAX_EPISODE_STEPS:,}. If none ends, set a time limit ({LIMIT_HINT})"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        endless = (lengths >= MAX_EPISODE_STEPS) & ~ended
        self._left[endless] = 1  # the last of its environment, which is not reset
        return endless

    def finish_episodes(self, ended: Tensor, failed: Tensor) -> None:
        """Finish episodes where `ended` `[B]`; do not count those where `failed` `[B]` as well."""
        counted = ended & self.unfinished_envs & ~failed
        pairs = (self.returns[counted].tolist(), self.lengths[counted].tolist())
        self.finished += zip(*pairs, strict=True)
        self._left[counted] -= 1
        self.indices[ended] += 1
        self.returns[ended], self.lengths[ended] = 0, 0


OnStep = Callable[[ActionSelection, Policy, Tensor, TimeStep, EpisodeTracker], None]
"""Callback after every step, with kind of policy, distributions, actions, step and episodes."""


def list_level_kinds(levels: EvaluatedLevels) -> tuple[Levels, ...]:
    """Return the kinds of levels to evaluate: for `both`, unseen and then training levels."""
    return ("unseen", "train") if levels == "both" else (levels,)


def check_levels(levels: EvaluatedLevels, env: EnvConfig | None) -> None:
    """Check that training levels and unseen levels differ, unless `levels` is `unseen`.

    Args:
        levels: requested levels.
        env: options of the training environment; None for a custom one, which is not checked.

    Raises:
        ValueError: the environment is not a game of Procgen, or was trained on all levels; or the
            word is another one.
    """
    if levels not in ("unseen", "train", "both"):
        raise ValueError(f"levels is {levels!r}; expected unseen, train or both")
    if levels == "unseen" or env is None:
        return
    is_procgen = resolve_env_id(env.id)[0] == "procgen"
    if not is_procgen or env.num_levels == 0:
        seen = "an agent that was trained on all levels (env.num_levels 0)"
        other = "an environment that is not a game of Procgen (procgen:NAME)"
        raise ValueError(f"levels is {levels}; expected unseen for {seen if is_procgen else other}")


def make_evaluation_envs(
    config: Config, *, num_envs: int, levels: Levels, seed: int, env_steps: int = 0, **user: Any
) -> VectorEnv:
    """Make environments like those of a run, with whole games and seeds unused in training.

    Args:
        config: options of the run.
        num_envs: number of environments.
        levels: levels of Procgen, see `evaluate`.
        seed: seed of the environments.
        env_steps: environment steps of the run so far.
        user: custom `make_env` or `make_vector_env`, see `evaluate`.
    """
    num_levels = 0 if levels == "unseen" else config.env.num_levels
    env = replace(config.env, num_envs=num_envs, num_levels=num_levels)
    return make_envs(
        env, seed=derive_seed(seed, "evaluation"), whole_games=True,
        steps_before=env_steps // config.env.num_envs, **user,
    )  # fmt: skip


class AgentInput(NamedTuple):
    """Inputs of a policy for one step of B environments.

    Attributes:
        obs: observations as in a rollout, `[B, *shape]`.
        first: whether the step is the first of its episode, `[B]`.
        state: memory state, `[B, H]`.
        action_mask: allowed actions, `[B, A]`; None if all are.
    """

    obs: Tensor
    first: Tensor
    state: Tensor
    action_mask: Tensor | None


OnEpisodeEnd = Callable[[Tensor, Tensor], None]
"""Callback when episodes end: observations `[B, …]`, final where one ended, and ends `[B]`."""
OnChoice = Callable[[AgentInput, Policy, Tensor], None]
"""Callback before each step, with inputs, distributions `[B, 1]` and actions `[B, 1, …]`."""
Act = Callable[[AgentInput], tuple[Tensor, Tensor]]
"""Function that maps inputs to environment actions `[B, …]` and the next memory state `[B, H]`."""


def run_episodes(
    act: Act, envs: VectorEnv, state: Tensor, *, episodes: int,
    on_episode_end: OnEpisodeEnd = lambda obs, ended: None,
    on_step: Callable[[TimeStep, EpisodeTracker], None] = lambda step, tracker: None,
) -> Episodes:  # fmt: skip
    """Run episodes until every environment has finished its number of them; return all.

    An episode of `MAX_EPISODE_STEPS` is cut, as by a time limit: it counts with its return so far,
    and is the last of its environment. There is a warning before.

    Args:
        act: function that chooses actions.
        envs: new environments.
        state: initial memory state, `[B, H]`.
        episodes: total number of episodes.
        on_episode_end: callback at the ends of episodes, see `OnEpisodeEnd`.
        on_step: callback after every step, with the step and the episodes so far.
    """
    tracker = EpisodeTracker(envs.num_envs, episodes)
    first = torch.ones(envs.num_envs, dtype=torch.bool)
    inputs = AgentInput(envs.reset().cpu(), first, state, _to_cpu(envs.action_mask))
    while tracker.unfinished_envs.any():
        action, state = act(inputs)
        step = envs.step(action.to(envs.device, copy=True))
        names = ("obs", "reward", "terminated", "truncated", "final_obs")
        step = replace(step, **{name: _to_cpu(getattr(step, name)) for name in names})
        tracker.returns += step.reward
        tracker.lengths += 1
        ended = step.terminated | step.truncated
        endless = tracker.mark_episodes_to_cut(envs.name, ended)
        on_step(replace(step, truncated=step.truncated | endless), tracker)
        tracker.finish_episodes(ended | endless, step.info.get("cut", torch.zeros_like(ended)))
        if step.final_obs is not None and ended.any():
            last = step.obs.clone()
            last[ended] = step.final_obs[ended]
            on_episode_end(last, ended)
        inputs = AgentInput(step.obs, ended, state, _to_cpu(envs.action_mask))
    return Episodes(*zip(*tracker.finished, strict=True))


def _to_cpu(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.cpu()


def choose_actions(
    agent: Agent, inputs: AgentInput, generator: Generator | None, precision: Precision
) -> tuple[Policy, Tensor, Tensor]:
    """Choose an agent's actions for one step of B environments.

    Args:
        agent: policy and value networks.
        inputs: inputs of the policy.
        generator: random generator of sampled actions; None for the most likely actions.
        precision: precision of the encoders.

    Returns:
        Distributions `[B, 1]`, actions `[B, 1, …]`, and the next memory state `[B, H]`.
    """
    obs, first, state, mask = inputs
    steps = (obs.unsqueeze(1), first.unsqueeze(1), state,
             None if mask is None else mask.unsqueeze(1))  # fmt: skip
    if agent.state_size:  # a separate value network has a memory, too
        output = agent(*steps, precision=precision)
        policy, state = output.policy, output.state
    else:
        policy, state = agent.policy(*steps, precision=precision)
    action = policy.mode() if generator is None else policy.sample(generator)
    return policy, action, state


@torch.inference_mode()
def run_agent_episodes(
    agent: Agent, envs: VectorEnv, *, episodes: int, policy: ActionSelection, seed: int,
    on_choice: OnChoice = lambda *_: None, on_step: OnStep | None = None,
    on_episode_end: OnEpisodeEnd = lambda obs, ended: None, precision: Precision = "fp32",
) -> Episodes:  # fmt: skip
    """Run episodes of an agent until every environment has finished its number of episodes.

    Args:
        agent: policy and value networks.
        envs: new environments.
        episodes: total number of episodes.
        policy: kind of actions, greedy or sampled.
        seed: seed of sampled actions.
        on_choice: callback before each step, when environments can be rendered, see `OnChoice`.
        on_step: callback after each step, see `OnStep`.
        on_episode_end: callback at the ends of episodes, see `OnEpisodeEnd`.
        precision: precision of the encoders.
    """
    generator = None if policy == "greedy" else Generator().manual_seed(int(seed) % 2**64)
    latest_choice: list[Any] = []  # distributions and actions of the latest step

    def act(inputs: AgentInput) -> tuple[Tensor, Tensor]:
        distribution, action, state = choose_actions(agent, inputs, generator, precision)
        latest_choice[:] = distribution, action
        on_choice(inputs, distribution, action)
        return agent.policy_head.env_action(action[:, 0]), state

    return run_episodes(
        act, envs, agent.initial_state(envs.num_envs), episodes=episodes,
        on_step=lambda *step: on_step(policy, *latest_choice, *step) if on_step else None,
        on_episode_end=on_episode_end,
    )  # fmt: skip


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
            self._recorder = load_lab_entry_point("EvalRecorder")(config, files, log, **self._user)

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
        kinds = list_level_kinds(self._config.evaluation.levels)
        env_ids = self._config.evaluation.env_ids
        eval_configs: list[tuple[Levels, Config]] = [(x, self._config) for x in kinds]
        eval_configs.extend((kinds[0], self._config.with_updates({"env.id": x})) for x in env_ids)
        with self._world.sync_errors("an evaluation"):
            episodes = [self._run_episodes(*x, agent, env_steps) for x in eval_configs]
        (mean_return, mean_length), *means = (
            [statistics.fmean(chain.from_iterable(numbers)) for numbers in zip(*parts, strict=True)]
            for parts in zip(*self._world.all_gather_object(episodes), strict=True)
        )
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

    def _run_episodes(
        self, levels: Levels, config: Config, agent: Agent, env_steps: int
    ) -> Episodes:
        """Run this process's episodes on one environment and kind of levels; record the first."""
        is_own = config is self._config
        is_first = is_own and levels == list_level_kinds(config.evaluation.levels)[0]
        recorder, user = self._recorder if is_first else None, self._user if is_own else {}
        # All evaluations have the same seeds; they differ between processes, and from those of
        # `evaluate`, which may judge the best weights.
        others = () if self._world.is_first else (self._world.rank,)
        seed = derive_seed(config.seed, "validation", *others)
        num_envs = min(self._episodes, 16)
        envs = make_evaluation_envs(
            config, num_envs=num_envs, levels=levels, seed=seed, env_steps=env_steps, **user
        )
        with closing(envs):
            return run_agent_episodes(
                agent, envs, episodes=self._episodes, policy=config.evaluation.policy,
                seed=config.seed, precision=config.compute.policy_precision,
                on_step=None if recorder is None else recorder.on_step,
            )  # fmt: skip
