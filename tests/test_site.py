"""The site that `make site` builds, as a browser shows it: no page is wider than its screen."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).parents[1] / "site"
PAGES = ("index", "algorithm", "experiments", "learning", "performance", "reference/tricks")
PROBE = """
found = {
  width: page.documentElement.scrollWidth,
  heading: page.querySelector('h1').textContent,
  missing: [...page.images].filter(image => !image.complete || !image.naturalWidth)
    .map(image => image.src),
  words: page.querySelector('article').innerText.length,
};
"""


def in_a_browser(page: Path, probe: str, folder: Path, *, width: int) -> Any:
    """Return what a script finds in a page on a screen of that width.

    The script has the page as `page` and its window as `view`, and leaves its result in `found`.
    """
    script = html.escape(
        "const view = this.contentWindow, page = this.contentDocument; let found;"
        f"{probe} document.title = JSON.stringify(found);"
    )
    frame = folder / "frame.html"
    frame.write_text(
        f'<iframe src="{page.as_uri()}" width="{width}" height="900" onload="{script}"></iframe>'
    )
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000",
         "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (found,) = re.findall("<title>(.*)</title>", done.stdout)
    return json.loads(html.unescape(found))


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="`make site` was not called")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_screen_and_has_its_figures(name: str, width: int, tmp_path: Path) -> None:
    found = in_a_browser(SITE / f"{name}.html", PROBE, tmp_path, width=width)
    assert found["width"] <= width and found["heading"] and found["words"] > 500
    assert found["missing"] == []
