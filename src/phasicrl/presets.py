"""Named configurations with their sources and parents. Kind: data."""

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phasicrl.config import (
    ActionConfig,
    AuxConfig,
    Config,
    EnvConfig,
    EvaluationConfig,
    ModelConfig,
    ObsNormConfig,
    PPOConfig,
    RewardNormConfig,
)
from phasicrl.config_io import suggest_name


@dataclass(frozen=True, slots=True)
class Preset:
    """Named configuration.

    Attributes:
        config: options.
        summary: purpose in one line.
        source: source of the values.
        parent: name of the preset that it changes; None for the defaults.
    """

    config: Config
    summary: str
    source: str
    parent: str | None = None


# PPG on Procgen with OPPG's settings: no clipping of gradients and values, Adam's ε 1e-8,
# minibatches of segments. All published Procgen results treat time limits as terminations, so that
# bootstrap_truncation is off. All but those of the paper and of 500 hard levels differ: easy
# levels, 64 environments, 25M steps as on CleanRL's page, and rewards normalized with the
# algorithm's γ.
_PPG = Config(
    name="procgen-ppg",
    env=EnvConfig(id="procgen:starpilot", num_envs=64, distribution="easy"),
    model=ModelConfig(value_path="separate", encoder="impala", init="normalized"),
    ppo=PPOConfig(bootstrap_truncation=False),
    aux=AuxConfig(epochs=6),
    reward_norm=RewardNormConfig(per="rollout"),
    total_env_steps=25_000_000,
)
_PPG_PAPER = _PPG.with_updates({
    "name": "procgen-ppg-paper", "env.num_envs": 256, "env.distribution": "hard",
    "reward_norm.gamma": 0.99, "total_env_steps": 100_000_000,
})  # fmt: skip
_PPG_SINGLE = _PPG.with_updates({"name": "procgen-ppg-single", "model.value_path": "detached"})
_PPG_SINGLE_PAPER = _PPG.with_updates(
    {"name": "procgen-ppg-single-paper", "model.value_path": "shared_in_aux"}
)
_PPG_KL = _PPG.with_updates({"name": "procgen-ppg-kl", "ppo.clip": None, "ppo.kl_penalty": 1.0})
_TO_PPO = {
    "model.value_path": "shared", "ppo.policy_epochs": 3, "ppo.value_epochs": 3, "aux.epochs": 0
}  # fmt: skip
_PPO = _PPG.with_updates({"name": "procgen-ppo", **_TO_PPO})
_PPO_PAPER = _PPG_PAPER.with_updates({"name": "procgen-ppo-paper", **_TO_PPO})


# Generalization from few levels to all: protocols of the Procgen paper, with evaluations of sampled
# actions as there, and PPG and PPO as above.
def _make_generalization_presets(
    difficulty: str, source_suffix: str, num_levels: int, total_env_steps: int, *bases: Config
) -> list[Preset]:
    """Return presets that train on some levels, and are evaluated on these and on all levels."""
    return [
        Preset(
            base.with_updates({
                "name": f"{base.name.removesuffix('-paper')}-{difficulty}-{num_levels}",
                "env.num_levels": num_levels, "total_env_steps": total_env_steps,
                "evaluation": EvaluationConfig(
                    every_iterations=50, episodes=64, policy="sampled", levels="both"),
            }),
            f"{name} on {num_levels} {difficulty} levels, tested on all",
            f"Procgen paper, generalization on {difficulty} levels{source_suffix}",
            base.name,
        )
        for name, base in zip(("PPG", "PPO"), bases, strict=True)
    ]  # fmt: skip


# Ten minutes on two cores: procgen-ppg-single with shorter phases, so that several fit in.
_QUICKSTART = _PPG_SINGLE.with_updates({
    "name": "quickstart", "env.num_envs": 32, "ppo.num_steps": 64, "total_env_steps": 220_000,
    "aux": AuxConfig(every=8, epochs=2, iterations_per_epoch=4, num_minibatches=4),
})  # fmt: skip

