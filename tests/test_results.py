"""Committed results: their seeds and commits, and the tables that are made from them."""

import csv
import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest

from phasicrl.lab.experiments.trials import FIRST_REPORT_SEED
from phasicrl.presets import PRESETS, read_trainings
from tools import result_tables

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows_of(path: Path) -> list[dict[str, str]]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return list(csv.DictReader(text.splitlines()))


def files(folder: Path) -> dict[str, list[dict[str, str]]]:
    """Return the result files of a folder that name the seeds of their runs."""
    found = {path.name: rows_of(path) for path in sorted(folder.glob("*.csv*"))}
    return {name: rows for name, rows in found.items() if rows and "seed" in rows[0]}


REPORTED = files(RESULTS) | files(RESULTS / "suites")
SELECTION = files(RESULTS / "selection")


def test_the_returns_of_presets_are_those_of_their_runs() -> None:
    found: dict[str, list[float]] = {}
    for rows in REPORTED.values():
        for row in rows:
            if row.get("preset") in PRESETS and "greedy_mean" in row:
                found.setdefault(row["preset"], []).append(float(row["greedy_mean"]))
    assert {
        name: (len(returns), float(f"{sum(returns) / len(returns):.4g}"))
        for name, returns in found.items()
    } == {name: (of["seeds"], of["mean"]) for name, of in read_trainings().items() if of["seeds"]}


def test_every_runs_folder_is_on_the_page_of_presets() -> None:
    page = (RESULTS.parents[1] / "docs" / "reference" / "presets.md").read_text()
    for card in RESULTS.rglob("card.json"):
        assert f"(`{card.parents[1].relative_to(RESULTS.parents[1])}`)" in page


def test_reported_runs_have_seeds_on_which_nothing_was_chosen_and_a_commit() -> None:
    bad = []
    for name, rows in REPORTED.items():
        lines = [tuple(row.values()) for row in rows]
        runs = [(row["preset"], row["seed"]) for row in rows if "preset" in row]
        problems = {
            "a seed for choosing": min(int(row["seed"]) for row in rows) < FIRST_REPORT_SEED,
            "a row twice": len(lines) > len(set(lines)),
            "a run twice": len(runs) > len(set(runs)),
            "no preset": not {preset.split()[0] for preset, _ in runs} <= PRESETS.keys(),
            "no clean commit": any(not row["commit"] or "dirty" in row["commit"] for row in rows),
        }
        bad += [(name, what) for what, is_so in problems.items() if is_so]
    for name, rows in SELECTION.items():
        if max(int(row["seed"]) for row in rows) >= FIRST_REPORT_SEED:
            bad.append((name, "a seed for reporting"))
    for card in (RESULTS / "baselines").glob("*/card.json"):
        run = json.loads(card.read_text())
        if not run["commit"] and run["seed"] != 1:  # that one is not known, as the page says
            bad.append((str(card), "no commit"))
    assert not bad


TABLES = sorted(path for path in RESULTS.rglob("*.csv*") if path.name != "published.csv.gz")


WITHOUT_COMMIT = {
    # Of seed 1, with which settings were found; their commit was not noted.
    "benchmarks/results/baselines/bigfish_s1/card.json": {""},
    "benchmarks/results/baselines/starpilot_s1/card.json": {""},
    # In words: the commit that adds the file, but for changes that it names.
    "benchmarks/results/gpu/2026-11-27.json": {""},
}


def test_every_result_names_a_commit_of_this_history() -> None:
    git = ["git", "-C", str(RESULTS)]
    shallow = subprocess.run([*git, "rev-parse", "--is-shallow-repository"], capture_output=True)
    if shallow.stdout.strip() != b"false":
        pytest.skip("no history here")
    root = RESULTS.parents[1]
    named = {str(path.relative_to(root)): {row["commit"].removesuffix("-dirty")
             for row in rows_of(path)} for path in TABLES}  # fmt: skip
    kept = ("benchmarks/results/*.json", "src/phasicrl/agents/*/card.json")
    listed = subprocess.check_output(["git", "ls-files", *kept], cwd=root, text=True)
    for name in listed.split():
        if not name.endswith("/config.json") and "/checkpoints/" not in name:
            found = json.loads((root / name).read_text())
            commits = found["commit"] if "commit" in found else found["machine"]["commit"]
            named[name] = set(re.findall(r"\b[0-9a-f]{7,40}\b", commits or ""))
    missing = {name: {""} for name, commits in named.items() if not commits}
    for commit in set().union(*named.values()):
        found = subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"], check=False)
        if found.returncode:
            for name in (name for name, commits in named.items() if commit in commits):
                missing.setdefault(name, set()).add(commit)
    assert missing == WITHOUT_COMMIT


def test_an_arrow_needs_all_seeds_apart_and_enough_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seeds against three are apart by chance once in ten times, against five once in 28."""
    arms = {"base": (1, 2, 3, 3, 3), "above": (4, 5, 5), "touches": (3, 9, 9), "below": (-2, 0, 0),
            "lower": (-3, -4, -5)}  # fmt: skip
    rows = [f"hopper,{arm},300,{seed},{x},{x},{x}"
            for arm, values in arms.items() for seed, x in enumerate(values)]  # fmt: skip
    # In `tricks`, an arm is compared with the one before it: three seeds against three.
    for suite, arrows in (("fig3", ["", "↑↑↑", "", "↓↓↓", "↓↓↓"]),
                          ("tricks", ["", "↑↑↑", "", "", ""])):  # fmt: skip
        folder = tmp_path / suite
        folder.mkdir()
        monkeypatch.setattr(result_tables, "RESULTS", folder)
        write(folder, f"suites/{suite}-small", COLUMNS_OF_SUITE, *rows)
        _, *table = result_tables.suite(suite)
        assert ["".join(c for c in str(cells) if c in "↑↓") for _, cells in table] == arrows


def test_equal_runs_of_two_suites_are_one_arm_with_the_seeds_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_tables, "RESULTS", tmp_path)
    write(tmp_path, "suites/fig3-small", COLUMNS_OF_SUITE,
          "hopper,E = 10,300,101,1 2,2,30", "hopper,E = 1,300,101,1 1,1,5")  # fmt: skip
    # The same first run; another budget, task or curve is another arm.
    write(tmp_path, "suites/value-small", COLUMNS_OF_SUITE,
          "hopper,V = 10,300,101,1 2,2,30", "hopper,V = 10,300,102,1 3,3,10",
          "hopper,V = 1,100,101,1 2,2,30", "hopper,V = 1,100,103,9 9,9,99",
          "acrobot,V = 10,300,101,1 2,2,30", "acrobot,V = 10,300,104,9 9,9,99")  # fmt: skip
    runs = result_tables.suite_runs("fig3")
    found = {arm: [(row["seed"], row["greedy_mean"]) for row in of]
             for (arm, _), of in runs.items()}  # fmt: skip
    assert found == {"E = 10": [("101", "30"), ("102", "10")], "E = 1": [("101", "5")]}


COLUMNS_OF_SUITE = "task,arm,budget,seed,curve,return_100,greedy_mean"


def write(folder: Path, name: str, *rows: str) -> None:
    (folder / "suites").mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.csv").write_text("\n".join(rows))
