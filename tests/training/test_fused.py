"""Several steps of agent and simulator in one call."""

import math
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves

from phasicrl.collect import Collector
from phasicrl.config import EnvConfig, ModelConfig, ValuePath
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError
from phasicrl.envs.tensor import CHECK_EVERY
from phasicrl.execution.compiled import has_compiler
from phasicrl.execution.executor import Executor
from phasicrl.execution.plan import Plan
from phasicrl.models.agent import Agent
from phasicrl.rollout import PhaseBuffer
from phasicrl.training.fused import FusedCollector
from tests.helpers import assert_same, mark_long

EXAMPLES = Path(__file__).parents[2] / "examples"
TensorCartPole, TensorPendulum, TensorRecall = (
    runpy.run_path(str(EXAMPLES / f"tensor_{name.lower()}.py"))[f"Tensor{name}"]
    for name in ("CartPole", "Pendulum", "Recall")
)
B, T = 5, 9  # three calls of three steps


class ShortCartPole(TensorCartPole):
    """CartPole with episodes of 3, 4, … steps."""

    def step(self, action: Tensor) -> Any:
        obs, reward, terminated, _, info = super().step(action)
        return obs, reward, terminated, self.length >= torch.arange(3, 3 + B), info


class ResettingCartPole:
    """CartPole that resets in its steps, and returns final observations."""

    def __init__(self, num_envs: int) -> None:
        self._inner = ShortCartPole(num_envs)

    def __getattr__(self, name: str) -> Any:
        if name == "reset_rows":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def step(self, action: Tensor) -> Any:
        final_obs, *outcome, _ = self._inner.step(action)
        obs, _ = self._inner.reset_rows(outcome[1] | outcome[2])
        return obs, *outcome, {"final_obs": final_obs}


class Infinite(TensorCartPole):
    """CartPole with an infinite reward in its seventh step."""

    def step(self, action: Tensor) -> Any:
        obs, reward, *others = super().step(action)
        return obs, torch.where(self.length == 7, math.inf, reward), *others


class Unseen(Infinite):
    """CartPole whose observation is not a number in its seventh step."""

    is_pure = False

    def step(self, action: Tensor) -> Any:
        obs, *others = super().step(action)
        return torch.where(self.length[:, None] == 7, math.nan, obs), *others


class Backwards(FusedCollector):
    """Collector whose call returns its columns in the opposite order."""

    @property
    def _names(self) -> list[str]:
        return self._reversed

    @_names.setter
    def _names(self, names: list[str]) -> None:
        self._reversed = names[::-1]


def collect(
    kind: type[Collector], simulator: Any, memory: Any, value_path: ValuePath, compiled: bool,
) -> tuple[dict[str, Tensor], Collector, list[str]]:  # fmt: skip
    """Collect three rollouts with equal weights and seeds."""
    env = EnvConfig(id="simulated", num_envs=B)
    envs = make_envs(env, seed=1, make_vector_env=lambda _: simulator(B))
    config = ModelConfig(
        encoder="mlp", hidden_sizes=(16,), memory=memory, memory_size=8, value_path=value_path,
        policy_head_scale=1.0, value_head_scale=1.0,
    )  # fmt: skip
    agent = Agent(
        envs.observation_space, envs.action_space, config, auxiliary=False,
        generator=Generator().manual_seed(0),
    )  # fmt: skip
    log: list[str] = []
    collector = kind(
        envs, agent, generator=Generator().manual_seed(3), bootstrap_truncation=True,
        executor=Executor(Plan(compiled=compiled), log=log.append),
    )  # fmt: skip
    action = agent.policy_head.distribution(torch.zeros(1, 1, agent.policy_head.num_dist_params))
    drawn = action.draw(action.sample_noise(Generator()))
    buffer = PhaseBuffer(
        3, B, T, obs_shape=envs.observation_space.shape or (), obs_dtype=torch.float32,
        action_shape=drawn.shape[2:], action_dtype=drawn.dtype, state_size=agent.state_size,
        mask_size=envs.mask_size or None, device=torch.device("cpu"),
    )  # fmt: skip
    collector.reset()
    for _ in range(3):
        rollout = buffer.next_rollout()
        for tensor in rollout.tensors().values():  # so that a cell that is not written shows
            tensor.fill_(True if tensor.dtype == torch.bool else 99)
        collector.collect(rollout)
    return buffer.rollouts.tensors(), collector, log


@pytest.mark.parametrize(("simulator", "memory", "value_path", "compiled"), [
    *mark_long([(ShortCartPole, "lstm", "detached", True)]),
    (ResettingCartPole, "none", "separate", False),
    (TensorPendulum, "none", "shared", True),
    (TensorRecall, "gru", "separate", True),
])  # fmt: skip
def test_rollouts_equal_those_of_single_steps(
    simulator: Any, memory: Any, value_path: ValuePath, compiled: bool
) -> None:
    """Ends, values of final observations, masks, memory and saved state are equal, too."""
    expected, single, _ = collect(Collector, simulator, memory, value_path, False)
    actual, fused, log = collect(FusedCollector, simulator, memory, value_path, compiled)
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.allclose(actual[name].float(), values.float(), atol=1e-4), name
    if simulator in (ShortCartPole, ResettingCartPole):
        assert expected["truncated"].sum() > 15 and not expected["truncated"].all()
    finished = [
        [(each.length, each.env_index, each.terminated) for each in collector.episodes.finished]
        for collector in (single, fused)
    ]
    assert finished[0] == finished[1]
    assert fused.episodes._current == pytest.approx(single.episodes._current, abs=1e-3)
    states = [tree_leaves(collector.state_dict()) for collector in (single, fused)]
    assert len(states[0]) == len(states[1]) > 6
    for one, other in zip(*states, strict=True):
        assert one is other is None or torch.allclose(one.float(), other.float(), atol=1e-4)
    assert ["is compiled" in message for message in log] == [has_compiler()] * compiled


def test_columns_are_known_by_their_names() -> None:
    one, other = (
        collect(kind, TensorRecall, "gru", "detached", False)[0]
        for kind in (FusedCollector, Backwards)
    )
    assert_same(one, other)


@pytest.mark.parametrize("every", [1, 16])  # as on a GPU, which checks several steps at once
def test_a_wrong_number_is_named_as_the_simulators(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CHECK_EVERY, "cpu", every)
    with pytest.raises(EnvError, match=r"simulated: step.* step 7 a wrong reward or flag:"):
        collect(FusedCollector, Infinite, "none", "separate", False)
    with pytest.raises(EnvError, match=r"simulated: step.* step 7 a wrong reward or flag or obs:"):
        collect(Collector, Unseen, "none", "separate", False)


def test_an_error_of_networks_is_not_called_the_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agent, "policy", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        collect(FusedCollector, TensorCartPole, "none", "separate", False)
