"""Recorded experience, played back by environments that ignore the actions."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np


@dataclass(frozen=True)
class Recording:
    """N steps of B environments.

    Attributes:
        obs: `[N + 1, B, …]`, observation before each action; after an end that of a new episode.
        final_obs: `[N, B, …]`, last observation of an episode, where one ended.
        reward: `[N, B]`, of numbers that float32 has.
        terminated: `[N, B]`, ended by the rules.
        truncated: `[N, B]`, cut.
        action: `[N, B]` or `[N, B, K]`.
        spaces: of observations and actions.
        mask: `[N + 1, B, A]`, allowed actions; None if all are.
    """

    obs: np.ndarray
    final_obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    action: np.ndarray
    spaces: tuple[gym.Space[Any], gym.Space[Any]]
    mask: np.ndarray | None = None

    @property
    def ended(self) -> np.ndarray:
        """Return the steps that end an episode, `[N, B]`."""
        return self.terminated | self.truncated


PICTURE = gym.spaces.Box(0, 255, (32, 32, 3), np.uint8)
SCREEN = gym.spaces.Box(0, 255, (1, 84, 84), np.uint8)
VECTOR = gym.spaces.Box(-10, 10, (7,), np.float32)
BUTTONS, FEW = gym.spaces.Discrete(15), gym.spaces.Discrete(3)
FORCES = gym.spaces.Box(-2, 2, (3,), np.float32)


def record(
    spaces: tuple[gym.Space[Any], gym.Space[Any]],
    num_steps: int,
    num_envs: int,
    *,
    ends: str,
    limit: int = 12,
    rollout: int = 0,
    masked: bool = False,
    seed: int = 0,
) -> Recording:
    """Make up experience.

    Args:
        spaces: of observations and actions.
        num_steps: N.
        num_envs: B.
        ends: `rules`: episodes end by the rules only, of any length. `both`: some are cut, too.
            `limit`: those that reach `limit` are cut.
        limit: most steps of an episode, for `limit`.
        rollout: for `limit`: an episode reaches its limit at each multiple of so many steps.
        masked: whether some actions are not allowed.
        seed: seed of everything.
    """
    random = np.random.default_rng(seed)
    observation, action = spaces
    size, shape = (num_steps, num_envs), (num_steps + 1, num_envs, *(observation.shape or ()))
    if observation is SCREEN:
        obs, final = (random.integers(0, 256, shape, np.uint8) for _ in range(2))
    elif observation.dtype == np.uint8:
        obs, final = (_pictures(random, shape) for _ in range(2))
    else:
        obs, final = (random.standard_normal(shape).astype(np.float32) for _ in range(2))
    # Sparse and of different sizes, as rewards are.
    reward = (random.random(size) < 0.4) * random.exponential(2, size)
    terminated, truncated = random.random(size) < 0.1, np.zeros(size, bool)
    if ends == "both":
        truncated = ~terminated & (random.random(size) < 0.05)
    if ends == "limit":
        terminated, truncated = _limited(terminated, limit, rollout)
    if isinstance(action, gym.spaces.Discrete):
        actions = random.integers(0, action.n, size)
    else:
        actions = random.standard_normal((*size, *(action.shape or ()))).astype(np.float32)
    mask = None
    if masked:
        choices = np.arange(action.n)  # type: ignore[attr-defined]  # it is discrete
        mask = random.random((*shape[:2], len(choices))) < 0.5
        mask[:-1] |= choices == actions[..., None]
        mask[-1] = True
    return Recording(
        obs, final[:-1], reward.astype(np.float32), terminated, truncated, actions, spaces, mask
    )


def _pictures(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Make images `[…, H, W, C]` of patches 8 pixels wide, with a little noise."""
    *many, height, width, channels = shape
    patches = random.integers(16, 240, (*many, height // 8, width // 8, channels))
    pictures = patches.repeat(8, axis=-3).repeat(8, axis=-2) + random.integers(-16, 16, shape)
    return pictures.astype(np.uint8)


def _limited(terminated: np.ndarray, limit: int, rollout: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ends of one environment whose last episode of each rollout reaches its time limit."""
    terminated, truncated = terminated.copy(), np.zeros_like(terminated)
    length = 0
    for t in range(len(terminated)):
        left = rollout - t % rollout
        if left == limit:
            terminated[t - 1 if t else 0] |= t > 0
        if left <= limit:
            terminated[t] = False
        length = 0 if t and (terminated[t - 1, 0] or truncated[t - 1, 0]) else length
        length += 1
        truncated[t] = length == limit
        terminated[t] &= ~truncated[t]
    return terminated, truncated


class Player:
    """Position in a recording of all environments, with new episodes in the same step."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.num_envs = recording.reward.shape[1]
        self.at = 0

    def seen(self) -> np.ndarray:
        """Return the current observations."""
        return self.recording.obs[self.at].copy()

    def action(self) -> np.ndarray:
        """Return the recorded actions."""
        return self.recording.action[min(self.at, len(self.recording.action) - 1)]

    def step(self) -> int:
        """Advance; returns the number of the step."""
        self.at += 1
        return self.at - 1


class Playback(gym.Env[np.ndarray, Any]):
    """One environment of a recording, with Gymnasium's interface."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # Gymnasium's own is one

    def __init__(self, recording: Recording, number: int) -> None:
        self.observation_space, self.action_space = recording.spaces
        self.recording, self.number, self.at = recording, number, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the first observation of the next episode."""
        return self.recording.obs[self.at, self.number].copy(), self._info()

    def get_action_meanings(self) -> list[str]:
        """Return nothing, as CleanRL's script for Atari asks."""
        return []

    def _info(self) -> dict[str, Any]:
        mask = self.recording.mask
        return {} if mask is None else {"action_mask": mask[self.at, self.number]}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return the recorded step."""
        n, i, self.at = self.at, self.number, self.at + 1
        one = self.recording
        obs = one.final_obs[n, i] if one.ended[n, i] else one.obs[self.at, i]
        ends = bool(one.terminated[n, i]), bool(one.truncated[n, i])
        return obs.copy(), float(one.reward[n, i]), *ends, self._info()


def playbacks(recording: Recording, *, first: int = 0) -> Callable[[], Playback]:
    """Return a function that makes the environments of a recording one by one, from a number."""
    numbers = itertools.count(first)
    return lambda: Playback(recording, next(numbers))


class Played:
    """Recording as one of their vector environments; a base class put before theirs."""

    player: Player
    precision: str

    def reset(self) -> np.ndarray:
        return self.player.seen()

    def step_async(self, actions: np.ndarray) -> None: ...

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        n, recording = self.player.step(), self.player.recording
        infos: list[dict[str, Any]] = [{} for _ in range(self.player.num_envs)]
        for env in np.flatnonzero(recording.ended[n]):
            infos[env] = {
                "terminal_observation": recording.final_obs[n, env],
                "TimeLimit.truncated": bool(recording.truncated[n, env]),
            }
        return (
            self.player.seen(),
            recording.reward[n].astype(self.precision),
            recording.ended[n],
            infos,
        )

    def close(self) -> None: ...

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None] * self.player.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

    def env_method(
        self, method_name: str, *args: Any, indices: Any = None, **options: Any
    ) -> list[Any]:
        mask: Any = self.player.recording.mask  # MaskablePPO asks for masks only
        return list(mask[self.player.at])

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.player.num_envs


def played(base: Any, player: Player, precision: str) -> Any:
    """Return a recording as an environment of a reference.

    Args:
        base: class of vector environments, made from their number and the spaces.
        player: recording to play back.
        precision: precision of rewards.
    """
    kind: Any = type("Environments", (Played, base), {"player": player, "precision": precision})
    return kind(player.num_envs, *player.recording.spaces)
