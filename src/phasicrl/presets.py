"""Named configurations as Python values, each with its source and the preset it changes. Kind: data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from phasicrl.config import AuxConfig, Config, EnvConfig, ModelConfig, PPOConfig, RewardNormConfig, nearest_name


@dataclass(frozen=True, slots=True)
class Preset:
    """A configuration with a name.

    Attributes:
        config: the values.
        summary: what it is for, in one line.
        source: where its numbers come from.
        parent: name of the preset it was made from.
    """

    config: Config
    summary: str
    source: str
    parent: str | None = None


# Procgen, phasic. OPPG's settings: no gradient clipping, no value clipping, Adam eps 1e-8, whole segments in both phases. A time
# limit is a termination in every published Procgen number, so bootstrap_truncation is off in all of these.
_PPG = Config(
    name="procgen-ppg",
    env=EnvConfig(id="procgen:starpilot", num_envs=64, distribution="easy"),
    model=ModelConfig(value_path="separate", encoder="impala", init="normalized", policy_head_scale=0.1, value_head_scale=0.1),
    ppo=PPOConfig(bootstrap_truncation=False),
    aux=AuxConfig(),
    reward_norm=RewardNormConfig(),
    total_env_steps=25_000_000,
)
_PPG_PAPER = replace(
    _PPG,
    name="procgen-ppg-paper",
    env=replace(_PPG.env, num_envs=256, distribution="hard"),
    reward_norm=RewardNormConfig(gamma=0.99),
    total_env_steps=100_000_000,
)
_PPG_SINGLE = replace(_PPG, name="procgen-ppg-single", model=replace(_PPG.model, value_path="detached"))
_PPG_KL = replace(_PPG, name="procgen-ppg-kl", ppo=replace(_PPG.ppo, clip=None, kl_penalty=1.0))
_PPO = replace(
    _PPG,
    name="procgen-ppo",
    model=replace(_PPG.model, value_path="shared"),
    ppo=replace(_PPG.ppo, policy_epochs=3, value_epochs=3),
    aux=None,
)
_PPO_PAPER = replace(
    _PPO, name="procgen-ppo-paper", env=_PPG_PAPER.env, reward_norm=_PPG_PAPER.reward_norm, total_env_steps=100_000_000
)  # fmt: skip

# Ten minutes on two cores: the phases of procgen-ppg, scaled down to fit several into the time.
_QUICKSTART = replace(
    _PPG_SINGLE,
    name="quickstart",
    env=replace(_PPG.env, num_envs=32),
    ppo=replace(_PPG.ppo, num_steps=64),
    aux=AuxConfig(every=8, epochs=2, iterations_per_epoch=4, num_minibatches=4),
    total_env_steps=220_000,
)

# What other code bases run, to the switch (semantics of each in docs/fidelity.md).
_CLEANRL_PPG = replace(
    _PPG_SINGLE,
    name="compat-cleanrl-ppg",
    ppo=replace(_PPG.ppo, minibatch_by="transitions", value_clip=0.2, value_coef=0.5, max_grad_norm=0.5),
    aux=AuxConfig(optimizer="shared", max_grad_norm=0.5),
    reward_norm=RewardNormConfig(per="step"),
)
_CLEANRL_PPO = replace(
    _CLEANRL_PPG,
    name="compat-cleanrl-ppo-procgen",
    model=ModelConfig(value_path="shared", encoder="impala", init="torch", policy_head_scale=0.01, value_head_scale=1.0),
    ppo=replace(_CLEANRL_PPG.ppo, policy_epochs=3, value_epochs=3, advantage_norm="minibatch", adam_eps=1e-5),
    aux=None,
)
_BASELINES_PPO = replace(
    _CLEANRL_PPO,
    name="compat-baselines-ppo-procgen",
    model=replace(_CLEANRL_PPO.model, init="glorot", pooling="same"),
    ppo=replace(_CLEANRL_PPO.ppo, adam_eps_hat=True),
    reward_norm=RewardNormConfig(gamma=0.99, per="step"),
)

# Classic control, discrete. Eight environments of EnvPool, short rollouts, two tanh layers of 64 for each of policy and value. Rewards are
# normalised because PPG weighs a squared error of returns against a divergence: with CartPole's returns of up to 100 it loses the policy.
_CLASSIC_PPO = Config(
    name="classic-ppo",
    env=EnvConfig(id="envpool:CartPole-v1", num_envs=8),
    model=ModelConfig(
        value_path="separate", encoder="mlp", hidden_sizes=(64, 64), activation="tanh", init="orthogonal",
        policy_head_scale=0.01, value_head_scale=1.0,
    ),
    ppo=PPOConfig(
        num_steps=128, gamma=0.99, policy_epochs=8, value_epochs=8, num_minibatches=8, minibatch_by="transitions",
        advantage_norm="minibatch", learning_rate=1e-3, schedule="linear", entropy_coef=0.0, adam_eps=1e-5, max_grad_norm=0.5,
    ),
    reward_norm=RewardNormConfig(),
    total_env_steps=100_000,
)  # fmt: skip
_CLASSIC_PPG = replace(
    _CLASSIC_PPO,
    name="classic-ppg",
    aux=AuxConfig(every=8, epochs=3, num_minibatches=8, minibatch_by="transitions", learning_rate=5e-4, max_grad_norm=0.5),
)

_OPPG = "openai/phasic-policy-gradient, train.py and ppo.py"
PRESETS: dict[str, Preset] = {
    preset.config.name: preset
    for preset in (
        Preset(_PPG, "PPG on Procgen easy, two networks", f"PPG paper; {_OPPG}; 64 environments and 25M steps as CleanRL's page"),
        Preset(_PPG_PAPER, "PPG as published: hard, 256 environments, 100M steps", f"PPG paper, appendix; {_OPPG}", "procgen-ppg"),
        Preset(_PPG_SINGLE, "PPG with one network (figure 7)", f"PPG paper; {_OPPG} --arch detach", "procgen-ppg"),
        Preset(_PPG_KL, "PPG with a KL penalty instead of clipping (figure 6)", "PPG paper; ppo.py:104 with kl_penalty 1", "procgen-ppg"),
        Preset(_PPO, "PPO on Procgen easy, shared network, 3 epochs", f"{_OPPG}, README's PPO command", "procgen-ppg"),
        Preset(_PPO_PAPER, "the PPO of the PPG paper: hard, 256 environments, 100M", "PPG paper, figure 2", "procgen-ppo"),
        Preset(_QUICKSTART, "PPG in ten minutes on two cores, a scaled phase", "ours, for a first look", "procgen-ppg-single"),
        Preset(_CLEANRL_PPG, "CleanRL's ppg_procgen.py", "vwxyzjn/cleanrl, ppg_procgen.py", "procgen-ppg-single"),
        Preset(_CLEANRL_PPO, "CleanRL's ppo_procgen.py", "vwxyzjn/cleanrl, ppo_procgen.py", "compat-cleanrl-ppg"),
        Preset(
            _BASELINES_PPO, "the PPO of the Procgen paper", "openai/train-procgen with openai/baselines ppo2", "compat-cleanrl-ppo-procgen"
        ),
        Preset(_CLASSIC_PPO, "PPO for small vector tasks with discrete actions", "ours, tuned on CartPole-v1"),
        Preset(_CLASSIC_PPG, "PPG for the same", "ours, tuned on CartPole-v1", "classic-ppo"),
    )
}  # fmt: skip


def get_preset(name: str) -> Config:
    """The configuration of that name.

    Raises:
        ValueError: there is none; the nearest name is given.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}{nearest_name(name, PRESETS)}; `phasicrl presets` lists all")
    return PRESETS[name].config


def differences(config: Config, parent: Config) -> dict[str, tuple[Any, Any]]:
    """Fields in which two configurations differ, by dotted path: (parent's value, config's value); names are left out.

    A group that is off in `config` is one entry; one that is off in `parent` has an entry for each field that it switches on.
    """
    ours, theirs = _flatten(dataclasses.asdict(config)), _flatten(dataclasses.asdict(parent))
    changed = {key: (theirs.get(key), ours.get(key)) for key in {**theirs, **ours} if key != "name"}
    off = [field for field in ("aux", "reward_norm") if getattr(config, field) is None and getattr(parent, field) is not None]
    kept = {key: pair for key, pair in changed.items() if pair[0] != pair[1] and key.split(".")[0] not in off}
    return kept | {field: ("on", None) for field in off}


def _flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, with dotted paths."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
