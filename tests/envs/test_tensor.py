"""Simulators of tensors: what the contract's tests do not see."""

import math
import re
import runpy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

import phasicrl
from phasicrl.config import EnvConfig
from phasicrl.envs.make import make_envs
from phasicrl.envs.protocol import EnvError, VectorEnv
from phasicrl.lab.film.video import film
from phasicrl.training.evaluate import evaluate
from tests.envs import counting
from tests.envs.acting import check_known_episodes, check_known_masks, draw_action
from tests.envs.simulators import RestoredEnvs, TensorEnvs
from tests.helpers import assert_same_run, corridor, stop_at, tiny, tiny_aux

EXAMPLES = Path(__file__).parents[2] / "examples"
TensorCartPole = runpy.run_path(str(EXAMPLES / "tensor_cartpole.py"))["TensorCartPole"]


def make(simulator: Any, num_envs: int = 2) -> VectorEnv:
    config = EnvConfig(id="simulated", num_envs=num_envs)
    return make_envs(config, seed=1, make_vector_env=lambda _: simulator)


class Changed(TensorEnvs):
    """Simulator that passes the list of a step's values to a function, which may change it."""

    def __init__(self, kind: Any, change: Callable[[list[Any]], Any], end: str = "raw") -> None:
        super().__init__(kind, 2, end)
        self._change = change

    def step(self, action: Any) -> Any:
        self._change(values := list(super().step(action)))
        return tuple(values)


class FlatMaskInObservation(counting.Masked):
    observation_space = gym.spaces.Dict(
        action_mask=gym.spaces.MultiBinary(7), counts=counting.Counting.observation_space
    )

    def _observe(self) -> Any:
        return {"action_mask": np.concatenate(self._mask()), "counts": super()._observe()}


@pytest.mark.parametrize("end", ["raw", "final_obs", "final_observation"])
def test_every_episode_ends_where_its_own_environment_ends(end: str) -> None:
    check_known_episodes(make(TensorEnvs(counting.PlainCounting, 3, end), 3))
    for kind in (counting.MaskedInFlatInfo, FlatMaskInObservation):
        check_known_masks(make(TensorEnvs(kind, 3, end), 3))


