"""The check of words finds what is planted."""

from pathlib import Path

import pytest

from tools.prose import find_problems


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        ("src/x.py", '"""Return a number."""\nx = 1  # as told\n', "src/x.py:2: 'told'"),
        ("src/x.py", 'def f():\n    """Whether it runs."""\n', "src/x.py:2: the docstring begins"),
        ("tests/x.py", "def test_it_goes_on(): ...  # told\n", "tests/x.py:1: test_it_goes_on"),
        ("src/x.py", 'raise ValueError("expected at least 1")\n', "src/x.py:1: the error is not"),
        ("src/x.py", "m = 'expected 1'\nraise ValueError(m)\n", "src/x.py:2: the error is not"),
        ("tests/x.py", 'def f():\n    """Which one."""\n', "tests/x.py:2: the docstring begins"),
    ],
)
def test_planted_words_are_found(file: str, text: str, expected: str) -> None:
    (problem,) = find_problems(Path(file), text)
    assert problem.startswith(expected)


@pytest.mark.parametrize("text", ["n is {n}; expected 1. Set it", "{self.path}: {error}"])
def test_errors_in_the_form_pass(text: str) -> None:
    assert not [*find_problems(Path("src/x.py"), f"raise ValueError(f'{text}') from None")]
