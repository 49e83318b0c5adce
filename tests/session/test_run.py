"""Runs: directories, what is saved and comes back, refusals before anything starts."""

from __future__ import annotations

import itertools
import json
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
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from phasicrl import phases
from phasicrl.algorithm import OnIteration, learn, resume, train
from phasicrl.config import (
    AuxConfig,
    CheckpointConfig,
    Config,
    ModelConfig,
    ObsNormConfig,
    RewardNormConfig,
    ValueNormConfig,
    ValuePath,
)
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.execution.compiled import has_compiler
from phasicrl.normalize import RewardNormalizer
from phasicrl.optimize import step_
from phasicrl.phases import compute_targets, policy_phase
from phasicrl.rollout import Rollout
from phasicrl.runs.checkpoint import checkpoints
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS
from phasicrl.seeding import derive_seed
from phasicrl.session import build
from phasicrl.session.build import start_run
from phasicrl.session.run import Run
from tests.golden import BOTH, Echo, Image
from tests.helpers import OBS_NORM, VALUE_NORM, Corridor, Levers, corridor, open_run, tiny, tiny_aux

EVERY_ITERATION = CheckpointConfig(every_minutes=0, keep=100)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a state by its path."""
    if isinstance(tree, dict):
        return {
            k: v for key, value in tree.items() for k, v in flat(value, f"{path}/{key}").items()
        }
    if isinstance(tree, list | tuple):
        return {
            k: v for key, value in enumerate(tree) for k, v in flat(value, f"{path}/{key}").items()
        }
    return {path: tree}


def assert_same_state(left: Run, right: Run) -> None:
    ours, theirs = flat(left.state_dict()), flat(right.state_dict())
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, theirs[path]), path
        elif not path.startswith(("/seconds", "/log/")):
            assert value == theirs[path], path


def test_a_run_directory_holds_what_it_should(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    run = train(config, make_env=corridor)
    assert run.directory.parent == tmp_path
    assert Config.from_json((run.directory / "config.json").read_text()) == config
    card = json.loads((run.directory / "card.json").read_text())
    assert (
        card["seed"] == 3
        and card["env_steps"] == 128
        and card["versions"]["torch"] == torch.__version__
    )
    assert [row["env_steps"] for row in RunDirectory(run.directory).metrics()] == [32, 64, 96, 128]
    assert (run.directory / "agent.safetensors").is_file()
    assert [path.name for path in (run.directory / "checkpoints").iterdir()] == [
        "step-000000000128"
    ]


def test_two_runs_started_in_one_second_have_their_own_directories(tmp_path: Path) -> None:
    assert open_run(tiny(tmp_path)).directory != open_run(tiny(tmp_path)).directory


def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    first, second, other = (
        train(c, make_env=corridor) for c in (config, config, replace(config, seed=4))
    )
    assert_same_state(first, second)
    assert not torch.equal(
        first.agent.policy_head.linear.weight, other.agent.policy_head.linear.weight
    )


def test_saving_more_often_or_logging_elsewhere_changes_nothing(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    busy = replace(
        config,
        checkpoint=EVERY_ITERATION,
        log=replace(config.log, tensorboard=True, console="plain"),
    )
    assert_same_state(train(config, make_env=corridor), train(busy, make_env=corridor))


class Stopped(Exception):
    """The power goes."""


def stop_after(iterations: int) -> Callable[[Run, dict[str, float]], None]:
    """What ends a run as a crash does, right after an iteration."""

    def stop(run: Run, record: dict[str, float]) -> None:
        if run.iteration == iterations:
            raise Stopped

    return stop


def stopped_after(iterations: int, config: Config) -> Path:
    """A run directory as a crash right after the end of an iteration leaves it."""
    with start_run(config, make_env=corridor) as run, pytest.raises(Stopped):
        learn(run, on_iteration=stop_after(iterations))
    return run.directory


@pytest.mark.parametrize("iterations", [1, 2, 3, 5])
def test_a_checkpoint_restores_the_whole_state_in_the_middle_of_a_phase_too(
    tmp_path: Path, iterations: int
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(every=3), total_env_steps=224, checkpoint=EVERY_ITERATION)
    directory = stopped_after(iterations, config)
    with (
        start_run(config, make_env=corridor) as old,
        build.resume_run(directory, make_env=corridor) as new,
    ):
        with pytest.raises(Stopped):
            learn(old, on_iteration=stop_after(iterations))
        assert_same_state(old, new)
        assert new.buffer.num_filled == iterations % 3
        for slot in range(new.buffer.num_filled):
            ours, theirs = old.buffer.rollout(slot).tensors(), new.buffer.rollout(slot).tensors()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("aux", [None, tiny_aux(every=3)])
def test_a_run_that_is_told_to_stop_is_saved_finished_and_can_be_resumed(
    tmp_path: Path, aux: AuxConfig | None
) -> None:
    config = tiny(tmp_path, aux=aux, total_env_steps=224)  # a checkpoint at the end only

    def until(iteration: int) -> OnIteration:
        return lambda run, record: "stop" if run.iteration == iteration else None

    run = train(config, make_env=corridor, on_iteration=until(2))
    files = RunDirectory(run.directory)
    assert (run.iteration, run.env_steps) == (2, 64)
    assert [path.name for path in files.checkpoints] == ["step-000000000064"]
    assert files.card["env_steps"] == 64
    again = resume(run.directory, make_env=corridor, on_iteration=until(4))
    assert again.env_steps == 128 and files.card["env_steps"] == 128
    assert resume(run.directory, make_env=corridor).env_steps == 224
    assert [row["env_steps"] for row in files.metrics()] == [32 * (1 + n) for n in range(7)]


def test_actions_of_a_run_from_another_kind_of_device_are_drawn_from_a_seed_of_their_own(
    tmp_path: Path,
) -> None:
    """A GPU's generator has a state of another size, which this one cannot take."""
    with start_run(tiny(tmp_path), make_env=corridor) as run:
        before = run.collector.generator.get_state()
        state: dict[str, Any] = run.state_dict() | {"env_steps": 64}
        state["action_generator"] = torch.zeros(16, dtype=torch.uint8)
        run.load_state_dict(state, {}, same_episodes=False)
        assert run.collector.generator.initial_seed() == derive_seed(3, "action", 64)
        assert not torch.equal(run.collector.generator.get_state(), before)


