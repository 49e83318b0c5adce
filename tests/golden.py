"""Tiny runs whose numbers are committed.

`python -m tests.golden` rewrites them: only in a commit that says why, with a *Numerics* line.
"""

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.algorithm import train
from phasicrl.config import Config, ModelConfig, ObsNormConfig, RewardNormConfig, ValueNormConfig
from phasicrl.spaces import get_nvec
from tests.helpers import OBS_NORM, VALUE_NORM, corridor, tiny, tiny_aux

FILE = Path(__file__).with_name("golden.json")


class Image(gym.Env[np.ndarray, np.int64]):
    """A bright dot on a dark field of 16×16 color bytes.

    Reward for moving towards it from the middle, five steps an episode.
    """

    observation_space = gym.spaces.Box(0, 255, (16, 16, 3), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self._steps = 0
        return self._draw(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self._side)
        self._steps += 1
        return self._draw(), reward, self._steps == 5, False, {}

    def _draw(self) -> np.ndarray:
        self._side = int(self.np_random.integers(3))
        image = np.zeros((16, 16, 3), dtype=np.uint8)
        image[7:9, 1 + 5 * self._side : 4 + 5 * self._side] = 255
        return image


class Echo(gym.Env[Any, Any]):
    """Task of giving back a number, which is shown in the first of five steps only.

    Actions of any kind, seen as numbers or (`tree`) as parts, with masks or without. Every second
    episode is truncated, the others terminate.
    """

    def __init__(self, actions: Any, *, tree: bool = False, masked: bool = False) -> None:
        self.action_space, self.tree, self.masked = actions, tree, masked
        self.size, self._episode = gym.spaces.flatdim(actions), 0
        shown = gym.spaces.Box(-2, 2, (self.size,), np.float32)
        parts = gym.spaces.Dict({"shown": shown, "step": gym.spaces.Discrete(6)})
        self.observation_space: Any = parts if tree else shown

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**options)
        self._target = self.np_random.uniform(-1, 2, self.size).astype(np.float32)
        self._at, self._episode = 0, self._episode + 1
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        given: Any = gym.spaces.flatten(self.action_space, action)
        reward = -3 * float(np.abs(given - self._target).mean())
        self._at += 1
        ends, odd = self._at == 5, self._episode % 2 == 1
        return self._seen(), reward, ends and odd, ends and not odd, self._info()

    def get_state(self) -> Any:
        return self._target.tolist(), self._at, self._episode

    def set_state(self, state: Any) -> tuple[Any, dict[str, Any]]:
        target, self._at, self._episode = state
        self._target = np.array(target, np.float32)
        return self._seen(), self._info()

    def _seen(self) -> Any:
        shown = self._target if self._at == 0 else np.full_like(self._target, self._at / 5)
        return {"shown": shown, "step": self._at} if self.tree else shown

    def _info(self) -> dict[str, Any]:
        """Forbid one option of each discrete component, another one in each step."""
        at = self._at + self._episode
        allowed = [np.arange(n) != at % n for n in get_nvec(self.action_space)]
        return {"action_mask": np.concatenate(allowed)} if self.masked else {}


MakeEnv = Callable[[], gym.Env[Any, Any]]
Case = tuple[Config, MakeEnv]

NUMBERS = gym.spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))
KEYS = gym.spaces.MultiDiscrete([3, 2])
BOTH = gym.spaces.Dict({"keys": KEYS, "numbers": NUMBERS})
numbers, keys = partial(Echo, NUMBERS), partial(Echo, KEYS)
masked_keys, key_tree = partial(Echo, KEYS, masked=True), partial(Echo, KEYS, tree=True)
everything = partial(Echo, BOTH, tree=True, masked=True)

