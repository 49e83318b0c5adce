"""The site that `make site` builds, as a browser shows it: no page is wider than its screen."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser import in_a_browser, needs_chromium

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


@pytest.mark.long
@needs_chromium
@pytest.mark.skipif(not (SITE / "index.html").is_file(), reason="`make site` was not called")
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_the_screen_and_has_its_figures(name: str, width: int, tmp_path: Path) -> None:
    found = in_a_browser(SITE / f"{name}.html", PROBE, tmp_path, width=width)
    assert found["width"] <= width and found["heading"] and found["words"] > 500
    assert found["missing"] == []
