"""Truncated episodes whose final observation is unknown, and rsl_rl's value of their ends."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import phasicrl
from phasicrl.config import AuxConfig, PPOConfig
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.normalize import EmaMoments
from phasicrl.phases import AuxiliaryLoss, compute_targets, recompute_values
from phasicrl.returns import mark_whole_episodes
from phasicrl.rollout import AuxiliarySamples, Rollout
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.build import start_run
from tests import test_collect
from tests.envs.counting import PlainCounting
from tests.envs.simulators import TensorEnvs
from tests.helpers import OFF, assert_same, corridor, mark_long, rows_of, tiny, tiny_aux
from tests.test_collect import B, T, make_agent, make_collector

GAMMA, LAMBDA = 0.9, 0.8
PPO = PPOConfig(gamma=GAMMA, gae_lambda=LAMBDA, advantage_norm="none")


class Lost(test_collect.Scripted):
    """Script without final observations."""

    has_final_obs = False

    def step(self, action: Tensor) -> phasicrl.envs.protocol.TimeStep:
        return dataclasses.replace(super().step(action), final_obs=None)


def collect() -> list[Rollout]:
    return test_collect.collect(make_collector(Lost()))


def slow_targets(rollout: Rollout, ends: list[str], env: int) -> dict[int, float]:
    """Return V̂ of each trained step by definition; λ-returns are computed from the end."""
    value = [*rollout.value[env].tolist(), float(rollout.next_value[env, -1])]
    found: dict[int, float] = {}
    later = None  # λ-return of the next step; None where the episode does not go on within reach
    for t in reversed(range(T)):
        reward = float(rollout.reward[env, t])
        if ends[t] == "t":  # unknown; the episode ends before, in the state that was seen last
            later = None
            continue
        if ends[t] == "x":
            target = reward
        elif later is None:
            target = reward + GAMMA * value[t + 1]
        else:
            target = reward + GAMMA * ((1 - LAMBDA) * value[t + 1] + LAMBDA * later)
        found[t] = later = target
    return found


def test_the_episode_ends_at_the_last_state_that_is_known() -> None:
    for slot, rollout in enumerate(collect()):
        samples, record = compute_targets(rollout, rollout.reward, PPO)
        assert samples.weight is not None
        trained = 0
        for env, script in enumerate(test_collect.SCRIPT):
            expected = slow_targets(rollout, list(script[slot * T : (slot + 1) * T]), env)
            assert sorted(expected) == samples.weight[env].nonzero().flatten().tolist()
            for t, target in expected.items():
                assert float(rollout.value_target[env, t]) == pytest.approx(target, abs=1e-4)
            trained += len(expected)
        assert float(samples.weight.mean()) == pytest.approx(1)
        assert record["charts/learned_fraction"] == pytest.approx(trained / (B * T))


def test_moments_of_advantages_are_those_of_known_steps() -> None:
    rollout = collect()[0]
    raw, _ = compute_targets(rollout, rollout.reward, PPO)
    assert raw.weight is not None
    known, moments = raw.advantage[raw.weight > 0].double(), EmaMoments(0.9)
    compute_targets(rollout, rollout.reward, PPO, advantage_moments=moments)
    assert float(moments.mean) == pytest.approx(float(known.mean()))
    assert float(moments.variance) == pytest.approx(float(known.var(correction=0)))


def test_a_rollout_of_unknown_steps_alone_is_refused() -> None:
    rollout = dataclasses.replace(collect()[0], weight=torch.zeros(B, T))
    with pytest.raises(ValueError, match=r"ppo\.num_steps is .*no step"):
        compute_targets(rollout, rollout.reward, PPO)


def test_recomputed_values_bootstrap_from_the_last_known_state_too() -> None:
    rollout, agent = collect()[0], make_agent()
    assert rollout.weight is not None
    for parameter in agent.parameters():
        parameter.data += 0.1
    before = rollout.next_value.clone()
    recompute_values(agent, rollout, executor=Executor(Plan()))
    lost = (rollout.weight == 0)[:, 1:] & ~rollout.first[:, 1:]
    assert lost.any()
    assert torch.equal(rollout.next_value[:, :-1][lost], rollout.value[:, 1:][lost])
    ended = rollout.first[:, 1:]
    assert torch.equal(rollout.next_value[:, :-1][ended], before[:, :-1][ended])


def test_rsl_rl_bootstraps_from_the_observation_before_the_last_step() -> None:
    """By hand: r + γ V(s_t) where an episode was cut, and the same as before elsewhere."""
    ppo = dataclasses.replace(PPO, truncation_value="rsl_rl", gae_lambda=0.0)
    collector, rollout = make_collector(), collect()[0]
    rollout = dataclasses.replace(rollout, weight=None)
    collector.collect(rollout)
    compute_targets(rollout, rollout.reward, ppo)
    cut, done = rollout.truncated, rollout.terminated
    following = torch.where(cut, rollout.value, rollout.next_value)
    expected = rollout.reward + GAMMA * torch.where(done, 0.0, following)
    assert cut.any() and done.any()
    assert torch.allclose(rollout.value_target, expected)
    assert not torch.allclose(rollout.value[cut], rollout.next_value[cut])


def test_rsl_rls_value_comes_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, count in (("rsl_rl", 1), ("final_obs", 0)):
        changes = {"log.console": "plain", "ppo.truncation_value": value}
        start_run(tiny(tmp_path).with_updates(changes), make_env=corridor).resources.close()
        assert capsys.readouterr().out.count("ppo.truncation_value") == count


@pytest.mark.parametrize("end", ["raw", "final_obs", "lost"])
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_ppg_trains_on_a_simulator_of_tensors(tmp_path: Path, end: str, memory: str) -> None:
    config = tiny(tmp_path, aux=tiny_aux()).with_updates({"model.memory": memory})
    run = phasicrl.train(
        config, make_vector_env=lambda num_envs: TensorEnvs(PlainCounting, num_envs, end)
    )
    rows = rows_of(RunDirectory(run.directory))
    assert any("losses/aux/kl_loss" in row for row in rows)
    fractions = [row["charts/learned_fraction"] for row in rows if "charts/learned_fraction" in row]
    assert all(0.5 < fraction < 1 for fraction in fractions) and bool(fractions) == (end == "lost")


class Rubbish(TensorEnvs):
    """Simulator that loses final observations, and pays `paid` in the steps that led to them."""

    def __init__(self, num_envs: int, paid: float) -> None:
        super().__init__(PlainCounting, num_envs, "lost")
        self._paid = paid

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        cut = truncated & ~terminated
        return obs, torch.where(cut, self._paid, reward), terminated, truncated, info


@pytest.mark.parametrize("aux", [OFF, tiny_aux()], ids=["PPO", "PPG"])
@pytest.mark.parametrize("norm", mark_long(["batch", "minibatch"], "batch"))
def test_what_is_unknown_moves_no_weight_with_an_averaged_policy(
    tmp_path: Path, aux: AuxConfig, norm: str
) -> None:
    config = tiny(tmp_path, aux=aux).with_updates({
        "ppo.proximal_decay": 0.8, "ppo.policy_epochs": 2, "ppo.value_epochs": 2,
        "ppo.kl_penalty": 0.5, "ppo.kl_estimate": "exact", "ppo.schedule": "adaptive_kl",
        "ppo.recompute_advantages": True, "ppo.advantage_norm": norm, "reward_norm.per": "none",
    })  # fmt: skip
    start, *trained = (
        phasicrl.train(each, make_vector_env=partial(Rubbish, paid=paid)).agent.state_dict()
        for each, paid in (
            (dataclasses.replace(config, total_env_steps=32), 0),
            (config, 0),
            (config, 1e6),
        )
    )
    assert_same(*trained)
    assert any(not torch.equal(weights, start[name]) for name, weights in trained[0].items())


def test_all_known_steps_of_a_phase_count_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts may have different numbers of them."""
    weights, compute = list[Tensor](), AuxiliaryLoss.__call__

    def record(loss: AuxiliaryLoss, samples: AuxiliarySamples, *others: Tensor) -> Any:
        assert samples.weight is not None
        weights.append(samples.weight.flatten())
        return compute(loss, samples, *others)

    monkeypatch.setattr(AuxiliaryLoss, "__call__", record)
    sizes = {"ppo.num_steps": 6, "total_env_steps": 72}
    config = tiny(tmp_path, aux=tiny_aux(epochs=1)).with_updates(sizes)
    run = phasicrl.train(config, make_vector_env=partial(Rubbish, paid=0))
    fractions = [row["charts/learned_fraction"] for row in run.files.metrics()][:2]
    assert len(set(fractions)) == 2
    weight = torch.cat(weights)
    assert weight.unique().tolist() == pytest.approx([0, 2 / sum(fractions)])
    assert float(weight.mean()) == pytest.approx(1)


