"""The collector with environments that follow a script.

Every number lands in its cell, episode by episode, rollout by rollout.
"""

import json
import math
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from phasicrl.collect import Collector
from phasicrl.config import ModelConfig, ObsNormConfig, ValuePath
from phasicrl.envs.protocol import RestoreMethod, TimeStep
from phasicrl.episodes import EpisodeStatistics
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.models.agent import Agent
from phasicrl.rollout import PhaseBuffer, Rollout
from tests.helpers import OBS_NORM

B, T, K = 3, 5, 3
# Three rollouts of five steps of each environment, t for a truncation and x for a termination.
# Hence: both kinds in one step, two truncations around a termination in the last step of a rollout
# and in the middle of one, a truncation and a termination in a last step, an episode of a single
# step, episodes that reach into the next rollout.
SCRIPT = (".x..t" + "..t.t" + ".....", ".t..x" + "..xtx" + "..x..", "....t" + "..t.." + ".....")
ENDS = {".": "", "x": "terminated", "t": "truncated"}
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-5}
Kind = Literal["none", "lstm", "gru"]


class Cell(NamedTuple):
    """One step of one environment: (environment, episode, step), its end, what it leads to."""

    obs: tuple[int, int, int]
    end: str
    leads_to: tuple[int, int, int]
    next_obs: tuple[int, int, int]


def timeline(num_steps: int = K * T) -> list[list[Cell]]:
    """Return the script as cells, `[B][num_steps]`."""
    rows: list[list[Cell]] = []
    for env, ends in enumerate(SCRIPT):
        row, episode, step = [], 0, 0
        for letter in ends[:num_steps]:
            goes_on, reset = (env, episode, step + 1), (env, episode + 1, 0)
            next_obs = goes_on if letter == "." else reset
            leads_to = goes_on if letter == "t" else next_obs
            row.append(Cell((env, episode, step), ENDS[letter], leads_to, next_obs))
            _, episode, step = next_obs
        rows.append(row)
    return rows


def reward_of(env: int, episode: int, step: int, action: int) -> float:
    """Return the reward of a cell, exact in float32."""
    return 64 * env + 8 * episode + step - action / 4


