"""Equal learning from batches of another size: rules that scale options together. Kind: pure.

Rules of Hilton, Cobbe and Schulman 2021, "Batch size-invariance for policy optimization" (arXiv
2110.00641), section 4: what is averaged stays averaged over as many samples, and a step that is
made from more samples is larger. They hold for batches that are small: at some size gradients have
so little noise that larger batches only cost samples.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from phasicrl import Config


def scaled_batch(config: Config, factor: float) -> Config:
    """Return the configuration for batches `factor` times as large.

    - `env.num_envs` × factor; minibatches grow with it;
    - limits of gradients' norms / √factor, as a mean over more samples has less noise (not in the
      paper, whose code has no limits; with fixed ones small batches learned half as fast);
    - Adam's step sizes × √factor, its decays ^ factor: their windows stay as long in samples;
    - `ppo.proximal_decay`, `ppo.advantage_decay` and decays of normalizers: so do these;
    - `aux.every` / factor: a phase has as many samples.

    Raises:
        ValueError: a factor that is not above zero, or that leaves no whole number of environments
            or of iterations in a phase.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"the batch's factor is {factor}; it must be a number above zero")
    exact, root = Fraction(factor).limit_denominator(1 << 16), math.sqrt(factor)
    values, aux = config.values(), config.aux
    rates = ["ppo.learning_rate", "ppo.value_learning_rate"]
    if aux.optimizer == "own":
        rates.append("aux.learning_rate")
    changed: dict[str, Any] = {
        "env.num_envs": _whole("env.num_envs", config.env.num_envs * exact, factor),
        "ppo.adam_betas": tuple(beta**factor for beta in config.ppo.adam_betas),
        **_times(values, rates, root),
        **_times(values, ["ppo.max_grad_norm", "aux.max_grad_norm"], 1 / root),
    }
    for name in ("ppo.proximal_decay", "ppo.advantage_decay"):
        if values[name]:
            changed[name] = _decay_with_age(values[name], factor)
    for name in ("obs_norm", "value_norm"):
        norm = getattr(config, name)
        if norm.statistics == "ema":
            changed[f"{name}.decay"] = norm.decay**factor
    if config.has_auxiliary_phase:
        changed["aux.every"] = _whole("aux.every", aux.every / exact, factor)
        if aux.iterations_per_epoch is not None:
            number = aux.iterations_per_epoch / exact
            changed["aux.iterations_per_epoch"] = _whole("aux.iterations_per_epoch", number, factor)
    return config.with_updates(changed)


def _times(values: dict[str, Any], names: list[str], factor: float) -> dict[str, float]:
    """Multiply the options that are on."""
    return {name: values[name] * factor for name in names if values.get(name) is not None}


def _decay_with_age(decay: float, factor: float) -> float:
    """Return a decay whose average is `1 / factor` times as old, in steps.

    The age of an average is its center of mass, `β / (1 − β)`.
    """
    age = decay / (1 - decay) / factor
    return age / (1 + age)


def _whole(name: str, number: Fraction, factor: float) -> int:
    """Convert a number to an integer."""
    if number.denominator != 1 or number < 1:
        raise ValueError(
            f"factor is {factor:g}, which makes {name} {float(number):g}; expected a whole number. "
            f"Choose another factor, or change {name} first."
        )
    return int(number)
