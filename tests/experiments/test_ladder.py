"""The ladder: each rung adds exactly its trick; no run is repeated; table and figure."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phasicrl.config import Config, Task, field_paths
from phasicrl.experiments import ladder
from phasicrl.experiments.evaluate import Evaluation
from phasicrl.experiments.ladder import TRICKS, Rung, Trick, draw_ladder, run_ladder, rungs
from phasicrl.presets import get_preset

BASE = get_preset("classic-ppo").changed({"reward_norm": None})


def flat(config: Config) -> dict[str, Any]:
    """Groups that are off or on count as one field."""
    tree, found = dataclasses.asdict(config), {}
    for path in field_paths():
        group, _, name = path.partition(".")
        is_one = not name or group in ("obs_norm", "value_norm")
        found[path] = tree[group] if is_one else (tree[group] or {}).get(name)
    return found


def difference(before: Config, after: Config) -> set[str]:
    old, new = flat(before), flat(after)
    return {
        path.split(".")[0] if path.startswith(("obs_norm", "value_norm")) else path
        for path in old
        if old[path] != new[path]
    }


EVERYTHING = Task(has_masks=True, has_floats=True)
UNSCALED = {"model.policy_head_scale", "model.value_head_scale", "ppo.value_epochs"}
"""Knobs of the base without effect, and at their defaults, on some rungs.

