"""Evaluations in the middle of a run: they change nothing, and the best weights are kept."""

import csv
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from torch import Tensor

from phasicrl.algorithm import resume, train
from phasicrl.cli import main
from phasicrl.config import Config, ModelConfig
from phasicrl.config_io import read_json
from phasicrl.envs.protocol import VectorEnv
from phasicrl.lab.film.video import film
from phasicrl.seeding import derive_seed
from phasicrl.training import evaluation as evaluation_module
from phasicrl.training import run as run_module
from phasicrl.training.evaluate import evaluate
from phasicrl.training.evaluation import Episodes, PeriodicEvaluation
from tests import helpers
from tests.golden import BOTH, Echo, Image
from tests.helpers import Corridor, Levers, assert_same, read_film, rows_of, tiny, tiny_aux


def evaluated(tmp_path: Path, **changes: Any) -> Config:
    """Return a configuration of four iterations, with an evaluation after every second one."""
    few = {"evaluation.every_iterations": 2, "evaluation.episodes": 3}
    return tiny(tmp_path, total_env_steps=128).with_updates(few | changes)


@pytest.mark.parametrize(("memory", "encoder"), [("none", helpers.NoisyEncoder), ("lstm", None)])
def test_a_run_with_evaluations_is_the_run_without(
    tmp_path: Path, memory: str, encoder: Any
) -> None:
    changes = {"model.memory": memory, "model.memory_size": 8, "aux": tiny_aux()}
    config = evaluated(tmp_path / "with", **changes)
    off = {"evaluation.every_iterations": None, "evaluation.episodes": 20}
    plain = config.with_updates(off | {"output_dir": str(tmp_path / "without")})
    run, other = (train(x, make_env=Corridor, make_encoder=encoder) for x in (config, plain))
    assert_same(run.agent.state_dict(), other.agent.state_dict())
    rows, found = rows_of(run.files), list[set[str]]()
    for row in rows:
        found.append({name for name in row if name.startswith("evaluation/")})
        for name in found[-1]:
            del row[name]
    assert_same(rows, rows_of(other.files))
    names = {"evaluation/return", "evaluation/length", "evaluation/best_return"}
    assert found == [set(), names, set(), names]
    assert not (other.directory / "best.safetensors").exists()


def watch_environments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Record the options with which environments of evaluations are made from here on."""
    made, make = [], evaluation_module.make_evaluation_envs

    def watched(config: Config, **options: Any) -> VectorEnv:
        made.append(options)
        return make(config, **options)

    monkeypatch.setattr(evaluation_module, "make_evaluation_envs", watched)
    return made


def test_every_evaluation_plays_the_same_episodes_and_the_last_is_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three iterations, one every two: after the second and the third."""
    made = watch_environments(monkeypatch)
    run = train(replace(evaluated(tmp_path), total_env_steps=96), make_env=Corridor)
    rows = [row for row in run.files.metrics() if "evaluation/return" in row]
    assert [row["iteration"] for row in rows] == [2, 3]
    first, again = made
    assert first["num_envs"] == 3 and first | {"env_steps": 96} == again


def scores(monkeypatch: pytest.MonkeyPatch, *returns: float) -> list[dict[str, Tensor]]:
    """Have evaluations reach these returns in turn; return the weights that they saw."""
    seen: list[dict[str, Tensor]] = []

    def play(agent: Any, *_: Any, **__: Any) -> Episodes:
        seen.append({name: value.clone() for name, value in agent.state_dict().items()})
        return Episodes((returns[len(seen) - 1],), (1,))

    monkeypatch.setattr(evaluation_module, "run_agent_episodes", play)
    return seen


