"""Tricks of PPO, added one by one to REINFORCE, or removed or changed one at a time.

Kind: effects (makes an environment to read its spaces).

The rungs are those of the PPO-tricks document (source S122), from REINFORCE up. Every rung is a
configuration that differs from the one below in the options named here only.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from phasicrl import Config
from phasicrl.training.build import preview_run

Mode = Literal["ladder", "leave-one-out"]
Arm = tuple[str, Config]
"""Name and configuration of one side of a comparison."""


def make_arms(base: Config, changes_by_arm: Mapping[str, Mapping[str, Any]]) -> list[Arm]:
    """Make the configurations of a comparison: one arm for each set of changes.

    Args:
        base: common configuration.
        changes_by_arm: changed options by name of the arm.
    """
    return [(name, base.with_updates(dict(on))) for name, on in changes_by_arm.items()]


def make_arms_with_base(
    base_name: str, base: Config, changes: Mapping[str, Mapping[str, Any]]
) -> list[Arm]:
    """Return an arm for `base`, and one for each set of changes that has an effect."""
    return [(base_name, base), *(arm for arm in make_arms(base, changes) if arm[1] != base)]


class Trick(NamedTuple):
    """Trick of PPO: options with and without the trick.

    Attributes:
        name: name of the trick.
        on: options by path, from this rung upwards.
        off: options by path, on the rungs below.
    """

    name: str
    on: dict[str, Any]
    off: dict[str, Any]


TRICKS = (
    Trick("baseline", {"ppo.baseline": True},
          {"ppo.baseline": False, "ppo.estimator": "monte_carlo", "value_norm.statistics": "none"}),
    Trick("clipping",
          {"ppo.objective": "surrogate", "ppo.clip": 0.2, "ppo.policy_epochs": 8,
           "ppo.value_epochs": 8, "ppo.num_minibatches": 8},
          {"ppo.objective": "log_prob", "ppo.clip": None, "ppo.policy_epochs": 1,
           "ppo.value_epochs": 1, "ppo.num_minibatches": 1}),
    Trick("TD(λ)", {"ppo.estimator": "gae", "ppo.gae_lambda": 0.95},
          {"ppo.estimator": "monte_carlo"}),
    Trick("initialization", {"model.init": "orthogonal", "model.head_init": "orthogonal"},
          {"model.init": "torch", "model.head_init": "torch"}),
    Trick("advantage normalization", {"ppo.advantage_norm": "minibatch"},
          {"ppo.advantage_norm": "none"}),
    Trick("state normalization", {"obs_norm.statistics": "ema"}, {"obs_norm.statistics": "none"}),
    Trick("return normalization", {"value_norm.statistics": "ema"},
          {"value_norm.statistics": "none"}),
    Trick("gradient clipping", {"ppo.max_grad_norm": 0.5}, {"ppo.max_grad_norm": None}),
    Trick("entropy bonus", {"ppo.entropy_coef": 0.01}, {"ppo.entropy_coef": 0.0}),
    Trick("action masking", {"env.action_masks": True}, {"env.action_masks": False}),
)  # fmt: skip
"""Tricks in the order of the document; return normalization is that of value targets."""

ESTIMATOR_TRICKS = ("baseline", "TD(λ)")
"""Tricks without which returns are sums of rewards, over whole episodes."""


def _choose_whole_episode_options(base: Config, max_episode_steps: int) -> dict[str, Any]:
    """Return options that collect whole episodes in rollouts of about as many steps."""
    num_steps = base.ppo.num_steps
    while num_steps < 2 * max_episode_steps:
        num_steps *= 2
    num_envs = max(1, base.batch_size // num_steps)
    return {"ppo.collect_by": "episodes", "ppo.num_steps": num_steps, "env.num_envs": num_envs}


def make_trick_arms(
    base: Config,
    *,
    mode: Mode = "ladder",
    excluded_prefixes: tuple[str, ...] = (),
    max_episode_steps: int | None = None,
) -> list[Arm]:
    """Make the arms that add or remove tricks one by one. Rewards are never normalized.

    Args:
        base: all other options: environment, network sizes, budget, learning rate.
        mode: `ladder` adds tricks one by one to REINFORCE; `leave-one-out` removes each from all.
        excluded_prefixes: prefixes of options without effect; tricks with one are left out.
        max_episode_steps: maximum steps of an episode. With one, arms that learn from Monte
            Carlo returns collect whole episodes; without, rollouts cut episodes.
    """
    tricks = [x for x in TRICKS if not any(path.startswith(excluded_prefixes) for path in x.on)]
    if max_episode_steps is not None:
        whole = _choose_whole_episode_options(base, max_episode_steps)
        parts = {path: base.values()[path] for path in whole}
        for place, trick in enumerate(tricks):
            if trick.name in ESTIMATOR_TRICKS:
                on = trick.on | (parts if trick.name == ESTIMATOR_TRICKS[-1] else {})
                tricks[place] = Trick(trick.name, on, trick.off | whole)
    all_on: dict[str, Any] = {"aux.epochs": 0, "reward_norm.per": "none"}
    all_off = dict(all_on)
    for trick in tricks:
        all_on |= trick.on
    for trick in reversed(tricks):  # where two name one field, the lower rung decides
        all_off |= trick.off
    if mode == "leave-one-out":
        changes = [("everything", all_on), *((f"without {x.name}", all_on | x.off) for x in tricks)]
    else:
        changes = [("REINFORCE", all_off)]
        for trick in tricks:
            changes.append((f"+ {trick.name}", changes[-1][1] | trick.on))
    return make_arms(base, dict(changes))


def make_ppo_detail_arms(
    base: Config, *, excluded_prefixes: tuple[str, ...] = (), max_episode_steps: int | None = None
) -> list[Arm]:
    """Make an arm of PPO, and one for each detail on which the reference codes differ.

    Details that `base` has already, or without effect on the task, are left out.

    Args:
        base: a configuration of PPO.
        excluded_prefixes: prefixes of options without effect; details with one are left out.
        max_episode_steps: maximum steps of an episode; None without one.
    """
    ppo, apart = base.ppo, base.model.value_path == "separate"
    stop, rate = {"ppo.target_kl": 0.015}, 3 * (ppo.value_learning_rate or ppo.learning_rate)
    changes: dict[str, dict[str, Any]] = {
        "values learn returns of λ = 1": {"ppo.value_target": "monte_carlo"},
        "advantages' deviation by n − 1": {"ppo.advantage_std": "unbiased"},
        "value clipping": {"ppo.value_clip": ppo.value_clip or 0.2},
        "value rate × 3": {"ppo.value_learning_rate": rate},
        "stop at a KL of 0.015": stop,
        "stop at a KL of 0.015 by k1": stop | {"ppo.epoch_kl": "k1"},
        "actions as drawn": {"action.squash": "none"},
        "actions through tanh": {"action.squash": "tanh"},
    }
    # Else two networks that share nothing are trained one after the other: the same updates.
    if ppo.recompute_advantages or not apart or ppo.grad_norm_of == "agent":
        changes["policy epochs first"] = {"ppo.epoch_order": "policy_first"}
    if base.reward_norm.per != "none":
        changes["running return as in Gymnasium"] = {"reward_norm.reset_at": "termination"}
    if max_episode_steps is not None:
        changes |= _make_whole_episode_changes(base, max_episode_steps)
    has_effect = {
        name: on for name, on in changes.items()
        if not any(path.startswith(excluded_prefixes) for path in on)
    }  # fmt: skip
    return make_arms_with_base("PPO", base, has_effect)


def _make_whole_episode_changes(base: Config, max_episode_steps: int) -> dict[str, dict[str, Any]]:
    """Return changes to whole episodes, and to rollouts of the same shape.

    There are none if half of a rollout cannot hold an episode, or if its segments cannot be split
    into minibatches.
    """
    whole = _choose_whole_episode_options(base, max_episode_steps)
    num_envs, num_steps = whole["env.num_envs"], whole["ppo.num_steps"]
    uneven = base.get_shuffle_unit(base.ppo) == "segments" and num_envs % base.ppo.num_minibatches
    if num_envs * num_steps > base.batch_size or uneven:
        return {}
    shape = {"ppo.num_steps": num_steps, "env.num_envs": num_envs}
    return {
        f"rollouts {num_envs} × {num_steps}": shape,
        f"whole episodes of {num_envs} × {num_steps}": whole,
    }


def make_arms_for_env(base: Config, make: Callable[..., list[Arm]], **options: Any) -> list[Arm]:
    """Make arms with what `make` needs to know about the environment of `base`.

    Args:
        base: configuration with all other options.
        make: `make_trick_arms` or `make_ppo_detail_arms`.
        options: further arguments of `make`.
    """
    run = preview_run(base)
    uses = {
        "env.action_masks": run.has_masks, "obs_norm.": run.agent.reader.boxes,
        "action.": run.agent.policy_head.num_continuous,
    }  # fmt: skip
    unused, limit = tuple(path for path, used in uses.items() if not used), run.max_episode_steps
    return make(base, excluded_prefixes=unused, max_episode_steps=limit, **options)