# Exact settings of other code bases (details in docs/fidelity.md).
_CLEANRL_PPG = _PPG_SINGLE.with_updates({
    "name": "compat-cleanrl-ppg", "budget_rounding": "down", "ppo.minibatch_by": "auto",
    "ppo.value_clip": 0.2, "ppo.value_coef": 0.5, "ppo.max_grad_norm": 0.5,
    "ppo.advantage_std": "unbiased", "aux.optimizer": "shared", "aux.max_grad_norm": 0.5,
    "reward_norm.per": "step",
})  # fmt: skip
_CLEANRL_PPO = _CLEANRL_PPG.with_updates({
    "name": "compat-cleanrl-ppo-procgen", "model.value_path": "shared", "model.init": "torch",
    "model.policy_head_scale": 0.01, "model.value_head_scale": 1.0, "ppo.policy_epochs": 3,
    "ppo.value_epochs": 3, "ppo.advantage_norm": "minibatch", "ppo.adam_eps": 1e-5,
    "aux": AuxConfig(),
})  # fmt: skip
_BASELINES_PPO = _CLEANRL_PPO.with_updates({
    "name": "compat-baselines-ppo-procgen", "model.init": "glorot", "model.pooling": "same",
    "ppo.adam_eps_hat": True, "ppo.advantage_std": "biased", "reward_norm.gamma": 0.99,
})  # fmt: skip

# Classic control with discrete actions. Rewards are normalized, because PPG adds a squared error of
# returns to a KL divergence, and CartPole's returns reach 100.
_CLASSIC_PPO = Config(
    name="classic-ppo",
    env=EnvConfig(id="envpool:CartPole-v1", num_envs=8),
    model=ModelConfig(
        value_path="separate", encoder="mlp", hidden_sizes=(64, 64), activation="tanh",
        init="orthogonal", policy_head_scale=0.01, value_head_scale=1.0,
    ),
    ppo=PPOConfig(
        num_steps=128, gamma=0.99, policy_epochs=8, value_epochs=8, num_minibatches=8,
        minibatch_by="auto", advantage_norm="minibatch", learning_rate=1e-3,
        schedule="linear", entropy_coef=0.0, adam_eps=1e-5, max_grad_norm=0.5,
    ),
    reward_norm=RewardNormConfig(per="rollout"),
    total_env_steps=100_000,
)  # fmt: skip
_BASE_AUX = AuxConfig(every=8, epochs=3, num_minibatches=8, minibatch_by="auto", max_grad_norm=0.5)

# Continuous control. Advantages are recomputed before each epoch and learning rates decay to zero,
# to which Tianshou's authors attribute their results on MuJoCo; all else is common to published
# settings.
_MUJOCO_PPO = _CLASSIC_PPO.with_updates({
    "name": "halfcheetah-ppo", "env.id": "envpool:HalfCheetah-v5", "env.num_envs": 16,
    "action": ActionConfig(std_value=0.6, squash="clip", rescale=True),
    "ppo.policy_epochs": 10, "ppo.value_epochs": 10, "ppo.num_minibatches": 32,
    "ppo.recompute_advantages": True, "ppo.learning_rate": 3e-4, "obs_norm.statistics": "moments",
    "total_env_steps": 1_000_000,
})  # fmt: skip
# Wider networks and smaller learning rates for walking, chosen on seeds 1 to 5.
_WALK_PPO = _MUJOCO_PPO.with_updates({
    "model.hidden_sizes": (256, 256), "model.activation": "relu", "ppo.learning_rate": 1e-4
})  # fmt: skip
# No value loss in the auxiliary phase: the value network has had ten epochs on fresh targets, and
# those of up to eight rollouts ago would make it worse.
_MUJOCO_AUX = replace(
    _BASE_AUX, num_minibatches=16, beta_clone=10.0, value_coef=0.0, learning_rate=3e-4
)
_ATARI_PPO = Config(
    env=EnvConfig(id="envpool:Breakout-v5", num_envs=8),
    model=ModelConfig(
        value_path="shared", encoder="nature", hidden_sizes=(512,), init="orthogonal",
        policy_head_scale=0.01, value_head_scale=1.0
    ),
    ppo=PPOConfig(
        num_steps=128, gamma=0.99, reward_clip=1.0, bootstrap_truncation=False, policy_epochs=4,
        value_epochs=4, num_minibatches=4, minibatch_by="auto", clip=0.1, value_clip=0.1,
        value_coef=0.5, advantage_norm="minibatch", learning_rate=2.5e-4, schedule="linear",
        adam_eps=1e-5, max_grad_norm=0.5,
    ),
    total_env_steps=10_000_000,
)  # fmt: skip