def test_the_best_weights_are_kept_and_can_be_evaluated_and_filmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 3 of 1, 3, 2 and 3 is the best; an equal return does not replace it."""
    config = evaluated(tmp_path, **{"evaluation.every_iterations": 1})
    with monkeypatch.context() as patch:
        seen = scores(patch, 1.0, 3.0, 2.0, 3.0)
        run = train(config, make_env=Corridor)
    best = run.files.load_weights("best")
    assert_same(best, seen[1])
    assert not all(torch.equal(best[name], seen[3][name]) for name in best)
    rows = run.files.metrics("evaluation/best_return")
    assert [row["evaluation/best_return"] for row in rows] == [1, 3, 3, 3]
    ours = evaluate(run.directory, episodes=4, make_env=Corridor, weights="best")
    run.files.save_weights(best, env_steps=0)  # in the place of the last ones
    assert ours == evaluate(run.directory, episodes=4, make_env=Corridor)
    with pytest.raises(ValueError, match="no images to film"):
        film(run.directory, make_env=Corridor, weights="best")


def test_both_kinds_of_level_and_their_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best weights are chosen on unseen levels: the first ones, of returns 2 and 1."""
    config = evaluated(tmp_path).with_updates({"evaluation.levels": "both"})
    made, seen = watch_environments(monkeypatch), scores(monkeypatch, 2.0, 5.0, 1.0, 7.0)
    run = train(config, make_env=Corridor)
    rows = [row for row in run.files.metrics() if "evaluation/return" in row]
    names = ("evaluation/return", "evaluation/train_return", "evaluation/gap")
    assert [[row[name] for name in names] for row in rows] == [[2, 5, 3], [1, 7, 6]]
    assert [each["levels"] for each in made] == ["unseen", "train"] * 2
    assert_same(run.files.load_weights("best"), seen[0])


SHORT = "gymnasium:ShortCartPole-v0"


@pytest.fixture
def short_cartpole() -> Iterator[None]:
    """Register CartPole with episodes of at most seven steps."""
    entry = "gymnasium.envs.classic_control:CartPoleEnv"
    gym.register("ShortCartPole-v0", entry, max_episode_steps=7)
    yield
    del gym.registry["ShortCartPole-v0"]


@pytest.mark.usefixtures("short_cartpole")
def test_further_environments_are_evaluated_as_evaluate_does(tmp_path: Path) -> None:
    config = evaluated(tmp_path).with_updates(
        {"env.id": "gymnasium:CartPole-v1", "evaluation.env_ids": (SHORT,)}
    )
    run = train(config)
    last = run.files.metrics()[-1]
    same: Any = {"episodes": 3, "policies": ["greedy"], "seed": derive_seed(3, "validation")}
    (short,) = evaluate(run.directory, env_id=SHORT, **same)
    (long,) = evaluate(run.directory, **same)
    assert short.lengths == (7, 7, 7) and min(long.lengths) > 7
    found = [last[f"evaluation/{name}"] for name in ("return", f"{SHORT}/return")]
    assert found == [long.mean_return, short.mean_return] == [long.mean_return, 7]
    assert last[f"evaluation/{SHORT}/length"] == 7
    # Other options of the same environment: no reward, and −1 where the pole falls.
    (other,) = evaluate(run.directory, env_options={"sutton_barto_reward": True}, **same)
    assert other.lengths == long.lengths and other.returns == (-1, -1, -1)
    words = ["--env-id", SHORT, "--env-options", "sutton_barto_reward=True", "--episodes", "1"]
    file = tmp_path / "evaluation.json"
    assert main(["evaluate", str(run.directory), *words, "--json", str(file)]) == 0
    results = read_json(file)["results"]
    assert [(x["mean_length"], x["mean_return"]) for x in results] == [(7, 0)] * 2


def test_a_run_with_a_custom_environment_is_evaluated_on_an_id_too(tmp_path: Path) -> None:
    cartpole, config = "gymnasium:CartPole-v1", evaluated(tmp_path)
    config = config.with_updates({"evaluation.env_ids": (cartpole,)})
    run = train(config, make_env=CartPoleEnv)  # without a time limit
    (result,) = evaluate(
        run.directory, make_env=CartPoleEnv, env_id=cartpole, episodes=3, policies=["greedy"],
        seed=derive_seed(3, "validation"),
    )  # fmt: skip
    assert run.files.metrics()[-1][f"evaluation/{cartpole}/return"] == result.mean_return


