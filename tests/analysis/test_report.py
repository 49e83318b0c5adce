"""The page: whole, safe, alone, and as wide as the screen it is on."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from phasicrl.algorithm import train
from phasicrl.analysis.report import write_report
from phasicrl.cli import main
from phasicrl.runs.directory import RunDirectory
from tests.helpers import corridor, tiny, tiny_aux

VOID = {"meta", "br", "img", "input", "link", "hr"}


class Page(HTMLParser):
    """Says which elements are open, and keeps what addresses there are."""

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
    config = tiny(folder, aux=tiny_aux(), name="cartpole-ppg").changed(
        {"ppo.clip": 0.123, "total_env_steps": 512}
    )
    return train(config, make_env=corridor).directory


def test_a_page_is_whole_and_loads_nothing(run: Path) -> None:
    (run / "film.mp4").write_bytes(b"film")
    path = write_report([run])
    assert path == run / "report.html"
    page = Page(text := path.read_text())
    (run / "film.mp4").unlink()
    assert page.open == []
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "script" not in page.names and "@import" not in text and "url(http" not in text
    assert "data:video/mp4;base64,ZmlsbQ==" in page.addresses
    for heading in ("Diagnosis", "Returns", "Policy", "Values", "Auxiliary phase", "Settings"):
        assert f"<h2>{heading}</h2>" in text
    steps = [row["env_steps"] for row in RunDirectory(run).metrics()]
    assert f"<dd>{steps[-1]:,.0f} of " in text
    assert page.names.count("svg") >= 10 and "#010203" not in text


def test_settings_that_differ_from_the_preset_are_marked(run: Path) -> None:
    text = write_report([run]).read_text()
    (row,) = re.findall(r"<tr[^>]*><td>ppo.clip</td>.*", text)
    assert 'class="changed"' in row and "<td>0.123</td>" in row and "preset: 0.2" in row
    (row,) = re.findall(r"<tr[^>]*><td>budget_rounding</td>.*", text)
    assert "changed" not in row


def test_names_are_escaped(run: Path, tmp_path: Path) -> None:
    strange = tmp_path / "<script>alert(1)<"
    shutil.copytree(run, strange)
    text = write_report([strange], output=tmp_path / "page.html").read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text


def test_runs_side_by_side_say_in_what_they_differ(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RunDirectory(run).config.changed({"seed": 7, "output_dir": str(tmp_path)})
    other = train(config, make_env=corridor).directory
    page = tmp_path / "both.html"
    assert main(["report", str(run), str(other), "--output", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    text = page.read_text()
    assert Page(text).open == []
    assert (
        "<td>seed</td><td>3</td><td>7</td>" in text
        and "<td>ppo.clip</td><td>"
        not in (text[text.index("In what the runs differ") : text.index("<h2>Settings")])
    )
    for each in (run, other):
        assert each.name in text


def test_mistakes_are_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        write_report([])
    with pytest.raises(ValueError, match="from 0 to 1; given was 2"):
        write_report([run], smooth_share=2)
    with pytest.raises(ValueError, match="run directory"):
        write_report([tmp_path])


@pytest.mark.skipif(not shutil.which("chromium"), reason="Debian's chromium is not here")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_no_wider_than_the_screen(run: Path, tmp_path: Path, width: int) -> None:
    report = write_report([run])
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<iframe id="frame" src="{report.as_uri()}" width="{width}" height="900" '
        'onload="const page = this.contentDocument.documentElement;'
        "document.title = page.scrollWidth + ' ' + page.querySelectorAll('svg').length + ' '"
        " + page.querySelector('svg').getBoundingClientRect().width\"></iframe>"
    )
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000",
         "--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    wide, drawings, drawn = re.search(r"<title>(.*)</title>", done.stdout)[1].split()  # pyright: ignore
    assert int(wide) <= width and int(drawings) >= 10
    assert 250 < float(drawn) < width