_CLEANRL_ATARI = _ATARI_PPO.with_updates({
    "name": "compat-cleanrl-ppo-atari", "budget_rounding": "down",
    "env.options": {"episodic_life": True}, "ppo.advantage_std": "unbiased",
})  # fmt: skip
_ATARI_AUX = AuxConfig(epochs=6, num_minibatches=8, learning_rate=2.5e-4, max_grad_norm=0.5)

# Settings of other code bases for classic and continuous control (differences in docs/fidelity.md).
_CLEANRL_CLASSIC = Config(
    name="compat-cleanrl-ppo",
    budget_rounding="down",
    env=EnvConfig(id="gymnasium:CartPole-v1", num_envs=4),
    model=_CLASSIC_PPO.model,
    ppo=PPOConfig(
        num_steps=128, gamma=0.99, bootstrap_truncation=False, policy_epochs=4, value_epochs=4,
        num_minibatches=4, minibatch_by="auto", value_clip=0.2, value_coef=0.5,
        advantage_norm="minibatch", advantage_std="unbiased", learning_rate=2.5e-4,
        schedule="linear", adam_eps=1e-5, max_grad_norm=0.5, grad_norm_of="agent",
    ),
    total_env_steps=500_000,
)  # fmt: skip
_CLEANRL_CONTINUOUS = _CLEANRL_CLASSIC.with_updates({
    "name": "compat-cleanrl-ppo-continuous", "env.id": "envpool:HalfCheetah-v4", "env.num_envs": 1,
    "action.squash": "clip", "ppo.num_steps": 2048, "ppo.policy_epochs": 10, "ppo.value_epochs": 10,
    "ppo.num_minibatches": 32, "ppo.learning_rate": 3e-4, "ppo.entropy_coef": 0.0,
    "reward_norm.per": "step", "reward_norm.reset_at": "termination",
    "obs_norm.statistics": "moments", "obs_norm.from_first_rollout": False,
    "total_env_steps": 1_000_000,
})  # fmt: skip
_BASELINES_MUJOCO = _CLEANRL_CONTINUOUS.with_updates({
    "name": "compat-baselines-ppo-mujoco", "ppo.adam_eps_hat": True, "ppo.advantage_std": "biased",
    "reward_norm": RewardNormConfig(per="step"),
})  # fmt: skip
_SB3 = _CLEANRL_CLASSIC.with_updates({
    "name": "compat-sb3-ppo", "budget_rounding": "up", "env.num_envs": 1, "ppo.num_steps": 2048,
    "ppo.bootstrap_truncation": True, "ppo.policy_epochs": 10, "ppo.value_epochs": 10,
    "ppo.num_minibatches": 32, "ppo.learning_rate": 3e-4, "ppo.schedule": "constant",
    "ppo.entropy_coef": 0.0, "ppo.value_clip": None, "ppo.value_coef": 1.0,
    "total_env_steps": 100_000,
})  # fmt: skip
_SPINNING_UP = Config(
    name="compat-spinningup-ppo",
    env=EnvConfig(id="envpool:HalfCheetah-v4", num_envs=1),
    model=ModelConfig(
        value_path="separate", encoder="mlp", hidden_sizes=(64, 64), activation="tanh",
        init="torch", head_init="torch",
    ),
    action=ActionConfig(std_value=0.6065306597126334),
    ppo=PPOConfig(
        num_steps=4000, gamma=0.99, gae_lambda=0.97, value_target="monte_carlo", policy_epochs=80,
        value_epochs=80, num_minibatches=1, minibatch_by="segments", entropy_coef=0.0,
        value_coef=2.0, advantage_norm="batch", learning_rate=3e-4, value_learning_rate=1e-3,
        epoch_kl="k1", target_kl=0.015,
    ),
    total_env_steps=1_000_000,
)  # fmt: skip
_MVA = Config(
    name="compat-mva-ppo",
    env=EnvConfig(id="envpool:InvertedPendulum-v5", num_envs=1),
    model=_CLASSIC_PPO.model,
    action=ActionConfig(std="range", std_value=0.05),
    ppo=PPOConfig(
        num_steps=2048, gamma=0.99, policy_epochs=10, value_epochs=10, num_minibatches=32,
        minibatch_by="auto", entropy_coef=0.0, value_coef=2.0, advantage_norm="minibatch",
        learning_rate=1e-5, value_learning_rate=1e-5, schedule="linear", max_grad_norm=0.5,
    ),
    reward_norm=RewardNormConfig(per="step"),
    obs_norm=ObsNormConfig(statistics="moments", from_first_rollout=False),
    total_env_steps=100_000,
)  # fmt: skip

