"""Evaluation: which episodes count, what is reported, on which levels."""

import csv
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import gymnasium as gym
import numpy as np
import pytest
import torch

from phasicrl.algorithm import resume, train
from phasicrl.config import ActionConfig, EnvConfig
from phasicrl.config_io import read_json
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import TimeStep
from phasicrl.execution.device import use_threads
from phasicrl.models.agent import Agent
from phasicrl.models.distributions import Policy
from phasicrl.presets import get_preset
from phasicrl.seeding import derive_seed, env_seeds
from phasicrl.training import evaluation as of_runs
from phasicrl.training.acting import load
from phasicrl.training.build import start_run
from phasicrl.training.evaluate import Evaluation, evaluate, generalization_gaps
from phasicrl.training.evaluation import make_evaluation_envs, run_agent_episodes
from tests.envs.counting import Spaces
from tests.helpers import Corridor, Levers, corridor, tiny


class Countdown(Corridor):
    """Episodes that are longer in every second environment; each step is 1.

    The environment made for the spaces is the first.
    """

    def __init__(self, number: int, short: int, long: int) -> None:
        super().__init__(limit=long if number % 2 else short, length=10**9)

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 1.0, terminated, truncated, info


def countdowns(short: int, long: int) -> Callable[[], Countdown]:
    numbers = itertools.count()
    return lambda: Countdown(next(numbers), short, long)


def test_every_environment_plays_its_share_so_that_short_episodes_are_not_favored(
    tmp_path: Path,
) -> None:
    """Whoever takes the first that finish favors the short ones."""
    make_env = countdowns(2, 9)
    with start_run(tiny(tmp_path), make_env=make_env) as run:
        how: dict[str, Any] = {"levels": "unseen", "seed": 0, "make_env": make_env}
        envs = make_evaluation_envs(run.config, num_envs=2, **how)
        result = run_agent_episodes(run.agent, envs, episodes=7, policy="greedy", seed=0)
        envs.close()
    lengths = sorted(result.lengths)
    assert len(lengths) == 7 and lengths.count(2) in (3, 4) and lengths.count(9) in (3, 4)
    assert sorted(result.returns) == [float(length) for length in lengths]


def test_an_evaluation_ends_where_episodes_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_runs, "LONG_EPISODE_STEPS", 10)
    monkeypatch.setattr(of_runs, "MAX_EPISODE_STEPS", 40)
    config = tiny(tmp_path).with_updates({"evaluation.every_iterations": 2})
    with pytest.warns(RuntimeWarning, match="10 steps.*max_episode_steps"):
        run = train(config, make_env=countdowns(3, 10**9))
    # 20 episodes in 16 environments: of 3 steps in half of them, of 40 in the others.
    assert run.files.metrics()[-1]["evaluation/length"] == pytest.approx((10 * 3 + 8 * 40) / 18)
    path, how = tmp_path / "steps.csv", dict[str, Any]()
    how |= {"policies": ("sampled",), "steps_file": path, "make_env": countdowns(40, 10**9)}
    with pytest.warns(RuntimeWarning, match="10 steps"):
        (result,) = evaluate(run.directory, episodes=20, **how)
    # One that ends by itself in step 40 is not cut, and another follows it.
    assert list(result.lengths) == list(result.returns) == [40] * 18
    assert len(path.read_text().splitlines()) == 1 + 18 * 40


def test_the_report_by_hand() -> None:
    evaluation = Evaluation("greedy", (1.0, 2.0, 6.0), (3, 5, 7))
    assert str([evaluation]) == "[Evaluation(greedy, unseen, mean return 3.00, 3 episodes)]"
    report = evaluation.to_dict()
    means = [report[name] for name in ("mean_return", "median_return", "mean_length", "episodes")]
    assert means == [3, 2, 5, 3] and report["std_return"] == pytest.approx((14 / 3) ** 0.5)
    interval: Any = report["interval_95"]
    low, high = interval
    assert 1 <= low < 3 < high <= 6


