"""Callbacks: when they are called, what they are given, and what an error in one leaves."""

import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasicrl import Callbacks
from phasicrl.algorithm import resume, train
from phasicrl.episodes import Episode
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.run import Run
from tests.helpers import assert_same, corridor, tiny, tiny_aux


class Recorder(Callbacks):
    """Callbacks that note every call with its step, log a number, and stop or fail on demand."""

    def __init__(self, *, stop_at: int = 0, fail_in: str = "") -> None:
        self.stop_at, self.fail_in = stop_at, fail_in
        self.calls: list[tuple[str, int]] = []
        self.episodes: list[list[Episode]] = [[]]
        self.saved_at_end: list[int] = []

    def _note(self, run: Run, name: str) -> None:
        self.calls.append((name, run.env_steps))
        run.log({f"own/{name}": len(self.calls)})
        if name == self.fail_in:
            raise KeyError("my tracker is full")

    def on_start(self, run: Run) -> None:
        self._note(run, "on_start")

    def on_episode(self, run: Run, episode: Episode) -> None:
        self._note(run, "on_episode")
        self.episodes[-1].append(episode)

    def on_iteration(self, run: Run, record: dict[str, float]) -> Any:
        self._note(run, "on_iteration")
        self.episodes.append([])
        return "stop" if run.iteration == self.stop_at else None

    def on_end(self, run: Run) -> None:
        self._note(run, "on_end")
        self.saved_at_end.append(len(run.files.checkpoints))

    @property
    def order(self) -> list[tuple[str, int]]:
        return [call for call in self.calls if call[0] != "on_episode"]


def test_callbacks_are_called_in_order_also_after_a_stop_and_a_resume(tmp_path: Path) -> None:
    first, second, third = Recorder(stop_at=2), Recorder(), Recorder()
    run = train(tiny(tmp_path), make_env=corridor, callbacks=first)
    steps = [("on_iteration", 32), ("on_iteration", 64)]
    assert first.order == [("on_start", 0), *steps, ("on_end", 64)]
    assert first.saved_at_end == [0] and len(run.files.checkpoints) == 1
    resume(run.directory, make_env=corridor, callbacks=second)
    steps = [("on_iteration", 96), ("on_iteration", 128)]
    assert second.order == [("on_start", 64), *steps, ("on_end", 128)]
    again = resume(run.directory, make_env=corridor, callbacks=third)  # a finished run
    assert third.calls == []
    # Each row holds the last number that was logged in its iteration, and those of `on_end`.
    rows = again.files.metrics()
    for name, of_rows in (("start", (0, 2)), ("iteration", range(4)), ("end", (1, 3))):
        assert [index for index, row in enumerate(rows) if f"own/on_{name}" in row] == [*of_rows]
    assert rows[1]["own/on_end"] == len(first.calls) and rows[2]["own/on_start"] == 1


@pytest.mark.parametrize("aux", [None, tiny_aux(every=2)])
def test_on_episode_gets_the_episodes_of_the_metrics(tmp_path: Path, aux: Any) -> None:
    seen = Recorder()
    run = train(tiny(tmp_path, aux=aux), make_env=corridor, callbacks=seen)
    rows = run.files.metrics()
    assert len(rows) == 4 and sum(map(len, seen.episodes)) > 8
    for row, episodes in zip(rows, seen.episodes, strict=False):
        assert row["charts/num_episodes"] == len(episodes)
        returns, lengths = zip(*(episode[:2] for episode in episodes), strict=True)
        assert row["charts/episodic_return"] == np.mean(returns)
        assert row["charts/episodic_length"] == np.mean(lengths)
    # The reward is at the end, and the limit nine steps.
    for episode in itertools.chain(*seen.episodes):
        assert episode.terminated == (episode.total_reward == 1) and episode.env_index in range(4)
        assert episode.terminated or episode.length == 9
    plain = train(tiny(tmp_path / "plain", aux=aux), make_env=corridor)
    assert_same(run.agent.state_dict(), plain.agent.state_dict())


@pytest.mark.parametrize(
    ("name", "saved"), [("on_start", 0), ("on_episode", 32), ("on_iteration", 32), ("on_end", 128)]
)
def test_an_error_in_a_callback_loses_no_iteration(tmp_path: Path, name: str, saved: int) -> None:
    failing = Recorder(fail_in=name)
    with pytest.raises(KeyError, match="my tracker is full"):
        train(tiny(tmp_path), make_env=corridor, callbacks=failing)
    (folder,) = tmp_path.iterdir()
    assert RunDirectory(folder).checkpoints[-1].name.endswith(f"{saved:03}")
    with pytest.raises(KeyError):
        resume(folder, make_env=corridor, callbacks=failing)
    after = Recorder()
    run = resume(folder, make_env=corridor, callbacks=after)
    assert after.order[-1] == ("on_end", 128) and run.env_steps == 128
    assert [row["iteration"] for row in run.files.metrics()] == [1, 2, 3, 4]


class ZeroAtEnd(Recorder):
    """Callbacks that set all weights to zero at the end, and note their sum at the start."""

    def on_start(self, run: Run) -> None:
        self.sum_at_start = sum(each.abs().sum().item() for each in run.agent.parameters())

    def on_end(self, run: Run) -> None:
        self._note(run, "on_end")
        for each in run.agent.parameters():
            each.data.zero_()


@pytest.mark.parametrize(("stop_at", "fail_in"), [(0, ""), (2, ""), (0, "on_end")])
def test_a_checkpoint_at_the_last_step_has_what_on_end_did(
    tmp_path: Path, stop_at: int, fail_in: str
) -> None:
    config = tiny(tmp_path).with_updates({"checkpoint.every_iterations": 1})
    callbacks = ZeroAtEnd(stop_at=stop_at, fail_in=fail_in)
    with pytest.raises(KeyError) if fail_in else nullcontext():
        train(config, make_env=corridor, callbacks=callbacks)
    (folder,) = tmp_path.iterdir()
    if fail_in:  # mended, and run again
        resume(folder, make_env=corridor, callbacks=ZeroAtEnd())
    after = ZeroAtEnd()
    run = resume(folder, make_env=corridor, callbacks=after, total_env_steps=160)
    assert after.sum_at_start == 0 and run.env_steps == 160
    assert run.files.metrics()[(stop_at or 4) - 1]["own/on_end"] > 0


@pytest.mark.parametrize("method", ["on_start", "on_end"])
@pytest.mark.parametrize("answer", [False, "stop"])
def test_an_answer_of_on_start_or_end_is_refused(tmp_path: Path, method: str, answer: Any) -> None:
    callbacks: Any = type("Answers", (Callbacks,), {method: lambda *_: answer})()
    with pytest.raises(ValueError, match=f"{method} returned {answer!r}; expected None"):
        train(tiny(tmp_path), make_env=corridor, callbacks=callbacks)
    (folder,) = tmp_path.iterdir()
    assert resume(folder, make_env=corridor).env_steps == 128


@pytest.mark.parametrize("given", [Recorder, [Recorder()], "stop", [], {}, 0, False, ""])
def test_callbacks_are_an_object_or_a_function(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ValueError, match=r"callbacks is .*; expected a Callbacks\(\) or a"):
        train(tiny(tmp_path), make_env=corridor, callbacks=given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["on_step", "on_iterations"])
def test_a_method_that_nothing_calls_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine.{name} is never called; expected on_start, on_ep"):
        type("Mine", (type("Mixin", (), {name: print}), Callbacks), {})
    below = type("Below", (Recorder,), {"on_end": lambda *_: None, "_on_step": print, "on_gpu": 4})
    assert issubclass(below, Callbacks)
