"""Each problem is found in metrics that have it, and in no healthy run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasicrl.config import Config, RewardNormConfig
from phasicrl.lab.analysis.diagnosis import diagnose
from tests.helpers import OBS_NORM, tiny, tiny_aux

HEALTHY = {
    "charts/episodic_return_100": np.linspace(10, 400, 40),
    "charts/num_episodes": np.r_[0, np.full(39, 3)],
    "losses/explained_variance": np.linspace(-0.5, 0.9, 40),
    "losses/approx_kl": np.full(40, 0.01),
    "losses/clipfrac": np.full(40, 0.15),
    "losses/entropy": np.linspace(2.7, 0.1, 40),
    "losses/action_std": np.linspace(1, 0.1, 40),
    "rewards/clipped_fraction": np.full(40, 0.001),
    "observations/clipped_fraction": np.full(40, 0.002),
    "network/dormant_fraction": np.linspace(0, 0.9, 40),
    "losses/aux/kl_loss": np.full(10, 0.002),
    "gradients/policy_norm": np.full(40, 0.5),
}


def spiked(value: float) -> np.ndarray:
    values = np.full(40, 0.01)
    values[16] = value
    return values


SICK = {
    "No progress": ("charts/episodic_return_100", np.tile([20.0, 22.0], 20), "21 in the last"),
    "No episode ended": ("charts/num_episodes", np.zeros(40), "0 in 40"),
    "Dead value function": ("losses/explained_variance", np.full(40, 0.01), "0.01"),
    "KL spike": ("losses/approx_kl", spiked(0.35), "iteration 17 changed the policy by 0.35"),
    "Clip fraction saturated": ("losses/clipfrac", np.full(40, 0.6), "60%"),
    "Entropy collapsed": ("losses/entropy", np.r_[2.7, np.full(39, 0.01)], "2.7 to 0.01"),
    "Standard deviation collapsed": (
        "losses/action_std",
        np.r_[1, np.full(39, 0.001)],
        "1 to 0.001",
    ),
    "Rewards clipped": ("rewards/clipped_fraction", np.full(40, 0.2), "20%"),
    "Observation normalizer saturated": (
        "observations/clipped_fraction",
        np.full(40, 0.3),
        "30% of the normalized observations",
    ),
    "Dormant units": ("network/dormant_fraction", np.linspace(0.96, 1, 40), "99%"),
    "Auxiliary KL too large": ("losses/aux/kl_loss", np.full(10, 0.3), "0.3 nats"),
    "Exploding gradients": ("gradients/policy_norm", spiked(1e4), "1e+04"),
}


def watched(tmp_path: Path, **changes: object) -> Config:
    """Return settings under which every problem can arise."""
    config = tiny(
        tmp_path, aux=tiny_aux(), reward_norm=RewardNormConfig(per="rollout"), obs_norm=OBS_NORM
    )
    return config.with_updates({"ppo.max_grad_norm": None} | changes)


def names(columns: dict[str, np.ndarray], tmp_path: Path, **changes: object) -> list[str]:
    config = watched(tmp_path, **changes)
    return [finding.title for finding in diagnose(columns, config)]


def test_a_healthy_run_has_nothing(tmp_path: Path) -> None:
    assert names(HEALTHY, tmp_path) == []


@pytest.mark.parametrize("solved_by", [2, 5, 8, 20])
def test_a_task_solved_early_is_no_problem(solved_by: int, tmp_path: Path) -> None:
    returns = np.r_[np.linspace(20, 500, solved_by), np.full(40 - solved_by, 500.0)]
    # Of returns that are all the same, any error is more than their variance.
    explained = np.r_[np.linspace(0, 0.9, 8), np.full(32, -3.0)]
    solved = {"charts/episodic_return_100": returns, "losses/explained_variance": explained}
    assert names(HEALTHY | solved, tmp_path) == []


@pytest.mark.parametrize("problem", SICK)
def test_each_problem_has_numbers_and_existing_options(problem: str, tmp_path: Path) -> None:
    metric, values, numbers = SICK[problem]
    config = watched(tmp_path)
    (finding,) = diagnose(HEALTHY | {metric: values}, config)
    assert finding.title == problem and numbers in finding.evidence
    words = {word.strip(",;()") for word in finding.remedy.split()}
    options = {word for word in words if "." in word and not word[0].isdigit()}
    assert options and options <= {*config.values(), "env.options"}
    assert diagnose({metric: values[:7]}, config) == []


def test_settings_excuse_problems(tmp_path: Path) -> None:
    gradients = HEALTHY | {"gradients/policy_norm": spiked(1e4)}
    assert names(gradients, tmp_path, **{"ppo.max_grad_norm": 0.5}) == []
    differential = HEALTHY | {"losses/entropy": np.linspace(1, -3, 40)}  # of a normal distribution
    assert names(differential, tmp_path) == []
