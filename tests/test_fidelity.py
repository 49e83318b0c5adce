"""What the `compat-` presets reproduce, each against the original's arithmetic written out anew.

Slowly, step by step, from its definition.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Generator, Tensor

from phasicrl import phases
from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.models.agent import Agent
from phasicrl.phases import (
    PolicyPhaseLoss,
    compute_targets,
    normalize_minibatches,
    policy_phase,
)
from phasicrl.presets import PRESETS, get_preset
from phasicrl.rollout import PolicySamples, Rollout
from phasicrl.session.build import start_run
from phasicrl.session.run import Run
from tests.helpers import OPENED, corridor, open_run, tiny, tiny_aux

COMPATIBLE = [name for name in PRESETS if name.startswith("compat-")]


LOW, HIGH = np.array([-0.5, 0.0], np.float32), np.array([0.25, 2.0], np.float32)


class Slider(gym.Env[np.ndarray, np.ndarray]):
    """Push a point along a line.

    Episodes of five steps, which end by the rules, take turns with episodes of seven, which are
    cut.
    """

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Box(LOW, HIGH)

    def __init__(self) -> None:
        self.got: list[np.ndarray] = []
        self._episode = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode, self._steps, self._at = self._episode + 1, 0, 0.3 * self._episode % 1
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.got.append(action.copy())
        self._steps += 1
        self._at += 0.1 * float(np.tanh(action[0]))
        odd = self._episode % 2 == 1
        return (
            self._seen(),
            2 - self._at**2,
            odd and self._steps == 5,
            not odd and self._steps == 7,
            {},
        )

    def _seen(self) -> np.ndarray:
        return np.array([self._at, self._steps / 7], dtype=np.float32)


def small(name: str, tmp_path: Path, **changes: Any) -> Config:
    """A preset on one slider, with rollouts of 64 steps."""
    changes = {
        "env.id": "slider", "ppo.num_steps": 64, "output_dir": str(tmp_path), "log.console": "off",
        "log.tensorboard": False, "compute.device": "cpu", "compute.compile": "off",
        "checkpoint.every_minutes": None, **changes,
    }  # fmt: skip
    return get_preset(name).with_updates(changes)


def opened(config: Config, env: gym.Env[Any, Any] | None = None) -> Run:
    """A run on a slider that is closed at the end of the test."""
    OPENED.append(start_run(config, make_env=Slider if env is None else lambda: env))
    return OPENED[-1]


def collected(run: Run) -> Rollout:
    return run.collect(run.buffer.next_rollout())


@pytest.mark.parametrize("name", ["compat-baselines-ppo-mujoco", "compat-cleanrl-ppo-continuous"])
def test_the_environment_gets_clipped_actions_and_the_policy_is_judged_by_its_draw(
    name: str, tmp_path: Path
) -> None:
    env = Slider()
    run = opened(small(name, tmp_path), env)
    rollout = collected(run)
    draws = rollout.action[0].numpy()
    np.testing.assert_array_equal(np.stack(env.got), np.clip(draws, LOW, HIGH))
    assert ((draws < LOW) | (draws > HIGH)).mean() > 0.2  # the comparison means something
    with torch.no_grad():
        parameters = (
            run.agent.policy(rollout.obs, rollout.first, rollout.state)[0]
            .dist_params[0]
            .double()
            .numpy()
        )
    mean, std = parameters[:, :2], parameters[:, 2:]
    log_prob = (
        -((draws - mean) ** 2) / (2 * std**2) - np.log(std) - 0.5 * math.log(2 * math.pi)
    ).sum(1)
    np.testing.assert_allclose(rollout.log_prob[0], log_prob, rtol=1e-5)


def test_actions_are_given_as_drawn_where_the_original_does(tmp_path: Path) -> None:
    env = Slider()
    rollout = collected(opened(small("compat-spinningup-ppo", tmp_path), env))
    np.testing.assert_array_equal(np.stack(env.got), rollout.action[0].numpy())


def finished_paths(
    rollout: Rollout, gamma: float, gae_lambda: float
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages, not normalized, and rewards-to-go, by Spinning Up's definition.

    One path after the other, sum by sum.
    """
    reward, value, next_value = (
        getattr(rollout, name)[0].double().numpy() for name in ("reward", "value", "next_value")
    )
    over, cut = rollout.terminated[0].numpy(), rollout.truncated[0].numpy()
    advantages, to_go, start = np.zeros(len(reward)), np.zeros(len(reward)), 0
    for end in range(len(reward)):
        if not (over[end] or cut[end] or end == len(reward) - 1):
            continue
        last = 0.0 if over[end] else next_value[end]
        rewards, values = (
            np.append(reward[start : end + 1], last),
            np.append(value[start : end + 1], last),
        )
        for t in range(start, end + 1):
            steps = range(t - start, end + 1 - start)
            errors = [rewards[k] + gamma * values[k + 1] - values[k] for k in steps]
            advantages[t] = sum((gamma * gae_lambda) ** i * error for i, error in enumerate(errors))
            to_go[t] = sum(gamma**i * r for i, r in enumerate(rewards[t - start :]))
        start = end + 1
    return advantages, to_go