LSTM, GRU = {"model.memory": "lstm"}, {"model.memory": "gru"}
SHARED, DETACHED = {"model.value_path": "shared"}, {"model.value_path": "detached"}
EMA = {"statistics": "ema", "decay": 0.6}
NO_REWARD_NORM = {"reward_norm.per": "none"}
ONLY_VALUES = {**NO_REWARD_NORM, "value_norm": VALUE_NORM}
EPOCHS = {"ppo.policy_epochs": 2, "ppo.value_epochs": 2}
FAST_EPOCHS = {**EPOCHS, "ppo.learning_rate": 5e-3}
DECAYS = {"ppo.proximal_decay": 0.8, "ppo.advantage_decay": 0.5, "ppo.adam_betas": (0.8, 0.99)}
AVERAGED = {**FAST_EPOCHS, **DECAYS}
EPISODES = {"ppo.collect_by": "episodes", "ppo.num_steps": 12}
LOG_PROB = {"ppo.objective": "log_prob", "ppo.clip": None}
REINFORCE = {**LOG_PROB, "ppo.estimator": "monte_carlo", "ppo.baseline": False}
MEMORY_AND_NORMS = {
    **LSTM, "action.squash": "tanh", "action.std": "softplus", "obs_norm": OBS_NORM,
    "value_norm": VALUE_NORM, "reward_norm": RewardNormConfig(per="step"),
}  # fmt: skip

SHORT_RUNS: dict[str, tuple[dict[str, Any], MakeEnv]] = {
    # Memory, masks, and actions of every kind, one at a time
    "ppo-lstm": (LSTM, numbers),
    "ppg-lstm": (LSTM, corridor),
    "ppo-gru-shared": (GRU | SHARED, corridor),
    "ppg-gru-detached": (GRU | DETACHED, corridor),
    "ppo-masks": ({}, masked_keys),
    "ppg-masks": ({}, masked_keys),
    "ppo-numbers-raw": ({}, numbers),
    "ppo-numbers-mean-tanh-softplus": (
        {"action.mean": "tanh", "action.std": "softplus", "action.std_value": 0.5,
         "action.min_std": 0.01, "action.rescale": True, "action.squash": "clip"}, numbers),
    "ppo-numbers-squash-tanh-exp": (
        {"action.squash": "tanh", "action.std": "exp", "action.std_value": 0.7}, numbers),
    "ppo-numbers-range": (
        {"action.std": "range", "action.std_value": 0.2, "action.squash": "clip"}, numbers),
    "ppg-numbers-squash-tanh": ({"action.squash": "tanh"}, numbers),
    "ppo-tree-multidiscrete": ({}, key_tree),
    # Each normalizer alone; that of rewards by rollouts is in the basic runs
    "ppo-obs-norm": (
        {**NO_REWARD_NORM, "obs_norm": replace(OBS_NORM, clip=1.5)}, numbers),
    "ppo-obs-norm-ema-tree": ({**NO_REWARD_NORM, "obs_norm": ObsNormConfig(**EMA)}, key_tree),
    "ppo-reward-norm-steps": (
        {"reward_norm": RewardNormConfig(per="step", gamma=0.8, clip=1.0)}, keys),
    "ppo-value-norm": (ONLY_VALUES, keys),
    "ppo-value-norm-ema-shared": (
        ONLY_VALUES | SHARED | {"value_norm": ValueNormConfig(**EMA), "ppo.value_clip": 0.2}, keys),
    "ppg-value-norm": (ONLY_VALUES, keys),
    # Other returns and objectives, and what is adapted to the divergence
    "ppo-n-step": ({"ppo.estimator": "n_step", "ppo.n_step": 3}, keys),
    "ppo-monte-carlo": ({"ppo.estimator": "monte_carlo"}, keys),
    "reinforce": (REINFORCE, numbers),
    "reinforce-episodes": (REINFORCE | EPISODES, numbers),
    "ppo-episodes": (
        {**FAST_EPOCHS, **EPISODES, "ppo.advantage_norm": "minibatch",
         "ppo.minibatch_by": "transitions"}, keys),
    "actor-critic": (LOG_PROB, keys),
    "ppo-recomputed": (
        {**FAST_EPOCHS, "ppo.recompute_advantages": True, "ppo.reward_clip": 1.0}, keys),
    "ppo-adaptive-kl": (
        {**FAST_EPOCHS, "ppo.schedule": "adaptive_kl", "ppo.schedule_kl": 1e-3,
         "ppo.target_kl": 0.05}, keys),
    "ppo-adaptive-penalty": (
        {**FAST_EPOCHS, "ppo.kl_penalty": 1.0, "ppo.kl_penalty_target": 0.01,
         "ppo.kl_estimate": "exact", "ppo.adam_eps_hat": True}, numbers),
    "ppo-averaged": ({**AVERAGED, "ppo.recompute_advantages": True}, keys),
    "ppg-averaged": (
        {**AVERAGED, **GRU, "ppo.kl_penalty": 1.0, "ppo.kl_estimate": "exact"}, numbers),
    # Much of it together
    "ppo-together": ({**MEMORY_AND_NORMS, "ppo.value_learning_rate": 1e-3}, everything),
    "ppg-together": (
        {**MEMORY_AND_NORMS, **GRU, **DETACHED, **EPOCHS, "aux.optimizer": "shared",
         "ppo.recompute_advantages": True}, everything),
}  # fmt: skip
"""Runs of three iterations: changes of `tiny` at their paths, and the environment."""


