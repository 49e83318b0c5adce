"""Options of environments.

What a task takes, in which types, and that they reach training, evaluation and film.
"""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import Config, EnvConfig
from phasicrl.config_io import SCHEMA
from phasicrl.envs.checks import convert_errors
from phasicrl.envs.gymnasium import convert_make_options
from phasicrl.envs.make import make_envs
from phasicrl.envs.options import convert_options
from phasicrl.presets import get_preset
from phasicrl.training.evaluate import evaluate
from phasicrl.training.evaluation import make_evaluation_envs
from tests.envs.counting import Counting
from tests.envs.test_make import needs_envpool, refused
from tests.helpers import assert_same, skip_without_envpool, tiny

TAKES = {"flag": True, "count": 3, "share": 0.5, "word": "a", "any": None, "range": (1, 2)}


@pytest.mark.parametrize(("given", "read"), [
    ({"flag": "false"}, {"flag": False}), ({"count": "1e3"}, {"count": 1000}),
    ({"flag": "True", "count": "1_000"}, {"flag": True, "count": 1000}),
    ({"share": "2"}, {"share": 2.0}), ({"share": 2}, {"share": 2.0}),
    ({"share": "1e-3", "word": "7"}, {"share": 0.001, "word": "7"}),
    ({"any": "7"}, {"any": 7}), ({"any": "7.5"}, {"any": 7.5}),
    ({"any": "false"}, {"any": False}), ({"any": "x"}, {"any": "x"}),
    ({"flag": False, "count": 0, "word": "", "any": True},) * 2,
])  # fmt: skip
def test_values_are_read_as_the_type_of_the_default(
    given: dict[str, Any], read: dict[str, Any]
) -> None:
    assert_same(dict(convert_options("x", given, TAKES)), read)


@pytest.mark.parametrize(("given", "message"), [
    ({"flagg": "true"}, r"has flagg, .* \(did you mean 'flag'\?\).*any=None, count"),
    ({"flag": "2"}, "x: env.options.flag is 2; expected bool"),
    ({"flag": 1}, "flag is 1; expected bool"),
    ({"count": "2.5"}, "count is 2.5; expected int"),
    ({"count": "inf"}, "count is inf; expected int"),
    ({"count": True}, "count is True; expected int"),
    ({"share": "much"}, "share is 'much'; expected float"),
    ({"share": True}, "share is True; expected float"),
    ({"word": 3}, "word is 3; expected str"),
    ({"range": "1,2"}, "range is '1,2'; expected tuple"),
])  # fmt: skip
def test_what_does_not_exist_or_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_options("x", given, TAKES)
    assert convert_options("x", {"new": "1"}, TAKES, accepts_any=True) == {"new": 1}


