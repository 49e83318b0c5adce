"""Suites: the configurations that each experiment of the source documents compares.

Kind: values (nothing is trained here).

A suite has tasks and arms. An arm changes named options of a task's settings, and nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

from phasicrl import Config, get_preset
from phasicrl.lab.analysis.scores import PROCGEN_BOUNDS
from phasicrl.lab.experiments.tricks import (
    Arm,
    make_arms,
    make_arms_for_env,
    make_arms_with_base,
    make_ppo_detail_arms,
    make_trick_arms,
)
from phasicrl.presets import PRESETS

Scale = Literal["small", "paper"]
PROCGEN_GAMES = tuple(sorted(PROCGEN_BOUNDS["hard"]))

_SMALL_PROCGEN: dict[str, Any] = {
    "env.num_envs": 32,
    "ppo.num_steps": 64,
    "model.channels": (4, 8, 8),
    "total_env_steps": 300_000,
}
"""Procgen on two cores: easy levels, an eighth of a rollout, a quarter of the channels.

A run of PPG takes one of them more than an hour, of PPO a quarter of one.
"""


class TaskConfigs(NamedTuple):
    """Configurations for a task, from which arms are made.

    Attributes:
        ppg: configuration of PPG.
        ppo: configuration of PPO.
        is_procgen: true for a game of Procgen.
    """

    ppg: Config
    ppo: Config
    is_procgen: bool


@dataclass(frozen=True, slots=True)
class Suite:
    """Experiment of a source document: its tasks, and the configurations that it compares.

    Attributes:
        description: description and source.
        make_arms: function that makes the configurations to compare, the baseline first.
        small_tasks: tasks of the small scale.
        small_steps: budget of each run at the small scale; None: that of the task's settings.
        paper_tasks: tasks as published.
        difficulty: published difficulty of Procgen: hard with 100M steps, or easy with 25M.
        num_seeds: published number of seeds.
    """

    description: str
    make_arms: Callable[[TaskConfigs], Sequence[Arm]]
    small_tasks: tuple[str, ...]
    small_steps: int | None = None
    paper_tasks: tuple[str, ...] = PROCGEN_GAMES
    difficulty: Literal["hard", "easy"] = "hard"
    num_seeds: int = 3

    def get_tasks(self, scale: Scale) -> tuple[str, ...]:
        """Return the names of the suite's tasks at a scale."""
        return self.small_tasks if scale == "small" else self.paper_tasks

    def make_task_configs(self, task: str, scale: Scale) -> TaskConfigs:
        """Return the configurations of PPG and PPO for a task at a scale.

        Raises:
            ValueError: there is no such task.
        """
        if task in PROCGEN_GAMES:
            ending = "-paper" if scale == "paper" and self.difficulty == "hard" else ""
            changes = {"env.id": f"procgen:{task}"} | (_SMALL_PROCGEN if scale == "small" else {})
            names = f"procgen-ppg{ending}", f"procgen-ppo{ending}"
        elif f"{task}-ppo" in PRESETS:
            changes = {}
            names = f"{task}-ppg", f"{task}-ppo"
        elif ":" in task or "/" in task or "-v" in task:
            changes = {"env.id": task}
            names = "classic-ppg", "classic-ppo"
        else:
            known = [*PROCGEN_GAMES, *(name[:-4] for name in PRESETS if name.endswith("-ppg"))]
            rule = f"the id of an environment or one of {', '.join(known)}"
            raise ValueError(f"tasks has {task}; expected {rule}")
        if scale == "small" and self.small_steps:
            changes = changes | {"total_env_steps": self.small_steps}
        ppg, ppo = (get_preset(name).with_updates(changes) for name in names)
        return TaskConfigs(ppg, ppo, is_procgen=task in PROCGEN_GAMES)


def _get_option_arm_maker(
    symbol: str, field: str, image_values: Sequence[int], vector_values: Sequence[int]
) -> Callable[[TaskConfigs], list[Arm]]:
    """Return a function that makes arms of PPG, one for each value of an option.

    Tasks with images and with vectors have their values.
    """
    return lambda each: make_arms(each.ppg, {
        f"{symbol} = {x}": {field: x} for x in (image_values if each.is_procgen else vector_values)
    })  # fmt: skip


def _get_arm_maker(changes: Mapping[str, Mapping[str, Any]]) -> Callable[[TaskConfigs], list[Arm]]:
    """Return a function that makes an arm of PPG for each set of changes."""
    return lambda each: make_arms(each.ppg, changes)


