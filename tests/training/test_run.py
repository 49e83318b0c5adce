"""Runs: directories, what is saved and comes back, refusals before anything starts."""

import itertools
import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from phasicrl import Callbacks, phases
from phasicrl.algorithm import learn, resume, train
from phasicrl.config import AuxConfig, CheckpointConfig, ObsNormConfig, RewardNormConfig
from phasicrl.envs.protocol import EnvError
from phasicrl.execution.compiled import has_compiler
from phasicrl.normalize import RewardNormalizer
from phasicrl.phases import compute_targets, policy_phase
from phasicrl.rollout import Rollout
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS
from phasicrl.training import build
from phasicrl.training.build import start_run
from phasicrl.training.evaluate import evaluate
from phasicrl.training.run import Run
from tests.envs.counting import Spaces
from tests.golden import BOTH, Echo, Image
from tests.helpers import (
    OBS_NORM,
    VALUE_NORM,
    Clock,
    Corridor,
    Levers,
    assert_same,
    assert_same_run,
    corridor,
    mark_long,
    open_run,
    rows_of,
    stop_at,
    tiny,
    tiny_aux,
)

EVERY_ITERATION = CheckpointConfig(every_minutes=0, keep=100)


def assert_same_state(left: Run, right: Run) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    for state in (ours, theirs):
        del state["seconds"], state["log"]
    assert_same(ours, theirs)


