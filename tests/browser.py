"""Debian's chromium, for pages that people look at."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def in_a_browser(page: Path, probe: str, folder: Path, *, width: int, dark: bool = False) -> Any:
    """Return what a script finds in a page on a screen of that width.

    The script has the page as `page` and its window as `view`, and leaves its result in `found`.
    """
    script = html.escape(
        "const view = this.contentWindow, page = this.contentDocument; let found;"
        f"{probe} document.title = JSON.stringify(found);"
    )
    frame = folder / "frame.html"
    frame.write_text(
        '<meta name="color-scheme" content="light dark">'
        f'<iframe src="{page.as_uri()}" width="{width}" height="900" onload="{script}"></iframe>'
    )
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1600,1000",
         "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
         f"--blink-settings=preferredColorScheme={0 if dark else 1}",
         "--virtual-time-budget=5000", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    (found,) = re.findall("<title>(.*)</title>", done.stdout)
    return json.loads(html.unescape(found))
