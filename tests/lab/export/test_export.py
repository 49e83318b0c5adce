"""Exported policies: equal outputs and equal episodes."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from phasicrl.algorithm import train
from phasicrl.config import ActionConfig, Config, EnvConfig, ModelConfig
from phasicrl.lab.export.export import export_policy, open_policy, play_exported
from phasicrl.models.memory import RecurrentMemory
from phasicrl.training.evaluate import evaluate
from tests.envs.counting import Spaces, Structured
from tests.helpers import OBS_NORM, VALUE_NORM, Levers, corridor, tiny, tiny_aux

MLP = ModelConfig(encoder="mlp", hidden_sizes=(16,), activation="tanh", policy_head_scale=1.0)
MakeEnv = Callable[[], gym.Env[Any, Any]]


def masked_with_memory(directory: Path) -> Config:
    return tiny(directory, aux=tiny_aux(), model=replace(MLP, memory="lstm", memory_size=8))


def gaussian(directory: Path) -> Config:
    return tiny(
        directory, env=EnvConfig(id="gymnasium:Pendulum-v1", num_envs=4), obs_norm=OBS_NORM,
        value_norm=VALUE_NORM, action=ActionConfig(squash="clip", max_std=1.0),
        model=replace(MLP, value_path="detached"),
    )  # fmt: skip


def of_all_kinds(directory: Path) -> Config:
    model = replace(
        MLP, encoder="impala", image_layout="channels_last", channels=(4,), memory="gru",
        memory_size=4,
    )  # fmt: skip
    action = ActionConfig(squash="tanh", std="softplus", max_std=1.1)
    return tiny(directory, model=model, obs_norm=OBS_NORM, action=action)


def images(directory: Path) -> Config:
    env = EnvConfig(id="procgen:coinrun", num_envs=4)
    return tiny(directory, env=env, aux=tiny_aux(), model=ModelConfig(policy_head_scale=1.0))


CASES: dict[str, tuple[Callable[[Path], Config], MakeEnv | None]] = {
    "numbers": (lambda directory: tiny(directory, model=MLP), corridor),
    "masked with memory": (masked_with_memory, partial(Levers, masked=True)),
    "gaussian": (gaussian, None),
    "of all kinds": (of_all_kinds, Structured),
    "images": (images, None),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_file_has_the_outputs_and_episodes_of_the_agent(case: str, tmp_path: Path) -> None:
    config, make_env = CASES[case]
    run = train(config(tmp_path), make_env=make_env).directory
    made = export_policy(run, make_env=make_env, observations=1_000)
    assert made.path == run / "policy.onnx" and made.max_relative_difference <= 1e-5
    assert made.num_compared >= 1_000
    if case == "images":
        return  # its episodes take seconds
    program = export_policy(run, format="torch", make_env=make_env, observations=8).path
    (wanted,) = evaluate(run, episodes=6, policies=("greedy",), make_env=make_env)
    for file in (made.path, program):
        played = play_exported(run, file=file, episodes=6, make_env=make_env)
        assert played.lengths == wanted.lengths and played.policy == "greedy"
        assert played.returns == pytest.approx(wanted.returns, rel=1e-5)


@pytest.mark.long
def test_a_program_of_torch_export_takes_any_number_of_environments(tmp_path: Path) -> None:
    make_env = partial(Levers, masked=True)
    run = train(masked_with_memory(tmp_path), make_env=make_env).directory
    made = export_policy(run, format="torch", make_env=make_env, observations=1_000)
    assert made.path == run / "policy.pt2" and made.max_relative_difference <= 1e-5
    export_policy(run, make_env=make_env, observations=80)
    policies = [open_policy(run / name) for name in ("policy.pt2", "policy.onnx")]
    assert policies[0].metadata == policies[1].metadata == made.metadata
    assert list(made.metadata["inputs"].values()) == [
        "observed, [B, 3] float32",
        "where an episode begins, [B] bool",
        "new_state of the step before; any where first is true, [B, 32] float32",  # 2 × (8 + 8)
        "true where an option is allowed, [B, 3] bool",
    ]
    rng = np.random.default_rng(0)
    for num_envs in (1, 5):
        size = (num_envs, made.metadata["state_size"])
        inputs = {
            "obs": rng.random((num_envs, 3), np.float32),
            "first": np.array([True, False, True, False, False])[:num_envs],
            "state": rng.random(size, np.float32),
            "action_mask": np.array([[True, True, False]] * num_envs),
        }
        one, other = policies[0](dict(reversed(inputs.items()))), policies[1](inputs)
        assert list(one) == list(other) == ["action", "log_probs", "value", "new_state"]
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol=0, atol=1e-5)
        assert (one["log_probs"][:, 2] < -1e30).all() and (one["action"] < 2).all()
        begun = inputs | {"state": np.where(inputs["first"][:, None], 7, inputs["state"])}
        np.testing.assert_array_equal(policies[1](begun)["new_state"], other["new_state"])


@pytest.mark.long
def test_rounding_in_the_memory_of_images_is_accepted(tmp_path: Path) -> None:
    """Features of orthogonal convolutions are in the hundreds, which rounds the state to 2e-5."""
    image = gym.spaces.Box(0, 255, (24, 24, 3), np.uint8)
    make_env = partial(Spaces, image, gym.spaces.Discrete(3))
    config = tiny(tmp_path, model=ModelConfig(init="orthogonal", memory="lstm"))
    run = train(config, make_env=make_env).directory
    assert export_policy(run, make_env=make_env, observations=80).max_relative_difference < 1e-4


@pytest.mark.long
def test_outputs_are_in_the_order_of_the_space(tmp_path: Path) -> None:
    """Discrete components are not in the order of their widths, with a number between them."""
    discrete, box = gym.spaces.Discrete, gym.spaces.Box
    actions = gym.spaces.Tuple((discrete(4), box(-3, 3, (1,), np.float32), discrete(2)))
    make_env = partial(Spaces, box(-1, 1, (2,), np.float32), actions)
    agent = (trained := train(tiny(tmp_path, model=MLP), make_env=make_env)).agent
    made = export_policy(trained.directory, format="torch", make_env=make_env, observations=8)
    policy = open_policy(made.path)
    obs = torch.tensor([[0.3, -0.4], [-0.9, 0.1]])
    said = policy({"obs": obs.numpy()})
    with torch.no_grad():
        first, state = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 0)
        distribution, _ = agent.policy(obs.unsqueeze(1), first, state)
        # A component's options one by one: all else of the action stays the same.
        base = torch.tensor([0.0, said["mean"][0, 0], 0.0]).expand(2, 1, 3)
        for component, columns in ((0, range(4)), (2, range(4, 6))):
            options = []
            for option in range(len(columns)):
                action = base.clone()
                action[..., component] = option
                options.append(distribution.log_prob(action)[:, 0])
            wanted = torch.stack(options, -1).log_softmax(-1).numpy()
            got = said["log_probs"][:, list(columns)]
            np.testing.assert_allclose(got, wanted, atol=1e-5)
            np.testing.assert_array_equal(said["action"][:, component], got.argmax(-1))
        np.testing.assert_allclose(said["action"][:, 1], said["mean"][:, 0].clip(-3, 3), atol=1e-6)
    assert distribution.stds is not None
    assert said["std"] == pytest.approx(distribution.stds[:, 0].numpy(), rel=1e-5)


@pytest.mark.long
def test_a_wrong_file_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(masked_with_memory(tmp_path), make_env=partial(Levers, masked=True)).directory
    (run / "policy.pt2").write_bytes(b"a good one of before")
    right = RecurrentMemory._step

    def forgetful(self: Any, features: Any, first: Any, state: Any) -> Any:
        is_exported = torch.compiler.is_exporting()
        return right(self, features, torch.zeros_like(first) if is_exported else first, state)

    monkeypatch.setattr(RecurrentMemory, "_step", forgetful)
    with pytest.raises(ValueError, match=r"the exported policy is .* off .*; expected at most"):
        export_policy(run, format="torch", make_env=partial(Levers, masked=True), observations=80)
    (kept,) = run.glob("*policy*")
    assert kept.read_bytes() == b"a good one of before"


def float64_cartpole() -> gym.Env[Any, Any]:
    return gym.wrappers.DtypeObservation(gym.make("CartPole-v1"), np.float64)


@pytest.mark.long
def test_a_file_that_was_tried_on_one_observation_takes_batches_of_any_size(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor).directory
    made = export_policy(run, format="torch", make_env=corridor, observations=1)
    assert made.num_compared == 2  # one of each of the two environments that torch.export needs
    policy = open_policy(made.path)
    for num_envs in (1, 2, 5):
        obs = np.zeros((num_envs, 2), np.float32)
        assert policy({"obs": obs})["action"].shape == (num_envs,)


@pytest.mark.long
def test_inputs_have_shape_and_dtype_and_the_program_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Observations of float64 are learned from as float32, and so they go in."""
    run = train(tiny(tmp_path), make_env=float64_cartpole).directory
    made = export_policy(run, make_env=float64_cartpole, observations=8)
    assert made.metadata["inputs"] == {"obs": "observed, [B, 4] float32"}
    page = Path(__file__).parents[3] / "docs/export.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    monkeypatch.setattr(gym, "make", {"CartPole-v1": float64_cartpole()}.__getitem__)
    monkeypatch.chdir(run)
    exec(block, {"__name__": "page"})
    assert float(capsys.readouterr().out) >= 8  # a pole falls no faster


