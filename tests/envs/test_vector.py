"""Vector environments of a user's own.

Every autoreset mode gives the same steps, and what is refused, in words.
"""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

from phasicrl.algorithm import resume, train
from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.training.evaluate import evaluate
from tests.envs import counting
from tests.envs.acting import NEVER, check_known_episodes, check_known_masks, draw_action
from tests.envs.counting import Counting, MaskedInFlatInfo, MaskedInInfo, PlainCounting, Structured
from tests.helpers import Corridor, stop_at, tiny

MODES, NEXT = list(AutoresetMode), {"autoreset_mode": "NextStep"}


def make(make_vector_env: Any, num_envs: int = 3, **settings: Any) -> VectorEnv:
    config = EnvConfig(id="mine", num_envs=num_envs, **settings)
    return make_envs(config, seed=1, make_vector_env=make_vector_env)


def sync(
    kind: type[gym.Env[Any, Any]] = PlainCounting, mode: AutoresetMode = AutoresetMode.SAME_STEP
) -> MakeVectorEnv:
    return lambda num_envs: SyncVectorEnv([kind] * num_envs, autoreset_mode=mode)


@pytest.mark.parametrize("of_processes", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_known_episodes_whole(mode: AutoresetMode, of_processes: bool) -> None:
    """Every step of every episode of `PlainCounting` is there once, with the right flags, ends and
    last observations, and no other row.
    """
    kind = AsyncVectorEnv if of_processes else SyncVectorEnv
    check_known_episodes(make(lambda n: kind([PlainCounting] * n, autoreset_mode=mode)))


@pytest.mark.parametrize("mode", MODES)
def test_masks_are_those_of_the_observations_returned(mode: AutoresetMode) -> None:
    check_known_masks(make(sync(MaskedInFlatInfo, mode)))


def test_environments_of_an_unknown_kind_are_left_alone() -> None:
    foreign = type("Foreign", (VectorWrapper,), {"envs": [0], "unwrapped": property(lambda x: x)})
    check_known_masks(make(lambda n: foreign(sync(MaskedInFlatInfo)(n))))


@pytest.mark.parametrize("kind", [PlainCounting, Structured])
def test_no_more_is_used_than_necessary(kind: type[gym.Env[Any, Any]]) -> None:
    """A duck, whose `info` may be None and has last observations as one batch or a list."""

    class Duck:
        def __init__(self, num_envs: int) -> None:
            self._vector = sync(kind)(num_envs)
            spaces = "single_observation_space", "single_action_space"
            for name in ("num_envs", *spaces, "metadata", "close"):
                setattr(self, name, getattr(self._vector, name))

        def reset(self, **options: Any) -> Any:
            return self._vector.reset(**options)[0], None

        def step(self, actions: Any) -> Any:
            *rest, info = self._vector.step(actions)
            if "final_obs" in info:
                finals = [np.zeros(3) if row is None else row for row in info["final_obs"]]
                return *rest, {"final_obs": np.stack(finals) if kind is PlainCounting else finals}
            return *rest, None

    duck, plain = make(Duck), make(sync(kind))
    action = draw_action(plain, np.random.default_rng(1))
    assert torch.equal(duck.reset(), plain.reset())
    for _ in range(20):
        one, other = duck.step(action), plain.step(action)
        assert torch.equal(one.obs, other.obs)
        assert (one.final_obs is None) == (other.final_obs is None)
        if one.final_obs is not None and other.final_obs is not None:
            done = one.terminated | one.truncated
            assert torch.equal(one.final_obs[done], other.final_obs[done])


def test_an_environment_that_cannot_reset_some_alone_is_refused_at_the_first_end() -> None:
    vectorization: Any = "vector_entry_point"
    envs = make(lambda num_envs: gym.make_vec("CartPole-v1", num_envs, vectorization))
    envs.reset()
    with pytest.raises(EnvError, match=r"mine: step\(\) .*SyncVectorEnv"):
        for _ in range(50):
            envs.step(NEVER)


def changed(**attributes: Any) -> MakeVectorEnv:
    """Return a maker of environments with changed attributes."""

    def made(num_envs: int) -> Any:
        vector = sync()(num_envs)
        for name, value in attributes.items():
            setattr(vector, name, value)
        return vector

    return made


def answering(index: int, value: Any) -> MakeVectorEnv:
    """Return a maker of environments whose step returns something else at a place."""

    class Answers(gym.vector.VectorWrapper):
        def step(self, actions: Any) -> Any:
            result = list(super().step(actions))
            result[index] = value(result) if callable(value) else value
            return tuple(result)

    return lambda num_envs: Answers(sync()(num_envs))


def broken(num_envs: int) -> Any:
    raise RuntimeError("no licence")


unshared = changed(shared_memory=False, metadata=NEXT)
NANS, ROWS, TEXT = np.full((3, 3), np.nan), np.ones((3, 3)), gym.spaces.Text(5)
REFUSED: dict[str, tuple[Any, str]] = {
    "no function": (3, "make_vector_env"),
    "no environment": (lambda num_envs: object(), "returned a object with num_envs None"),
    "a single one": (lambda num_envs: Counting(), "returned a Counting with num_envs None"),
    "no device": (lambda n: SimpleNamespace(num_envs=n), "SimpleNamespace without a device; exp"),
    "too few": (lambda num_envs: sync()(num_envs - 1), "with num_envs 2; expected .* 3"),
    "resets twice": (unshared, "is NextStep without shared_m"),
    "resets twice, wrapped": (lambda n: VectorWrapper(unshared(n)), "is NextStep without shared_m"),
    "no space": (changed(single_action_space=None), "action_space is None; expected Discrete"),
    "no mode": (changed(metadata={}), r"metadata\['autoreset_mode'\] .*None is not a"),
    "spaces": (changed(single_observation_space=TEXT), "observation_space is Text.*; expected Box"),
    "raises": (broken, "RuntimeError: no licence"),
    "masks": (sync(MaskedInInfo), r"returned action masks of shape .*; expected \(3, 7\)"),
    "masks by a method": (sync(counting.MaskedByMethod), "no 'action_mask' in info"),
    "late masks": (answering(4, {"action_mask": np.ones((3, 7))}), r"that reset\(\) did not"),
    "masks by another name": (answering(4, {"action_masks": np.ones((3, 7))}), "'action_masks' in"),
    "not finite": (answering(0, NANS), r"environment 0, step\(\) at step 1 returned an obs"),
    "shape": (answering(0, np.zeros((3, 2))), r"returned an observation of shape \(2,\)"),
    "reward": (answering(1, np.array([0, np.inf, 0], "e")), "environment 1, .* returned a reward"),
    "reward beyond float32": (answering(1, np.array([0, 1e300, 0])), r"too large .*1\.e\+300"),
    "flags": (answering(2, np.zeros(2)), r"\(3,\), float64 \(2,\), .* reward and flags"),
    "half a flag": (answering(3, np.full(3, 0.5)), "float64 .*and 0 or 1 as a flag"),
    "ragged": (answering(0, [[1], [1, 2], [1]]), r"observation of shape \(\); expected \(3,\)"),
    "ragged reward": (answering(1, [1, [1, 2], 1]), r"returned object \(3,\), .* as reward"),
    "text": (answering(1, ["1", "2", "3"]), r"returned <U1 \(3,\), .* as reward and flags"),
    "too large": (answering(0, np.full((3, 3), -1e300)), r"1e\+300.*; expected at most .*float32"),
    "info of a list": (answering(4, [1]), r"returned info \[1\] of type list; expected a dict"),
    "no final_obs": (answering(4, {}), r"environment \d .*info\['final_obs'\] None; expected"),
    "obs itself": (answering(4, lambda now: {"final_obs": now[0]}), "of obs; expected a copy"),
    "rows of obs": (answering(4, lambda x: {"final_obs": [*x[0]]}), "of obs; expected a copy"),
    "old name": (answering(4, {"final_observation": ROWS}), r"'final_obs'.*'final_observation'"),
}
FINALS: dict[str, tuple[Any, str]] = {
    "ended ones only": (lambda ended: ROWS[ended], r"shape \(1, 3\)"),
    "ended ones as objects": (lambda ended: np.array([None, *ROWS], object)[1:][ended], "array"),
    "dictionary": (lambda ended: {"obs": ROWS}, "'obs'"),
    "None": (lambda ended: None, "None"),
    "only None": (lambda ended: np.array([None] * 3), "None"),
    "wrong shape": (lambda ended: ROWS[:, :1], r"shape \(3, 1\)"),
    "number": (lambda ended: 0.0, r"0\.0"),
    "text": (lambda ended: np.full((3, 3), "one"), r"shape \(3, 3\)"),
    "too large": (lambda ended: np.full((3, 3), 1e300), r"shape \(3, 3\)"),
    "too large objects": (lambda ended: np.array([*ROWS * 1e300, 0], object)[:3], "array"),
    "complex": (lambda ended: ROWS + 0j, r"shape \(3, 3\)"),
}
WHY = {"too large": "1e.300; expected at most .*float32", "text": "of dtype <U3; expected",
       "too large objects": "1e.300; expected at most .*float32",
       "complex": "of dtype complex128; expected"}  # fmt: skip
"""Words in the errors of some cases, besides the name and the value."""


@pytest.mark.parametrize("case", FINALS)
def test_final_observations_in_a_wrong_form_are_named(case: str) -> None:
    form, given = FINALS[case]

    class Wrong(gym.vector.VectorWrapper):
        def step(self, actions: Any) -> Any:
            *result, info = super().step(actions)
            ended = result[2] | result[3]
            return *result, ({"final_obs": form(ended)} if ended.any() else info)

    envs = make(lambda num_envs: Wrong(sync()(num_envs)))
    envs.reset()
    with pytest.raises(EnvError) as caught:
        for _ in range(6):
            envs.step(NEVER)
    assert re.search(rf"^mine.*environment \d.*'final_obs'.*{given}.*Box\(", str(caught.value))
    assert re.search(WHY.get(case, r"no episode ended(;| \(an obs)"), str(caught.value))


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    make_vector_env, message = REFUSED[case]
    with pytest.raises(ValueError if "space" in case else EnvError, match=f"^mine: .*{message}"):
        envs = make(make_vector_env)
        envs.reset()
        for _ in range(6):
            envs.step(NEVER)


def test_a_close_that_raises_is_a_warning() -> None:
    class Sticky(gym.vector.VectorWrapper):
        def close(self, **_: Any) -> None:
            raise RuntimeError("no connection")

        def __del__(self) -> None:
            self.env.close()

    envs = make(lambda num_envs: Sticky(sync()(num_envs)))
    envs.reset()
    with pytest.warns(RuntimeWarning, match=r"mine: close\(\).*RuntimeError: no connection"):
        envs.close()


def test_masks_can_be_left_unread() -> None:
    envs = make(sync(MaskedInFlatInfo), action_masks=False)
    envs.reset()
    assert envs.mask_size == 0 and envs.action_mask is None


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP])
def test_a_run_trains_resumes_and_is_evaluated(mode: AutoresetMode, tmp_path: Path) -> None:
    config = tiny(tmp_path, total_env_steps=64)
    own: Any = {"make_vector_env": sync(Corridor, mode)}
    run = train(config, **own)
    assert run.env_steps == 64
    with pytest.raises(ValueError, match=r"with make_vector_env=.*make_env=… or make_vector_env=…"):
        resume(run.directory)
    assert resume(run.directory, **own).env_steps == 64
    (result,) = evaluate(run.directory, episodes=5, policies=("sampled",), **own)
    assert len(result.returns) == 5
    begun = train(replace(config, seed=4), make_env=Corridor, callbacks=stop_at(1))
    assert resume(begun.directory, **own).env_steps == 64, "with new episodes"


def test_each_process_resets_with_another_seed() -> None:
    reset = SyncVectorEnv.reset
    with patch.object(SyncVectorEnv, "reset", autospec=True, side_effect=reset) as seen:
        for first in (0, 2):
            config = EnvConfig(id="mine", num_envs=4)
            make_envs(config, seed=1, first_index=first, num_envs=2, make_vector_env=sync())
    seeds = [call.kwargs["seed"] for call in seen.call_args_list]
    assert len({*seeds}) == len(seeds) == 2
