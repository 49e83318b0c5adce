"""What a run that diverged leaves to be looked at: `crash.json`. Kind: effects (files)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phasicrl.phases import (
    PolicyPhaseLoss,
    compute_targets,
    dist_params,
    normalize_minibatches,
)
from phasicrl.rollout import Rollout

if TYPE_CHECKING:
    from phasicrl.session.run import Run

CRASH_FILE = "crash.json"
_NUM_ROWS = 20
"""Rows of metrics, the last ones, in the bundle."""


def report_crash(run: Run, error: BaseException) -> str:
    """Write what is known of a run whose numbers are no longer finite; returns a sentence on it.

    Nothing of it may be used any more, only looked at: the search for the first bad number moves
    statistics and generators.

    Raises:
        OSError: the file cannot be written.
    """
    rollout = run.buffer.rollout(max(run.buffer.num_filled - 1, 0))
    tensors = {name: _described(tensor) for name, tensor in _tensors(run, rollout)}
    reward, weight = (
        max((each["largest"] for name, each in tensors.items() if name.startswith(of)), default=0.0)
        for of in ("rollout.reward", "weights")
    )
    first, likely = _first_bad(run, rollout, tensors), _likely(run, reward, weight)
    run.files.write_json(
        CRASH_FILE,
        {
            "error": str(error),
            "first_bad": first,
            "likely": likely,
            "env_steps": run.env_steps,
            "iteration": run.iteration,
            "tensors": tensors,
            "rows": run.files.last_rows(_NUM_ROWS),
        },
    )
    return f"the first bad numbers: {first}; {likely}; more in {run.directory / CRASH_FILE}"


def _tensors(run: Run, rollout: Rollout) -> Iterator[tuple[str, Tensor]]:
    """Floating-point tensors in the order in which an iteration makes them."""
    of_rollout = rollout.tensors()
    for name in ("obs", "reward"):
        yield f"rollout.{name}", of_rollout.pop(name)
    for name, tensor in run.agent.state_dict().items():
        yield f"weights.{name}", tensor
    for name, tensor in of_rollout.items():
        yield f"rollout.{name}", tensor
    for name, optimizer in run.learner.optimizers.items():
        for number, state in optimizer.state_dict()["state"].items():
            for part, tensor in state.items():
                yield f"optimizer.{name}.{number}.{part}", tensor


def _described(tensor: Tensor) -> dict[str, Any]:
    """How many numbers, how many of them finite, and the largest size of these."""
    numbers = tensor.detach().flatten()
    if not numbers.is_floating_point():
        return {"shape": list(tensor.shape), "bad": 0, "largest": 0.0}
    finite = numbers[numbers.isfinite()]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    return {"shape": list(tensor.shape), "bad": len(numbers) - len(finite), "largest": largest}


def _is_bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())


def _first_bad(run: Run, rollout: Rollout, tensors: dict[str, dict[str, Any]]) -> str:
    """What was not finite first, in the order in which an iteration computes."""
    # Targets are computed anew below: those of the rollout may be of the one before.
    for name, described in tensors.items():
        if name != "rollout.value_target" and described["bad"]:
            return name
    if run.world.size > 1:
        return "in a loss or a gradient; one process alone cannot compute them once more"
    try:
        return _first_bad_of_learning(run, rollout)
    except (RuntimeError, MemoryError):  # it does not fit as a whole, for example
        return "unknown"


def _first_bad_of_learning(run: Run, rollout: Rollout) -> str:
    """The same of rewards, targets, losses and gradients, which are computed once more, eagerly."""
    learner, agent, ppo = run.learner, run.agent, run.config.ppo
    reward, _ = learner.learning_reward(rollout)
    samples, _ = compute_targets(rollout, reward, ppo)
    targets = {"rewards": reward, "value targets": samples.value_target}
    for name, tensor in (targets | {"advantages": samples.advantage}).items():
        if _is_bad(tensor):
            return name
    loss = PolicyPhaseLoss(agent, ppo, True, (True, True) in ppo.passes)
    kl_coef = torch.tensor(learner.kl_coef, device=reward.device)
    order = samples.random_order(by=ppo.minibatch_by, generator=learner.generator)
    named = dict(agent.named_parameters())
    dealt = normalize_minibatches(samples, order, ppo)
    if learner.proximal is not None:
        near = dist_params(learner.proximal.agent, dealt, compute=learner.compute)
        dealt = dataclasses.replace(dealt, old_dist_params=near)
    for minibatch in dealt.minibatches(ppo.num_minibatches, order, by=ppo.minibatch_by):
        with torch.enable_grad():
            value, noted = loss(minibatch.gather(), kl_coef)
            gradients = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        for name, tensor in (noted | {"the loss": value}).items():
            if _is_bad(tensor):
                return name
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None and _is_bad(gradient):
                return f"gradient.{name}"
    return "numbers between two steps, which are gone"


def _likely(run: Run, reward: float, weight: float) -> str:
    """Which knob is likely to help, by the sizes of rewards and weights."""
    ppo = run.config.ppo
    if reward > 1e6 and run.config.reward_norm is None and ppo.reward_clip is None:
        return f"rewards are as large as {reward:.3g}: normalize them (reward_norm), or clip them"
    if weight > 1e3:
        rate = f"lower ppo.learning_rate (it is {ppo.learning_rate:g})"
        return f"weights have grown to {weight:.3g}: {rate}, or clip gradients (ppo.max_grad_norm)"
    return f"try a lower ppo.learning_rate (it is {ppo.learning_rate:g})"
