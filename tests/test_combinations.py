"""Memory, masks, PPG, discrete and mixed actions in every combination."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.phases import auxiliary_phase, compute_dist_params
from phasicrl.presets import get_preset
from phasicrl.training.evaluate import evaluate
from phasicrl.training.run import Run
from tests.corridor import corridor
from tests.helpers import Levers, mark_long, tiny, tiny_aux
from tests.test_phases import filled

FLAGS = ("memory", "mask", "ppg", "discrete")
COMBINATIONS = [
    pytest.param(*flags, id="-".join(itertools.compress(FLAGS, flags)) or "plain")
    for flags in itertools.product((False, True), repeat=4)
]


def config_of(tmp_path: Path, memory: bool, ppg: bool) -> Config:
    config = tiny(tmp_path, aux=tiny_aux() if ppg else None)
    lstm = {"model.memory": "lstm", "model.memory_size": 8}
    return config.with_updates(lstm if memory else {})


@pytest.mark.parametrize(FLAGS, COMBINATIONS)
def test_every_combination_trains_and_evaluates(
    tmp_path: Path, memory: bool, mask: bool, ppg: bool, discrete: bool
) -> None:
    # Asserts that no masked lever is pulled.
    make_env = partial(Levers, discrete=discrete, masked=mask)
    run = train(config_of(tmp_path, memory, ppg), make_env=make_env)
    assert run.iteration == 4
    assert all(parameter.isfinite().all() for parameter in run.agent.parameters())
    first, again = (evaluate(run.directory, episodes=6, make_env=make_env) for _ in range(2))
    assert [result.returns for result in first] == [result.returns for result in again]
    played = run.buffer.rollouts
    assert played.state.shape[-1] == (4 * 8 if memory else 0)
    assert (played.action_mask is not None) == mask
    if played.action_mask is not None:
        assert not played.action_mask[..., 2].any() and played.action_mask[..., :2].all()


@pytest.mark.parametrize("name", mark_long(
    ["procgen-ppg", "cartpole-ppg", "hopper-ppg", "atari-ppg", "compat-cleanrl-ppo"],
    "procgen-ppg", "cartpole-ppg",
))  # fmt: skip
def test_presets_take_a_memory_without_another_option(tmp_path: Path, name: str) -> None:
    sizes = {"env.num_envs": 32, "ppo.num_steps": 4, "aux.every": 2, "ppo.policy_epochs": 1,
             "ppo.value_epochs": 1, "total_env_steps": 256}  # fmt: skip
    network = {"model.encoder": "mlp", "model.hidden_sizes": (8,), "model.memory_size": 8}
    quiet = {"compute.device": "cpu", "log.console": "off", "log.tensorboard": False,
             "output_dir": str(tmp_path)}  # fmt: skip
    config = get_preset(name).with_updates(sizes | network | quiet | {"model.memory": "lstm"})
    run = train(config, make_env=corridor)
    assert run.iteration == 2 and run.buffer.rollouts.state.any()


def slow_losses(run: Run, old_dist_params: torch.Tensor) -> list[float]:
    """Compute KL, auxiliary and real value loss of the whole phase, step by step.

    State is carried and reset by hand, and masks are applied by hand.
    """
    agent, rollouts, totals = run.agent, run.buffer.rollouts, torch.zeros(3)
    assert rollouts.action_mask is not None
    never, num_envs = torch.zeros(1, 1, dtype=torch.bool), run.config.env.num_envs
    for k, b in itertools.product(range(run.buffer.num_rollouts), range(num_envs)):
        state = rollouts.state[k, b][None]
        for t in range(run.config.ppo.num_steps):
            if rollouts.first[k, b, t]:
                state = torch.zeros_like(state)
            obs, mask = (x[k, b, t][None, None] for x in (rollouts.obs, rollouts.action_mask))
            output = agent(obs, never, state, mask)
            state, target = output.state, rollouts.value_target[k, b, t]
            old = agent.policy_head.distribution(old_dist_params[k * num_envs + b, t][None, None])
            assert output.aux_value is not None
            errors = [0.5 * (v - target).square() for v in (output.aux_value, output.value)]
            totals += torch.stack([output.policy.kl_from(old), *errors]).flatten()
    return (totals / rollouts.value_target.numel()).tolist()


@torch.no_grad()
def test_the_auxiliary_phase_with_memory_and_masks_is_that_of_single_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, True, True)
    run = filled(config, partial(Levers, discrete=False, masked=True))
    assert run.buffer.rollouts.state.any() and run.buffer.rollouts.first[:, :, 1:].any()
    old = compute_dist_params(run.agent, run.buffer.as_segments(), executor=run.executor)
    generator = torch.Generator().manual_seed(0)
    for parameter in run.agent.parameters():
        parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    expected = slow_losses(run, old)
    # One minibatch of everything at rate zero: its losses are those of the whole phase. The policy
    # before it is put back for the KL.
    aux = replace(tiny_aux(), epochs=1, num_minibatches=1, iterations_per_epoch=1, every=1)
    run.learner.config = replace(config, aux=aux)
    with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("phasicrl.phases.compute_dist_params", lambda *_, **__: old)
        patch.setattr("phasicrl.optimize.eager_adam_step_", lambda *_, **__: None)
        record = auxiliary_phase(run.learner, run.buffer)
    names = ("losses/aux/kl_loss", "losses/aux/aux_value_loss", "losses/aux/real_value_loss")
    assert [record[name] for name in names] == pytest.approx(expected, rel=1e-4)
    assert expected[0] > 1e-3


def test_masks_can_be_ignored(tmp_path: Path) -> None:
    config = tiny(tmp_path).with_updates({"env.action_masks": False})
    run = train(config, make_env=lambda: Levers(masked=True, strict=False))
    assert run.envs.mask_size == 0 and run.buffer.rollouts.action_mask is None
    assert (run.buffer.rollouts.action == 2).any()
