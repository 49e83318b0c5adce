"""Tiny configurations and environments that several tests share."""

import functools
import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phasicrl.config import AuxConfig, Config, ObsNormConfig, ValueNormConfig
from phasicrl.lab.experiments.trials import Failure
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.build import start_run
from phasicrl.training.run import Run
from tests.corridor import Corridor as Corridor
from tests.corridor import corridor as corridor


def mark_long(cases: Iterable[Any], *but: Any) -> list[Any]:
    """Mark all cases of a parametrized test as long but these."""
    parts = ((case, case if isinstance(case, tuple) else (case,)) for case in cases)
    return [case if case in but else pytest.param(*part, marks=pytest.mark.long)
            for case, part in parts]  # fmt: skip


class Levers(gym.Env[np.ndarray, Any]):
    """Memory, masks and actions of every kind in one small task.

    Three levers, one of them shown in the first of four steps only.

    In each step the reward is 1 for pulling that lever. Lever 2 is never the one, and a mask says
    so. With `discrete` off a number has to be given too: it is rewarded for being near to the
    lever's.
    """

    def __init__(self, *, discrete: bool = True, masked: bool = False, strict: bool = True) -> None:
        self.observation_space = gym.spaces.Box(0, 1, (3,), np.float32)
        pull, number = gym.spaces.Discrete(3), gym.spaces.Box(-2, 2, (1,), np.float32)
        self.action_space = pull if discrete else gym.spaces.Tuple((pull, number))
        self.discrete, self.masked, self.strict = discrete, masked, strict

    def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**options)
        self.lever, self.at = int(self.np_random.integers(2)), 0
        return self._seen(), self._info()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        pulled = action if self.discrete else action[0]
        assert not (self.masked and self.strict and pulled == 2), "a masked action was taken"
        reward = float(pulled == self.lever)
        if not self.discrete:
            reward -= 0.5 * abs(float(action[1][0]) - self.lever)
        self.at += 1
        return self._seen(), reward, self.at == 4, False, self._info()

    def _seen(self) -> np.ndarray:
        shown = (self.lever == 0, self.lever == 1) if self.at == 0 else (False, False)
        return np.array([*shown, self.at / 4], dtype=np.float32)

    def _info(self) -> dict[str, Any]:
        return {"action_mask": np.array([True, True, False])} if self.masked else {}


OBS_NORM = ObsNormConfig(statistics="moments")
VALUE_NORM = ValueNormConfig(statistics="moments")
OFF = AuxConfig()
TINY = Config(name="tiny", seed=3, total_env_steps=128).with_updates({
    "env.id": "corridor", "env.num_envs": 4, "model.encoder": "mlp", "model.hidden_sizes": (8,),
    "model.activation": "tanh", "ppo.num_steps": 8, "ppo.gamma": 0.9, "ppo.num_minibatches": 2,
    "reward_norm.per": "rollout", "compute.device": "cpu", "log.console": "off",
    "log.tensorboard": False, "checkpoint.every_minutes": None,
})  # fmt: skip


def tiny(tmp_path: Path, *, aux: AuxConfig | None = None, **changes: Any) -> Config:
    """Return a configuration of four corridors, eight steps a rollout; it trains in a second."""
    return replace(TINY.with_updates({"output_dir": str(tmp_path), "aux": aux or OFF}), **changes)


def tiny_aux(**changes: Any) -> AuxConfig:
    """Return an auxiliary phase after every second rollout of `tiny`."""
    return replace(AuxConfig(every=2, epochs=2, num_minibatches=2), **changes)


def read_film(path: Path, height: int, width: int) -> np.ndarray:
    """Return all frames of a film, `[N, height, width, 3]`."""
    import imageio_ffmpeg

    program, raw = imageio_ffmpeg.get_ffmpeg_exe(), ("-f", "rawvideo", "-pix_fmt", "rgb24", "-")
    command = [program, "-loglevel", "error", "-i", str(path), *raw]
    done = subprocess.run(command, capture_output=True, check=True)
    return np.frombuffer(done.stdout, dtype=np.uint8).reshape(-1, height, width, 3)


