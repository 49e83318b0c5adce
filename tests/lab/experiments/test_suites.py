"""Suites: arms of the papers, and no run twice."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasicrl.envs.envpool import PROCGEN_GAMES
from phasicrl.lab.experiments import trials
from phasicrl.lab.experiments.run_suite import make_curves, run_suite
from phasicrl.lab.experiments.suites import SUITES
from phasicrl.lab.experiments.trials import Trial
from phasicrl.optimize import DivergedError
from phasicrl.presets import differences, get_preset
from phasicrl.runs.directory import RunDirectory
from tests.helpers import run_here
from tests.lab.analysis.runs import read_csv

pytestmark = pytest.mark.filterwarnings("ignore:.*no auxiliary phase")


def arms(name: str, task: str, scale: Any = "paper") -> dict[str, dict[str, Any]]:
    """Return the changes of each arm to the paper's PPG, by name."""
    suite = SUITES[name]
    base = suite.make_task_configs(task, scale)
    return {
        arm: {field: new for field, (_, new) in differences(config, base.ppg).items()}
        for arm, config in suite.make_arms(base)
    }


def vary(symbol: str, field: str, values: Iterable[int], usual: int) -> dict[str, dict[str, int]]:
    return {f"{symbol} = {n}": {field: n} if n != usual else {} for n in values}


@pytest.mark.parametrize(("suite", "expected"), [
    ("fig3", vary("E_π", "ppo.policy_epochs", range(1, 7), 1)),
    ("value-epochs", vary("E_V", "ppo.value_epochs", (1, 2, 3, 6), 1)),
    ("fig4", vary("E_aux", "aux.epochs", (1, 2, 3, 6, 9), 6)),
    ("fig5", vary("N_π", "aux.every", (2, 4, 8, 16, 32), 32)),
    ("fig6", {"clipping": {}, "KL penalty": {"ppo.clip": None, "ppo.kl_penalty": 1.0}}),
    ("fig7", {"two networks": {}, "one network": {"model.value_path": "detached"}}),
    ("fig9", {"values trained": {}, "values not trained": {"aux.value_coef": 0.0},
              "values not trained, twice E_V": {"aux.value_coef": 0.0, "ppo.value_epochs": 2}}),
    ("skip-aux", {"all phases": {}, "every other phase": {"aux.run_every": 2}}),
    ("n-aux", {"N = N_π": {}, "N = N_π / 2": {"aux.iterations_per_epoch": 16},
               "N = N_π / 4": {"aux.iterations_per_epoch": 8},
               "the last N_π / 4 alone":
                   {"aux.iterations_per_epoch": 8, "aux.iterations_from": "last"}}),
])  # fmt: skip
def test_arms_have_the_sources_values_and_change_nothing_else(suite: str, expected: Any) -> None:
    assert arms(suite, "bigfish") == expected


def test_figure_2_is_the_paper_s_two_algorithms_on_all_games() -> None:
    suite = SUITES["fig2"]
    assert suite.get_tasks("paper") == PROCGEN_GAMES and len(PROCGEN_GAMES) == 16
    assert suite.num_seeds == 3
    base = suite.make_task_configs("miner", "paper")
    paper = {"env.id": "procgen:miner"}
    assert suite.make_arms(base) == [
        ("PPG", get_preset("procgen-ppg-paper").with_updates(paper)),
        ("PPO", get_preset("procgen-ppo-paper").with_updates(paper)),
    ]
    assert base.ppg.env.distribution == "hard" and base.ppg.total_env_steps == 100_000_000


def base(name: str, task: str, scale: Any = "paper") -> Any:
    return SUITES[name].make_task_configs(task, scale)


def test_the_table_of_source_000() -> None:
    assert base("skip-aux", "bigfish").ppg.env.distribution == "easy"
    of_table = SUITES["seeds-table"].make_arms(base("seeds-table", "bigfish"))
    ppg, ppo, of_openai, *of_cleanrl = (config for _, config in of_table)
    assert ppg.total_env_steps == ppo.total_env_steps == 25_000_000 and not ppo.has_auxiliary_phase
    assert differences(of_openai, ppg) == {"reward_norm.gamma": (None, 0.99)}
    bigfish = {"env.id": "procgen:bigfish"}
    presets = "compat-cleanrl-ppg", "compat-cleanrl-ppo-procgen"
    assert of_cleanrl == [get_preset(name).with_updates(bigfish) for name in presets]
    small = [x for _, x in SUITES["seeds-table"].make_arms(base("seeds-table", "bigfish", "small"))]
    shapes = {(one.env.num_envs, one.ppo.num_steps, one.model.channels, one.total_env_steps)
              for one in small}  # fmt: skip
    assert len(small) == 5 and shapes == {(32, 64, (4, 8, 8), 150_000)}
    assert len(SUITES["seeds-table"].make_arms(base("seeds-table", "hopper", "small"))) == 3


