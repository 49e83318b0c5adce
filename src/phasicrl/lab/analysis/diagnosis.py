"""What is wrong with a run, by its metrics: in plain language, with the knob to turn. Kind: pure.

Each check looks for one known trouble, and says nothing where a run lacks its metric. The bounds
are rules of thumb; a finding says which numbers it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasicrl.config import Config

Array = NDArray[np.float64]
Columns = Mapping[str, Array]
"""Values of each metric in the order of the iterations, without those that are not numbers."""

LEAST_VALUES = 8
"""Fewer values of a metric say nothing yet."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong.

    Attributes:
        title: in a few words.
        seen: the numbers that say so.
        remedy: knobs to turn.
    """

    title: str
    seen: str
    remedy: str


def diagnose(columns: Columns, config: Config) -> list[Finding]:
    """Everything that is found wrong with a run.

    Args:
        columns: its metrics.
        config: its configuration.
    """
    found: list[Finding] = []
    for metric, check in _CHECKS:
        values = columns.get(metric, np.empty(0))
        if len(values) >= LEAST_VALUES and (finding := check(values, config)):
            found.append(finding)
    return found


def _second_half(values: Array) -> Array:
    return values[len(values) // 2 :]


def _no_progress(returns: Array, config: Config) -> Finding | None:
    """Whether the returns at the end are no better than those at the beginning."""
    part = max(2, len(returns) // 5)
    first, last = returns[:part], returns[-part:]
    # The spread of either may be learning itself: early if it is quick, late if it is slow.
    if last.mean() > first.mean() + min(first.std(), last.std()):
        return None
    return Finding(
        "No progress",
        f"returns were {first.mean():.4g} in the first fifth of the run and {last.mean():.4g} in "
        "the last",
        "look at what else is found here; if nothing is, train longer (total_env_steps), or try "
        f"another ppo.learning_rate (now {config.ppo.learning_rate:g})",
    )


def _dead_values(explained: Array, config: Config) -> Finding | None:
    """Whether values have never explained anything of what they are to predict.

    Once a task is solved returns hardly vary, and nothing is left to explain.
    """
    best = max(float(np.median(part)) for part in np.array_split(explained, 5))
    if best >= 0.05:
        return None
    more = "ppo.value_epochs" if not config.has_auxiliary_phase else "ppo.value_epochs, aux.epochs"
    norms = (
        ""
        if {config.reward_norm.per, config.value_norm.statistics} != {"none"}
        else "; normalize rewards (reward_norm)"
    )
    return Finding(
        "Dead value function",
        f"the explained variance was {best:.2f} in the best fifth of the run (1 is perfect, 0 a "
        "constant)",
        f"train values more ({more}){norms}; a larger ppo.value_coef if the network is shared",
    )


def _kl_spike(kl: Array, config: Config) -> Finding | None:
    """Whether some update moved the policy far away."""
    worst, middle = float(kl.max()), float(np.median(kl))
    if worst < 0.1 or worst < 10 * middle:
        return None
    return Finding(
        "KL spike",
        f"iteration {int(kl.argmax()) + 1} moved the policy by {worst:.2g} nats, the median one by "
        f"{middle:.2g}",
        f"a smaller ppo.learning_rate (now {config.ppo.learning_rate:g}), fewer ppo.policy_epochs "
        f"(now {config.ppo.policy_epochs}), or ppo.target_kl",
    )


def _clipping_saturated(fraction: Array, config: Config) -> Finding | None:
    """Whether most samples are clipped, so that they teach nothing."""
    if (mean := float(_second_half(fraction).mean())) <= 0.4:
        return None
    return Finding(
        "Clip fraction saturated",
        f"{mean:.0%} of the samples of the second half were outside the clip range",
        f"fewer ppo.policy_epochs (now {config.ppo.policy_epochs}), a smaller ppo.learning_rate "
        f"(now {config.ppo.learning_rate:g}), or a wider ppo.clip (now {config.ppo.clip})",
    )


def _entropy_collapsed(entropy: Array, config: Config) -> Finding | None:
    """Whether a policy over finite sets became certain early; normals may have any entropy."""
    early = float(entropy[max(1, len(entropy) // 4) - 1])
    if entropy.min() < 0 or early >= 0.05 * entropy[0]:
        return None
    return Finding(
        "Entropy collapsed",
        f"it fell from {entropy[0]:.3g} to {early:.3g} nats in the first quarter of the run",
        f"a larger ppo.entropy_coef (now {config.ppo.entropy_coef:g}) or a smaller "
        f"ppo.learning_rate (now {config.ppo.learning_rate:g})",
    )


def _deviation_collapsed(deviation: Array, config: Config) -> Finding | None:
    """Whether normal actions hardly vary any more, early."""
    early = float(deviation[max(1, len(deviation) // 4) - 1])
    if early >= 0.02 * deviation[0]:
        return None
    return Finding(
        "Deviation collapsed",
        f"that of the actions fell from {deviation[0]:.3g} to {early:.3g} in the first quarter",
        f"a larger ppo.entropy_coef (now {config.ppo.entropy_coef:g}), or another action.std",
    )


def _rewards_clipped(fraction: Array, config: Config) -> Finding | None:
    """Whether the reward normalizer is saturated."""
    if config.reward_norm.per == "none" or (mean := float(_second_half(fraction).mean())) <= 0.05:
        return None
    return Finding(
        "Rewards clipped",
        f"{mean:.0%} of the normalized rewards of the second half were cut at "
        f"{config.reward_norm.clip}",
        "a larger reward_norm.clip; rare large rewards are told apart by it",
    )


def _observations_clipped(fraction: Array, config: Config) -> Finding | None:
    """Whether the normalizer of observations is saturated."""
    if (
        config.obs_norm.statistics == "none"
        or (mean := float(_second_half(fraction).mean())) <= 0.05
    ):
        return None
    return Finding(
        "Observation normalizer saturated",
        f"{mean:.0%} of the normalized observed numbers of the second half were cut at "
        f"{config.obs_norm.clip:g}",
        "a larger obs_norm.clip; for numbers that drift, obs_norm.statistics ema",
    )


def _units_dormant(fraction: Array, config: Config) -> Finding | None:
    """Whether hardly anything of the policy's network does something; runs that learn have 0.7."""
    if (mean := float(_second_half(fraction).mean())) <= 0.95:
        return None
    epochs = f"fewer ppo.policy_epochs (now {config.ppo.policy_epochs})"
    if config.has_auxiliary_phase:
        epochs += f" or aux.epochs (now {config.aux.epochs})"
    return Finding(
        "Dormant units",
        f"{mean:.0%} of the policy network's features hardly ever move in the second half",
        f"a smaller ppo.learning_rate (now {config.ppo.learning_rate:g}), {epochs}, or "
        "model.layer_norm",
    )


