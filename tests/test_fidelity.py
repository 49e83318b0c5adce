"""The `compat-` presets against the originals' arithmetic, written out again.

Each rule is computed slowly, step by step, from its definition.
"""

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
from phasicrl.config import Config
from phasicrl.models.agent import Agent
from phasicrl.phases import PolicyPhaseLoss, compute_targets, normalize_minibatches, policy_phase
from phasicrl.presets import PRESETS, get_preset
from phasicrl.rollout import PolicySamples, Rollout
from phasicrl.training.run import Run
from tests.helpers import mark_long, open_run, tiny

LOW, HIGH = np.array([-0.5, 0.0], np.float32), np.array([0.25, 2.0], np.float32)


class Slider(gym.Env[np.ndarray, np.ndarray]):
    """Line along which a point is pushed.

    Episodes of five steps, which terminate, alternate with episodes of seven, which are truncated.
    """

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Box(LOW, HIGH)

    def __init__(self) -> None:
        self.got: list[np.ndarray] = []
        self._episode = 0

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self._episode, self._steps, self._at = self._episode + 1, 0, 0.3 * self._episode % 1
        return self._seen(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.got.append(action.copy())
        self._steps += 1
        self._at += 0.1 * float(np.tanh(action[0]))
        odd = self._episode % 2 == 1
        ends = odd and self._steps == 5, not odd and self._steps == 7
        return self._seen(), 2 - self._at**2, *ends, {}

    def _seen(self) -> np.ndarray:
        return np.array([self._at, self._steps / 7], dtype=np.float32)


def small(name: str, tmp_path: Path, **changes: Any) -> Config:
    """Return a preset on one slider, with rollouts of 64 steps."""
    return get_preset(name).with_updates({
        "env.id": "slider", "ppo.num_steps": 64, "output_dir": str(tmp_path), "log.console": "off",
        "log.tensorboard": False, "compute.device": "cpu", "compute.compile": "off",
        "checkpoint.every_minutes": None, **changes,
    })  # fmt: skip


def collected(run: Run) -> Rollout:
    return run.collect(run.buffer.next_rollout())


def compute_dist_params(run: Run, samples: Rollout | PolicySamples) -> Tensor:
    with torch.no_grad():
        return run.agent.policy(samples.obs, samples.first, samples.state)[0].dist_params


@pytest.mark.parametrize("name", [
    "compat-baselines-ppo-mujoco", "compat-cleanrl-ppo-continuous", "compat-spinningup-ppo",
])  # fmt: skip
def test_environments_get_clipped_actions_and_policies_draws(name: str, tmp_path: Path) -> None:
    """Spinning Up does not clip."""
    env = Slider()
    run = open_run(small(name, tmp_path), lambda: env)
    rollout = collected(run)
    draws = rollout.action[0].numpy()
    clipped = draws if name == "compat-spinningup-ppo" else np.clip(draws, LOW, HIGH)
    np.testing.assert_array_equal(np.stack(env.got), clipped)
    assert ((draws < LOW) | (draws > HIGH)).mean() > 0.2  # the comparison means something
    mean, std = np.split(compute_dist_params(run, rollout)[0].double().numpy(), 2, axis=1)
    log_prob = -((draws - mean) ** 2) / (2 * std**2) - np.log(std) - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(rollout.log_prob[0], log_prob.sum(1), rtol=1e-5)


def finished_paths(rollout: Rollout, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Return raw advantages and rewards-to-go by Spinning Up's definition, sum by sum."""
    reward, value, next_value = (
        getattr(rollout, name)[0].double().numpy() for name in ("reward", "value", "next_value")
    )
    over, cut = rollout.terminated[0].numpy(), rollout.truncated[0].numpy()
    advantages, to_go, start = np.zeros(len(reward)), np.zeros(len(reward)), 0
    for end in range(len(reward)):
        if not (over[end] or cut[end] or end == len(reward) - 1):
            continue
        last = 0.0 if over[end] else next_value[end]
        rewards, values = (np.append(x[start : end + 1], last) for x in (reward, value))
        for t in range(start, end + 1):
            steps = range(t - start, end + 1 - start)
            errors = [rewards[k] + gamma * values[k + 1] - values[k] for k in steps]
            advantages[t] = sum((gamma * lam) ** i * error for i, error in enumerate(errors))
            to_go[t] = sum(gamma**i * r for i, r in enumerate(rewards[t - start :]))
        start = end + 1
    return advantages, to_go


def test_spinning_ups_values_learn_rewards_to_go_and_its_advantages_are_gae(tmp_path: Path) -> None:
    config = small("compat-spinningup-ppo", tmp_path)
    assert (config.ppo.value_target, config.ppo.advantage_std) == ("monte_carlo", "biased")
    rollout = collected(open_run(config, Slider))
    assert rollout.terminated.any() and rollout.truncated.any()
    samples, _ = compute_targets(rollout, rollout.reward, config.ppo)
    advantages, to_go = finished_paths(rollout, 0.99, 0.97)
    np.testing.assert_allclose(rollout.value_target[0], to_go, rtol=1e-5)
    expected = (advantages - advantages.mean()) / advantages.std()
    np.testing.assert_allclose(samples.advantage[0], expected, rtol=1e-4, atol=1e-5)


def test_value_targets_by_hand(tmp_path: Path) -> None:
    """γ = λ = ½; rewards 8, 4, 2; values 1, 2, 4; the rollout ends with a value of 6 ahead.

    Advantages 8 + ¼ (4 + ¼ · 1), 4 + ¼ · 1, 1.
    """
    config = tiny(tmp_path)
    sizes = {"env.num_envs": 1, "ppo.num_steps": 3, "ppo.num_minibatches": 1}
    rollout = open_run(config.with_updates(sizes)).buffer.next_rollout()
    rollout.value.copy_(torch.tensor([[1.0, 2.0, 4.0]]))
    rollout.next_value.copy_(torch.tensor([[2.0, 4.0, 6.0]]))
    ppo = replace(config.ppo, gamma=0.5, gae_lambda=0.5, advantage_norm="none")
    to_go = replace(ppo, value_target="monte_carlo")
    reward = torch.tensor([[8.0, 4.0, 2.0]])
    advantages = [[8 + 1 - 1 + (4 + 2 - 2 + 1 / 4) / 4, 4 + 2 - 2 + 1 / 4, 2 + 3 - 4]]
    assert compute_targets(rollout, reward, ppo)[0].advantage.tolist() == advantages
    assert rollout.value_target.tolist() == [[9 + 1 / 16 + 1, 6 + 1 / 4, 5]]
    assert compute_targets(rollout, reward, to_go)[0].advantage.tolist() == advantages
    assert rollout.value_target.tolist() == [[8 + 2 + 0.5 + 0.75, 4 + 1 + 1.5, 2 + 3]]
    # Cut after the second step, with 4 ahead; if time limits are terminations, with nothing ahead.
    rollout.truncated[0, 1] = True
    compute_targets(rollout, reward, to_go)
    assert rollout.value_target.tolist() == [[8 + 2 + 1, 4 + 2, 5]]
    compute_targets(rollout, reward, replace(to_go, bootstrap_truncation=False))
    assert rollout.value_target.tolist() == [[8 + 2, 4, 5]]


def spinning_up_update(agent: Agent, samples: PolicySamples, target: Tensor, config: Config) -> int:
    """Run Spinning Up's `update`; returns the number of policy steps.

    Up to 80 policy steps, with the divergence checked before each, then 80 value steps.
    """
    ppo, conditions = config.ppo, (samples.obs, samples.first, samples.state)
    assert ppo.target_kl and ppo.value_learning_rate and ppo.clip
    policy_parameters, value_parameters = agent.params_per_network()
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


@pytest.mark.long
@pytest.mark.parametrize(("rate", "stops"), [(1e-6, False), (3e-5, True), (3e-4, True)])
def test_an_iteration_is_spinning_ups(rate: float, stops: bool, tmp_path: Path) -> None:
    config = small("compat-spinningup-ppo", tmp_path, **{"ppo.learning_rate": rate})
    ppo = config.ppo
    assert (ppo.policy_epochs, ppo.value_epochs, ppo.target_kl) == (80, 80, 0.015)
    run, seen = open_run(config, Slider), []
    rollout = collected(run)
    samples, _ = compute_targets(rollout, rollout.reward, ppo)
    theirs = copy.deepcopy(run.agent)
    wanted = spinning_up_update(theirs, samples, rollout.value_target, config)
    policy_phase(run.learner, rollout, rollout.reward, on_stage=seen.append)
    assert seen == ["policy"] * wanted + ["value"] * (80 - wanted)
    assert (wanted < 80) == stops and wanted > 1
    torch.testing.assert_close(
        dict(run.agent.state_dict()), dict(theirs.state_dict()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_the_divergence_after_an_epoch_by_hand(estimate: str, tmp_path: Path) -> None:
    """Half of the actions have a log-ratio of −0.5, the others of 0.1.

    A step size of (almost) zero leaves the policy as it was.
    """
    k1, k3 = (0.5 - 0.1) / 2, ((math.exp(-0.5) - 1 + 0.5) + (math.exp(0.1) - 1 - 0.1)) / 2
    changes = {"ppo.epoch_kl": estimate, "ppo.target_kl": 1.0, "ppo.policy_epochs": 2}
    run = open_run(tiny(tmp_path).with_updates({**changes, "ppo.learning_rate": 1e-30}))
    rollout = collected(run)
    log_ratio = torch.where(torch.arange(8) % 2 == 0, -0.5, 0.1).expand(4, 8)
    samples = rollout.policy_samples(torch.zeros(4, 8))
    samples = replace(samples, old_log_prob=rollout.log_prob - log_ratio)
    with patch.object(phases, "compute_targets", lambda *_: (samples, {})):
        record = policy_phase(run.learner, rollout)
    names = [f"losses/{name}" for name in ("epoch_kl", "old_approx_kl", "approx_kl")]
    expected = [k1 if estimate == "k1" else k3, k1, k3]
    assert [record[name] for name in names] == pytest.approx(expected, rel=1e-5)


def scaled_as_gymnasium(reward: np.ndarray, terminated: np.ndarray, gamma: float) -> list[float]:
    """Scale rewards by Gymnasium's rule from 0.27 on, for one environment.

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
    run, baselines = (
        open_run(small(name, tmp_path), Slider)
        for name in ("compat-cleanrl-ppo-continuous", "compat-baselines-ppo-mujoco")
    )
    assert not run.config.ppo.bootstrap_truncation
    rollout, same = collected(run), collected(baselines)
    ours = run.learner.normalize_reward(rollout)[0][0].numpy()
    over = np.array([(t + 1) % 12 == 5 for t in range(64)])  # five steps and over, seven and cut
    expected = scaled_as_gymnasium(rollout.reward[0].numpy(), over, 0.99)
    np.testing.assert_allclose(ours, expected, rtol=1e-5)
    # Dropped at each end, returns of these short episodes vary less, so that rewards are larger.
    assert torch.equal(same.reward, rollout.reward)
    assert (baselines.learner.normalize_reward(same)[0][0].numpy()[20:] > 1.1 * ours[20:]).all()


def written_loss(run: Run, samples: PolicySamples, *, ddof: int) -> float:
    """Compute CleanRL's, Baselines' or SB3's loss of one minibatch, number by number."""
    ppo, columns = run.config.ppo, range(2)
    parameters = compute_dist_params(run, samples)[:, 0].tolist()
    values = run.agent.value(samples.obs, samples.first, samples.state)[:, 0].tolist()
    names = ("action", "old_log_prob", "advantage", "value_target", "old_value")
    actions, old, advantage, target, old_value = (getattr(samples, x)[:, 0].tolist() for x in names)
    size = len(actions)
    mean = sum(advantage) / size
    deviation = math.sqrt(sum((a - mean) ** 2 for a in advantage) / (size - ddof))
    policy_loss = value_loss = entropy = 0.0
    for i in range(size):
        mu, std, action = parameters[i][:2], parameters[i][2:], actions[i]
        log_prob = 0.0
        for k in columns:
            log_prob -= ((action[k] - mu[k]) / std[k]) ** 2 / 2
            log_prob -= math.log(std[k] * math.sqrt(2 * math.pi))
            entropy += (0.5 + 0.5 * math.log(2 * math.pi) + math.log(std[k])) / size
        ratio, scaled = math.exp(log_prob - old[i]), (advantage[i] - mean) / (deviation + 1e-8)
        policy_loss += max(-scaled * ratio, -scaled * min(max(ratio, 0.8), 1.2)) / size
        error = (values[i] - target[i]) ** 2
        if ppo.value_clip is not None:
            change = min(max(values[i] - old_value[i], -0.2), 0.2)
            error = max(error, (old_value[i] + change - target[i]) ** 2)
        value_loss += error / size
    # CleanRL and Baselines halve the squared error and weigh it by ½; SB3 weighs it by ½.
    value_coef = 0.5 if ppo.value_clip is None else 0.25
    return policy_loss - ppo.entropy_coef * entropy + value_coef * value_loss


@pytest.mark.parametrize(
    ("name", "ddof"), [("cleanrl-ppo-continuous", 1), ("sb3-ppo", 1), ("baselines-ppo-mujoco", 0)]
)
def test_the_loss_of_64_samples_is_the_originals(name: str, ddof: int, tmp_path: Path) -> None:
    name = f"compat-{name}"
    config = small(name, tmp_path, **{"ppo.num_minibatches": 1, "ppo.entropy_coef": 0.01})
    assert get_preset(name).batch_size // get_preset(name).ppo.num_minibatches == 64
    run = open_run(config, Slider)
    rollout = collected(run)
    noise = partial(torch.randn, 1, 64, generator=Generator().manual_seed(5))
    rollout.value_target.copy_(rollout.value + noise())
    rollout.log_prob.add_(0.3 * noise())
    rollout.value.add_(0.3 * noise())
    samples = rollout.policy_samples(2 + 3 * noise())
    order = torch.randperm(64, generator=Generator().manual_seed(6))
    normalized = normalize_minibatches(samples, order, config.ppo).as_transitions()
    samples = samples.as_transitions()
    loss = PolicyPhaseLoss(run.agent, config.ppo, trains_policy=True, trains_value=True)
    ours = loss(normalized, *run.learner.policy_loss_coefficients())[0].item()
    assert ours == pytest.approx(written_loss(run, samples, ddof=ddof), abs=1e-6)
    # The comparison distinguishes the two deviations.
    assert abs(ours - written_loss(run, samples, ddof=1 - ddof)) > 1e-4


def test_the_deviation_of_advantages_is_each_originals() -> None:
    """PyTorch's `std` is unbiased, NumPy's and OPPG's own are biased."""
    unbiased = {name for name in PRESETS if get_preset(name).ppo.advantage_std == "unbiased"}
    cleanrl = ("ppg", "ppo-procgen", "ppo", "ppo-continuous", "ppo-atari")
    assert unbiased == {"compat-sb3-ppo", *(f"compat-cleanrl-{name}" for name in cleanrl)}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("compat-")])
def test_compatible_presets_compute_in_fp32(name: str) -> None:
    compute = get_preset(name).compute
    assert (compute.policy_precision, compute.aux_precision) == ("fp32", "fp32")


def rates_of(run: Run, config: Config) -> list[float]:
    """Return the policy's learning rate in each iteration, by the loop's own rule."""
    learner, env_steps, rates = run.learner, 0, []
    learner.config, learner.env_steps = config, 0
    while env_steps < config.budget:
        learner.start_iteration()
        rates.append(learner.optimizers["policy"].param_groups[0]["lr"])
        env_steps += config.batch_size
    return rates


@pytest.mark.parametrize(("name", "rate", "falls", "total", "batch"), [
    ("cleanrl-ppo", 2.5e-4, True, 500_000, 4 * 128),
    ("cleanrl-ppo-continuous", 3e-4, True, 1_000_000, 2048),
    *mark_long([("cleanrl-ppo-atari", 2.5e-4, True, 10_000_000, 8 * 128)]),
    ("cleanrl-ppo-procgen", 5e-4, False, 25_000_000, 64 * 256),
    ("cleanrl-ppg", 5e-4, False, 25_000_000, 64 * 256),
    ("baselines-ppo-mujoco", 3e-4, True, 1_000_000, 2048),
    ("baselines-ppo-procgen", 5e-4, False, 25_000_000, 64 * 256),
    ("sb3-ppo", 3e-4, False, 100_000, 2048),
    ("spinningup-ppo", 3e-4, False, 1_000_000, 4000),
])  # fmt: skip
def test_rates_are_those_of_the_originals(
    name: str, rate: float, falls: bool, total: int, batch: int, tmp_path: Path
) -> None:
    """SB3 and Spinning Up begin rollouts until the budget is reached, the others end before."""
    config = get_preset(f"compat-{name}")
    updates = -(-total // batch) if name in ("sb3-ppo", "spinningup-ppo") else total // batch
    wanted = [rate * (1.0 - (update / updates if falls else 0.0)) for update in range(updates)]
    assert config.num_iterations == updates
    assert rates_of(open_run(tiny(tmp_path)), config) == pytest.approx(wanted, rel=1e-12)