def test_options_keep_their_values_in_files() -> None:
    config = Config(env=EnvConfig(id="x", options={"b": True, "a": 1, "c": "x", "d": 0.5}))
    again = Config.from_json(config.to_json())
    assert again == pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    with pytest.raises(ValueError, match=r"env.options has a = \[1\]"):
        EnvConfig(options={"a": [1]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"env.options is 3"):
        Config.from_json(f'{{"schema": {SCHEMA}, "env": {{"options": 3}}}}')


@needs_envpool
def test_options_reach_envpool() -> None:
    options: dict[str, Any] = {"img_height": "64", "gray_scale": False, "stack_num": 2}
    envs = make_envs(EnvConfig(id="Breakout-v5", num_envs=2, options=options), seed=1)
    assert envs.observation_space.shape == envs.reset().shape[1:] == (6, 64, 84)
    envs.close()
    options = {"max_episode_steps": "5"}
    envs = make_envs(EnvConfig(id="envpool:CartPole-v1", num_envs=2, options=options), seed=1)
    envs.reset()
    ends = [bool(envs.step(torch.tensor([k % 2, k % 2])).truncated.all()) for k in range(10)]
    assert ends == [False, False, False, False, True] * 2
    envs.close()


@needs_envpool
@pytest.mark.parametrize(("env_id", "options", "message"), [
    ("Breakout-v5", {"episodic_live": True}, r"not exist .*did you mean 'episodic_life'\?"),
    ("Breakout-v5", {"num_envs": 4}, "has num_envs, which does not exist"),
    ("Breakout-v5", {"seed": 4}, "has seed, which does not exist"),
    ("Breakout-v5", {"noop_max": 0}, "env.options has noop_max = 0; expected .* above 0"),
    ("Breakout-v5", {"stack_num": "-1"}, "env.options has stack_num = -1; expected .* above 0"),
    ("Breakout-v5", {"mode": 99}, "env.options is {'mode': 99}; expected .*Invalid game mode"),
    ("Breakout-v5", {"stack_num": 10**14}, "expected options that EnvPool accepts"),
    ("procgen:starpilot", {"num_levels": 3}, "has num_levels, which does not exist"),
])  # fmt: skip
def test_what_envpool_does_not_take_is_refused(
    env_id: str, options: dict[str, Any], message: str
) -> None:
    refused(message, id=env_id, options=options)


def test_options_reach_gymnasium() -> None:
    options = {"map_name": "8x8", "is_slippery": "false", "max_episode_steps": "3"}
    envs = make_envs(EnvConfig(id="gymnasium:FrozenLake-v1", num_envs=2, options=options), seed=1)
    assert envs.observation_space == gym.spaces.Discrete(64)
    envs.reset()
    steps = [envs.step(torch.tensor([2, 2])) for _ in range(3)]  # to the right, as it does not slip
    assert [step.obs.tolist() for step in steps] == [[1, 1], [2, 2], [0, 0]]
    assert [bool(step.truncated.all()) for step in steps] == [False, False, True]
    envs.close()


def test_a_constructor_that_takes_anything_is_given_anything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[dict[str, Any]] = []

    def make(size: int = 3, render_mode: str | None = None, **more: Any) -> Counting:
        seen.append({"size": size, **more})
        return Counting()

    spec = EnvSpec("Anything-v0", entry_point=make, kwargs={"level": 1})
    monkeypatch.setitem(gym.registry, "Anything-v0", spec)
    options = {"size": "4", "level": "2", "new": "0.5"}
    make_envs(EnvConfig(id="gymnasium:Anything-v0", num_envs=1, options=options), seed=1).close()
    assert seen[0] == {"size": 4, "level": 2, "new": 0.5}
    refused("level is 'x'; expected int", id="gymnasium:Anything-v0", options={"level": "x"})


@pytest.mark.parametrize(("env_id", "option", "message"), [
    ("FrozenLake-v1", "is_slipery", r"has is_slipery, which .* \(did you mean 'is_slippery'"),
    ("CartPole-v1", "render_mode", "has render_mode, which does not exist"),
    ("CartPole-v1", "g", "has g, which does not exist; .*max_episode_steps=500"),
])  # fmt: skip
def test_what_gymnasium_does_not_take_is_refused(env_id: str, option: str, message: str) -> None:
    env_id = f"gymnasium:{env_id}"
    refused(f"{env_id}: env.options {message}", id=env_id, options={option: 3})


@pytest.mark.parametrize("task", ["gymnasium:CartPole-v1", "envpool:CartPole-v1"])
def test_evaluations_and_films_have_the_options_of_the_run(tmp_path: Path, task: str) -> None:
    """Films of EnvPool's tasks are drawn by environments with the same options."""
    if task.startswith("envpool"):
        skip_without_envpool()
    changes = {"env.id": task, "env.options": {"max_episode_steps": "4"}}
    run = train(tiny(tmp_path).with_updates(changes))
    assert set(evaluate(run.directory, episodes=3, policies=("greedy",))[0].lengths) == {4}
    pytest.importorskip("imageio_ffmpeg", reason="needs the extra `lab`")
    pytest.importorskip("pygame", reason="Gymnasium draws CartPole with pygame")
    from phasicrl.lab.film.video import film

    assert film(run.directory, episodes=2, size=16)[1].lengths == (4, 4)


@pytest.mark.long
@needs_envpool
def test_lives_end_episodes_in_training_only() -> None:
    config = get_preset("compat-cleanrl-ppo-atari")

    def num_ends(envs: Any) -> int:
        actions = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (250, 4)))
        envs.reset()
        ends = sum(int(envs.step(action).terminated.sum()) for action in actions)
        envs.close()
        return ends

    of_training = num_ends(make_envs(config.env, seed=1, num_envs=4))
    of_evaluation = num_ends(make_evaluation_envs(config, num_envs=4, levels="unseen", seed=1))
    assert of_training > 3 * of_evaluation > 0  # a game of Breakout has five lives


