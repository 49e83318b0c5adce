"""The pages: generated ones are up to date; links, names, options and commands on them exist."""

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import tyro

from phasicrl import cli
from phasicrl.config import get_defaults
from phasicrl.presets import get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.runs.metrics import METRICS
from tests.helpers import look_up
from tools.reference_pages import DOCS, cited_lines, pages
from tools.site_pages import MODULES

ROOT = Path(__file__).parents[1]
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
        *sorted(DOCS.rglob("*.md")),
    ]
}


def test_generated_pages_are_up_to_date() -> None:
    stale = [name for name, text in pages().items() if (DOCS / name).read_text() != text]
    assert not stale, "run: .venv/bin/python -m tools.reference_pages"


ADDRESSES = ("https://arxiv.org/abs/", "https://doi.org/10.", "https://github.com/")
"""Beginnings of allowed links: papers and code."""


def test_links_lead_somewhere() -> None:
    bad = []
    for name, text in TEXTS.items():
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", prose(text)):
            path = (ROOT / name).parent / target if target else ROOT / name
            if "://" in target:
                found = target.startswith(ADDRESSES)
            else:
                found = path.exists() and (not anchor or anchor in anchors(path.read_text()))
            bad += [] if found else [f"{name}: {target}#{anchor}"]
    assert not bad


def test_names_of_code_exist() -> None:
    bad = []
    for name, text in TEXTS.items():
        for called, path in re.findall(r"\[`([\w.]+)`\]\((?:\.\./)*src/phasicrl/(\S+)\.py\)", text):
            bad += [] if called.startswith(f"{path.replace('/', '.')}.") else [(name, called)]
            look_up(called)
    assert not bad
    rows = re.findall(r"^\| .+", TEXTS["docs/reference/tricks.md"], flags=re.M)
    column = rows[0].split(" | ").index("here")
    for row in rows[1:]:
        for called in row.split(" | ")[column].strip("`").split(", "):
            look_up(called)


def prose(text: str) -> str:
    """Return a page without its code blocks, which have comments and brackets of their own."""
    return re.sub(r"```.*?```", "", text, flags=re.S)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them.

    A repeated name gets a number.
    """
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(text), flags=re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.append(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    earlier = [found[:index].count(name) for index, name in enumerate(found)]
    numbered = zip(found, earlier, strict=True)
    return {f"{name}-{number}" if number else name for name, number in numbered}


def blocks(language: str, text: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.S)


def test_what_pages_import_is_in_the_python_reference() -> None:
    used: set[str] = set()
    for text in TEXTS.values():
        used |= set(re.findall(r"\bfrom `(phasicrl\.[\w.]+)`", text))
        for node in ast.walk(ast.parse("\n".join(blocks("python", text)))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("phasicrl"):
                module = importlib.import_module(str(node.module))
                used |= {getattr(module, alias.name).__module__ for alias in node.names}
    assert not used - set(MODULES) and len(used) > 5


def shell_lines(text: str) -> list[str]:
    """Return the lines of a page's shell blocks, with continued lines joined."""
    return "\n".join(blocks("sh", text)).replace("\\\n", " ").splitlines()


def commands(page: str) -> list[list[str]]:
    """Return the words of each command in the code blocks and the prose of a page.

    The changelog has none: it names removed commands.
    """
    text = TEXTS[page] if page != "CHANGELOG.md" else ""
    inline = re.findall(r"`(phasicrl [^`]+)`", prose(text).replace("\n", " "))
    # Not those that only name a command, or leave something out.
    whole = (line for line in inline if re.search("--|RUN|DIR", line))
    in_part = r"[|…\[]|COMMAND|PRESET|--help|^phasicrl \w+ --\S+$"
    lines = shell_lines(text) + [line for line in whole if not re.search(in_part, line)]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def own_commands(page: str) -> list[list[str]]:
    """Return the arguments of the commands of `phasicrl`, but for those that name variables."""
    named = [words[1:] for words in commands(page) if words[0] == "phasicrl"]
    return [words for words in named if "$" not in " ".join(words)]


class Parsed(Exception):
    """Sign that a command was understood; nothing was done."""


