"""The shape of the code as a reader meets it.

How deep a step is, how many files an iteration enters, where a metric is made.
"""

from __future__ import annotations

import re
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
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


def test_a_gradient_is_three_frames_below_the_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tiny(tmp_path, aux=tiny_aux()))
    seen: set[tuple[str, ...]] = set()
    backward = Tensor.backward

    def spy(loss: Tensor, *args: Any, **options: Any) -> None:
        frames = [frame for frame in traceback.extract_stack() if str(PACKAGE) in frame.filename]
        start = next(index for index, frame in enumerate(frames) if frame.name == "learn")
        seen.add(tuple(frame.name for frame in frames[start:]))
        backward(loss, *args, **options)

    monkeypatch.setattr(Tensor, "backward", spy)
    learn(run)
    assert {names[1] for names in seen} == {"policy_phase", "auxiliary_phase"}
    assert max(map(len, seen)) <= MAX_FRAMES_TO_BACKWARD, seen


def test_one_iteration_of_ppo_enters_few_files(tmp_path: Path) -> None:
    """Of the trainer itself.

    Environments, networks, the session and the world of processes are given to it, and what they
    call is theirs.
    """
    config = tiny(tmp_path, reward_norm=RewardNormConfig())
    run = open_run(replace(config, total_env_steps=2 * config.batch_size))
    of_trainer: set[str] = set()
    all_entered: set[str] = set()
    counted: list[tuple[set[str], set[str]]] = []

    def in_package(frame: FrameType | None) -> str:
        """The file of the nearest frame of ours, as `room/module.py`; empty where there is none."""
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        return "" if frame is None else str(Path(frame.f_code.co_filename).relative_to(PACKAGE))

    def is_given(name: str) -> bool:
        return name.startswith(("envs/", "models/", "runs/", "session/", "distributed.py"))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            name, caller = in_package(frame), in_package(frame.f_back)
            all_entered.add(name)
            if not is_given(name) and not is_given(caller):
                of_trainer.add(name)

    def count(*_: Any) -> None:
        counted.append((set(of_trainer), set(all_entered)))
        of_trainer.clear()
        all_entered.clear()

    sys.setprofile(profile)
    try:
        learn(run, count)
    finally:
        sys.setprofile(None)
    trainer, everything = counted[-1]
    assert {"collect.py", "phases.py", "optimize.py"} <= trainer
    assert len(trainer) <= MAX_FILES_OF_AN_ITERATION, sorted(trainer)
    print(f"\none iteration of PPO enters {len(everything)} files: {', '.join(sorted(everything))}")


def test_the_root_holds_the_algorithm_alone() -> None:
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MAX_ROOT_MODULES, sorted(modules)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_found_by_its_full_name_where_it_is_made(name: str) -> None:
    places = [
        path
        for path in PACKAGE.rglob("*.py")
        if f'"{name}"' in path.read_text() and path.name != "metrics.py"
    ]
    assert places, f"{name} is put together from parts somewhere"


def test_what_is_compiled_is_what_runs_eagerly() -> None:
    """Clipping and Adam exist once."""
    for name in ("clamp(max=1.0)", "_fused_adam_(", "_foreach_norm("):
        assert [path.name for path in PACKAGE.rglob("*.py") if name in path.read_text()] == [
            "optimize.py"
        ], name
    assert torch.optim.Adam.__name__ == "Adam"


PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def named_on_the_page() -> list[str]:
    """Dotted names of ours: in backticks, and in the drawing."""
    text = PAGE.read_text()
    drawing = re.search(r"```\n(.*?)```", text, re.S)
    assert drawing is not None
    modules = [path.stem for path in PACKAGE.glob("*.py")] + [
        "models",
        "envs",
        "execution",
        "runs",
        "experiments",
        "host",
    ]
    found = re.findall(r"`([a-z_]+(?:\.\w+)+)`", text) + re.findall(
        r"([a-z_]+(?:\.\w+)+)", drawing.group(1)
    )
    return [
        name
        for name in dict.fromkeys(found)
        if name.split(".")[0] in modules and not name.endswith((".py", ".json"))
    ]


@pytest.mark.parametrize("name", named_on_the_page())
def test_every_name_on_the_page_of_walks_exists(name: str) -> None:
    if name in ("ppo.clip",):
        return
    look_up(name)


def test_the_drawing_is_what_an_iteration_calls(tmp_path: Path) -> None:
    """Everything drawn is called, callers before callees, in the order of the drawing."""
    drawing = re.search(r"```\n(.*?)```", PAGE.read_text(), re.S)
    assert drawing is not None
    names = re.findall(r"[├└]── ([\w.]+)", drawing.group(1))
    drawn = [
        name.split(".")[-1] for name in names if name.split(".")[-1] not in ("step", "forward")
    ]
    config = tiny(tmp_path, aux=tiny_aux()).with_updates(
        {"ppo.kl_penalty": 0.5, "ppo.kl_penalty_target": 0.01}
    )
    run = open_run(config)
    called: list[str] = []
    names_of = {"__call__": lambda frame: type(frame.f_locals["self"]).__name__}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            name = frame.f_code.co_name
            called.append(names_of[name](frame) if name in names_of else name)

    sys.setprofile(profile)
    try:
        learn(run, lambda run, record: "stop" if run.iteration == 2 else None)
    finally:
        sys.setprofile(None)
    # The second iteration has the auxiliary phase.
    position = called.index("collect", called.index("finish_iteration"))
    for name in drawn:
        assert name in called[position:], f"{name} is not called after what is drawn before it"
        position = called.index(name, position)