def test_a_resumed_run_finishes_its_budget_without_repeating_rows(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux(every=3), total_env_steps=224, checkpoint=EVERY_ITERATION)
    run = resume(stopped_after(4, config), make_env=corridor)
    assert run.env_steps == 224 and run.iteration == 7
    rows = RunDirectory(run.directory).metrics()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["iteration"] for row in rows if "losses/aux/kl_loss" in row] == [3, 6]
    assert rows[-1]["wall_time"] > rows[3]["wall_time"] > 0


KEYS_AND_NUMBERS = partial(Echo, BOTH, masked=True)
PICTURES = {
    "model.encoder": "impala",
    "model.channels": (4, 8),
    "model.blocks": 1,
    "model.value_path": "detached",
    "model.activation": "relu",
}
UNBROKEN: dict[str, tuple[dict[str, Any], Callable[[], gym.Env[Any, Any]]]] = {
    "plain": ({}, KEYS_AND_NUMBERS),
    "lstm": ({"model.memory": "lstm", "model.memory_size": 6}, KEYS_AND_NUMBERS),
    "gru": (
        {"model.memory": "gru", "model.memory_size": 6, "model.value_path": "shared"},
        KEYS_AND_NUMBERS,
    ),
    "obs-norm": ({"obs_norm": OBS_NORM}, KEYS_AND_NUMBERS),
    "obs-norm-ema": ({"obs_norm": ObsNormConfig(statistics="ema", decay=0.6)}, KEYS_AND_NUMBERS),
    "reward-norm-steps": ({"reward_norm": RewardNormConfig(per="step")}, KEYS_AND_NUMBERS),
    "value-norm": ({"value_norm": VALUE_NORM}, KEYS_AND_NUMBERS),
    "value-norm-ema": (
        {"value_norm": ValueNormConfig(statistics="ema", decay=0.6)},
        KEYS_AND_NUMBERS,
    ),
    "linear": ({"ppo.schedule": "linear", "ppo.adam_eps_hat": True}, KEYS_AND_NUMBERS),
    "adaptive": (
        {"ppo.schedule": "adaptive_kl", "ppo.kl_penalty": 1.0, "ppo.kl_penalty_target": 1e-3},
        KEYS_AND_NUMBERS,
    ),
    "epochs-apart": ({"ppo.policy_epochs": 2, "ppo.value_epochs": 1}, KEYS_AND_NUMBERS),
    "averaged": ({"ppo.proximal_decay": 0.8, "ppo.advantage_decay": 0.5}, KEYS_AND_NUMBERS),
    "images-bf16": (
        {
            **PICTURES,
            "compute.policy_precision": "bf16",
            "compute.aux_precision": "bf16",
            "compute.num_threads": 1,
        },
        Image,
    ),
}


AUXES = {
    "ppo": None,
    "ppg": tiny_aux(every=3),
    "ppg-one-adam": tiny_aux(every=3, optimizer="shared"),
}
BOTH_ALGORITHMS = [
    (name, aux, 4)
    for name in UNBROKEN
    for aux in ("ppo", "ppg")
    if (name, aux) != ("images-bf16", "ppo")
]
OTHER_PLACES = [
    (name, aux, stop)
    for name in ("plain", "lstm")
    for aux, stop in (("ppg-one-adam", 4), ("ppg", 2), ("ppg", 6))
]