def test_environments_with_other_spaces_are_refused_before_the_training(tmp_path: Path) -> None:
    acrobot = "gymnasium:Acrobot-v1"
    named = r"observation_space Box\(4,\).*Acrobot-v1 has Box\(6,\).*action_space Discrete\(2\)"
    config = evaluated(tmp_path).with_updates({"env.id": "gymnasium:CartPole-v1"})
    with pytest.raises(ValueError, match=f"^the training has {named}"):
        train(config.with_updates({"evaluation.env_ids": (acrobot,)}))
    assert not list(tmp_path.iterdir())
    run = train(config)
    with pytest.raises(ValueError, match=r"observation_space Box\(4,\).* has Box\(6,\)"):
        evaluate(run.directory, env_id=acrobot)
    tree = r"observation_space/shown Box\(\d,\).*, observation_space/step Discrete"
    with pytest.raises(ValueError, match=rf"says observation_space Box\(4,\).* has {tree}"):
        evaluate(run.directory, make_env=lambda: Echo(BOTH, tree=True))


def test_resumed_runs_know_the_best_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = evaluated(tmp_path, **{"evaluation.every_iterations": 1})
    seen = scores(monkeypatch, 1.0, 3.0, 2.0, 2.5)
    run = train(config, make_env=Corridor,
                callbacks=lambda *_: "stop" if len(seen) == 2 else None)  # fmt: skip
    run = resume(run.directory, make_env=Corridor)
    assert len(seen) == 4
    assert_same(run.files.load_weights("best"), seen[1])


def test_the_steps_of_the_first_episode_are_a_table_and_tensorboard_series(tmp_path: Path) -> None:
    """One episode of one environment, on unseen levels alone; a run that keeps them is the same."""
    fixed = {"log.tensorboard": True, "action.std": "fixed", "action.std_value": 0.25}
    plain = evaluated(tmp_path / "without", **fixed)
    config = evaluated(tmp_path / "with", **fixed, **{"evaluation.steps": True})
    run, other = (train(each, make_env=lambda: Levers(discrete=False)) for each in (config, plain))
    assert_same(run.files.load_weights(), other.files.load_weights())
    assert not (other.directory / "evaluations").exists()
    tables = sorted((run.directory / "evaluations").iterdir())
    assert [path.name for path in tables] == ["000000000064.csv", "000000000128.csv"]
    for path in tables:
        rows = list(csv.DictReader(path.read_text().splitlines()))
        assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
        assert {row["env"] + row["episode"] + row["levels"] for row in rows} == {"00unseen"}
        events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        found = events.EventAccumulator(str(run.directory / "episodes" / path.stem)).Reload()
        for name in ("reward", "return", "entropy", "std_0", "mean_0", "mean_1", "action_1"):
            series = [(each.step, each.value) for each in found.Scalars(f"episode/{name}")]
            assert series == [(int(row["step"]), pytest.approx(float(row[name]))) for row in rows]


