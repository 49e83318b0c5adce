"""Knobs that have no effect are refused.

Every row of the table, the rows that a new knob needs, and what is left of a replaced parent.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from phasicrl.cli import main, parse_config
from phasicrl.config import (
    NEEDS,
    PROCGEN_FIELDS,
    AuxConfig,
    Config,
    EnvConfig,
    IdleKnobError,
    Need,
    ObsNormConfig,
    Task,
    ValueNormConfig,
    defaults,
    field_paths,
    refuse_idle,
    refuse_idle_env,
)
from phasicrl.envs.make import make_envs
from phasicrl.presets import PRESETS, get_preset
from phasicrl.runs.directory import RunDirectory
from phasicrl.session.build import start_run, task_of
from tests.envs.counting import MaskedInInfo
from tests.helpers import corridor, tiny

BASE = Config(env=EnvConfig(id="x"))
PROCGEN, GYMNASIUM = Task(backend="procgen"), Task(backend="gymnasium")

ALWAYS_MEANINGFUL = frozenset(
    """
    name seed total_env_steps budget_rounding output_dir init_from env.id env.num_envs env.observe
    model.value_path model.encoder model.hidden_sizes model.init model.head_init model.memory
    ppo.num_steps ppo.collect_by ppo.gamma ppo.reward_clip ppo.estimator ppo.baseline
    ppo.policy_epochs ppo.num_minibatches ppo.minibatch_by ppo.objective ppo.clip ppo.kl_penalty
    ppo.entropy_coef ppo.advantage_norm ppo.learning_rate ppo.schedule ppo.adam_betas ppo.adam_eps
    ppo.adam_eps_hat ppo.max_grad_norm compute.rank_timeout
    aux.every aux.epochs aux.run_every aux.num_minibatches aux.iterations_per_epoch aux.minibatch_by
    aux.recompute_targets aux.beta_clone aux.value_coef aux.optimizer aux.max_grad_norm
    reward_norm.gamma reward_norm.clip reward_norm.per reward_norm.reset_at
    obs_norm.from_first_rollout obs_norm.statistics obs_norm.clip value_norm.statistics
    compute.device compute.policy_precision compute.compile compute.deterministic
    log.console log.epochs log.tensorboard log.wandb checkpoint.every_minutes
    checkpoint.every_iterations checkpoint.keep evaluation.every_iterations
    """.split()  # noqa: SIM905
)
"""Knobs that are in no row of `NEEDS`.

