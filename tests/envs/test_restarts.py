"""Failed environments are made again up to `env.max_restarts` times: what is cut and counted."""

import csv
import io
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import Config
from phasicrl.envs import processes
from phasicrl.envs.gymnasium import GymnasiumEnv
from phasicrl.envs.protocol import EnvError, TimeStep
from phasicrl.lab.film.recorder import StepTable
from phasicrl.models.distributions import Categorical
from phasicrl.seeding import env_seeds
from phasicrl.training.evaluate import evaluate
from phasicrl.training.evaluation import EpisodeTracker
from tests.envs.acting import make
from tests.helpers import Corridor, assert_same_run, rows_of, stop_at, tiny, tiny_aux

RIGHT = torch.ones(2, dtype=torch.int64)
pytestmark = pytest.mark.filterwarnings("ignore:restart .* of:RuntimeWarning")


class Fragile(Corridor):
    """Environment whose every instance breaks after so many steps, in the way of `by`."""

    def __init__(self, lives: int = 5, by: str = "raising") -> None:
        super().__init__(length=40, limit=50)
        self._left, self._by = lives, by

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        if self._left <= 0 and self._by == "reset":
            raise RuntimeError("the game does not begin")
        obs, info = super().reset(**given)
        return obs + np.float32(self.np_random.random() / 100), info  # tells the seed

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        if self._left < 0:
            if self._by == "dying":
                os._exit(3)
            if self._by == "hanging":
                time.sleep(600)
            if self._by == "raising":
                raise RuntimeError("the game is gone")
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated, truncated | (self._by == "reset" and self._left == 0), info


class OneBreaks:
    """Maker of environments of which the first one for the trainer breaks."""

    def __init__(self, lives: int) -> None:
        self.lives, self.made = lives, 0

    def __call__(self) -> Fragile:
        self.made += 1  # the first is looked at only
        return Fragile(self.lives if self.made == 2 else 10**9)


def restarting_envs(
    make_env: Callable[[], Corridor], max_restarts: int, **more: Any
) -> GymnasiumEnv:
    return make(make_env, num_envs=2, seed=7, max_restarts=max_restarts, **more)


def test_a_fault_cuts_one_episode_and_leaves_the_other_environment_alone() -> None:
    envs, sound = restarting_envs(OneBreaks(3), 1), restarting_envs(partial(Fragile, 10**9), 1)
    assert torch.equal(envs.reset(), sound.reset())
    for _ in range(3):
        before = envs.step(RIGHT)
        assert torch.equal(before.obs, sound.step(RIGHT).obs)
        assert before.info["cut"].tolist() == [False, False]
    with pytest.warns(RuntimeWarning, match=r"restart 1 of 1 .*environment 0, step\(\) at step 4"):
        step = envs.step(RIGHT)
    expected = sound.step(RIGHT)
    assert step.truncated.tolist() == [True, False] and not step.terminated.any()
    assert step.reward.tolist() == [0.0, 1.0]
    assert step.info["cut"].tolist() == [True, False]
    assert step.info["restarts"].tolist() == [1, 0]
    assert step.final_obs is not None
    assert torch.equal(step.final_obs[0], before.obs[0])  # what was seen last
    assert torch.equal(step.obs[1], expected.obs[1])
    # A new environment, with a seed that follows from the old one's.
    (seed,) = env_seeds(env_seeds(7, 2)[0], 1)
    begun, _ = Fragile().reset(seed=seed)
    np.testing.assert_array_equal(step.obs[0], begun)
    envs.close()
    sound.close()


class Saved(Fragile):
    def get_state(self) -> Any:
        return self._at, self._steps

    def set_state(self, state: Any) -> Any:
        self._at, self._steps = state
        return self._obs(), {}


def test_a_fault_after_a_resume_cuts_the_episode_at_what_was_seen_last() -> None:
    envs, again = (restarting_envs(partial(Saved, lives), 2) for lives in (9, 0))
    envs.reset()
    before, state = envs.step(RIGHT), envs.state_dict()
    assert state is not None and torch.equal(again.load_state_dict(state), before.obs)
    step = again.step(RIGHT)
    assert step.final_obs is not None and torch.equal(step.final_obs, before.obs)