def test_spinning_ups_values_learn_rewards_to_go_and_its_advantages_are_gae(tmp_path: Path) -> None:
    config = small("compat-spinningup-ppo", tmp_path)
    assert (config.ppo.value_target, config.ppo.advantage_std) == ("monte_carlo", "biased")
    rollout = collected(opened(config))
    assert (
        rollout.terminated.any()
        and rollout.truncated.any()
        and not (rollout.terminated | rollout.truncated)[0, -1]
    )
    samples, _ = compute_targets(rollout, rollout.reward, config.ppo)
    advantages, to_go = finished_paths(rollout, 0.99, 0.97)
    np.testing.assert_allclose(rollout.value_target[0], to_go, rtol=1e-5)
    np.testing.assert_allclose(
        samples.advantage[0],
        (advantages - advantages.mean()) / advantages.std(),
        rtol=1e-4,
        atol=1e-5,
    )
    gae, _ = compute_targets(rollout, rollout.reward, replace(config.ppo, value_target="gae"))
    assert torch.equal(gae.advantage, samples.advantage)
    np.testing.assert_allclose(
        rollout.value_target[0], rollout.value[0].numpy() + advantages, rtol=1e-4, atol=1e-5
    )
    assert np.abs(rollout.value_target[0].numpy() - to_go).max() > 1e-3


def test_value_targets_by_hand(tmp_path: Path) -> None:
    """γ = λ = ½; rewards 8, 4, 2; values 1, 2, 4; the rollout ends with a value of 6 ahead.

    Advantages 7 + ¼ (4 + ¼ · 1), 4 + ¼ · 1, 1.
    """
    config = tiny(tmp_path)
    run = open_run(
        config.with_updates({"env.num_envs": 1, "ppo.num_steps": 3, "ppo.num_minibatches": 1})
    )
    rollout = run.buffer.next_rollout()
    rollout.value.copy_(torch.tensor([[1.0, 2.0, 4.0]]))
    rollout.next_value.copy_(torch.tensor([[2.0, 4.0, 6.0]]))
    ppo = replace(config.ppo, gamma=0.5, gae_lambda=0.5, advantage_norm="none")
    reward = torch.tensor([[8.0, 4.0, 2.0]])
    advantages = [[8 + 1 - 1 + (4 + 2 - 2 + 1 / 4) / 4, 4 + 2 - 2 + 1 / 4, 2 + 3 - 4]]
    assert compute_targets(rollout, reward, ppo)[0].advantage.tolist() == advantages
    assert rollout.value_target.tolist() == [[9 + 1 / 16 + 1, 6 + 1 / 4, 5]]
    assert (
        compute_targets(rollout, reward, replace(ppo, value_target="monte_carlo"))[
            0
        ].advantage.tolist()
        == advantages
    )
    assert rollout.value_target.tolist() == [[8 + 2 + 0.5 + 0.75, 4 + 1 + 1.5, 2 + 3]]
    # Cut after the second step, with 4 ahead; if time limits are terminations, with nothing ahead.
    rollout.truncated[0, 1] = True
    compute_targets(rollout, reward, replace(ppo, value_target="monte_carlo"))
    assert rollout.value_target.tolist() == [[8 + 2 + 1, 4 + 2, 5]]
    compute_targets(
        rollout, reward, replace(ppo, value_target="monte_carlo", bootstrap_truncation=False)
    )
    assert rollout.value_target.tolist() == [[8 + 2, 4, 5]]


