"""Numbers that are not finite end a run before they reach the weights, and it says where."""

import math
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phasicrl import phases, returns
from phasicrl.algorithm import train
from phasicrl.config import CheckpointConfig
from phasicrl.envs.protocol import EnvError
from phasicrl.optimize import DivergedError
from phasicrl.training.run import Run
from tests.faults.conftest import Fault
from tests.faults.harness import only_run
from tests.helpers import OBS_NORM, Corridor, assert_same, corridor, tiny, tiny_aux

EVERY = CheckpointConfig(every_minutes=0.0, keep=10)
BAD_ITERATION = 3


class Bad(Corridor):
    """Environment with a bad number in its 20th step: in the third iteration of `tiny`."""

    def __init__(self, what: str, number: float) -> None:
        super().__init__()
        self.what, self.number, self.count = what, number, 0

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        self.count += 1
        if self.count == 20:
            obs = np.full(obs.shape, self.number) if self.what == "observation" else obs
            reward = self.number if self.what == "reward" else reward
        return obs, reward, *rest  # type: ignore[return-value]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300, -1e300])
@pytest.mark.parametrize("what", ["observation", "reward"])
@pytest.mark.fault(
    "F-10", "NaN, inf or 1e300 from an environment: it is named, nothing learnt", 1, 1
)
def test_bad_numbers_of_environments(
    tmp_path: Path, what: str, number: float, fault: Fault
) -> None:
    before: list[dict[str, Tensor]] = []
    keep = lambda run, _: before.append(deepcopy(run.agent.state_dict()))  # noqa: E731
    for _ in fault:
        message = rf"environment 0, step\(\) at step 20 returned an? (wrong )?{what}"
        with pytest.raises(EnvError, match=message):
            train(tiny(tmp_path, checkpoint=EVERY), make_env=partial(Bad, what, number),
                  callbacks=keep)  # fmt: skip
        assert len(before) == 2
        assert_same(only_run(tmp_path).load_weights(), before[-1])


def _poison_advantages(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    plain = returns.gae

    def poisoned(*args: Any, **options: Any) -> Tensor:
        advantage = plain(*args, **options)
        advantage[0, 0] = math.nan
        return advantage

    monkeypatch.setattr(phases.returns, "gae", poisoned)


def _poison_logits(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    head = run.agent.policy_head
    plain = head.distribution

    def poisoned(params: Tensor, *args: Any) -> Any:
        return plain(params * torch.tensor(math.inf), *args)

    monkeypatch.setattr(head, "distribution", poisoned)


def _poison_gradient(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    next(run.agent.parameters()).register_hook(lambda gradient: gradient * math.nan)


def _poison_weights(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    with torch.no_grad():
        next(run.agent.parameters()).view(-1)[0] = math.inf


PLACES = {
    "advantages": (_poison_advantages, "rollout.value_target"),
    "logits": (_poison_logits, "rollout.log_prob"),
    "a gradient": (_poison_gradient, "a loss or a gradient"),
    "a weight": (_poison_weights, "weights.encoder"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.fault("F-10", "NaN inside a run: no step is made with it, exit 3, a report", 1, 1)
def test_bad_numbers_inside(
    tmp_path: Path, place: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison, first = PLACES[place]
    before: list[dict[str, Tensor]] = []

    def on_iteration(run: Run, _: dict[str, float]) -> None:
        before.append(deepcopy(run.agent.state_dict()))
        if run.iteration == BAD_ITERATION - 1:
            poison(monkeypatch, run)

    for _ in fault:
        with pytest.raises(DivergedError, match="training has diverged") as caught:
            config = tiny(tmp_path, aux=tiny_aux(), checkpoint=EVERY)
            train(config, make_env=corridor, callbacks=on_iteration)
        assert caught.value.exit_code == 3 and len(before) == BAD_ITERATION - 1
        files = only_run(tmp_path)
        if place == "a weight":  # it is bad before the checkpoint of its iteration
            assert all(tensor.isfinite().all() for tensor in files.load_weights().values())
        else:
            assert_same(files.load_weights(), before[-1])
        logged = [row["iteration"] for row in files.metrics()]
        assert logged == [*range(1, BAD_ITERATION)], "nothing is logged of what was not done"
        assert files.card["diverged"]
        (note,) = caught.value.__notes__
        assert note.startswith(f"first non-finite tensor: {first}")


class ReturnsNan(nn.Module):
    num_features = 2

    def forward(self, obs: Tensor) -> Tensor:
        return torch.full((len(obs), 2), math.nan)


def test_bounds_of_observations_before_the_first_rollout_are_no_bad_numbers(tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        config = tiny(tmp_path, obs_norm=OBS_NORM)
        train(config, make_env=corridor, make_encoder=lambda space: ReturnsNan())
    assert caught.value.__notes__ == ["first non-finite tensor: rollout.log_prob"]