OPENED: list[Run] = []
"""Runs to be closed at the end of the test."""


def open_run(config: Config, make_env: Callable[[], Any] = corridor, **user: Any) -> Run:
    """Start a run, on corridors by default, and close it at the end of the test."""
    OPENED.append(start_run(config, make_env=make_env, **user))
    return OPENED[-1]


class NoisyEncoder(nn.Module):
    """Network with random numbers, statistics of its inputs, and the result of its last pass."""

    num_features = 4

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.normalizer = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))

    def forward(self, obs: Tensor) -> Tensor:
        self.result = self.normalizer(obs) + 0.1 * torch.randn(4)
        self.results = {"last": [self.result]}
        return self.result


def look_up(name: str) -> Any:
    """Find a dotted name of the package, such as `phases.policy_phase`.

    Raises:
        ImportError, AttributeError: there is nothing of that name in the package.
    """
    parts = name.split(".")
    module, rest = importlib.import_module(f"phasicrl.{parts[0]}"), parts[1:]
    while rest and not hasattr(module, rest[0]):
        module, rest = importlib.import_module(f"{module.__name__}.{rest[0]}"), rest[1:]
    return functools.reduce(getattr, rest, module)


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        """Stand in for `time.sleep`."""
        self.now += seconds


def skip_without_envpool() -> None:
    """Skip a test, or a module of tests, if EnvPool is not installed.

    `pytest.importorskip` imports it, which fails on a bare machine unless phasicrl does so.
    """
    if importlib.util.find_spec("envpool") is None:
        pytest.skip("EnvPool is not installed", allow_module_level=True)


def run_here(items: Iterable[Any], work: Callable[[Any], Any], *, jobs: int = 1) -> Iterator[Any]:
    """Stand in for `run_in_processes`: call `work` on each item in this process."""
    for item in items:
        try:
            outcome = work(item)
        except (ValueError, OSError) as error:
            outcome = Failure(str(error))
        yield item, outcome


def is_there(pid: int) -> bool:
    """Return true if a process still runs and is no zombie; Linux only."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


TRAIN = (sys.executable, "-m", "phasicrl", "train", "classic-ppo", "--log.no-tensorboard")
"""Command that trains on the preset's own task."""


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the paths at which two trees differ by a bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        if not same or one.numpy().tobytes() != other.numpy().tobytes():
            yield path
    elif isinstance(one, dict) and isinstance(other, dict):
        for name in one.keys() | other.keys():
            yield from differences(one.get(name), other.get(name), f"{path}/{name}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
        yield from differences(dict(enumerate(one)), dict(enumerate(other)), path)
    elif repr(one) != repr(other):  # NaN is NaN here
        yield f"{path}: {one!r:.60} and {other!r:.60}"


def assert_same(one: Any, other: Any) -> None:
    """Compare two trees to the bit."""
    assert not list(differences(one, other))


def assert_same_run(one: Run, other: Run) -> None:
    """Compare the weights and the metrics of two runs, to the bit."""
    assert_same(one.agent.state_dict(), other.agent.state_dict())
    assert_same(rows_of(one.files), rows_of(other.files))


def stop_at(iteration: int) -> Callable[[Run, Any], Any]:
    """Make an `on_iteration` that ends a run after this iteration."""
    return lambda run, _: "stop" if run.iteration == iteration else None


def rows_of(files: RunDirectory) -> list[dict[str, float]]:
    """Return a run's rows of metrics, without times: equal runs have equal rows."""
    times = ("charts/SPS", "wall_time")
    return [
        {name: v for name, v in row.items() if not name.startswith("time/") and name not in times}
        for row in files.metrics()
    ]
