"""Trained agents as files to give away. Kind: effects (files, environments).

A package is a folder of fixed names: configuration, weights, how they were made, an evaluation, a
page for people and a list of hashes. It can be used wherever a run directory is only read.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium as gym

from phasicrl.config import Config
from phasicrl.config_io import read_text
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.lab.analysis.curves import Task, task_of
from phasicrl.lab.experiments.trials import RETURN
from phasicrl.lab.export.export import export_policy
from phasicrl.models.agent import EncoderFactory
from phasicrl.runs.checkpoint import digest_of_file
from phasicrl.runs.directory import (
    CARD_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    WEIGHTS_FILE,
    RunDirectory,
    WeightsKind,
)  # fmt: skip
from phasicrl.session.evaluate import Evaluation, evaluate

PAGE_FILE, EVALUATION_FILE, HASHES_FILE = "README.md", "evaluation.json", "SHA256SUMS"
NEEDED = (CONFIG_FILE, CARD_FILE, WEIGHTS_FILE, EVALUATION_FILE, PAGE_FILE)
EVENTS_FILE = "training.tfevents"
FILES = (*NEEDED, METRICS_FILE, EVENTS_FILE, "policy.onnx")
"""All that a package may hold, beside the hashes of these."""
_OF_CARD = ("seed", "own", "env_steps", "seconds", "environment", "plan", "versions", "commit")
"""What of the card is given away: not the command, which has the folders of its machine."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was written.

    Attributes:
        path: of its folder.
        evaluations: of the agent in it, greedy and sampled.
    """

    path: Path
    evaluations: tuple[Evaluation, ...]


def release(
    runs: Sequence[Path],
    *,
    output: Path = Path("release"),
    best: bool = False,
    weights: WeightsKind = "last",
    episodes: int = 100,
    onnx: bool = False,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
) -> list[Package]:
    """Write packages of trained agents: weights, configuration, evaluation, hashes.

    Args:
        runs: Run directories.
        output: Gets a folder for each package.
        best: Of the runs of an environment take the one with the highest return at its end.
        weights: The last that were saved, or the best by the evaluations of the run.
        episodes: Of the evaluation, for each way of choosing actions.
        onnx: Add `policy.onnx`, which other tools can run.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: what training was given, for runs on a vector environment of your own.
        make_encoder: what training was given, for runs with a network of your own.

    Raises:
        ValueError: not a run directory, one without weights, or a package that is there already.
    """
    if not runs:
        raise ValueError("give at least one run directory")
    own = {"make_env": make_env, "make_vector_env": make_vector_env, "make_encoder": make_encoder}
    places: dict[Path, tuple[RunDirectory, Config]] = {}
    for run in _best_of_each(runs) if best else [RunDirectory(Path(run)) for run in runs]:
        config = run.config_for(**own)
        env = config.env.id.rpartition(":")[2].replace("/", "-")
        path = output / f"{config.name}-{env}-s{config.seed}"
        if path.exists() or path in places:
            way = "remove it, or choose another --output"
            raise ValueError(f"{path} is there already, or is to hold two runs; {way}")
        places[path] = run, config
    return [
        _write(run, path, config, weights, episodes, onnx, own)
        for path, (run, config) in places.items()
    ]


def _best_of_each(runs: Sequence[Path]) -> list[RunDirectory]:
    """For each task the run that ended with the highest return, in the order given."""
    best: dict[Task, tuple[float, RunDirectory]] = {}
    for run in map(RunDirectory, map(Path, runs)):
        returns = [row[RETURN] for row in run.metrics(RETURN) if RETURN in row]
        last = returns[-1] if returns else float("-inf")
        task = task_of(run.env_id, run.config)
        if task not in best or last > best[task][0]:
            best[task] = last, run
    return [run for _, run in best.values()]


def _write(
    run: RunDirectory,
    path: Path,
    config: Config,
    weights: WeightsKind,
    episodes: int,
    onnx: bool,
    own: dict[str, Any],
) -> Package:
    """Write one package, whole or not at all."""
    partial = path.with_name(f".{path.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        found = _fill(partial, run, config, weights, episodes, onnx, own)
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Package(path, tuple(found))


def _fill(
    partial: Path, run: RunDirectory, config: Config, weights: WeightsKind, episodes: int,
    onnx: bool, own: dict[str, Any],
) -> Sequence[Evaluation]:  # fmt: skip
    """Write the files of a package into a folder; returns what its agent reached."""
    files, card = RunDirectory(partial), run.card
    public = replace(config, output_dir="runs", init_from=None)
    files.write_config(public)
    tensors, env_steps = run.weights(weights), run.steps_of_weights(weights)
    kept = {name: card[name] for name in _OF_CARD if name in card}
    files.write_card(kept | {"env_steps": env_steps})
    files.save_weights(tensors, env_steps=env_steps)
    if (run.path / METRICS_FILE).is_file():
        shutil.copyfile(run.path / METRICS_FILE, partial / METRICS_FILE)
    # A resumed run has several files, whose names have its machine's; their records may follow.
    if events := sorted(run.path.glob("events.out.tfevents.*")):
        (partial / EVENTS_FILE).write_bytes(b"".join(path.read_bytes() for path in events))
    found = evaluate(partial, episodes=episodes, **own)
    files.write_json(EVALUATION_FILE, {
        "episodes": episodes, "seed": 0,
        "results": [each.to_dict() | {"returns": each.returns} for each in found],
    })  # fmt: skip
    if onnx:
        export_policy(partial, **own)
    (partial / PAGE_FILE).write_text(page(public, files.card, found), encoding="utf-8")
    names = [name for name in FILES if (partial / name).is_file()]
    hashes = "".join(f"{digest_of_file(partial / name)}  {name}\n" for name in names)
    (partial / HASHES_FILE).write_text(hashes)
    return found


def check_package(path: Path) -> list[str]:
    """Check that a package is whole: what was listed is there, unchanged, and nothing else.

    Returns:
        The names of its files, the list of hashes left out.

    Raises:
        ValueError: it is not.
    """
    if not (path / HASHES_FILE).is_file():
        raise ValueError(
            f"{path} is no package, it has no {HASHES_FILE}; `phasicrl release` makes one"
        )
    pairs = [line.split() for line in read_text(path / HASHES_FILE).splitlines()]
    listed = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    if len(listed) < len(pairs) or not set(NEEDED) <= set(listed) <= set(FILES):
        raise ValueError(f"{path / HASHES_FILE} does not list the files of a package")
    there = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if others := sorted(there - {*listed, HASHES_FILE}):
        raise ValueError(f"{path} holds what it does not list: {', '.join(others)}")
    for name, wanted in listed.items():
        file = path / name
        if file.is_symlink() or not file.is_file():
            raise ValueError(f"{path} lists {name}, which is no file there")
        if digest_of_file(file) != wanted:
            raise ValueError(f"{file} is not what was packed: its SHA-256 is another")
    return list(listed)


def page(config: Config, card: dict[str, Any], found: Sequence[Evaluation]) -> str:
    """The package's page, with the head that model hubs read (YAML, of which JSON is a part)."""
    env, kind = config.env.id.rpartition(":")[2], "PPG" if config.has_auxiliary_phase else "PPO"
    greedy = found[0].to_dict()
    score = f"{greedy['mean_return']:.2f} +/- {greedy['std_return']:.2f}"
    metric = {"type": "mean_reward", "value": score, "name": "mean_reward", "verified": False}
    task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    results = [{"task": task, "dataset": {"name": env, "type": env}, "metrics": [metric]}]
    head = {
        "library_name": "phasicrl",
        "tags": [env, "deep-reinforcement-learning", "reinforcement-learning", kind.lower()],
        "model-index": [{"name": config.name, "results": results}],
    }
    rows = [_row(each) for each in found]
    lines = [
        "---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "",
        f"# {kind} on {_escaped(env)}", "",
        f"{card.get('env_steps', 0):,} environment steps, seed {config.seed}, "
        f"commit {card.get('commit') or 'unknown'}.", "",
        "| actions | mean return | 95 % interval | deviation | episodes |",
        "|---|---|---|---|---|", *rows, "",
        "```sh", "phasicrl evaluate .", "phasicrl train --from config.json   # train it again",
        "```", "",
        "Weights are in `agent.safetensors`, how they were made in `config.json` and `card.json`,",
        "every return of the evaluation in `evaluation.json`. No file here holds code.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Text that is neither HTML nor Markdown."""
    return re.sub(r"([\\`*_\[\]|~!])", r"\\\1", html.escape(text))


def _row(found: Evaluation) -> str:
    """An evaluation as a row of the page's table."""
    numbers: Any = found.to_dict()
    low, high = numbers["interval_95"]
    return (
        f"| {found.policy} | {numbers['mean_return']:.2f} | {low:.2f} to {high:.2f} "
        f"| {numbers['std_return']:.2f} | {numbers['episodes']} |"
    )
