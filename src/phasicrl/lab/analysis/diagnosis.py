"""Diagnosis of a run from its metrics: known problems and options that may help. Kind: pure.

Each rule checks one metric for one problem. The limits are rules of thumb, and each finding has its
numbers.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from phasicrl import Config
from phasicrl.envs.protocol import LIMIT_HINT
from phasicrl.lab.analysis.curves import Array

FiniteColumns: TypeAlias = Mapping[str, Array]
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


def diagnose(columns: FiniteColumns, config: Config, *, diverged: bool = False) -> list[Finding]:
    """Check a run's metrics for known signs of failed training, and return the findings.

    Args:
        columns: metrics of the run.
        config: configuration of the run.
        diverged: true if losses or weights that are not finite ended the run.
    """
    findings = []
    if diverged:
        bound = config.ppo.max_grad_norm
        remedy = f"{_suggest_lower_rate(config)}, or ppo.max_grad_norm (now {bound})"
        findings.append(Finding("Diverged", "losses or weights were not finite", remedy))
    returns = columns.get("charts/episodic_return_100", np.empty(0))
    improved = len(returns) < MIN_VALUES or _has_improved(returns)  # unknown without returns
    for metric, check in _METRIC_CHECKS:
        values = columns.get(metric, np.empty(0))
        if len(values) >= MIN_VALUES and (finding := check(values, config, improved)):
            findings.append(finding)
    return findings


def _has_improved(returns: Array) -> bool:
    """Return whether the last fifth of the run has higher returns than the first."""
    first, last = _get_first_and_last_fifth(returns)
    # The larger spread may be learning itself, within the first or the last fifth.
    return bool(last.mean() > first.mean() + min(first.std(), last.std()))


def _get_first_and_last_fifth(values: Array) -> tuple[Array, Array]:
    """Return the first and the last fifth of the values."""
    part = max(2, len(values) // 5)
    return values[:part], values[-part:]


def _format_rate_option(config: Config) -> str:
    return f"ppo.learning_rate (now {config.ppo.learning_rate:g})"


def _suggest_lower_rate(config: Config) -> str:
    return f"a smaller {_format_rate_option(config)}"


def _suggest_fewer_epochs(config: Config) -> str:
    return f"fewer ppo.policy_epochs (now {config.ppo.policy_epochs})"


def _suggest_higher_entropy(config: Config) -> str:
    return f"a larger ppo.entropy_coef (now {config.ppo.entropy_coef:g})"


def _check_progress(returns: Array, config: Config, improved: bool) -> Finding | None:
    if improved:
        return None
    first, last = (part.mean() for part in _get_first_and_last_fifth(returns))
    evidence = f"mean return {first:.4g} in the first fifth of the run, {last:.4g} in the last"
    remedy = "the remedies of other findings; without any, a longer run (total_env_steps) or"
    return Finding("No progress", evidence, f"{remedy} another {_format_rate_option(config)}")


def _check_constant_return(returns: Array, config: Config, improved: bool) -> Finding | None:
    if np.ptp(returns) > 1e-6 * abs(returns[0]):
        return None
    remedy = f"rewards that depend on the actions; if they do, {_suggest_higher_entropy(config)}"
    return Finding("Constant return", f"the mean return is always {returns[0]:.4g}", remedy)


def _check_constant_length(lengths: Array, config: Config, improved: bool) -> Finding | None:
    if improved or np.ptp(lengths) > 0:
        return None
    evidence = f"all episodes have {lengths[0]:.0f} steps, as with a time limit"
    return Finding("Episodes of one length", evidence, f"a longer time limit ({LIMIT_HINT})")


def _check_episodes(counts: Array, config: Config, improved: bool) -> Finding | None:
    if counts.any():
        return None
    return Finding("No episode ended", f"{len(counts)} iterations", f"a time limit ({LIMIT_HINT})")


def _has_raw_targets(config: Config) -> bool:
    return config.reward_norm.per == config.value_norm.statistics == "none"


def _check_value_loss(loss: Array, config: Config, improved: bool) -> Finding | None:
    first, last = map(np.median, _get_first_and_last_fifth(loss))
    if _has_raw_targets(config) and (median := float(np.median(loss))) > 1e6:
        remedy = "normalized rewards (reward_norm.per rollout) or values (value_norm.statistics)"
        return Finding("Rewards too large", f"the median value loss is {median:.2g}", remedy)
    # Losses of normalized rewards are about 1, and larger returns have larger errors.
    if last <= max(100 * first, 1e4 if improved else 10):
        return None
    evidence = f"value loss {first:.2g} in the first fifth of the run, {last:.2g} in the last"
    rates = f"{_suggest_lower_rate(config)} or ppo.value_learning_rate"
    return Finding("Diverging values", evidence, f"{rates}, a smaller ppo.gamma, ppo.max_grad_norm")


def _check_explained_variance(explained: Array, config: Config, improved: bool) -> Finding | None:
    # The best fifth: returns of a solved task hardly vary, which leaves nothing to explain.
    best = max(float(np.median(part)) for part in np.array_split(explained, 5))
    if best >= 0.05:
        return None
    more = "ppo.value_epochs" + (", aux.epochs" if config.has_auxiliary_phase else "")
    norms = "; normalized rewards (reward_norm)" if _has_raw_targets(config) else ""
    return Finding(
        "Dead value function",
        f"explained variance {best:.2f} in the best fifth of the run (1 is perfect, 0 a constant)",
        f"more training of values ({more}){norms}; a larger ppo.value_coef with a shared network",
    )


def _check_kl(kl: Array, config: Config, improved: bool) -> Finding | None:
    worst, median = float(kl.max()), float(np.median(kl))
    # KL is measured before each step: it is always 0 before the only one.
    if worst < 1e-6 and config.ppo.policy_epochs * config.ppo.num_minibatches > 1:
        remedy = f"a larger {_format_rate_option(config)}"
        return Finding("Unchanged policy", f"KL ≤ {worst:.1g} nats", remedy)
    if worst < min(max(0.1, 10 * median), 1.0) and median < 0.1:
        return None
    changed = f"iteration {int(kl.argmax()) + 1} changed the policy by {worst:.2g} nats"
    remedy = f"{_suggest_lower_rate(config)}, {_suggest_fewer_epochs(config)}, or ppo.target_kl"
    return Finding("KL too large", f"{changed}, the median iteration by {median:.2g}", remedy)


def _check_auxiliary_kl(kl: Array, config: Config, improved: bool) -> Finding | None:
    if not config.has_auxiliary_phase or (median := float(np.median(kl))) <= 0.05:
        return None
    evidence = f"the median auxiliary phase changed the policy by {median:.2g} nats"
    larger = f"a larger aux.beta_clone (now {config.aux.beta_clone:g})"
    remedy = f"{larger}, or fewer aux.epochs (now {config.aux.epochs})"
    return Finding("Auxiliary KL too large", evidence, remedy)


def _check_gradients(norms: Array, config: Config, improved: bool) -> Finding | None:
    worst, median, bound = float(norms.max()), float(np.median(norms)), config.ppo.max_grad_norm
    if bound is None:
        if worst < 100 * max(median, 1e-3):
            return None
        evidence = f"the policy's gradient has norms up to {worst:.3g}, the median is {median:.3g}"
        return Finding("Exploding gradients", evidence, "ppo.max_grad_norm, 0.5 for example")
    # Adam divides by the size of gradients: many runs learn whose gradients are always clipped.
    if norms.min() <= bound or (improved and median < 100 * bound):
        return None
    evidence = f"the policy's gradient has norms from {norms.min():.3g}, the median is {median:.3g}"
    remedy = f"a larger ppo.max_grad_norm (now {bound:g}), or normalized rewards (reward_norm.per)"
    return Finding("Gradients always clipped", evidence, remedy)


Check: TypeAlias = Callable[[Array, Config, bool], Finding | None]
"""Function of a metric's values, the configuration, and whether returns improve."""