@pytest.mark.parametrize(("name", "aux_name", "stop"), BOTH_ALGORITHMS + OTHER_PLACES)
def test_a_resumed_run_is_the_unbroken_one(
    tmp_path: Path, name: str, aux_name: str, stop: int
) -> None:
    """To the bit, in weights, moments, statistics, generators, rollouts and metrics.

    With a phase of three iterations: stopped one and two iterations into a phase, and between two
    of them. The run then goes on.
    """
    aux = AUXES[aux_name]
    changes, make_env = UNBROKEN[name]
    config = tiny(tmp_path, aux=aux, total_env_steps=256, checkpoint=EVERY_ITERATION).with_updates(
        changes
    )
    with start_run(config, make_env=make_env) as unbroken:
        with pytest.raises(Stopped):
            learn(unbroken, on_iteration=stop_after(stop))
        directory = Path(shutil.copytree(unbroken.directory, tmp_path / "copy"))
        with build.resume_run(directory, make_env=make_env) as resumed:
            assert resumed.iteration == stop and resumed.buffer.num_filled == (
                0 if aux is None else stop % 3
            )
            for run in (unbroken, resumed):
                learn(run)
            assert_same_state(unbroken, resumed)
            for slot in range(resumed.buffer.num_filled):
                assert_same_state_tensors(
                    unbroken.buffer.rollout(slot).tensors(), resumed.buffer.rollout(slot).tensors()
                )
    ours, theirs = (
        [untimed(row) for row in RunDirectory(run.directory).metrics()]
        for run in (unbroken, resumed)
    )
    assert len(ours) == 8 and ours == theirs


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in row.items()
        if not name.startswith("time/") and name not in ("charts/SPS", "wall_time")
    }


def test_a_summary_speaks_of_100_episodes_where_there_were_as_many(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)

    def returns(*counts_and_means: tuple[int, float]) -> dict[str, str]:
        rows = [
            {"env_steps": 32, "charts/num_episodes": n, "charts/episodic_return_100": mean}
            for n, mean in counts_and_means
        ]
        run.files.path.joinpath("metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return {name: value for name, value in run.summary().items() if "episodes" in name}

    assert returns((30, 9.0), (60, 5.0)) == {"return, last 90 episodes": "5.00"}
    assert returns((60, 9.0), (50, 7.0), (50, 6.0)) == {"return, last 100 episodes": "6.00"}


def test_a_finished_run_resumes_to_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written, not even a file of TensorBoard's; and it says so."""
    on = {"log.tensorboard": True, "log.epochs": True, "log.console": "plain"}
    run = train(tiny(tmp_path).with_updates(on), make_env=corridor)
    before = contents(run.directory)
    capsys.readouterr()
    again = resume(run.directory, make_env=corridor)
    assert_same_state(run, again)
    assert contents(run.directory) == before
    said = capsys.readouterr().out
    assert f"{run.directory} is finished already, after 128 steps" in said and "resumed" not in said


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Every file in a folder, but for the lock, which names the process that had it last."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_what_a_run_lacks_at_its_end_is_written_by_a_resume(tmp_path: Path) -> None:
    """It was killed after its last checkpoint, before its weights; or that checkpoint is bad."""
    run = train(tiny(tmp_path, checkpoint=EVERY_ITERATION), make_env=corridor)
    weights, card = run.files.weights(), run.files.card
    run.files.write_card(card | {"env_steps": 0})
    (run.directory / "agent.safetensors").unlink()
    resume(run.directory, make_env=corridor)
    assert_same_state_tensors(run.files.weights(), weights)
    assert run.files.card["env_steps"] == 128 and len(run.files.card["resumed"]) == 1
    (run.files.checkpoints[-1] / "state.json").write_text("torn")
    resume(run.directory, make_env=corridor)
    assert_same_state_tensors(run.files.weights(), weights)
    assert run.files.card["env_steps"] == 128 and len(run.files.card["resumed"]) == 2


def test_nothing_that_changes_in_training_is_missing_from_the_state(tmp_path: Path) -> None:
    """Every module, optimizer, generator and counter that the run holds is restored.

    What is not is on the list, with its reason.
    """
    config = tiny(tmp_path, aux=tiny_aux(), total_env_steps=96, checkpoint=EVERY_ITERATION)
    run = train(config, make_env=corridor)
    covered = {"learner", "env_steps"}
    # action_generator, episodes; chunks, num_filled and auxiliary; seconds; best_return; auxiliary
    through_others = {"collector", "buffer", "_seconds_before", "_best_return", "record"}
    not_state = {
        "config", "files", "user", "_origin", "envs_since",  # fixed for the run
        "_periodic_evaluation",  # fixed for the run
        "directory", "agent", "envs", "executor", "world",  # parts of other objects
        "log",  # its rows are on the disk already
        "_started", "_iteration_started", "_last_save", "_rollout_seconds",  # of this process
        "resources", "_signals",  # of this process, too
        "_snapshot",  # what the next checkpoint holds
        "_steps_on_card",  # in the card
    }  # fmt: skip
    assert set(vars(run)) == covered | through_others | not_state
    assert covered <= set(run.state_dict())
    of_learner = {
        "agent", "optimizers", "reward_normalizer", "generator", "iteration", "kl_coef",
        "lr_multiplier", "proximal", "advantage_moments",
    }  # fmt: skip
    # Fixed, or made by the next one.
    of_iteration = {"config", "executor", "_moments_before", "_networks", "_clipped"}
    assert (
        set(vars(run.learner)) == of_learner | of_iteration
        and set(run.learner.state_dict()) == of_learner
    )
    collector_state = {"episodes"}
    collector_fixed = {
        "envs", "agent", "executor", "generator", "bootstrap_truncation", "_blank_policy",
        "_own_noise", "_values_deferred", "_precision",
    }  # fmt: skip
    collector_new_episodes = {"_obs", "_first", "_state"}
    assert set(vars(run.collector)) == collector_state | collector_fixed | collector_new_episodes
    for owner in (run, run.collector, run.buffer, run.log):
        for name, value in vars(owner).items():
            if isinstance(value, nn.Module | Optimizer | Generator):
                assert any(value is known for known in (run.agent, run.collector.generator)), (
                    f"{owner}.{name} is not saved"
                )


def test_a_corrupt_newest_checkpoint_is_passed_over_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path, total_env_steps=128, checkpoint=EVERY_ITERATION)
    config = replace(config, log=replace(config.log, console="plain"))
    directory = stopped_after(3, config)
    newest = sorted((directory / "checkpoints").iterdir())[-1]
    (newest / "tensors.safetensors").write_bytes(b"nothing")
    run = resume(directory, make_env=corridor)
    assert run.iteration == 4
    assert "step-000000000096 cannot be used" in capsys.readouterr().out


