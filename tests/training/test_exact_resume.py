"""A run that was stopped and resumed is the unbroken one, to the bit, environments and all."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.algorithm import resume, train
from phasicrl.config import Config, EnvConfig, RewardNormConfig
from phasicrl.runs.directory import EPOCHS_FILE, RunDirectory
from phasicrl.seeding import derive_seed
from phasicrl.training import build
from phasicrl.training.run import Run
from tests import helpers


def epoch_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's epochs without their times."""
    lines = (directory / EPOCHS_FILE).read_text().splitlines()
    return [json.loads(line) | {"wall_time": 0} for line in lines]


class Drawing(gym.Env[np.ndarray, Any]):
    """Environment that draws from Gymnasium's generator in every step, and ends by chance."""

    observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**given)
        return self._go_to(self.np_random.normal(size=2)), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        noise = self.np_random.normal(size=2) * 0.3
        place = self._go_to(0.9 * self._place + noise + 0.1 * action)
        return place, float(place.sum()), bool(self.np_random.random() < 0.1), False, {}

    def _go_to(self, place: np.ndarray) -> np.ndarray:
        self._place = place.astype(np.float32)
        return self._place.copy()


class CutOff(Drawing):
    """`Drawing` whose episodes are truncated by chance."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, over, _, info = super().step(action)
        return obs, reward, False, over, info


class Hidden(Drawing):
    """Environment with a private generator, which cannot be restored."""

    _own = np.random.default_rng()

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**given)
        return self._go_to(self._own.normal(size=2)), {}


def assert_unbroken(config: Config, tmp_path: Path, stops: tuple[int, ...], **own: Any) -> None:
    unbroken = train(replace(config, output_dir=str(tmp_path / "unbroken")), **own)
    run = train(config, **own, callbacks=helpers.stop_at(stops[0]))
    for stop in (*stops[1:], 10**9):
        run = resume(run.directory, **own, callbacks=helpers.stop_at(stop))
    assert len(helpers.rows_of(run.files)) == config.num_iterations
    helpers.assert_same_run(run, unbroken)


LSTM = {"model.memory": "lstm", "model.memory_size": 8, "ppo.minibatch_by": "segments"}
NEW_TARGETS = {"aux.recompute_targets": True, "reward_norm": RewardNormConfig(per="rollout")}
OWN: dict[str, tuple[Callable[[], gym.Env[Any, Any]], dict[str, Any]]] = {
    "draws-in-steps": (Drawing, {}),
    # Final observations keep their value, in a scale of rewards that moves.
    "new-targets": (CutOff, NEW_TARGETS),
    "masks-and-numbers": (partial(helpers.Levers, discrete=False, masked=True), {}),
    "masks-and-memory": (partial(helpers.Levers, masked=True), LSTM),
}


@pytest.mark.parametrize("name", helpers.mark_long(OWN, "new-targets", "masks-and-memory"))
def test_with_environments_of_ones_own(tmp_path: Path, name: str) -> None:
    make_env, changes = OWN[name]
    aux = helpers.tiny_aux(every=3)
    config = helpers.tiny(tmp_path, aux=aux, total_env_steps=256).with_updates(changes)
    assert_unbroken(config, tmp_path, (2, 5), make_env=make_env)


@pytest.mark.long
def test_with_environments_in_processes(tmp_path: Path) -> None:
    config = helpers.tiny(tmp_path, total_env_steps=128).with_updates(
        {"env.vectorization": "async", "env.num_envs": 2, "ppo.num_steps": 16}
    )
    assert_unbroken(config, tmp_path, (2,), make_env=Drawing)


@pytest.mark.parametrize(("env_id", "changes"), [
    ("envpool:CartPole-v1", LSTM | {"env.observe": (0, 2), "model.memory": "gru"}),
    ("envpool:Hopper-v5", {}),
    *helpers.mark_long([("envpool:CartPole-v1", {}), ("gymnasium:CartPole-v1", {})]),
])  # fmt: skip
def test_with_vectors(tmp_path: Path, env_id: str, changes: dict[str, Any]) -> None:
    if env_id.startswith("envpool"):
        helpers.skip_without_envpool()
    config = replace(
        helpers.tiny(tmp_path, aux=helpers.tiny_aux(every=3), total_env_steps=512),
        env=EnvConfig(id=env_id, num_envs=4),
    )
    assert_unbroken(config.with_updates({"ppo.num_steps": 16} | changes), tmp_path, (3,))


@pytest.mark.long
def test_with_a_game_of_procgen(tmp_path: Path) -> None:
    helpers.skip_without_envpool()
    config = replace(
        helpers.tiny(tmp_path, aux=helpers.tiny_aux(every=2), total_env_steps=1024),
        env=EnvConfig(id="procgen:starpilot", num_envs=4, distribution="easy"),
    )
    small = {
        "model.encoder": "impala", "model.channels": (4,), "model.blocks": 1,
        "model.activation": "relu", "ppo.num_steps": 64,
    }  # fmt: skip
    assert_unbroken(config.with_updates(small), tmp_path, (3,))


@pytest.mark.parametrize("changed", [None, partial(helpers.Levers, masked=True)])
def test_environments_without_replay_are_reported_and_start_new_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: Any
) -> None:
    """Resume where resets cannot be repeated, and where there are masks now."""
    config = helpers.tiny(tmp_path).with_updates({"log.console": "plain"})
    make_env = helpers.Levers if changed else Hidden
    run = train(config, make_env=make_env, callbacks=helpers.stop_at(2))
    again = resume(run.directory, make_env=changed or Hidden)
    assert again.env_steps == 128 and again.envs_made_at == 64
    assert "environments start new episodes" in capsys.readouterr().out


class _Stop(Exception):
    """End of a run at the place that a test chooses."""


@pytest.mark.parametrize("changes", [
    {}, {"aux.optimizer": "shared", "aux.minibatch_by": "transitions"}, LSTM,
    {"aux.every": 4, "aux.iterations_per_epoch": 2, "log.tensorboard": True},
    {"aux.every": 4, "aux.iterations_per_epoch": 2, "aux.iterations_from": "last"}, NEW_TARGETS,
], ids=["own-adam", "one-adam", "lstm", "part-of-data", "last-data", "new-targets"])  # fmt: skip
def test_in_the_middle_of_an_auxiliary_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """A run stopped before or between epochs resumes with the next epoch: none is repeated."""
    config = helpers.tiny(tmp_path, aux=helpers.tiny_aux(every=2, epochs=3), total_env_steps=256)
    config = config.with_updates({"log.epochs": True} | changes)
    unbroken = train(replace(config, output_dir=str(tmp_path / "unbroken")), make_env=Drawing)
    checkpoint, at = Run.back_up_and_maybe_save, config.aux.every
    epochs: list[int] = []

    def stop_at_each(run: Run) -> None:
        """Stop at the phase's every epoch once, as soon as its state has been kept."""
        checkpoint(run)
        progress = run.buffer.aux_progress
        if progress is not None and run.iteration == at and progress.epoch not in epochs:
            epochs.append(progress.epoch)
            raise _Stop

    monkeypatch.setattr(Run, "back_up_and_maybe_save", stop_at_each)
    with pytest.raises(_Stop):
        train(config, make_env=Drawing)
    (directory,) = (path for path in tmp_path.iterdir() if path.name != "unbroken")
    for epoch in (0, 1):
        name = f"step-{at * config.batch_size:012d}-aux-{epoch:03d}"
        assert RunDirectory(directory).checkpoints[-1].name == name
        assert len(helpers.rows_of(RunDirectory(directory))) == at - 1
        with pytest.raises(_Stop):
            resume(directory, make_env=Drawing)
    run = resume(directory, make_env=Drawing)
    assert epochs == [0, 1, 2]
    # Its times are those of all its parts.
    row = run.files.metrics()[at - 1]
    parts = [row[f"time/{part}"] for part in ("rollout", "policy", "value", "auxiliary")]
    assert parts[0] > 0 and sum(parts) <= row["time/total"]
    helpers.assert_same_run(run, unbroken)
    assert epoch_rows(run.directory) == epoch_rows(unbroken.directory)