def test_evaluations_leave_out_training_options_of_envpool_only() -> None:
    given: list[dict[str, Any]] = []

    def make(episodic_life: bool = False, reward_clip: bool = False) -> gym.Env[Any, Any]:
        given.append({"episodic_life": episodic_life, "reward_clip": reward_clip})
        return Counting()

    gym.register("Options-v0", make)  # pyright: ignore[reportArgumentType]
    options: dict[str, Any] = {"episodic_life": True, "reward_clip": "true"}
    config = Config(env=EnvConfig(id="Options-v0", options=options))
    try:
        make_evaluation_envs(config, num_envs=1, levels="unseen", seed=0).close()
    finally:
        gym.registry.pop("Options-v0")
    assert given and all(each == {"episodic_life": True, "reward_clip": True} for each in given)


def test_two_functions_that_make_environments_are_refused() -> None:
    with pytest.raises(ValueError, match="both given"):
        make_envs(EnvConfig(id="own"), seed=0, make_env=Counting, make_vector_env=Counting)  # type: ignore[arg-type]


MODULE = """
import gymnasium
gymnasium.register("Unheard-v0", entry_point="tests.envs.counting:Counting")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "module_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "gymnasium:module_of_mine:Unheard-v0"
    sys.modules.pop("module_of_mine", None)
    gym.registry.pop("Unheard-v0", None)


def test_gymnasiums_module_form_imports_the_module(module: str, tmp_path: Path) -> None:
    envs = make_envs(EnvConfig(id=module, num_envs=2), seed=1)
    assert envs.name == module and envs.reset().shape == (2, 3)
    envs.close()
    unknown = "gymnasium:module_of_mine:Unherd-v0"
    refused("an unknown environment .did you mean 'Unheard-v0'", id=unknown)
    with pytest.raises(ImportError, match=r"no_such_m.*pip install no-such-module"):
        make_envs(EnvConfig(id="gymnasium:no_such_module:X-v0", num_envs=1), seed=1)
    with pytest.raises(ImportError, match=r"its import needs .*pip install no-such-module"):
        convert_make_options(EnvSpec("Lacking-v0", entry_point="no_such_module:Env"), {})
    with pytest.raises(ImportError, match=r"installed: no jax$"), convert_errors("its import"):
        raise ModuleNotFoundError("no jax")


def test_a_module_works_in_processes_and_a_run_that_was_received_does_not_import_one(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path / "runs")
    changes = {"env.id": module, "env.num_envs": 2, "env.vectorization": "async"}
    run = train(config.with_updates(changes | {"total_env_steps": 32}))
    # This process has imported it.
    assert main(["evaluate", str(run.directory), "--episodes", "1"]) == 0
    sys.modules.pop("module_of_mine")
    del gym.registry["Unheard-v0"]
    capsys.readouterr()
    here = str(run.directory)
    for words in (["evaluate", here], ["resume", here], ["train", "--from", here]):
        assert main(words) == 2
        assert "If you trust it, import it first" in capsys.readouterr().err
        assert "module_of_mine" not in sys.modules
    assert main(["evaluate", here, "--episodes", "1", "--import", "module_of_mine"]) == 0
    assert main(["evaluate", str(run.directory), "--import=no_such_module"]) == 2
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", str(run.directory), "--import"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "No module named 'no_such_module'" in captured.err
    assert "Missing value for argument '--import'" in captured.err + captured.out
