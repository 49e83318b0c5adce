"""Each problem is found in metrics that have it, and in no healthy run."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.lab.analysis import report
from phasicrl.lab.analysis.diagnosis import diagnose
from phasicrl.lab.analysis.report import write_report
from phasicrl.optimize import DivergedError
from phasicrl.training.run import Run
from tests.helpers import OBS_NORM, Corridor, corridor, tiny, tiny_aux

HEALTHY = {
    "charts/episodic_return_100": np.linspace(10, 400, 40),
    "charts/num_episodes": np.r_[0, np.full(39, 3)],
    "losses/explained_variance": np.linspace(-0.5, 0.9, 40),
    "losses/approx_kl": np.full(40, 0.01),
    "losses/clipfrac": np.full(40, 0.15),
    "losses/value_loss": np.geomspace(0.5, 0.01, 40),
    "losses/entropy": np.linspace(2.7, 0.2, 40),
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
    "No episode ended": ("charts/num_episodes", np.zeros(40), "40 iterations"),
    "Dead value function": ("losses/explained_variance", np.full(40, 0.01), "0.01"),
    "KL too large": ("losses/approx_kl", spiked(0.35), "iteration 17 changed the policy by 0.35"),
    "Unchanged policy": ("losses/approx_kl", np.full(40, 1e-9), "1e-09 nats"),
    "Diverging values": ("losses/value_loss", np.geomspace(1, 1e6, 40), "2.9e+05 in the last"),
    "Clip fraction saturated": ("losses/clipfrac", np.full(40, 0.6), "60%"),
    "Entropy collapsed": ("losses/entropy", np.r_[2.7, np.full(39, 0.01)], "2.7 to 0.01"),
    "Standard deviation collapsed":
        ("losses/action_std", np.r_[1, np.full(39, 0.001)], "1 to 0.001"),
    "Rewards clipped": ("rewards/clipped_fraction", np.full(40, 0.2), "20%"),
    "Observation normalizer saturated":
        ("observations/clipped_fraction", np.full(40, 0.3), "30% of the normalized observations"),
    "Dormant units": ("network/dormant_fraction", np.linspace(0.96, 1, 40), "99%"),
    "Auxiliary KL too large": ("losses/aux/kl_loss", np.full(10, 0.3), "0.3 nats"),
    "Exploding gradients": ("gradients/policy_norm", spiked(1e4), "1e+04"),
}  # fmt: skip


def watched(tmp_path: Path, **changes: object) -> Config:
    """Return settings under which every problem can arise."""
    config = tiny(tmp_path, aux=tiny_aux(), obs_norm=OBS_NORM)
    return config.with_updates({"ppo.max_grad_norm": None} | changes)


def names(columns: dict[str, np.ndarray], tmp_path: Path, **changes: object) -> list[str]:
    return [finding.title for finding in diagnose(columns, watched(tmp_path, **changes))]


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
    still = HEALTHY | {"losses/approx_kl": np.zeros(40)}  # as before the only step
    assert names(still, tmp_path, **{"ppo.policy_epochs": 1, "ppo.num_minibatches": 1}) == []
    large = HEALTHY | {"losses/value_loss": np.full(40, 2e6)}
    assert names(large, tmp_path) == []
    assert names(large, tmp_path, **{"reward_norm.per": "none"}) == ["Rewards too large"]


@pytest.mark.parametrize(("metric", "values", "problem", "changes"), [
    ("charts/episodic_length", np.full(40, 200.0), "Episodes of one length", {}),
    ("losses/entropy", np.linspace(2.7, 0.1, 40), "Entropy collapsed", {}),
    ("losses/value_loss", np.geomspace(0.1, 30, 40), "Diverging values", {}),
    ("gradients/policy_norm", np.linspace(3, 9, 40), "Gradients always clipped",
     {"ppo.max_grad_norm": 0.5}),
])  # fmt: skip
def test_a_run_that_improves_may_have_what_is_a_problem_in_others(
    metric: str, values: np.ndarray, problem: str, changes: dict[str, object], tmp_path: Path
) -> None:
    assert names(HEALTHY | {metric: values}, tmp_path, **changes) == []
    stuck = HEALTHY | {"charts/episodic_return_100": np.tile([20.0, 22.0], 20), metric: values}
    assert names(stuck, tmp_path, **changes) == ["No progress", problem]


class Rewards(gym.RewardWrapper[np.ndarray, Any]):
    """Corridor with other rewards."""

    def __init__(self, change: Callable[[float, np.random.Generator], float], **corridor: int):
        super().__init__(Corridor(**corridor))
        self._change = change

    def reward(self, reward: Any) -> float:
        return self._change(reward, self.np_random)


@torch.no_grad()
def kill_features(run: Run, _: object) -> None:
    for name, weight in run.agent.named_parameters():
        if "encoder" in name and name.endswith("bias"):
            weight.fill_(-100.0)


@torch.no_grad()
def enlarge_values(run: Run, _: object) -> None:
    for name, weight in run.agent.named_parameters():
        if "value" in name:
            weight.mul_(1.5)


RAW = {"reward_norm.per": "none"}
FAR = {"length": 10**9}
PLANTED: dict[str, tuple[str, dict[str, Any], Callable[[], Any], Any]] = {
    "nothing": ("", {}, corridor, None),
    "dead ReLUs": ("Dormant units", {"model.activation": "relu"}, corridor, kill_features),
    "entropy collapse": ("Entropy collapsed", {"ppo.learning_rate": 0.3}, corridor, None),
    "KL explosion": ("KL too large", {"ppo.learning_rate": 1.0}, corridor, None),
    "value divergence": ("Diverging values", {}, corridor, enlarge_values),
    "constant reward": ("Constant return", RAW, partial(Rewards, lambda *_: 1.0, **FAR), None),
    "large rewards": ("Rewards too large", RAW, partial(Rewards, lambda r, _: 1e4 * r), None),
    "clipping": ("Gradients always clipped", {"ppo.max_grad_norm": 1e-4}, corridor, None),
    "no learning": ("Unchanged policy", {"ppo.learning_rate": 1e-12}, corridor, None),
    "no end": ("No episode ended", {}, partial(Corridor, limit=10**9, **FAR), None),
    "time limit": ("Episodes of one length", {},
                   partial(Rewards, lambda _, chance: chance.normal(), **FAR), None),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("trouble", PLANTED)
def test_the_report_names_a_trouble_that_was_planted(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, changes, make_env, disturb = PLANTED[trouble]
    usual = {"total_env_steps": 640, "ppo.learning_rate": 0.01, "ppo.policy_epochs": 2}
    config = tiny(tmp_path).with_updates(usual | {"ppo.value_epochs": 2} | changes)
    run = train(config, make_env=make_env, callbacks=disturb).directory
    monkeypatch.setattr(report, "_draw_figures", lambda _: {})
    found = re.findall("<strong>(.*)</strong>", write_report([run]).read_text(encoding="utf-8"))
    assert problem in found if problem else not found, found


@pytest.mark.long
def test_the_report_of_a_diverged_run_says_so(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"ppo.learning_rate": 0.01})

    def break_weights(run: Run, _: object) -> None:
        if run.iteration == 2:
            next(run.agent.parameters()).data.fill_(torch.nan)

    with pytest.raises(DivergedError):
        train(config, make_env=corridor, callbacks=break_weights)
    page = write_report([*tmp_path.iterdir()]).read_text(encoding="utf-8")
    assert "<strong>Diverged</strong>" in page and "Too few iterations" not in page


def test_a_run_of_one_iteration_is_not_judged_but_drawn(tmp_path: Path) -> None:
    run = train(tiny(tmp_path, total_env_steps=32), make_env=corridor).directory
    page = write_report([run]).read_text(encoding="utf-8")
    assert "Too few iterations" in page and "None of the known problems" not in page
    assert page.count("<svg") > 5 and "fill: var(--color0)" in page  # points
