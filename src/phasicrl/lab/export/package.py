"""Packages of trained agents for publication. Kind: effects (files, environments).

A package is a directory with configuration, weights, origin, an evaluation, a page for readers and
a list of hashes. Everything that only reads a run directory reads packages, too.
"""

import html
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from phasicrl import Config, evaluate
from phasicrl.config_io import write_json
from phasicrl.lab.analysis.curves import Task, expand_sweeps, make_task
from phasicrl.lab.experiments.trials import RETURN
from phasicrl.lab.export.export import export_policy
from phasicrl.runs.checkpoint import hash_file
from phasicrl.runs.directory import METRICS_FILE, RunDirectory, WeightsKind
from phasicrl.training.evaluate import Evaluation, SavedAgent

PAGE_FILE, EVALUATION_FILE, HASHES_FILE = "README.md", "evaluation.json", "SHA256SUMS"
REQUIRED_FILES = ("config.json", "card.json", "agent.safetensors", EVALUATION_FILE, PAGE_FILE)
EVENTS_FILE = "training.tfevents"
PACKAGE_FILES = (*REQUIRED_FILES, METRICS_FILE, EVENTS_FILE, "policy.onnx")
"""Possible files of a package, besides the list of their hashes."""
_CARD_FIELDS = (
    "seed", "own", "env_steps", "seconds", "environment", "spaces", "plan", "versions", "commit"
)  # fmt: skip
"""Published fields of the card; the command is not, since it has folders of its machine."""


class AgentPackage(NamedTuple):
    """Package that `release` has written.

    Attributes:
        path: directory of the package.
        evaluations: greedy and sampled evaluation of its agent.
    """

    path: Path
    evaluations: tuple[Evaluation, ...]


