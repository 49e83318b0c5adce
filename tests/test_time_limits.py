"""Values learned at time limits, on the ring of benchmarks/time_limits.py."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import time_limits
from tests.helpers import mark_long

EXACT = ("final observation", "no final observation")
BIASED = "ppo.truncation_value rsl_rl"


@pytest.mark.parametrize(("task", "arm"), mark_long(
    [*(("limit", arm) for arm in (*EXACT, BIASED)), ("both", EXACT[0])],
    ("limit", EXACT[0]), ("both", EXACT[0]),
))  # fmt: skip
def test_values_at_time_limits(task: str, arm: str, tmp_path: Path) -> None:
    """By hand, with γ = 0.9: the last cell is worth 1 / (1 - γ^8) = 1.76, 1 every 8 steps.

    It is cut in the 9/16 of the episodes that start in cell 0. Those bootstrap from its own value
    with `rsl_rl`, the others have a target above 1: V > 1 / (1 - 9/16 γ) = 2.03. Where both flags
    are set nothing follows, so that it is worth 1; a bootstrap would add 9/16 γ V(0) > 0.2.
    """
    short = {"total_env_steps": 6144, "ppo.learning_rate": 1e-2, "output_dir": str(tmp_path)}
    config = time_limits.CONFIG.with_updates(short | time_limits.ARMS[arm])
    values, left_out = time_limits.train_ours(task, arm, config)
    truth = {"limit": 1 / (1 - 0.9**8), "both": 1.0}[task] * 0.9 ** np.arange(7, -1, -1)
    assert np.allclose(time_limits.true_values(task), truth)
    # One step of each episode of 8.
    assert left_out == pytest.approx(1 / 8 if arm == "no final observation" else 0)
    if arm == BIASED:
        assert values[-1] > 2.03
        assert np.mean(values - truth) > 0.4
    else:
        assert np.allclose(values, truth, atol=0.05)
