"""Policies as files for other tools: ONNX and `torch.export`. Kind: effects (files, environments).

A file is tried before it is given out: it must say what the agent says, on observations of the
run's own environments.
"""

from __future__ import annotations

import json
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from phasicrl.config import Levels
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.lab.export.graph import PolicyGraph, named_inputs
from phasicrl.models.agent import EncoderFactory
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.session.evaluate import Evaluation, load_agent
from phasicrl.session.evaluation import Seen, make_evaluation_envs, play_episodes, steps
from phasicrl.spaces import ObservationLayout

Format = Literal["onnx", "torch"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2"}
TOLERANCE = 1e-5
"""The largest difference that is accepted, absolute below 1 and relative above."""
_KEY = "phasicrl"
"""Of the description in a file's metadata."""
Arrays = dict[str, NDArray[Any]]


class PolicyFile(Protocol):
    """An exported policy that was opened.

    Attributes:
        about: what the exporter said of it: spaces, inputs, outputs, whence it is.
    """

    about: dict[str, Any]

    def __call__(self, inputs: Arrays) -> Arrays:
        """Map inputs by name, `[B, …]`, to outputs by name."""
        ...


@dataclass(frozen=True, slots=True)
class Export:
    """What was written, and how it was tried.

    Attributes:
        path: of the file.
        about: its description, as it stands in the file too.
        observations: on which it was compared with the agent.
        difference: the largest between any of its numbers and the agent's, relative above 1.
    """

    path: Path
    about: dict[str, Any]
    observations: int
    difference: float


def export_policy(
    run_dir: Path | str,
    *,
    format: Format = "onnx",
    output: Path | None = None,
    weights: WeightsKind = "last",
    observations: int = 1_000,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
) -> Export:
    """Write the policy of a run as a file that other tools can run.

    Normalization, masks, memory and the making of actions are in it: what goes in and comes out is
    in `PolicyGraph`. It is tried on observations of the run's environments before it is given out.

    Args:
        run_dir: Run directory.
        format: ONNX, or a program of `torch.export`.
        output: The file; else `policy.onnx` or `policy.pt2` in the run directory.
        weights: The last that were saved, or the best by the evaluations of the run.
        observations: On how many, at least, it is compared with the agent.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: what training was given, for runs on a vector environment of your own.
        make_encoder: what training was given, for runs with a network of your own.

    Raises:
        ValueError: not a run directory, one without weights yet, a network of one's own that
            `torch.export` cannot follow, or a file that says something else than the agent.
        ImportError: a package that the format needs is not installed.
    """
    if observations < 1:
        raise ValueError(f"observations is {observations}; give at least 1")
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own, make_encoder=make_encoder)
    output = output or files.path / f"policy{SUFFIXES[format]}"
    if output.suffix != SUFFIXES[format]:
        raise ValueError(f"{output}: files of {format} end with {SUFFIXES[format]}")
    _require(format)
    num_envs = max(2, min(observations, 8))  # torch.export would fix a batch of 1 at that size
    envs = make_evaluation_envs(config, num_envs=num_envs, levels="unseen", seed=0, **own)
    with closing(envs), torch.inference_mode(False), torch.no_grad():
        agent = load_agent(files, config, envs, make_encoder, weights)
        graph = PolicyGraph(agent, has_masks=envs.mask_size > 0).eval()
        recorded = _record(graph, envs, observations)
        about = _description(graph, files, envs)
        output.parent.mkdir(parents=True, exist_ok=True)
        untried = output.with_name(f".{output.stem}.tmp{output.suffix}")
        try:
            _write(graph, recorded[0][0], format, untried, about)
            policy = open_policy(untried)
            difference = max(_difference(policy, graph, *each) for each in recorded)
            os.replace(untried, output)
        finally:
            untried.unlink(missing_ok=True)
    return Export(output, about, num_envs * len(recorded), difference)


def _description(graph: PolicyGraph, files: RunDirectory, envs: VectorEnv) -> dict[str, Any]:
    """What a file says of itself."""
    return {
        "env": files.config.env.id,
        "observation_space": str(envs.observation_space),
        "action_space": str(envs.action_space),
        "state_size": graph.agent.state_size,
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "commit": files.card.get("commit"),
        "phasicrl": version("phasicrl"),
    }


