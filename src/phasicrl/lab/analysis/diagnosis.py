"""Diagnosis of a run from its metrics: known problems and options that may help. Kind: pure.

Each rule checks one metric for one problem. The limits are rules of thumb, and each finding has its
numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from phasicrl import Config
from phasicrl.envs.protocol import TIME_LIMIT
from phasicrl.lab.analysis.curves import Array

Columns: TypeAlias = Mapping[str, Array]
"""Finite values of each metric in the order of the iterations."""

MIN_VALUES = 8
"""Minimum number of values of a metric for a judgment."""


class Finding(NamedTuple):
    """Problem of a run that its metrics show."""

    title: str
    evidence: str
    """Numbers that show the problem."""
    remedy: str
    """Options to change."""


def diagnose(columns: Columns, config: Config) -> list[Finding]:
    """Check a run's metrics for known signs of failed training, and return the findings.

    Args:
        columns: metrics of the run.
        config: configuration of the run.
    """
    findings = []
    for metric, check in _RULES:
        values = columns.get(metric, np.empty(0))
        if len(values) >= MIN_VALUES and (finding := check(values, config)):
            findings.append(finding)
    return findings


def _suggest_rate(config: Config) -> str:
    return f"a smaller ppo.learning_rate (now {config.ppo.learning_rate:g})"


def _suggest_epochs(config: Config) -> str:
    return f"fewer ppo.policy_epochs (now {config.ppo.policy_epochs})"


def _check_progress(returns: Array, config: Config) -> Finding | None:
    part = max(2, len(returns) // 5)
    first, last = returns[:part], returns[-part:]
    # The larger spread may be learning itself, within the first or the last fifth.
    if last.mean() > first.mean() + min(first.std(), last.std()):
        return None
    return Finding(
        "No progress",
        f"mean return {first.mean():.4g} in the first fifth of the run, {last.mean():.4g} in the "
        "last",
        "the remedies of other findings; without any, a longer run (total_env_steps) or another "
        f"ppo.learning_rate (now {config.ppo.learning_rate:g})",
    )


def _check_episodes(counts: Array, config: Config) -> Finding | None:
    if counts.any():
        return None
    remedy = f"a time limit of the environment ({TIME_LIMIT})"
    return Finding("No episode ended", f"0 in {len(counts)} iterations", remedy)


def _check_values(explained: Array, config: Config) -> Finding | None:
    # The best fifth: returns of a solved task hardly vary, which leaves nothing to explain.
    best = max(float(np.median(part)) for part in np.array_split(explained, 5))
    if best >= 0.05:
        return None
    more = "ppo.value_epochs" + (", aux.epochs" if config.has_auxiliary_phase else "")
    is_raw = config.reward_norm.per == config.value_norm.statistics == "none"
    norms = "; normalized rewards (reward_norm)" if is_raw else ""
    return Finding(
        "Dead value function",
        f"explained variance {best:.2f} in the best fifth of the run (1 is perfect, 0 a constant)",
        f"more training of values ({more}){norms}; a larger ppo.value_coef with a shared network",
    )


def _check_kl(kl: Array, config: Config) -> Finding | None:
    worst, median = float(kl.max()), float(np.median(kl))
    if worst < 0.1 or worst < 10 * median:
        return None
    return Finding(
        "KL spike",
        f"iteration {int(kl.argmax()) + 1} changed the policy by {worst:.2g} nats, the median "
        f"iteration by {median:.2g}",
        f"{_suggest_rate(config)}, {_suggest_epochs(config)}, or ppo.target_kl",
    )


def _check_auxiliary_kl(kl: Array, config: Config) -> Finding | None:
    if not config.has_auxiliary_phase or (median := float(np.median(kl))) <= 0.05:
        return None
    return Finding(
        "Auxiliary KL too large",
        f"the median auxiliary phase changed the policy by {median:.2g} nats",
        f"a larger aux.beta_clone (now {config.aux.beta_clone:g}), or fewer aux.epochs "
        f"(now {config.aux.epochs})",
    )


def _check_gradients(norm: Array, config: Config) -> Finding | None:
    worst, median = float(norm.max()), float(np.median(norm))
    if config.ppo.max_grad_norm is not None or worst < 100 * max(median, 1e-3):
        return None
    return Finding(
        "Exploding gradients",
        f"the largest norm of the policy's gradient is {worst:.3g}, the median {median:.3g}",
        "ppo.max_grad_norm, 0.5 for example",
    )


Check: TypeAlias = Callable[[Array, Config], Finding | None]


def _make_fraction_check(
    limit: float, title: str, samples: str, remedy: Callable[[Config], str]
) -> Check:
    """Make a rule about the mean of a fraction over the second half of the run."""

    def check_late_mean(fraction: Array, config: Config) -> Finding | None:
        mean = float(fraction[len(fraction) // 2 :].mean())
        if mean <= limit:
            return None
        return Finding(title, f"{mean:.0%} of the {samples} in the second half", remedy(config))

    return check_late_mean


def _make_collapse_check(limit: float, title: str, remedy: Callable[[Config], str]) -> Check:
    """Make a rule about a fall to a small fraction of the first value in the first quarter."""

    def check_collapse(values: Array, config: Config) -> Finding | None:
        early = float(values[max(1, len(values) // 4) - 1])
        if values.min() < 0 or early >= limit * values[0]:  # differential entropy may be negative
            return None
        evidence = f"from {values[0]:.3g} to {early:.3g} in the first quarter of the run"
        coef = f"a larger ppo.entropy_coef (now {config.ppo.entropy_coef:g})"
        return Finding(title, evidence, f"{coef} or {remedy(config)}")

    return check_collapse


_RULES: tuple[tuple[str, Check], ...] = (
    ("charts/episodic_return_100", _check_progress),
    ("charts/num_episodes", _check_episodes),
    ("losses/explained_variance", _check_values),
    ("losses/approx_kl", _check_kl),
    ("losses/clipfrac", _make_fraction_check(
        0.4, "Clip fraction saturated", "samples were outside the clip range",
        lambda c: f"{_suggest_epochs(c)}, {_suggest_rate(c)}, or a wider ppo.clip "
                  f"(now {c.ppo.clip})")),
    ("losses/entropy", _make_collapse_check(0.05, "Entropy collapsed", _suggest_rate)),
    ("losses/action_std", _make_collapse_check(
        0.02, "Standard deviation collapsed", lambda _: "another action.std")),
    ("rewards/clipped_fraction", _make_fraction_check(
        0.05, "Rewards clipped", "normalized rewards were clipped",
        lambda _: "a larger reward_norm.clip, which keeps rare large rewards apart")),
    ("observations/clipped_fraction", _make_fraction_check(
        0.05, "Observation normalizer saturated", "normalized observations were clipped",
        lambda _: "a larger obs_norm.clip; for values that drift, obs_norm.statistics ema")),
    # Runs that learn have 0.7.
    ("network/dormant_fraction", _make_fraction_check(
        0.95, "Dormant units", "policy network's features were dormant",
        lambda c: f"{_suggest_rate(c)}, {_suggest_epochs(c)}, or model.layer_norm")),
    ("losses/aux/kl_loss", _check_auxiliary_kl),
    ("gradients/policy_norm", _check_gradients),
)  # fmt: skip
