"""Options without effect are reported when a run starts."""

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.envs.make import make_envs, resolve_env_id
from phasicrl.presets import PRESETS, get_preset
from phasicrl.training import build
from phasicrl.training.build import start_run
from phasicrl.training.unused import find_unused_options
from tests.envs.acting import make
from tests.envs.counting import Spaces
from tests.helpers import Levers, corridor, tiny, tiny_aux

BOX = gym.spaces.Box(0, 1, (2,), np.float32)

CORRIDOR: dict[str, dict[str, Any]] = {
    "env.num_threads": {"env.num_threads": 2},
    "env.num_levels": {"env.num_levels": 3},
    "env.options.a": {"env.options": {"a": 1}},
    "env.heuristic_mask_steps": {"env.heuristic_mask_steps": 10},
    "action.squash": {"action.squash": "clip"},
    "compute.micro_batch": {"compute.micro_batch": 8},
    "model.image_layout": {"model.image_layout": "channels_last"},
    "model.channels": {"model.channels": (8,)},
    "model.memory_size": {"model.memory_size": 64},
    "ppo.n_step": {"ppo.n_step": 7},
    "ppo.gae_lambda": {"ppo.estimator": "monte_carlo", "ppo.gae_lambda": 0.9},
    "ppo.value_coef": {
        "ppo.baseline": False, "ppo.estimator": "monte_carlo", "ppo.value_coef": 0.5
    },
    "ppo.target_kl": {"ppo.target_kl": 0.1},
    "ppo.advantage_std": {"ppo.advantage_norm": "none", "ppo.advantage_std": "unbiased"},
    "aux.every": {"aux.every": 2},
    "aux.learning_rate": {
        "aux.epochs": 2, "aux.every": 2, "aux.num_minibatches": 2, "aux.optimizer": "shared",
        "aux.learning_rate": 1.0,
    },
    "ppo.clip_schedule": {"ppo.clip": None, "ppo.kl_penalty": 1.0, "ppo.clip_schedule": "linear"},
    "obs_norm.clip": {"obs_norm.clip": 1.0},
    "obs_norm.decay": {"obs_norm.statistics": "moments", "obs_norm.decay": 0.9},
    "value_norm.decay": {"value_norm.statistics": "moments", "value_norm.decay": 0.9},
    "evaluation.film": {"evaluation.film": True},
}  # fmt: skip
"""Changes of `tiny` that leave an option without effect in a corridor."""


@pytest.mark.parametrize("path", CORRIDOR)
def test_an_option_without_effect_is_reported_when_a_run_starts(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tiny(tmp_path).with_updates({"log.console": "plain"})
    start_run(plain.with_updates(CORRIDOR[path]), make_env=corridor).resources.close()
    text = capsys.readouterr().out
    assert f"{path}: no effect without" in text, text
    start_run(plain, make_env=corridor).resources.close()
    assert "no effect" not in capsys.readouterr().out


BY_MINIBATCH, DECAY = {"ppo.advantage_norm": "minibatch"}, {"ppo.advantage_decay": 0.9}
UNBIASED, TARGET = {"ppo.advantage_std": "unbiased"}, {"ppo.kl_penalty_target": 1e-5}
CNN = {"model.encoder": "impala", "model.channels": (4,), "model.image_layout": "channels_first"}
BY_KL = {"ppo.clip": None, "ppo.schedule": "adaptive_kl", "ppo.policy_epochs": 3}
COMMON, FAST = {"ppo.grad_norm_of": "agent"}, {"ppo.learning_rate": 0.1, "ppo.policy_epochs": 4}
COUNTS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, DECAY, True), ({"ppo.collect_by": "episodes"}, DECAY, True), (BY_MINIBATCH, DECAY, False),
    ({"ppo.advantage_norm": "none"}, DECAY, False), (BY_MINIBATCH | DECAY, UNBIASED, True),
    (BY_MINIBATCH, UNBIASED, True), ({}, UNBIASED, True), (DECAY, UNBIASED, False),
    (FAST, TARGET, False), ({"ppo.kl_penalty": 1.0}, TARGET, True),
    (CNN, {"model.image_layout": "channels_last"}, True), (CNN, {"compute.micro_batch": 8}, False),
    (BY_KL, {"ppo.proximal_decay": 0.9}, True), ({}, COMMON, False),
    ({"ppo.max_grad_norm": 0.01, "model.value_path": "separate"}, COMMON, True),
]  # fmt: skip
"""Options, a change of one of them, and whether the change counts."""