def spinning_up_update(agent: Agent, samples: PolicySamples, target: Tensor, config: Config) -> int:
    """Spinning Up's `update`.

    Up to 80 policy steps, looking at the divergence before each, then 80 value steps. Returns the
    policy steps.
    """
    ppo, conditions = config.ppo, (samples.obs, samples.first, samples.state)
    assert (
        ppo.target_kl is not None and ppo.value_learning_rate is not None and ppo.clip is not None
    )
    policy_parameters, value_parameters = agent.networks()
    policy_adam = torch.optim.Adam(policy_parameters, lr=ppo.learning_rate)
    value_adam = torch.optim.Adam(value_parameters, lr=ppo.value_learning_rate)
    steps = 0
    for _ in range(ppo.policy_epochs):
        policy_adam.zero_grad()
        log_prob = agent.policy(*conditions)[0].log_prob(samples.action)
        ratio = torch.exp(log_prob - samples.old_log_prob)
        clipped = torch.clamp(ratio, 1 - ppo.clip, 1 + ppo.clip) * samples.advantage
        if (samples.old_log_prob - log_prob).mean().item() > ppo.target_kl:
            break
        (-torch.min(ratio * samples.advantage, clipped).mean()).backward()
        policy_adam.step()
        steps += 1
    for _ in range(ppo.value_epochs):
        value_adam.zero_grad()
        ((agent.value(*conditions) - target) ** 2).mean().backward()
        value_adam.step()
    return steps


@pytest.mark.parametrize(("rate", "stops"), [(1e-6, False), (3e-5, True), (3e-4, True)])
def test_an_iteration_is_spinning_ups_with_as_many_policy_steps(
    rate: float, stops: bool, tmp_path: Path
) -> None:
    config = small("compat-spinningup-ppo", tmp_path, **{"ppo.learning_rate": rate})
    assert (config.ppo.policy_epochs, config.ppo.value_epochs, config.ppo.target_kl) == (
        80,
        80,
        0.015,
    )
    run = opened(config)
    rollout = collected(run)
    samples, _ = compute_targets(rollout, rollout.reward, config.ppo)
    theirs = copy.deepcopy(run.agent)
    wanted = spinning_up_update(theirs, samples, rollout.value_target, config)
    seen: list[str] = []
    policy_phase(run.learner, rollout, rollout.reward, on_stage=seen.append)
    assert seen == ["policy"] * wanted + ["value"] * (80 - wanted)
    assert (wanted < 80) == stops and wanted > 1
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(
            run.agent.state_dict()[name], tensor, rtol=1e-4, atol=1e-5, msg=name
        )


@pytest.mark.parametrize(
    ("estimate", "divergence"),
    [("k1", (0.5 - 0.1) / 2), ("k3", ((math.exp(-0.5) - 1 + 0.5) + (math.exp(0.1) - 1 - 0.1)) / 2)],
)
def test_the_divergence_after_an_epoch_by_hand(
    estimate: str, divergence: float, tmp_path: Path
) -> None:
    """Half of the actions have a log-ratio of −0.5, the others of 0.1.

    A step size of (almost) zero leaves the policy as it was.
    """
    config = tiny(tmp_path).with_updates(
        {
            "ppo.epoch_kl": estimate,
            "ppo.target_kl": 1.0,
            "ppo.policy_epochs": 2,
            "ppo.learning_rate": 1e-30,
        }
    )
    run = open_run(config)
    rollout = collected(run)
    log_ratio = torch.where(torch.arange(8) % 2 == 0, -0.5, 0.1).expand(4, 8)
    samples = rollout.policy_samples(torch.zeros(4, 8))
    samples = replace(samples, old_log_prob=rollout.log_prob - log_ratio)
    with patch.object(phases, "compute_targets", lambda *_: (samples, {})):
        record = policy_phase(run.learner, rollout)
    assert record["losses/epoch_kl"] == pytest.approx(divergence, rel=1e-5)


