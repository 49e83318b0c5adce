"""Learning rate, clip range and entropy bonus that follow schedules."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import DECAY_FUNCTIONS, Config, PPOConfig
from phasicrl.execution.compiled import has_compiler
from phasicrl.phases import PolicyPhaseLoss
from phasicrl.training.build import restore_run, start_run
from tests.helpers import assert_same, assert_same_run, corridor, open_run, stop_at, tiny, tiny_aux

FACTORS = {
    "constant": [1.0, 1.0, 1.0, 1.0],
    "linear": [1.0, 0.75, 0.5, 0.25],
    "cosine": [1.0, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4],
}
"""Factors in the four iterations of a tiny run, which begin at progress 0, ¼, ½ and ¾."""


def halve_clip(progress: float) -> dict[str, float]:
    """Clip range and rate by hand: 0.2, 0.175, 0.15, 0.125 and 1, 1.25, 1.5, 1.75 thousandths."""
    return {"ppo.clip": 0.2 * (1 - progress / 2), "ppo.learning_rate": 1e-3 * (1 + progress)}


def follow(tmp_path: Path, function: Any = None, **changes: Any) -> list[dict[str, Any]]:
    """Start the four iterations of a run; return what the optimizers and the loss get in each."""
    options = {f"ppo.{name}": value for name, value in changes.items()}
    config = tiny(tmp_path, aux=tiny_aux(optimizer="own", learning_rate=1e-3))
    found = []
    with start_run(config.with_updates(options), make_env=corridor, schedule=function) as run:
        for _ in range(4):
            record = run.learner.start_iteration()
            adams = run.learner.optimizers
            rates = {name: [g["lr"] for g in adam.param_groups] for name, adam in adams.items()}
            _, entropy_coef, clip = map(float, run.learner.policy_loss_coefficients())
            found.append(rates | record | {"entropy_coef": entropy_coef, "clip": clip})
    return found


@pytest.mark.parametrize(("ours", "others"), [*itertools.product(FACTORS, FACTORS)])
def test_options_follow_their_schedules(tmp_path: Path, ours: Any, others: Any) -> None:
    rates = {"learning_rate": 2e-3, "value_learning_rate": 4e-3, "schedule": ours}
    weights = {"clip": 0.1, "clip_schedule": others, "entropy_coef": 0.03, "entropy_schedule": ours}
    for x, y, found in zip(
        FACTORS[ours], FACTORS[others], follow(tmp_path, **rates, **weights), strict=True
    ):
        assert found["policy"] == pytest.approx([2e-3 * x, 4e-3 * x])
        charts = [found[f"charts/{which}learning_rate"] for which in ("", "value_")]
        assert charts == found["policy"]
        assert found["aux"] == pytest.approx([1e-3 * x, 1e-3 * x])
        assert found["clip"] == pytest.approx(0.1 * y)
        assert found["entropy_coef"] == pytest.approx(0.03 * x)


def test_scheduled_values_are_metrics(tmp_path: Path) -> None:
    rows = train(tiny(tmp_path), make_env=corridor, schedule=halve_clip).files.metrics()
    assert [row["charts/clip"] for row in rows] == pytest.approx([0.2, 0.175, 0.15, 0.125])
    assert {row["charts/entropy_coef"] for row in rows} == {0.01}
    assert "charts/clip" not in train(tiny(tmp_path), make_env=corridor).files.metrics()[0]


def test_a_function_takes_precedence_over_constants_and_named_schedules(tmp_path: Path) -> None:
    named = {"schedule": "linear", "clip_schedule": "cosine", "entropy_schedule": "linear"}
    for index, found in enumerate(follow(tmp_path, halve_clip, entropy_coef=0.04, **named)):
        assert found["clip"] == pytest.approx(0.2 - 0.025 * index)
        assert found["policy"] == pytest.approx([1e-3 + 2.5e-4 * index] * 2)
        assert found["aux"] == pytest.approx([1e-3 * (1 - index / 4)] * 2)
        assert found["entropy_coef"] == pytest.approx(0.04 * (1 - index / 4))
    options = {"ppo.clip": 0.3, "ppo.value_learning_rate": 0.004}
    for found in follow(tmp_path, lambda _: options, clip=None):
        assert [found["clip"], found["charts/value_learning_rate"]] == [0.3, 0.004]


def test_without_clip_the_range_is_infinite(tmp_path: Path) -> None:
    assert {x["clip"] for x in follow(tmp_path, clip=None, clip_schedule="linear")} == {math.inf}


def test_the_loss_has_the_current_clip_range_and_entropy_bonus(tmp_path: Path) -> None:
    """By hand: ratios of e^0.3 and advantages of 1, so that −1 − ε is the surrogate."""
    options = {"ppo.clip_schedule": "linear", "ppo.entropy_schedule": "cosine", "ppo.clip": 0.2}
    run = open_run(tiny(tmp_path).with_updates({**options, "ppo.entropy_coef": 0.04}))
    samples = run.collect(run.buffer.next_rollout()).policy_samples(torch.ones(4, 8))
    samples = replace(samples, old_log_prob=samples.old_log_prob - 0.3)
    loss = PolicyPhaseLoss(run.agent, run.config.ppo, trains_policy=True, trains_value=False)
    assert DECAY_FUNCTIONS["cosine"](1 - 1 / 3e8) > 0, "a rate of 0 is refused"
    for x, y in zip(FACTORS["linear"], FACTORS["cosine"], strict=True):
        run.learner.start_iteration()
        value, terms = loss(samples, *run.learner.policy_loss_coefficients())
        entropy = terms["losses/entropy"].item()
        assert terms["losses/policy_loss"].item() == pytest.approx(-1 - 0.2 * x)
        assert terms["losses/clipfrac"] == 1 and entropy > 0.5
        assert value.item() == pytest.approx(-1 - 0.2 * x - 0.04 * y * entropy)


@pytest.mark.parametrize("name", ["ppo.clip", "ppo.entropy_coef"])
def test_a_scheduled_run_departs_from_a_constant_one_after_start(tmp_path: Path, name: str) -> None:
    """The schedule jumps at the middle, to a value that a run can also have throughout."""
    config = tiny(tmp_path).with_updates({"ppo.clip": 0.2, "ppo.learning_rate": 0.05})
    values = {0: 0.1, 1: 0.001} if name == "ppo.clip" else {0: 0.0, 1: 0.5}

    def train_with(schedule: Callable[[float], Mapping[str, float]]) -> list[Any]:
        rows = train(config, make_env=corridor, schedule=schedule).files.metrics()
        return [row["losses/policy_loss"] for row in rows]

    constant = train_with(lambda _: {name: values[0]})
    jumping = train_with(lambda progress: {name: values[progress >= 0.5]})
    assert jumping[:2] == constant[:2] and jumping[2] != constant[2]
    changed = train(config.with_updates({name: values[0]}), make_env=corridor).files.metrics()
    assert [row["losses/policy_loss"] for row in changed] == constant


@pytest.mark.long
@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
def test_one_compiled_step_serves_all_values(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"ppo.clip_schedule": "cosine"})
    eager, compiled = (
        train(
            config.with_updates({"compute.compile": choice}), make_env=corridor,
            schedule=lambda progress: {"ppo.entropy_coef": 0.05 * progress},
        )
        for choice in ("off", "on")
    )  # fmt: skip
    steps = compiled.executor._compiled_steps
    assert len(steps) == 1 and None not in steps.values() and not eager.executor._compiled_steps
    for x, y in zip(eager.agent.parameters(), compiled.agent.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_continues_its_schedule(tmp_path: Path, stop: int) -> None:
    """The numbers are those of an unbroken run; without the function it is refused."""
    config = tiny(tmp_path, aux=tiny_aux()).with_updates({"ppo.entropy_schedule": "cosine"})
    own: Any = {"make_env": corridor, "schedule": halve_clip}
    whole = train(config, **own)
    run = train(config, **own, callbacks=stop_at(stop))
    with pytest.raises(ValueError, match=r"trained with schedule=.*:halve_clip; expected the same"):
        resume(run.directory, make_env=corridor)
    assert_same_run(whole, resume(run.directory, **own))
    assert_same(whole.learner.state_dict(), train(config, **own).learner.state_dict())


@pytest.mark.parametrize(("changes", "schedule", "said"), [
    ({}, None, {"ppo.learning_rate 0.0005"}),
    ({"ppo.schedule": "linear"}, None, {"ppo.learning_rate 0.00025"}),
    ({"ppo.clip_schedule": "linear"}, None, {"ppo.learning_rate 0.0005", "ppo.clip 0.1"}),
    ({"ppo.entropy_schedule": "cosine"}, None,
     {"ppo.learning_rate 0.0005", "ppo.entropy_coef 0.02"}),
    ({}, lambda x: {"ppo.entropy_coef": x / 3, "ppo.learning_rate": 1e-3, "ppo.clip": None},
     {"ppo.learning_rate 0.001", "ppo.clip inf", "ppo.entropy_coef 0.167"}),
    ({"aux": tiny_aux(optimizer="own", learning_rate=1e-3), "ppo.schedule": "linear"},
     lambda x: {"ppo.value_learning_rate": (1 + x) / 500},
     {"ppo.learning_rate 0.00025", "ppo.value_learning_rate 0.003", "aux.learning_rate 0.0005"}),
])  # fmt: skip
def test_a_longer_run_says_with_which_values_its_schedules_continue(
    tmp_path: Path, changes: dict[str, Any], schedule: Any, said: set[str],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    start = {"ppo.entropy_coef": 0.04, "ppo.learning_rate": 5e-4, "log.console": "plain"}
    config = tiny(tmp_path).with_updates(start | changes)
    run = train(config, make_env=corridor, schedule=schedule)
    resume(run.directory, total_env_steps=256, make_env=corridor, schedule=schedule)
    found = re.findall(r"(\S+) continues at ([\w.-]+)", capsys.readouterr().out)
    assert {*map(" ".join, found)} == said


def test_a_phase_that_is_made_up_for_has_the_rate_of_the_longer_run(tmp_path: Path) -> None:
    aux = tiny_aux(optimizer="own", learning_rate=1e-3)
    run = train(tiny(tmp_path, aux=aux).with_updates({"ppo.schedule": "linear"}), make_env=corridor)
    with restore_run(run.directory, total_env_steps=256, make_env=corridor) as longer:
        assert longer.learner.optimizers["aux"].param_groups[0]["lr"] == 1e-3 * (1 - 96 / 256)


@pytest.mark.parametrize(("schedule", "message"), [
    ("linear", r"schedule is 'linear'; expected a function"),
    ({"ppo.clip": 0.1}, r"schedule is {'ppo\.clip': 0\.1}; expected a function"),
    (lambda progress: 1 - progress, r"schedule returns 1\.0; expected a dict of"),
    (lambda _: {"ppo.gamma": 0.9}, r"schedule returns {'ppo\.gamma': 0\.9}; expected a dict"),
    (lambda _: {"ppo.clip": "low"}, r"ppo\.clip is 'low'; expected float"),
    (lambda _: {"ppo.clip": -0.1}, r"ppo\.clip is -0\.1; expected a number above 0"),
    (lambda _: {"ppo.entropy_coef": math.nan}, r"ppo\.entropy_coef is nan; expected 0 or"),
    (lambda _: {"ppo.learning_rate": None}, r"ppo\.learning_rate is None; expected float"),
])  # fmt: skip
def test_a_schedule_returns_numbers_of_options(tmp_path: Path, schedule: Any, message: str) -> None:
    # TensorBoard's thread must end before the run's directory is removed.
    config = tiny(tmp_path).with_updates({"log.tensorboard": True})
    with pytest.raises(ValueError, match=message):
        train(config, make_env=corridor, schedule=schedule)
    assert not list(tmp_path.iterdir())


def test_a_function_in_place_of_a_number_is_named_with_what_to_use() -> None:
    adaptive = Config().with_updates({"ppo.schedule": "adaptive_kl"})
    with pytest.raises(ValueError, match="is adaptive_kl; expected constant with a rate"):
        adaptive.with_scheduled_values(lambda _: {"ppo.learning_rate": 1e-4}, 0.0)
    with pytest.raises(ValueError, match=r"ppo\.clip_schedule is 'lin'; expected constant, lin"):
        Config().with_updates({"ppo.clip_schedule": "lin"})
    values: Any = {"clip": lambda progress: 0.2 * progress}
    with pytest.raises(ValueError, match=r"ppo\.clip is <.*; expected float\. .*schedule=…"):
        PPOConfig(**values)
