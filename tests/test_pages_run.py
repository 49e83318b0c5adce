"""The commands that the pages show, run one after the other as they stand there, in a small form.

Small means: every preset has a budget of a rollout or two, in a few environments and narrow
networks, suites have their first two arms, and the numbers in `SMALLER` replace a command's own.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from phasicrl import cli
from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.lab.experiments import suites, trials
from phasicrl.presets import PRESETS, Preset, get_preset
from phasicrl.training.evaluate import evaluate
from tests.helpers import mark_long, run_here
from tests.test_docs import TEXTS, commands, own_commands

SMALLER = {
    "--total-env-steps": "64", "--env.num-envs": "4", "--ppo.num-steps": "16", "--seconds": "0.2",
    "--episodes": "2", "--num-envs": "2", "--trials": "2", "--jobs": "1",
}  # fmt: skip
ONE_EPISODE = {"cartpole": 512, "starpilot": 512, "halfcheetah": 4096}
"""Steps of four environments in which some episode ends, of others 2,048: without, no curve."""
NEED_A_SERVICE = ("hub pull", "--ray", "mjlab:", "gymnax:", "pgx:")
"""The Hub, a cluster, simulators; tests of their own stand in (lab/export, lab/sweeps, envs)."""
MAY_MISS = ("--at-least", "--share-of-reference")
"""Bounds that an agent does not reach which has seen 64 steps: the exit code is 1 then."""


SMALL: dict[str, Any] = {
    "env.num_envs": 4, "ppo.num_steps": 16, "ppo.num_minibatches": 2, "total_env_steps": 64,
    "ppo.policy_epochs": 1, "ppo.value_epochs": 1, "model.channels": (2, 2), "log.console": "off",
    "model.hidden_sizes": (8,), "model.memory_size": 8, "compute.compile": "off",
}  # fmt: skip
SMALL_PHASE: dict[str, Any] = {
    "aux.every": 4, "aux.epochs": 1, "aux.num_minibatches": 2, "aux.iterations_per_epoch": None,
    "total_env_steps": 384,
}  # fmt: skip


def small(config: Config) -> Config:
    """Return the experiment with a few steps, in four environments."""
    changes = SMALL | (SMALL_PHASE if config.has_auxiliary_phase else {})  # of four rollouts
    if config.env.id.startswith("procgen"):  # some episode ends
        changes |= {"total_env_steps": 512}
    return config.with_updates(changes)


@pytest.fixture
def small_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every preset and suite small."""
    for name, preset in PRESETS.items():
        made = Preset(small(preset.config), preset.summary, preset.source, preset.parent)
        monkeypatch.setitem(PRESETS, name, made)
    few_steps = {"env.num_envs": 4, "ppo.num_steps": 16, "total_env_steps": 64}
    monkeypatch.setattr(suites, "_SMALL_PROCGEN", few_steps)
    monkeypatch.setattr(trials, "evaluate", partial(evaluate, episodes=1))  # in place of 100
    monkeypatch.setattr(trials, "run_in_processes", run_here)
    for name, suite in suites.SUITES.items():
        few = replace(suite, make_arms=lambda base, suite=suite: suite.make_arms(base)[:2])
        monkeypatch.setitem(suites.SUITES, name, few)


class Trained(dict[str, list[Path]]):
    """Four runs of CartPole, four of StarPilot, trained when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, task: str) -> list[Path]:
        preset, fields = {
            "cartpole": ("cartpole-ppo", {"total_env_steps": 256}),
            "starpilot": (
                "procgen-ppg",
                {"total_env_steps": 1024, "env.num_levels": 200, "evaluation.levels": "both"}),
        }[task]  # fmt: skip
        fields |= {"evaluation.every_iterations": 1, "evaluation.episodes": 2}
        config = small(get_preset(preset)).with_updates(fields)
        made = [train(replace(config, output_dir=str(self._folder))).directory]
        for seed in (2, 3, 4):  # the same run under other seeds
            copy = self._folder / f"{task}-{seed}"
            shutil.copytree(made[0], copy)
            there = json.loads((copy / "config.json").read_text())
            (copy / "config.json").write_text(json.dumps(there | {"seed": seed}))
            made.append(copy)
        # As if they had come as far as published curves begin; but the first of CartPole can still
        # be resumed.
        for run in made[task == "cartpole" :]:
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            late = [json.dumps(row | {"env_steps": 512 * row["env_steps"]}) for row in rows]
            (run / "metrics.jsonl").write_text("\n".join(late) + "\n")
        self[task] = made
        return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train the runs that the pages call RUN and RUN1."""
    return Trained(tmp_path_factory.mktemp("trained"))


