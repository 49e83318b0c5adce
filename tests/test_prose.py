"""The check of words finds what is planted."""

from pathlib import Path

import pytest

from tools.prose import find_problems


@pytest.mark.parametrize(("file", "text", "expected"), [
    ("src/x.py", '"""Return a number."""\nx = 1  # as told\n', "src/x.py:2: 'told'"),
    ("src/x.py", 'def f():\n    """Whether it runs."""\n', "src/x.py:2: the docstring begins"),
    ("tests/x.py", "def test_it_goes_on(): ...  # told\n", "tests/x.py:1: test_it_goes_on"),
    ("src/x.py", 'raise ValueError("expected at least 1")\n', "src/x.py:1: the error is not"),
])  # fmt: skip
def test_planted_words_are_found(file: str, text: str, expected: str) -> None:
    (problem,) = find_problems(Path(file), text)
    assert problem.startswith(expected)