@pytest.mark.parametrize(("which", "value", "message"), [
    (0, torch.tensor([[0.0, 1, 2], [math.nan, 0, 0]]), "a wrong obs: .*not finite"),
    (0, torch.zeros(2, 4), r"obs of shape \(2, 4\); expected .*\(2, 3\)"),
    (0, np.zeros((2, 3)), "obs of type ndarray; expected a tensor"),
    (0, {"pixels": torch.zeros(2, 3)}, "obs of type dict; expected a tensor"),
    (0, torch.full((2, 3), 1e300, dtype=torch.float64), "not finite as float32"),
    (1, torch.tensor([math.inf, 0]), "a wrong reward or flag: .*not finite"),
    (1, torch.zeros(2, 1), r"reward of shape \(2, 1\)"),
    (2, torch.tensor(False), "terminated of shape"),
    (3, None, "truncated of type NoneType"), (3, torch.full((2,), 0.3), "a wrong reward or flag"),
    (2, torch.tensor([math.nan, 0]), "a wrong reward or flag: .*no flag"),
    (1, torch.zeros(2) + 1j, r"reward of shape \(2,\) and complex; expected"),
    (4, [1], r"info \[1\] of type list; expected a dict"),
])  # fmt: skip
def test_a_wrong_value_is_named(which: int, value: Any, message: str) -> None:
    envs = make(Changed(counting.Counting, lambda values: values.__setitem__(which, value)))
    envs.reset()
    with pytest.raises(EnvError, match=f"^simulated: step.*{message}"):
        envs.step(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(("value", "message"), [
    (torch.zeros(2, 4), r"returned info\['final_obs'\] of shape \(2, 4\); expected"),
    (np.zeros((2, 3)), r"returned info\['final_obs'\] of type ndarray; expected a tensor"),
    (None, r"final_obs.*reset_rows.*has_final_obs"),
    (torch.full((2, 3), math.nan), r"a wrong obs at an episode's end: .*not finite"),
    ("obs", r"returned obs as info\['final_obs'\]; expected a copy of the end"),
    ("view", r"returned obs as info\['final_obs'\]; expected a copy of the end"),
])  # fmt: skip
def test_wrong_or_missing_final_observations_are_named(value: Any, message: str) -> None:
    """An `info` of None has no final observations."""

    def change(values: list[Any]) -> None:
        final = values[0][: 9 if value == "view" else None] if isinstance(value, str) else value
        values[4] = {"final_obs": final} if "final_obs" in values[4] else None

    envs = make(Changed(counting.PlainCounting, change, "final_obs"))
    envs.reset()
    with pytest.raises(EnvError, match=message):
        for _ in range(5):
            envs.step(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(("attributes", "message"), [
    ({"action_masks": list}, r"returned no 'action_mask' in info; expected it, from action_masks"),
    ({"get_state": lambda: {"n": 3}, "set_state": id}, "get_state.* other values than tensors"),
    ({"metadata": {"autoreset_mode": AutoresetMode.NEXT_STEP}}, "tensors with .*NEXT_STEP; expect"),
    ({"metadata": {"autoreset_mode": "NextStep"}}, "tensors with NextStep; expect"),
    ({"single_action_space": None}, "action_space"),
])  # fmt: skip
def test_a_simulator_that_would_train_wrongly_is_refused(attributes: Any, message: str) -> None:
    vars(simulator := TensorEnvs(counting.Counting, 2, "final_obs")).update(attributes)
    with pytest.raises((EnvError, ValueError), match=message):
        make(simulator)


@pytest.mark.parametrize(
    ("value", "is_right"), [(0.5, 0), (300, 0), (-1, 0), (math.nan, 0), (7, 1)]
)
@pytest.mark.parametrize("space", [gym.spaces.Box(0, 255, (1,), np.uint8), gym.spaces.Discrete(9)])
def test_numbers_that_an_integer_space_would_change_are_found(
    space: gym.Space[Any], value: float, is_right: int
) -> None:
    def change(values: list[Any]) -> None:
        values[0] = torch.full(values[0].shape, value, dtype=torch.float64)

    class Numbers(counting.PlainCounting):
        observation_space = space

        def _observe(self) -> Any:
            return np.zeros(space.shape or (), space.dtype)

    envs = make(Changed(Numbers, change))
    envs.reset()
    with nullcontext() if is_right else pytest.raises(EnvError, match="outside its space"):
        assert (envs.step(torch.zeros(2, dtype=torch.int64)).obs == 7).all()


def test_an_action_out_of_bounds_names_the_option_that_clips() -> None:
    class Strict(TensorEnvs):
        def step(self, action: Tensor) -> Any:
            assert (action.abs() <= 1).all()

    class Bounded(counting.PlainCounting):
        action_space = gym.spaces.Box(-1, 1, (1,))

    envs = make(Strict(Bounded, 2, "raw"))
    envs.reset()
    with pytest.raises(EnvError, match=r"1\.5 is outside of Box.*action\.squash clip"):
        envs.step(torch.tensor([[0.0], [1.5]]))


def test_a_discrete_observation_outside_of_its_space_is_found() -> None:
    def change(values: list[Any]) -> None:
        values[0]["more"][0][1] = 11  # counted from two, nine of them

    envs = make(Changed(counting.Structured, change))
    envs.reset()
    with pytest.raises(EnvError, match="outside its space"):
        envs.step(torch.zeros(2, 5))


def test_a_mask_that_allows_nothing_is_found() -> None:
    def change(values: list[Any]) -> None:
        values[4]["action_mask"][1, 4:] = False

    envs = make(Changed(counting.MaskedInFlatInfo, change, "final_obs"))
    envs.reset()
    with pytest.raises(EnvError, match=r"a wrong action_mask: .*allows nothing"):
        envs.step(draw_action(envs, np.random.default_rng(1)))


def test_a_mask_to_add_to_logits_is_found_at_the_first_reset() -> None:
    class Additive(TensorEnvs):
        def reset(self, **given: Any) -> Any:
            obs, info = super().reset(**given)
            return obs, {"action_mask": info["action_mask"].float().log()}  # 0 and −∞

    with pytest.raises(EnvError, match=r"reset\(\) returned.*mask that allows nothing"):
        make(Additive(counting.MaskedInFlatInfo, 2, "raw")).reset()


@pytest.mark.parametrize("key", ["action_mask", "action_masks"])
def test_masks_begin_with_the_first_reset_and_have_their_name(key: str) -> None:
    class Late(TensorEnvs):
        def reset(self, **given: Any) -> Any:
            return super().reset(**given)[0], {}

        def step(self, action: Tensor) -> Any:
            return *super().step(action)[:4], {key: torch.ones(2, 7)}

    envs = make(Late(counting.Counting, 2, "raw"))
    envs.reset()
    wrong = "that reset() did not return" if key == "action_mask" else "in info; expected"
    with pytest.raises(EnvError, match=re.escape(f"'{key}' {wrong}")):
        envs.step(torch.zeros(2, dtype=torch.int64))


def test_neither_side_changes_the_other_sides_random_numbers() -> None:
    drawn: list[Tensor] = []
    for others in range(2):
        trainer = torch.manual_seed(5).clone_state()
        envs = make(TensorEnvs(counting.Counting, 2, "raw"))
        envs.reset()
        for _ in range(4):
            torch.rand(others)  # the trainer's own
            torch.rand(others, generator=trainer)
            envs.step(torch.zeros(2, dtype=torch.int64))
        assert torch.equal(torch.get_rng_state(), trainer.get_state())
        drawn.append(envs._rng_state["cpu"])  # type: ignore[attr-defined]
    assert torch.equal(*drawn)


def test_a_simulator_draws_other_numbers_when_it_is_made_than_in_its_first_reset() -> None:
    drawn: list[Tensor] = []

    class Drawing(TensorEnvs):
        def __init__(self) -> None:
            super().__init__(counting.Counting, 2, "raw")
            drawn.append(torch.rand(4))

        def reset(self, **given: Any) -> Any:
            drawn.append(torch.rand(4))
            return super().reset(**given)

    make_envs(EnvConfig(id="a", num_envs=2), seed=1, make_vector_env=lambda _: Drawing())
    assert len(drawn) == 2 and not torch.isclose(drawn[0], drawn[1]).any()


def make_restored(num_envs: int) -> TensorEnvs:
    return RestoredEnvs(counting.PlainCounting, num_envs, "raw")


@pytest.mark.parametrize("iteration", [1, 2])
@pytest.mark.parametrize("make_vector_env", [make_restored, TensorCartPole])
def test_a_run_is_resumed_to_the_same_bits(
    tmp_path: Path, iteration: int, make_vector_env: Any
) -> None:
    config = tiny(tmp_path, aux=tiny_aux(), total_env_steps=256)
    whole = phasicrl.train(config, make_vector_env=make_vector_env)
    part = phasicrl.train(config, make_vector_env=make_vector_env, callbacks=stop_at(iteration))
    assert_same_run(whole, phasicrl.resume(part.directory, make_vector_env=make_vector_env))


def test_simulators_without_a_state_start_new_episodes_and_resume_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny(tmp_path).with_updates({"log.console": "plain"})
    make_vector = partial(TensorEnvs, counting.PlainCounting, end="raw")
    run = phasicrl.train(config, make_vector_env=make_vector, callbacks=stop_at(1))
    phasicrl.resume(run.directory, make_vector_env=make_vector)
    assert "environments start new episodes: they cannot be" in capsys.readouterr().out


@pytest.mark.parametrize("one", [
    TensorEnvs(counting.PlainCounting, 4, "raw"),
    gym.vector.SyncVectorEnv([corridor] * 4, autoreset_mode=AutoresetMode.SAME_STEP),
])  # fmt: skip
def test_an_evaluation_takes_no_environments_of_the_training(tmp_path: Path, one: Any) -> None:
    config = tiny(tmp_path).with_updates({"evaluation.every_iterations": 1})
    with pytest.raises(EnvError, match="the same environments twice"):
        phasicrl.train(config, make_vector_env=lambda _: one)
    phasicrl.train(tiny(tmp_path), make_vector_env=lambda _: one)  # closed by the other run


class VecEnv:
    """rsl_rl's interface over one counter for each environment: episodes of 3 and 5 steps.

    Environment 0 is cut by its time limit, environment 1 terminates.
    """

    num_envs, num_actions, device = 2, 1, "cpu"

    def __init__(self, *, tells: bool, limit: Any) -> None:
        self._time, self._tells = torch.zeros(2), tells
        self.max_episode_length = limit

    def get_observations(self) -> dict[str, Tensor]:
        return {"policy": self._time[:, None], "critic": self._time[:, None].expand(2, 2)}

    def step(self, action: Tensor) -> Any:
        assert action.shape == (2, 1)
        self._time += 1
        reward, dones = self._time.clone(), self._time == torch.tensor([3, 5])
        self._time[dones] = 0
        extras = {"time_outs": dones & torch.tensor([True, False])} if self._tells else {}
        return self.get_observations(), reward, dones.long(), extras


@pytest.mark.parametrize("limit", [None, 3, torch.tensor([3, 9])])
def test_rsl_rl_environments_say_or_show_which_episodes_were_cut(limit: Any) -> None:
    envs = make(VecEnv(tells=limit is None, limit=limit))
    assert envs.observation_space["policy"].shape == (1,)  # type: ignore[index]
    assert not envs.has_final_obs and envs.restore_method == "none"
    envs.reset()
    steps = [envs.step(torch.zeros(2, 1)) for _ in range(15)]
    cut = [t for t, step in enumerate(steps, 1) if step.truncated[0]]
    ended = [t for t, step in enumerate(steps, 1) if step.terminated[1]]
    assert cut == [3, 6, 9, 12, 15]
    # Without time_outs, whatever lasts as long as the limit was cut by it.
    assert ended == ([] if isinstance(limit, int) else [5, 10, 15])
    assert steps[2].reward.tolist() == [3, 3] and steps[3].reward.tolist() == [1, 4]
    assert all(step.final_obs is None for step in steps)


def test_limits_of_rsl_rl_count_from_where_the_first_episodes_begin() -> None:
    vector = VecEnv(tells=False, limit=3)
    vector._time[0] = 1
    vector.episode_length_buf = vector._time  # type: ignore[attr-defined]
    envs = make(vector)
    envs.reset()
    envs.step(torch.zeros(2, 1))
    assert envs.step(torch.zeros(2, 1)).truncated.tolist() == [True, False]


def test_isaac_lab_says_what_its_time_limit_means_and_hands_over_final_observations() -> None:
    finite, whole = VecEnv(tells=False, limit=3), VecEnv(tells=True, limit=None)
    finite.cfg = SimpleNamespace(is_finite_horizon=True)  # type: ignore[attr-defined]
    whole.cfg = SimpleNamespace(compute_final_obs=True)  # type: ignore[attr-defined]
    original = whole.step

    def step(action: Tensor) -> Any:
        *others, extras = original(action)
        final = {"policy": torch.full((2, 1), 9.0), "critic": torch.full((2, 2), 9.0)}
        return *others, extras | {"final_obs": final}

    whole.step = step  # type: ignore[method-assign]
    for envs in map(make, (finite, whole)):
        envs.reset()
        steps = [envs.step(torch.zeros(2, 1)) for _ in range(3)]
        is_finite = not envs.has_final_obs
        assert steps[-1].terminated.tolist() == [is_finite, False]
        assert steps[-1].truncated.tolist() == [not is_finite, False]
        assert (steps[-1].final_obs is None) == is_finite
        assert steps[-2].final_obs is None
    assert steps[-1].final_obs is not None
    assert (steps[-1].final_obs.view(torch.float32)[0] == 9).all()


def test_rsl_rl_environments_that_tell_no_limit_or_have_no_groups_are_refused() -> None:
    vector = VecEnv(tells=False, limit=None)
    envs = make(vector)
    envs.reset()
    with pytest.raises(EnvError, match=r"time_outs.*max_episode_length.*expected one"):
        envs.step(torch.zeros(2, 1))
    envs.close()
    vector.get_observations = lambda: (torch.zeros(2, 1), {})  # type: ignore[method-assign]
    with pytest.raises(EnvError, match="rsl_rl 1 or 2; expected groups"):
        make(vector)


def test_curricula_continue_after_a_resume_and_in_evaluations(tmp_path: Path) -> None:
    made: list[Any] = []

    def make_vector(_: int) -> Any:
        made.append(VecEnv(tells=True, limit=None))
        made[-1].unwrapped = SimpleNamespace(common_step_counter=0)
        return made[-1]

    config = tiny(tmp_path, total_env_steps=64).with_updates({
        "env.num_envs": 2, "evaluation.every_iterations": 3, "evaluation.episodes": 2,
    })  # fmt: skip
    run = phasicrl.train(config, make_vector_env=make_vector, callbacks=stop_at(2))
    phasicrl.resume(run.directory, make_vector_env=make_vector)
    evaluate(run.directory, episodes=2, make_vector_env=make_vector)
    # Rollouts have 8 steps; evaluations follow the third and the fourth, the last of two policies.
    assert [envs.unwrapped.common_step_counter for envs in made] == [0, 16, 24, 32, 32, 32]


def test_groups_of_rsl_rl_may_be_nested_and_images_stay_images() -> None:
    class Seeing(VecEnv):
        def get_observations(self) -> Any:
            return {"eyes": {"left": torch.ones(2, 4, 4, 3).byte()}, **super().get_observations()}

    envs: Any = make(Seeing(tells=True, limit=None))
    assert envs.observation_space["eyes"]["left"] == gym.spaces.Box(0, 255, (4, 4, 3), np.uint8)
    assert (envs._layout.unpack(envs.reset())["eyes"]["left"] == 1).all()


class Diverging(TensorCartPole):
    """Simulator whose state follows a continuous action, so that NaN spreads."""

    single_action_space = gym.spaces.Box(-1, 1, (1,))

    def step(self, action: Tensor) -> Any:
        obs, *others = super().step(action[:, 0] > 0)
        self.obs = obs + 0 * action
        return self.obs, *others


@pytest.mark.parametrize("is_pure", [True, False])
def test_a_diverged_network_is_named_and_not_the_simulator(
    tmp_path: Path, is_pure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(run: Any, record: Any) -> None:
        run.agent.policy_head.linear.weight.data.fill_(math.nan)

    monkeypatch.setattr(Diverging, "is_pure", is_pure)
    with pytest.raises(ValueError, match="policy"):
        phasicrl.train(tiny(tmp_path), make_vector_env=lambda num: Diverging(num), callbacks=spoil)


def test_a_wrong_first_observation_is_found_before_a_network_sees_it() -> None:
    class Wrong(TensorEnvs):
        def reset(self, **given: Any) -> Any:
            obs, info = super().reset(**given)
            obs[1, 0] = math.nan
            return obs, info

    with pytest.raises(EnvError, match=r"simulated: reset\(\) returned in step 0 .*not finite"):
        make(Wrong(counting.Counting, 2, "raw")).reset()


def test_observations_of_any_strides_are_read() -> None:
    class Transposed(TensorEnvs):
        def _tensors(self, which: int) -> Any:
            obs = super()._tensors(which)
            return obs | {"counts": obs["counts"].T.contiguous().T}

    envs, plain = (make(kind(counting.Structured, 2, "raw")) for kind in (Transposed, TensorEnvs))
    assert torch.equal(envs.reset(), plain.reset())


def test_simulators_that_reset_as_they_are_made_begin_by_the_seed() -> None:
    def make_vec_env(_: int) -> VecEnv:
        envs = VecEnv(tells=True, limit=None)
        envs._time = torch.rand(2)
        return envs

    config = EnvConfig(id="simulated", num_envs=4)
    same, again, *others = [
        make_envs(config, seed=x, first_index=y, num_envs=2, make_vector_env=make_vec_env).reset()
        for x, y in ((1, 0), (1, 0), (2, 0), (1, 2))
    ]
    assert torch.equal(same, again) and not any(torch.equal(same, other) for other in others)


def test_a_run_in_a_simulator_is_evaluated_and_has_no_images(tmp_path: Path) -> None:
    run = phasicrl.train(tiny(tmp_path), make_vector_env=TensorCartPole)
    (result,) = evaluate(
        run.directory, episodes=4, policies=("greedy",), make_vector_env=TensorCartPole
    )
    assert result.mean_return >= 8 and len(result.returns) == 4
    with pytest.raises(ValueError, match="has no images to film"):
        film(run.directory, make_vector_env=TensorCartPole)