def scaled_as_gymnasium(reward: np.ndarray, terminated: np.ndarray, gamma: float) -> list[float]:
    """Gymnasium's rule from 0.27 on, for one environment.

    The return is dropped in the very step that terminates, and nowhere else.
    """
    running, seen, scaled = 0.0, [], []
    for r, over in zip(reward.astype(float), terminated, strict=True):
        running = running * gamma * (1 - over) + r
        seen.append(running)
        scaled.append(min(10.0, max(-10.0, r / math.sqrt(np.var(seen) + 1e-8))))
    return scaled


def test_cleanrls_rewards_are_scaled_as_by_the_gymnasium_that_it_pins(tmp_path: Path) -> None:
    """Time limits are terminations for its advantages, but not for its reward normalizer."""
    run = opened(small("compat-cleanrl-ppo-continuous", tmp_path))
    rollout = collected(run)
    ours = run.learner.normalize_reward(rollout)[0][0].numpy()
    # Five steps and over, seven and cut.
    reward, over = (
        rollout.reward[0].numpy(),
        np.array([(t + 1) % 12 == 5 for t in range(64)]),
    )
    np.testing.assert_allclose(ours, scaled_as_gymnasium(reward, over, 0.99), rtol=1e-5)
    baselines = opened(small("compat-baselines-ppo-mujoco", tmp_path))
    same = collected(baselines)
    assert torch.equal(same.reward, rollout.reward)
    # Dropped at each end, returns of these short episodes vary less, so that rewards come out
    # larger.
    assert (baselines.learner.normalize_reward(same)[0][0].numpy()[20:] > 1.1 * ours[20:]).all()


def test_time_limits_are_terminations_for_the_advantages_only(tmp_path: Path) -> None:
    """Values of 3 everywhere, a reward of 1, γ = λ = ½, no bootstrap.

    The last step of an episode, cut or over, has the advantage 1 − 3.
    """
    config = small(
        "compat-cleanrl-ppo-continuous",
        tmp_path,
        **{
            "ppo.gamma": 0.5,
            "ppo.gae_lambda": 0.5,
            "ppo.advantage_norm": "none",
            "ppo.advantage_std": "biased",
        },
    )
    rollout = collected(opened(config))
    assert rollout.truncated.any() and rollout.terminated.any()
    rollout.value.fill_(3.0)
    rollout.next_value.fill_(3.0)
    advantage = compute_targets(rollout, torch.ones(1, 64), config.ppo)[0].advantage
    ended = rollout.terminated | rollout.truncated
    assert (advantage[ended] == -2).all()
    before = ended.roll(-1, 1)
    before[:, -1] = False
    assert (advantage[before] == 1 + 1.5 - 3 - 2 / 4).all()


