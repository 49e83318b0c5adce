"""Report: whole, safe, a single file."""

import errno
import json
import os
import re
import shutil
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.lab.analysis import report
from phasicrl.lab.analysis.compare import compare_runs
from phasicrl.lab.analysis.plot import plot_runs
from phasicrl.lab.analysis.report import write_report
from phasicrl.runs.directory import RunDirectory
from phasicrl.training.run import Run
from tests.helpers import Corridor, corridor, tiny, tiny_aux
from tests.lab.analysis.runs import read_csv

VOID = {"meta", "br", "wbr", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Parser of a page that keeps its open elements, names and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    config = tiny(folder, aux=tiny_aux(), name="cartpole-ppg", total_env_steps=512)
    return train(config.with_updates({"ppo.clip": 0.123}), make_env=corridor).directory


@pytest.mark.long
def test_pages_of_a_run_without_the_end_of_an_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training says so once; the plot names the curve; there is nothing to compare."""
    config = tiny(tmp_path).with_updates({"log.console": "plain", "total_env_steps": 320})
    endless = train(config, make_env=partial(Corridor, limit=10**9, length=10**9)).directory
    said = capsys.readouterr().out
    assert said.count("no episode has ended in 320 steps") == said.count("max_episode_steps") == 1
    page = write_report([endless]).read_text(encoding="utf-8")
    assert "no episode has ended" in page and "No episode ended" in page
    usual = train(config.with_updates({"seed": 4}), make_env=corridor).directory
    assert "no episode" not in capsys.readouterr().out
    with pytest.warns(UserWarning, match=f"{endless.name}: no episode has ended in 320 steps"):
        rows = read_csv(plot_runs([endless], output=tmp_path / "alone")[2])
    assert {row["mean"] for row in rows} == {"nan"} and "no episode" in rows[0]["curve"]
    with pytest.warns(UserWarning, match="no episode"):  # beside another seed
        (row, *_) = read_csv(plot_runs([endless, usual], output=tmp_path / "both")[2])
    assert row["num_runs"] == "1" and "no episode" not in row["curve"]
    refused = pytest.raises(ValueError, match="no run has a finished episode; expected one")
    with pytest.warns(UserWarning, match="no episode"), refused:
        compare_runs([endless])


@pytest.fixture
def _few_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw one metric, for tests of what else is on a page."""
    monkeypatch.setattr(report, "GROUPS", {"Returns": ("charts/episodic_return",)})


FEW = pytest.mark.usefixtures("_few_figures")


def test_a_page_is_whole_and_loads_nothing(run: Path) -> None:
    (run / "videos").mkdir()
    (run / "videos" / "film.mp4").write_bytes(b"film")  # where `phasicrl video` puts it
    path = write_report([run])
    assert path == run / "report.html"
    page = Page(text := path.read_text())
    shutil.rmtree(run / "videos")
    assert page.open == []
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "script" not in page.names and "@import" not in text and "url(http" not in text
    assert "data:video/mp4;base64,ZmlsbQ==" in page.addresses and "film.mp4<" in text
    for heading in ("Diagnosis", "Returns", "Policy", "Values", "Auxiliary phase", "Settings"):
        assert f"<h2>{heading}</h2>" in text
    steps = [row["env_steps"] for row in RunDirectory(run).metrics()]
    assert f"<dd>{steps[-1]:,.0f} of " in text
    assert page.names.count("svg") >= 10 and "#010203" not in text and "#0405" not in text


@pytest.mark.long
@FEW
def test_metrics_of_your_own_are_drawn_on_the_page_and_in_a_plot(tmp_path: Path) -> None:
    def log(run: Run, _: Any) -> None:
        run.log({"own/zebra": 100 * run.iteration, "own/$_{$": 1})

    mine, other = (
        train(tiny(tmp_path / name), make_env=corridor, callbacks=callbacks).directory
        for name, callbacks in (("mine", log), ("other", None))
    )
    with (mine / "metrics.jsonl").open("a") as file:  # rows without them
        file.writelines(f'{{"env_steps": {i}, "iteration": {i}}}\n' for i in range(999, 1200))
    for runs in ([mine], [other, mine]):
        page = write_report(runs, output=tmp_path / "page.html").read_text(encoding="utf-8")
        assert "own/zebra" in page and ">400<" in page
    assert "Others" not in write_report([other]).read_text(encoding="utf-8")
    plot_runs([mine], metric="own/$_{$", output=tmp_path / "formula")  # which is no formula
    table = plot_runs([mine], metric="own/zebra", output=tmp_path / "plot")[2]
    assert [float(row["mean"]) for row in read_csv(table)][-1] == 400


def test_settings_that_differ_from_the_preset_are_marked(run: Path) -> None:
    text = write_report([run]).read_text()
    (row,) = re.findall(r"<tr[^>]*><td>ppo.<wbr>clip</td>.*", text)
    assert 'class="changed"' in row and "<td>0.123</td>" in row and "preset: 0.2" in row
    (row,) = re.findall(r"<tr[^>]*><td>budget_<wbr>rounding</td>.*", text)
    assert "changed" not in row


@pytest.mark.long
def test_the_parts_of_the_time_add_up(run: Path, tmp_path: Path) -> None:
    """Four seconds an iteration, of which evaluations have one."""
    files = RunDirectory(Path(shutil.copytree(run, tmp_path / "evaluated")))
    rows = files.metrics()
    for number, row in enumerate(rows):
        row |= {"time/total": 3.0, "time/rollout": 2.0, "time/evaluation": 1.0}
        row |= {f"time/{part}": 0.0 for part in ("policy", "value", "auxiliary")}
        row |= {"evaluation/return": float(number), "evaluation/best_return": min(number, 8.0)}
    lines = [json.dumps({k: None if v != v else v for k, v in row.items()}) for row in rows]
    (files.path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    text = write_report([files.path]).read_text()
    assert "<dt>best evaluated</dt><dd>8</dd>" in text and "evaluation/return</figc" in text
    for part, share in (("rollout", 50), ("evaluation", 25), ("else", 25)):
        assert f"</span>{part} {share} %" in text


@FEW
def test_names_are_escaped(run: Path, tmp_path: Path) -> None:
    strange = tmp_path / "<script>alert(1)<"
    shutil.copytree(run, strange)
    text = write_report([strange], output=tmp_path / "made" / "page.html").read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text


@pytest.mark.long
def test_differences_between_runs_are_listed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunDirectory(run).config.with_updates({"seed": 7, "output_dir": str(tmp_path)})
    other = train(config, make_env=corridor).directory
    page = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--output", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert Page(text).open == []
    assert "<td>seed</td><td>3</td><td>7</td>" in text
    _, _, differences = text.partition("<h2>Settings")[0].partition("Differences between the runs")
    assert differences and "<td>ppo.<wbr>clip</td><td>" not in differences
    assert run.name in text and other.name in text


@FEW
def test_more_runs_than_colors_are_all_drawn(run: Path, tmp_path: Path) -> None:
    alone = write_report([run], output=tmp_path / "one.html").read_text().count("stroke-width: 1.6")
    many = [tmp_path / str(number) for number in range(len(report._LIGHT_COLORS) + 2)]
    for each in many:
        shutil.copytree(run, each)
    text = write_report(many, output=tmp_path / "many.html").read_text()
    assert alone == 1 and text.count("stroke-width: 1.6") == len(many) * alone
    assert all(f"--color{index}: #" in text for index in range(len(many)))


@FEW
def test_a_run_that_is_given_twice_is_there_once(run: Path) -> None:
    once = write_report([run]).read_text()
    path = write_report([run, run / ".." / run.name])
    assert path == run / "report.html" and path.read_text() == once


def test_agents_are_reported_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write_report([Path("cartpole-ppg")]) == tmp_path / "cartpole-ppg" / "report.html"


def test_mistakes_are_refused(tmp_path: Path, run: Path) -> None:
    for runs, output, message in [
        ([], None, "at least one run"),
        ([run], tmp_path / "x.pdf", "x.pdf; expected a name with the ending .html"),
        ([tmp_path], tmp_path / "x.html", "run directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_report(runs, output=output)


def luminance(color: str) -> float:
    """Return the relative luminance of `#rrggbb` (WCAG 2.1)."""
    parts = np.array([*bytes.fromhex(color[1:])]) / 255
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))


def contrast(one: str, other: str) -> float:
    """Return the contrast, from 1 for equal colors to 21 for black on white."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(
    ("colors", "lightness", "back"),
    [(report._LIGHT_COLORS, 0.33, "#ffffff"), (report._DARK_COLORS, 0.68, "#14171c")],
)
def test_each_color_is_seen_on_the_page(
    colors: tuple[str, ...], lightness: float, back: str
) -> None:
    colors = (*report.extend_colors(40, colors, lightness),)
    assert len({*colors}) == 40
    for color in colors:
        assert contrast(color, back) >= 3, color  # WCAG 1.4.11


def test_a_page_that_cannot_be_written_leaves_the_one_before(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    page = tmp_path / "page.html"
    page.write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        write_report([run], output=page)
    assert page.read_text() == "before" and list(tmp_path.iterdir()) == [page]


@FEW
def test_films_are_few_and_no_link_leads_elsewhere(run: Path, tmp_path: Path) -> None:
    """Links in a received run could put a secret into the page."""
    received = tmp_path / "received"
    shutil.copytree(run, received)
    (received / "videos").mkdir()
    for number in range(9):
        (received / "videos" / f"{number}.mp4").write_text(f"film {number}")
    page = Page(write_report([received]).read_text())
    assert sum(address.startswith("data:video") for address in page.addresses) == 6
    (received / "videos" / "z.mp4").symlink_to(tmp_path / "secret.mp4")
    with pytest.raises(ValueError, match=r"z\.mp4 is a link"):
        write_report([received])
