"""Trained agents as packages to publish. Kind: effects (files, environments).

A package is a folder of fixed names: configuration, weights, origin, an evaluation, a page for
readers and a list of hashes. It can be used wherever a run directory is only read.
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
from phasicrl.config_io import read_text, write_json
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
"""Files that a package may hold, beside the list of their hashes."""
_OF_CARD = ("seed", "own", "env_steps", "seconds", "environment", "plan", "versions", "commit")
"""Published entries of the card, without the command, which has folders of its machine."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that was written.

    Attributes:
        path: folder of the package.
        evaluations: greedy and sampled evaluation of its agent.
    """

    path: Path
    evaluations: tuple[Evaluation, ...]


def release(
    runs: Sequence[Path], *, output: Path = Path("release"), best: bool = False,
    weights: WeightsKind = "last", episodes: int = 100, onnx: bool = False,
    make_env: Callable[[], gym.Env] | None = None, make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
) -> list[Package]:  # fmt: skip
    """Write packages of trained agents: weights, configuration, evaluation, hashes.

    Args:
        runs: Run directories.
        output: Gets a folder for each package.
        best: Of the runs of an environment take the one with the highest return at its end.
        weights: The last weights, or the best by the evaluations of the run.
        episodes: Episodes of the evaluation, for each way of choosing actions.
        onnx: Add `policy.onnx`, which other tools can run.
        make_env: environment of a run on your own environment.
        make_vector_env: vector environment of a run on your own vector environment.
        make_encoder: encoder of a run with your own network.

    Raises:
        ValueError: not a run directory, no weights yet, or an output folder that already exists.
    """
    if not runs:
        raise ValueError("runs is empty; give at least one run directory")
    own = {"make_env": make_env, "make_vector_env": make_vector_env, "make_encoder": make_encoder}
    folders: dict[Path, tuple[RunDirectory, Config]] = {}
    for run in _best_of_each(runs) if best else [RunDirectory(Path(run)) for run in runs]:
        config = run.config_for(**own)
        env = config.env.id.rpartition(":")[2].replace("/", "-")
        path = output / f"{config.name}-{env}-s{config.seed}"
        if path.exists() or path in folders:
            raise ValueError(f"output {path} already exists; remove it or choose another")
        folders[path] = run, config
    packages = []
    for path, (run, config) in folders.items():
        partial = path.with_name(f".{path.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            found = _write(partial, run, config, weights, episodes, onnx, own)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        packages.append(Package(path, tuple(found)))
    return packages


def _best_of_each(runs: Sequence[Path]) -> list[RunDirectory]:
    """Choose for each task the run that ended with the highest return."""
    best: dict[Task, tuple[float, RunDirectory]] = {}
    for run in map(RunDirectory, map(Path, runs)):
        returns = [row[RETURN] for row in run.metrics(RETURN) if RETURN in row]
        last = returns[-1] if returns else float("-inf")
        task = task_of(run.env_id, run.config)
        if task not in best or last > best[task][0]:
            best[task] = last, run
    return [run for _, run in best.values()]


def _write(
    folder: Path, run: RunDirectory, config: Config, weights: WeightsKind, episodes: int,
    onnx: bool, own: dict[str, Any],
) -> Sequence[Evaluation]:  # fmt: skip
    """Write the files of a package; returns the evaluations of its agent."""
    files, card = RunDirectory(folder), run.card
    public = replace(config, output_dir="runs", init_from=None)
    files.write_config(public)
    tensors, env_steps = run.weights(weights), run.steps_of_weights(weights)
    kept = {name: card[name] for name in _OF_CARD if name in card}
    files.write_card(kept | {"env_steps": env_steps})
    files.save_weights(tensors, env_steps=env_steps)
    if (run.path / METRICS_FILE).is_file():
        shutil.copyfile(run.path / METRICS_FILE, folder / METRICS_FILE)
    # A resumed run has several files, named after its machine; their records can be joined.
    if events := sorted(run.path.glob("events.out.tfevents.*")):
        (folder / EVENTS_FILE).write_bytes(b"".join(path.read_bytes() for path in events))
    found = evaluate(folder, episodes=episodes, **own)
    write_json(folder / EVALUATION_FILE, {
        "episodes": episodes, "seed": 0,
        "results": [each.to_dict() | {"returns": each.returns} for each in found],
    })  # fmt: skip
    if onnx:
        export_policy(folder, **own)
    (folder / PAGE_FILE).write_text(page(public, files.card, found), encoding="utf-8")
    names = [name for name in FILES if (folder / name).is_file()]
    hashes = "".join(f"{digest_of_file(folder / name)}  {name}\n" for name in names)
    (folder / HASHES_FILE).write_text(hashes)
    return found


def check_package(path: Path) -> list[str]:
    """Check that a package has exactly its listed files, unchanged; returns their names.

    Raises:
        ValueError: it is not a whole package.
    """
    if not (path / HASHES_FILE).is_file():
        raise ValueError(f"{path} has no {HASHES_FILE}; expected a package of `phasicrl release`")
    pairs = [line.split() for line in read_text(path / HASHES_FILE).splitlines()]
    listed = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    if len(listed) < len(pairs) or not set(NEEDED) <= set(listed) <= set(FILES):
        raise ValueError(f"{path / HASHES_FILE} does not list the files of a package")
    present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if others := sorted(present ^ {*listed, HASHES_FILE}):
        raise ValueError(f"{path} has other files than it lists: {', '.join(others)}")
    for name, digest in listed.items():
        file = path / name
        if file.is_symlink() or not file.is_file() or digest_of_file(file) != digest:
            raise ValueError(f"{file} was changed: its SHA-256 differs from the listed one")
    return list(listed)


def page(config: Config, card: dict[str, Any], found: Sequence[Evaluation]) -> str:
    """Return the package's page, with the metadata that model hubs read (YAML, as JSON)."""
    env, kind = config.env.id.rpartition(":")[2], "PPG" if config.has_auxiliary_phase else "PPO"
    title = re.sub(r"([\\`*_\[\]|~!])", r"\\\1", html.escape(env))
    reports: list[Any] = [each.to_dict() for each in found]
    score = f"{reports[0]['mean_return']:.2f} +/- {reports[0]['std_return']:.2f}"
    metric = {"type": "mean_reward", "value": score, "name": "mean_reward", "verified": False}
    task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    results = [{"task": task, "dataset": {"name": env, "type": env}, "metrics": [metric]}]
    head = {
        "library_name": "phasicrl",
        "tags": [env, "deep-reinforcement-learning", "reinforcement-learning", kind.lower()],
        "model-index": [{"name": config.name, "results": results}],
    }
    rows = [
        f"| {each['policy']} | {each['mean_return']:.2f} | {each['interval_95'][0]:.2f} to "
        f"{each['interval_95'][1]:.2f} | {each['std_return']:.2f} | {each['episodes']} |"
        for each in reports
    ]
    lines = [
        "---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "",
        f"# {kind} on {title}", "",
        f"{card.get('env_steps', 0):,} environment steps, seed {config.seed}, "
        f"commit {card.get('commit') or 'unknown'}.", "",
        "| actions | mean return | 95 % interval | deviation | episodes |",
        "|---|---|---|---|---|", *rows, "",
        "```sh", "phasicrl evaluate .", "phasicrl train --from config.json   # train it again",
        "```", "",
        "Weights are in `agent.safetensors`, configuration and origin in `config.json` and",
        "`card.json`, all returns in `evaluation.json`. No file here holds code.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
