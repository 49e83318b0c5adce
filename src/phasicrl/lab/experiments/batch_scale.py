"""Equal learning from batches of another size: rules that scale options together. Kind: pure.

Rules of Hilton, Cobbe and Schulman 2021, "Batch size-invariance for policy optimization" (arXiv
2110.00641), section 4: averages stay averages over as many samples, and a step from more samples is
larger. They hold for small batches: at some size gradients have so little noise that larger batches
only cost samples.
"""

import math
from fractions import Fraction
from typing import Any

from phasicrl import Config


def scale_batch(config: Config, factor: float) -> Config:
    """Return a configuration for batches `factor` times as large, which learns as before.

    - `env.num_envs` × factor; minibatches grow with it;
    - maximum gradient norms / √factor, as a mean over more samples has less noise (not by Hilton
      et al., whose code does not clip; with a fixed maximum small batches learned half as fast);
    - Adam's learning rates × √factor; its betas and decays of normalizers ** factor, for averages
      over as many samples, and `ppo.proximal_decay`, `ppo.advantage_decay` by their mean age;
    - `aux.every` and `aux.iterations_per_epoch` / factor, for phases of as many samples.

    Raises:
        ValueError: a factor that is not above zero, or without a whole number of environments or
            of iterations in a phase.
    """
    if not 0 < factor < math.inf:
        raise ValueError(f"factor is {factor}; expected a number above 0")
    exact, root = Fraction(factor).limit_denominator(1 << 16), math.sqrt(factor)
    values, aux = config.values(), config.aux
    rates = ["ppo.learning_rate", "ppo.value_learning_rate"]
    rates += ["aux.learning_rate"] * (aux.optimizer == "own")
    changes: dict[str, Any] = {
        "env.num_envs": _require_int("env.num_envs", config.env.num_envs * exact, factor),
        "ppo.adam_betas": tuple(beta**factor for beta in config.ppo.adam_betas),
        **_scale_options(values, rates, root),
        **_scale_options(values, ["ppo.max_grad_norm", "aux.max_grad_norm"], 1 / root),
    }
    for name in ("ppo.proximal_decay", "ppo.advantage_decay"):
        if values[name]:  # the age of an average, its center of mass β / (1 − β), is in steps
            age = values[name] / (1 - values[name]) / factor
            changes[name] = age / (1 + age)
    for name in ("obs_norm", "value_norm"):
        norm = getattr(config, name)
        if norm.statistics == "ema":
            changes[f"{name}.decay"] = norm.decay**factor
    for name in ("aux.every", "aux.iterations_per_epoch"):
        if config.has_auxiliary_phase and values[name] is not None:
            changes[name] = _require_int(name, values[name] / exact, factor)
    return config.with_updates(changes)


def _scale_options(values: dict[str, Any], names: list[str], factor: float) -> dict[str, float]:
    """Return the named options times a factor, without those that are None."""
    return {name: values[name] * factor for name in names if values.get(name) is not None}


def _require_int(name: str, number: Fraction, factor: float) -> int:
    """Convert a number to an integer, or raise ValueError."""
    if number.denominator != 1 or number < 1:
        given = f"factor is {factor:g}, which makes {name} {float(number):g}"
        rule = f"a whole number. Choose another factor, or change {name} first."
        raise ValueError(f"{given}; expected {rule}")
    return int(number)
