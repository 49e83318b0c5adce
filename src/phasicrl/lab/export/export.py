"""Policies as files for other tools: ONNX and `torch.export`. Kind: effects (files, environments).

A new file is compared with the agent on observations of the run's environments.
"""

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from phasicrl.config import Levels
from phasicrl.lab.export.graph import AgentGraph, get_inputs_by_name
from phasicrl.runs.directory import WeightsKind
from phasicrl.system.machine import import_optional
from phasicrl.training.evaluate import Evaluation, SavedAgent
from phasicrl.training.evaluation import run_episodes

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
TOLERANCE = 1e-4
"""Largest accepted difference, absolute below 1 and relative above.

Rounding makes 2e-5 in a memory behind convolutions, whose features are in the hundreds.
"""
_METADATA_KEY = "phasicrl"
"""Key of phasicrl's entry in a file's metadata."""
Arrays = dict[str, NDArray[Any]]


class LoadedPolicy(NamedTuple):
    """Exported policy, opened to be called.

    Attributes:
        metadata: spaces, inputs, outputs and origin of the policy.
        infer: function from inputs by name, `[B, …]`, to the outputs in order.
    """

    metadata: dict[str, Any]
    infer: Callable[[Arrays], list[NDArray[Any]]]

    def __call__(self, inputs: Arrays) -> Arrays:
        """Map inputs by name, `[B, …]`, to outputs by name."""
        ordered = {name: inputs[name] for name in self.metadata["inputs"]}
        return dict(zip(self.metadata["outputs"], self.infer(ordered), strict=True))


class ExportResult(NamedTuple):
    """Result of an export: the file, and how its outputs compare with the agent's.

    Attributes:
        path: exported file.
        metadata: metadata of the policy, as in the file.
        num_compared: number of compared observations.
        max_relative_difference: largest difference of an output from the agent's output a,
            divided by `max(1, |a|)`.
    """

    path: Path
    metadata: dict[str, Any]
    num_compared: int
    max_relative_difference: float


