"""Small inputs of users that went wrong once, and what is right for each of them."""

import itertools
import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.vector import AutoresetMode
from torch import nn

from phasicrl import Callbacks, Config, cli, evaluate, get_preset, load, resume, train
from phasicrl.envs.protocol import EnvError
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.build import start_run
from tests.helpers import corridor, tiny, tiny_aux

Box, Discrete = gym.spaces.Box, gym.spaces.Discrete
VECTOR, IMAGE = Box(0, 1, (2,), np.float32), {"model.encoder": "impala", "model.channels": (4,)}


class Lamp(gym.Env[Any, Any]):
    """Environment with episodes of one step; `lamp` changes its parts."""

    observation_space: Any = VECTOR
    action_space: Any = Discrete(2)
    reward: Any = 1.0
    ends = True
    render_mode = "rgb_array"

    def observe(self) -> Any:
        return np.zeros(self.observation_space.shape, self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        return self.observe(), self.reward, self.ends, False, {}


def lamp(**parts: Any) -> Any:
    return type("Lamp", (Lamp,), parts)


def play(folder: Path, make_env: Any, **changes: Any) -> Any:
    """Train a small run with changed options."""
    return train(tiny(folder).with_updates(changes), make_env=make_env)


def refuse(self: Any, action: Any) -> Any:
    assert self.action_space.contains(action), f"{action} is out of bounds"
    return Lamp.step(self, action)


@pytest.mark.parametrize("high", [0.1, 0.1 + 1e-12])
@pytest.mark.parametrize("change", [{"squash": "clip"}, {"squash": "tanh"}, {"rescale": True}])
def test_a_locked_component_of_float64_stays_in_its_bounds(
    tmp_path: Path, change: dict[str, Any], high: float
) -> None:
    """No float32 lies between such bounds."""
    space = Box(np.array([0.1, -0.1]), np.array([high, 0.7]), dtype=np.float64)
    options = {"action.squash": "clip"} | {f"action.{key}": x for key, x in change.items()}
    play(tmp_path, lamp(action_space=space, step=refuse), **options)


ANSWERS = [False, np.bool_(False), True, "Stop", "STOP", {"a": 1.0}, np.zeros(2)]


@pytest.mark.parametrize("method", ["on_iteration", "on_episode"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_callback_returns_stop_or_nothing(tmp_path: Path, answer: Any, method: str) -> None:
    callbacks = type("Mine", (Callbacks,), {method: lambda *_: answer})()
    with pytest.raises(ValueError, match=r"returned .*; expected 'stop' or None"):
        train(tiny(tmp_path), make_env=Lamp, callbacks=callbacks)
    vars(callbacks)[method] = lambda *_: "stop"
    assert train(tiny(tmp_path), make_env=Lamp, callbacks=callbacks).env_steps == 32


class Batch:
    """Two environments, without ends, that return parts of arrays or tensors."""

    single_observation_space: Any = gym.spaces.Dict({"place": VECTOR})
    single_action_space: Any = Discrete(2)
    metadata: Any = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    num_envs = 2

    def __init__(self, has_tensors: bool, has_extra: tuple[bool, bool]) -> None:
        self._convert: Any = torch.from_numpy if has_tensors else np.copy
        self.device, self._has_extra = "cpu" if has_tensors else None, has_extra

    def _observe(self, has_extra: bool) -> Any:
        names = ["place", "speed"] if has_extra else ["place"]
        return {name: self._convert(np.zeros((2, 2), np.float32)) for name in names}

    def reset(self, **_: Any) -> Any:
        return self._observe(self._has_extra[0]), {}

    def step(self, actions: Any) -> Any:
        flags = [self._convert(np.zeros(2, bool)) for _ in range(2)]
        return self._observe(self._has_extra[1]), self._convert(np.ones(2)), *flags, {}

    def close(self) -> None: ...


@pytest.mark.parametrize("has_extra", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("kind", ["Env", "VectorEnv", "Simulator"])
def test_an_entry_that_the_space_lacks_is_a_warning(
    tmp_path: Path, kind: str, has_extra: tuple[bool, bool]
) -> None:
    """The entry comes in the first reset or the first step."""
    batch = Batch(kind == "Simulator", has_extra)

    class Single(Lamp):
        observation_space, ends = batch.single_observation_space, False

        def reset(self, **_: Any) -> Any:
            return {key: part[0] for key, part in batch.reset()[0].items()}, {}

        def step(self, action: Any) -> Any:
            obs = {key: part[0] for key, part in batch.step(action)[0].items()}
            return obs, 1.0, False, False, {}

    maker: Any = {"make_env": Single} if kind == "Env" else {"make_vector_env": lambda _: batch}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(tiny(tmp_path).with_updates({"env.num_envs": 2}), **maker)
    assert sum("'speed'" in str(each.message) for each in caught) == any(has_extra)


@pytest.mark.parametrize("way", ["config.json", "total_env_steps"])
def test_a_longer_run_has_the_same_phases_and_its_rate_is_said(
    tmp_path: Path, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"ppo.schedule": "linear", "log.console": "plain"}
    config = tiny(tmp_path, aux=tiny_aux()).with_updates(changes)
    whole = train(config.with_updates({"total_env_steps": 256}), make_env=corridor)
    run = train(config, make_env=corridor)
    capsys.readouterr()
    if way == "config.json":
        path = run.directory / way
        path.write_text(json.dumps(json.loads(path.read_text()) | {"total_env_steps": 256}))
        resume(run.directory, make_env=corridor, accept_config_changes=True)
    else:
        resume(run.directory, make_env=corridor, total_env_steps=256)
    said = capsys.readouterr().out
    assert re.search("total_env_steps .*; ppo.learning_rate continues at 0.00025", said), said
    phases = [[row["iteration"] for row in each.files.metrics() if "time/auxiliary" in row]
              for each in (whole, run)]  # fmt: skip
    assert phases[0] == phases[1] == [2, 4, 6]


def test_several_flags_in_place_of_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"terminated = array\(.*; expected True or False"):
        play(tmp_path, lamp(ends=np.array([True, False])))


def image(high: float = np.inf, low: float = 0, dtype: Any = np.float32) -> Any:
    return Box(low, high, (12, 12, 3), dtype)


def fill(value: float, space: Any) -> Any:
    """Return images of one value, beside zeros."""
    if isinstance(space, gym.spaces.Dict):
        return {key: fill(value, part) for key, part in space.spaces.items()}
    return np.full(space.shape, value * (len(space.shape) == 3), space.dtype)


MLP, BYTES = {"model.encoder": "mlp"}, image(255, dtype=np.uint8)
FROM_BOUNDS = [image(255), image(254), image(256), image(255, -1), image(65535, dtype=np.uint16)]
FROM_FIRST = [image(), image(low=-np.inf), image(1), image(np.finfo(np.float64).max, 0, np.float64)]
NORM = {"obs_norm.statistics": "moments"}


@pytest.mark.parametrize(("space", "changes", "value"), [
    *((space, IMAGE, 0) for space in FROM_BOUNDS), *((space, IMAGE, 200) for space in FROM_FIRST),
    (image(255), MLP, 0), (image(), MLP, 200), (Box(0, 255, (12, 8), np.uint8), MLP, 0),
    (gym.spaces.Dict(image=image(255), place=VECTOR), IMAGE, 0),
    (gym.spaces.Dict(image=image(255), place=VECTOR), MLP, 0),
    (gym.spaces.Dict(image=image(), place=VECTOR), MLP, 200),
    (gym.spaces.Dict(image=image(255), other=BYTES), IMAGE, 0),
    (gym.spaces.Dict(image=image(1), place=VECTOR), IMAGE, 0),
])  # fmt: skip
@pytest.mark.parametrize("num_dark", [0, 6])
def test_floats_of_bytes_are_refused(
    tmp_path: Path, space: Any, changes: dict[str, Any], value: float, num_dark: int
) -> None:
    """Bounds decide, or observations where bounds are infinite or not kept, also late ones."""
    values = itertools.chain([0] * num_dark, itertools.repeat(value))
    make_env = lamp(observation_space=space, observe=lambda self: fill(next(values), space))
    with pytest.raises(ValueError, match="uint8"):
        play(tmp_path, make_env, **changes)


@pytest.mark.parametrize(("space", "changes", "value"), [
    (image(1), IMAGE, 1), (image(1), IMAGE | NORM, 1), (image(255), IMAGE | NORM, 200),
    (image(10), IMAGE, 10), (image(low=-np.inf), IMAGE, 3), (image(1), MLP, 1),
    (Box(-500, 500, (4, 12, 3), np.float32), MLP, 200), (Box(0, 255, (12,), np.uint8), MLP, 0),
    (Box(0, 255, (12, 5), np.uint8), MLP, 0), (Box(0, 9, (12, 12), np.uint8), MLP, 0),
    (gym.spaces.Dict(image=image(255), place=VECTOR),
     {"model.policy_obs": ("place",), "model.value_obs": ("place",)} | IMAGE, 200),
])  # fmt: skip
def test_other_floats_of_three_axes_are_read(
    tmp_path: Path, space: Any, changes: dict[str, Any], value: float
) -> None:
    play(
        tmp_path, lamp(observation_space=space, observe=lambda self: fill(value, space)), **changes
    )


@pytest.mark.parametrize("words", [
    "evaluate RUN", "video RUN", "export RUN", "resume RUN", "train --from RUN",
    "train --from RUN/config.json", "train --from=RUN/config.json --seed 2",
])  # fmt: skip
def test_a_run_of_a_function_is_used_on_the_command_line(
    tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = play(tmp_path, lambda: CartPoleEnv(sutton_barto_reward=True))
    assert cli.main(words.replace("RUN", str(run.directory)).split()) == 2
    message = capsys.readouterr().err
    assert "--make-env MODULE:FUNCTION" in message and f"make_env={__name__}:" in message


@pytest.mark.parametrize("maker", ["make_env", "make_vector_env"])
def test_options_that_a_function_does_not_get_are_refused(maker: str, tmp_path: Path) -> None:
    objects: Any = {maker: partial(gym.make_vec, "CartPole-v1", vectorization_mode="sync")
                    if maker == "make_vector_env" else CartPoleEnv}  # fmt: skip
    run = train(tiny(tmp_path, total_env_steps=32), **objects)
    with pytest.raises(ValueError, match=r"env_options is \{'nonsense': 1\}; expected none with m"):
        evaluate(run.directory, env_options={"nonsense": 1}, episodes=1, **objects)
    options: Any = {"env_id": "gymnasium:CartPole-v1", "env_options": ["max_episode_steps=9"]}
    with pytest.raises(ValueError, match=r"env_options is \['max_.*; expected none .* a dict"):
        evaluate(run.directory, episodes=1, **options, **objects)
    options["env_options"] = {"max_episode_steps": 9}
    assert max(evaluate(run.directory, episodes=1, **options, **objects)[0].lengths) <= 9


FITS = partial(train, get_preset("cartpole-ppo"))
NOWHERE = Config().with_updates({"env.id": "nowhere"})


def test_own_metrics_are_kept_in_own_loops(tmp_path: Path) -> None:
    with start_run(tiny(tmp_path), make_env=corridor) as run:
        run.collect(run.buffer.next_rollout())
        run.finish_iteration({"own/lines": 7.0})
    assert run.files.metrics()[0]["own/lines"] == 7.0


@pytest.mark.parametrize(("function", "given", "said"), [
    *((function, {name: given}, f"run_dir is of type {type(given).__name__}; expected a path")
      for function, name in ((load, "path"), (evaluate, "run_dir"), (resume, "run_dir"),
                             (RunDirectory, "path"))
      for given in (None, Config(), 3)),
    (load, {"path": "quickstart", "weights": "lst"}, "weights is 'lst'; expected last or best"),
    (evaluate, {"run_dir": "quickstart", "weights": ["last"]}, "weights is .*expected last or"),
    (train, {"config": Config(), "make_env": "a:b"}, "make_env is 'a:b'; expected a function"),
    *((partial(train, NOWHERE), {"resume": given}, r"phasicrl\.resume\(RUN, total_env_steps=")
      for given in ("Auto", "runs/x", Path("runs/x"), True, None)),
    (train, {"config": NOWHERE, "total_env_steps": 9}, r"phasicrl\.resume\(RUN, total_env_st"),
    *((FITS, {x: nn.Linear(4, 2)}, f"{x} is a netw") for x in ("make_encoder", "make_head")),
    (FITS, {"make_encoder": lambda space, features_dim: None}, r"make_encoder\(space\)"),
])  # fmt: skip
def test_slips_in_python_are_answered_with_what_is_right(
    function: Any, given: dict[str, Any], said: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        function(**given)


@pytest.mark.long
def test_the_folder_of_a_sweep_is_taken_where_runs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {
        "ppo.clip": [0.1, 0.2],
        "env.id": ["gymnasium:CartPole-v1"],
        "total_env_steps": [1024],
    }
    (tmp_path / "v.json").write_text(json.dumps(values))

    def call(*words: str) -> str:
        assert cli.main([*words]) == 0
        return "".join(capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    call("sweep", "make", "sweep", "classic-ppo", "--values", "v.json", "--seeds", "1")
    call("sweep", "run", "sweep")
    assert "clip 0.1" in call("compare", "sweep")
    call("plot", "sweep")
    call("report", "sweep")