_RECURRENT_PPO = _CLASSIC_PPO.with_updates({
    "env.num_envs": 16, "model.memory": "lstm", "model.memory_size": 64, "ppo.num_minibatches": 4,
})  # fmt: skip

# PPO and PPG's auxiliary phase, for the environments of a kind.
_CLASSIC, _MUJOCO = (_CLASSIC_PPO, _BASE_AUX), (_MUJOCO_PPO, _MUJOCO_AUX)
_RECURRENT = (_RECURRENT_PPO, replace(_BASE_AUX, num_minibatches=4))
_WALK = (_WALK_PPO, replace(_MUJOCO_AUX, learning_rate=1e-4))
_TASK_SETTINGS: dict[str, tuple[Config, AuxConfig, dict[str, Any]]] = {
    "cartpole": (*_CLASSIC, {}),
    # Without velocities, so that the policy needs a memory.
    "cartpole-masked-velocity": (*_RECURRENT, {
        "env.observe": (0, 2), "total_env_steps": 300_000}),
    "pendulum-masked-velocity": (*_RECURRENT, {
        "env.id": "envpool:Pendulum-v1", "env.observe": (0, 1), "ppo.gamma": 0.9,
        "action": ActionConfig(squash="clip", rescale=True), "total_env_steps": 300_000}),
    "acrobot": (*_CLASSIC, {"env.id": "envpool:Acrobot-v1", "total_env_steps": 300_000}),
    "mountaincar": (*_CLASSIC, {
        "env.id": "envpool:MountainCar-v0", "env.num_envs": 16, "ppo.gae_lambda": 0.98,
        "total_env_steps": 1_000_000}),
    "lunarlander": (*_CLASSIC, {
        "env.id": "envpool:LunarLander-v3", "env.num_envs": 16, "ppo.gamma": 0.999,
        "ppo.gae_lambda": 0.98, "ppo.entropy_coef": 0.01, "total_env_steps": 1_000_000}),
    # With an initial standard deviation of 0.6, one of ten seeds ended below −200; with 1, none did
    # (benchmarks/results/selection/pendulum_std.csv).
    "pendulum": (_MUJOCO_PPO, replace(_MUJOCO_AUX, beta_clone=1.0, value_coef=1.0), {
        "env.id": "envpool:Pendulum-v1", "env.num_envs": 4, "action.std_value": 1.0,
        "ppo.num_steps": 512, "ppo.gamma": 0.9, "ppo.learning_rate": 1e-3,
        "total_env_steps": 100_000}),
    "invertedpendulum": (*_MUJOCO, {
        "env.id": "envpool:InvertedPendulum-v5", "total_env_steps": 100_000}),
    "inverteddoublependulum": (*_MUJOCO, {"env.id": "envpool:InvertedDoublePendulum-v5"}),
    "reacher": (*_MUJOCO, {"env.id": "envpool:Reacher-v5"}),
    "halfcheetah": (*_WALK, {
        "action.std_value": 0.135, "ppo.gamma": 0.98, "ppo.gae_lambda": 0.92}),
    # A large initial standard deviation, so that the policy does not learn to stand still.
    "hopper": (*_MUJOCO, {"env.id": "envpool:Hopper-v5", "action.std_value": 1.0}),
    "walker2d": (*_WALK, {"env.id": "envpool:Walker2d-v5"}),
    "swimmer": (*_MUJOCO, {
        "env.id": "envpool:Swimmer-v5", "ppo.gamma": 0.9999, "ppo.gae_lambda": 0.98}),
    "ant": (*_WALK, {"env.id": "envpool:Ant-v5"}),
    "humanoid": (*_WALK, {"env.id": "envpool:Humanoid-v5", "total_env_steps": 10_000_000}),
    "atari": (_ATARI_PPO, _ATARI_AUX, {}),
}  # fmt: skip
"""PPO's options, PPG's auxiliary phase and further changes, by environment."""


