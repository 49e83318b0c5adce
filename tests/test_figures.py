"""The figures of docs/: each is drawn by a command, from committed files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.figures import FIGURES, FOLDER, ROOT, main

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_figure_has_its_command_and_its_place_on_a_page() -> None:
    there = {path.name for path in FOLDER.glob("*.png")}
    assert there == FIGURES.keys()
    shown = {
        name for page in PAGES for name in re.findall(r"figures/([\w-]+\.png)\)", page.read_text())
    }
    assert shown == there


def test_ours_among_the_published_runs_are_what_the_page_says(tmp_path: Path) -> None:
    """The table of the page is made from this CSV."""
    FIGURES["baselines.png"](tmp_path / "baselines.png")
    assert (tmp_path / "baselines.csv").read_text() == (FOLDER / "baselines.csv").read_text()
    assert (tmp_path / "baselines.png").stat().st_size > 100_000


def test_the_command_draws_what_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["suite-fig9.png", "--output", str(tmp_path)])
    assert capsys.readouterr().out.strip() == str(tmp_path / "suite-fig9.png")
    assert [path.name for path in tmp_path.iterdir()] == ["suite-fig9.png"]
    assert (tmp_path / "suite-fig9.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(SystemExit):
        main(["no.png"])
    assert "no such figure: no.png; there are baselines.png" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["batch-invariance", "precision", "scaling-model", "trace"])
def test_committed_files_have_all_that_a_figure_needs(name: str, tmp_path: Path) -> None:
    FIGURES[f"{name}.png"](tmp_path / f"{name}.png")
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
