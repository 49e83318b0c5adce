"""Faults are counted: each test tries so many, and `--fault-table FILE` writes what held.

`make test` tries a few of each kind; `--faults full` (`make test-faults`) tries all of them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest


@dataclass
class Fault:
    """One injected fault: number of tries, and of those that held.

    Attributes:
        id: name in the table, F-01 and on.
        what: injected fault, and what has to hold.
        wanted: number of tries.
    """

    id: str
    what: str
    wanted: int
    held: int = 0

    def __iter__(self) -> Iterator[int]:
        """Number each try; one that raises does not count as held."""
        for number in range(self.wanted):
            yield number
            self.held += 1


@pytest.fixture
def is_full(request: pytest.FixtureRequest) -> bool:
    """Return true if every fault is injected, not a few of each kind."""
    return request.config.getoption("--faults") == "full"


@pytest.fixture
def fault(
    request: pytest.FixtureRequest, is_full: bool, record_property: Callable[[str, object], None]
) -> Iterator[Fault]:
    """Yield the fault of a test's mark `fault(id, what, short, full)`."""
    name, what, short, full = request.node.get_closest_marker("fault").args
    made = Fault(name, what, full if is_full else short)
    yield made
    record_property("fault", (made.id, made.what, made.wanted, made.held))
