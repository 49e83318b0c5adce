"""What every test gets: runs that it opened are closed when it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import helpers


@pytest.fixture(autouse=True)
def _close_runs() -> Iterator[None]:
    yield
    while helpers.OPENED:
        helpers.OPENED.pop().close()