def test_checkpoints_come_at_their_cadence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    saved: list[int] = []
    monkeypatch.setattr(
        Run,
        "_write_checkpoint",
        lambda self: (saved.append(self.iteration), setattr(self, "_last_save", now[0])),
    )
    run = open_run(
        tiny(tmp_path, checkpoint=CheckpointConfig(every_minutes=2.0), total_env_steps=192)
    )

    def pass_a_minute(run: Run, record: dict[str, float]) -> None:
        now[0] += 60

    learn(run, on_iteration=pass_a_minute)
    assert saved == [0, 3, 5]
    saved.clear()
    by_count = CheckpointConfig(every_minutes=None, every_iterations=4)
    learn(open_run(tiny(tmp_path, checkpoint=by_count, total_env_steps=320)))
    assert saved == [0, 4, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": {"device": "cuda:7"}}, "compute.device is 'cuda:7'"),
        ({"compute": {"device": "toaster"}}, "compute.device is 'toaster'"),
        ({"model": {"encoder": "impala"}}, "not images; use --model.encoder mlp"),
        ({"output_dir": "/proc/none"}, "cannot be made there"),
    ],
)
def test_what_cannot_work_here_is_refused_before_a_directory_is_made(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = tiny(tmp_path)
    changes = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        start_run(replace(config, **changes), make_env=corridor)
    assert not list(tmp_path.iterdir())


def test_a_first_reset_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    class Broken(Corridor):
        def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
            raise OSError("no map")

    with pytest.raises(EnvError, match="no map"):
        start_run(tiny(tmp_path), make_env=Broken)
    assert not list(tmp_path.iterdir())


def test_environments_are_closed_when_the_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    original = build.make_envs

    def spy(*args: Any, **kwargs: Any) -> VectorEnv:
        envs = original(*args, **kwargs)
        monkeypatch.setattr(envs, "close", lambda: closed.append(True))
        return envs

    monkeypatch.setattr(build, "make_envs", spy)
    config = tiny(tmp_path)
    with pytest.raises(ValueError, match="toaster"):  # before there is anything to close
        start_run(
            replace(config, compute=replace(config.compute, device="toaster")), make_env=corridor
        )
    assert not closed
    with pytest.raises(ValueError, match="are not images"):
        start_run(replace(config, model=ModelConfig(encoder="impala")), make_env=corridor)
    assert closed == [True]


def test_a_users_encoder_is_initialized_from_the_seed_and_leaves_the_global_generator_alone(
    tmp_path: Path,
) -> None:
    class Own(nn.Module):
        num_features = 5

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 5)

        def forward(self, obs: Tensor) -> Tensor:
            return self.linear(obs).relu()

    state = torch.random.get_rng_state()
    first, second = (
        train(tiny(tmp_path), make_env=corridor, make_encoder=lambda space: Own()) for _ in range(2)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same_state(first, second)


def test_training_leaves_the_global_generators_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state(), np.random.get_state(legacy=False)
    train(tiny(tmp_path, aux=tiny_aux()), make_env=corridor)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert str(np.random.get_state(legacy=False)) == str(before[1])


def test_every_metric_is_reported_by_some_run(tmp_path: Path) -> None:
    config = tiny(tmp_path, aux=tiny_aux())
    apart = replace(
        config, ppo=replace(config.ppo, policy_epochs=1, value_epochs=2, value_learning_rate=1e-3)
    )
    steered = replace(config, ppo=replace(config.ppo, kl_penalty=1.0, kl_penalty_target=0.01))
    more = {
        "evaluation.every_iterations": 1, "evaluation.episodes": 1, "evaluation.levels": "both",
        "env.max_restarts": 1,
    }  # fmt: skip
    more |= {"ppo.collect_by": "episodes", "ppo.num_steps": 20, "obs_norm": OBS_NORM}
    tested = config.with_updates(more)
    rows = [
        row
        for c in (config, apart, steered, tested)
        for row in RunDirectory(train(c, make_env=corridor).directory).metrics()
    ]
    rows += RunDirectory(train(config, make_env=lambda: Levers(discrete=False)).directory).metrics()
    reported = {name for row in rows for name in row}
    procgen = {name for name in METRICS if name.startswith("procgen/")}  # tests/test_procgen.py
    assert reported - {"env_steps", "iteration", "phase", "wall_time"} == set(METRICS) - procgen


def test_a_resumed_optimizer_steps_as_the_unbroken_one_on_convolutions_too(tmp_path: Path) -> None:
    """Convolution weights are channels_last, files are not, and the fused Adam looks at no strides.

    Equal numbers are not enough.
    """
    config = tiny(tmp_path, checkpoint=EVERY_ITERATION, total_env_steps=64)
    config = replace(
        config,
        model=replace(config.model, encoder="impala", activation="relu", channels=(4, 8), blocks=1),
    )
    with start_run(config, make_env=Image) as old:
        learn(old)
        directory = Path(shutil.copytree(old.directory, tmp_path / "copy"))
        with build.resume_run(directory, make_env=Image) as new:
            old.buffer.num_filled = 1
            for run in (old, new):
                rollout = run.buffer.rollout(0)
                rollout.load(old.buffer.rollout(0).tensors())
                policy_phase(run.learner, rollout, rollout.reward)
            assert_same_state_tensors(old.agent.state_dict(), new.agent.state_dict())


def assert_same_state_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("damaged", ["tensors.safetensors", "state.json"])
def test_a_run_that_fell_back_saves_its_own_rollouts_not_the_rejected_ones(
    tmp_path: Path, damaged: str
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(every=4), total_env_steps=512, checkpoint=EVERY_ITERATION)
    directory = stopped_after(3, config)
    newest = sorted((directory / "checkpoints").iterdir())[-1]
    (newest / damaged).write_text("torn")
    with build.resume_run(directory, make_env=corridor) as run:
        with pytest.raises(Stopped):
            learn(run, on_iteration=lambda run, record: (_ for _ in ()).throw(Stopped))
        expected = {
            name: tensor.clone() for name, tensor in run.buffer.rollout(2).tensors().items()
        }
    with build.resume_run(directory, make_env=corridor) as again:
        assert again.iteration == 3
        assert_same_state_tensors(expected, again.buffer.rollout(2).tensors())


def test_a_run_with_parts_of_the_users_own_is_not_continued_without_them(tmp_path: Path) -> None:
    directory = train(tiny(tmp_path), make_env=corridor).directory
    with pytest.raises(
        ValueError,
        match=r"trained with a user-defined environment; call this from Python with make_env",
    ):
        resume(directory)


@pytest.mark.parametrize("eps_hat", [False, True])
def test_epsilon_is_added_after_the_bias_correction_or_before_it(
    tmp_path: Path, eps_hat: bool
) -> None:
    # ε as large as the gradients, so that its place shows; the formulas are section 2 and its last
    # paragraph of Kingma & Ba (2015).
    config = tiny(tmp_path)
    config = replace(
        config, ppo=replace(config.ppo, learning_rate=0.01, adam_eps=1.0, adam_eps_hat=eps_hat)
    )
    with open_run(config) as run:
        weights = [parameter.detach().double().clone() for parameter in run.agent.parameters()]
        first = [torch.zeros_like(weight) for weight in weights]
        second = [torch.zeros_like(weight) for weight in weights]
        for step in range(1, 4):
            for i, parameter in enumerate(run.agent.parameters()):
                parameter.grad = torch.full_like(parameter, 0.5 * step)
                first[i] = 0.9 * first[i] + 0.1 * 0.5 * step
                second[i] = 0.999 * second[i] + 0.001 * (0.5 * step) ** 2
                m_hat, corrected = first[i] / (1 - 0.9**step), 1 - 0.999**step
                if eps_hat:
                    weights[i] -= 0.01 * corrected**0.5 * m_hat / (second[i].sqrt() + 1)
                else:
                    weights[i] -= 0.01 * m_hat / ((second[i] / corrected).sqrt() + 1)
            parameters = list(run.agent.parameters())
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            step_(
                run.learner.optimizers["policy"], parameters, gradients, apply_if=torch.tensor(True)
            )
        for parameter, weight in zip(run.agent.parameters(), weights, strict=True):
            torch.testing.assert_close(parameter.detach().double(), weight, rtol=0, atol=1e-6)


def test_two_networks_learn_at_their_own_rates(tmp_path: Path) -> None:
    config = tiny(tmp_path, total_env_steps=128)
    config = replace(
        config,
        ppo=replace(config.ppo, learning_rate=0.01, value_learning_rate=0.1, schedule="linear"),
        aux=tiny_aux(),
    )
    with open_run(config) as run:
        run.learner.iteration = 2
        record = run.learner.start_iteration()
        rates = {
            name: [group["lr"] for group in optimizer.param_groups]
            for name, optimizer in run.learner.optimizers.items()
        }
        assert rates == {
            "policy": pytest.approx([0.005, 0.05]),
            "aux": pytest.approx([5e-4 / 2] * 2),
        }
        of_value = {id(p) for p in run.learner.optimizers["policy"].param_groups[1]["params"]}
        assert of_value == {
            id(p) for name, p in run.agent.named_parameters() if name.startswith("value_")
        }
        run.finish_iteration(record)
    (row,) = RunDirectory(run.directory).metrics()
    # Where the iteration began.
    assert (row["charts/learning_rate"], row["charts/value_learning_rate"]) == (
        pytest.approx(0.005),
        pytest.approx(0.05),
    )


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 1 / 1.5), (1e9, 1.5)])
def test_the_rate_follows_the_divergence_and_goes_on_after_a_resume(
    tmp_path: Path, target: float, factor: float
) -> None:
    config = tiny(tmp_path, total_env_steps=96, checkpoint=EVERY_ITERATION)
    config = replace(
        config,
        ppo=replace(config.ppo, learning_rate=1e-3, schedule="adaptive_kl", schedule_kl=target),
    )
    run = train(config, make_env=corridor)
    rates = [row["charts/learning_rate"] for row in RunDirectory(run.directory).metrics()]
    assert rates == pytest.approx([1e-3, 1e-3 * factor, 1e-3 * factor**2])
    assert all("losses/epoch_kl" in row for row in RunDirectory(run.directory).metrics())
    for path in sorted((run.directory / "checkpoints").iterdir())[2:]:
        shutil.rmtree(path)
    again = resume(run.directory, make_env=corridor)
    assert [
        row["charts/learning_rate"] for row in RunDirectory(again.directory).metrics()
    ] == pytest.approx(rates)


