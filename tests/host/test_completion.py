"""The script that completes commands, asked by bash itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phasicrl.cli import VERBS, main
from phasicrl.host.completion import listed, options
from phasicrl.presets import PRESETS


def test_words_are_read_from_a_help_text() -> None:
    said = "usage: x\n\ncommands:\n  ls      All.\n  verify  Read.\n\n`x ls --help` says more."
    assert listed(said) == ["ls", "verify"] and listed("no list") == []
    said = (
        "╭─ options ─────╮\n│ -h, --help      show this │\n│ --levels {unseen,train,both} │\n"
        "│   Says --nothing else. │\n│ --json, --no-json │\n"
        "| --seed INT  Another. |\n|------------|"
    )
    assert options(said) == {
        "--levels": ["unseen", "train", "both"], "--json": [], "--no-json": [], "--seed": [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "phasicrl", "completion", "bash"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(done.stdout)
    return path


def offered(script: Path, *words: str) -> list[str]:
    """What bash offers for the last of the words."""
    quoted = " ".join(f"'{word}'" for word in ("phasicrl", *words))
    asked = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _phasicrl"
    done = subprocess.run(
        ["bash", "-c", f'{asked}; printf "%s\\n" "${{COMPREPLY[@]}}"'],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return done.stdout.split()


def test_bash_offers_verbs_presets_knobs_and_values(script: Path) -> None:
    assert set(offered(script, "")) == set(VERBS)
    assert offered(script, "ev") == ["evaluate"]
    assert set(offered(script, "train", "")) == set(PRESETS)
    assert offered(script, "train", "cartpole-ppo", "--ppo.cl") == ["--ppo.clip"]
    assert offered(script, "train", "cartpole-ppo", "--model.memory", "") == ["none", "lstm", "gru"]
    assert offered(script, "evaluate", "runs/x", "--levels", "") == ["unseen", "train", "both"]
    assert offered(script, "sweep", "sta") == ["status"]
    assert "--watch" in offered(script, "sweep", "status", "runs/x", "--")
    assert offered(script, "suite", "pen") == ["penalties"] and "--jobs" in offered(
        script, "suite", "--"
    )
    assert offered(script, "sweep", "create", "runs/x", "walker") == [
        "walker2d-ppo",
        "walker2d-ppg",
    ]
    assert offered(script, "plot", "runs/x", "--reference", "ppg") == ["ppg-paper"]
    assert offered(script, "evaluate", "runs/") == []  # then bash offers files


def test_zsh_gets_what_it_needs_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")  # is set by the command
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X compinit")