def understood(words: list[str], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return true if the command line accepts these words; nothing is run."""

    def parse(function: Any, *given: Any) -> None:
        def stop(*_: Any, **__: Any) -> None:
            raise Parsed

        parse_and_call(wraps(getattr(function, "func", function))(stop), *given)

    def parse_config_and_options(words: list[str], *given: Any, **options: Any) -> None:
        if not any(word == "RUN" or "$" in word or ".json" in word for word in words):
            read_run(words, *given, **options)
        raise Parsed

    parse_and_call, read_run = cli.parse_and_call, cli.parse_config_and_options
    monkeypatch.setattr(cli, "parse_and_call", parse)
    monkeypatch.setattr(cli, "parse_config_and_options", parse_config_and_options)
    try:
        cli.dispatch_command(words, cli.all_commands(), "phasicrl")
    except Parsed:
        return True
    return words[0] == "suite"  # which needs no arguments


def test_code_blocks_are_python_and_commands_that_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parse every word of them; other tests run them."""
    monkeypatch.chdir(tmp_path)
    for name, text in TEXTS.items():
        for block in blocks("python", text):
            ast.parse(block)
        for words in own_commands(name):
            with monkeypatch.context() as patch:
                first = 2 if words[0] == "--import" else 0
                assert understood(words[first:], patch), (name, words)
    for wrong in ("evaluat RUN", "evaluate RUN --episode 3", "plot RUN --metrics x",
                  "train classic-ppo --ppo.clipp 1", "sweep make"):  # fmt: skip
        with pytest.raises((ValueError, SystemExit)), monkeypatch.context() as patch:
            understood([*wrong.split()], patch)


def programs(text: str) -> list[list[str]]:
    """Return the commands of a page that start a program of ours."""
    lines = [line for line in shell_lines(text) if re.match("python (benchmarks|tools)/", line)]
    lines += re.findall(r"`(python (?:benchmarks|tools)/[^`]+)`", prose(text).replace("\n", " "))
    return [shlex.split(line, comments=True)[1:] for line in lines]


@functools.cache
def parse_preset(text: str) -> None:
    """Parse a preset with changed options; many commands have the same."""
    importlib.import_module("learning").make_trials([text], range(1, 2), "runs")


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a program read its words, and its presets their fields; it does not begin to work."""
    monkeypatch.syspath_prepend((ROOT / words[0]).parent)
    script = importlib.import_module(Path(words[0]).stem)
    args = tyro.cli(functools.wraps(script.main)(lambda *args, **_: args), args=words[1:])
    if words[0] == "benchmarks/learning.py":
        for preset in args[1]:
            parse_preset(preset)
    elif words[0] == "benchmarks/agents.py":
        assert all(map(get_preset, args[0]))


def test_commands_of_programs_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse every word of them, and the fields of every preset; none is run."""
    for text in TEXTS.values():
        for words in programs(text):
            with monkeypatch.context() as patch:
                parse(words, patch)
    for wrong in ("learning.py", "learning.py out.csv cartpole-ppo --sead 3",
                  "agents.py cartpole-pgp", "learning.py out.csv cartpole-pgp",
                  "learning.py out.csv 'cartpole-ppo:--ppo.clipp 1'"):  # fmt: skip
        with pytest.raises((ValueError, SystemExit)), monkeypatch.context() as patch:
            parse(shlex.split(f"benchmarks/{wrong}"), patch)


def dedent(text: str) -> str:
    """Return the lines without indentation, each with an end before and after it."""
    return "".join(f"\n{line.strip()}\n" for line in text.splitlines())


EXAMPLES = [dedent(path.read_text()) for path in sorted((ROOT / "examples").glob("*.py"))]
"""Texts of the examples, which tests/test_examples.py runs."""


def needs_another_package(block: str) -> bool:
    """Return true if a block imports what is not installed, such as the code of others."""
    modules = re.findall(r"^(?:from|import) (\w+)", block, flags=re.M)
    return any(importlib.util.find_spec(module) is None for module in modules)


TESTED_BELOW = ("docs/export.md", "docs/truncation.md")
CODE = {
    name: code
    for name, text in TEXTS.items()
    if name not in TESTED_BELOW
    and (code := [each for each in blocks("python", text)
                  if not (needs_another_package(each) or "TorchTrainer" in each
                          or any(dedent(each) in x for x in EXAMPLES))])
}  # fmt: skip
"""The Python of each page that no example has."""
LONG = ["docs/coming-from.md"]


@pytest.mark.parametrize(
    "page", [pytest.param(x, marks=[pytest.mark.long] * (x in LONG)) for x in sorted(CODE)]
)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block after the other, with small budgets."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    with patch.dict(METRICS):
        for block in CODE[page]:
            exec(re.sub(r"\b\d+00_000\b", "1024", block), names)
    trained = [*(tmp_path / "runs").glob("*/agent.safetensors")]
    assert len(trained) == sum(block.count("train(") for block in CODE[page])


@pytest.mark.slow
def test_ray_starts_the_processes_of_a_run(tmp_path: Path) -> None:
    """The program of the page, with two processes and a short run."""
    pytest.importorskip("ray.train", exc_type=ImportError)
    (program,) = (x for x in blocks("python", TEXTS["docs/distributed.md"]) if "TorchTrainer" in x)
    folder = tmp_path / "runs"
    for old, new in (
        ("num_workers=4, use_gpu=True", "num_workers=2"),
        ("procgen-ppg-paper", "cartpole-ppg"),
        ('"/shared/runs"', f"{str(folder)!r}, 'total_env_steps': 2048"),
    ):
        assert old in program
        program = program.replace(old, new)
    environ = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, check=True)
    (run,) = map(RunDirectory, folder.iterdir())
    assert run.card["processes"] == 2 and run.card["env_steps"] == 2048


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    """Copy the code, with the new loss of the page."""
    (diff,) = blocks("diff", TEXTS["docs/customize.md"])
    shutil.copytree(ROOT / "src", tmp_path / "src")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path)
    return tmp_path