def as_on(words: list[str], runs: Trained) -> list[str]:
    """Return a command of a page with runs that exist, and with smaller numbers."""
    images = ("--levels", "baselines", "procgen")
    task = "starpilot" if any(word in " ".join(words) for word in images) else "cartpole"
    names = {"RUN": 0, "RUN1": 1, "RUN2": 2, "RUN3": 3}
    changed = [word if word not in names else str(runs[task][names[word]]) for word in words]
    changed = ["sweeps/lr" if word == "DIR" else word for word in changed if word != "…"]
    changed = [package() if word == "release/NAME" else word for word in changed]
    longer = {"--total-env-steps": "320"} if words[0] == "resume" else {}
    for flag, number in (SMALLER | longer).items():
        if flag in changed:
            changed[changed.index(flag) + 1] = number
    if words[0] == "evaluate" and "--episodes" not in words:
        changed += ["--episodes", "2"]
    changed = [path for word in changed for path in (sorted(glob(word)) or [word])]
    if words[0] == "sweep":  # some episode of which ends
        changed = [word.replace("procgen-pp", "cartpole-pp") for word in changed]
    if "--seeds" in changed and words[0] == "sweep":
        first = changed.index("--seeds") + 1
        del changed[first + 1 : first + 3]
    if words[0] == "suite" and len(words) > 1:  # one seed of one task
        given = changed[changed.index("--tasks") + 1] if "--tasks" in changed else None
        one = given or suites.SUITES[words[1]].small_tasks[0]
        scale = ["--scale", "paper"] if "paper" in changed else []
        changed = [*changed[:2], "--tasks", one, *scale, "--seeds", "101",
                   "--total-env-steps", str(ONE_EPISODE.get(one, 2048))]  # fmt: skip
    return changed


def package() -> str:
    """Return the first package that `phasicrl release` made."""
    return sorted(glob("release/*/"))[0].rstrip("/")


def prepare(folder: Path, runs: Trained) -> None:
    """Make what a page expects: named runs, files of values, the reader's package."""
    (folder / "runs").mkdir()
    for name, source in zip(("demo", "other"), runs["cartpole"][1:], strict=False):
        shutil.copytree(source, folder / "runs" / f"{name}_{source.name}")
    values = {"ppo.learning_rate": [5e-4, 2e-4], "total_env_steps": [512]}
    (folder / "values.json").write_text(json.dumps(values))
    (folder / "space.json").write_text(json.dumps(values | {"ppo.clip": ["log", 0.1, 0.3]}))
    package = 'import gymnasium as gym\ngym.register("MyEnv-v0", "my_package:make")\n'
    package += 'def make(**options):\n    return gym.make("CartPole-v1", **options).unwrapped\n'
    (folder / "my_package.py").write_text(package)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Trained) -> Iterator[Path]:
    """Enter an empty folder with what a reader has, for the commands."""
    prepare(tmp_path, trained)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_package", None)
    gym.registry.pop("MyEnv-v0", None)


PAGES = [name for name in TEXTS if own_commands(name)]
SHORT = ("docs/first-run.md", "docs/memory-and-masks.md")
"""Pages that `make test` runs, too."""


def outcome(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Run a command; return its exit code, and what it wrote to the terminal."""
    try:
        code: Any = cli.main(words)
    except SystemExit as told:
        code = told.code or 0
    out, err = capsys.readouterr()
    return code, out[-500:] + err


@pytest.mark.filterwarnings("ignore:.*( is left out|as in )")
@pytest.mark.usefixtures("small_presets")
@pytest.mark.parametrize("page", mark_long(PAGES, *SHORT))
def test_the_commands_of_a_page_run(
    page: str, folder: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in own_commands(page):
        line = " ".join(words)
        if any(need in line for need in NEED_A_SERVICE):
            if words[:2] == ["hub", "pull"]:
                shutil.copytree(package(), words[words.index("--output") + 1])
            continue
        given = as_on(words, trained)
        code, text = outcome(given, capsys)
        accepted = (0, 1) if any(bound in line for bound in MAY_MISS) else (0,)
        assert code in accepted, f"{page}: {line}\n{given}\n{text}"


@pytest.mark.long
def test_torchrun_starts_a_run_of_several_processes_as_the_page_says(tmp_path: Path) -> None:
    """The first command of docs/distributed.md, with two processes in place of four."""
    words = commands("docs/distributed.md")[0]
    assert words[:2] == ["torchrun", "--nproc-per-node"]
    assert words[3:6] == ["-m", "phasicrl", "train"]
    fields = small(get_preset(words[6])).with_updates({"output_dir": str(tmp_path)})
    (tmp_path / "small.json").write_text(fields.to_json())
    launch = [sys.executable, "-m", "torch.distributed.run", *words[1:2], "2", *words[3:6]]
    subprocess.run([*launch, "--from", str(tmp_path / "small.json")], check=True)
    (run,) = tmp_path.glob("*/card.json")
    card = json.loads(run.read_text())
    assert card["processes"] == 2 and card["env_steps"] == fields.total_env_steps


def test_all_pages_are_read() -> None:
    assert len(PAGES) > 10 and sum(len(own_commands(page)) for page in PAGES) > 70