def _make_fraction_check(
    limit: float, title: str, evidence: str, remedy: Callable[[Config], str]
) -> Check:
    """Make a rule about the mean of a fraction over the second half of the run."""

    def check_second_half_mean(fractions: Array, config: Config, improved: bool) -> Finding | None:
        mean = float(fractions[len(fractions) // 2 :].mean())
        if mean <= limit:
            return None
        return Finding(title, f"{mean:.0%} of the {evidence} in the second half", remedy(config))

    return check_second_half_mean


def _make_collapse_check(fraction: float, title: str, remedy: Callable[[Config], str]) -> Check:
    """Make a rule about a fall to a small fraction of the first value.

    It holds in the first quarter of the run, or in all of a run that does not improve.
    """

    def check_collapse(spreads: Array, config: Config, improved: bool) -> Finding | None:
        end = max(1, len(spreads) // 4) if improved else len(spreads)
        last = float(spreads[end - 1])
        # Entropies of densities may be negative.
        if spreads.min() < 0 or last >= fraction * spreads[0]:
            return None
        evidence = f"from {spreads[0]:.3g} to {last:.3g} within {end} of {len(spreads)} iterations"
        return Finding(title, evidence, f"{_suggest_higher_entropy(config)} or {remedy(config)}")

    return check_collapse


_METRIC_CHECKS: tuple[tuple[str, Check], ...] = (
    ("charts/episodic_return_100", _check_progress),
    ("charts/episodic_return_100", _check_constant_return),
    ("charts/episodic_length", _check_constant_length),
    ("charts/num_episodes", _check_episodes),
    ("losses/value_loss", _check_value_loss),
    ("losses/explained_variance", _check_explained_variance),
    ("losses/approx_kl", _check_kl),
    ("losses/clipfrac", _make_fraction_check(
        0.4, "Clip fraction saturated", "samples were outside the clip range",
        lambda c: f"{_suggest_fewer_epochs(c)}, {_suggest_lower_rate(c)}, or a wider ppo.clip "
                  f"(now {c.ppo.clip})")),
    ("losses/entropy", _make_collapse_check(0.05, "Entropy collapsed", _suggest_lower_rate)),
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
        lambda c: f"{_suggest_lower_rate(c)}, {_suggest_fewer_epochs(c)}, or model.layer_norm")),
    ("losses/aux/kl_loss", _check_auxiliary_kl),
    ("gradients/policy_norm", _check_gradients),
)  # fmt: skip