@pytest.mark.long
@pytest.mark.parametrize(("given", "change", "counts"), COUNTS)
def test_options_without_effect_are_those_that_move_no_weight(
    given: dict[str, Any], change: dict[str, Any], counts: bool, tmp_path: Path
) -> None:
    image = gym.spaces.Box(0, 1, (8, 8, 8), np.float32)
    repeat = lambda obs: np.resize(obs, (8, 8, 8))  # noqa: E731
    as_image = lambda: gym.wrappers.TransformObservation(Levers(), repeat, image)  # noqa: E731
    config = tiny(tmp_path, total_env_steps=160).with_updates(given)
    make_env = as_image if given == CNN else Levers
    runs = [train(config.with_updates(each), make_env=make_env) for each in ({}, change)]
    is_equal = all(map(torch.equal, *(run.agent.state_dict().values() for run in runs)))
    unused = find_unused_options(runs[1].config, runs[1].envs, "own")
    assert counts == (not is_equal) == (not change.keys() <= unused.keys())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_options_without_effect(name: str) -> None:
    pytest.importorskip("envpool")
    config = get_preset(name)
    envs = make_envs(config.env, seed=0, num_envs=1)
    envs.close()
    assert find_unused_options(config, envs, resolve_env_id(config.env.id)[0]) == {}


def test_an_evaluation_on_training_levels_needs_their_number() -> None:
    changes = {"evaluation.levels": "both", "evaluation.every_iterations": 1}
    config, envs = get_preset("procgen-ppg").with_updates(changes), make(Levers)
    for num_levels, unused in ((0, ["evaluation.levels"]), (200, [])):
        found = find_unused_options(
            config.with_updates({"env.num_levels": num_levels}), envs, "procgen"
        )
        assert [x for x in found if x.startswith("evaluation")] == unused


@pytest.mark.parametrize("std", ["fixed", "parameter"])
def test_bounds_of_a_fixed_standard_deviation_have_no_effect(std: str) -> None:
    changes = {"action.std": std, "action.min_std": 0.1, "action.max_std": 2.0}
    config = tiny(Path()).with_updates(changes)
    envs = make(lambda: Levers(discrete=False))
    envs.close()
    unused = find_unused_options(config, envs, "own")
    assert [*unused] == ["action.min_std", "action.max_std"] * (std == "fixed")


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_a_run_says_that_it_ends_before_its_first_auxiliary_phase(
    iterations: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A phase is due every second iteration, but none follows the last of a run."""
    config = tiny(tmp_path, aux=tiny_aux(every=1, run_every=2), total_env_steps=32 * iterations)
    run = train(config.with_updates({"log.console": "plain"}), make_env=corridor)
    warning = f"no auxiliary phase in {iterations} iterations; expected more than 2"
    has_phase = any("time/auxiliary" in row for row in run.files.metrics())
    assert (warning in capsys.readouterr().out) == (not has_phase) == (iterations < 3)


def test_a_run_says_that_actions_may_leave_their_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path).with_updates({"log.console": "plain"})
    cases = [("none", 0, np.inf, 1, 0), ("none", 0, 1, 1, 0), ("clip", 0, np.inf, 0, 0),
             ("tanh", 2, 3, 0, 0), ("clip", 2, 3, 0, 1), ("none", -3, -2, 1, 1)]  # fmt: skip
    for squash, low, high, leaves, is_far in cases:
        make_env = partial(Spaces, BOX, gym.spaces.Box(low, high, (1,), np.float32))
        changed = config.with_updates({"action.squash": squash})
        start_run(changed, make_env=make_env).resources.close()
        said = capsys.readouterr().out
        assert said.count("actions may leave Box(") == said.count("action.squash clip") == leaves
        assert said.count("expected action.rescale") == is_far


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("capability", ["AVX2", "AVX512"])
def test_a_run_warns_of_bf16_on_a_processor_that_emulates_it(
    precision: str, capability: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(build, "get_cpu_capability", lambda: capability)
    changes = {"compute.policy_precision": precision, "log.console": "plain"}
    start_run(tiny(tmp_path).with_updates(changes), make_env=corridor).resources.close()
    is_slow = (precision, capability) == ("bf16", "AVX2")
    assert ("without AVX-512" in capsys.readouterr().out) == is_slow