def release(
    runs: Sequence[Path], *, output: Path | str = Path("release"), best_per_task: bool = False,
    weights: WeightsKind = "last", episodes: int = 100, onnx: bool = False, **user_objects: Any,
) -> list[AgentPackage]:  # fmt: skip
    """Write packages of trained agents: weights, configuration, evaluation, hashes.

    Args:
        runs: Run directories.
        output: Parent of the packages' directories.
        best_per_task: Package the run with the highest final return of each environment only.
        weights: Last weights, or best weights by the evaluations during the run.
        episodes: Episodes of the evaluation, for greedy and for sampled actions each.
        onnx: Add `policy.onnx`, which other tools can run.
        user_objects: custom environments and networks, see `train`.

    Raises:
        ValueError: a run is not a run directory or has no weights yet, or the output directory
            exists.
    """
    if not runs:
        raise ValueError("no runs are given; expected at least one run directory")
    agents_by_package: dict[Path, SavedAgent] = {}
    for run in _select_best_per_task(runs) if best_per_task else runs:
        saved = SavedAgent.from_run(run, **user_objects)
        path = Path(output) / RunDirectory.format_folder_prefix(saved.config, "-")
        if path.exists():
            raise ValueError(f"output has {path}; expected a folder without it, or remove it")
        if path in agents_by_package:
            rule = "one run of a name, environment and seed. Package them one by one"
            raise ValueError(f"runs has {path.name} twice; expected {rule}")
        agents_by_package[path] = saved
    packages = []
    for path, saved in agents_by_package.items():
        partial = path.with_name(f".{path.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _write_run_files(saved, weights, partial)
            evaluations = evaluate(partial, episodes=episodes, **user_objects)
            if onnx:
                export_policy(partial, output=partial / "policy.onnx", **user_objects)
            _write_evaluations_page_and_hashes(partial, evaluations)
            partial.rename(path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        packages.append(AgentPackage(path, tuple(evaluations)))
    return packages


def _select_best_per_task(runs: Sequence[Path]) -> list[Path]:
    """Select the run with the highest final return of each task."""
    best_runs: dict[Task, tuple[float, RunDirectory]] = {}
    found = [RunDirectory.find(run).path.resolve() for run in runs]
    for run in map(RunDirectory, expand_sweeps(found)):
        returns = [row[RETURN] for row in run.metrics(RETURN) if RETURN in row]
        last = returns[-1] if returns else float("-inf")
        task = make_task(run.env_id, run.config)
        if task not in best_runs or last > best_runs[task][0]:
            best_runs[task] = last, run
    return [run.path for _, run in best_runs.values()]


def _write_run_files(saved: SavedAgent, weights: WeightsKind, folder: Path) -> None:
    """Write configuration, card, weights and metrics of a run."""
    run, run_directory = saved.run_directory, RunDirectory(folder)
    changes = {"output_dir": "runs", "init_from": None, "log.console": "auto"}
    run_directory.write_config(saved.config.with_updates(changes))
    tensors, env_steps = run.load_weights(weights), run.weights_env_steps(weights)
    fields = {name: value for name, value in run.card.items() if name in _CARD_FIELDS}
    run_directory.write_card(fields | {"env_steps": env_steps})
    run_directory.save_weights(tensors, env_steps=env_steps)
    if (run.path / METRICS_FILE).is_file():
        shutil.copyfile(run.path / METRICS_FILE, folder / METRICS_FILE)
    # A resumed run has several files, named after its machine; their records can be joined.
    if events := sorted(run.path.glob("events.out.tfevents.*")):
        (folder / EVENTS_FILE).write_bytes(b"".join(path.read_bytes() for path in events))


def _write_evaluations_page_and_hashes(folder: Path, evaluations: Sequence[Evaluation]) -> None:
    """Write the evaluation, the page for readers and the list of hashes."""
    run_directory = RunDirectory(folder)
    results = [each.to_dict() | {"returns": each.returns} for each in evaluations]
    content = {"episodes": len(evaluations[0].returns), "seed": 0, "results": results}
    write_json(folder / EVALUATION_FILE, content)
    text = format_model_card(run_directory.config, run_directory.card, evaluations)
    (folder / PAGE_FILE).write_text(text, encoding="utf-8")
    names = [name for name in PACKAGE_FILES if (folder / name).is_file()]
    hashes = "".join(f"{hash_file(folder / name)}  {name}\n" for name in names)
    (folder / HASHES_FILE).write_text(hashes)


def check_package_hashes(path: Path) -> list[str]:
    """Check that a package has exactly its listed files, unchanged; return their names.

    Raises:
        ValueError: the directory is not a package, or its files differ from the list.
    """
    if not (path / HASHES_FILE).is_file():
        raise ValueError(f"{path} has no {HASHES_FILE}; expected a package of `phasicrl release`")
    pairs = [line.split() for line in (path / HASHES_FILE).read_text().splitlines()]
    listed = {pair[1]: pair[0] for pair in pairs if len(pair) == 2}
    if len(listed) < len(pairs) or not set(REQUIRED_FILES) <= set(listed) <= set(PACKAGE_FILES):
        raise ValueError(f"{path / HASHES_FILE} is damaged; expected hashes of a package's files")
    present = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    if others := sorted(present ^ {*listed, HASHES_FILE}):
        names = ", ".join(others)
        rule = f"the files in {HASHES_FILE}. Move others away, restore what is missing"
        raise ValueError(f"{path} has or lacks {names}; expected {rule}")
    for name, digest in listed.items():
        file = path / name
        if file.is_symlink() or not file.is_file() or hash_file(file) != digest:
            raise ValueError(f"{file} was changed; expected the SHA-256 in {HASHES_FILE}")
    return list(listed)


def format_model_card(
    config: Config, run_card: dict[str, Any], evaluations: Sequence[Evaluation]
) -> str:
    """Format the package's page, with metadata for model hubs (YAML, as JSON)."""
    env, kind = config.env.id.rpartition(":")[2], "PPG" if config.has_auxiliary_phase else "PPO"
    title = re.sub(r"([\\`*_\[\]|~!])", r"\\\1", html.escape(env))
    evaluation_dicts: list[Any] = [each.to_dict() for each in evaluations]
    score = f"{evaluation_dicts[0]['mean_return']:.2f} +/- {evaluation_dicts[0]['std_return']:.2f}"
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
        for each in evaluation_dicts
    ]
    own = {name: x for name, x in (run_card.get("own") or {}).items() if name.startswith("make_")}
    maker_flag = f" --make-env {own['make_env']}" if "make_env" in own else ""
    flags = config.import_flags + maker_flag
    commands = [f"phasicrl evaluate .{flags}", f"phasicrl train --from config.json{flags}"]
    if own.keys() - {"make_env"} or "__main__" in flags:
        call = f"phasicrl.evaluate('.', {', '.join(f'{name}=…' for name in own)})"
        commands = [f"# in Python: {call}"]
    commands += [f"# with {', '.join(own.values())} of the author"] * bool(own)
    lines = [
        "---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", "",
        f"# {kind} on {title}", "",
        f"{run_card.get('env_steps', 0):,} environment steps, seed {config.seed}, "
        f"commit {run_card.get('commit') or 'unknown'}.", "",
        "| actions | mean return | 95 % interval | deviation | episodes |",
        "|---|---|---|---|---|", *rows, "",
        "```sh", *commands, "```", "",
        "Weights are in `agent.safetensors`, configuration and origin in `config.json` and",
        "`card.json`, all returns in `evaluation.json`. No file here holds code.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
