"""Depth of a gradient step, files of an iteration, and places of metrics."""

import ast
import re
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

import phasicrl
from phasicrl.algorithm import learn
from phasicrl.config import RewardNormConfig
from phasicrl.runs.metrics import METRICS
from tests.helpers import look_up, open_run, tiny, tiny_aux

PACKAGE = Path(phasicrl.__file__).parent
MAX_ROOT_MODULES = 18
MAX_FRAMES_TO_BACKWARD = 3
MAX_FILES_OF_AN_ITERATION = 12


@contextmanager
def profiled(on_call: Callable[[FrameType], None]) -> Iterator[None]:
    """Call a function with the frame of each call of ours."""

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            on_call(frame)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_a_gradient_is_three_frames_below_the_algorithm(tmp_path: Path) -> None:
    seen: set[tuple[str, ...]] = set()
    backward = Tensor.backward

    def spy(loss: Tensor, *args: Any, **options: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if str(PACKAGE) in frame.filename]
        names = [frame.name for frame in frames]
        seen.add(tuple(names[names.index("learn") :]))
        backward(loss, *args, **options)

    with patch.object(Tensor, "backward", spy):
        learn(open_run(tiny(tmp_path, aux=tiny_aux())))
    assert {names[1] for names in seen} == {"policy_phase", "auxiliary_phase"}
    assert max(map(len, seen)) <= MAX_FRAMES_TO_BACKWARD, seen


def test_one_iteration_of_ppo_enters_few_files(tmp_path: Path) -> None:
    """Count the trainer's files only.

    Environments, networks, the run and the processes are passed to it; their calls are not counted.
    """
    config = tiny(tmp_path, reward_norm=RewardNormConfig(per="none"), total_env_steps=64)
    run, entered = open_run(config), set[str]()
    given = ("envs/", "models/", "runs/", "training/", "distributed.py")

    def in_package(frame: FrameType | None) -> str:
        """Return the file of the nearest frame of ours, as `room/module.py`, or nothing."""
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        return "" if frame is None else str(Path(frame.f_code.co_filename).relative_to(PACKAGE))

    def note(frame: FrameType) -> None:
        name, caller = in_package(frame), in_package(frame.f_back)
        if not name.startswith(given) and not caller.startswith(given):
            entered.add(name)

    with profiled(note):
        run.callbacks.on_iteration = lambda run, _: entered.clear() if run.iteration == 1 else None
        learn(run)
    assert {"collect.py", "phases.py", "optimize.py"} <= entered
    assert len(entered) <= MAX_FILES_OF_AN_ITERATION, sorted(entered)


def test_the_root_holds_the_algorithm_alone() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MAX_ROOT_MODULES, sorted(modules)


SOURCES = {path: path.read_text() for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_found_by_its_full_name_where_it_is_made(name: str) -> None:
    made = [path for path, text in SOURCES.items() if f'"{name}"' in text]
    assert [path for path in made if path.name != "metrics.py"], f"{name} is put together"


@pytest.mark.parametrize("call", ["clamp(max=1.0)", "_fused_adam_(", "_foreach_norm("])
def test_clipping_and_adam_exist_once(call: str) -> None:
    assert [path.name for path, text in SOURCES.items() if call in text] == ["optimize.py"]


LAB_IMPORTS = """
phasicrl: Config cli evaluate get_preset train
phasicrl.algorithm: learn
phasicrl.config: ActionSelection Levels format_value
phasicrl.config_io: atomic_write check_output_file read_instance read_json write_json
phasicrl.envs.checks: convert_errors
phasicrl.envs.make: get_gym_maker make_envs
phasicrl.envs.protocol: LIMIT_HINT
phasicrl.models.agent: Agent
phasicrl.models.encoders: has_channels_first
phasicrl.presets: PRESETS
phasicrl.runs.checkpoint: CheckpointError hash_file
phasicrl.runs.directory: METRICS_FILE RunDirectory WeightsKind
phasicrl.runs.lock: RunInUseError RunLock
phasicrl.runs.metrics: METRICS
phasicrl.system.machine: import_optional num_cores
phasicrl.system.signals: SignalHandler call_on_parent_exit
phasicrl.training.bootstrap: bootstrap_band
phasicrl.training.build: preview_run start_run
phasicrl.training.evaluate: Evaluation SavedAgent
phasicrl.training.evaluation: run_episodes
"""
"""Modules and names of the core that the lab imports."""


def test_the_lab_imports_only_listed_names_of_the_core() -> None:
    used: dict[str, set[str]] = defaultdict(set)
    for path in (PACKAGE / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(SOURCES[path])):
            if isinstance(node, ast.Import | ast.ImportFrom):
                used[getattr(node, "module", node.names[0].name)] |= {x.name for x in node.names}
    core = {name: used[name] for name in used if re.match(r"phasicrl(?!\.lab)\b", name)}
    lines = [f"{module}: {' '.join(sorted(core[module]))}" for module in sorted(core)]
    assert lines == LAB_IMPORTS.split("\n")[1:-1]


PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def named_on_the_page() -> list[str]:
    """Return our dotted names on the page: in backticks, and in the drawing."""
    text = PAGE.read_text()
    drawing = re.search(r"```\n(.*?)```", text, re.S)
    assert drawing is not None
    folders = ["models", "envs", "execution", "runs", "experiments", "system"]
    modules = [path.stem for path in PACKAGE.glob("*.py")] + folders
    found = re.findall(r"`([a-z_]+(?:\.\w+)+)`", text)
    found += re.findall(r"([a-z_]+(?:\.\w+)+)", drawing.group(1))
    ours = [name for name in dict.fromkeys(found) if name.split(".")[0] in modules]
    return [name for name in ours if not name.endswith((".py", ".json")) and name != "ppo.clip"]


@pytest.mark.parametrize("name", named_on_the_page())
def test_every_name_on_the_page_of_walks_exists(name: str) -> None:
    look_up(name)


def test_the_drawing_is_what_an_iteration_calls(tmp_path: Path) -> None:
    """Everything drawn is called, callers before callees, in the order of the drawing."""
    drawing = re.search(r"```\n(.*?)```", PAGE.read_text(), re.S)
    assert drawing is not None
    names = [name.split(".")[-1] for name in re.findall(r"[├└]── ([\w.]+)", drawing.group(1))]
    drawn = [name for name in names if name not in ("step", "forward")]
    changes = {"ppo.kl_penalty": 0.5, "ppo.kl_penalty_target": 0.01}
    run = open_run(tiny(tmp_path, aux=tiny_aux()).with_updates(changes))
    called: list[str] = []

    def note(frame: FrameType) -> None:
        name = frame.f_code.co_name
        called.append(type(frame.f_locals["self"]).__name__ if name == "__call__" else name)

    with profiled(note):
        run.callbacks.on_iteration = lambda run, record: "stop" if run.iteration == 2 else None
        learn(run)
    # The second iteration has the auxiliary phase.
    position = called.index("collect", called.index("finish_iteration"))
    for name in drawn:
        assert name in called[position:], f"{name} is not called after what is drawn before it"
        position = called.index(name, position)