def written_loss(run: Run, samples: PolicySamples, *, ddof: int) -> float:
    """CleanRL's, Baselines' or SB3's loss of one minibatch, number by number, from means,
    deviations and values.
    """
    ppo, columns = run.config.ppo, range(2)
    with torch.no_grad():
        parameters = (
            run.agent.policy(samples.obs, samples.first, samples.state)[0]
            .dist_params[:, 0]
            .tolist()
        )
        values = run.agent.value(samples.obs, samples.first, samples.state)[:, 0].tolist()
    actions, old, advantage, target, old_value = (
        tensor[:, 0].tolist()
        for tensor in (
            samples.action,
            samples.old_log_prob,
            samples.advantage,
            samples.value_target,
            samples.old_value,
        )
    )
    size = len(actions)
    mean = sum(advantage) / size
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantage) / (size - ddof))
    policy_loss = value_loss = entropy = 0.0
    for i in range(size):
        mu, std = parameters[i][:2], parameters[i][2:]
        log_prob = sum(
            -(((actions[i][k] - mu[k]) / std[k]) ** 2) / 2
            - math.log(std[k] * math.sqrt(2 * math.pi))
            for k in columns
        )
        entropy += sum(0.5 + 0.5 * math.log(2 * math.pi) + math.log(std[k]) for k in columns) / size
        ratio, scaled = math.exp(log_prob - old[i]), (advantage[i] - mean) / (deviation + 1e-8)
        policy_loss += max(-scaled * ratio, -scaled * min(max(ratio, 0.8), 1.2)) / size
        error = (values[i] - target[i]) ** 2
        if ppo.value_clip is not None:
            change = min(max(values[i] - old_value[i], -0.2), 0.2)
            error = max(error, (old_value[i] + change - target[i]) ** 2)
        value_loss += error / size
    # CleanRL and Baselines halve the squared error and weigh it by ½; SB3 weighs it by ½.
    return (
        policy_loss
        - ppo.entropy_coef * entropy
        + (0.5 if ppo.value_clip is None else 0.25) * value_loss
    )


@pytest.mark.parametrize(
    ("name", "ddof"),
    [
        ("compat-cleanrl-ppo-continuous", 1),
        ("compat-sb3-ppo", 1),
        ("compat-baselines-ppo-mujoco", 0),
    ],
)
def test_the_loss_of_64_samples_is_the_originals(name: str, ddof: int, tmp_path: Path) -> None:
    config = small(name, tmp_path, **{"ppo.num_minibatches": 1, "ppo.entropy_coef": 0.01})
    assert get_preset(name).batch_size // get_preset(name).ppo.num_minibatches == 64
    run = opened(config)
    rollout = collected(run)
    random = Generator().manual_seed(5)
    noise = partial(torch.randn, 1, 64, generator=random)
    rollout.value_target.copy_(rollout.value + noise())
    rollout.log_prob.add_(0.3 * noise())
    rollout.value.add_(0.3 * noise())
    samples = rollout.policy_samples(2 + 3 * noise())
    dealt = normalize_minibatches(samples, torch.arange(64), config.ppo).as_transitions()
    samples = samples.as_transitions()
    loss = PolicyPhaseLoss(run.agent, config.ppo, with_policy=True, with_value=True)
    ours = loss(dealt, torch.tensor(0.0))[0].item()
    assert ours == pytest.approx(written_loss(run, samples, ddof=ddof), abs=1e-6)
    # The comparison tells the two deviations apart.
    assert abs(ours - written_loss(run, samples, ddof=1 - ddof)) > 1e-4


def test_the_deviation_of_advantages_is_each_originals() -> None:
    """PyTorch's `std` is unbiased, NumPy's and OPPG's own are biased."""
    unbiased = {name for name in PRESETS if get_preset(name).ppo.advantage_std == "unbiased"}
    assert unbiased == {
        "compat-cleanrl-ppg", "compat-cleanrl-ppo-procgen", "compat-cleanrl-ppo",
        "compat-cleanrl-ppo-continuous", "compat-cleanrl-ppo-atari", "compat-sb3-ppo",
    }  # fmt: skip