def test_greedy_takes_the_most_likely_action_and_sampled_draws(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    torch.nn.init.zeros_(run.agent.policy_head.linear.weight)
    # Right is a little likelier everywhere.
    run.agent.policy_head.linear.bias.data = torch.tensor([0.0, 0.3])
    run.save()
    greedy, sampled = evaluate(run.directory, episodes=20, make_env=lambda: Corridor(limit=30))
    assert set(greedy.lengths) <= {3, 4} and set(greedy.returns) == {1.0}  # straight to the end
    assert max(sampled.lengths) > 4


def test_every_step_of_an_evaluation_in_a_file(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    path, make_env = tmp_path / "steps.csv", partial(Corridor, limit=30)
    results = evaluate(
        str(run.directory), episodes=20, make_env=make_env, steps_file=str(path),
        json=str(tmp_path / "results.json"),
    )  # fmt: skip
    assert len(read_json(tmp_path / "results.json")["results"]) == len(results)
    with pytest.raises(IsADirectoryError, match=f"{tmp_path} is a folder; expected a file"):
        evaluate(run.directory, episodes=10**9, make_env=make_env, json=tmp_path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    for result in results:
        ends = {}
        for row in (row for row in rows if row["policy"] == result.policy):
            key = row["env"], int(row["episode"])
            step, so_far = ends.get(key, (0, 0.0))
            ends[key] = int(row["step"]), float(row["return"])
            # None is missing, none is there twice.
            assert ends[key] == (step + 1, so_far + float(row["reward"]))
            assert result.policy == "sampled" or row["action_0"] == row["mean_0"]
            assert 0 <= float(row["entropy"]) <= np.log(2) + 1e-6 and "std_0" not in row
        # No step of an episode beyond an environment's share.
        assert ends.keys() == {*((str(n), 0) for n in range(16)), *((str(n), 1) for n in range(4))}
        assert sorted(ends.values()) == sorted(zip(result.lengths, result.returns, strict=True))
    assert {row["policy"] for row in rows} == {"greedy", "sampled"}


def test_the_file_of_steps_has_mean_and_deviation_of_continuous_actions(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"action.std": "fixed", "action.std_value": 0.25})
    make_env, path = partial(Levers, discrete=False), tmp_path / "steps.csv"
    run = train(config, make_env=make_env)
    how: dict[str, Any] = {"policies": ("sampled",), "make_env": make_env, "steps_file": path}
    evaluate(run.directory, episodes=16, **how)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert {float(row["std_0"]) for row in rows} == {0.25}
    # Component 0 is the lever to pull.
    noise = np.array([float(row["action_1"]) - float(row["mean_1"]) for row in rows])
    assert {row["mean_0"] for row in rows} <= {"0.0", "1.0", "2.0"}
    assert 0.15 < noise.std() < 0.35 and abs(noise.mean()) < 0.2


def test_the_same_seed_gives_the_same_episodes_and_another_one_others(tmp_path: Path) -> None:
    directory = train(tiny(tmp_path), make_env=corridor).directory
    first, second, other = (
        evaluate(directory, episodes=20, policies=("sampled",), seed=seed, make_env=corridor)
        for seed in (0, 0, 1)
    )
    assert first == second != other
    (path := tmp_path / "steps.csv").write_text("kept")
    with pytest.raises(ValueError, match="best"):
        evaluate(directory, weights="best", make_env=corridor, steps_file=path)
    assert path.read_text() == "kept"
    (link := tmp_path / "link.csv").symlink_to("/dev/null")  # is written, not replaced
    evaluate(directory, episodes=2, make_env=corridor, steps_file=link)
    assert link.is_symlink()


def test_a_small_network_is_evaluated_by_one_thread(tmp_path: Path) -> None:
    threads = set[int]()

    class Watched(Corridor):
        def step(self, action: Any) -> Any:
            threads.add(torch.get_num_threads())
            return super().step(action)

    run = train(tiny(tmp_path), make_env=corridor)
    with use_threads(3):
        evaluate(run.directory, episodes=1, make_env=Watched)
        assert threads == {1} and torch.get_num_threads() == 3


def test_evaluation_leaves_the_run_alone(tmp_path: Path) -> None:
    directory = train(tiny(tmp_path), make_env=corridor).directory
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    evaluate(directory, episodes=3, make_env=corridor)
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


def test_agents_trained_on_some_levels_are_evaluated_on_all_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[EnvConfig] = []
    monkeypatch.setattr(of_runs, "make_envs", lambda config, seed, **_: seen.append(config))
    preset = get_preset("procgen-ppg")
    config = replace(preset, env=replace(preset.env, num_levels=200))
    make_evaluation_envs(config, num_envs=4, levels="unseen", seed=0)
    make_evaluation_envs(config, num_envs=4, levels="train", seed=0)
    assert [(env.num_levels, env.num_envs) for env in seen] == [(0, 4), (200, 4)]


def test_both_kinds_of_levels_one_after_the_other_and_their_gap(tmp_path: Path) -> None:
    directory, path = train(tiny(tmp_path), make_env=corridor).directory, tmp_path / "steps.csv"
    both = evaluate(directory, episodes=4, levels="both", make_env=corridor, steps_file=path)
    assert [(each.levels, each.policy) for each in both] == [
        ("unseen", "greedy"), ("unseen", "sampled"), ("train", "greedy"), ("train", "sampled"),
    ]  # fmt: skip
    # In an environment without levels they are the same episodes.
    assert [each.returns for each in both[:2]] == [each.returns for each in both[2:]]
    rows = list(csv.DictReader(path.read_text().splitlines()))
    steps = Counter((row["levels"], row["policy"]) for row in rows)
    assert [steps[each.levels, each.policy] for each in both] == [sum(x.lengths) for x in both]
    by_hand = [
        Evaluation("greedy", (1.0, 2.0), (1, 1), "unseen"),
        Evaluation("sampled", (0.0,), (1,), "unseen"),
        Evaluation("greedy", (4.0, 5.0), (1, 1), "train"),
        Evaluation("sampled", (-1.0,), (1,), "train"),
    ]
    assert generalization_gaps(by_hand) == {"greedy": 3.0, "sampled": -1.0}
    assert generalization_gaps(by_hand[:2]) == generalization_gaps(by_hand[2:]) == {}


def test_seeds_of_evaluation_are_not_those_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(of_runs, "make_envs", lambda config, seed, **_: seen.append(seed))
    for seed in range(20):
        make_evaluation_envs(get_preset("procgen-ppg"), num_envs=4, levels="unseen", seed=seed)
    evaluation = {env for seed in seen for env in env_seeds(seed, 16)}
    training = {env for seed in range(20) for env in env_seeds(derive_seed(seed, "env", 0), 64)}
    assert not evaluation & training and len(set(seen)) == 20


def test_a_run_without_weights_or_with_other_ones_is_refused(tmp_path: Path) -> None:
    with start_run(tiny(tmp_path), make_env=corridor) as run:
        with pytest.raises(ValueError, match=r"no agent.safetensors; expected after the first"):
            evaluate(run.directory, make_env=corridor)
        run.save()
        config = replace(run.config, model=replace(run.config.model, hidden_sizes=(9,)))
        (run.directory / "config.json").write_text(config.to_json())
        with pytest.raises(ValueError, match="has weights of another network; expected"):
            evaluate(run.directory, make_env=corridor)
        for episodes in (0, 2.5, "2", None):
            with pytest.raises(ValueError, match=f"episodes is {episodes!r}; expected an integer"):
                evaluate(run.directory, episodes=episodes, make_env=corridor)  # type: ignore[arg-type]
        for policies in ("greedy", [], ["best"]):  # a text is a list of letters
            with pytest.raises(ValueError, match="expected a list of greedy, sampled or both"):
                evaluate(run.directory, policies=policies, make_env=corridor)  # type: ignore[arg-type]


def lamp(size: int, actions: gym.Space[Any]) -> Callable[[], Spaces]:
    return partial(Spaces, gym.spaces.Dict(eye=gym.spaces.Box(0, 1, (size,), np.float32)), actions)


@pytest.mark.parametrize(("size", "actions", "named"), [
    (5, gym.spaces.Box(-1, 1, (1,)), r"observation_space/eye Box\(2,\).* Box\(5,\)"),
    (2, gym.spaces.Box(-1, 1, (3,)), r"action_space Box\(1,\).* Box\(3,\)"),
    (2, gym.spaces.Discrete(4), r"action_space Box\(1,\).* Discrete\(4\)"),
    (2, gym.spaces.Box(-10, 1, (1,)), "action_space .* from -1.0 to 1.0.* from -10.0 to 1.0"),
])  # fmt: skip
def test_spaces_other_than_those_of_the_training_are_named(
    size: int, actions: gym.Space[Any], named: str, tmp_path: Path
) -> None:
    config = replace(tiny(tmp_path), action=ActionConfig(squash="tanh"))
    run = train(config, make_env=lamp(2, gym.spaces.Box(-1, 1, (1,))))
    run.files.write_config(replace(config, total_env_steps=2 * run.env_steps))
    other = lamp(size, actions)
    only_bounds = " from " in named
    for use in (partial(evaluate, episodes=1), load, partial(resume, accept_config_changes=True)):
        with pytest.warns(match=named) if only_bounds else pytest.raises(ValueError, match=named):
            use(run.directory, make_env=other)


def test_an_agent_is_evaluated_in_the_precision_in_which_it_acted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path).with_updates({"compute.policy_precision": "bf16"})
    run = train(config, make_env=corridor)
    seen: set[object] = set()
    policy = Agent.policy

    def spy(self: Agent, *args: Any, **options: Any) -> Any:
        seen.add(options["precision"])
        return policy(self, *args, **options)

    monkeypatch.setattr(Agent, "policy", spy)
    evaluate(run.directory, episodes=2, make_env=corridor)
    assert seen == {"bf16"}


def test_levels_of_what_has_none_or_was_trained_on_all_of_them_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tiny(tmp_path, env=EnvConfig(id="gymnasium:CartPole-v1", num_envs=4)))
    for refused in ("not a game of Procgen", r"env\.num_levels 0"):
        for levels in ("train", "both"):
            with pytest.raises(ValueError, match=f"levels is {levels}; .*{refused}"):
                evaluate(run.directory, episodes=2, levels=levels)
        monkeypatch.setattr(of_runs, "resolve_env_id", lambda _: ("procgen", "cartpole"))
    word: Any = "Unseen"
    with pytest.raises(ValueError, match="levels is 'Unseen'; expected unseen, train or both"):
        evaluate(run.directory, episodes=2, levels=word)