@pytest.mark.long
def test_an_evaluation_is_filmed_with_what_the_policy_thinks(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra `lab`")
    config = evaluated(tmp_path).with_updates({"evaluation.film": True})
    config = replace(config, model=ModelConfig(channels=(4,), blocks=0, hidden_sizes=(8,)))
    films = sorted((train(config, make_env=Image).directory / "videos").iterdir())
    assert [path.name for path in films] == ["000000000064.mp4", "000000000128.mp4"]
    images = read_film(films[0], 512 + 6 * 16, 512)
    assert len(images) == 6  # first + 5 steps
    below = images[:, 512:].astype(int)
    assert (below.reshape(6, -1).max(1) > 200).all() and (below[0] != below[4]).any()


def test_a_disk_that_takes_no_best_weights_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = evaluated(tmp_path).with_updates({"log.console": "plain"})
    save = run_module.RunDirectory.save_weights

    def full(files: Any, weights: Any, *, which: str = "last", **more: Any) -> None:
        if which == "best":
            raise OSError(28, "No space left on device")
        save(files, weights, which="last", **more)

    monkeypatch.setattr(run_module.RunDirectory, "save_weights", full)
    run = train(config, make_env=Corridor)
    assert run.env_steps == 128
    assert "the best weights are not saved: [Errno 28]" in capsys.readouterr().out
    # What is not there is no best return, to which later ones would be compared.
    assert all("evaluation/best_return" not in row for row in run.files.metrics())
    assert run.state_dict()["best_return"] is None
    with pytest.raises(ValueError, match=r"no best.safetensors; expected after an evaluation"):
        evaluate(run.directory, make_env=Corridor, weights="best")


@pytest.mark.long
def test_what_only_adorns_an_evaluation_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that takes no table, TensorBoard that fails, a renderer that fails in its own way."""

    class NoGraphics(Image):
        render_mode = "rgb_array"

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no context")

    config = evaluated(tmp_path).with_updates(
        {"evaluation.steps": True, "evaluation.film": True, "log.console": "plain"}
    )
    config = replace(config, model=ModelConfig(channels=(4,), blocks=0, hidden_sizes=(8,)))
    monkeypatch.setattr("phasicrl.lab.film.recorder.film_episodes", fail)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", no_room(Path.write_text, ".csv"))
        run = train(config, make_env=NoGraphics)
    said = capsys.readouterr().out
    assert run.env_steps == 128 and said.count("no table of steps: [Errno 28]") == 2
    assert said.count("no film: no context") == 1
    pytest.importorskip("tensorboard")
    monkeypatch.setattr("phasicrl.runs.metrics._TensorBoard.add_table", fail)
    config = config.with_updates({"log.tensorboard": True, "output_dir": str(tmp_path / "board")})
    assert train(config, make_env=NoGraphics).env_steps == 128
    assert capsys.readouterr().out.count("TensorBoard is switched off, it failed") == 1


def no_room(write: Callable[..., int], suffix: str) -> Callable[..., int]:
    """Write texts, but fail for files with this ending."""

    def writing(path: Path, *text: Any, **how: Any) -> int:
        if path.suffix == suffix:
            raise OSError(28, "No space left on device")
        return write(path, *text, **how)

    return writing


@pytest.mark.parametrize("option", ["evaluation.film", "evaluation.steps"])
def test_without_the_lab_records_are_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr("phasicrl.training.evaluation.entry_points", lambda **_: ())
    with pytest.raises(ImportError, match=r"pip install 'phasicrl\[lab\]'"):
        train(evaluated(tmp_path).with_updates({option: True}), make_env=Corridor)
    assert train(evaluated(tmp_path), make_env=Corridor).env_steps == 128


@pytest.mark.parametrize("policy", ["greedy", "sampled"])
def test_evaluations_have_networks_in_evaluation_mode_and_the_policy_of_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    play = Mock(return_value=Episodes((1.0,), (1,)))
    monkeypatch.setattr(evaluation_module, "run_agent_episodes", play)
    run = train(evaluated(tmp_path, **{"evaluation.policy": policy}), make_env=Corridor)
    evaluate(run.directory, episodes=1, policies=(policy,), make_env=Corridor)
    assert run.agent.training
    found = [(call.args[0].training, call.kwargs["policy"]) for call in play.call_args_list]
    assert found == [(False, policy)] * 3


def test_processes_run_different_episodes_and_share_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Mock(return_value=Episodes((1.0,), (1,)))
    monkeypatch.setattr(evaluation_module, "run_agent_episodes", play)
    made, user = watch_environments(monkeypatch), {"make_env": Corridor, "make_vector_env": None}
    for rank in range(2):
        world: Any = SimpleNamespace(
            size=2, rank=rank, is_first=not rank, sync_errors=lambda _: nullcontext(),
            all_gather_object=lambda own: [own, [Episodes((4.0,), (3,))]],
        )  # fmt: skip
        given: Any = evaluated(tmp_path), None, None, world, user
        assert PeriodicEvaluation(*given).evaluate(Mock(), 0)["evaluation/return"] == 2.5
    assert made[0]["seed"] != made[1]["seed"] and made[0]["num_envs"] == 2  # ⌈3 / 2⌉