def test_restarts_of_all_begin_new_episodes_also_after_a_resume() -> None:
    faults: list[str] = []

    class Failing(Fragile):
        def step(self, action: np.int64) -> Any:
            fault = faults.pop() if faults else ""
            obs, _, *rest = super().step(action)
            if fault == "of one":
                raise RuntimeError("the game is gone")
            return obs, math.nan if fault else 1.0, *rest

    def restart(envs: GymnasiumEnv, fault: str) -> torch.Tensor:
        faults.append(fault)
        return envs.step(RIGHT).obs

    envs, again = (restarting_envs(partial(Failing, 10**9), 9) for _ in range(2))
    first = [envs.reset(), restart(envs, "of one")[:1], restart(envs, "of all")]
    state = envs.state_dict()
    last = restart(envs, "of all")
    assert len(torch.cat([*first, last]).unique(dim=0)) == 7
    assert state is not None and torch.equal(again.load_state_dict(state), first[-1])
    assert torch.equal(restart(again, "of all"), last)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_the_fault_after_the_last_restart_is_raised(max_restarts: int) -> None:
    envs = restarting_envs(partial(Fragile, 1), max_restarts)
    envs.reset()
    envs.step(RIGHT)
    if max_restarts:
        envs.step(RIGHT)  # both at once
        envs.step(RIGHT)
    with pytest.raises(EnvError, match=r"RuntimeError: the game is gone"):
        envs.step(RIGHT)


def test_a_fault_in_a_reset_is_answered_once() -> None:
    """The second instance begins; one that could not even do that would end the run."""
    envs = restarting_envs(partial(Fragile, 2, "reset"), 2)
    envs.reset()
    envs.step(RIGHT)
    step = envs.step(RIGHT)
    assert step.truncated.all() and step.info["restarts"].tolist() == [1, 1]
    # The episode had ended by itself: it counts.
    assert step.reward.tolist() == [1.0, 1.0] and not step.info["cut"].any()
    envs.close()
    envs = restarting_envs(partial(Fragile, 2, "reset"), 0)
    envs.reset()
    envs.step(RIGHT)
    with pytest.raises(EnvError, match=r"reset\(\) at step 2.*the game does not begin"):
        envs.step(RIGHT)


def test_what_never_begins_is_an_error_in_spite_of_restarts() -> None:
    class Broken(Fragile):
        def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
            if self._seen:
                raise RuntimeError("the game never begins")
            Broken._seen = True  # by the look at the spaces and masks
            return super().reset(**given)

        _seen = False

    with pytest.raises(EnvError, match=r"reset\(\) at step 0.*the game never begins"):
        restarting_envs(Broken, 9).reset()


def test_a_number_that_is_not_usable_cuts_all_episodes() -> None:
    class Spoiled(Fragile):
        def step(self, action: np.int64) -> Any:
            obs, reward, *rest = super().step(action)
            return obs, np.nan if self._left == 0 else reward, *rest

    envs = restarting_envs(partial(Spoiled, 2, "nan"), 1)
    envs.reset()
    before = envs.step(RIGHT)
    with pytest.warns(RuntimeWarning, match=r"restart 1 of 1.*a reward that is not finite"):
        step = envs.step(RIGHT)
    assert step.truncated.all() and step.info["cut"].all() and step.reward.tolist() == [0.0, 0.0]
    assert step.final_obs is not None and torch.equal(step.final_obs, before.obs)
    envs.step(RIGHT)
    with pytest.raises(EnvError, match="a reward that is not finite"):
        envs.step(RIGHT)


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "words"), [("dying", r"exit code 3\)$"), ("hanging", "within 15 s")]
)
def test_a_process_that_dies_or_hangs_cuts_all_episodes(
    by: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "CALL_TIMEOUT", 15)
    envs = restarting_envs(partial(Fragile, 2, by), 1, mode="async")
    first = envs.reset()
    envs.step(RIGHT)
    before = envs.step(RIGHT)
    with pytest.warns(RuntimeWarning, match=words):
        step = envs.step(RIGHT)
    assert step.truncated.all() and not step.terminated.any() and step.info["cut"].all()
    assert step.final_obs is not None and torch.equal(step.final_obs, before.obs)
    assert step.reward.tolist() == [0.0, 0.0]
    assert not torch.equal(step.obs, first)  # other seeds
    envs.step(RIGHT)
    envs.step(RIGHT)
    with pytest.raises(EnvError, match=words):
        envs.step(RIGHT)


def restarting(tmp_path: Path, **changes: Any) -> Config:
    config = tiny(tmp_path, total_env_steps=128, aux=tiny_aux(every=2))
    return config.with_updates({"env.max_restarts": 1000, **changes})


