"""Seeds of every stream of randomness, derived from the seed of a run. Kind: pure."""

from __future__ import annotations

import numpy as np

PURPOSES = ("init", "action", "shuffle", "env", "evaluation", "validation")
"""Uses of randomness, each with a stream of its own. Only append: the place decides the stream."""


def derive_seed(seed: int, purpose: str, *extra: int) -> int:
    """Derive the seed of one stream of a run; `extra` tells apart streams of one purpose."""
    sequence = np.random.SeedSequence(seed, spawn_key=(PURPOSES.index(purpose), *extra))
    # 31 bits: what every back end accepts
    return int(sequence.generate_state(1, np.uint32)[0] >> 1)


def env_seeds(seed: int, num_envs: int, *, first: int = 0) -> list[int]:
    """Derive one seed of 31 bits for each environment.

    Pools with neighboring seeds share none, which they would with `seed + index`.

    Args:
        seed: of all environments of the run.
        num_envs: how many are asked for.
        first: the number of the first of them, among all.
    """
    words = np.random.SeedSequence(seed).generate_state(first + num_envs, np.uint32)
    return [int(word) >> 1 for word in words[first:]]
