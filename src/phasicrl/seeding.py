"""Seeds of all random streams, derived from the seed of a run. Kind: pure."""

import numpy as np

PURPOSES = ("init", "action", "shuffle", "env", "evaluation", "validation", "torch")
"""Purposes of random streams. Only append: the index of a purpose is part of its seeds."""


def derive_seed(seed: int, purpose: str, *extra: int) -> int:
    """Derive an independent seed for one random stream; `extra` numbers streams of one purpose.

    Raises:
        ValueError: the seed is negative, or no integer.
    """
    if not hasattr(seed, "__index__") or seed < 0:
        raise ValueError(f"seed is {seed!r}; expected an integer of at least 0")
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *extra))
    # 31 bits: what every back end accepts
    return int(sequence.generate_state(1, np.uint32)[0] >> 1)


def env_seeds(seed: int, num_envs: int, *, first: int = 0) -> list[int]:
    """Derive one seed of 31 bits for each environment.

    Runs with neighboring seeds share no environments, as they would with `seed + index`.

    Args:
        seed: seed of all environments of the run.
        num_envs: number of environments.
        first: index of the first environment among all of the run.
    """
    words = np.random.SeedSequence(seed).generate_state(first + num_envs, np.uint32)
    return [int(word) >> 1 for word in words[first:]]