def test_saving_more_often_or_logging_elsewhere_changes_nothing(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    busy = {"checkpoint": EVERY_ITERATION, "log.tensorboard": True, "log.console": "plain"}
    runs = [train(each, make_env=corridor) for each in (config, config.with_updates(busy))]
    assert_same_state(*runs)


class Stopped(Exception):
    """Power cut."""


def stop_after(iterations: int) -> Callable[[Run, dict[str, float]], None]:
    """Make a callback that ends a run as a crash does, right after an iteration."""

    def stop(run: Run, record: dict[str, float]) -> None:
        if run.iteration == iterations:
            raise Stopped

    return stop


@pytest.mark.parametrize("aux", [None, tiny_aux(every=3)])
def test_a_run_stopped_by_its_callback_is_saved_and_can_be_resumed(
    tmp_path: Path, aux: AuxConfig | None
) -> None:
    config = tiny(tmp_path, aux=aux, total_env_steps=224)  # a checkpoint at the end only
    run = train(config, make_env=corridor, callbacks=stop_at(2))
    files = run.files
    assert (run.iteration, run.env_steps, files.card["env_steps"]) == (2, 64, 64)
    assert [path.name for path in files.checkpoints] == ["step-000000000064-end"]
    again = resume(run.directory, make_env=corridor, callbacks=stop_at(4))
    assert again.env_steps == 128 and files.card["env_steps"] == 128
    assert resume(run.directory, make_env=corridor).env_steps == 224
    assert [row["env_steps"] for row in files.metrics()] == [32 * (1 + n) for n in range(7)]


KEYS_AND_NUMBERS = partial(Echo, BOTH, masked=True)
PICTURES = {
    "model.encoder": "impala", "model.channels": (4, 8), "model.blocks": 1,
    "model.value_path": "detached", "model.activation": "relu", "compute.num_threads": 1,
    "compute.policy_precision": "bf16", "compute.aux_precision": "bf16",
}  # fmt: skip
UNBROKEN: dict[str, tuple[dict[str, Any], Callable[[], gym.Env[Any, Any]]]] = {
    "plain": ({}, KEYS_AND_NUMBERS),
    "lstm": ({"model.memory": "lstm", "model.memory_size": 6}, KEYS_AND_NUMBERS),
    "gru": ({"model.memory": "gru", "model.memory_size": 6, "model.value_path": "shared"},
            KEYS_AND_NUMBERS),
    "obs-norm": ({"obs_norm": OBS_NORM}, KEYS_AND_NUMBERS),
    "obs-norm-ema": ({"obs_norm": ObsNormConfig(statistics="ema", decay=0.6)}, KEYS_AND_NUMBERS),
    "reward-norm-steps": ({"reward_norm": RewardNormConfig(per="step")}, KEYS_AND_NUMBERS),
    "value-norm": ({"value_norm": VALUE_NORM}, KEYS_AND_NUMBERS),
    "value-norm-ema": (
        {"value_norm.statistics": "ema", "value_norm.decay": 0.6}, KEYS_AND_NUMBERS),
    "linear": ({"ppo.schedule": "linear", "ppo.adam_eps_hat": True}, KEYS_AND_NUMBERS),
    "cosine": (
        {"ppo.schedule": "cosine", "ppo.clip_schedule": "linear", "ppo.entropy_schedule": "cosine"},
        KEYS_AND_NUMBERS),
    "adaptive": (
        {"ppo.schedule": "adaptive_kl", "ppo.kl_penalty": 1.0, "ppo.kl_penalty_target": 1e-3},
        KEYS_AND_NUMBERS),
    "epochs-apart": ({"ppo.policy_epochs": 2, "ppo.value_epochs": 1}, KEYS_AND_NUMBERS),
    "averaged": ({"ppo.proximal_decay": 0.8, "ppo.advantage_decay": 0.5}, KEYS_AND_NUMBERS),
    "images-bf16": (PICTURES, Image),
}  # fmt: skip


SHARED = tiny_aux(every=3, optimizer="shared")
AUXES = {"ppo": None, "ppg": tiny_aux(every=3), "ppg-one-adam": SHARED}
PLACES = [
    ("plain", "ppo", 4), ("lstm", "ppo", 4), *((name, "ppg", 4) for name in UNBROKEN),
    ("plain", "ppg-one-adam", 4), ("lstm", "ppg", 2), ("lstm", "ppg", 6),
]  # fmt: skip


@pytest.mark.parametrize(("name", "aux_name", "stop"), mark_long(PLACES, *PLACES[::2]))
def test_a_resumed_run_is_unbroken(tmp_path: Path, name: str, aux_name: str, stop: int) -> None:
    """Weights, moments, statistics, generators, rollouts and metrics are equal to the bit.

    With phases of three iterations the run stops one and two iterations into a phase, and between
    two phases. It then resumes.
    """
    aux = AUXES[aux_name]
    changes, make_env = UNBROKEN[name]
    once = CheckpointConfig(every_minutes=None, every_iterations=stop)
    config = tiny(tmp_path, aux=aux, total_env_steps=224, checkpoint=once).with_updates(changes)
    with start_run(config, make_env=make_env) as unbroken:
        with pytest.raises(Stopped):
            unbroken.callbacks.on_iteration = stop_after(stop)
            learn(unbroken)
        directory = Path(shutil.copytree(unbroken.directory, tmp_path / "copy"))
        with build.restore_run(directory, make_env=make_env) as resumed:
            assert resumed.iteration == stop
            assert resumed.buffer.num_filled == (0 if aux is None else stop % 3)
            for run in (unbroken, resumed):
                learn(run)
            assert_same_state(unbroken, resumed)
            for slot in range(resumed.buffer.num_filled):
                assert_same(*[run.buffer.rollout(slot).tensors() for run in (unbroken, resumed)])
    assert len(rows_of(resumed.files)) == 7
    assert_same_run(unbroken, resumed)


@pytest.mark.parametrize(("name", "every"), mark_long(
    [("plain", None), ("lstm", 2), ("averaged", 4), ("obs-norm", 2), ("obs-norm-ema", 4)],
    ("plain", None), ("lstm", 2),
))  # fmt: skip
def test_a_longer_run_is_the_one_that_was_given_its_length_at_the_start(
    name: str, every: int | None, tmp_path: Path
) -> None:
    """The shorter run left out an auxiliary phase at its end."""
    changes, make_env = UNBROKEN[name]
    aux, finished = tiny_aux(every=every) if every else None, list[int]()
    config = tiny(tmp_path, aux=aux, total_env_steps=256).with_updates(changes)
    config = config.with_updates({"evaluation.every_iterations": 4, "evaluation.episodes": 2})

    def count(run: Run, record: dict[str, float]) -> None:
        finished.append(run.iteration)
        run.log({"own/entropy": record["losses/entropy"]})

    objects: Any = {"make_env": make_env, "callbacks": count}
    whole = train(config, **objects)
    short = train(config.with_updates({"total_env_steps": 128}), **objects)
    times = short.files.metrics("time/rollout", "time/total")
    longer = resume(short.directory, total_env_steps=256, **objects)
    assert finished == [*range(1, 9)] * 2
    assert longer.files.metrics("time/rollout", "time/total")[:4] == times
    for run in (whole, longer):  # the evaluation before the auxiliary phase may be the best one
        run._best_return = None
    assert_same_state(whole, longer)
    rows = ([row | {"evaluation/best_return": 0.0} for row in rows_of(run.files)]
            for run in (whole, longer))  # fmt: skip
    assert_same(*rows)
    phases = [
        [row["iteration"] for row in run.files.metrics() if "time/auxiliary" in row]
        for run in (whole, longer)
    ]
    assert phases[0] == phases[1] and bool(phases[0]) == bool(every)
    assert longer.files.config.total_env_steps == 256
    with pytest.raises(ValueError, match="total_env_steps is 256"):
        resume(short.directory, total_env_steps=256, make_env=make_env)


@pytest.mark.parametrize("length", mark_long([None, 256, 288], 288))
def test_a_longer_run_that_was_killed_can_be_resumed(length: int | None, tmp_path: Path) -> None:
    """Copies of the run at seven moments resume with no, the same or another length."""
    once, copies = CheckpointConfig(every_minutes=None), list[Path]()
    short = train(tiny(tmp_path, checkpoint=once), make_env=corridor)

    def copy(run: Run, *_: Any) -> None:
        copies.append(Path(shutil.copytree(run.directory, tmp_path / f"copy-{len(copies)}")))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_state_dict", "call_callback", "finish_iteration"):
            patch.setattr(Run, name, copied_before(getattr(Run, name), copy))
        resume(short.directory, total_env_steps=256, make_env=corridor)
    assert len(copies) == 7
    for path in copies:
        given = RunDirectory(path).config.total_env_steps
        again = resume(path, total_env_steps=length, make_env=corridor)
        assert again.env_steps == again.files.config.total_env_steps == (length or given)


@pytest.mark.parametrize(("at", "kept"), [("auxiliary 3/3", (2, 1)), ("policy", (0, None))])
def test_a_longer_run_keeps_what_it_did_of_the_phase_that_was_left_out(
    at: str, kept: tuple[int, int | None], tmp_path: Path
) -> None:
    """The run ends in the last epoch, before which two were saved, or after the phase."""
    short = train(tiny(tmp_path, aux=tiny_aux(epochs=3), total_env_steps=64), make_env=corridor)

    def strike(stage: str) -> None:
        if stage == at:
            raise Stopped

    options: Any = {"total_env_steps": 128, "make_env": corridor}
    with pytest.raises(Stopped), build.restore_run(short.directory, **options) as run:
        run.show = strike  # type: ignore[method-assign]
        learn(run)
    with build.restore_run(short.directory, make_env=corridor) as run:
        progress = run.buffer.aux_progress
        assert (run.buffer.num_filled, progress and progress.epoch) == kept


@pytest.mark.parametrize(("every", "stop", "new"), [(4, 4, 3), (4, 3, 2), (2, 3, 4), (2, 8, 4)])
def test_a_phase_of_another_length_is_refused_within_one(
    every: int, stop: int, new: int, tmp_path: Path
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(every=every), total_env_steps=256)
    run = train(config, make_env=corridor, callbacks=stop_at(stop))
    run.files.write_config(config.with_updates({"aux.every": new}))
    card, options = run.files.card, {"accept_config_changes": True, "total_env_steps": 512}
    with pytest.raises(ValueError, match=rf"rollouts is .; expected {stop % new} in iteration"):
        resume(run.directory, make_env=corridor, **options)
    assert run.files.card == card, "the run is as finished as before"


def copied_before(method: Callable[..., Any], copy: Callable[[Run], None]) -> Callable[..., Any]:
    def copy_and_call(run: Run, *args: Any, **options: Any) -> Any:
        copy(run)
        return method(run, *args, **options)

    return copy_and_call


def test_a_longer_run_that_does_not_start_changes_no_length(tmp_path: Path) -> None:
    run = train(tiny(tmp_path).with_updates({"budget_rounding": "down"}), make_env=corridor)
    before = run.files.config

    def fail() -> Any:
        raise OSError("no licence")

    steps: Any
    for wrong, steps in ((fail, 256), (KEYS_AND_NUMBERS, 256), (corridor, "256"), (corridor, 96)):
        with pytest.raises((EnvError, ValueError)):
            resume(run.directory, total_env_steps=steps, make_env=wrong)
        assert run.files.config == before
    assert resume(run.directory, total_env_steps=140, make_env=corridor).env_steps == 128
    assert run.files.config == before
    assert resume(run.directory, total_env_steps=256, make_env=corridor).env_steps == 256


@pytest.mark.long
@pytest.mark.parametrize("changes", [
    {"ppo.num_steps": 16}, {"ppo.num_steps": 4}, {"ppo.num_steps": 16, "budget_rounding": "down"},
])  # fmt: skip
@pytest.mark.parametrize("aux", [None, tiny_aux()])
def test_schedules_and_phases_count_steps_after_another_size_of_a_batch(
    aux: AuxConfig | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Iterations are no measure then; the auxiliary phase is left out at the end alone."""
    linear = {"ppo.schedule": "linear", "ppo.learning_rate": 8e-4}
    config = tiny(tmp_path, aux=aux, total_env_steps=256).with_updates(linear)
    run = train(config, make_env=corridor, callbacks=stop_at(4))
    run.files.write_config(config.with_updates(changes))

    finished = list[int]()

    def check_end(run: Run, _: Any) -> None:
        finished.append(run.iteration)
        assert len(finished) <= 8

    options = {"accept_config_changes": True, "callbacks": check_end}
    again = resume(run.directory, make_env=corridor, **options)
    rows, size = again.files.metrics(), again.config.batch_size
    assert again.env_steps == 256 and finished == [*range(5, 5 + 128 // size)]
    assert again.iteration == len(rows)
    rates = [8e-4 * (1 - (row["env_steps"] - size) / 256) for row in rows[4:]]
    assert [row["charts/learning_rate"] for row in rows[4:]] == pytest.approx(rates)
    phases = [row["iteration"] for row in rows if "time/auxiliary" in row]
    assert phases == ([] if aux is None else list(range(2, len(rows), 2)))


def test_a_run_stops_at_a_return_of_100_episodes_and_continues_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = {"stop_at_return": 0.0, "log.console": "plain"}
    config = tiny(tmp_path, total_env_steps=1600).with_updates(stop)
    run = train(config, make_env=corridor)
    episodes = np.cumsum([row["charts/num_episodes"] for row in run.files.metrics()])
    assert episodes[-2] < 100 <= episodes[-1] and run.env_steps < 1600
    assert capsys.readouterr().out.count("stop_at_return 0 is reached") == 1
    run.files.write_config(config.with_updates({"stop_at_return": 1.1}))
    assert resume(run.directory, make_env=corridor).env_steps == 1600


def test_own_metrics_are_in_the_row_of_their_iteration_after_a_resume_too(tmp_path: Path) -> None:
    def log(run: Run, record: dict[str, float]) -> Any:
        run.log({"twice": torch.tensor(2.0 * run.iteration)})
        record["thrice"] = 3 * run.iteration
        return stop_at(2)(run, record)

    config = tiny(tmp_path, total_env_steps=128).with_updates({"log.tensorboard": True})
    run = train(config, make_env=corridor, callbacks=log)
    resume(run.directory, make_env=corridor, callbacks=lambda run, _: run.log({"own/x": 1}))
    rows = run.files.metrics()
    assert [row.get("own/twice") for row in rows] == [2.0, 4.0, None, None]
    assert [row.get("own/thrice") for row in rows] == [3.0, 6.0, None, None]
    assert [row.get("own/x") for row in rows] == [None, None, 1.0, 1.0]
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4 and '"own/thrice": 3.0' in lines[0]
    events = EventAccumulator(str(run.directory))
    events.Reload()
    assert [event.value for event in events.Scalars("own/twice")] == [2.0, 4.0]


def test_a_checkpoint_that_a_callback_saves_has_the_row_of_its_iteration(tmp_path: Path) -> None:
    def save_and_fail(run: Run, record: dict[str, float]) -> None:
        run.save()
        if run.iteration == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(tiny(tmp_path, total_env_steps=96), make_env=corridor, callbacks=save_and_fail)
    (path,) = tmp_path.glob("*/config.json")
    run = resume(path.parent, make_env=corridor)
    assert [row["iteration"] for row in run.files.metrics()] == [1, 2, 3]


@pytest.mark.parametrize(("values", "message"), [
    ({"losses/entropy": 1.0}, "losses/entropy"),
    ({"own/text": "high"}, "own/text is 'high'"), ({"own/many": [1, 2]}, "own/many"),
    ({"own/text": "1"}, "own/text is '1'; expected a number"), ({"own/text": b"1"}, "own/text"),
    ({"own/large": 10**400}, "own/large is 1000"), ({5: 3}, "metric is 5; expected its name"),
    ({"": 3}, "metric is ''; expected its name"),
    ([("own/x", 1.0)], r"metrics are \[.*; expected numbers by name"), (None, "metrics are None"),
])  # fmt: skip
def test_an_own_metric_that_cannot_be_logged_is_named(
    values: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        train(tiny(tmp_path), make_env=corridor, callbacks=lambda run, _: run.log(values))


def test_results_speak_of_100_episodes_where_there_were_as_many(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    (run.directory / "metrics.jsonl").unlink()
    assert run.format_results()["environment steps"] == "128"
    for given, expected in (
        ([(30, 9.0), (60, 5.0)], ("return, last 90 episodes", "5.00")),
        ([(60, 9.0), (50, 7.0), (50, 6.0)], ("return, last 100 episodes", "6.00")),
    ):
        names = ("env_steps", "iteration", "charts/num_episodes", "charts/episodic_return_100")
        rows = [dict(zip(names, (32, i, *row), strict=True)) for i, row in enumerate(given)]
        (run.directory / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert [x for x in run.format_results().items() if "episodes" in x[0]] == [expected]


@pytest.mark.parametrize("saved", [CheckpointConfig(), EVERY_ITERATION], ids=["end", "iteration"])
def test_a_finished_run_resumes_nothing(
    saved: CheckpointConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, not even a file of TensorBoard's; and it says so."""
    on = {"log.tensorboard": True, "log.epochs": True, "log.console": "plain", "checkpoint": saved}
    on_end: Any = lambda self, run: run.log({"own/test": 1.0})  # noqa: E731
    callbacks = type("Mine", (Callbacks,), {"on_end": on_end})()
    run = train(tiny(tmp_path).with_updates(on), make_env=corridor, callbacks=callbacks)
    before = contents(run.directory)
    assert run.files.last_rows(1)[0]["own/test"] == 1
    capsys.readouterr()
    assert_same_state(run, resume(run.directory, make_env=corridor))
    assert contents(run.directory) == before
    said = capsys.readouterr().out
    assert f"{run.directory} is already finished after 128 steps" in said and "resumed" not in said


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return every file in a folder, except the lock, which names its last process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_what_a_run_lacks_at_its_end_is_written_by_a_resume(tmp_path: Path) -> None:
    """The run was killed between its last checkpoint and its weights, or that one is bad."""
    run = train(tiny(tmp_path, checkpoint=EVERY_ITERATION), make_env=corridor)
    weights, card = run.files.load_weights(), run.files.card
    run.files.write_card(card | {"env_steps": 0})
    (run.directory / "agent.safetensors").unlink()
    for times in (1, 2):
        resume(run.directory, make_env=corridor)
        assert_same(run.files.load_weights(), weights)
        assert run.files.card["env_steps"] == 128 and len(run.files.card["resumed"]) == times
        (run.files.checkpoints[-1] / "state.json").write_text("torn")


def test_checkpoints_come_at_their_cadence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, saved = Clock(), list[int]()

    def save(run: Run, _: str = "") -> None:
        saved.append(run.iteration)
        run._last_save = clock.now

    def tick() -> float:
        clock.wait(1e-6)
        return clock.now

    monkeypatch.setattr(time, "perf_counter", tick)
    monkeypatch.setattr(Run, "_write_backup_as_checkpoint", save)
    by_time = CheckpointConfig(every_minutes=2.0)
    run = open_run(tiny(tmp_path, checkpoint=by_time, total_env_steps=192))
    run.callbacks.on_iteration = lambda *_: clock.wait(60)
    learn(run)
    assert saved == [0, 2, 4, 6]
    saved.clear()
    by_count = CheckpointConfig(every_minutes=None, every_iterations=4)
    learn(open_run(tiny(tmp_path, checkpoint=by_count, total_env_steps=320)))
    assert saved == [0, 4, 8]


class Unloadable(Corridor):
    """Environment whose reset fails."""

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        raise OSError("no map")


@pytest.mark.parametrize(("changes", "message", "make_env"), [
    ({"compute.device": "cuda:7"}, "compute.device is 'cuda:7'", Corridor),
    ({"compute.device": "toaster"}, "compute.device is 'toaster'", Corridor),
    ({"model.encoder": "impala"}, "model.encoder is impala, and observation_space", Corridor),
    ({"output_dir": "/proc/none"}, "can be made", Corridor),
    ({}, "no map", Unloadable),
])  # fmt: skip
def test_what_cannot_work_here_is_refused_before_a_directory_is_made(
    tmp_path: Path, changes: dict[str, Any], message: str, make_env: type[Corridor]
) -> None:
    with pytest.raises((ValueError, EnvError), match=message):
        start_run(tiny(tmp_path).with_updates(changes), make_env=make_env)
    assert not list(tmp_path.iterdir())


def test_a_users_encoder_is_initialized_from_the_seed_and_leaves_the_global_generator_alone(
    tmp_path: Path,
) -> None:
    def make_encoder(_: gym.Space[Any]) -> nn.Module:
        encoder: Any = nn.Sequential(nn.Linear(2, 5), nn.ReLU())
        encoder.num_features = 5
        return encoder

    state, own = torch.random.get_rng_state(), {"make_encoder": make_encoder}
    first, second = (train(tiny(tmp_path), make_env=corridor, **own) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same_state(first, second)


def test_every_metric_is_reported_by_some_run(tmp_path: Path) -> None:
    apart = {"ppo.policy_epochs": 1, "ppo.value_epochs": 2, "ppo.value_learning_rate": 1e-3,
             "ppo.clip_schedule": "linear", "ppo.entropy_schedule": "linear"}  # fmt: skip
    steered = {"ppo.kl_penalty": 1.0, "ppo.kl_penalty_target": 0.01}
    tested = {
        "evaluation.every_iterations": 1, "evaluation.episodes": 1, "evaluation.levels": "both",
        "env.max_restarts": 1, "ppo.collect_by": "episodes", "ppo.num_steps": 20,
        "obs_norm": OBS_NORM,
    }  # fmt: skip
    config, more = tiny(tmp_path, aux=tiny_aux()), ({}, apart, steered, tested)
    runs = [train(config.with_updates(changes), make_env=corridor) for changes in more]
    runs.append(train(config, make_env=lambda: Levers(discrete=False)))
    reported = {name for run in runs for row in run.files.metrics() for name in row}
    procgen = {name for name in METRICS if name.startswith("procgen/")}  # tests/test_procgen.py
    assert reported - {"env_steps", "iteration", "phase", "wall_time"} == set(METRICS) - procgen


@pytest.mark.parametrize("damaged", ["tensors.safetensors", "state.json"])
def test_a_run_that_fell_back_saves_its_own_rollouts_not_the_rejected_ones(
    tmp_path: Path, damaged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning names the rejected checkpoint."""
    config = tiny(tmp_path, aux=tiny_aux(every=4), total_env_steps=512, checkpoint=EVERY_ITERATION)
    config = config.with_updates({"log.console": "plain"})
    with start_run(config, make_env=corridor) as run, pytest.raises(Stopped):
        run.callbacks.on_iteration = stop_after(3)
        learn(run)
    directory = run.directory  # as a crash right after the third iteration leaves it
    (RunDirectory(directory).checkpoints[-1] / damaged).write_text("torn")
    with build.restore_run(directory, make_env=corridor) as run:
        assert "step-000000000096 cannot be used" in capsys.readouterr().out
        with pytest.raises(Stopped):
            run.callbacks.on_iteration = stop_after(3)
            learn(run)
        expected = {name: x.clone() for name, x in run.buffer.rollout(2).tensors().items()}
    with build.restore_run(directory, make_env=corridor) as again:
        assert again.iteration == 3
        assert_same(expected, again.buffer.rollout(2).tensors())


class Steady(gym.Env[np.ndarray, np.int64]):
    """Rewards of −8, in episodes that are cut after 25 steps.

    Observations and actions do not matter.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**given)
        self.at = 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += 1
        return self.look(), -8.0, False, self.at == 25, {}


@pytest.mark.parametrize("first", [False, True])
def test_observations_enter_their_statistics_once_each_the_first_ones_before_they_are_learned_from(
    tmp_path: Path, first: bool
) -> None:
    norm = ObsNormConfig(statistics="moments", from_first_rollout=first)
    with open_run(tiny(tmp_path, obs_norm=norm, value_norm=VALUE_NORM)) as run:
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None
        rollout, seen = run.buffer.next_rollout(), torch.empty(0, 8, 2)
        for number in (0, 32):
            run.collect(rollout)
            assert normalizer.moments.count == (32 if first else number)
            seen = torch.cat([seen, rollout.obs])
            policy_phase(run.learner, rollout)
            assert normalizer.moments.count == number + 32
            torch.testing.assert_close(normalizer.moments.mean, seen.double().mean((0, 1)))


class Parts(Steady):
    """Tree of observations: numbers, a member of a finite set, and numbers far from zero."""

    observation_space = gym.spaces.Dict(  # type: ignore[assignment]
        legs=gym.spaces.Box(-1e3, 1e3, (2,), np.float32), mode=gym.spaces.Discrete(3),
        speed=gym.spaces.Box(-1e3, 1e3, (1,), np.float32),
    )  # fmt: skip

    def look(self) -> Any:
        legs = 100 + 5 * self.np_random.normal(size=2).astype(np.float32)
        return {"legs": legs, "mode": int(self.np_random.integers(3)), "speed": legs[:1] - 300}


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_numbers_of_a_tree_begin_their_statistics_too(tmp_path: Path, memory: str) -> None:
    config = tiny(tmp_path, obs_norm=OBS_NORM)
    config = config.with_updates({"model.memory": memory, "ppo.num_steps": 40})
    with start_run(config, make_env=Parts) as run:
        rollout = run.buffer.next_rollout()
        run.collect(rollout)
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None and normalizer.moments.count == 160
        assert normalizer.moments.mean.tolist() == pytest.approx([100, 100, -200], abs=2)
        with torch.no_grad():
            values = run.agent.value(rollout.obs, rollout.first, rollout.state)
        torch.testing.assert_close(rollout.value, values)
        goes_on = ~rollout.truncated[:, :-1]
        assert not goes_on.all()
        assert torch.equal(rollout.next_value[:, :-1][goes_on], rollout.value[:, 1:][goes_on])


@pytest.mark.long
@pytest.mark.parametrize("changes", [
    {}, {"value_norm.statistics": "ema", "ppo.value_clip": 0.2, "model.value_path": "shared"},
    {"ppo.recompute_advantages": True, "aux": tiny_aux()},
])  # fmt: skip
def test_normalized_values_fall_to_the_true_one_and_do_not_run_away(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """V = −8 / (1 − 0.99) = −800.

    Where the statistics move without the heads, values reach −1,200 here, and go on.
    """
    knobs: dict[str, Any] = {
        "total_env_steps": 36 * 128, "reward_norm.per": "none", "value_norm": VALUE_NORM,
        "ppo.num_steps": 32, "ppo.gamma": 0.99, "ppo.policy_epochs": 4, "ppo.value_epochs": 4,
        "ppo.num_minibatches": 4, "ppo.minibatch_by": "transitions", "ppo.learning_rate": 0.02,
        "ppo.schedule": "linear", "model.value_head_scale": 1.0,
    }  # fmt: skip
    config = tiny(tmp_path).with_updates(knobs | changes)
    means: list[float] = []

    def note(run: Run, record: dict[str, float]) -> None:
        rollout = run.buffer.rollout((run.iteration - 1) % run.buffer.num_rollouts)
        means.append(rollout.value.mean().item())

    train(config, make_env=Steady, callbacks=note)
    assert means[0] > -100
    # Downwards in every iteration, up to 0.5 %.
    assert max(after - before for before, after in itertools.pairwise(means)) < 4, means
    assert -804 < means[-1] < -750, means


def test_constant_targets_are_met_at_once(tmp_path: Path) -> None:
    """γ = 0: all targets are −8 and have no deviation, so that nothing could be learned in units of
    it.
    """
    knobs = {"total_env_steps": 64, "reward_norm.per": "none", "ppo.gamma": 0.0}
    run = train(tiny(tmp_path, value_norm=VALUE_NORM).with_updates(knobs), make_env=Steady)
    value = run.buffer.rollouts.value
    torch.testing.assert_close(value, torch.full((1, 4, 8), -8.0), rtol=0, atol=0.01)


@pytest.mark.parametrize("second", [False, True])
def test_value_statistics_move_before_the_epochs_and_values_only_at_the_very_first(
    tmp_path: Path, second: bool
) -> None:
    config = tiny(tmp_path, reward_norm=RewardNormConfig(per="none"), value_norm=VALUE_NORM)
    with open_run(config) as run:
        normalizer = run.agent.value_normalizer
        assert normalizer is not None
        for _ in range(1 + second):
            run.buffer.clear()
            rollout = run.collect(run.buffer.next_rollout())
            values = [rollout.value.clone(), rollout.next_value.clone()]
            expected, _ = compute_targets(rollout, rollout.reward, config.ppo)
            target = rollout.value_target.clone()
            compute = phases._compute_targets_and_update_value_norm
            samples, _ = compute(run.learner, rollout, rollout.reward)
            run.learner.iteration += 1
        assert normalizer.moments.count == 32 * (1 + second)
        if second:  # the heads were rescaled: nothing that was said of the rollout has changed
            assert torch.equal(rollout.value, values[0])
            assert torch.equal(rollout.value_target, target)
            assert torch.equal(samples.advantage, expected.advantage)
        else:  # what was said is read in the first targets' units, and the targets follow from that
            mean, std = target.mean(), target.std(correction=0)
            torch.testing.assert_close(rollout.value, mean + std * values[0])
            torch.testing.assert_close(rollout.next_value, mean + std * values[1])
            again, _ = compute_targets(rollout, rollout.reward, config.ppo)
            assert torch.equal(samples.advantage, again.advantage)
            assert not torch.equal(target, rollout.value_target)
        with torch.no_grad():
            value = run.agent.value(rollout.obs, rollout.first, rollout.state)
        torch.testing.assert_close(value, rollout.value, rtol=1e-5, atol=1e-6)


def poison(network: nn.Module) -> None:
    """Set the weights to those after a step of infinite size."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)


KEYS, NUMBERS = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)
SPACES: dict[str, gym.Space[Any]] = {
    "discrete": KEYS,
    "multi-discrete": gym.spaces.MultiDiscrete([3, 2]),
    "multi-binary": gym.spaces.MultiBinary(4),
    "box": NUMBERS,
    "mixed": gym.spaces.Tuple((KEYS, NUMBERS)),
}


@pytest.mark.parametrize("network", ["encoder", "shared encoder", "value_encoder"])
@pytest.mark.parametrize("space", [*SPACES, "masked"])
def test_a_network_that_has_diverged_ends_the_run_with_what_to_do(
    tmp_path: Path, space: str, network: str
) -> None:
    def diverge(run: Run, record: dict[str, float]) -> None:
        assert run.iteration == 1, "an iteration with weights that are no numbers passed unseen"
        poison(getattr(run.agent, network.split()[-1]))

    path = "shared" if network == "shared encoder" else "separate"
    config = tiny(tmp_path).with_updates({"model.value_path": path})
    mask = [False, True, True] if space == "masked" else None
    make_env = partial(Spaces, Corridor().observation_space, SPACES.get(space, KEYS), mask)
    which = {"encoder": "policy", "value_encoder": "value function"}
    named = which.get(network, "policy( and the value function)?")
    message = rf"not every number of the {named} is finite.*learning_rate.*max_grad_norm"
    with pytest.raises(ValueError, match=f"training has diverged: {message}"):
        train(config, make_env=make_env, callbacks=diverge)


NEEDS_COMPILER = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=[NEEDS_COMPILER, pytest.mark.long])]
)
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_weights_are_spoilt(
    tmp_path: Path, compiled: bool
) -> None:
    """The last iteration is checked too, after which the policy is not used again."""
    config = tiny(tmp_path, checkpoint=EVERY_ITERATION, total_env_steps=64)
    config = config.with_updates({"compute.compile": "on" if compiled else "off"})
    weights: list[Tensor] = []
    with start_run(config, make_env=Corridor) as run:

        def rewards(rollout: Rollout) -> tuple[Tensor, dict[str, float]]:
            reward, record = plain(rollout)
            if run.iteration == 2:
                reward[0, 0] = torch.inf
            weights[:] = [parameter.detach().clone() for parameter in run.agent.parameters()]
            return reward, record

        plain = run.learner.normalize_reward
        run.learner.normalize_reward = rewards  # type: ignore[method-assign]
        with pytest.raises(ValueError, match=r"diverged: not every number of .*gradients/policy"):
            learn(run)
        assert run.iteration == 2 and all(map(torch.equal, run.agent.parameters(), weights))
    assert [path.name[-2:] for path in run.files.checkpoints] == ["00", "32"]


def test_weights_that_are_not_finite_do_not_take_the_place_of_good_ones(tmp_path: Path) -> None:
    with open_run(tiny(tmp_path)) as run:
        run.save()
        good = run.files.load_weights()
        poison(run.agent.policy_head)
        with pytest.raises(ValueError, match="not every number of the agent's weights is finite"):
            run.save()
    assert_same(run.files.load_weights(), good)


def test_an_action_that_is_refused_for_another_reason_is_not_called_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tiny(tmp_path)) as run:
        monkeypatch.setattr(run.agent.policy_head, "env_action", lambda action: action + 7)
        with pytest.raises(ValueError, match=r"; expected an integer from 0 to 1"):
            learn(run)


def test_a_mask_of_ones_own_holds_at_the_start_and_a_resume_asks_for_it(tmp_path: Path) -> None:
    config = tiny(tmp_path, checkpoint=EVERY_ITERATION)
    config = config.with_updates({"env.heuristic_mask_steps": 64})
    seen, actions = list[Any](), list[Tensor]()

    def forward_only(obs: np.ndarray, own: np.ndarray | None) -> np.ndarray:
        seen.append(own)
        return np.tile([False, True], (len(obs), 1))

    def note(run: Run, record: dict[str, float]) -> None:
        actions.append(run.buffer.rollouts.action[0].clone())

    run = train(config, make_env=corridor, mask_actions=forward_only, callbacks=note)
    assert all((batch == 1).all() for batch in actions[:2])
    assert any((batch == 0).any() for batch in actions[2:]) and seen == [None] * 16
    for path in run.files.checkpoints[2:]:  # two are of before the first iteration, and after it
        shutil.rmtree(path)
    with pytest.raises(ValueError, match="mask_actions="):
        resume(run.directory, make_env=corridor)
    resume(run.directory, make_env=corridor, mask_actions=forward_only)
    assert len(seen) == 16 + 8


def test_rewards_are_clipped_for_learning_and_reported_as_they_are(tmp_path: Path) -> None:
    config = tiny(tmp_path, reward_norm=RewardNormConfig(per="none"))
    with open_run(replace(config, ppo=replace(config.ppo, reward_clip=0.25))) as run:
        rollout = run.buffer.next_rollout()
        run.collect(rollout)
        rollout.reward.copy_(torch.linspace(-1, 1, 32).reshape(4, 8))
        kept = rollout.reward.clone()
        assert run.learner.normalize_reward(rollout)[0].tolist() == kept.clamp(-0.25, 0.25).tolist()
        assert torch.equal(rollout.reward, kept)
        run.learner.reward_normalizer = RewardNormalizer(4, gamma=0.5, clip=10.0)
        expected = RewardNormalizer(4, gamma=0.5, clip=10.0)(kept.clamp(-0.25, 0.25), rollout.first)
        assert torch.equal(run.learner.normalize_reward(rollout)[0], expected)


@pytest.mark.parametrize("function", [train, resume, evaluate])
def test_a_misspelled_object_is_named_before_anything_is_made(
    tmp_path: Path, function: Callable[..., Any]
) -> None:
    folder = train(tiny(tmp_path), make_env=corridor).directory
    first = tiny(tmp_path / "more") if function is train else folder
    with pytest.raises(TypeError, match=r"make_envs is given; expected make_env, .*'make_env'"):
        function(first, make_envs=corridor)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("is_schedule_given", [False, True])
def test_a_stopped_run_names_the_call_that_resumes_it(
    tmp_path: Path, is_schedule_given: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(run: Run, record: object) -> None:
        raise KeyboardInterrupt

    config = tiny(tmp_path / "my runs").with_updates({"log.console": "plain"})
    with pytest.raises(KeyboardInterrupt):
        others: Any = {"schedule": lambda _: {}} if is_schedule_given else {}
        train(config, make_env=corridor, callbacks=interrupt, **others)
    (folder,) = (tmp_path / "my runs").iterdir()
    (call,) = re.findall(r"`(.*?)` continues", capsys.readouterr().out)
    if is_schedule_given:
        assert call == f"phasicrl.resume({str(folder)!r}, make_env=…, schedule=…)"
    else:
        assert call == f"phasicrl resume '{folder}' --make-env tests.corridor:corridor"


def test_the_clock_of_a_resumed_run_starts_where_it_was(tmp_path: Path) -> None:
    def stop_late(run: Run, _: dict[str, float]) -> Any:
        run._seconds_before += 1000
        return "stop"

    run = train(tiny(tmp_path), make_env=corridor, callbacks=stop_late)
    assert resume(run.directory, make_env=corridor).seconds > 1000


class Curious(Corridor):
    """Environment that computes gradients of a network in its steps."""

    def step(self, action: Any) -> Any:
        weight = torch.ones(2, requires_grad=True)
        (torch.from_numpy(self._obs()) @ weight).backward()
        assert weight.grad is not None
        return super().step(action)


def test_environments_may_train_networks_of_their_own(tmp_path: Path) -> None:
    assert train(tiny(tmp_path), make_env=Curious).env_steps == 128
