"""The contract of `envs/protocol.py`, which every back end must keep."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from torch import Tensor

from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError, TimeStep, VectorEnv
from phasicrl.envs.wrappers import HeuristicMask
from phasicrl.masks import find_first_blocked
from phasicrl.spaces import ActionLayout, ObservationLayout, get_nvec
from tests.envs import counting
from tests.envs.acting import draw_action
from tests.envs.mjlab_tasks import SHORT, register_mjlab_tasks
from tests.envs.simulators import RestoredEnvs, RslRlEnvs, TensorEnvs
from tests.helpers import assert_same, differences, skip_without_envpool

B = 3
CASES: dict[str, tuple[str, type[gym.Env[Any, Any]] | None]] = {
    "procgen": ("procgen:leaper", None),
    "envpool cartpole": ("envpool:CartPole-v1", None),
    "envpool atari": ("envpool:Breakout-v5", None),
    "envpool pendulum": ("envpool:Pendulum-v1", None),
    "envpool mujoco": ("envpool:InvertedPendulum-v4", None),
    "envpool dm_control": ("envpool:CartpoleSwingup-v1", None),
    "envpool minigrid": ("envpool:MiniGrid-Empty-Random-5x5-v0", None),
    "envpool jumanji": ("envpool:Cleaner-v0", None),
    "mjlab": (f"mjlab:{SHORT}", None),
    "gymnasium": ("gymnasium:CartPole-v1", None),
    "gymnasium async": ("gymnasium:CartPole-v1", None),
    "own class": ("counting", counting.Counting),
    "structured": ("structured", counting.Structured),
    "masked in observation": ("masked", counting.MaskedInObservation),
    "masked by method": ("masked", counting.MaskedByMethod),
    "masked in info": ("masked", counting.MaskedInInfo),
    "masked in observation async": ("masked", counting.MaskedInObservation),
    "heuristic mask": ("masked", counting.MaskedInInfo),
    "gymnax": ("gymnax:CartPole-v1", None),
    "pgx masked": ("pgx:2048", None),
}
STEPS = {"envpool dm_control": 1010}
"""Numbers of steps that are long enough for two ends; else 250, and 60 for those of the tests."""

ALIKE_AT_FIRST = ("envpool atari",)
"""Environments whose episodes all begin with the same observation."""

CUSTOM_VECTOR: dict[str, tuple[type[gym.Env[Any, Any]], str, bool]] = {
    "vector, same step": (counting.PlainCounting, "SameStep", False),
    "vector, next step": (counting.CountingInFloat32, "NextStep", False),
    "vector, disabled, structured": (counting.Structured, "Disabled", True),
    "vector, same step, masked": (counting.MaskedInFlatInfo, "SameStep", True),
    "vector, next step, masked": (counting.MaskedInFlatInfo, "NextStep", True),
}
"""Custom vector environments: kind, autoreset mode, and whether they copy observations."""
TENSORS: dict[str, tuple[Any, type[gym.Env[Any, Any]], str]] = {
    "tensors, raw": (RestoredEnvs, counting.Counting, "raw"),
    "tensors, raw, structured": (TensorEnvs, counting.Structured, "raw"),
    "tensors, raw, masked": (TensorEnvs, counting.MaskedInFlatInfo, "raw"),
    "tensors, same step": (TensorEnvs, counting.Counting, "final_obs"),
    "tensors, same step, masked": (TensorEnvs, counting.MaskedInFlatInfo, "final_obs"),
    "tensors, as ManiSkill": (TensorEnvs, counting.Counting, "final_observation"),
    "rsl_rl": (RslRlEnvs, counting.Counting, "final_obs"),
}
"""Simulators: class, kind of the environments, and how the end of an episode is handed over."""


def make(case: str, seed: int = 1) -> VectorEnv:
    if case in TENSORS:
        simulator, kind, end = TENSORS[case]
        config = EnvConfig(id="simulated", num_envs=B)
        return make_envs(config, seed=seed, make_vector_env=lambda n: simulator(kind, n, end))
    if case in CUSTOM_VECTOR:
        kind, mode, copies = CUSTOM_VECTOR[case]

        def make_vector_env(num_envs: int) -> SyncVectorEnv:
            return SyncVectorEnv([kind] * num_envs, autoreset_mode=mode, copy=copies)

        config = EnvConfig(id="mine", num_envs=B)
        return make_envs(config, seed=seed, make_vector_env=make_vector_env)
    env_id, make_env = CASES[case]
    if env_id.startswith(("procgen", "envpool")):
        skip_without_envpool()
    if env_id.startswith("mjlab"):
        register_mjlab_tasks()
    if env_id.startswith(("gymnax", "pgx")):
        pytest.importorskip(env_id.partition(":")[0])
    vectorization = "async" if case.endswith("async") else "sync"
    threads = 2 if case == "procgen" else None
    config = EnvConfig(id=env_id, num_envs=B, vectorization=vectorization, num_threads=threads)
    envs = make_envs(config, seed=seed, make_env=make_env)
    if case != "heuristic mask":
        return envs
    mask = lambda obs, _: np.arange(envs.mask_size) != obs[:, 2:].astype(int) % 4  # noqa: E731
    return HeuristicMask(envs, mask, mask_steps=100)


@dataclass
class Played:
    """A run with random actions.

    `masks[t]` is what was allowed in the observations before step t; None without masks.
    """

    env: VectorEnv
    first_obs: Tensor
    masks: list[Tensor | None]
    steps: list[TimeStep]

    def tensors(self) -> list[Tensor]:
        """Return everything that came out of the environments."""
        tensors = [self.first_obs, *(mask for mask in self.masks if mask is not None)]
        for step in self.steps:
            tensors += [step.obs, step.reward, step.terminated, step.truncated]
            tensors += step.info.values()
            if step.final_obs is not None:
                tensors.append(step.final_obs[step.terminated | step.truncated])
        return tensors


def play(env: VectorEnv, num_steps: int) -> Played:
    rng = np.random.default_rng(7)
    assert env.action_mask is None
    played = Played(env, env.reset(), [env.action_mask], [])
    for _ in range(num_steps):
        played.steps.append(env.step(draw_action(env, rng)))
        played.masks.append(env.action_mask)
    return played


@pytest.fixture(params=[*CASES, *CUSTOM_VECTOR, *TENSORS], scope="module")
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def played(case: str) -> Iterator[Played]:
    """Run once with seed 1, for the tests that only read the result."""
    env, is_of_library = make(case), case in CASES and CASES[case][1] is None
    yield play(env, STEPS.get(case, 250 if is_of_library else 60))
    env.close()


def test_shapes_and_dtypes_are_those_of_the_contract(played: Played) -> None:
    layout = ObservationLayout(played.env.observation_space)
    dtype = torch.from_numpy(np.zeros(1, layout.dtype)).dtype
    assert played.env.num_envs == B
    assert played.first_obs.shape == (B, *layout.shape) and played.first_obs.dtype == dtype
    assert all(tensor.device == played.env.device for tensor in played.tensors())
    for step in played.steps:
        assert step.obs.shape == played.first_obs.shape and step.obs.dtype == dtype
        assert step.reward.shape == (B,) and step.reward.dtype == torch.float32
        for flag in (step.terminated, step.truncated):
            assert flag.shape == (B,) and flag.dtype == torch.bool
        for extra in step.info.values():
            assert extra.shape == (B,)


def test_observations_are_those_of_the_space(played: Played) -> None:
    layout = ObservationLayout(played.env.observation_space)
    for step in played.steps[:100]:
        read = layout.unpack(step.obs)
        for leaf in layout.leaves:
            values = read
            for key in leaf.path:
                values = values[key]
            assert values.shape == (B, *leaf.shape)
            own = values.numpy() + getattr(leaf.space, "start", 0)
            # EnvPool's dm_control has bounds that its numbers do not keep.
            if values.dtype == torch.float32:
                continue
            members = [leaf.space.contains(np.asarray(x, leaf.space.dtype)) for x in own]
            assert all(members), f"{own} is not in {leaf.space}"


def test_final_observations_come_with_ends_and_only_then(played: Played) -> None:
    ends = 0
    for step in played.steps:
        done = step.terminated | step.truncated
        ends += int(done.sum())
        assert not (step.terminated & step.truncated).any()
        if not done.any():
            assert step.final_obs is None
            continue
        assert step.final_obs is not None
        assert step.final_obs.shape == step.obs.shape and step.final_obs.dtype == step.obs.dtype
        assert not torch.equal(step.final_obs[done], step.obs[done]), "it is the next one"
    assert ends >= 2, "no episode ended: the test shows nothing"


def test_masks_allow_something_in_every_component(case: str, played: Played) -> None:
    widths = get_nvec(played.env.action_space)
    assert played.env.mask_size == (sum(widths) if "mask" in case else 0)
    for mask in played.masks:
        if not played.env.mask_size:
            assert mask is None
            continue
        assert mask is not None
        assert mask.shape == (B, played.env.mask_size) and mask.dtype == torch.bool
        assert find_first_blocked(widths, mask.numpy()) is None
    assert "mask" not in case or not all(mask.all() for mask in played.masks if mask is not None)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    case: str, played: Played
) -> None:
    expected = Played(played.env, played.first_obs, played.masks[:61], played.steps[:60]).tensors()
    for seed, same in ((1, True), (2, False)):
        env = make(case, seed)
        again = play(env, 60).tensors()
        env.close()
        assert (not list(differences(expected, again))) is same


def test_environments_of_one_pool_differ(case: str, played: Played) -> None:
    obs = played.steps[40].obs if case in ALIKE_AT_FIRST else played.first_obs
    assert len({obs[index].numpy().tobytes() for index in range(B)}) == B


def test_actions_and_earlier_steps_are_not_changed_by_later_ones(case: str) -> None:
    env, rng = make(case), np.random.default_rng(7)
    kept = [env.reset()]
    copies = [kept[0].clone()]
    for _ in range(80):
        action = draw_action(env, rng)
        step = env.step(action)
        tensors = [action, *Played(env, step.obs, [env.action_mask], [step]).tensors()]
        kept += tensors
        copies += [tensor.clone() for tensor in tensors]
    env.close()
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(kept, copies, strict=True))


def test_a_second_reset_starts_other_episodes(case: str) -> None:
    env = make(case)
    first = play(env, 5).first_obs
    second, mask = env.reset(), env.action_mask
    third = env.step(draw_action(env, np.random.default_rng(7))).obs
    env.close()
    assert first.shape == second.shape == third.shape
    assert (mask is None) == (env.mask_size == 0)
    if case not in ALIKE_AT_FIRST:
        assert not torch.equal(first, second)


def test_calls_at_the_wrong_time_are_refused(case: str) -> None:
    env = make(case)
    action = torch.zeros((B, *ActionLayout(env.action_space).shape), dtype=torch.int64)
    with pytest.raises(EnvError, match=r"step\(\) before reset"):
        env.step(action)
    env.reset()
    env.close()
    env.close()
    with pytest.raises(EnvError, match=r"after close"):
        env.step(action)


def test_bad_actions_are_refused_before_the_environments_see_them(played: Played) -> None:
    env, rng = played.env, np.random.default_rng(7)
    good = draw_action(env, rng)
    bad: dict[str, Any] = {
        r"shape \(2,": good[:-1],
        r"shape \(4,": torch.cat([good, good[:1]]),
        r"shape \(3,.* 1\)": good[..., None],
        "complex": good.to(torch.complex64),
    }
    if good.dtype == torch.int64:
        bad["float64"] = good.double()
    else:
        second = torch.arange(good.numel()).reshape(good.shape) == 1
        bad["expected a finite number"] = torch.where(second, math.nan, good)
    if get_nvec(env.action_space):
        for outside in (99, -1):
            message = f"action {outside}.* for environment 1.*; expected an integer from 0 to"
            bad[message] = good.clone()
            bad[message].reshape(B, -1)[1, 0] = outside
    for message, action in bad.items():
        with pytest.raises(ValueError, match=message) as caught:
            env.step(action)
        assert str(caught.value).startswith(f"{env.name}: ")
    # Still usable, and any dtype of the kind will do.
    env.step(good.to(torch.int32 if good.dtype == torch.int64 else torch.float64))


REPLAYED = (
    "procgen", "envpool cartpole", "envpool atari", "envpool pendulum", "envpool mujoco",
    "gymnasium", "gymnasium async", "tensors, raw", "gymnax", "pgx masked",
)  # fmt: skip
NOT_REPLAYED = (
    "envpool dm_control", "envpool minigrid", "envpool jumanji", "mjlab", *CUSTOM_VECTOR,
    *list(TENSORS)[1:],
)  # fmt: skip
"""Cases whose episodes cannot be restored."""


def test_others_are_brought_to_the_same_place_and_go_on_alike_or_that_is_refused(case: str) -> None:
    envs, rng = make(case), np.random.default_rng(7)
    assert envs.state_dict() is None
    envs.reset()
    for _ in range(120):
        obs = envs.step(draw_action(envs, rng)).obs
    state = copy.deepcopy(envs.state_dict())
    method = "snapshot" if case in (*TENSORS, "gymnax", "pgx masked") else "replay"
    assert envs.restore_method == ("none" if case in NOT_REPLAYED else method)
    assert (state is None) == (case in NOT_REPLAYED)
    if state is not None:
        twin = make(case)
        if case in REPLAYED:
            assert torch.equal(twin.load_state_dict(state), obs)
            assert_same((twin.state_dict() or {})["obs"], obs)
            for _ in range(120):
                action = draw_action(envs, rng)
                played = (Played(x, obs, [x.action_mask], [x.step(action)]) for x in (envs, twin))
                assert_same(*(each.tensors() for each in played))
        else:
            with pytest.raises(EnvError, match="do not lead to the saved"):
                twin.load_state_dict(state)
        twin.close()
    envs.close()