def test_memory_is_reset_between_episodes(tmp_path: Path) -> None:
    """Every episode begins with the same observation, and so with the same policy."""
    memory = {"model.memory": "lstm", "model.memory_size": 8, "ppo.minibatch_by": "segments"}

    class FromTheLeft(Corridor):
        def reset(self, **how: Any) -> Any:
            super().reset(**how)
            self._at = 0
            return self._obs(), {}

    begins, seen = [True], []

    def on_step(_: Any, policy: Policy, action: Any, step: TimeStep, tracker: Any) -> None:
        seen.append(policy.dist_params.flatten().tolist())
        begins.append(bool(step.terminated | step.truncated))

    config = tiny(tmp_path).with_updates(memory)
    with start_run(config, make_env=FromTheLeft) as run:
        envs = make_envs(config.env, num_envs=1, seed=0, make_env=FromTheLeft)
        run_agent_episodes(run.agent, envs, episodes=3, policy="sampled", seed=0, on_step=on_step)
    first, *others = [params for begin, params in zip(begins, seen, strict=False) if begin]
    assert len(others) == 2 and others == [first, first]
    assert any(params != first for params in seen)


def test_options_are_added_to_those_of_the_training(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"env.id": "gymnasium:Pendulum-v1",
                                          "env.options": {"g": 5.0}})  # fmt: skip
    run, made = train(config), Mock(side_effect=make_evaluation_envs)
    with patch.object(of_runs, "make_evaluation_envs", made):
        evaluate(run.directory, episodes=1, env_options={"max_episode_steps": 9})
    assert made.call_args.args[0].env.options == {"g": 5.0, "max_episode_steps": 9}