def _make_algorithm_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms of PPG and PPO."""
    return [("PPG", task_configs.ppg), ("PPO", task_configs.ppo)]


def _make_codebase_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms of the paper's algorithms, and of the other codebases of the table."""
    of_openai = {"PPG, rewards normalized by γ 0.99": {"reward_norm.gamma": 0.99}}
    arms = [*_make_algorithm_arms(task_configs), *make_arms(task_configs.ppg, of_openai)]
    if task_configs.is_procgen:
        scale = {path: task_configs.ppg.values()[path] for path in ("env.id", *_SMALL_PROCGEN)}
        codes = {"CleanRL's PPG": "compat-cleanrl-ppg",
                 "CleanRL's PPO": "compat-cleanrl-ppo-procgen"}  # fmt: skip
        arms += [(arm, get_preset(name).with_updates(scale)) for arm, name in codes.items()]
    return arms


def _make_value_network_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms of PPO with one network and with two."""
    paths = {"PPO, one network": "shared", "PPO, two networks": "separate"}
    return make_arms(task_configs.ppo, {arm: {"model.value_path": x} for arm, x in paths.items()})


def _make_value_training_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms with value training in both phases, in one, and in one twice as often."""
    twice = 2 * task_configs.ppg.ppo.value_epochs
    changes_by_arm: dict[str, dict[str, Any]] = {
        "values trained": {"aux.value_coef": 1.0},
        "values not trained": {"aux.value_coef": 0.0},
        "values not trained, twice E_V": {"aux.value_coef": 0.0, "ppo.value_epochs": twice},
    }
    return make_arms(task_configs.ppg, changes_by_arm)


def _make_auxiliary_data_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms with auxiliary epochs over all data of a phase, and over parts of it."""
    half, quarter = task_configs.ppg.aux.every // 2, task_configs.ppg.aux.every // 4
    last = {"aux.iterations_per_epoch": quarter, "aux.iterations_from": "last"}
    changes_by_arm: dict[str, dict[str, Any]] = {
        "N = N_π": {},
        "N = N_π / 2": {"aux.iterations_per_epoch": half},
        "N = N_π / 4": {"aux.iterations_per_epoch": quarter},
        "the last N_π / 4 alone": last,
    }
    return make_arms(task_configs.ppg, changes_by_arm)


def _make_continuous_action_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms of the PPO of source 004 and its changes, one by one."""
    learned = {"action.std": "softplus", "action.std_value": 0.1}
    through_tanh = learned | {"action.std": "softplus_tanh"}
    normalized, tanh = {"action.rescale": True}, {"action.mean": "tanh"}
    rate = {"ppo.learning_rate": 1e-3, "ppo.value_learning_rate": 1e-3}
    changes_by_arm: dict[str, dict[str, Any]] = {
        "σ fixed": {},
        "σ learned": learned,
        "σ fixed, actions normalized": normalized,
        "σ learned, actions normalized": learned | normalized,
        "σ fixed, actions normalized, tanh": normalized | tanh,
        "σ learned, actions normalized, tanh": learned | normalized | tanh,
        "σ learned through tanh, actions normalized, tanh": through_tanh | normalized | tanh,
        "rewards not normalized": {"reward_norm.per": "none"},
        "σ fixed, ten times as large": {"action.std_value": 0.5},
        "learning rate 1e-3": rate,
        "learning rate 1e-3, σ learned": rate | learned,
        "learning rate 1e-3, actions normalized": rate | normalized,
        "learning rate 1e-3, actions normalized, tanh": rate | normalized | tanh,
    }
    mva = get_preset("compat-mva-ppo").with_updates({"env.id": task_configs.ppo.env.id})
    return make_arms(mva, changes_by_arm)


_ORTHOGONAL_HEADS = {"model.head_init": None, "model.policy_head_scale": 0.01,
                     "model.value_head_scale": 1.0}  # fmt: skip