def test_the_weight_of_the_divergences_penalty_follows_the_divergence(tmp_path: Path) -> None:
    config = tiny(tmp_path, total_env_steps=96)
    config = replace(
        config, ppo=replace(config.ppo, kl_penalty=0.5, kl_penalty_target=1e-9, clip=None)
    )
    run = train(config, make_env=corridor)
    assert [row["losses/kl_penalty"] for row in RunDirectory(run.directory).metrics()] == [
        0.5,
        1.0,
        2.0,
    ]
    assert run.learner.kl_coef == 4.0


class Steady(gym.Env[np.ndarray, np.int64]):
    """Reward −8 for ever, in episodes that are cut after 25 steps.

    What is seen and done does not count.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
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
    config = tiny(
        tmp_path,
        total_env_steps=64,
        obs_norm=norm,
        value_norm=VALUE_NORM,
        checkpoint=EVERY_ITERATION,
    )
    with open_run(config) as run:
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None
        rollout = run.buffer.next_rollout()
        seen = torch.empty(0, 8, 2)
        for number in (0, 32):
            run.collect(rollout)
            assert normalizer.moments.count == (32 if first else number)
            seen = torch.cat([seen, rollout.obs])
            policy_phase(run.learner, rollout)
            assert normalizer.moments.count == number + 32
            torch.testing.assert_close(normalizer.moments.mean, seen.double().mean((0, 1)))


class Parts(Steady):
    """What is seen is a tree with numbers, a member of a finite set, and more numbers, far from
    zero.
    """

    observation_space = gym.spaces.Dict(  # type: ignore[assignment]
        {
            "legs": gym.spaces.Box(-1e3, 1e3, (2,), np.float32),
            "mode": gym.spaces.Discrete(3),
            "speed": gym.spaces.Box(-1e3, 1e3, (1,), np.float32),
        }
    )

    def look(self) -> Any:
        legs = 100 + 5 * self.np_random.normal(size=2).astype(np.float32)
        return {"legs": legs, "mode": int(self.np_random.integers(3)), "speed": legs[:1] - 300}


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_numbers_of_a_tree_begin_their_statistics_too(tmp_path: Path, memory: str) -> None:
    config = tiny(tmp_path, obs_norm=OBS_NORM).with_updates(
        {"model.memory": memory, "ppo.num_steps": 40}
    )
    with start_run(config, make_env=Parts) as run:
        rollout = run.buffer.next_rollout()
        run.collect(rollout)
        normalizer = run.agent.reader.normalizer
        assert normalizer is not None and normalizer.moments.count == 160
        assert normalizer.moments.mean.tolist() == [
            pytest.approx(100, abs=2),
            pytest.approx(100, abs=2),
            pytest.approx(-200, abs=2),
        ]
        with torch.no_grad():
            values = run.agent.value(rollout.obs, rollout.first, rollout.state)
        torch.testing.assert_close(rollout.value, values)
        assert (
            rollout.truncated.any()
            and (rollout.next_value[:, :-1] == rollout.value[:, 1:])[
                ~rollout.truncated[:, :-1]
            ].all()
        )


def test_statistics_come_back_with_the_weights_and_a_resumed_run_does_not_begin_them_again(
    tmp_path: Path,
) -> None:
    config = tiny(
        tmp_path,
        total_env_steps=96,
        obs_norm=OBS_NORM,
        value_norm=VALUE_NORM,
        checkpoint=EVERY_ITERATION,
    )
    done = train(config, make_env=corridor)
    again = resume(done.directory, make_env=corridor)
    assert_same_state(done, again)
    # Before the first iteration, and after it.
    for path in sorted((done.directory / "checkpoints").iterdir())[2:]:
        shutil.rmtree(path)
    counts: list[float] = []
    collect = Run.collect

    def spy(run: Run, rollout: Rollout) -> Rollout:
        collect(run, rollout)
        assert run.agent.reader.normalizer is not None
        counts.append(float(run.agent.reader.normalizer.moments.count))  # type: ignore[arg-type]
        return rollout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "collect", spy)
        resume(done.directory, make_env=corridor)
    assert counts == [32, 64]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value_norm.statistics": "ema", "ppo.value_clip": 0.2, "model.value_path": "shared"},
        {"ppo.recompute_advantages": True, "aux": tiny_aux()},
    ],
    ids=["plain", "ema-clip-shared", "recomputed-ppg"],
)
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
        means.append(
            run.buffer.rollout((run.iteration - 1) % run.buffer.num_rollouts).value.mean().item()
        )

    train(config, make_env=Steady, on_iteration=note)
    assert means[0] > -100
    # Downwards in every iteration, up to 0.5 %.
    assert max(after - before for before, after in itertools.pairwise(means)) < 4, means
    assert -804 < means[-1] < -750, means


def test_constant_targets_are_met_at_once(tmp_path: Path) -> None:
    """γ = 0: all targets are −8 and have no deviation, so that nothing could be learned in units of
    it.
    """
    config = tiny(
        tmp_path,
        total_env_steps=64,
        reward_norm=RewardNormConfig(per="none"),
        value_norm=VALUE_NORM,
    ).with_updates({"ppo.gamma": 0.0})
    run = train(config, make_env=Steady)
    torch.testing.assert_close(
        run.buffer.rollouts.value, torch.full((1, 4, 8), -8.0), rtol=0, atol=0.01
    )


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
            samples, _ = phases._compute_targets_and_update_value_norm(
                run.learner, rollout, rollout.reward
            )
            run.learner.iteration += 1
        assert normalizer.moments.count == 32 * (1 + second)
        if second:  # the heads were rescaled: nothing that was said of the rollout has changed
            assert torch.equal(rollout.value, values[0]) and torch.equal(
                rollout.value_target, target
            )
            assert torch.equal(samples.advantage, expected.advantage)
        else:  # what was said is read in the first targets' units, and the targets follow from that
            mean, std = target.mean(), target.std(correction=0)
            torch.testing.assert_close(rollout.value, mean + std * values[0])
            torch.testing.assert_close(rollout.next_value, mean + std * values[1])
            compute_targets(rollout, rollout.reward, config.ppo)
            assert torch.equal(samples.value_target, rollout.value_target) and not torch.equal(
                target, rollout.value_target
            )
        with torch.no_grad():
            torch.testing.assert_close(
                run.agent.value(rollout.obs, rollout.first, rollout.state),
                rollout.value,
                rtol=1e-5,
                atol=1e-6,
            )


def poison(network: nn.Module) -> None:
    """Weights as a step of infinite size leaves them."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(torch.nan)


