"""The ladder: each rung adds exactly its trick; runs that are there are not repeated; table and figure."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from phasicrl import ladder
from phasicrl.config import Config, field_paths
from phasicrl.ladder import TRICKS, Rung, draw_ladder, run_ladder, rungs
from phasicrl.presets import get_preset

BASE = get_preset("classic-ppo").changed({"reward_norm": None})


def flat(config: Config) -> dict[str, Any]:
    """Groups that are off or on count as one field."""
    tree = dataclasses.asdict(config)
    return {
        path: (tree[path.split(".")[0]] or {}).get(path.split(".")[1]) if "." in path and not path.startswith(("obs_norm", "value_norm"))
        else tree[path.split(".")[0]]
        for path in field_paths()
    }  # fmt: skip


def difference(before: Config, after: Config) -> set[str]:
    old, new = flat(before), flat(after)
    return {path.split(".")[0] if path.startswith(("obs_norm", "value_norm")) else path for path in old if old[path] != new[path]}


def test_each_rung_changes_the_fields_of_its_trick_and_no_others() -> None:
    steps = rungs(BASE, masks=True)
    assert [name for name, _ in steps] == ["REINFORCE", *(f"+ {trick.name}" for trick in TRICKS)]
    for (_, below), (name, above), trick in zip(steps, steps[1:], TRICKS, strict=False):
        changed = difference(below, above)
        assert changed and changed <= set(trick.on), name
    bottom = steps[0][1]
    assert (bottom.ppo.objective, bottom.ppo.baseline, bottom.ppo.estimator, bottom.ppo.clip) == ("log_prob", False, "monte_carlo", None)
    assert (bottom.ppo.policy_epochs, bottom.ppo.num_minibatches, bottom.ppo.advantage_norm) == (1, 1, "none")
    assert bottom.obs_norm is bottom.value_norm is bottom.ppo.max_grad_norm is bottom.reward_norm is None


def test_the_top_of_the_ladder_is_everything_and_each_other_run_lacks_one_trick() -> None:
    top = rungs(BASE, masks=True)[-1][1]
    alone = rungs(BASE, mode="leave-one-out", masks=True)
    assert alone[0] == ("everything", top)
    for (name, config), trick in zip(alone[1:], TRICKS, strict=True):
        assert name == f"without {trick.name}"
        assert difference(top, config) and difference(top, config) <= set(trick.off), name


def test_without_masks_there_is_no_rung_for_them() -> None:
    assert rungs(BASE)[-1][0] == "+ entropy bonus" and len(rungs(BASE, mode="leave-one-out")) == len(TRICKS)


def test_it_trains_every_rung_once_and_writes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "TRICKS", TRICKS[:1] + TRICKS[-1:])
    told: list[tuple[str, int]] = []
    trained: list[str] = []
    original = ladder.train
    monkeypatch.setattr(ladder, "train", lambda config: (trained.append(config.name), original(config))[1])

    def run(seeds: int) -> list[Rung]:
        told.clear()
        return run_ladder(
            "gymnasium:CartPole-v1", seeds=seeds, total_env_steps=1024, output_dir=tmp_path, on_run=lambda name, seed, _: told.append((name, seed))
        )  # fmt: skip

    first = run(1)
    assert [rung.name for rung in first] == ["REINFORCE", "+ baseline"] and len(trained) == 2
    second = run(2)
    assert told == [("REINFORCE", 1), ("REINFORCE", 2), ("+ baseline", 1), ("+ baseline", 2)] and len(trained) == 4
    assert [rung.greedy[0] for rung in first] == [rung.greedy[0] for rung in second]
    with (tmp_path / "ladder.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rung"], int(row["seeds"]), float(row["greedy_mean"])) for row in rows] == [
        (rung.name, 2, pytest.approx(sum(rung.greedy) / 2)) for rung in second
    ]


def test_runs_in_processes_reach_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "TRICKS", TRICKS[-1:])
    found = [
        run_ladder("gymnasium:CartPole-v1", seeds=1, total_env_steps=1024, output_dir=tmp_path / str(jobs), jobs=jobs) for jobs in (1, 2)
    ]
    assert found[0] == found[1]


def test_no_seeds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="seeds is 0 and jobs is 1; give at least 1 of each"):
        run_ladder("CartPole-v1", seeds=0, output_dir=tmp_path)


def test_the_figure_shows_every_rung(tmp_path: Path) -> None:
    draw_ladder([Rung("a", (1.0, 3.0), (1.0, 2.0)), Rung("b", (2.0,), (2.0,))], tmp_path / "x" / "f.svg", title="T")
    text = (tmp_path / "x" / "f.svg").read_text()
    assert "<!-- a -->" in text and "<!-- b -->" in text and "<!-- T (grey: seeds; blue: mean and its 95 % interval) -->" in text
