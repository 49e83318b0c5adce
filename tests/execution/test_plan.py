"""What is chosen, from wishes, machine and workload.

A pure function, so that every case is a line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from phasicrl.config import ComputeConfig
from phasicrl.execution.plan import (
    WORTH_COMPILING,
    WORTH_PROBING,
    WORTH_SHARING,
    Findings,
    Machine,
    Plan,
    Workload,
    can_follow,
    make_plan,
    needs_probe,
)

CPU = Machine(device="cpu", num_cores=4, has_compiler=True)
GPU = Machine(device="cuda:0", num_cores=4, has_compiler=False)
VECTORS, IMAGES = Workload(has_images=False), Workload(has_images=True, has_aux=True)
ALL = ("policy", "value", "aux")


def plan(
    machine: Machine, workload: Workload, findings: Findings | None = None, **wishes: Any
) -> Plan:
    return make_plan(ComputeConfig(**wishes), machine, workload, findings)


@pytest.mark.parametrize(
    ("machine", "workload", "wishes", "expected"),
    [
        (CPU, VECTORS, {}, False),
        (CPU, replace(VECTORS, num_gradient_steps=WORTH_COMPILING), {}, True),
        (CPU, replace(VECTORS, num_gradient_steps=WORTH_COMPILING), {"compile": "off"}, False),
        (
            replace(CPU, has_compiler=False),
            replace(VECTORS, num_gradient_steps=WORTH_COMPILING),
            {},
            False,
        ),
        (CPU, replace(IMAGES, num_gradient_steps=10**6), {}, False),
        (CPU, IMAGES, {"compile": "on"}, True),
        (GPU, VECTORS, {}, True),
        (GPU, IMAGES, {}, True),
        (GPU, IMAGES, {"compile": "off"}, False),
        (GPU, replace(IMAGES, has_memory=True), {"compile": "on"}, False),
    ],
)
def test_steps_are_one_call_where_that_pays_and_works(
    machine: Machine, workload: Workload, wishes: dict[str, Any], expected: bool
) -> None:
    chosen = plan(machine, workload, **wishes)
    assert chosen.acts_in_one_call == expected and chosen.one_call == (ALL if expected else ())


@pytest.mark.parametrize(
    ("machine", "workload", "wish", "expected"),
    [
        (CPU, IMAGES, "auto", 64),
        (CPU, IMAGES, 16, 16),
        (CPU, IMAGES, None, None),
        (GPU, IMAGES, "auto", None),
        (GPU, IMAGES, 512, 512),
        (CPU, VECTORS, "auto", None),
        (CPU, VECTORS, 16, None),
    ],
)
def test_images_go_through_the_network_in_micro_batches(
    machine: Machine, workload: Workload, wish: int | Literal["auto"] | None, expected: int | None
) -> None:
    assert set(plan(machine, workload, micro_batch=wish).micro_batch.values()) == {expected}


def test_what_goes_in_micro_batches_by_hand_is_no_single_call() -> None:
    """Whoever gives a number may have no room for more."""
    assert plan(CPU, IMAGES, compile="on", micro_batch=16).one_call == ()
    assert plan(CPU, IMAGES, compile="on", aux_micro_batch=16).one_call == ("policy", "value")
    assert plan(CPU, IMAGES, compile="on").micro_batch == dict.fromkeys(ALL)


def test_threads_are_shared_where_there_is_much_to_do() -> None:
    assert plan(CPU, VECTORS).num_threads == 1 and plan(CPU, IMAGES).num_threads == 4
    assert plan(CPU, replace(VECTORS, minibatch_size=WORTH_SHARING)).num_threads == 4
    assert plan(CPU, IMAGES, num_threads=3).num_threads == 3


def test_runs_take_turns_where_two_of_them_do_not_fit_side_by_side() -> None:
    assert plan(CPU, IMAGES).take_turns and plan(CPU, IMAGES, num_threads=3).take_turns
    assert (
        not plan(CPU, IMAGES, num_threads=2).take_turns
        and not plan(CPU, IMAGES, take_turns=False).take_turns
    )
    assert not plan(CPU, VECTORS).take_turns and not plan(GPU, IMAGES).take_turns


def test_a_probe_is_asked_where_something_is_left_open_and_the_run_is_long() -> None:
    long = replace(IMAGES, can_be_probed=True, num_passes=WORTH_PROBING)
    assert needs_probe(ComputeConfig(), CPU, long)
    assert not needs_probe(ComputeConfig(), CPU, replace(long, num_passes=WORTH_PROBING - 1))
    assert not needs_probe(ComputeConfig(), CPU, replace(long, can_be_probed=False))
    assert not needs_probe(ComputeConfig(micro_batch=64), CPU, long)
    assert not needs_probe(ComputeConfig(), GPU, long)  # minibatches go whole
    assert needs_probe(ComputeConfig(aux_precision="auto"), GPU, long)
    assert not needs_probe(
        ComputeConfig(aux_precision="auto", micro_batch=64), CPU, replace(long, has_aux=False)
    )


def test_a_plan_survives_its_card_and_is_followed_on_the_same_kind_of_machine() -> None:
    found = Findings({"fp32": 32, "bf16": 128}, {"fp32": 100.0, "bf16": 200.0}, 1.0)
    chosen = plan(CPU, IMAGES, found, aux_precision="auto")
    assert Plan.from_dict(chosen.to_dict()) == chosen
    assert "auxiliary phase in bf16 in micro-batches of 128" in chosen.remarks[0]
    assert can_follow(chosen, CPU) and not can_follow(chosen, GPU)
    assert not can_follow(chosen, replace(CPU, num_cores=2))
    with pytest.raises(ValueError, match="no plan of this version"):
        Plan.from_dict({"device": "cpu"})
