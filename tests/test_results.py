"""What is committed as measured.

Seeds for choosing and seeds for reporting never meet, and every row says which code made it.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from string import Template
from typing import Any

import pytest

from phasicrl.lab.experiments.trials import FIRST_REPORT_SEED, ResultTable
from phasicrl.presets import PRESETS
from tools import reference_pages, result_tables

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows_of(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return list(csv.DictReader(text.splitlines()))


def files(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Result files of a folder that name the seeds of their runs."""
    found = {path.name: rows_of(path) for path in sorted(folder.glob("*.csv*"))}
    return {name: rows for name, rows in found.items() if rows and "seed" in rows[0]}


REPORTED = files(RESULTS) | files(RESULTS / "suites")
SELECTION = files(RESULTS / "selection")


@pytest.mark.parametrize("name", REPORTED)
def test_what_is_reported_was_trained_on_seeds_on_which_nothing_was_chosen(name: str) -> None:
    rows = REPORTED[name]
    assert min(int(row["seed"]) for row in rows) >= FIRST_REPORT_SEED
    lines = [tuple(row.values()) for row in rows]
    assert len(lines) == len(set(lines)), "a row stands there twice"
    if "preset" in rows[0]:
        runs = [(row["preset"], row["seed"]) for row in rows]
        assert len(runs) == len(set(runs)), "a run stands there twice"
        assert {row["preset"].split()[0] for row in rows} <= PRESETS.keys()
    for row in rows:
        assert row["commit"] and not row["commit"].endswith("-dirty"), (
            f"seed {row['seed']} is not of a committed tree"
        )


TABLES = sorted(path for path in RESULTS.rglob("*.csv*") if path.name != "published.csv.gz")

LOST = {"358d59a", "568bdf5", "825db5b", "ddf769d"}
"""Of a branch that became one commit, 3fd758b. CONTRIBUTING.md says so."""


def test_every_row_names_a_commit_of_this_history() -> None:
    git = ["git", "-C", str(RESULTS)]
    told = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if told.stdout.strip() != b"false":
        pytest.skip("no history here")
    named = {path: {row["commit"].removesuffix("-dirty") for row in rows_of(path)}
             for path in TABLES}  # fmt: skip
    for commit in set().union(*named.values()) - LOST:
        told = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=False)
        files = [path.name for path, commits in named.items() if commit in commits]
        assert told.returncode == 0, f"{commit}, which {files} name, is not in the history"


def test_arrows_say_that_all_seeds_lie_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    (tmp_path / "suites").mkdir()
    arms = {"base": (1, 3), "above": (4, 5), "higher": (5, 6), "touches": (3, 9), "below": (-2, 0)}
    lines = [f"hopper,{arm},{x},{x},{x}" for arm, pair in arms.items() for x in pair]
    text = "\n".join(["task,arm,curve,return_100,greedy_mean", *lines])
    # `higher` is above the first arm, but not above the one before it.
    for suite, of_higher in (("fig3", "↑↑↑"), ("tricks", "")):
        (tmp_path / "suites" / f"{suite}-small.csv").write_text(text)
        table = result_tables.suite_table(suite).splitlines()[2:]
        assert ["".join(c for c in line if c in "↑↓") for line in table] == [
            "", "↑↑↑", of_higher, "", "↓↓↓"
        ]  # fmt: skip


def test_the_guide_says_which_presets_have_fewer_than_ten_report_seeds() -> None:
    counts = {
        path.partition(".")[0]: Counter(row["preset"] for row in rows)
        for path, rows in files(RESULTS).items()
        if path != "compat.csv" and "preset" in rows[0]
    }
    least = {name: min(count.values()) for name, count in counts.items()}
    fewer = {name: {number} for name, number in least.items() if number < 10}
    guide = " ".join((RESULTS.parents[1] / "CONTRIBUTING.md").read_text().split())
    (said,) = re.findall(r"Presets of ours have ten, some, or PPG of them, fewer \((.+?)\)", guide)
    numbers = {"one": 1, "five": 5}
    told = {
        name: {numbers[number]}
        for names, number in (part.split(": ") for part in said.split("; "))
        for name in names.split(", ")
    }
    assert told == fewer


NO_LONGER = {"pendulum-ppo --action.std-value 0.6"}
"""Arms whose rows have another name, which the page says: it was the preset's own value then."""