def test_the_whole_batch_is_normalized_by_either_deviation(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    rollout = collected(open_run(config))
    plain = (
        compute_targets(rollout, rollout.reward, replace(config.ppo, advantage_norm="none"))[0]
        .advantage.double()
        .numpy()
    )
    for deviation, ddof in (("biased", 0), ("unbiased", 1)):
        ours = compute_targets(
            rollout, rollout.reward, replace(config.ppo, advantage_std=deviation)
        )[0].advantage  # type: ignore[arg-type]
        np.testing.assert_allclose(
            ours, (plain - plain.mean()) / plain.std(ddof=ddof), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("name", COMPATIBLE)
def test_compatible_presets_compute_in_fp32(name: str) -> None:
    compute = get_preset(name).compute
    assert (compute.policy_precision, compute.aux_precision) == ("fp32", "fp32")


def rates_of(run: Run, config: Config) -> list[float]:
    """The policy's step size in each iteration of a run with this configuration, by the loop's own
    rule for its end.
    """
    learner, env_steps, rates = run.learner, 0, []
    learner.config, learner.iteration = config, 0
    while env_steps < config.budget:
        learner.start_iteration()
        rates.append(learner.optimizers["policy"].param_groups[0]["lr"])
        env_steps += config.batch_size
    return rates


@pytest.mark.parametrize(
    ("name", "rate", "falls", "total", "batch"),
    [
        ("compat-cleanrl-ppo", 2.5e-4, True, 500_000, 4 * 128),
        ("compat-cleanrl-ppo-continuous", 3e-4, True, 1_000_000, 2048),
        ("compat-cleanrl-ppo-atari", 2.5e-4, True, 10_000_000, 8 * 128),
        ("compat-cleanrl-ppo-procgen", 5e-4, False, 25_000_000, 64 * 256),
        ("compat-cleanrl-ppg", 5e-4, False, 25_000_000, 64 * 256),
        ("compat-baselines-ppo-mujoco", 3e-4, True, 1_000_000, 2048),
        ("compat-baselines-ppo-procgen", 5e-4, False, 25_000_000, 64 * 256),
    ],
)
def test_rates_of_all_iterations_are_those_of_cleanrl_and_baselines(
    name: str, rate: float, falls: bool, total: int, batch: int, tmp_path: Path
) -> None:
    config = get_preset(name)
    updates = total // batch
    wanted = [
        rate * (1.0 - (update - 1.0) / updates if falls else 1.0)
        for update in range(1, updates + 1)
    ]
    assert config.num_iterations == updates
    assert rates_of(open_run(tiny(tmp_path)), config) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "total", "batch"),
    [("compat-sb3-ppo", 100_000, 2048), ("compat-spinningup-ppo", 1_000_000, 4000)],
)
def test_sb3_and_spinning_up_begin_rollouts_until_the_budget_is_reached(
    name: str, total: int, batch: int, tmp_path: Path
) -> None:
    config, steps, wanted = get_preset(name), 0, 0
    while steps < total:
        steps, wanted = steps + batch, wanted + 1
    assert config.num_iterations == wanted
    assert rates_of(open_run(tiny(tmp_path)), config) == [3e-4] * wanted


@pytest.mark.parametrize(("rounding", "iterations", "end"), [("down", 3, 96), ("up", 4, 100)])
def test_a_run_ends_with_the_last_whole_rollout_or_the_one_after_it(
    rounding: str, iterations: int, end: int, tmp_path: Path
) -> None:
    rates: list[float] = []
    config = tiny(tmp_path, total_env_steps=100, budget_rounding=rounding).with_updates(
        {"ppo.schedule": "linear", "ppo.learning_rate": 0.01}
    )
    run = train(
        config,
        make_env=corridor,
        on_iteration=lambda _, record: rates.append(record["charts/learning_rate"]),
    )
    assert (run.iteration, run.env_steps, config.num_iterations, config.budget) == (
        iterations,
        32 * iterations,
        iterations,
        end,
    )
    assert rates == pytest.approx(
        [0.01 * (1 - 32 * done / end) for done in range(iterations)], rel=1e-12
    )


@pytest.mark.parametrize(
    ("rounding", "phases"), [("down", [True, True, False]), ("up", [True, True, True, False])]
)
def test_no_auxiliary_phase_comes_after_the_last_rollout_however_the_budget_is_rounded(
    rounding: str, phases: list[bool], tmp_path: Path
) -> None:
    seen: list[bool] = []
    config = tiny(tmp_path, aux=tiny_aux(every=1), total_env_steps=100, budget_rounding=rounding)
    train(
        config,
        make_env=corridor,
        on_iteration=lambda _, record: seen.append("losses/aux/kl_loss" in record),
    )
    assert seen == phases