@pytest.mark.long
def test_the_newest_file_is_played(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor).directory
    export_policy(run, format="torch", make_env=corridor, observations=8)
    (run / "policy.onnx").write_bytes(b"a damaged one")
    os.utime(run / "policy.onnx", ns=(20, 20))
    os.utime(run / "policy.pt2", ns=(10, 10))
    with pytest.raises(ValueError, match=r"is unreadable .*; expected ONNX"):
        play_exported(run, episodes=2, make_env=corridor)
    os.utime(run / "policy.pt2", ns=(30, 30))
    assert len(play_exported(run, episodes=2, make_env=corridor).returns) == 2


@pytest.mark.long
def test_custom_heads_are_exported(tmp_path: Path) -> None:
    def make_head(name: str, num_features: int, num_outputs: int) -> nn.Module | None:
        hidden, last = nn.Linear(num_features, 4), nn.Linear(4, num_outputs)
        return nn.Sequential(hidden, nn.Tanh(), last) if name == "policy" else None

    make_env = partial(Levers, discrete=False)
    run = train(masked_with_memory(tmp_path), make_env=make_env, make_head=make_head).directory
    # An exported policy is compared with the agent's.
    made = export_policy(run, format="torch", make_env=make_env, make_head=make_head)
    assert made.max_relative_difference < 1e-5
    with pytest.warns(RuntimeWarning, match=r"make_head is .*<lambda>; expected .*\.make_head"):
        export_policy(run, format="torch", make_env=make_env, make_head=lambda *x: make_head(*x))
    with pytest.raises(ValueError, match=r"was trained with make_head=.*same head"):
        export_policy(run, format="torch", make_env=make_env)


