"""The plan of a run, from its configuration and the machine: a pure function, a line a case."""

from typing import Any

import pytest
import torch

from phasicrl.config import Config
from phasicrl.execution.device import resolve_device
from phasicrl.execution.plan import MIN_COMPILE_STEPS, MIN_THREAD_SAMPLES, PHASES, Plan, make_plan
from phasicrl.presets import get_preset

CPU: dict[str, Any] = {"device": "cpu", "num_cores": 4, "has_compiler": True}
GPU: dict[str, Any] = {"device": "cuda:0", "num_cores": 4, "has_compiler": True}
SHORT = get_preset("cartpole-ppo").with_updates({"total_env_steps": 10_000})
IMAGES = get_preset("procgen-ppg")
RECURRENT = get_preset("cartpole-masked-velocity-ppo")
LONG = SHORT.with_updates({"total_env_steps": 100_000_000})


def plan(machine: dict[str, Any], config: Config, **compute: Any) -> Plan:
    changes = {f"compute.{name}": value for name, value in compute.items()}
    return make_plan(config.with_updates(changes), **machine, has_images=config is IMAGES)


@pytest.mark.parametrize(("machine", "config", "compute", "expected"), [
    (CPU, SHORT, {}, False), (CPU, LONG, {}, True), (CPU, LONG, {"compile": "off"}, False),
    (CPU | {"has_compiler": False}, LONG, {}, False), (CPU, IMAGES, {}, False),
    (CPU, IMAGES, {"compile": "on"}, True), (GPU, SHORT, {}, False),
    (GPU, SHORT, {"compile": "on"}, True), (GPU, IMAGES, {}, True),
    (GPU | {"has_compiler": False}, IMAGES, {}, False),
    (GPU, IMAGES, {"compile": "off"}, False), (GPU, RECURRENT, {}, False),
    (GPU, RECURRENT, {"compile": "on"}, False),
])  # fmt: skip
def test_steps_are_compiled_where_that_pays_and_works(
    machine: dict[str, Any], config: Config, compute: dict[str, Any], expected: bool
) -> None:
    assert SHORT.num_gradient_steps < MIN_COMPILE_STEPS <= LONG.num_gradient_steps
    assert plan(machine, config, **compute).compiled == expected


@pytest.mark.parametrize(("machine", "config", "compute", "expected"), [
    (CPU, IMAGES, {}, 64), (CPU, IMAGES, {"micro_batch": 16}, 16),
    (CPU, IMAGES, {"policy_precision": "bf16", "aux_precision": "bf16"}, 128),
    (CPU, IMAGES, {"micro_batch": None}, None), (CPU, IMAGES, {"compile": "on"}, None),
    (GPU, IMAGES, {}, None), (GPU, IMAGES, {"micro_batch": 512}, 512),
    (CPU, LONG, {}, None), (CPU, LONG, {"micro_batch": 16}, None),
])  # fmt: skip
def test_images_go_through_the_network_in_micro_batches(
    machine: dict[str, Any], config: Config, compute: dict[str, Any], expected: int | None
) -> None:
    assert plan(machine, config, **compute).micro_batch == dict.fromkeys(PHASES, expected)


def test_threads_are_shared_where_there_is_much_to_do() -> None:
    assert plan(CPU, SHORT).num_threads == 1 and plan(CPU, IMAGES).num_threads == 4
    large = SHORT.with_updates({"env.num_envs": MIN_THREAD_SAMPLES, "ppo.num_minibatches": 1})
    assert plan(CPU, large).num_threads == 4
    assert plan(CPU, IMAGES, num_threads=3).num_threads == 3


def test_a_gpu_is_chosen_where_there_is_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def empty(size: int, *, device: str) -> torch.Tensor:
        tried.append(device)
        return torch.zeros(size)

    monkeypatch.setattr(torch, "empty", empty)
    for has_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        for prefers_gpu in (True, False):
            resolve_device("auto", prefers_gpu)
    assert tried == ["cuda", "cpu", "cpu", "cpu"]


def test_runs_take_turns_where_two_of_them_do_not_fit_side_by_side() -> None:
    assert plan(CPU, IMAGES).take_turns and plan(CPU, IMAGES, num_threads=3).take_turns
    assert not plan(CPU, IMAGES, num_threads=2).take_turns
    assert not plan(CPU, IMAGES, take_turns=False).take_turns
    assert not plan(CPU, SHORT).take_turns and not plan(GPU, IMAGES).take_turns
