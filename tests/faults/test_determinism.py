"""Only the seed changes a run; displays, logs and evaluations do not."""

from pathlib import Path
from typing import Any

import pytest

from phasicrl.algorithm import resume, train
from phasicrl.config import CheckpointConfig, Config
from phasicrl.training.evaluate import evaluate
from phasicrl.training.run import Run
from tests.faults.conftest import Fault
from tests.faults.harness import KINDS, small
from tests.helpers import assert_same, differences, mark_long, rows_of, stop_at

EVERY = CheckpointConfig(every_minutes=None, every_iterations=1)
WATCHED: dict[str, dict[str, Any]] = {
    "a checkpoint each iteration": {"checkpoint": EVERY},
    "a checkpoint every seventh": {"checkpoint": CheckpointConfig(every_iterations=7)},
    "no checkpoints": {"checkpoint": CheckpointConfig(every_minutes=None)},
    "TensorBoard": {"log.tensorboard": True},
    "a display": {"log.console": "plain"},
    "evaluations": {"checkpoint": EVERY},
}


def _trained(config: Config, *, evaluated: bool = False) -> Run:
    def on_iteration(run: Run, _: dict[str, float]) -> None:
        if evaluated:
            evaluate(run.directory, episodes=2)

    return train(config, callbacks=on_iteration)


def _is_same(one: Run, other: Run) -> bool:
    return rows_of(one.files) == rows_of(other.files) and not list(
        differences(one.agent.state_dict(), other.agent.state_dict())
    )


@pytest.mark.long
@pytest.mark.fault("F-12", "evaluations, logs and checkpoints on or off: the same run", 6, 6)
def test_what_watches_a_run_does_not_move_it(tmp_path: Path, fault: Fault) -> None:
    plain = small(tmp_path / "plain", "ppg").with_updates({"total_env_steps": 640})
    expected = _trained(plain)
    for number in fault:
        name, changes = list(WATCHED.items())[number]
        config = plain.with_updates(changes | {"output_dir": str(tmp_path / str(number))})
        assert _is_same(expected, _trained(config, evaluated=name == "evaluations")), name


@pytest.mark.parametrize("kind", mark_long(KINDS, "ppg"))
@pytest.mark.fault("F-13", "one seed twice is one run, two seeds are two", 1, 8)
def test_only_the_seed_makes_another_run(tmp_path: Path, kind: str, fault: Fault) -> None:
    base = small(tmp_path, kind).with_updates({"total_env_steps": 256})
    found = [_trained(base)]
    assert _is_same(found[0], _trained(base))
    for seed in fault:
        found.append(_trained(base.with_updates({"seed": base.seed + 1 + seed})))
        assert not any(_is_same(other, found[-1]) for other in found[:-1])


CHANGED: dict[str, tuple[Any, str]] = {
    "ppo.learning_rate": (1e-5, "ppo.learning_rate was 0.0005 and is 1e-05"),
    "ppo.gamma": (0.5, "ppo.gamma was 0.9 and is 0.5"),
    "ppo.clip": (None, "ppo.clip was 0.2 and is none"),
    "seed": (99, "seed was 3 and is 99"),
    "total_env_steps": (10_000, "total_env_steps was 768 and is 10000"),
    "env.id": ("gymnasium:Acrobot-v1", "env.id was gymnasium:CartPole-v1 and is"),
    "env.num_envs": (8, "env.num_envs was 4 and is 8"),
    "model.hidden_sizes": ((16,), "model.hidden_sizes was 8 and is 16"),
    "reward_norm.per": ("none", "reward_norm.per was rollout and is none"),
    "aux.every": (4, "aux.every was 3 and is 4"),
}
MAY_CHANGE: dict[str, Any] = {
    "name": "another", "log.console": "plain", "checkpoint.keep": 7, "env.vectorization": "async",
    "compute.num_threads": 1,
}  # fmt: skip


@pytest.mark.fault(
    "F-18", "an option changed before a resume: refused with both values, or allowed", 15, 15
)
def test_a_changed_configuration_is_refused_with_a_diff(tmp_path: Path, fault: Fault) -> None:
    folder = train(small(tmp_path, "ppg"), callbacks=stop_at(2)).directory
    file = folder / "config.json"
    text, ways = file.read_text(), [*CHANGED, *MAY_CHANGE]
    fault.wanted = len(ways)
    for number in fault:
        path = ways[number]
        value, said = CHANGED.get(path) or (MAY_CHANGE[path], "")
        file.write_text(Config.from_json(text).with_updates({path: value}).to_json())
        if said:
            with pytest.raises(ValueError, match="has changed since the checkpoint") as error:
                resume(folder)
            assert said in str(error.value) and "accept_config_changes" in str(error.value)
        else:
            resume(folder, callbacks=lambda run, _: "stop")
    file.write_text(Config.from_json(text).with_updates({"ppo.clip": 0.1}).to_json())
    accepted = resume(folder, accept_config_changes=True, callbacks=lambda *_: "stop")
    assert accepted.config.ppo.clip == 0.1


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.fault("F-22", "evaluated from memory and from the files: the same returns", 1, 1)
def test_statistics_and_memory_are_saved_with_the_policy(
    tmp_path: Path, memory: str, fault: Fault
) -> None:
    config = small(tmp_path, "lstm" if memory == "lstm" else "ppo", total_env_steps=256)
    for _ in fault:
        run = train(config)
        before = evaluate(run.directory, episodes=4, seed=5)
        assert_same(run.files.load_weights(), run.agent.state_dict())
        again = evaluate(resume(run.directory).directory, episodes=4, seed=5)
        assert [each.returns for each in before] == [each.returns for each in again]