def runs(folder: Path) -> dict[str, Case]:
    """Return the runs, by name."""
    short_runs = {
        name: (short(folder, changes, ppg=name.startswith("ppg")), make_env)
        for name, (changes, make_env) in SHORT_RUNS.items()
    }
    return basic_runs(folder) | short_runs


def basic_runs(folder: Path) -> dict[str, Case]:
    """Return PPO and PPG on numbers and images, with each of the value paths."""
    ppo = tiny(folder, total_env_steps=160)
    shared = ppo.with_updates({**NO_REWARD_NORM, **SHARED, "model.init": "orthogonal"})
    clipped = shared.with_updates({
        "ppo.minibatch_by": "transitions", "ppo.advantage_norm": "minibatch", "ppo.value_clip": 0.2,
        "ppo.max_grad_norm": 0.5, "ppo.schedule": "linear",
    })  # fmt: skip
    apart = ppo.with_updates({
        "ppo.policy_epochs": 2, "ppo.value_epochs": 3, "ppo.bootstrap_truncation": False,
        "ppo.clip": None, "ppo.kl_penalty": 1.0,
    })  # fmt: skip
    images = ModelConfig(value_path="detached", channels=(4, 8), blocks=1, hidden_sizes=(16,))
    images = replace(ppo, model=images, aux=tiny_aux(optimizer="shared"))
    return {
        "ppo-separate-segments": (ppo, corridor),
        "ppo-shared-transitions-clipped": (clipped, corridor),
        "ppo-value-epochs-first-kl": (apart, corridor),
        "ppo-policy-epochs-first": (
            apart.with_updates({"ppo.epoch_order": "policy_first"}),
            corridor,
        ),
        "ppg-separate": (replace(ppo, aux=tiny_aux()), corridor),
        "ppg-detached-images": (images, Image),
    }


def short(folder: Path, changes: dict[str, Any], *, ppg: bool = False) -> Config:
    """Shorten a run to three iterations; in PPG an auxiliary phase follows the second one."""
    config = tiny(folder, aux=tiny_aux() if ppg else None, total_env_steps=96)
    memory = {"model.memory_size": 6} if "model.memory" in changes else {}
    return config.with_updates({"ppo.max_grad_norm": 0.5, **memory, **changes})


def measure(config: Config, make_env: MakeEnv) -> list[dict[str, float]]:
    """Return the finite metrics of every iteration, without times, and sums of the weights."""
    rows: list[dict[str, float]] = []
    run = train(config, make_env=make_env, callbacks=lambda _, record: rows.append(dict(record)))
    weights = run.agent.state_dict().items()
    rows.append({name: float(tensor.double().sum()) for name, tensor in weights})
    clock = ("time/", "charts/SPS")
    rows = [{name: x for name, x in row.items() if not name.startswith(clock)} for row in rows]
    return [{name: x for name, x in row.items() if math.isfinite(x)} for row in rows]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(*run) for name, run in runs(Path(folder)).items()}
        FILE.write_text(json.dumps(found, indent=1) + "\n")