@pytest.mark.parametrize("changes", [{}, NEW_TARGETS], ids=["targets", "new-targets"])
def test_rows_after_a_checkpoint_in_an_auxiliary_phase_are_not_doubled(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The iteration's end has the same clock, and its row is there; its checkpoint is not."""
    config = helpers.tiny(tmp_path, aux=helpers.tiny_aux(every=2, epochs=3), total_env_steps=256)
    always = {"checkpoint.every_minutes": 0.0, "checkpoint.keep": 1000}
    run = train(config.with_updates(always | changes), make_env=CutOff)
    names = [path.name for path in run.files.checkpoints]
    steps = f"step-{2 * config.batch_size:012d}"
    assert [name for name in names if name.startswith(steps)] == [
        f"{steps}-aux-000", f"{steps}-aux-001", f"{steps}-aux-002", steps
    ]  # fmt: skip
    before = helpers.rows_of(run.files)
    for name in names[names.index(f"{steps}-aux-002") :]:
        shutil.rmtree(run.files.checkpoint_folder / name)
    helpers.assert_same(helpers.rows_of(resume(run.directory, make_env=CutOff).files), before)


def test_every_epoch_has_a_row_and_an_iterations_metrics_are_their_mean(tmp_path: Path) -> None:
    """Two value epochs, then a policy epoch; after every second iteration three auxiliary ones."""
    aux = helpers.tiny_aux(every=2, epochs=3, learning_rate=1e-4)
    config = helpers.tiny(tmp_path, aux=aux, total_env_steps=128).with_updates(
        {"ppo.value_epochs": 2, "ppo.value_learning_rate": 1e-3, "log.epochs": True}
    )
    plain = config.with_updates({"log.epochs": False, "output_dir": str(tmp_path / "plain")})
    run, other = train(config, make_env=Drawing), train(plain, make_env=Drawing)
    assert helpers.rows_of(run.files) == helpers.rows_of(other.files)
    assert not (other.directory / EPOCHS_FILE).exists()
    rows, metrics = epoch_rows(run.directory), helpers.rows_of(run.files)
    phase = [("value", 1), ("value", 2), ("policy", 3)]
    auxiliary = [("aux", 1), ("aux", 2), ("aux", 3)]
    expected = [phase, [*phase, *auxiliary], phase, phase]  # none after the last policy phase
    for row, epochs in zip(metrics, expected, strict=True):
        own = [each for each in rows if each["iteration"] == row["iteration"]]
        assert [(each["kind"], each["epoch"]) for each in own] == epochs
        assert {each["env_steps"] for each in own} == {row["env_steps"]}
        for kind, name in (
            ("value", "losses/value_loss"), ("policy", "losses/policy_loss"),
            ("policy", "losses/approx_kl"), ("aux", "losses/aux/kl_loss"),
        ):  # fmt: skip
            seen = [each[name] for each in own if each["kind"] == kind]
            assert not seen or np.mean(seen) == pytest.approx(row[name], rel=1e-6, abs=1e-9)
            assert len(set(seen)) == len(seen), "each epoch has its own"
            assert all(name not in each for each in own if each["kind"] != kind)


def test_environments_made_at_a_resume_are_made_alike_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = helpers.tiny(tmp_path, total_env_steps=256)
    run = train(config, make_env=Hidden, callbacks=helpers.stop_at(2))
    run = resume(run.directory, make_env=Hidden, callbacks=helpers.stop_at(4))
    made = Mock(side_effect=build.make_envs)
    monkeypatch.setattr(build, "make_envs", made)
    resume(run.directory, make_env=Hidden)
    seed = derive_seed(config.seed, "env", 2 * config.batch_size)
    assert made.call_args_list[0].kwargs["seed"] == seed