`aux.epochs 0` switches the phase off as a whole, as `aux none` does, and an encoder given from
Python takes the place of the configured one: neither makes the knobs beside it a mistake.
"""

WHERE_THEY_COUNT: dict[str, tuple[Any, dict[str, Any] | Task]] = {
    "env.num_threads": (2, PROCGEN),
    "env.parallel": ("processes", GYMNASIUM),
    "env.max_restarts": (3, GYMNASIUM),
    "env.action_masks": (False, Task(has_masks=True)),
    "env.heuristic_mask_steps": (5, Task(has_heuristic=True)),
    "env.options": ({"a": 1}, GYMNASIUM),
    "env.distribution": ("hard", PROCGEN),
    "env.num_levels": (200, PROCGEN),
    "model.channels": ((4, 8), {}),
    "model.blocks": (1, {}),
    "model.pooling": ("same", {}),
    "model.activation": ("tanh", {"model.encoder": "mlp"}),
    "model.value_activation": ("tanh", {"model.encoder": "mlp"}),
    "model.layer_norm": (True, {}),
    "model.policy_head_scale": (0.5, {}),
    "model.value_head_scale": (0.5, {}),
    "model.memory_size": (64, {"model.memory": "gru"}),
    "action.mean": ("tanh", Task(has_continuous_actions=True)),
    "action.std": ("exp", Task(has_continuous_actions=True)),
    "action.std_value": (0.5, Task(has_continuous_actions=True)),
    "action.min_std": (0.1, {"action.std": "exp"}),
    "action.squash": ("clip", Task(has_continuous_actions=True)),
    "action.rescale": (True, {}),
    "ppo.gae_lambda": (0.9, {}),
    "ppo.value_target": ("monte_carlo", {}),
    "ppo.advantage_std": ("unbiased", {}),
    "ppo.proximal_decay": (0.9, {"ppo.clip": 0.2}),
    "ppo.advantage_decay": (0.5, {}),
    "ppo.max_episodes": (5, {"ppo.collect_by": "episodes"}),
    "ppo.epoch_kl": ("k1", {"ppo.schedule": "adaptive_kl"}),
    "ppo.n_step": (7, {"ppo.estimator": "n_step"}),
    "ppo.value_epochs": (2, {}),
    "ppo.value_coef": (0.5, {}),
    "ppo.epoch_order": ("policy_first", {}),
    "ppo.value_clip": (0.2, {}),
    "ppo.value_learning_rate": (0.1, {}),
    "ppo.grad_norm_of": ("agent", {"ppo.max_grad_norm": 0.5}),
    "ppo.recompute_advantages": (True, {"ppo.policy_epochs": 2, "ppo.value_epochs": 2}),
    "ppo.bootstrap_truncation": (False, {}),
    "ppo.kl_estimate": ("exact", {"ppo.kl_penalty": 1.0}),
    "ppo.kl_penalty_target": (0.1, {"ppo.kl_penalty": 1.0}),
    "ppo.target_kl": (0.1, {"ppo.policy_epochs": 2}),
    "ppo.schedule_kl": (0.02, {"ppo.schedule": "adaptive_kl"}),
    "aux.learning_rate": (1e-3, {"aux": AuxConfig()}),
    "aux.iterations_from": ("last", {"aux": AuxConfig(iterations_per_epoch=8)}),
    "value_norm": (ValueNormConfig(), {}),
    "obs_norm": (ObsNormConfig(), Task(has_floats=True)),
    "obs_norm.decay": (0.5, {"obs_norm": ObsNormConfig(statistics="ema")}),
    "value_norm.decay": (0.5, {"value_norm": ValueNormConfig(statistics="ema")}),
    "evaluation.episodes": (3, {"evaluation.every_iterations": 1}),
    "evaluation.policy": ("sampled", {"evaluation.every_iterations": 1}),
    "evaluation.levels": ("train", {"evaluation.every_iterations": 1, "env.num_levels": 9}),
    "evaluation.steps": (True, {"evaluation.every_iterations": 1}),
    "evaluation.film": (True, {"evaluation.every_iterations": 1}),
    "evaluation.overlay": (False, {"evaluation.every_iterations": 1, "evaluation.film": True}),
    "compute.num_threads": (1, {"compute.device": "cpu"}),
    "compute.take_turns": (False, {"compute.device": "cpu"}),
    "compute.micro_batch": (64, Task(has_images=True)),
    "compute.aux_precision": ("bf16", {"aux": AuxConfig()}),
    "log.wandb_project": ("mine", {"log.wandb": True}),
    "log.wandb_entity": ("us", {"log.wandb": True}),
}
"""A value that is not the default, and what makes it count, for every knob of the table."""

WHERE_NOT: dict[str, tuple[dict[str, Any], Task | None]] = {
    "a task of EnvPool (procgen:NAME or envpool:ID)": ({}, GYMNASIUM),
    "environments of Gymnasium (gymnasium:ID) or your own": ({}, Task(backend="envpool")),
    "an environment that has action masks": ({}, Task(has_masks=False)),
    "a function mask_actions, given from Python": ({}, Task(has_heuristic=False)),
    "a task of Procgen, EnvPool or Gymnasium by its id": ({}, Task(backend="own")),
    "a game of Procgen (procgen:NAME)": ({}, Task(name="envpool:Pong-v5", backend="envpool")),
    "model.encoder impala": ({"model.encoder": "nature"}, None),
    "model.encoder mlp, or numbers beside the images": (
        {"model.encoder": "impala"},
        Task(has_numbers=False),
    ),
    "dense layers (model.hidden_sizes)": ({"model.hidden_sizes": ()}, None),
    "model.value_path separate": ({"model.value_path": "shared"}, None),
    "model.head_init normalized or orthogonal": ({"model.head_init": "torch"}, None),
    "model.memory lstm or gru": ({"model.memory": "none"}, None),
    "continuous actions": ({}, Task(has_continuous_actions=False)),
    "action.std softplus, softplus_tanh or exp": ({"action.std": "fixed"}, None),
    "action.squash none or clip, as tanh always stretches": ({"action.squash": "tanh"}, None),
    "ppo.collect_by episodes": ({"ppo.collect_by": "steps"}, None),
    "ppo.collect_by steps": ({"ppo.collect_by": "episodes"}, None),
    "ppo.estimator gae": ({"ppo.estimator": "n_step"}, None),
    "ppo.estimator n_step": ({"ppo.estimator": "gae"}, None),
    "ppo.baseline": ({"ppo.baseline": False, "ppo.estimator": "monte_carlo"}, None),
    "ppo.value_epochs above 0": ({"ppo.value_epochs": 0}, None),
    "more than one epoch (ppo.policy_epochs, ppo.value_epochs)": (
        {"ppo.policy_epochs": 1, "ppo.value_epochs": 1},
        None,
    ),
    "evaluation.every_iterations": ({"evaluation.every_iterations": None}, None),
    "evaluation.film": ({"evaluation.film": False}, None),
    "env.num_levels above 0": ({"env.num_levels": 0}, PROCGEN),
    "ppo.kl_penalty above 0": ({"ppo.kl_penalty": 0.0}, None),
    "ppo.objective surrogate, with ppo.clip or ppo.kl_penalty": (
        {"ppo.objective": "log_prob", "ppo.clip": None},
        None,
    ),
    "ppo.advantage_decay 0": ({"ppo.advantage_decay": 0.9}, None),
    "ppo.advantage_norm batch": ({"ppo.advantage_norm": "minibatch"}, None),
    "ppo.advantage_norm batch or minibatch": ({"ppo.advantage_norm": "none"}, None),
    "ppo.target_kl, ppo.kl_penalty_target or ppo.schedule adaptive_kl": (
        {"ppo.schedule": "linear"},
        None,
    ),
    "ppo.policy_epochs above 1": ({"ppo.policy_epochs": 1}, None),
    "ppo.schedule adaptive_kl": ({"ppo.schedule": "linear"}, None),
    "ppo.max_grad_norm": ({"ppo.max_grad_norm": None}, None),
    "aux.optimizer own": ({"aux.optimizer": "shared"}, None),
    "aux.iterations_per_epoch": ({"aux.iterations_per_epoch": None}, None),
    "real numbers among the observations": ({}, Task(has_floats=False)),
    "obs_norm.statistics ema": ({"obs_norm": ObsNormConfig()}, None),
    "value_norm.statistics ema": ({"value_norm": ValueNormConfig()}, None),
    "a device that is not a GPU (compute.device)": ({"compute.device": "cuda:1"}, None),
    "images among the observations": ({}, Task(has_images=False)),
    "an auxiliary phase (aux)": ({"aux": None}, None),
    "log.wandb": ({"log.wandb": False}, None),
}
"""For the words of every row, what makes them untrue."""

ROWS = [
    pytest.param(path, need, id=f"{path} without {need.words}")
    for need in NEEDS
    for path in need.paths.split()
]


@pytest.mark.parametrize(("path", "need"), ROWS)
def test_a_knob_is_refused_where_it_has_no_effect_and_taken_where_it_has_one(
    path: str, need: Need
) -> None:
    value, where = WHERE_THEY_COUNT[path]
    changes, task = (where, Task()) if isinstance(where, dict) else ({}, where)
    refuse_idle(BASE.changed({**changes, path: value}), task)

    untrue, elsewhere = WHERE_NOT[need.words]
    with pytest.raises(IdleKnobError) as refused:
        refuse_idle(BASE.changed({**changes, **untrue, path: value}), elsewhere)
    message = str(refused.value)
    shown = {
        "env.options": "a=1",
        "model.channels": "4 8",
        "value_norm": "on",
        "obs_norm": "on",
    }.get(path, str(value))
    assert path in refused.value.paths
    assert (
        f"{path} is {shown}, which has no effect without {need.words}; choose that, "
        f"or leave {path} at " in message
    )
    if elsewhere is not None and elsewhere.name:
        assert f"{elsewhere.name}: {path} is" in message


def test_the_way_out_is_the_words_of_a_command_line() -> None:
    ways = {
        "ppo.n_step": "leave ppo.n_step at 5 (--ppo.n-step 5)",
        "ppo.bootstrap_truncation": "at True (--ppo.bootstrap-truncation)",
        "ppo.recompute_advantages": "at False (--ppo.no-recompute-advantages)",
        "ppo.value_clip": "at none (--ppo.value-clip none)",
        "value_norm": "at none (--value-norm none)",
    }  # fmt: skip
    idle = {path: WHERE_THEY_COUNT[path][0] for path in ways}
    with pytest.raises(IdleKnobError) as refused:  # all of them at once, a line each
        BASE.changed({**WHERE_NOT["ppo.baseline"][0], **idle})
    assert len(str(refused.value).splitlines()) == len(ways) == len(refused.value.paths)
    for way in ways.values():
        assert way in str(refused.value)
    with pytest.raises(
        IdleKnobError, match=r"leave model.channels at 16 32 32 \(--model.channels 16 32 32\)"
    ):
        BASE.changed({"model.encoder": "mlp", "model.channels": (4,)})


def test_every_knob_is_in_the_table_or_is_always_meaningful() -> None:
    """A new knob needs a row in `NEEDS`, or its name in `ALWAYS_MEANINGFUL`: decide which."""
    needing = {path for need in NEEDS for path in need.paths.split()}
    assert set(field_paths()) == (needing | ALWAYS_MEANINGFUL) - {"obs_norm", "value_norm"}
    assert not needing & ALWAYS_MEANINGFUL
    assert {f"env.{name}" for name in PROCGEN_FIELDS} <= needing


def test_needs_of_environments_are_asked_of_the_environments_alone() -> None:
    """`make_envs` knows nothing else."""
    for need in NEEDS:
        assert need.config or need.task
        assert not (need.config and "env." in need.paths), need


def test_what_is_not_known_yet_is_not_refused() -> None:
    for path, (value, _) in WHERE_THEY_COUNT.items():
        if path.startswith(("env.", "action.std", "action.squash")):
            refuse_idle(BASE.changed({path: value}), Task(name="x"))


def test_idle_knobs_of_a_parent_are_reset_on_request_but_not_those_that_are_kept() -> None:
    parent = BASE.changed(
        {
            "model.memory": "lstm",
            "model.memory_size": 64,
            "value_norm": ValueNormConfig(statistics="ema", decay=0.5),
        }
    )
    without = parent.changed({"model.memory": "none"}, reset_idle=True)
    assert without == parent.changed({"model.memory": "none", "model.memory_size": 128})
    with pytest.raises(IdleKnobError, match=r"model.memory_size is 64"):
        parent.changed({"model.memory": "none"}, reset_idle=True, keep={"model.memory_size"})
    reinforce = parent.changed(
        {"ppo.baseline": False, "ppo.estimator": "monte_carlo", "value_norm.decay": 0.1},
        reset_idle=True,
    )
    assert reinforce.value_norm is None and reinforce.model.memory_size == 64
    assert parent.changed({"ppo.gamma": 0.5}, reset_idle=True).ppo.gamma == 0.5


def test_a_command_line_resets_what_its_preset_leaves_over_and_refuses_what_it_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert get_preset("cartpole-masked-velocity-ppo").model.memory_size == 64
    assert (
        parse_config(["cartpole-masked-velocity-ppo", "--model.memory", "none"]).model.memory_size
        == 128
    )
    reinforce = parse_config(["classic-ppo", "--ppo.no-baseline", "--ppo.estimator", "monte_carlo"])
    assert (reinforce.ppo.value_epochs, reinforce.model.value_head_scale) == (1, 0.1)
    for flags, message in (
        ("--ppo.n-step 7", "ppo.n_step is 7, which has no effect without ppo.estimator n_step"),
        (
            "--ppo.no-baseline --ppo.estimator monte_carlo --ppo.no-bootstrap-truncation",
            "ppo.bootstrap_truncation is False, which has no effect",
        ),
        (
            "--model.memory_size=64",
            "model.memory_size is 64, which has no effect without model.memory lstm or gru",
        ),
        (
            "--obs-norm.decay 0.5",
            "obs_norm.decay is 0.5, which has no effect without obs_norm.statistics ema",
        ),
    ):
        assert main(["train", "classic-ppo", *flags.split()]) == 2
        assert message in capsys.readouterr().err
    assert (
        main(["train", "procgen-ppg", "--aux.learning-rate", "1e-4", "--aux.optimizer", "shared"])
        == 2
    )
    assert "aux.learning_rate is 0.0001" in capsys.readouterr().err


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_no_idle_knobs_on_their_own_environments(name: str) -> None:
    if importlib.util.find_spec("envpool") is None and not get_preset(name).env.id.startswith(
        "gymnasium"
    ):
        pytest.skip("EnvPool is not installed")
    config = get_preset(name)
    refuse_idle(config, task_of_env(config.env))


@functools.cache
def task_of_env(config: EnvConfig) -> Task:
    envs = make_envs(config, seed=0, num_envs=1)
    envs.close()
    return task_of(envs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action.squash": "clip"},
            "corridor: action.squash is clip, which has no effect without continuous actions",
        ),
        (
            {"env.parallel": "sync", "env.num_threads": 2},
            "corridor: env.num_threads is 2, which has no effect without a task of EnvPool",
        ),
        (
            {"env.action_masks": False},
            "corridor: env.action_masks is False, which has no effect without an environment that "
            "has action masks",
        ),
        (
            {"env.heuristic_mask_steps": 7},
            "corridor: env.heuristic_mask_steps is 7, which has no effect without a function "
            "mask_actions",
        ),
        (
            {"compute.micro_batch": 8},
            "corridor: compute.micro_batch is 8, which has no effect without images",
        ),
    ],
)
def test_a_run_does_not_begin_with_knobs_that_its_environment_ignores(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(IdleKnobError, match=message):
        start_run(tiny(tmp_path).changed(changes), make_env=corridor)
    assert not list(tmp_path.iterdir())


def test_masks_that_there_are_can_be_left_unread() -> None:
    config = EnvConfig(id="masked", num_envs=2, action_masks=False)
    make_envs(config, seed=1, make_env=MaskedInInfo).close()
    refuse_idle_env(config, Task(name="masked"))


def test_the_task_says_what_its_spaces_are() -> None:
    class Envs:
        name, mask_size = "x", 0

        def __init__(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
            self.observation_space, self.action_space = observation_space, action_space

    image, number, member = (
        gym.spaces.Box(0, 255, (8, 8, 3), np.uint8),
        gym.spaces.Box(-1, 1, (2,)),
        gym.spaces.Discrete(4),
    )
    for space, expected in (
        (image, (True, False, False)), (number, (False, True, True)),
        (member, (False, True, False)),
        (gym.spaces.Dict({"i": image, "m": member}), (True, True, False)),
        (gym.spaces.Tuple((image, number)), (True, True, True)),
    ):  # fmt: skip
        task = task_of(Envs(space, member))  # type: ignore[arg-type]
        assert (task.has_images, task.has_numbers, task.has_floats) == expected, space
    for space, expected in (
        (number, True),
        (member, False),
        (gym.spaces.Tuple((member, number)), True),
    ):
        task = task_of(Envs(number, space))  # type: ignore[arg-type]
        assert task.has_continuous_actions is expected


def test_an_older_runs_idle_values_are_told_with_the_file(tmp_path: Path) -> None:
    text = BASE.to_json().replace('"n_step": 5', '"n_step": 9')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(
        ValueError,
        match=f"{tmp_path}/config.json: ppo.n_step is 9, which has no effect .* leave ppo.n_step "
        "at 5",
    ):
        RunDirectory(tmp_path).config_for()


def test_defaults_are_those_of_the_configuration() -> None:
    found = defaults()
    assert (
        found["ppo.gamma"],
        found["aux"],
        found["aux.every"],
        found["env.options"],
        found["seed"],
    ) == (0.999, None, 32, {}, 1)
    assert set(field_paths()) <= set(found)