def export_policy(
    run_dir: Path | str, *, format: Format = "onnx", output: Path | None = None,
    weights: WeightsKind = "last", observations: int = 1_000, **user_objects: Any,
) -> ExportResult:  # fmt: skip
    """Write the policy of a run as a file that other tools can run.

    The file includes normalization, masks, memory and the conversion of actions; docs/export.md
    describes inputs and outputs.

    Args:
        run_dir: Run directory.
        format: ONNX, or a program of `torch.export`.
        output: File to write; none: `policy.onnx` or `policy.pt2` in the run directory (`./NAME`
            for an agent of phasicrl).
        weights: Last weights, or best weights by the evaluations during the run.
        observations: Minimum number of observations on which it is compared with the agent.
        user_objects: custom environments and networks, see `train`.

    Raises:
        ValueError: `run_dir` is not a run directory or has no weights yet, `torch.export` cannot
            follow the network, or the file's outputs differ from the agent's.
        ImportError: a package that the format needs is not installed.
    """
    if observations < 1:
        raise ValueError(f"observations is {observations}; expected at least 1")
    saved = SavedAgent.from_run(run_dir, **user_objects)
    output = Path(output or saved.run_directory.output_folder / f"policy{SUFFIXES[format]}")
    if output.suffix != SUFFIXES[format]:
        raise ValueError(f"output is {output}; expected the ending {SUFFIXES[format]}")
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            import_optional(package, f"ONNX needs {package}")
    num_envs = max(2, min(observations, 8))  # torch.export would fix a batch of 1 at that size
    envs = saved.make_envs(num_envs, "unseen", seed=0)
    with closing(envs), torch.inference_mode(False), torch.no_grad():
        agent = saved.load_agent(envs, weights)
        graph = AgentGraph(agent, has_masks=envs.mask_size > 0).eval()
        samples = list(islice(_collect_inputs(graph, envs), math.ceil(observations / num_envs)))
        metadata = {
            "env": saved.config.env.id,
            "observation_space": str(envs.observation_space),
            "action_space": str(envs.action_space),
            "state_size": agent.state_size,
            "inputs": graph.input_docs,
            "outputs": graph.output_docs,
            "commit": saved.run_directory.card.get("commit"),
            "phasicrl": version("phasicrl"),
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = output.with_name(f".{output.stem}.tmp{output.suffix}")
        try:
            _write_file(graph, samples[0], format, temporary, metadata)
            policy = open_policy(temporary)
            difference = max(_compare_outputs(policy, graph, inputs) for inputs in samples)
            os.replace(temporary, output)
        finally:
            temporary.unlink(missing_ok=True)
    return ExportResult(output, metadata, num_envs * len(samples), difference)


def _collect_inputs(graph: AgentGraph, envs: Any) -> Iterator[tuple[Tensor, ...]]:
    """Act with sampled actions, and yield the inputs of the graph at each step."""
    agent, generator = graph.agent, Generator().manual_seed(0)
    obs, first = envs.reset(), torch.ones(envs.num_envs, dtype=torch.bool)
    state = agent.initial_state(envs.num_envs)
    while True:
        named = get_inputs_by_name(agent.reader.layout, obs, first, state, mask := envs.action_mask)
        yield tuple(named[name].clone() for name in graph.input_docs)
        masks = None if mask is None else mask.unsqueeze(1)
        policy, state = agent.policy(obs.unsqueeze(1), first.unsqueeze(1), state, masks)
        step = envs.step(agent.policy_head.env_action(policy.sample(generator)[:, 0]))
        obs, first = step.obs, step.terminated | step.truncated


def _write_file(
    graph: AgentGraph, inputs: tuple[Tensor, ...], format: Format, output: Path, metadata: dict
) -> None:
    """Write the graph in a format, for batches of any size."""
    axes = tuple({0: torch.export.Dim("batch", min=1)} for _ in inputs)
    with _silence():
        try:
            program = torch.export.export(graph, inputs, dynamic_shapes={"inputs": axes})
        except Exception as error:  # a user's network may raise any error
            given = f"the network is not exportable ({str(error).partition(chr(10))[0]})"
            rule = "operations that do not depend on the values of tensors. Change your encoder"
            raise ValueError(f"{given}; expected {rule}") from error
        if format == "torch":
            torch.export.save(program, output, extra_files={_METADATA_KEY: json.dumps(metadata)})
        else:
            onnx_program: Any = torch.onnx.export(
                program, dynamo=True, input_names=list(graph.input_docs),
                output_names=list(graph.output_docs), verbose=False,
            )  # fmt: skip
            onnx_program.model.metadata_props[_METADATA_KEY] = json.dumps(metadata)
            onnx_program.save(output)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the warnings and the log of the exporters."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _compare_outputs(policy: LoadedPolicy, graph: AgentGraph, inputs: tuple[Tensor, ...]) -> float:
    """Return the largest difference between the outputs of a file and of the agent.

    Raises:
        ValueError: the difference is larger than `TOLERANCE`.
    """
    outputs = policy(dict(zip(graph.input_docs, (each.numpy() for each in inputs), strict=True)))
    largest = 0.0
    for name, tensor in zip(graph.output_docs, graph(*inputs), strict=True):
        expected, got = tensor.numpy(), outputs[name]
        worst = float((np.abs(got - expected) / np.maximum(1, np.abs(expected))).max())
        if not worst <= TOLERANCE:
            given = f"{name} of the exported policy is {worst:.2g} off the agent's"
            rule = f"at most {TOLERANCE}. This is a defect: please report it with config.json"
            raise ValueError(f"{given}; expected {rule}")
        largest = max(largest, worst)
    return largest


def open_policy(path: Path) -> LoadedPolicy:
    """Open an exported policy.

    Args:
        path: an exported file, or a directory with `policy.onnx`, `policy.pt2`: the newer one.

    Raises:
        ValueError: there is no exported policy, or the file is damaged or of another program.
        ImportError: the file is ONNX, and `onnxruntime` is missing.
    """
    files = [path / f"policy{x}" for x in SUFFIXES.values()] if path.is_dir() else [path]
    present = [file for file in files if file.is_file() and file.suffix in SUFFIXES.values()]
    if not present:
        raise ValueError(f"{path} has no exported policy; expected one. `phasicrl export` makes it")
    path = max(present, key=lambda file: file.stat().st_mtime_ns)
    is_onnx = path.suffix == ".onnx"
    if is_onnx:
        import_optional("onnxruntime", "ONNX needs onnxruntime")
    try:
        text, infer = (_open_onnx if is_onnx else _open_torch)(path)
    except Exception as error:  # onnxruntime's errors have no common class
        kind = "ONNX" if is_onnx else "a program of torch.export"
        raise ValueError(f"{path} is unreadable ({error}); expected {kind}") from None
    if not text:
        raise ValueError(f"{path} has no description; expected a file of `phasicrl export`")
    return LoadedPolicy(json.loads(text), infer)


def _open_onnx(path: Path) -> tuple[str | None, Any]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    text = session.get_modelmeta().custom_metadata_map.get(_METADATA_KEY)
    return text, lambda inputs: session.run(None, inputs)


def _open_torch(path: Path) -> tuple[str | None, Any]:
    extra_files: dict[str, Any] = {_METADATA_KEY: ""}
    module = torch.export.load(path, extra_files=extra_files).module()

    @torch.no_grad()
    def run_program(inputs: Arrays) -> list[NDArray[Any]]:
        return [tensor.numpy() for tensor in module(*map(torch.from_numpy, inputs.values()))]

    return extra_files[_METADATA_KEY], run_program


def play_exported(
    run_dir: Path | str, *, file: Path | None = None, episodes: int = 10, levels: Levels = "unseen",
    seed: int = 0, **user_objects: Any,
) -> Evaluation:  # fmt: skip
    """Run episodes with the most likely actions of an exported policy.

    Episodes are those of `evaluate` with the same environments, seed and number.

    Args:
        run_dir: Run directory, for the environments.
        file: Exported policy; none: `policy.onnx` or `policy.pt2` in the run directory (`./NAME`
            for an agent of phasicrl), the newer one.
        episodes: Number of episodes.
        levels: Procgen: `unseen` (the full distribution), or `train` (the training levels).
        seed: Seed of the episodes.
        user_objects: custom environments and networks, see `train`.

    Raises:
        ValueError: `run_dir` is not a run directory, or there is no exported policy for its spaces.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; expected at least 1")
    saved = SavedAgent.from_run(run_dir, levels, **user_objects)
    file = Path(file or saved.run_directory.output_folder)
    policy = open_policy(file)
    with closing(saved.make_envs(min(episodes, 16), levels, seed)) as envs:
        for space in ("observation_space", "action_space"):
            exported, here = policy.metadata[space], str(getattr(envs, space))
            if exported != here:
                given = f"{file} was exported for the {space} {exported}"
                rule = f"{here} of {envs.name}. Give the run of the file."
                raise ValueError(f"{given}; expected {rule}")
        layout = saved.load_agent(envs).reader.layout

        def act(given: Any) -> tuple[Tensor, Tensor]:
            inputs = get_inputs_by_name(layout, *given)
            outputs = policy({name: inputs[name].numpy() for name in policy.metadata["inputs"]})
            state = outputs.get("new_state", given.state)
            return torch.from_numpy(outputs["action"]), torch.as_tensor(state)

        state = torch.zeros(envs.num_envs, policy.metadata["state_size"])
        return Evaluation("greedy", *run_episodes(act, envs, state, episodes=episodes), levels)