def _make_task_presets() -> list[Preset]:
    """Return `<environment>-ppo` and `<environment>-ppg` for every environment."""
    presets = []
    for task, (ppo, aux, changes) in _TASK_SETTINGS.items():
        ppo = ppo.with_updates({"name": f"{task}-ppo", **changes})
        ppg = ppo.with_updates({"name": f"{task}-ppg", "aux": aux})
        env = ppo.env.id.partition(":")[2] + ", no velocity" * (ppo.env.observe is not None)
        steps = f"{ppo.total_env_steps // 1000:,}k".replace(",000k", "M")
        presets.append(Preset(ppo, f"PPO on {env}, {steps}", "ours"))
        presets.append(Preset(ppg, f"PPG on {env}, {steps}", "ours", parent=ppo.name))
    return presets


_OPPG_SOURCE = "openai/phasic-policy-gradient, train.py and ppo.py"
_EASY_NOTE = (
    "easy, 64 environments and 25M steps as CleanRL's page, rewards normalized by γ 0.999 "
    "where the published runs have hard, 256, 100M and 0.99"
)
PRESETS: dict[str, Preset] = {
    preset.config.name: preset
    for preset in (
        Preset(_PPG, "PPG on Procgen easy: 64 envs, 25M",
               f"PPG paper; {_OPPG_SOURCE}; {_EASY_NOTE}"),
        Preset(_PPG_PAPER, "PPG as published: hard, 256 envs, 100M",
               f"PPG paper, appendix; {_OPPG_SOURCE}", "procgen-ppg"),
        Preset(_PPG_SINGLE, "PPG, one network, as --arch detach",
               f"PPG paper; {_OPPG_SOURCE} --arch detach; {_EASY_NOTE}", "procgen-ppg"),
        Preset(_PPG_SINGLE_PAPER, "PPG, one network, as figure 7's text",
               f"PPG paper, figure 7; {_EASY_NOTE}", "procgen-ppg"),
        Preset(_PPG_KL, "PPG with the KL penalty of figure 6",
               f"PPG paper; OPPG ppo.py:104 with kl_penalty 1; {_EASY_NOTE}", "procgen-ppg"),
        Preset(_PPO, "PPO on Procgen easy: 64 envs, 25M",
               f"{_OPPG_SOURCE}, README's PPO command; {_EASY_NOTE}", "procgen-ppg"),
        Preset(_PPO_PAPER, "PPO as published: hard, 256 envs, 100M",
               "PPG paper, figure 2", "procgen-ppo"),
        *_make_generalization_presets("easy", f"; {_EASY_NOTE}", 200, 25_000_000, _PPG, _PPO),
        *_make_generalization_presets("hard", "", 500, 200_000_000, _PPG_PAPER, _PPO_PAPER),
        Preset(_QUICKSTART, "PPG in ten minutes on two cores",
               "ours, for a first look", "procgen-ppg-single"),
        Preset(_CLEANRL_PPG, "CleanRL's ppg_procgen.py", "vwxyzjn/cleanrl, ppg_procgen.py",
               "procgen-ppg-single"),
        Preset(_CLEANRL_PPO, "CleanRL's ppo_procgen.py", "vwxyzjn/cleanrl, ppo_procgen.py",
               "compat-cleanrl-ppg"),
        Preset(_BASELINES_PPO, "the PPO of the Procgen paper",
               "openai/train-procgen with openai/baselines ppo2", "compat-cleanrl-ppo-procgen"),
        Preset(_CLASSIC_PPO, "PPO for vectors and discrete actions",
               "ours, tuned on CartPole-v1"),
        Preset(_CLASSIC_PPO.with_updates({"name": "classic-ppg", "aux": _BASE_AUX}),
               "PPG for vectors and discrete actions", "ours, tuned on CartPole-v1", "classic-ppo"),
        Preset(_CLEANRL_CLASSIC, "CleanRL's ppo.py", "vwxyzjn/cleanrl, ppo.py", "classic-ppo"),
        Preset(_CLEANRL_CONTINUOUS, "CleanRL's ppo_continuous_action.py",
               "vwxyzjn/cleanrl, ppo_continuous_action.py", "compat-cleanrl-ppo"),
        Preset(_CLEANRL_ATARI, "CleanRL's ppo_atari_envpool.py",
               "vwxyzjn/cleanrl, ppo_atari_envpool.py"),
        Preset(_BASELINES_MUJOCO, "Baselines' ppo2 on MuJoCo", "openai/baselines, ppo2/defaults.py",
               "compat-cleanrl-ppo-continuous"),
        Preset(_SB3, "Stable-Baselines3's defaults", "DLR-RM/stable-baselines3, ppo.py",
               "compat-cleanrl-ppo"),
        Preset(_SPINNING_UP, "Spinning Up's ppo.py", "openai/spinningup, ppo.py", "compat-sb3-ppo"),
        Preset(_MVA, "source 004's PPO, InvertedPendulum",
               "source 004, sections 2 to 4", "compat-spinningup-ppo"),
        *_make_task_presets(),
    )
}  # fmt: skip


def read_trainings() -> dict[str, Any]:
    """Return number of seeds, mean greedy return and descriptions of runs of each trained preset.

    Seeds and mean are 0 where no run with the preset's own options was evaluated.
    """
    return json.loads(Path(__file__).with_name("trained.json").read_text(encoding="utf-8"))


def get_preset(name: str) -> Config:
    """Return the configuration of a preset.

    Raises:
        ValueError: there is no such preset; the message suggests a name.
    """
    if name not in PRESETS:
        hint = suggest_name(name, PRESETS)
        raise ValueError(f"unknown preset {name!r}{hint}; `phasicrl presets` lists all")
    return deepcopy(PRESETS[name].config)  # `env.options` could be changed


def differences(config: Config, parent: Config) -> dict[str, tuple[Any, Any]]:
    """Return the options in which two configurations differ, except their names.

    Returns:
        Pairs of the parent's and the configuration's value, by dotted path of the option.
    """
    values, parent_values = config.values(), parent.values()
    pairs = {path: (parent_values.get(path), values.get(path)) for path in parent_values | values}
    return {path: pair for path, pair in pairs.items() if path != "name" and pair[0] != pair[1]}