def test_a_command_of_the_page_of_results_finds_the_rows_of_its_runs() -> None:
    """`benchmarks/learning.py` makes no run again whose row is there: names must be the same."""
    page = (RESULTS.parents[1] / "docs" / "learning.md").read_text()
    checked = 0
    for block in re.findall(r"```sh\n(.*?)```", page, flags=re.S):
        variables = dict(re.findall(r'(\w+)="([^"]*)"', block))
        for line in Template(block).safe_substitute(variables).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] != ["python", "benchmarks/learning.py"]:
                continue
            labels = {row["preset"] for row in rows_of(RESULTS.parents[1] / words[2])}
            for arm in (word.replace(":", " ", 1) for word in words[3:] if word[0].isalpha()):
                assert arm in labels | NO_LONGER, f"{words[2]} has no rows of {arm!r}"
                checked += 1
    assert checked > 20


@pytest.mark.parametrize("name", SELECTION)
def test_settings_are_chosen_on_other_seeds(name: str) -> None:
    assert max(int(row["seed"]) for row in SELECTION[name]) < FIRST_REPORT_SEED


def test_runs_that_are_held_against_published_ones_say_which_code_made_them() -> None:
    for card in sorted((RESULTS / "baselines").glob("*/card.json")):
        # The first one's commit is not known, which the page says.
        if json.loads(card.read_text())["seed"] != 1:
            assert json.loads(card.read_text())["commit"], card


def row(seed: int, preset: str = "cartpole-ppo", greedy: float = 500.0) -> dict[str, Any]:
    return {
        "preset": preset,
        "seed": seed,
        "env": "envpool:CartPole-v1",
        "env_steps": 100,
        "greedy_mean": greedy,
        "commit": "abc",
    }


def add(path: Path, line: dict[str, Any]) -> None:
    ResultTable(path, list(line)).add([line])


def test_the_table_marks_what_was_chosen_on_its_own_seeds_and_counts_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    (tmp_path / "selection").mkdir()
    for seed in (1, 2):
        add(tmp_path / "selection" / "cartpole.csv", row(seed))
    (line,) = result_tables.tasks_table().splitlines()[2:]
    assert "500.0, all 2 † | 0 of 2 (below 475) | – | –" in line.replace("500, all", "500.0, all")
    assert (
        result_tables.trained("cartpole-ppo")
        == "Trained on selection seeds only (`benchmarks/results/selection`)."
    )
    for seed, greedy in ((101, 500.0), (102, 100.0), (103, 474.0)):
        add(tmp_path / "cartpole.csv", row(seed, greedy=greedy))
    (line,) = result_tables.tasks_table().splitlines()[2:]
    assert "2 of 3 (below 475)" in line and "†" not in line and "least 100" in line
    words = result_tables.trained("cartpole-ppo")
    assert words.startswith("Trained: 3 seeds, 100 steps: greedy 358 [")
    assert words.endswith(
        "(`python benchmarks/learning.py benchmarks/results/cartpole.csv cartpole-ppo --seeds 3`)."
    )
    assert result_tables.trained("cartpole-ppg") == "Not trained here."


def test_a_trick_stands_with_the_means_of_the_arms_without_it_and_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    (tmp_path / "suites").mkdir()
    lines = ["task,arm,seed,greedy_mean"]
    lines += [f"pendulum,off,{seed},{value}" for seed, value in ((101, -1500), (102, -1700))]
    lines += [f"pendulum,on,{seed},{value}" for seed, value in ((101, -7.0), (102, -8.1))]
    lines += ["gymnasium:Taxi-v4,on,101,5.0"]  # there is nothing to hold it against
    (tmp_path / "suites" / "mva-small.csv").write_text("\n".join(lines))
    place = "[mva](experiments.md#the-reports-findings-source-004)"
    assert result_tables.beside("mva", "off", "on") == f"{place}: Pendulum −1,600 (−7.5)"
    assert result_tables.beside("mva", "of", "on") == f"{place}: –"


def test_rungs_stand_with_the_means_of_their_seeds_on_the_tasks_that_have_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    (tmp_path / "suites").mkdir()
    rows = ("cartpole,REINFORCE,100", "cartpole,REINFORCE,301", "gymnasium:Taxi-v4,+ masks,-7.04")
    text = "\n".join(["task,arm,greedy_mean", *rows])
    (tmp_path / "suites" / "tricks-small.csv").write_text(text)
    assert result_tables.rungs_table().splitlines() == [
        "| rung | CartPole | Taxi |", "|---|---|---|",
        "| REINFORCE | 200 | – |", "| + masks | – | −7.0 |",
    ]  # fmt: skip


def test_every_trick_that_a_suite_measures_has_numbers() -> None:
    tricks = {trick for trick, *_ in reference_pages.TRICKS}
    assert tricks.issuperset(reference_pages.IN_SUITES | reference_pages.ON_PAGES)
    assert tricks.issuperset(reference_pages.OTHER_VALUES)
    for arms in reference_pages.IN_SUITES.values():
        assert not any(result_tables.beside(*each).endswith("–") for each in arms)
