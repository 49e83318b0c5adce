"""Memory, masks, PPG, discrete and mixed actions in every combination.

And that together they still do what each does alone.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from phasicrl.algorithm import train
from phasicrl.config import Config
from phasicrl.phases import auxiliary_phase, compute_targets, dist_params
from phasicrl.rollout import Samples
from phasicrl.session.build import start_run
from phasicrl.session.evaluate import evaluate
from tests.helpers import Levers, tiny, tiny_aux

COMBINATIONS = [
    pytest.param(
        *flags,
        id="-".join(
            name
            for name, on in zip(("memory", "mask", "ppg", "discrete"), flags, strict=True)
            if on
        )
        or "plain",
    )
    for flags in itertools.product((False, True), repeat=4)
]


def config_of(tmp_path: Path, memory: bool, ppg: bool, **changes: Any) -> Config:
    config = tiny(tmp_path, aux=tiny_aux() if ppg else None, **changes)
    return (
        replace(config, model=replace(config.model, memory="lstm", memory_size=8))
        if memory
        else config
    )


@pytest.mark.parametrize(("memory", "mask", "ppg", "discrete"), COMBINATIONS)
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


def slow_losses(run: Any, old_dist_params: torch.Tensor) -> tuple[float, float, float]:
    """KL, auxiliary and real value loss of the whole phase, step by step.

    State carried by hand, reset by hand, masks by hand.
    """
    agent, buffer = run.agent, run.buffer
    rollouts = buffer.rollouts
    totals = [0.0, 0.0, 0.0]
    for k, b in itertools.product(range(buffer.num_rollouts), range(run.config.env.num_envs)):
        state = rollouts.state[k, b][None]
        for t in range(run.config.ppo.num_steps):
            if rollouts.first[k, b, t]:
                state = torch.zeros_like(state)
            mask = rollouts.action_mask[k, b, t][None, None]
            output = agent(
                rollouts.obs[k, b, t][None, None], torch.zeros(1, 1, dtype=torch.bool), state, mask
            )
            state = output.state
            target = rollouts.value_target[k, b, t]
            old = agent.policy_head.distribution(
                old_dist_params[k * run.config.env.num_envs + b, t][None, None]
            )
            totals[0] += output.policy.kl_from(old).item()
            totals[1] += 0.5 * (output.aux_value - target).square().item()
            totals[2] += 0.5 * (output.value - target).square().item()
    steps = rollouts.value_target.numel()
    return totals[0] / steps, totals[1] / steps, totals[2] / steps


@torch.no_grad()
def test_the_auxiliary_phase_with_memory_and_masks_is_that_of_single_steps(tmp_path: Path) -> None:
    config = config_of(tmp_path, True, True)
    with start_run(config, make_env=partial(Levers, discrete=False, masked=True)) as run:
        while not run.buffer.is_full:
            rollout = run.collect(run.buffer.next_rollout())
            compute_targets(rollout, run.learner.normalize_reward(rollout)[0], config.ppo)
        assert run.buffer.rollouts.state.any() and run.buffer.rollouts.first[:, :, 1:].any()
        segments = run.buffer.segments()
        assert isinstance(segments, Samples)
        old = dist_params(run.agent, segments, executor=run.executor)
        for parameter in run.agent.parameters():
            parameter.add_(
                0.2
                * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
                )
            )
        expected = slow_losses(run, old)
        # One minibatch of everything at rate zero: its losses are those of the whole phase. The
        # policy before it is put back for the KL.
        aux = replace(tiny_aux(), epochs=1, num_minibatches=1, iterations_per_epoch=1, every=1)
        run.learner.config = replace(config, aux=aux)
        with torch.enable_grad(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("phasicrl.phases.dist_params", lambda *_, **__: old)
            patch.setattr("phasicrl.optimize.step_", lambda *_, **__: None)
            record = auxiliary_phase(run.learner, run.buffer)
        names = ("losses/aux/kl_loss", "losses/aux/aux_value_loss", "losses/aux/real_value_loss")
        assert [record[name] for name in names] == pytest.approx(expected, rel=1e-4)
        assert expected[0] > 1e-3


def test_masks_can_be_left_unread(tmp_path: Path) -> None:
    config = config_of(tmp_path, False, False)
    config = replace(config, env=replace(config.env, action_masks=False))
    run = train(config, make_env=lambda: Levers(masked=True, strict=False))
    assert run.envs.mask_size == 0 and run.buffer.rollouts.action_mask is None
    assert (run.buffer.rollouts.action == 2).any()