def _auxiliary_phase_too_strong(kl: Array, config: Config) -> Finding | None:
    """Whether the auxiliary phase changes the policy that it is to keep."""
    if not config.has_auxiliary_phase or (middle := float(np.median(kl))) <= 0.05:
        return None
    return Finding(
        "Auxiliary KL too large",
        f"an auxiliary phase moves the policy by {middle:.2g} nats (median)",
        f"a larger aux.beta_clone (now {config.aux.beta_clone:g}), or fewer aux.epochs "
        f"(now {config.aux.epochs})",
    )


def _gradients_explode(norm: Array, config: Config) -> Finding | None:
    """Whether single gradients are far larger than the others, and nothing bounds them."""
    worst, middle = float(norm.max()), float(np.median(norm))
    if config.ppo.max_grad_norm is not None or worst < 100 * max(middle, 1e-3):
        return None
    return Finding(
        "Exploding gradients",
        f"the largest norm of the policy's gradient is {worst:.3g}, the median one {middle:.3g}",
        "ppo.max_grad_norm, 0.5 for example",
    )


_CHECKS: tuple[tuple[str, Callable[[Array, Config], Finding | None]], ...] = (
    ("charts/episodic_return_100", _no_progress),
    ("losses/explained_variance", _dead_values),
    ("losses/approx_kl", _kl_spike),
    ("losses/clipfrac", _clipping_saturated),
    ("losses/entropy", _entropy_collapsed),
    ("losses/action_std", _deviation_collapsed),
    ("rewards/clipped_fraction", _rewards_clipped),
    ("observations/clipped_fraction", _observations_clipped),
    ("network/dormant_fraction", _units_dormant),
    ("losses/aux/kl_loss", _auxiliary_phase_too_strong),
    ("gradients/policy_norm", _gradients_explode),
)