def test_a_run_continues_and_counts_restarts(tmp_path: Path) -> None:
    """Every environment breaks in every 6th step: 21 times in 128, before any episode finishes."""
    config = restarting(tmp_path)
    rows = rows_of(train(config, make_env=partial(Fragile, 5)).files)
    num_envs = config.env.num_envs
    assert sum(row["charts/env_restarts"] for row in rows) == num_envs * (128 // num_envs // 6)
    assert sum(row["charts/num_episodes"] for row in rows) == 0
    plain = restarting(tmp_path / "plain", **{"env.max_restarts": 0})
    plain = train(plain, make_env=partial(Fragile, 10**9))
    assert all("charts/env_restarts" not in row for row in rows_of(plain.files))


def test_a_resumed_run_that_was_restarted_is_the_unbroken_one(tmp_path: Path) -> None:
    """The run stops after a restart, and seeds of later restarts follow from earlier ones.

    Instances that are made for a resume play the episodes under way again, so they break later:
    here faults come from the actions.
    """

    class Picky(Fragile):
        def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            if self._steps >= 3 and action == 0:
                raise RuntimeError("this way is closed")
            return super().step(action)

    make_env = partial(Picky, 10**9)
    whole = train(restarting(tmp_path / "whole"), make_env=make_env)

    part = train(restarting(tmp_path / "part"), make_env=make_env, callbacks=stop_at(2))
    assert sum(row["charts/env_restarts"] for row in rows_of(part.files)) > 0
    part = resume(part.directory, make_env=make_env)
    assert_same_run(whole, part)


def test_an_evaluation_counts_whole_episodes_only(tmp_path: Path) -> None:
    """The one that breaks reaches 3 steps; its environment then plays a whole one in its place."""
    config = tiny(tmp_path, total_env_steps=32).with_updates({"env.max_restarts": 9})
    run = train(config, make_env=partial(Fragile, 10**9))
    path = tmp_path / "steps.csv"
    found = evaluate(run.directory, episodes=2, make_env=OneBreaks(3), steps_file=path)
    assert all(min(each.lengths) >= 39 for each in found)
    rows = Counter(row["policy"] for row in csv.DictReader(path.read_text().splitlines()))
    assert rows == {each.policy: sum(each.lengths) for each in found}


def test_a_table_of_one_episode_has_the_first_that_counts() -> None:
    """Episodes of two steps; the first one of the first environment is cut."""
    text, tracker = io.StringIO(newline=""), EpisodeTracker(2, 4)
    table, none = StepTable(text, only_first=True), torch.zeros(2, dtype=torch.bool)
    policy = Categorical(torch.full((2, 1, 2), 0.5).log())
    for number in range(6):
        ended, cut = none | (number % 2 == 1), torch.tensor([number == 1, False])
        reward = torch.tensor([number, 9.0])
        step = TimeStep(
            obs=torch.zeros(2, 1), reward=reward, terminated=ended & ~cut, truncated=cut,
            info={"cut": cut},
        )  # fmt: skip
        tracker.returns += reward
        table.add("unseen", "greedy", policy, torch.zeros(2, 1), step, tracker)
        tracker.finish_episodes(ended, cut)
    rows = csv.DictReader(text.getvalue().splitlines())
    assert [(row["reward"], row["episode"]) for row in rows] == [("2.0", "1"), ("3.0", "1")]


@pytest.mark.long
def test_a_process_that_dies_between_two_steps_is_noticed_by_the_next(tmp_path: Path) -> None:
    """Before that step the episodes have no state that could be saved."""
    envs = restarting_envs(partial(Fragile, 10**9), 1, mode="async")
    envs.reset()
    before, process = envs.step(RIGHT), envs._vector.processes[1]
    process.kill()
    process.join()
    assert envs.state_dict() is None
    with pytest.warns(RuntimeWarning, match=r"restart 1 of 1.*environment 1 died .*-9"):
        step = envs.step(RIGHT)
    assert step.info["cut"].all() and step.final_obs is not None
    assert torch.equal(step.final_obs, before.obs)
    assert envs.state_dict() is not None
    envs.close()


class DiesAtFirst(Fragile):
    """Environment that dies in a step, and whose next instance dies in its first reset."""

    def __init__(self, log: Path) -> None:
        super().__init__(2, "dying")
        self._log = log

    def reset(self, **given: Any) -> tuple[np.ndarray, dict[str, Any]]:
        with self._log.open("a") as file:
            file.write("x")
        if self._log.stat().st_size == 3:  # looked at; the first of its life; the next
            os._exit(4)
        if self._log.stat().st_size > 3:
            self._left = 10**9
        return super().reset(**given)


@pytest.mark.long
def test_a_second_death_during_a_restart_is_counted(tmp_path: Path) -> None:
    envs = make(partial(DiesAtFirst, tmp_path / "log"), "async", num_envs=1, max_restarts=2)
    envs.reset()
    envs.step(RIGHT[:1])
    envs.step(RIGHT[:1])
    assert envs.step(RIGHT[:1]).info["restarts"].tolist() == [2]
    assert envs.step(RIGHT[:1]).info["restarts"].tolist() == [0]
    envs.close()


def test_an_environment_is_not_restarted_during_replay() -> None:
    """A restarted one would be in another state, unnoticed."""
    envs = restarting_envs(partial(Fragile, 3), 5)
    envs.reset()
    for _ in range(3):
        envs.step(RIGHT)
    state = envs.state_dict()
    assert state is not None
    twin = restarting_envs(partial(Fragile, 2), 5)
    with pytest.raises(EnvError, match="the game is gone"):
        twin.load_state_dict(state)