"""Orthogonal heads, as in Baselines' PPO."""
_ORTHOGONAL_INIT: dict[str, Any] = {"model.init": "orthogonal"} | _ORTHOGONAL_HEADS
_NORMALIZED_INIT: dict[str, Any] = {
    "model.init": "normalized", "model.head_init": None,
    "model.policy_head_scale": 0.1, "model.value_head_scale": 0.1,
}  # fmt: skip
_PPG_DETAIL_CHANGES: dict[str, dict[str, Any]] = {
    "auxiliary phase on whole segments": {"aux.minibatch_by": "segments"},
    "auxiliary phase on transitions": {"aux.minibatch_by": "transitions"},
    "policy phase on whole segments": {"ppo.minibatch_by": "segments"},
    "policy phase on transitions": {"ppo.minibatch_by": "transitions"},
    "advantages normalized by batch": {"ppo.advantage_norm": "batch"},
    "advantages normalized by minibatch": {"ppo.advantage_norm": "minibatch"},
    "weights normalized": _NORMALIZED_INIT,
    "weights orthogonal": _ORTHOGONAL_INIT,
    "weights PyTorch's, heads orthogonal": {"model.init": "torch"} | _ORTHOGONAL_HEADS,
    "LayerNorm, weights orthogonal": {"model.layer_norm": True} | _ORTHOGONAL_INIT,
    "Adam's ε 1e-8": {"ppo.adam_eps": 1e-8},
    "Adam's ε 1e-5": {"ppo.adam_eps": 1e-5},
    "one optimizer for both phases": {"aux.optimizer": "shared"},
    "an optimizer for each phase": {"aux.optimizer": "own"},
    "rewards normalized by γ 0.99": {"reward_norm.gamma": 0.99},
    "rewards normalized by the algorithm's γ": {"reward_norm.gamma": None},
    "value targets of the policy phase": {"aux.recompute_targets": False},
    "value targets recomputed": {"aux.recompute_targets": True},
}
"""Both variants of the details that source 000 adds to the paper."""


def _make_ppg_detail_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms of PPG, and of PPG with one detail changed."""
    ppg = task_configs.ppg
    excluded_settings: set[str] = set()
    for group, phase in {"ppo": ppg.ppo, "aux": ppg.aux}.items():
        excluded_settings.add(f"{group}.minibatch_by {ppg.get_shuffle_unit(phase)}")
        if ppg.model.memory != "none":
            excluded_settings.add(f"{group}.minibatch_by transitions")
        if ppg.env.num_envs % phase.num_minibatches:
            excluded_settings.add(f"{group}.minibatch_by segments")
    if ppg.reward_norm.per == "none" or ppg.ppo.gamma == 0.99:
        excluded_settings |= {"reward_norm.gamma 0.99", "reward_norm.gamma None"}
    changes_by_arm = {
        name: change
        for name, change in _PPG_DETAIL_CHANGES.items()
        if not excluded_settings & {f"{path} {value}" for path, value in change.items()}
    }
    return make_arms_with_base("PPG", ppg, changes_by_arm)


def _make_penalty_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms with clipping and KL penalties, with normalized rewards and without."""
    penalty = {"ppo.clip": None, "ppo.kl_penalty": 1.0}
    objectives: dict[str, dict[str, Any]] = {
        "clipping": {},
        "KL penalty": penalty,
        "adaptive KL penalty": penalty | {"ppo.kl_penalty_target": 0.01},
    }
    rewards: dict[str, dict[str, Any]] = {
        "rewards normalized": {"reward_norm.per": "rollout"},
        "rewards as they are": {"reward_norm.per": "none"},
    }
    changes_by_arm = {
        f"{way}, {norm}": objectives[way] | rewards[norm] for norm in rewards for way in objectives
    }
    return make_arms(task_configs.ppg, changes_by_arm)


def _make_epochs_by_rate_arms(task_configs: TaskConfigs) -> list[Arm]:
    """Make arms with numbers of policy epochs at 1/3, 1 and 3 times the learning rate."""
    rate = task_configs.ppg.ppo.learning_rate
    rates = {"rate": rate, "rate / 3": rate / 3, "rate × 3": rate * 3}
    epochs = (1, 3, 6) if task_configs.is_procgen else (1, 3, 10)
    changes_by_arm = {
        f"{name}, E_π = {count}": {"ppo.learning_rate": value, "ppo.policy_epochs": count}
        for name, value in rates.items()
        for count in epochs
    }
    return make_arms(task_configs.ppg, changes_by_arm)


_TABLE_GAMES = ("starpilot", "bossfight", "bigfish")
"""The games of source 000."""
_MVA_TASKS = ("invertedpendulum", "reacher", "pendulum")
_CONTROL_TASKS = ("cartpole", "acrobot", "pendulum", "gymnasium:Taxi-v4")
# A night of two cores is enough for these. PPG is not published there. Rewards differ in size:
# Acrobot's are -1, Pendulum's -16 to 0, Hopper's 1 and its speed.
_make_paper_suite = partial(Suite, small_tasks=("acrobot", "hopper"), small_steps=300_000)
_make_detail_suite = partial(
    Suite, small_tasks=("acrobot", "pendulum", "hopper"), small_steps=100_000)  # fmt: skip