def test_whole_episodes_leave_out_unknown_steps_too() -> None:
    ppo = dataclasses.replace(PPO, collect_by="episodes", max_episodes=None)
    rollout = collect()[0]
    flags = rollout.first, rollout.terminated | rollout.truncated
    whole = mark_whole_episodes(*flags)
    samples, _ = compute_targets(rollout, rollout.reward, ppo)
    assert samples.weight is not None and rollout.weight is not None
    unknown = whole & (rollout.weight == 0)
    assert unknown.any()
    assert torch.equal(samples.weight > 0, whole & ~unknown)


def test_without_a_value_function_no_value_is_added_at_a_time_limit() -> None:
    ppo = dataclasses.replace(
        PPO, truncation_value="rsl_rl", baseline=False, estimator="monte_carlo",
        value_epochs=0,
    )  # fmt: skip
    rollout = dataclasses.replace(collect()[0], weight=None)
    make_collector().collect(rollout)
    compute_targets(rollout, rollout.reward, ppo)
    cut = rollout.truncated
    assert cut.any() and torch.equal(rollout.value_target[cut], rollout.reward[cut])


def test_the_policy_is_also_cloned_at_steps_without_a_target(tmp_path: Path) -> None:
    with start_run(tiny(tmp_path, aux=tiny_aux(every=1)), make_env=corridor) as run:
        run.collect(run.buffer.next_rollout())
        samples = run.buffer.auxiliary_samples(torch.randn(4, 8, 2))
        weight, loss = torch.zeros(4, 8), AuxiliaryLoss(run.agent, run.config.aux)
        weight[:, 0] = 8.0
        weighted = dataclasses.replace(samples, weight=weight)
        kls = [loss(each)[1]["losses/aux/kl_loss"] for each in (samples, weighted)]
    assert kls[0] == kls[1] > 0
