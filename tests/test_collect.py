"""The collector with environments that follow a script.

Every number lands in its cell, episode by episode, rollout by rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from phasicrl.collect import Collector
from phasicrl.config import ModelConfig, ObsNormConfig, ValuePath
from phasicrl.envs.protocol import ExactState, TimeStep
from phasicrl.episodes import EpisodeStatistics
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.models.agent import Agent
from phasicrl.rollout import PhaseBuffer, Rollout
from tests.helpers import OBS_NORM

B, T, K = 3, 5, 3
# Episodes of each environment as length and end. Over three rollouts of five steps (ends marked by
# t for a truncation, x for a termination):
#   steps          01234 56789 01234
#   environment 0  .x..t ..t.t .....
#   environment 1  .t..x ..xtx ..x..
#   environment 2  ....t ..t.. .....
# Hence: both kinds in one step, two truncations around a termination in the last step of a rollout
# and in the middle of one,
# a truncation and a termination in a last step, an episode of a single step, episodes that reach
# into the next rollout.
SCRIPT = [
    [(2, "terminated"), (3, "truncated"), (3, "truncated"), (2, "truncated"), (99, "terminated")],
    [
        (2, "truncated"),
        (3, "terminated"),
        (3, "terminated"),
        (1, "truncated"),
        (1, "terminated"),
        (3, "terminated"),
        (99, "truncated"),
    ],
    [(5, "truncated"), (3, "truncated"), (99, "terminated")],
]


def reward_of(env: int, episode: int, step: int, action: int) -> float:
    """Exact in float32."""
    return 64 * env + 8 * episode + step - action / 4


class Scripted:
    """Environments that follow `SCRIPT`.

    An observation is (environment, episode, step of the episode).

    The final observation of a termination is not a number, because nobody may look at it.
    """

    name = "test:scripted"
    num_envs = B
    observation_space: gym.Space[Any] = gym.spaces.Box(-100, 100, (3,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(4)
    exact_state: ExactState = "none"
    mask_size = 0
    action_mask: Tensor | None = None
    device = torch.device("cpu")

    def __init__(self, *, info: bool = False) -> None:
        self.info, self.resets = info, 0

    def reset(self) -> Tensor:
        self.resets += 1
        self.position = [(0, 0)] * B
        return self._observe()

    def step(self, action: Tensor) -> TimeStep:
        assert action.shape == (B,)
        reward, ends, final_obs = torch.zeros(B), [""] * B, torch.full((B, 3), math.nan)
        level = torch.tensor([10 * env + episode for env, (episode, _) in enumerate(self.position)])
        for env, (episode, step) in enumerate(self.position):
            reward[env] = reward_of(env, episode, step, int(action[env]))
            length, end = SCRIPT[env][episode]
            self.position[env] = (episode, step + 1)
            if step + 1 == length:
                ends[env] = end
                if end == "truncated":
                    final_obs[env] = torch.tensor([env, episode, length])
                self.position[env] = (episode + 1, 0)
        terminated, truncated = (
            torch.tensor([end == kind for end in ends]) for kind in ("terminated", "truncated")
        )
        return TimeStep(
            obs=self._observe(),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_obs=final_obs if any(ends) else None,
            info={"level_seed": level, "level_complete": terminated.int()} if self.info else {},
        )

    def state_dict(self) -> None:
        pass

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _observe(self) -> Tensor:
        return torch.tensor([(env, *self.position[env]) for env in range(B)], dtype=torch.float32)


class Cell(NamedTuple):
    """One step of one environment as the script has it."""

    obs: tuple[int, int, int]
    end: str
    leads_to: tuple[int, int, int]


def told(env: int) -> Iterator[Cell]:
    """The script of one environment, step by step."""
    for episode, (length, end) in enumerate(SCRIPT[env]):
        for step in range(length):
            last = step + 1 == length
            after = (
                (env, episode + 1, 0) if last and end == "terminated" else (env, episode, step + 1)
            )
            yield Cell((env, episode, step), end if last else "", after)


def timeline(num_steps: int) -> list[list[Cell]]:
    """`[B][num_steps]`."""
    return [
        [cell for cell, _ in zip(told(env), range(num_steps), strict=False)] for env in range(B)
    ]


class Masked(Scripted):
    """The same, where an action is allowed if it is the environment's number, or that of the step
    in the episode (modulo four).
    """

    mask_size = 4

    def _observe(self) -> Tensor:
        obs = super()._observe()
        self.action_mask = torch.tensor(
            [[a in (env, int(step) % 4) for a in range(4)] for env, _, step in obs.tolist()]
        )
        return obs


def make_agent(
    seed: int = 0,
    *,
    memory: Literal["none", "lstm", "gru"] = "none",
    value_path: ValuePath = "separate",
    obs_norm: bool = False,
) -> Agent:
    config = ModelConfig(
        encoder="mlp",
        hidden_sizes=(32,),
        value_head_scale=1.0,
        policy_head_scale=0.2,
        memory=memory,
        memory_size=8,
        value_path=value_path,
    )
    norm = OBS_NORM if obs_norm else ObsNormConfig()
    generator = Generator().manual_seed(seed)
    return Agent(
        Scripted.observation_space,
        Scripted.action_space,
        config,
        generator=generator,
        auxiliary=False,
        obs_norm=norm,
    )


def make_collector(
    envs: Scripted | None = None, *, bootstrap_truncation: bool = True, seed: int = 3,
    memory: Literal["none", "lstm", "gru"] = "none", value_path: ValuePath = "separate",
    obs_norm: bool = False,
) -> Collector:  # fmt: skip
    collector = Collector(
        envs or Scripted(),
        make_agent(memory=memory, value_path=value_path, obs_norm=obs_norm),
        generator=Generator().manual_seed(seed),
        executor=Executor(Plan()),
        bootstrap_truncation=bootstrap_truncation,
    )
    collector.start()
    return collector


def make_buffer(
    num_rollouts: int = K, *, state_size: int = 0, num_actions: int | None = None
) -> PhaseBuffer:
    return PhaseBuffer(
        num_rollouts,
        B,
        T,
        obs_shape=(3,),
        obs_dtype=torch.float32,
        action_shape=(),
        action_dtype=torch.int64,
        state_size=state_size,
        num_actions=num_actions,
        device=torch.device("cpu"),
    )


def collect(collector: Collector, num_rollouts: int = K) -> dict[str, Tensor]:
    """Rollouts one after the other, as if they were one: every field `[B, K·T, …]`."""
    buffer = make_buffer(
        num_rollouts,
        state_size=collector.agent.state_size,
        num_actions=collector.envs.mask_size or None,
    )
    for _ in range(num_rollouts):
        rollout = buffer.next_rollout()
        fill_with_rubbish(rollout)
        collector.collect(rollout)
    slots = [buffer.rollout(slot).tensors() for slot in range(num_rollouts)]
    del slots[0]["reward_scale"]  # the learner writes it
    return {name: torch.cat([slot[name] for slot in slots], dim=1) for name in slots[0]}


def fill_with_rubbish(rollout: Rollout) -> None:
    """So that a cell that is not written shows."""
    for tensor in rollout.tensors().values():
        tensor.fill_(True if tensor.dtype == torch.bool else 99)


@torch.no_grad()
def value_of(agent: Agent, obs: Tensor) -> Tensor:
    """V of observations `[…, 3]`."""
    flat = obs.reshape(-1, 1, 3)
    return agent.value(
        flat, torch.zeros(len(flat), 1, dtype=torch.bool), agent.initial_state(len(flat))
    )[:, 0].reshape(obs.shape[:-1])


def test_everything_that_happens_lands_in_its_cell() -> None:
    collected, cells = collect(make_collector()), timeline(K * T)
    assert collected["obs"].tolist() == [[list(cell.obs) for cell in row] for row in cells]
    assert collected["first"].tolist() == [[cell.obs[2] == 0 for cell in row] for row in cells]
    assert collected["terminated"].tolist() == [
        [cell.end == "terminated" for cell in row] for row in cells
    ]
    assert collected["truncated"].tolist() == [
        [cell.end == "truncated" for cell in row] for row in cells
    ]
    actions = collected["action"].tolist()
    assert collected["reward"].tolist() == [
        [reward_of(*cell.obs, action) for cell, action in zip(row, taken, strict=True)]
        for row, taken in zip(cells, actions, strict=True)
    ]
    assert {action for row in actions for action in row} == {0, 1, 2, 3}


def test_next_values_are_of_the_final_observation_where_cut_and_of_the_next_one_elsewhere() -> None:
    collector = make_collector()
    collected, cells = collect(collector), timeline(K * T)
    leads_to = torch.tensor([[cell.leads_to for cell in row] for row in cells], dtype=torch.float32)
    torch.testing.assert_close(
        collected["next_value"], value_of(collector.agent, leads_to), rtol=1e-5, atol=1e-5
    )
    # The comparison means something: observations that could be mistaken for each other have other
    # values.
    after_reset = torch.tensor(
        [[(env, cell.obs[1] + 1, 0) for cell in row] for env, row in enumerate(cells)],
        dtype=torch.float32,
    )
    cut = collected["truncated"]
    assert cut[:, T - 1 :: T].any()
    assert (
        value_of(collector.agent, after_reset)[cut] - collected["next_value"][cut]
    ).abs().min() > 1e-3


@pytest.mark.parametrize("value_path", get_args(ValuePath))
def test_values_are_the_agents_whenever_they_are_asked_for(value_path: ValuePath) -> None:
    collector = make_collector(value_path=value_path)
    collected = collect(collector)
    torch.testing.assert_close(
        collected["value"], value_of(collector.agent, collected["obs"]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(("memory", "calls"), [("none", 2), ("lstm", T + 1)])
def test_a_value_network_of_its_own_is_not_asked_while_acting_unless_it_must_remember(
    memory: Literal["none", "lstm"], calls: int
) -> None:
    """Once for the rollout and once for what lies in none, instead of once a step."""
    collector, asked = make_collector(memory=memory), []
    assert collector.agent.value_encoder is not None
    collector.agent.value_encoder.register_forward_hook(lambda *_: asked.append(1))
    collect(collector, 1)
    assert len(asked) == calls


def test_without_bootstrap_ends_are_what_they_are_and_no_final_observation_is_valued() -> None:
    collector = make_collector(bootstrap_truncation=False)
    collected, cells = collect(collector), timeline(K * T)
    assert collected["terminated"].tolist() == [
        [cell.end == "terminated" for cell in row] for row in cells
    ]
    assert collected["truncated"].tolist() == [
        [cell.end == "truncated" for cell in row] for row in cells
    ]
    assert collected["first"].tolist() == [[cell.obs[2] == 0 for cell in row] for row in cells]
    goes_on = torch.tensor(
        [
            [(env, cell.obs[1] + 1, 0) if cell.end else cell.leads_to for cell in row]
            for env, row in enumerate(cells)
        ]
    )
    assert collected["truncated"].any()
    torch.testing.assert_close(
        collected["next_value"], value_of(collector.agent, goes_on.float()), rtol=1e-5, atol=1e-5
    )


@torch.no_grad()
@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_a_final_observation_is_valued_with_the_memory_of_its_own_episode(
    memory: Literal["lstm", "gru"],
) -> None:
    collector = make_collector(memory=memory)
    collected, cells = collect(collector), timeline(K * T)
    agent, yes, no = (
        collector.agent,
        torch.ones(1, 1, dtype=torch.bool),
        torch.zeros(1, 1, dtype=torch.bool),
    )
    for env in range(B):
        state = agent.initial_state(1)
        for t, cell in enumerate(cells[env]):
            output = agent(
                torch.tensor([[cell.obs]], dtype=torch.float32),
                yes if cell.obs[2] == 0 else no,
                state,
            )
            torch.testing.assert_close(
                collected["value"][env, t], output.value[0, 0], rtol=1e-5, atol=1e-5
            )
            state = output.state  # what is remembered after this step, before any reset
            goes_on = no if cell.leads_to[2] else yes
            led_to = agent.value(
                torch.tensor([[cell.leads_to]], dtype=torch.float32), goes_on, state
            )
            torch.testing.assert_close(
                collected["next_value"][env, t], led_to[0, 0], rtol=1e-5, atol=1e-5
            )
    cut = collected["truncated"]
    forgotten = value_of(
        agent, torch.tensor([[cell.leads_to for cell in row] for row in cells], dtype=torch.float32)
    )
    assert (
        forgotten[cut] - collected["next_value"][cut]
    ).abs().max() > 1e-3  # the comparison means something


@torch.no_grad()
def test_the_state_before_each_rollout_makes_it_repeatable() -> None:
    collector = make_collector(memory="lstm")
    buffer = make_buffer(K, state_size=collector.agent.state_size)
    for _ in range(K):
        rollout = buffer.next_rollout()
        collector.collect(rollout)
        output = collector.agent(rollout.obs, rollout.first, rollout.state)
        torch.testing.assert_close(output.value, rollout.value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            output.policy.log_prob(rollout.action), rollout.log_prob, rtol=1e-5, atol=1e-5
        )
    assert rollout.state.any()


@torch.no_grad()
@pytest.mark.parametrize("value_path", ["separate", "shared"])
@pytest.mark.parametrize("memory", ["none", "lstm", "gru"])
def test_a_rollout_that_begins_the_statistics_is_valued_with_them_and_acted_without(
    memory: Literal["none", "lstm", "gru"], value_path: ValuePath
) -> None:
    """Every value, next value and memory state is that of single steps under the statistics of this
    very rollout.
    """
    collector = make_collector(memory=memory, value_path=value_path, obs_norm=True)
    buffer, agent = make_buffer(2, state_size=collector.agent.state_size), collector.agent
    first_rollout, second_rollout = buffer.next_rollout(), buffer.next_rollout()
    fill_with_rubbish(first_rollout)
    collector.collect(first_rollout, update_obs_norm_before_targets=True)
    assert agent.reader.normalizer is not None and agent.reader.normalizer.moments.count == B * T
    mean = first_rollout.obs.double().mean((0, 1))
    torch.testing.assert_close(agent.reader.normalizer.moments.mean, mean)
    collector.collect(second_rollout)
    # The second one counts when it has been learned from.
    assert agent.reader.normalizer.moments.count == B * T
    yes, no, cells = (
        torch.ones(1, 1, dtype=torch.bool),
        torch.zeros(1, 1, dtype=torch.bool),
        timeline(2 * T),
    )
    for env in range(B):
        state = agent.initial_state(1)
        for t, cell in enumerate(cells[env]):
            rollout, at = (first_rollout, t) if t < T else (second_rollout, t - T)
            if t == T:
                torch.testing.assert_close(
                    rollout.state[env : env + 1], state, rtol=1e-5, atol=1e-5
                )
            output = agent(
                torch.tensor([[cell.obs]], dtype=torch.float32),
                yes if cell.obs[2] == 0 else no,
                state,
            )
            torch.testing.assert_close(
                rollout.value[env, at], output.value[0, 0], rtol=1e-5, atol=1e-5
            )
            state = output.state
            goes_on = no if cell.leads_to[2] else yes
            led_to = agent.value(
                torch.tensor([[cell.leads_to]], dtype=torch.float32), goes_on, state
            )
            torch.testing.assert_close(
                rollout.next_value[env, at], led_to[0, 0], rtol=1e-5, atol=1e-5
            )
    assert first_rollout.truncated[:, :-1].any() and first_rollout.truncated[:, -1].any()
    # The policy that acted saw the observations as they are, and the probabilities are its.
    raw = make_agent(memory=memory, value_path=value_path, obs_norm=True)
    output = raw(first_rollout.obs, first_rollout.first, raw.initial_state(B))
    torch.testing.assert_close(
        first_rollout.log_prob, output.policy.log_prob(first_rollout.action), rtol=1e-5, atol=1e-5
    )
    assert (output.value - first_rollout.value).abs().max() > 1e-2  # the comparison means something


def test_masks_are_obeyed_and_kept_beside_the_observation_they_belong_to() -> None:
    collector = make_collector(Masked())
    collected = collect(collector)
    env, step = collected["obs"][..., 0].long(), collected["obs"][..., 2].long() % 4
    allowed = torch.zeros(B, K * T, 4, dtype=torch.bool)
    allowed.scatter_(2, env.unsqueeze(-1), True).scatter_(2, step.unsqueeze(-1), True)
    assert torch.equal(collected["action_mask"], allowed)
    assert allowed.gather(2, collected["action"].unsqueeze(-1)).all()
    with torch.no_grad():
        output = collector.agent(
            collected["obs"], collected["first"], collector.agent.initial_state(B), allowed
        )
    torch.testing.assert_close(
        collected["log_prob"], output.policy.log_prob(collected["action"]), rtol=1e-5, atol=1e-5
    )


def test_log_probs_and_values_are_those_of_the_agent() -> None:
    collector = make_collector()
    collected = collect(collector)
    with torch.no_grad():
        output = collector.agent(
            collected["obs"], collected["first"], collector.agent.initial_state(B)
        )
    torch.testing.assert_close(
        collected["log_prob"], output.policy.log_prob(collected["action"]), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(collected["value"], output.value, rtol=1e-5, atol=1e-5)
    assert collected["log_prob"].unique().numel() > 10
    assert not collected["value"].requires_grad


def test_the_same_generator_gives_the_same_actions_and_another_gives_others() -> None:
    actions = [collect(make_collector(seed=seed))["action"] for seed in (3, 3, 4)]
    assert torch.equal(actions[0], actions[1])
    assert not torch.equal(actions[0], actions[2])


def test_actions_do_not_depend_on_the_global_random_numbers() -> None:
    with torch.random.fork_rng(devices=[]):
        actions = []
        for seed in (1, 2):
            collector = make_collector()
            torch.manual_seed(seed)
            actions.append(collect(collector)["action"])
    assert torch.equal(actions[0], actions[1])


def test_rollouts_are_written_in_place_and_can_be_trained_on() -> None:
    collector, buffer = make_collector(), make_buffer(1)
    rollout = buffer.next_rollout()
    place = rollout.obs.data_ptr()
    collector.collect(rollout)
    assert rollout.obs.data_ptr() == place
    assert torch.equal(buffer.segments().obs, rollout.obs)
    output = collector.agent(rollout.obs, rollout.first, rollout.state)
    (output.policy.log_prob(rollout.action) - rollout.log_prob).sum().backward()


def finished_episodes(rewards: Tensor, start: int, stop: int) -> list[tuple[float, int]]:
    """Return and length of the episodes that end in steps `start … stop − 1`, in the order in which
    they end.
    """
    finished: list[tuple[int, float, int]] = []
    for env, row in enumerate(timeline(K * T)):
        for t, cell in enumerate(row):
            length = cell.obs[2] + 1
            if cell.end and start <= t < stop:
                finished.append((t, rewards[env, t + 1 - length : t + 1].sum().item(), length))
    return [
        (total, length) for _, total, length in sorted(finished, key=lambda episode: episode[0])
    ]


def test_returns_and_lengths_are_exact_across_rollouts() -> None:
    collector, buffer = make_collector(), make_buffer()
    reports = []
    for _ in range(K):
        collector.collect(buffer.next_rollout())
        reports.append(collector.episodes.report())
    rewards = torch.cat([buffer.rollout(slot).reward for slot in range(K)], dim=1)
    seen: list[float] = []
    for slot, report in enumerate(reports):
        finished = finished_episodes(rewards, slot * T, (slot + 1) * T)
        seen += [total for total, _ in finished]
        assert report == {
            "charts/num_episodes": [5, 6, 1][slot],
            "charts/episodic_return": pytest.approx(np.mean([total for total, _ in finished])),
            "charts/episodic_length": pytest.approx(np.mean([length for _, length in finished])),
            "charts/episodic_return_100": pytest.approx(np.mean(seen)),
        }


def test_the_environments_are_reset_by_start_and_not_before() -> None:
    envs = Scripted()
    collector = Collector(
        envs,
        make_agent(),
        generator=Generator(),
        executor=Executor(Plan()),
        bootstrap_truncation=True,
    )
    assert envs.resets == 0
    collector.start()
    assert envs.resets == 1


def test_procgen_levels_are_counted_once_and_completion_only_where_an_episode_ended() -> None:
    collector = make_collector(Scripted(info=True))
    collect(collector, 1)
    # Levels are numbered by environment and episode: 0 1, 10 11, 20. Of the five episodes that
    # ended, two terminated.
    report = collector.episodes.report()
    assert report["procgen/num_levels_seen"] == 5
    assert report["procgen/level_complete"] == pytest.approx(2 / 5)
    again = collector.episodes.report()
    assert "procgen/level_complete" not in again
    assert again["procgen/num_levels_seen"] == 5


def test_episodes_survive_a_restart_before_and_after_a_report() -> None:
    collector = make_collector(Scripted(info=True))
    collect(collector)

    def restarted() -> EpisodeStatistics:
        again = EpisodeStatistics(B)
        again.load_state_dict(collector.episodes.state_dict())
        return again

    unreported = restarted()
    before = collector.episodes.report()
    assert before["charts/num_episodes"] == 12
    assert unreported.report() == before
    after = restarted().report()
    for name in ("charts/episodic_return_100", "procgen/num_levels_seen"):
        assert after[name] == before[name]
    assert after["charts/num_episodes"] == 0