def test_the_diff_of_a_new_loss_applies(patched: Path) -> None:
    assert "ppo.entropy_floor" in (patched / "src/phasicrl/phases.py").read_text()


@pytest.mark.long
def test_the_new_loss_trains(patched: Path) -> None:
    words = "classic-ppo --total-env-steps 1024 --ppo.entropy-floor 1 --log.console off"
    environment = os.environ | {"PYTHONPATH": str(patched / "src")}
    train = [sys.executable, "-m", "phasicrl", "train", *words.split()]
    subprocess.run(train, check=True, cwd=patched, env=environment, capture_output=True)
    (run,) = (patched / "runs").iterdir()
    assert json.loads((run / "config.json").read_text())["ppo"]["entropy_floor"] == 1


def test_the_example_of_the_page_about_truncation_gives_its_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = TEXTS["docs/truncation.md"]
    (block,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(block, {"__name__": "page"})
    printed = re.findall(r"-?\d+\.\d+", capsys.readouterr().out)
    said = re.findall(r"[−]?\d+\.\d\d", page[page.index("The first line is") :])[:6]
    assert [float(number) for number in printed] == pytest.approx(
        [float(number.replace("−", "-")) for number in said]
    )


def test_options_and_flags_that_a_page_names_exist() -> None:
    """`ppo.clip`, `--ppo.clip`, and `--env.no-action-masks` for a field that is on or off."""
    paths = set(get_defaults())
    groups = {path.partition(".")[0] for path in paths if "." in path}
    bad = []
    for name, text in TEXTS.items():
        if name == "CHANGELOG.md":  # that names what was removed
            continue
        named = re.findall(rf"`((?:{'|'.join(groups)})\.[a-z_]+)`", text)
        for group, field in re.findall(r"--((?:no-)?[a-z-]+)\.(?:no-)?([a-z-]+)", text):
            if group.removeprefix("no-").replace("-", "_") in groups:
                named.append(f"{group}.{field}".replace("-", "_"))
        bad += [(name, x) for x in named if x not in paths and not x.endswith((".py", ".json"))]
    assert not bad


def test_ppo_becomes_ppg_and_ppg_ppo_by_the_flags_of_the_page() -> None:
    page = TEXTS["docs/ppo-to-ppg.md"]
    there = " ".join(re.findall(r"^\|.*\| `(--.+)` \|$", page, flags=re.M))
    (back,) = re.findall(r"Back to `procgen-ppo`: `([^`]+)`", page)
    for preset, flags, other in (("procgen-ppo", there, "procgen-ppg"),
                                 ("procgen-ppg", back, "procgen-ppo")):  # fmt: skip
        assert replace(cli.parse_config([preset, *flags.split()]), name=other) == get_preset(other)


CITED = re.compile(r"[\w/]+\.py:\d[\d-]*")


def test_lines_of_others_code_are_links() -> None:
    """`[OPPG ppo.py:104](address)`, with the address that the page of sources has."""
    addresses: dict[str, set[str]] = {}
    for cited, address in cited_lines():
        addresses.setdefault(cited.split()[-1], set()).add(address)
    links = r"\[([^]]*?\b([\w/]+\.py:\d[\d-]*))\]\(([^)]+)\)"
    for name, text in TEXTS.items():
        for words, cited, address in re.findall(links, text):
            assert address in addresses[cited], f"{name}: {words} leads to {address}"
        bare = CITED.findall(re.sub(links, "", text)) if name.startswith("docs/") else []
        assert not bare, f"{name} cites lines without a link: {bare}"


def test_every_line_of_others_code_that_is_cited_has_its_address() -> None:
    """`OPPG ppo.py:104` is a row of the page of sources, at the commit that the page names."""
    page = TEXTS["docs/reference/sources.md"]
    for cited, address in cited_lines():
        file, lines = cited.split()[-1].split(":")
        path, _, anchor = address.partition("#")
        assert path.endswith(f"/{file}") and anchor.replace("L", "") == lines, cited
        assert re.sub(r"/blob/(\w+)/.*", r"/tree/\1)", path) in page, cited
    known = {cited.split()[-1] for cited, _ in cited_lines()} | {"torch/optim/adam.py:166-181"}
    sources = {str(path): path.read_text() for path in (ROOT / "src").rglob("*.py")}
    for name, text in (sources | TEXTS).items():
        for cited in CITED.findall(text):
            assert cited in known, f"{name} cites {cited}, which the page of sources has not"