class Scripted:
    """Environments that follow `SCRIPT`; an observation is (environment, episode, step of it).

    The final observation of a termination is not a number, because it must not be used.
    """

    name = "test:scripted"
    num_envs = B
    observation_space: gym.Space[Any] = gym.spaces.Box(-100, 100, (3,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(4)
    restore_method: RestoreMethod = "none"
    has_final_obs = True
    mask_size = 0
    action_mask: Tensor | None = None
    device = torch.device("cpu")

    def __init__(self, *, info: bool = False) -> None:
        self.info, self.at, self.cells = info, -1, timeline()

    def reset(self) -> Tensor:
        self.at += 1
        return self._observe([row[0].obs for row in self.cells])

    def step(self, action: Tensor) -> TimeStep:
        assert action.shape == (B,)
        cells = [row[self.at] for row in self.cells]
        self.at += 1
        terminated = torch.tensor([cell.end == "terminated" for cell in cells])
        truncated = torch.tensor([cell.end == "truncated" for cell in cells])
        final_obs = torch.tensor([cell.leads_to for cell in cells], dtype=torch.float32)
        final_obs[~truncated] = math.nan
        level = torch.tensor([10 * env + episode for env, episode, _ in (c.obs for c in cells)])
        pairs = zip(cells, action.tolist(), strict=True)
        return TimeStep(
            obs=self._observe([cell.next_obs for cell in cells]),
            reward=torch.tensor([reward_of(*cell.obs, one) for cell, one in pairs]),
            terminated=terminated,
            truncated=truncated,
            final_obs=final_obs if (terminated | truncated).any() else None,
            info={"level_seed": level, "level_complete": terminated.int()} if self.info else {},
        )

    def check(self) -> None: ...

    def state_dict(self) -> None: ...

    def load_state_dict(self, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def close(self) -> None: ...

    def _observe(self, obs: list[tuple[int, int, int]]) -> Tensor:
        return torch.tensor(obs, dtype=torch.float32)


class Masked(Scripted):
    """Masks that allow the environment's number, and the step modulo four."""

    mask_size = 4

    def _observe(self, obs: list[tuple[int, int, int]]) -> Tensor:
        allowed = [[a in (env, step % 4) for a in range(4)] for env, _, step in obs]
        self.action_mask = torch.tensor(allowed)
        return super()._observe(obs)


def make_agent(
    memory: Kind = "none", value_path: ValuePath = "separate", *, obs_norm: bool = False
) -> Agent:
    config = ModelConfig(
        encoder="mlp", hidden_sizes=(32,), value_head_scale=1.0, policy_head_scale=0.2,
        memory=memory, memory_size=8, value_path=value_path,
    )  # fmt: skip
    return Agent(
        Scripted.observation_space, Scripted.action_space, config, auxiliary=False,
        generator=Generator().manual_seed(0), obs_norm=OBS_NORM if obs_norm else ObsNormConfig(),
    )  # fmt: skip


def make_collector(
    envs: Scripted | None = None, agent: Agent | None = None, *, bootstrap: bool = True
) -> Collector:
    collector = Collector(
        envs or Scripted(), agent or make_agent(), generator=Generator().manual_seed(3),
        executor=Executor(Plan()), bootstrap_truncation=bootstrap,
    )  # fmt: skip
    collector.reset()
    return collector


def collect(collector: Collector, num_rollouts: int = K, *, update: bool = False) -> list[Rollout]:
    """Collect rollouts; `update` begins the observation statistics with the first."""
    buffer = PhaseBuffer(
        num_rollouts, B, T, obs_shape=(3,), obs_dtype=torch.float32, action_shape=(),
        action_dtype=torch.int64, state_size=collector.agent.state_size,
        mask_size=collector.envs.mask_size or None, device=torch.device("cpu"),
        has_weights=not collector.envs.has_final_obs,
    )  # fmt: skip
    for slot in range(num_rollouts):
        rollout = buffer.next_rollout()
        for tensor in rollout.tensors().values():  # so that a cell that is not written shows
            tensor.fill_(True if tensor.dtype == torch.bool else 99)
        collector.collect(rollout, updates_obs_norm_before_values=update and not slot)
    return [buffer.rollout(slot) for slot in range(num_rollouts)]


def joined(rollouts: list[Rollout]) -> dict[str, Tensor]:
    """Join every field of the rollouts, `[B, K·T, …]`."""
    slots = [rollout.tensors() for rollout in rollouts]
    del slots[0]["reward_scale"]  # the learner writes it
    return {name: torch.cat([slot[name] for slot in slots], dim=1) for name in slots[0]}


@torch.no_grad()
def value_of(agent: Agent, obs: list[list[tuple[int, int, int]]]) -> Tensor:
    """Return V of observations `[B][n]`, each without a past."""
    flat, first = torch.tensor(obs, dtype=torch.float32).view(-1, 1, 3), torch.zeros(1, 1) > 0
    return agent.value(flat, first.expand(len(flat), 1), agent.initial_state(len(flat))).view(B, -1)


@torch.no_grad()
def step_by_step(agent: Agent, num_steps: int) -> dict[str, Tensor]:
    """Return value and next value `[B, n]`, and memory state before each step `[B, n, H]`."""
    found: dict[str, list[Tensor]] = {"value": [], "next_value": [], "state": []}

    def inputs(obs: tuple[int, int, int], state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tensor([[obs]], dtype=torch.float32), torch.tensor([[obs[2] == 0]]), state

    for row in timeline(num_steps):
        state = agent.initial_state(1)
        for cell in row:
            output = agent(*inputs(cell.obs, state))
            found["state"].append(state)
            state = output.state  # after this step, before any reset
            found["value"].append(output.value)
            found["next_value"].append(agent.value(*inputs(cell.leads_to, state)))
    return {name: torch.stack(x).view(B, num_steps, -1).squeeze(-1) for name, x in found.items()}


@pytest.mark.parametrize("bootstrap", [True, False])
def test_everything_that_happens_lands_in_its_cell(bootstrap: bool) -> None:
    collector, cells = make_collector(bootstrap=bootstrap), timeline()
    rollouts = collect(collector)
    place = rollouts[0].obs.data_ptr()
    found = joined(rollouts)
    actions = found["action"].tolist()
    assert found["obs"].tolist() == [[list(cell.obs) for cell in row] for row in cells]
    assert found["first"].tolist() == [[cell.obs[2] == 0 for cell in row] for row in cells]
    for kind in ("terminated", "truncated"):
        assert found[kind].tolist() == [[cell.end == kind for cell in row] for row in cells]
    assert found["reward"].tolist() == [
        [reward_of(*cell.obs, action) for cell, action in zip(row, taken, strict=True)]
        for row, taken in zip(cells, actions, strict=True)
    ]
    assert {action for row in actions for action in row} == {0, 1, 2, 3}
    # Next values are those of the final observation where an episode was cut, if so wished.
    leads_to, next_obs = (
        value_of(collector.agent, [[getattr(cell, name) for cell in row] for row in cells])
        for name in ("leads_to", "next_obs")
    )
    torch.testing.assert_close(found["next_value"], leads_to if bootstrap else next_obs, **CLOSE)
    cut = found["truncated"]
    assert cut[:, T - 1].any() and (leads_to - next_obs)[cut].abs().min() > 1e-3
    # What was written in place can be trained on.
    assert rollouts[0].obs.data_ptr() == place and not found["value"].requires_grad
    output = collector.agent(rollouts[0].obs, rollouts[0].first, rollouts[0].state)
    (output.policy.log_prob(rollouts[0].action) - rollouts[0].log_prob).sum().backward()


@pytest.mark.parametrize(("memory", "calls"), [("none", 2), ("lstm", T + 1)])
def test_a_separate_value_network_runs_once_a_rollout_unless_it_has_a_memory(
    memory: Kind, calls: int
) -> None:
    """Observations outside of all rollouts take one more call, not one a step."""
    collector, seen = make_collector(agent=make_agent(memory)), []
    assert collector.agent.value_encoder is not None
    collector.agent.value_encoder.register_forward_hook(lambda *_: seen.append(1))
    collect(collector, 1)
    assert len(seen) == calls


@pytest.mark.parametrize("memory", ["lstm", "gru"])
@torch.no_grad()
def test_a_final_observation_is_valued_with_its_episodes_memory(memory: Kind) -> None:
    collector = make_collector(agent=make_agent(memory))
    rollouts = collect(collector)
    found, wanted = joined(rollouts), step_by_step(collector.agent, K * T)
    for name in ("value", "next_value"):
        torch.testing.assert_close(found[name], wanted[name], **CLOSE)
    forgotten = value_of(collector.agent, [[cell.leads_to for cell in row] for row in timeline()])
    assert (forgotten - found["next_value"])[found["truncated"]].abs().max() > 1e-3
    # The state before each rollout makes it repeatable.
    for rollout in rollouts:
        output = collector.agent(rollout.obs, rollout.first, rollout.state)
        torch.testing.assert_close(output.value, rollout.value, **CLOSE)
        log_prob = output.policy.log_prob(rollout.action)
        torch.testing.assert_close(log_prob, rollout.log_prob, **CLOSE)
    assert rollouts[-1].state.any()


@pytest.mark.parametrize("value_path", ["separate", "shared"])
@pytest.mark.parametrize("memory", ["none", "lstm", "gru"])
@torch.no_grad()
def test_the_first_rollout_is_valued_by_its_own_statistics(memory: Kind, value_path: Any) -> None:
    """Values, next values and memory states are those of single steps under its statistics."""
    agent, raw = (make_agent(memory, value_path, obs_norm=True) for _ in range(2))
    first, second = rollouts = collect(make_collector(agent=agent), 2, update=True)
    assert agent.reader.normalizer is not None
    moments = agent.reader.normalizer.moments
    torch.testing.assert_close(moments.mean, first.obs.double().mean((0, 1)))
    assert moments.count == B * T  # the second one counts when it has been learned from
    found, wanted = joined(rollouts), step_by_step(agent, 2 * T)
    for name in ("value", "next_value"):
        torch.testing.assert_close(found[name], wanted[name], **CLOSE)
    torch.testing.assert_close(second.state, wanted["state"][:, T].view_as(second.state), **CLOSE)
    assert first.truncated[:, :-1].any() and first.truncated[:, -1].any()
    # The policy that acted saw the observations as they are, and the probabilities are its own.
    output = raw(first.obs, first.first, raw.initial_state(B))
    torch.testing.assert_close(first.log_prob, output.policy.log_prob(first.action), **CLOSE)
    assert (output.value - first.value).abs().max() > 1e-2  # the comparison means something


@torch.no_grad()
def test_masks_are_obeyed_and_stored_beside_the_observation_they_belong_to() -> None:
    collector = make_collector(Masked())
    found = joined(collect(collector))
    env, step = found["obs"][..., 0].long(), found["obs"][..., 2].long() % 4
    allowed = torch.zeros(B, K * T, 4, dtype=torch.bool)
    allowed.scatter_(2, env.unsqueeze(-1), True).scatter_(2, step.unsqueeze(-1), True)
    assert torch.equal(found["action_mask"], allowed)
    assert allowed.gather(2, found["action"].unsqueeze(-1)).all()
    state = collector.agent.initial_state(B)
    policy, _ = collector.agent.policy(found["obs"], found["first"], state, allowed)
    torch.testing.assert_close(found["log_prob"], policy.log_prob(found["action"]), **CLOSE)


def test_returns_and_lengths_are_exact_across_rollouts() -> None:
    collector, seen, past = make_collector(), [], torch.zeros(B, 0)
    for slot in range(K):
        past = torch.cat([past, collect(collector, 1)[0].reward], dim=1)
        episodes = [
            (past[env, t - cell.obs[2] : t + 1].sum().item(), cell.obs[2] + 1, env,
             cell.end == "terminated", None)
            for t in range(slot * T, (slot + 1) * T)
            for env, cell in enumerate(row[t] for row in timeline()) if cell.end
        ]  # fmt: skip
        finished = [each[:2] for each in episodes]
        seen += [total for total, _ in finished]
        assert collector.episodes.finished == episodes
        assert collector.episodes.pop_metrics() == {
            "charts/num_episodes": [5, 6, 1][slot],
            "charts/episodic_return": pytest.approx(np.mean([total for total, _ in finished])),
            "charts/episodic_length": pytest.approx(np.mean([length for _, length in finished])),
            "charts/episodic_return_100": pytest.approx(np.mean(seen)),
        }


def test_procgen_levels_are_counted_once_and_completion_only_where_an_episode_ended() -> None:
    collector = make_collector(Scripted(info=True))
    collect(collector, 1)
    # Levels are numbered by environment and episode: 0 1, 10 11, 20. Of the five episodes that
    # ended, two terminated.
    assert all(each.level_complete == each.terminated for each in collector.episodes.finished)
    report, again = collector.episodes.pop_metrics(), collector.episodes.pop_metrics()
    assert report["procgen/num_levels_seen"] == again["procgen/num_levels_seen"] == 5
    assert report["procgen/level_complete"] == pytest.approx(2 / 5)
    assert "procgen/level_complete" not in again


def test_episodes_survive_a_restart_before_and_after_a_report() -> None:
    collector = make_collector(Scripted(info=True))
    collect(collector)

    def restarted() -> EpisodeStatistics:
        again = EpisodeStatistics(B)
        again.load_state_dict(json.loads(json.dumps(collector.episodes.state_dict())))
        assert again.finished == collector.episodes.finished
        return again

    unreported, before = restarted(), collector.episodes.pop_metrics()
    assert before["charts/num_episodes"] == 12 and unreported.pop_metrics() == before
    after = restarted().pop_metrics()
    assert after["charts/num_episodes"] == 0
    for name in ("charts/episodic_return_100", "procgen/num_levels_seen"):
        assert after[name] == before[name]