def test_details_that_a_task_has_already_or_cannot_have_are_no_arms() -> None:
    on_acrobot, hopper, pendulum, remembering = (
        arms("details", task, "small").keys()
        for task in ("acrobot", "hopper", "pendulum", "cartpole-masked-velocity")
    )
    # 16 segments cannot be split into 32 minibatches, nor 4 into 16.
    assert on_acrobot - hopper == {"policy phase on whole segments"}
    assert on_acrobot - pendulum == {
        "policy phase on whole segments", "auxiliary phase on whole segments"
    }  # fmt: skip
    assert "rewards normalized by γ 0.99" in pendulum - on_acrobot  # Pendulum's own γ is 0.9
    assert not any("transitions" in arm for arm in remembering)
    of_ppo = {task: dict(SUITES["ppo-details"].make_arms(base("ppo-details", task, "small"))).keys()
              for task in ("pendulum", "acrobot", "atari")}  # fmt: skip
    # Episodes of 200 steps fit into rollouts of 4 × 512; half of 8 × 128 steps cannot hold 500.
    assert "whole episodes of 4 × 512" in of_ppo["pendulum"]
    assert {"rollouts 1 × 1024", "whole episodes of 1 × 1024"} <= of_ppo["acrobot"]
    # Discrete actions have no squash; Atari's preset clips values and leaves rewards as they are.
    assert "actions through tanh" in of_ppo["pendulum"] - of_ppo["acrobot"]
    assert not {"value clipping", "running return as in Gymnasium"} & of_ppo["atari"]


def test_the_help_names_every_suite() -> None:
    said = " ".join((run_suite.__doc__ or "").split())
    assert all(name in said for name in SUITES if name not in {f"fig{n}" for n in range(3, 9)})


@pytest.mark.long
@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_arms_of_every_task_can_be_made_and_differ(name: str, scale: Any) -> None:
    suite = SUITES[name]
    for task in suite.get_tasks(scale):
        made = suite.make_arms(suite.make_task_configs(task, scale))
        assert len(made) > 1 and len({arm for arm, _ in made}) == len(made)
        identities = [config.identity() for _, config in made]
        assert all(identities.count(one) == 1 for one in identities), task


def test_a_task_may_be_the_id_of_an_environment() -> None:
    assert base("fig2", "gymnasium:CartPole-v1", "small").ppg.env.id == "gymnasium:CartPole-v1"
    with pytest.raises(ValueError, match=r"tasks has starpilto; expected .* starpilot"):
        base("fig2", "starpilto")
    with pytest.raises(ValueError, match="name is fig1; expected"):
        run_suite("fig1")


def run(tmp_path: Path, name: str = "fig6", **options: Any) -> tuple[Any, list[tuple[str, ...]]]:
    trained: list[tuple[str, ...]] = []
    tasks = options.pop("tasks", ("gymnasium:CartPole-v1",))
    found = run_suite(
        name, tasks=tasks, total_env_steps=2048, output_dir=tmp_path,
        on_trial=lambda trial: trained.append(trial.key), **options,
    )  # fmt: skip
    return found, trained


