"""Streams of randomness: distinct, and the same in every version."""

import pytest

from phasicrl.seeding import PURPOSES, derive_seed, env_seeds


def test_streams_of_randomness_are_apart_and_stable() -> None:
    seeds = [derive_seed(seed, purpose) for seed in (0, 1, 2) for purpose in PURPOSES]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**31 for seed in seeds)
    assert derive_seed(1, "env") != derive_seed(1, "env", 128)
    for wrong in (-1, None, "1", 1.0):
        with pytest.raises(ValueError, match=f"seed is {wrong!r}; expected an integer of at least"):
            derive_seed(wrong, "evaluation")  # type: ignore[arg-type]


def test_pools_with_neighboring_seeds_share_no_seed() -> None:
    pools = [env_seeds(seed, 64) for seed in range(20)]
    assert len({seed for pool in pools for seed in pool}) == 20 * 64
    assert env_seeds(3, 4) == env_seeds(3, 8)[:4]


def test_seeds_are_those_of_earlier_versions() -> None:
    """A run is repeated from its seed, by any version: these numbers may never change."""
    expected = [820705584, 727063581, 1374802077, 1528361072, 1867002961, 240241362, 613715345]
    assert [derive_seed(1, purpose) for purpose in PURPOSES] == expected
    assert env_seeds(0, 2) == [1484405855, 1838574579]