class Undecided(torch.nn.Module):
    """Network that depends on the value of a tensor."""

    num_features = 2

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return obs if obs.sum() > 0 else -obs


def test_mistakes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tiny(tmp_path), make_env=corridor).directory
    with pytest.raises(ValueError, match="has no exported policy; expected one"):
        play_exported(run, make_env=corridor)
    (other := tmp_path / "policy.bin").write_bytes(b"1")
    with pytest.raises(ValueError, match="has no exported policy; expected one"):
        play_exported(run, file=other, make_env=corridor)
    with pytest.raises(ValueError, match=r"output is .*; expected the ending \.onnx"):
        export_policy(run, output=cast(Any, str(tmp_path / "policy.bin")), make_env=corridor)
    with pytest.raises(ValueError, match="observations is 0"):
        export_policy(run, observations=0, make_env=corridor)
    output = cast(Any, str(run / "policy.pt2"))
    export_policy(run, format="torch", make_env=corridor, observations=8, output=output)
    with pytest.raises(ValueError, match=r"exported for the observation_space .* Give the run"):
        play_exported(run, make_env=Levers)
    for name, kind in (("policy.onnx", "ONNX"), ("policy.pt2", "a program of torch.export")):
        (tmp_path / name).write_bytes(b"no")
        with pytest.raises(ValueError, match=f"is unreadable .*; expected {kind}"):
            open_policy(tmp_path / name)
    own = train(tiny(tmp_path), make_env=corridor, make_encoder=lambda _: Undecided()).directory
    with pytest.raises(ValueError, match=r"the network is not exportable .*; expected operations"):
        export_policy(own, make_env=corridor, make_encoder=lambda _: Undecided())
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"onnxscript: pip install 'phasicrl\[lab\]'"):
        export_policy(run, make_env=corridor)
