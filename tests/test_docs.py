"""The pages of docs/: generated ones are what the code would write, links lead somewhere, code
blocks are valid, every metric is there.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from phasicrl import cli
from phasicrl.algorithm import train
from phasicrl.config import LogConfig, field_paths
from phasicrl.exchange.export import export_policy
from phasicrl.presets import get_preset
from phasicrl.runs.metrics import METRICS
from tools.reference_pages import DOCS, pages

ROOT = Path(__file__).parents[1]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
        *sorted(DOCS.glob("*.md")),
    ]
}


GENERATED = pages()


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text() == GENERATED[name], (
        "run: .venv/bin/python -m tools.reference_pages"
    )


def test_every_name_of_the_source_documents_is_a_metric() -> None:
    charts = ("episodic_return", "episodic_length", "SPS", "learning_rate")
    losses = (
        "value_loss",
        "policy_loss",
        "entropy",
        "old_approx_kl",
        "approx_kl",
        "clipfrac",
        "explained_variance",
    )
    aux = ("aux/kl_loss", "aux/aux_value_loss", "aux/real_value_loss")
    wanted = {f"charts/{name}" for name in charts} | {f"losses/{name}" for name in (*losses, *aux)}
    assert wanted <= set(METRICS)


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name]):
        if "://" in target:
            assert target.startswith(("https://arxiv.org/abs/", "https://github.com/")), target
            continue
        assert (ROOT / name).parent.joinpath(target).exists(), f"{name} links to {target}"


def prose(text: str) -> str:
    """A page without its code blocks, in which `#` begins a comment and brackets are no links."""
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page: small letters, hyphens for blanks, no punctuation.

    A name that was there gets a number.
    """
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(text), flags=re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    earlier = [found[:index].count(name) for index, name in enumerate(found)]
    return {
        f"{name}-{number}" if number else name for name, number in zip(found, earlier, strict=True)
    }


def test_headings_get_githubs_names() -> None:
    page = "# What `x` is, by [name](a.md#b)\n```sh\n# not this\n```\n"
    page += "## The λ-return: how?\n## Two\n## Two\n"
    assert anchors(page) == {"what-x-is-by-name", "the-λ-return-how", "two", "two-1"}


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_headings_that_exist(name: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", prose(TEXTS[name])):
        if "://" not in target:
            page = (ROOT / name).parent / target if target else ROOT / name
            assert anchor in anchors(page.read_text()), (
                f"{name} links to {target}#{anchor}, which is no heading there"
            )


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
                if words[:2] in (["phasicrl", "train"], ["phasicrl", "bench"]) and not any(
                    word in line for word in ("RUN", "$", ".json")
                ):
                    own = [
                        index
                        for index, word in enumerate(words)
                        if word in ("--seconds", "--trace", "--output", "--resume", "--scale-batch")
                    ]
                    fields = [
                        word
                        for index, word in enumerate(words)
                        if index not in own and index - 1 not in own
                    ]
                    cli.parse_config(fields[2:])  # a preset and fields that exist


@pytest.mark.parametrize("name", [name for name in TEXTS if "tutorial" in name])
def test_the_code_of_a_tutorial_is_of_an_example_that_runs(name: str) -> None:
    """tests/test_examples.py runs them."""
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[name], flags=re.S)
    named = re.findall(r"\(\.\./(examples/\w+\.py)\)", TEXTS[name])
    assert len(named) == bool(blocks)
    for block in blocks:
        lines, example = ([line.strip() for line in text.splitlines()]
                          for text in (block, (ROOT / named[0]).read_text()))  # fmt: skip
        starts = (example[at : at + len(lines)] for at in range(len(example)))
        assert lines in starts, f"{name} has code that {named[0]} has not:\n{block}"


def test_the_vector_environment_of_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/environments.md"], flags=re.S)
    monkeypatch.chdir(tmp_path)
    exec(block, {"__name__": "page"})
    (row, *_) = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert '"env_steps": 1024' in row.read_text()


def test_the_program_of_the_page_about_exports_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(
        get_preset("classic-ppo"), total_env_steps=1024, output_dir=str(tmp_path),
        log=LogConfig(console="off"),
    )  # fmt: skip
    export_policy(train(config).directory, output=tmp_path / "policy.onnx", observations=8)
    (block,) = re.findall(r"```python\n(.*?)```", TEXTS["docs/export.md"], flags=re.S)
    monkeypatch.chdir(tmp_path)
    exec(block, {"__name__": "page"})
    assert float(capsys.readouterr().out.splitlines()[-1]) >= 8  # a pole falls no faster


@pytest.mark.parametrize("name", TEXTS)
def test_knobs_that_a_page_names_exist(name: str) -> None:
    groups = "env|model|action|ppo|aux|reward_norm|obs_norm|value_norm|compute|log|checkpoint"
    for path in re.findall(rf"`((?:{groups})\.[a-z_]+)`", TEXTS[name]):
        assert path.endswith(".py") or path in field_paths(), f"{name} names {path}"


@pytest.mark.parametrize("name", TEXTS)
def test_flags_that_a_page_names_exist(name: str) -> None:
    """`--ppo.clip`, and `--env.no-pin-threads` for a field that is on or off."""
    knobs, groups = (
        {path.replace("_", "-") for path in field_paths()},
        {path.partition(".")[0] for path in field_paths() if "." in path},
    )
    for no, group, off, field in re.findall(r"--(no-)?([a-z-]+)\.(no-)?([a-z-]+)", TEXTS[name]):
        if group.replace("-", "_") in groups:
            assert not no and f"{group}.{field}" in knobs, (
                f"{name} names --{no}{group}.{off}{field}"
            )


def test_every_line_of_others_code_that_is_cited_has_its_address() -> None:
    """`OPPG ppo.py:104` is a row of docs/sources.md, at the commit that the page names."""
    rows = re.findall(r"\[([^]]+\.py:[\d-]+)\]\((\S+)\) \|", TEXTS["docs/sources.md"])
    for cited, address in rows:
        file, lines = cited.split()[-1].split(":")
        path, _, anchor = address.partition("#")
        assert path.endswith(f"/{file}") and anchor.replace("L", "") == lines, cited
        assert re.sub(r"/blob/(\w+)/.*", r"/tree/\1)", path) in TEXTS["docs/sources.md"], cited
    known = {cited.split()[-1] for cited, _ in rows} | {"torch/optim/adam.py:166-181"}
    sources = {str(path): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    for name, text in (sources | TEXTS).items():
        for cited in re.findall(r"[\w/]+\.py:\d[\d-]*", text):
            assert cited in known, f"{name} cites {cited}, which docs/sources.md has not"


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_was_left_to_be_filled_in(name: str) -> None:
    assert not re.findall(r"\b[A-Z]+_(?:TEXT|TABLE)\b|TODO|TBD", TEXTS[name])


def test_the_readme_is_short() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 200