class Anything(gym.Env[np.ndarray, Any]):
    """Any action space."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, space: gym.Space[Any], *, masked: bool = False) -> None:
        self.action_space, self.masked = space, masked

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(2, np.float32), self.info()

    def info(self) -> dict[str, Any]:
        return {"action_mask": np.array([False, True, True])} if self.masked else {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, self.info()


SPACES: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3),
    "multi-discrete": gym.spaces.MultiDiscrete([3, 2]),
    "multi-binary": gym.spaces.MultiBinary(4),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "mixed": gym.spaces.Tuple((gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32))),
}


@pytest.mark.parametrize("value_path", ["separate", "shared"])
@pytest.mark.parametrize("space", [*SPACES, "masked"])
def test_a_policy_that_has_diverged_ends_the_run_with_what_to_do(
    tmp_path: Path, space: str, value_path: ValuePath
) -> None:
    config = tiny(tmp_path, checkpoint=EVERY_ITERATION).with_updates(
        {"model.value_path": value_path}
    )

    def diverge(run: Run, record: dict[str, float]) -> None:
        assert run.iteration == 1, "an iteration with weights that are no numbers passed unseen"
        poison(run.agent.encoder)

    wanted = (
        "policy is finite"
        if value_path == "separate"
        else "policy( and the value function)? is finite"
    )
    with pytest.raises(
        ValueError,
        match="training has diverged: not every number of the "
        rf"{wanted}.*ppo\.learning_rate.*max_grad_norm",
    ):
        train(
            config,
            make_env=lambda: Anything(
                SPACES.get(space, SPACES["discrete"]), masked=space == "masked"
            ),
            on_iteration=diverge,
        )


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True,
            marks=[
                pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler"),
                pytest.mark.long,
            ],
        ),
    ],
)
def test_a_gradient_that_is_not_finite_ends_the_run_before_the_weights_are_spoilt(
    tmp_path: Path, compiled: bool
) -> None:
    """In the last iteration too, after which nobody would look at the policy again."""
    config = tiny(tmp_path, checkpoint=EVERY_ITERATION, total_env_steps=64).with_updates(
        {"compute.compile": "on" if compiled else "off"}
    )
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
        with pytest.raises(
            ValueError, match=r"training has diverged: not every number of .*gradients/policy_norm"
        ):
            learn(run)
        assert run.iteration == 2 and all(map(torch.equal, run.agent.parameters(), weights))
    assert [path.name for path in checkpoints(run.directory / "checkpoints")] == [
        "step-000000000000",
        "step-000000000032",
    ]


def test_weights_that_are_not_finite_do_not_take_the_place_of_good_ones(tmp_path: Path) -> None:
    with open_run(tiny(tmp_path)) as run:
        run.save()
        good = (run.directory / "agent.safetensors").read_bytes()
        poison(run.agent.policy_head)
        with pytest.raises(
            ValueError, match="diverged: not every number of the agent's weights is finite"
        ):
            run.save()
    assert (run.directory / "agent.safetensors").read_bytes() == good


def test_so_does_a_value_function_of_its_own(tmp_path: Path) -> None:
    with open_run(tiny(tmp_path)) as run:
        assert run.agent.value_encoder is not None
        poison(run.agent.value_encoder)
        with pytest.raises(ValueError, match="not every number of the value function is finite"):
            learn(run)


def test_an_action_that_is_refused_for_another_reason_is_not_called_divergence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(tiny(tmp_path)) as run:
        monkeypatch.setattr(run.agent.policy_head, "env_action", lambda action: action + 7)
        with pytest.raises(ValueError, match=r"is outside of 0 … 1"):
            learn(run)


def test_a_mask_of_ones_own_holds_at_the_start_and_a_resume_asks_for_it(tmp_path: Path) -> None:
    config = tiny(tmp_path, total_env_steps=128, checkpoint=EVERY_ITERATION)
    config = replace(config, env=replace(config.env, heuristic_mask_steps=64))
    seen: list[Any] = []

    def forward_only(obs: np.ndarray, own: np.ndarray | None) -> np.ndarray:
        seen.append(own)
        return np.tile([False, True], (len(obs), 1))

    actions: list[Tensor] = []

    def note(run: Run, record: dict[str, float]) -> None:
        actions.append(run.buffer.rollouts.action[0].clone())

    run = train(config, make_env=corridor, mask_actions=forward_only, on_iteration=note)
    assert all((batch == 1).all() for batch in actions[:2]) and any(
        (batch == 0).any() for batch in actions[2:]
    )
    assert seen == [None] * 16
    # The first two are of before the first iteration, and after it.
    for path in sorted((run.directory / "checkpoints").iterdir())[2:]:
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
