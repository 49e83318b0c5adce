"""Trained agents as packages to publish. Kind: effects (files, environments).

A package is a folder of fixed names: configuration, weights, origin, an evaluation, a page for
readers and a list of hashes. It can be used wherever a run directory is only read.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from phasicrl import Config, evaluate
from phasicrl.config_io import write_json
from phasicrl.lab.analysis.curves import Task, task_of
from phasicrl.lab.experiments.trials import RETURN
from phasicrl.lab.export.export import export_policy
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.training.evaluate import Evaluation, SavedAgent

PAGE_FILE, EVALUATION_FILE, HASHES_FILE = "README.md", "evaluation.json", "SHA256SUMS"
NEEDED = ("config.json", "card.json", "agent.safetensors", EVALUATION_FILE, PAGE_FILE)
METRICS_FILE, EVENTS_FILE = "metrics.jsonl", "training.tfevents"
FILES = (*NEEDED, METRICS_FILE, EVENTS_FILE, "policy.onnx")
"""Files that a package may hold, beside the list of their hashes."""
_OF_CARD = ("seed", "own", "env_steps", "seconds", "environment", "plan", "versions", "commit")
"""Published entries of the card, without the command, which has folders of its machine."""


class Package(NamedTuple):
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
    **user_objects: Any,
) -> list[Package]:  # fmt: skip
    """Write packages of trained agents: weights, configuration, evaluation, hashes.

    Args:
        runs: Run directories.
        output: Gets a folder for each package.
        best: Of the runs of an environment take the one with the highest return at its end.
        weights: The last weights, or the best by the evaluations of the run.
        episodes: Episodes of the evaluation, for each way of choosing actions.
        onnx: Add `policy.onnx`, which other tools can run.
        user_objects: as for `evaluate`.

    Raises:
        ValueError: not a run directory, no weights yet, or an output folder that already exists.
    """
    if not runs:
        raise ValueError("runs is empty; give at least one run directory")
    folders: dict[Path, SavedAgent] = {}
    for run in _best_of_each(runs) if best else runs:
        saved = SavedAgent.open(run, **user_objects)
        config = saved.config
        env = config.env.id.rpartition(":")[2].replace("/", "-")
        path = output / f"{config.name}-{env}-s{config.seed}"
        if path.exists() or path in folders:
            raise ValueError(f"output {path} already exists; remove it or choose another")
        folders[path] = saved
    packages = []
    for path, saved in folders.items():
        partial = path.with_name(f".{path.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _copy_agent(saved, weights, partial)
            found = evaluate(partial, episodes=episodes, **user_objects)
            if onnx:
                export_policy(partial, **user_objects)
            _write_pages(partial, found)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        packages.append(Package(path, tuple(found)))
    return packages


def _best_of_each(runs: Sequence[Path]) -> list[Path]:
    """Choose for each task the run that ended with the highest return."""
    best: dict[Task, tuple[float, RunDirectory]] = {}
    for run in map(RunDirectory, map(Path, runs)):
        returns = [row[RETURN] for row in run.metrics(RETURN) if RETURN in row]
        last = returns[-1] if returns else float("-inf")
        task = task_of(run.env_id, run.config)
        if task not in best or last > best[task][0]:
            best[task] = last, run
    return [run.path for _, run in best.values()]


def _copy_agent(saved: SavedAgent, weights: WeightsKind, folder: Path) -> None:
    """Write configuration, card, weights and metrics of a run."""
    run, files = saved.files, RunDirectory(folder)
    files.write_config(replace(saved.config, output_dir="runs", init_from=None))
    env_steps = run.steps_of_weights(weights)
    kept = {name: value for name, value in run.card.items() if name in _OF_CARD}
    files.write_card(kept | {"env_steps": env_steps})
    files.save_weights(run.weights(weights), env_steps=env_steps)
    if (run.path / METRICS_FILE).is_file():
        shutil.copyfile(run.path / METRICS_FILE, folder / METRICS_FILE)
    # A resumed run has several files, named after its machine; their records can be joined.
    if events := sorted(run.path.glob("events.out.tfevents.*")):
        (folder / EVENTS_FILE).write_bytes(b"".join(path.read_bytes() for path in events))


def _write_pages(folder: Path, found: Sequence[Evaluation]) -> None:
    """Write the evaluation, the page for readers and the list of hashes."""
    files = RunDirectory(folder)
    results = [each.to_dict() | {"returns": each.returns} for each in found]
    about = {"episodes": len(found[0].returns), "seed": 0, "results": results}
    write_json(folder / EVALUATION_FILE, about)
    (folder / PAGE_FILE).write_text(page(files.config, files.card, found), encoding="utf-8")
    names = [name for name in FILES if (folder / name).is_file()]
    hashes = "".join(f"{_digest(folder / name)}  {name}\n" for name in names)
    (folder / HASHES_FILE).write_text(hashes)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def check_package(path: Path) -> list[str]:
    """Check that a package has exactly its listed files, unchanged; returns their names.

    Raises:
        ValueError: it is not a whole package.
    """
    if not (path / HASHES_FILE).is_file():
        raise ValueError(f"{path} has no {HASHES_FILE}; expected a package of `phasicrl release`")
    pairs = [line.split() for line in (path / HASHES_FILE).read_text().splitlines()]
    listed = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    if len(listed) < len(pairs) or not set(NEEDED) <= set(listed) <= set(FILES):
        raise ValueError(f"{path / HASHES_FILE} does not list the files of a package")
    present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if others := sorted(present ^ {*listed, HASHES_FILE}):
        raise ValueError(f"{path} has other files than it lists: {', '.join(others)}")
    for name, digest in listed.items():
        file = path / name
        if file.is_symlink() or not file.is_file() or _digest(file) != digest:
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
