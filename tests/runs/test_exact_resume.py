"""A run that was stopped and resumed is the unbroken one, to the bit, environments and all."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import Config, EnvConfig
from tests.helpers import Corridor, Levers, rows_of, tiny, tiny_aux


class Drawing(gym.Env[np.ndarray, Any]):
    """Draws in every step, from the generator that Gymnasium gives it, and ends by chance."""

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = self.np_random.normal(size=2).astype(np.float32)
        return self._place.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._place = (
            0.9 * self._place + self.np_random.normal(size=2) * 0.3 + 0.1 * action
        ).astype(np.float32)
        return (
            self._place.copy(),
            float(self._place.sum()),
            bool(self.np_random.random() < 0.1),
            False,
            {},
        )


class Hidden(Drawing):
    """Draws from a generator of its own, which nobody can bring back."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        if not hasattr(self, "_own"):
            self._own = np.random.default_rng()
        super().reset(seed=seed)
        self._place = self._own.normal(size=2).astype(np.float32)
        return self._place.copy(), {}


def assert_resumed_is_unbroken(
    config: Config, tmp_path: Path, stops: tuple[int, ...], **own: Any
) -> None:
    unbroken = train(replace(config, output_dir=str(tmp_path / "unbroken")), **own)
    run = train(
        config, **own, on_iteration=lambda run, _: "stop" if run.iteration == stops[0] else None
    )
    for stop in (*stops[1:], math.inf):
        run = resume(
            run.directory,
            **own,
            on_iteration=lambda run, _, at=stop: "stop" if run.iteration == at else None,
        )
    for name, weights in unbroken.agent.state_dict().items():
        assert torch.equal(weights, run.agent.state_dict()[name]), name
    ours, theirs = rows_of(run.files), rows_of(unbroken.files)
    assert len(ours) == config.num_iterations
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(list(one.values()), list(other.values()))


OWN: dict[str, tuple[Callable[[], gym.Env[Any, Any]], dict[str, Any]]] = {
    "corridor": (Corridor, {}),
    "draws-in-steps": (Drawing, {}),
    "lstm": (
        Drawing,
        {"model.memory": "lstm", "model.memory_size": 8, "ppo.minibatch_by": "segments"},
    ),
    "masks-and-numbers": (partial(Levers, discrete=False, masked=True), {}),
}


@pytest.mark.parametrize("name", OWN)
def test_with_environments_of_ones_own(tmp_path: Path, name: str) -> None:
    make_env, changes = OWN[name]
    config = tiny(tmp_path, aux=tiny_aux(every=3), total_env_steps=256).changed(changes)
    assert_resumed_is_unbroken(config, tmp_path, (2, 5), make_env=make_env)


def test_with_environments_in_processes(tmp_path: Path) -> None:
    config = tiny(tmp_path, total_env_steps=128).changed(
        {"env.parallel": "processes", "env.num_envs": 2, "ppo.num_steps": 16}
    )
    assert_resumed_is_unbroken(config, tmp_path, (2,), make_env=Drawing)


@pytest.mark.parametrize(
    ("env_id", "changes"),
    [
        ("envpool:CartPole-v1", {}),
        (
            "envpool:CartPole-v1",
            {
                "env.observe": (0, 2),
                "model.memory": "gru",
                "model.memory_size": 8,
                "ppo.minibatch_by": "segments",
            },
        ),
        ("envpool:Hopper-v5", {}),
        ("gymnasium:CartPole-v1", {}),
    ],
)
def test_with_vectors(tmp_path: Path, env_id: str, changes: dict[str, Any]) -> None:
    if env_id.startswith("envpool"):
        pytest.importorskip("envpool")
    config = replace(
        tiny(tmp_path, aux=tiny_aux(every=3), total_env_steps=512),
        env=EnvConfig(id=env_id, num_envs=4),
    )
    assert_resumed_is_unbroken(config.changed({"ppo.num_steps": 16} | changes), tmp_path, (3,))


def test_with_a_game_of_procgen(tmp_path: Path) -> None:
    pytest.importorskip("envpool")
    config = replace(
        tiny(tmp_path, aux=tiny_aux(every=2), total_env_steps=1024),
        env=EnvConfig(id="procgen:starpilot", num_envs=4, distribution="easy"),
    )
    small = {
        "model.encoder": "impala",
        "model.channels": (4,),
        "model.blocks": 1,
        "model.activation": "relu",
        "ppo.num_steps": 64,
    }
    assert_resumed_is_unbroken(config.changed(small), tmp_path, (3,))


def test_what_cannot_be_brought_back_is_said_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, total_env_steps=128)
    config = replace(config, log=replace(config.log, console="plain"))
    run = train(
        config, make_env=Hidden, on_iteration=lambda run, _: "stop" if run.iteration == 2 else None
    )
    again = resume(run.directory, make_env=Hidden)
    assert again.env_steps == 128 and again.envs_since == 64
    said = capsys.readouterr().out
    assert (
        "episodes that were under way start anew" in said
        and "played again, do not lead to where they were" in said
    )