@pytest.fixture
def quick_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluate nothing, and train in this process."""
    from phasicrl.training.evaluate import Evaluation

    evaluation = [Evaluation("greedy", (7.0,), (7,))]
    monkeypatch.setattr(trials, "evaluate", lambda *_, **__: evaluation)
    monkeypatch.setattr(trials, "run_in_processes", run_here)


@pytest.mark.long
@pytest.mark.usefixtures("quick_evaluation")
def test_a_suite_writes_rows_and_a_figure_and_repeats_no_run(tmp_path: Path) -> None:
    found, trained = run(tmp_path, seeds=(101, 102))
    task = "gymnasium:CartPole-v1"
    arms = ("clipping", "KL penalty")
    wanted = [(task, arm, "2048", seed) for seed in ("101", "102") for arm in arms]
    assert trained == wanted and all(file.is_file() for file in found.files)
    rows = read_csv(tmp_path / "fig6-small.csv")
    pairs = sorted((row["arm"], row["seed"]) for row in rows)
    assert pairs == sorted((key[1], key[3]) for key in wanted)
    (directory,) = (
        there.path for there in map(RunDirectory, (tmp_path / "runs").iterdir())
        if there.config.seed == 102 and there.config.ppo.clip is None
    )  # fmt: skip
    metrics = RunDirectory(directory).metrics("charts/episodic_return_100")
    last = float(metrics[-1]["charts/episodic_return_100"])
    (row,) = (row for row in rows if (row["arm"], row["seed"]) == ("KL penalty", "102"))
    curve = [float(point) for point in row["curve"].split()]
    assert curve[-1] == pytest.approx(last, rel=1e-3) and len(curve) == 40
    assert float(row["greedy_mean"]) == 7.0 and row["env_steps"] == "2048"
    name = "losses/value_loss"
    losses = [metrics[name] for metrics in RunDirectory(directory).metrics(name)]
    assert len(losses) == 2 and losses[0] != losses[1]
    assert float(row["value_loss"]) == pytest.approx(sum(losses) / 2, rel=1e-3)
    # Again: nothing is trained. As another suite: what it shares is taken from there.
    assert run(tmp_path, seeds=(101, 102))[1] == []
    before = set((tmp_path / "runs").iterdir())
    run(tmp_path, "skip-aux", seeds=(101,))
    assert len(set((tmp_path / "runs").iterdir()) - before) == 1


def test_a_task_that_cannot_be_trained_is_refused_before_anything_is(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gymnasium:Nope-v0, clipping: .*Nope-v0"):
        run_suite("fig6", tasks=("cartpole", "gymnasium:Nope-v0"), output_dir=tmp_path)
    with pytest.raises(ValueError, match="cartpole, clipping, 300000, 101 twice"):
        run_suite("fig6", tasks=("cartpole",), seeds=(101, 101), output_dir=tmp_path)
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
@pytest.mark.usefixtures("quick_evaluation")
def test_a_diverged_run_is_a_row_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = trials.train

    def diverging(config: Any, **_: Any) -> Any:
        if config.ppo.clip is None:
            files = original(config, callbacks=lambda *_: "stop").files
            files.write_card(files.card | {"diverged": True})
            raise DivergedError("not finite")
        return original(config)

    monkeypatch.setattr(trials, "train", diverging)
    with pytest.warns(RuntimeWarning, match="KL penalty on .*: seed 101 diverged"):
        run(tmp_path, seeds=(101,))
    row = next(row for row in read_csv(tmp_path / "fig6-small.csv") if row["arm"] == "KL penalty")
    curve = row["curve"].split()
    assert row["env_steps"] == "1024" and row["greedy_mean"] == "nan"
    assert curve[-1] == curve[-10] != "nan"


def test_a_curve_begins_where_all_seeds_have_a_return() -> None:
    blank = {"task": "t", "arm": "a", "budget": "400"}
    points = np.arange(40.0)
    texts = [" ".join(["nan"] * skip + [f"{x:g}" for x in points[skip:]]) for skip in (2, 5)]
    rows = [{**blank, "seed": str(101 + i), "curve": text} for i, text in enumerate(texts)]
    (curve,) = make_curves(rows)
    assert curve.steps[0] == 60.0 and curve.values.shape == (2, 35) and curve.mean[-1] == 39.0


def test_an_arm_without_a_return_of_every_seed_is_left_out_with_a_warning() -> None:
    def row(arm: str, seed: int, point: str) -> dict[str, str]:
        curve = " ".join([point] * 40)
        return {"task": "t", "arm": arm, "budget": "400", "seed": str(seed), "curve": curve}

    learns = [row("learns", 101, "1"), row("learns", 102, "2")]
    half = [row("half", 101, "1"), row("half", 102, "nan")]
    message = "half on t is left out: no episode had ended by 400 steps with seed 102$"
    with pytest.warns(RuntimeWarning, match=message):
        (curve,) = make_curves(learns + half)
    assert curve.label == "learns" and curve.values.shape == (2, 40)
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match="no arm has returns of"):
        make_curves(half)


def test_jobs_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Trial] = []

    def none_left(table: Any, asked: list[Trial], measure: Any, jobs: int) -> Any:
        seen.extend(asked)
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(trials, "run_missing_trials", none_left)
    monkeypatch.setattr(trials, "num_cores", lambda: 8)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, seeds=(101,), jobs=4)
    assert {trial.config.compute.num_threads for trial in seen} == {2}
    with pytest.raises(ValueError, match="jobs is 0"):
        run(tmp_path, jobs=0)