They need a baseline, or weights that are drawn to scale.
"""


def test_each_rung_changes_the_fields_of_its_trick_and_no_others() -> None:
    steps = rungs(BASE, task=EVERYTHING)
    assert [name for name, _ in steps] == ["REINFORCE", *(f"+ {trick.name}" for trick in TRICKS)]
    for (_, below), (name, above), trick in zip(steps, steps[1:], TRICKS, strict=False):
        changed = difference(below, above)
        assert changed - UNSCALED and changed <= set(trick.on) | UNSCALED, name
    bottom = steps[0][1]
    assert (bottom.ppo.objective, bottom.ppo.baseline, bottom.ppo.estimator, bottom.ppo.clip) == (
        "log_prob",
        False,
        "monte_carlo",
        None,
    )
    assert (bottom.ppo.policy_epochs, bottom.ppo.num_minibatches, bottom.ppo.advantage_norm) == (
        1,
        1,
        "none",
    )
    assert (
        bottom.obs_norm
        is bottom.value_norm
        is bottom.ppo.max_grad_norm
        is bottom.reward_norm
        is None
    )


def test_the_top_of_the_ladder_is_everything_and_each_other_run_lacks_one_trick() -> None:
    top = rungs(BASE, task=EVERYTHING)[-1][1]
    alone = rungs(BASE, mode="leave-one-out", task=EVERYTHING)
    assert alone[0] == ("everything", top)
    for (name, config), trick in zip(alone[1:], TRICKS, strict=True):
        assert name == f"without {trick.name}"
        assert difference(top, config) and difference(top, config) <= set(trick.off) | UNSCALED, (
            name
        )
    assert (top.model.policy_head_scale, top.model.value_head_scale) == (0.01, 1.0)
    scales = {name: config.model.value_head_scale for name, config in alone}
    others = {name: scale for name, scale in scales.items() if scale != 1.0}
    assert others == {"without baseline": 0.1, "without initialization": 0.1}


def test_without_masks_there_is_no_rung_for_them() -> None:
    task = Task(has_masks=False, has_floats=True)
    assert rungs(BASE, task=task)[-1][0] == "+ entropy bonus" and len(
        rungs(BASE, mode="leave-one-out", task=task)
    ) == len(TRICKS)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_members_of_a_set_need_no_normalization_and_the_ladder_runs_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave_one_out: bool
) -> None:
    trained: list[Config] = []
    monkeypatch.setattr(
        ladder, "_trained", lambda trial: (trained.append(trial.config), (1.0, 2.0))[1]
    )
    said: list[str] = []
    found = run_ladder(
        "gymnasium:Taxi-v4",
        seeds=1,
        leave_one_out=leave_one_out,
        output_dir=tmp_path,
        say=said.append,
    )
    effect = "it has no effect without real numbers among the observations"
    assert said == [f"state normalization is left out: {effect}"]
    names = [rung.name for rung in found]
    assert len(names) == len(trained) == len(TRICKS) and not any("state" in name for name in names)
    assert names[-1].endswith("action masking")  # Taxi says which actions do something
    assert all(config.obs_norm is None for config in trained)


def test_taxi_is_trained_with_its_last_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "TRICKS", TRICKS[5:6] + TRICKS[-1:])
    # An untrained one takes long.
    monkeypatch.setattr(
        ladder, "evaluate", lambda *_, **__: [Evaluation("greedy", (-200.0,), (200,))]
    )
    found = run_ladder("gymnasium:Taxi-v4", seeds=1, total_env_steps=1024, output_dir=tmp_path)
    assert [rung.name for rung in found] == ["REINFORCE", "+ action masking"]


def test_every_rung_is_checked_before_the_first_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = Trick(
        "memory",
        {"model.memory": "lstm", "ppo.minibatch_by": "segments", "action.squash": "clip"},
        {"action.squash": "none"},
    )
    monkeypatch.setattr(ladder, "missing", lambda trick, task: None)
    monkeypatch.setattr(ladder, "TRICKS", (*TRICKS[:2], last))
    monkeypatch.setattr(ladder, "train", lambda config: pytest.fail("a rung was trained"))
    with pytest.raises(
        ValueError,
        match=r"rung '\+ memory' cannot be trained: .*action.squash is clip, which has no effect",
    ):
        run_ladder("gymnasium:CartPole-v1", seeds=1, output_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_trains_every_rung_once_and_writes_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "TRICKS", TRICKS[:1] + TRICKS[-1:])
    told: list[tuple[str, int]] = []
    trained: list[str] = []
    original = ladder.train
    monkeypatch.setattr(
        ladder, "train", lambda config: (trained.append(config.name), original(config))[1]
    )

    def run(seeds: int) -> list[Rung]:
        told.clear()
        return run_ladder(
            "gymnasium:CartPole-v1",
            seeds=seeds,
            total_env_steps=1024,
            output_dir=tmp_path,
            on_run=lambda name, seed, _: told.append((name, seed)),
        )

    first = run(1)
    assert [rung.name for rung in first] == ["REINFORCE", "+ baseline"] and len(trained) == 2
    second = run(2)
    assert (
        told == [("REINFORCE", 1), ("REINFORCE", 2), ("+ baseline", 1), ("+ baseline", 2)]
        and len(trained) == 4
    )
    assert [rung.greedy[0] for rung in first] == [rung.greedy[0] for rung in second]
    with (tmp_path / "ladder.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rung"], int(row["seeds"]), float(row["greedy_mean"])) for row in rows] == [
        (rung.name, 2, pytest.approx(sum(rung.greedy) / 2)) for rung in second
    ]


def test_runs_in_processes_reach_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "TRICKS", TRICKS[-1:])
    found = [
        run_ladder(
            "gymnasium:CartPole-v1",
            seeds=1,
            total_env_steps=1024,
            output_dir=tmp_path / str(jobs),
            jobs=jobs,
        )
        for jobs in (1, 2)
    ]
    assert found[0] == found[1]


def test_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds is 0 and jobs is 1; give at least 1 of each"):
        run_ladder("CartPole-v1", seeds=0, output_dir=tmp_path)


def test_the_figure_shows_every_rung(tmp_path: Path) -> None:
    draw_ladder(
        [Rung("a", (1.0, 3.0), (1.0, 2.0)), Rung("b", (2.0,), (2.0,))],
        tmp_path / "x" / "f.svg",
        title="T",
    )
    text = (tmp_path / "x" / "f.svg").read_text()
    assert (
        "<!-- a -->" in text
        and "<!-- b -->" in text
        and "<!-- T (gray: seeds; blue: mean and its 95 % interval) -->" in text
    )
