"""The figures of docs/: each is drawn by a command, from committed files where they are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.figures import FIGURES, FOLDER, MEASURED_ANEW, ROOT, main

PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]


def test_every_figure_has_its_command_and_its_place_on_a_page() -> None:
    there = {path.name for path in FOLDER.glob("*.png")}
    assert there == FIGURES.keys() | MEASURED_ANEW.keys()
    shown = {
        name for page in PAGES for name in re.findall(r"figures/([\w-]+\.png)\)", page.read_text())
    }
    assert shown == there
    text = "\n".join(page.read_text() for page in PAGES)
    for command in (each for commands in MEASURED_ANEW.values() for each in commands):
        assert f"\n{command}" in text


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
@pytest.mark.parametrize("name", ["batch-invariance.png", "precision.png", "scaling-model.png"])
def test_committed_files_have_all_that_a_figure_needs(name: str, tmp_path: Path) -> None:
    FIGURES[name](tmp_path / name)
    assert (tmp_path / name).stat().st_size > 10_000