def _require(format: Format) -> None:
    """Refuse a format whose packages are missing, before anything is computed."""
    packages = ("onnx", "onnxscript", "onnxruntime") if format == "onnx" else ()
    if missing := [name for name in packages if find_spec(name) is None]:
        needed = f"ONNX needs {', '.join(missing)}"
        raise ImportError(f"{needed}: pip install 'phasicrl[export]', or take --format torch")


Recorded = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Inputs of a graph, and what the agent itself makes of them."""


def _record(graph: PolicyGraph, envs: VectorEnv, observations: int) -> list[Recorded]:
    """Play, by drawn actions, until there are so many observations."""
    recorded: list[Recorded] = []
    generator = Generator().manual_seed(0)

    def act(seen: Seen) -> tuple[Tensor, Tensor]:
        obs, first = seen.obs.unsqueeze(1), seen.first.unsqueeze(1)
        mask = None if seen.action_mask is None else seen.action_mask.unsqueeze(1)
        said = graph.agent(obs, first, seen.state, mask)
        inputs = graph.arguments(seen)
        recorded.append((tuple(given.clone() for given in inputs), graph(*inputs)))
        return graph.agent.policy_head.env_action(said.policy.sample(generator)[:, 0]), said.state

    played = steps(act, envs, graph.agent.initial_state(envs.num_envs))
    for _ in islice(played, math.ceil(observations / envs.num_envs)):
        pass
    return recorded


def _write(
    graph: PolicyGraph, inputs: tuple[Tensor, ...], format: Format, output: Path, about: dict
) -> None:
    """Write the graph, for batches of any size."""
    axes = tuple({0: torch.export.Dim("batch", min=1)} for _ in inputs)
    with _quiet():
        try:
            program = torch.export.export(graph, inputs, dynamic_shapes={"inputs": axes})
        except Exception as error:  # whatever a network of one's own does
            said = str(error).partition("\n")[0]
            raise ValueError(
                f"torch.export cannot follow this network: {said}; an encoder of your own has to "
                "be free of what depends on the values of tensors"
            ) from error
        if format == "torch":
            torch.export.save(program, output, extra_files={_KEY: json.dumps(about)})
        else:
            names = list(graph.inputs), list(graph.outputs)
            made = torch.onnx.export(
                program, dynamo=True, input_names=names[0], output_names=names[1], verbose=False
            )
            assert made is not None, "asked with dynamo, it returns the program"
            made.model.metadata_props[_KEY] = json.dumps(about)
            made.save(output)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say of their own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _difference(
    policy: PolicyFile, graph: PolicyGraph, inputs: tuple[Tensor, ...], said: tuple[Tensor, ...]
) -> float:
    """The largest difference between what a file says and what the agent says.

    Raises:
        ValueError: it is larger than `TOLERANCE`, or an action is another.
    """
    found = policy(dict(zip(graph.inputs, (each.numpy() for each in inputs), strict=True)))
    largest = 0.0
    for name, tensor in zip(graph.outputs, said, strict=True):
        wanted, got = tensor.numpy(), found[name]
        if name == "action" and not graph.agent.policy_head.num_continuous:
            worst = float((wanted != got).any())
        else:
            worst = float((np.abs(got - wanted) / np.maximum(1, np.abs(wanted))).max())
        if not worst <= TOLERANCE:
            raise ValueError(
                f"the exported policy does not say what the agent says: {name} is another by "
                f"{worst:.2g}; this is a defect, please report it with config.json"
            )
        largest = max(largest, worst)
    return largest


def policy_file(path: Path) -> Path:
    """The file of an exported policy: the path itself, or what was exported last into a folder.

    Args:
        path: a file of `export_policy`, or a run directory or package that has one.

    Raises:
        ValueError: there is none, or it is none of ours.
    """
    if path.is_dir():
        found = [path / f"policy{suffix}" for suffix in SUFFIXES.values()]
        there = [file for file in found if file.is_file()]
        if not there:
            raise ValueError(f"{path} has no exported policy; `phasicrl export {path}` writes it")
        return max(there, key=lambda file: file.stat().st_mtime_ns)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; `phasicrl export RUN` writes one")
    if path.suffix not in SUFFIXES.values():
        raise ValueError(f"{path}: exported policies end with {' or '.join(SUFFIXES.values())}")
    return path


def open_policy(path: Path) -> PolicyFile:
    """Open an exported policy, that of `policy_file`.

    Args:
        path: a file of `export_policy`, or a run directory or package that has one.

    Raises:
        ValueError: there is none, or it is none of ours.
        ImportError: `onnxruntime` is missing.
    """
    path = policy_file(path)
    return _OnnxPolicy(path) if path.suffix == ".onnx" else _TorchPolicy(path)


class _OnnxPolicy:
    """A policy in onnxruntime, on the CPU."""

    def __init__(self, path: Path) -> None:
        _require("onnx")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime's errors have no common kind
            raise ValueError(f"{path} cannot be read as ONNX: {error}") from None
        self.about = _about(self._session.get_modelmeta().custom_metadata_map.get(_KEY), path)

    def __call__(self, inputs: Arrays) -> Arrays:
        names = list(self.about["outputs"])
        said: Any = self._session.run(names, inputs)
        return dict(zip(names, said, strict=True))


class _TorchPolicy:
    """A policy as a program of `torch.export`."""

    def __init__(self, path: Path) -> None:
        files: dict[str, Any] = {_KEY: ""}
        try:
            program = torch.export.load(path, extra_files=files)
        except Exception as error:  # as above
            raise ValueError(f"{path} cannot be read by torch.export: {error}") from None
        self.about, self._module = _about(files[_KEY], path), program.module()

    def __call__(self, inputs: Arrays) -> Arrays:
        with torch.no_grad():
            given = (torch.from_numpy(inputs[name]) for name in self.about["inputs"])
            said = self._module(*given)
        return {name: x.numpy() for name, x in zip(self.about["outputs"], said, strict=True)}


def _about(text: str | None, path: Path) -> dict[str, Any]:
    """The description in a file."""
    if not text:
        raise ValueError(f"{path} was not written by `phasicrl export`: it does not say what it is")
    return json.loads(text)


def play_exported(
    run_dir: Path | str,
    *,
    file: Path | None = None,
    episodes: int = 10,
    levels: Levels = "unseen",
    seed: int = 0,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
) -> Evaluation:
    """Let an exported policy act in the environments of its run, by its likeliest actions.

    The episodes are those of `evaluate`, as long as environments, seed and number are the same.

    Args:
        run_dir: Run directory, which says what is played.
        file: The exported policy; else the run's own `policy.onnx` or `policy.pt2`, the newer one.
        episodes: How many are played.
        levels: Procgen: the full distribution of levels, or those of the training.
        seed: Another seed, other episodes.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: what training was given, for runs on a vector environment of your own.

    Raises:
        ValueError: not a run directory, no exported policy, or one of other inputs.
    """
    if episodes < 1:
        raise ValueError(f"episodes is {episodes}; give at least 1")
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own)
    policy = open_policy(file or files.path)
    num_envs = min(episodes, 16)
    envs = make_evaluation_envs(config, num_envs=num_envs, levels=levels, seed=seed, **own)
    with closing(envs):
        _refuse_other_spaces(policy, envs, file or files.path)
        layout = ObservationLayout(envs.observation_space)

        def act(seen: Seen) -> tuple[Tensor, Tensor]:
            inputs = named_inputs(layout, seen)
            said = policy({name: inputs[name].numpy() for name in policy.about["inputs"]})
            state = said.get("new_state", seen.state)
            return torch.from_numpy(said["action"]), torch.as_tensor(state)

        state = torch.zeros(num_envs, policy.about["state_size"])
        return Evaluation("greedy", *play_episodes(act, envs, state, episodes=episodes), levels)


def _refuse_other_spaces(policy: PolicyFile, envs: VectorEnv, path: Path) -> None:
    """Refuse a policy that was made for other environments."""
    for what in ("observation_space", "action_space"):
        made_for, here = policy.about[what], str(getattr(envs, what))
        if made_for != here:
            raise ValueError(
                f"{path} was exported for the {what} {made_for}, {envs.name} has {here}; "
                "give the run that it was exported from"
            )