_make_control_suite = partial(
    Suite, paper_tasks=_CONTROL_TASKS, small_tasks=_CONTROL_TASKS, num_seeds=5)  # fmt: skip

SUITES: dict[str, Suite] = {
    "fig2": _make_paper_suite(
        "PPG and PPO (PPG paper, figure 2)", _make_algorithm_arms,
        small_tasks=("starpilot", "acrobot", "hopper")),
    "fig3": _make_paper_suite(
        "policy epochs E_π (PPG paper, figure 3)",
        _get_option_arm_maker("E_π", "ppo.policy_epochs", (1, 2, 3, 4, 5, 6), (1, 3, 10, 20))),
    "value-epochs": _make_paper_suite(
        "value epochs E_V (source 001)",
        _get_option_arm_maker("E_V", "ppo.value_epochs", (1, 2, 3, 6), (1, 3, 10, 20))),
    "fig4": _make_paper_suite(
        "auxiliary epochs E_aux (PPG paper, figure 4)",
        _get_option_arm_maker("E_aux", "aux.epochs", (1, 2, 3, 6, 9), (1, 3, 6, 9))),
    "fig5": _make_paper_suite(
        "policy iterations N_π before each auxiliary phase (PPG paper, figure 5)",
        _get_option_arm_maker("N_π", "aux.every", (2, 4, 8, 16, 32), (2, 4, 8, 16, 32))),
    "fig6": _make_paper_suite(
        "clipping, and a penalty on the divergence (PPG paper, figure 6)",
        _get_arm_maker({"clipping": {}, "KL penalty": {"ppo.clip": None, "ppo.kl_penalty": 1.0}})),
    "fig7": _make_paper_suite(
        "two networks, and one (PPG paper, figure 7)",
        _get_arm_maker({"two networks": {}, "one network": {"model.value_path": "detached"}})),
    "fig8": _make_paper_suite(
        "PPO with one network, and with two (PPG paper, figure 8)", _make_value_network_arms),
    "fig9": _make_paper_suite(
        "value training in the auxiliary phase, or none (PPG paper, figure 9)",
        _make_value_training_arms),
    "seeds-table": Suite(
        "the codes of source 000's table on three games, easy, 25M steps", _make_codebase_arms,
        small_tasks=_TABLE_GAMES, small_steps=150_000, paper_tasks=_TABLE_GAMES, difficulty="easy"),
    "skip-aux": _make_paper_suite(
        "each auxiliary phase, or every other one (source 000)",
        _get_arm_maker({"all phases": {}, "every other phase": {"aux.run_every": 2}}),
        paper_tasks=_TABLE_GAMES, difficulty="easy"),
    "n-aux": _make_paper_suite(
        "auxiliary epochs over N of the N_π iterations (source 001)", _make_auxiliary_data_arms),
    "details": _make_detail_suite(
        "PPG with one detail of its code changed (source 000)", _make_ppg_detail_arms,
        paper_tasks=_TABLE_GAMES, difficulty="easy"),
    "ppo-details": _make_detail_suite(
        "PPO with one detail of its code changed",
        lambda each: make_arms_for_env(each.ppo, make_ppo_detail_arms)),
    "penalties": _make_detail_suite(
        "KL penalties, rewards normalized or not (source 001)", _make_penalty_arms,
        small_tasks=("pendulum", "hopper")),
    "rates": _make_detail_suite(
        "policy epochs E_π at three learning rates (source 001)", _make_epochs_by_rate_arms),
    "mva": _make_control_suite(
        "deviations, normalized actions and rewards, learning rates (source 004)",
        _make_continuous_action_arms, small_tasks=_MVA_TASKS, paper_tasks=_MVA_TASKS),
    "tricks": _make_control_suite(
        "PPO trick by trick, from REINFORCE up (source 003)",
        lambda each: make_arms_for_env(each.ppo, make_trick_arms)),
    "tricks-one-out": _make_control_suite(
        "PPO with all tricks, and with all but one (source 003)",
        lambda each: make_arms_for_env(each.ppo, make_trick_arms, mode="leave-one-out")),
}  # fmt: skip
"""Suites by the names of `phasicrl suite`."""
