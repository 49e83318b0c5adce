"""The pages of docs/: generated ones are what the code would write, links lead somewhere, code blocks are valid, every metric is there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from phasicrl import cli
from phasicrl.config import field_paths
from phasicrl.metrics import METRICS
from tools.reference_pages import DOCS, pages

ROOT = Path(__file__).parents[1]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]}


@pytest.mark.parametrize("name", pages())
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == pages()[name], "run: .venv/bin/python -m tools.reference_pages"


def test_every_name_of_the_source_documents_is_a_metric() -> None:
    charts = ("episodic_return", "episodic_length", "SPS", "learning_rate")
    losses = ("value_loss", "policy_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "explained_variance")
    aux = ("aux/kl_loss", "aux/aux_value_loss", "aux/real_value_loss")
    wanted = {f"charts/{name}" for name in charts} | {f"losses/{name}" for name in (*losses, *aux)}
    assert wanted <= set(METRICS)


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name]):
        assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


@pytest.mark.parametrize("name", TEXTS)
def test_code_blocks_are_python_and_commands_that_exist(name: str) -> None:
    for language, block in re.findall(r"```(\w+)\n(.*?)```", TEXTS[name], flags=re.S):
        if language == "python":
            ast.parse(block)
        elif language == "sh":
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:1] == ["phasicrl"]:
                    assert words[1] in cli.VERBS, line
                if words[:2] in (["phasicrl", "train"], ["phasicrl", "bench"]) and not any(word in line for word in ("RUN", "$")):
                    own = [index for index, word in enumerate(words) if word in ("--seconds", "--trace", "--output")]
                    fields = [word for index, word in enumerate(words) if index not in own and index - 1 not in own]
                    cli.parse_config(fields[2:])  # a preset and fields that exist


@pytest.mark.parametrize("name", TEXTS)
def test_knobs_that_a_page_names_exist(name: str) -> None:
    groups = "env|model|action|ppo|aux|reward_norm|obs_norm|value_norm|compute|log|checkpoint"
    for path in re.findall(rf"`((?:{groups})\.[a-z_]+)`", TEXTS[name]):
        assert path.endswith(".py") or path in field_paths(), f"{name} names {path}"


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_was_left_to_be_filled_in(name: str) -> None:
    assert not re.findall(r"\b[A-Z]+_(?:TEXT|TABLE)\b|TODO|TBD", TEXTS[name])


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 200
