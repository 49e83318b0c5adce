"""Our side: the preset's own run, on a recording. Says every quantity that is compared."""

from __future__ import annotations

import os
import tempfile
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from references.cases import MISTAKE, Case
from references.playback import Recording, playbacks
from references.quantities import Arrays, Quantities
from references.substitute import fresh_import, losses_noted, torch_and_numpy

QUIET = {
    "env.id": "recorded", "env.parallel": "sync", "env.distribution": "easy", "log.console": "off",
    "log.tensorboard": False,
    "checkpoint.every_minutes": None, "compute.device": "cpu", "compute.compile": "off",
    "compute.num_threads": 1,
    "compute.policy_precision": "fp32", "compute.aux_precision": "fp32",
    "compute.take_turns": False,
}  # fmt: skip


class Side:
    """The package, imported in a precision.

    Args:
        precision: `float32` or `float64`.
    """

    def __init__(self, precision: str) -> None:
        torch_ = torch_and_numpy(precision)["torch"]
        self.algorithm, self.phases, self.presets, self.build, self.distributions = (
            fresh_import(f"phasicrl.{name}", {"torch": torch_})
            for name in ("algorithm", "phases", "presets", "session.build", "models.distributions")
        )
        if mistake := float(os.environ.get(MISTAKE, "0")):
            right = self.phases.objectives.value_loss
            self.phases.objectives.value_loss = lambda *values, **options: (
                (1 + mistake) * right(*values, **options)
            )

    def quantities(
        self, case: Case, start: Arrays | None
    ) -> tuple[Quantities, Arrays, list[np.ndarray]]:
        """Run a case.

        Args:
            case: which.
            start: weights to begin with; by default the preset's own.

        Returns:
            What was found, the weights at the start, and the orders of all passes over samples.
        """
        recording = case.experience()
        # Pictures are not cut.
        pieces = {"compute.micro_batch": None} if recording.obs.dtype == np.uint8 else {}
        changes = pieces | {
            "env.num_envs": case.num_envs,
            "ppo.num_steps": case.num_steps,
            "total_env_steps": case.budget,
        }
        with (
            tempfile.TemporaryDirectory() as folder,
            losses_noted() as losses,
            patch.object(torch, "randperm", wraps=torch.randperm) as dealt,
        ):
            config = self.presets.get_preset(case.preset).with_updates(
                QUIET | changes | {"output_dir": folder} | dict(case.changes)
            )
            orders: list[np.ndarray] = []
            dealt.side_effect = lambda size, **options: _noted(
                orders, dealt._mock_wraps(size, **options)
            )
            with self.build.start_run(
                config, make_env=playbacks(recording, first=-1)
            ) as run:  # one is made to be looked at
                return (*self._follow(case, run, recording, losses, start), orders)

    def _follow(
        self, case: Case, run: Any, recording: Recording, losses: list[float], start: Arrays | None
    ) -> tuple[Quantities, Arrays]:
        """All iterations of a run."""
        found, weights = Quantities(), dict(run.agent.named_parameters())
        if case.initial:
            found.put_initial(weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(torch.from_numpy(start[name]) if start is not None else weight)
        start = {name: weight.detach().double().numpy().copy() for name, weight in weights.items()}
        learner, normalizer = run.learner, run.learner.reward_normalizer
        if normalizer is not None and case.counts_from is not None:
            normalizer.moments.count.fill_(case.counts_from)
            normalizer.moments.sum_of_squares.fill_(case.counts_from)
        adams = learner.optimizers
        optimizers = {
            name: [adam]
            for name, adam in adams.items()
            if name != "aux" or adam is not adams["policy"]
        }

        def stage(name: str) -> None:
            if name == "auxiliary":
                found.put_state(run.iteration, weights, start, optimizers, "policy phase")
                found.put(run.iteration, "losses of the policy phase's steps", losses)
                losses.clear()

        while run.env_steps < run.config.budget:
            rollout = run.buffer.next_rollout()
            with self._acting(recording, run):
                run.collect(rollout)
            i = run.iteration + 1
            first = (i - 1) * case.num_steps
            assert np.array_equal(
                rollout.obs.numpy(), recording.obs[first : first + case.num_steps].swapaxes(0, 1)
            )
            reward, _ = learner.normalize_reward(rollout)
            found.put(i, "values", rollout.value)
            found.put(i, "log-probabilities", rollout.log_prob)
            found.put(i, "values after the rollout", rollout.next_value[:, -1])
            found.put(i, "rewards, normalized", reward)
            record = self.phases.policy_phase(learner, rollout, reward)
            if learner.auxiliary_phase_is_due:
                record |= self.phases.auxiliary_phase(learner, run.buffer, on_stage=stage)
            if run.buffer.is_full:
                run.buffer.clear()
            found.put(
                i,
                "advantages",
                self.phases.compute_targets(rollout, reward, run.config.ppo)[0].advantage,
            )
            found.put(i, "value targets", rollout.value_target)
            phase = "auxiliary phase" if "losses/aux/kl_loss" in record else "policy phase"
            found.put_state(i, weights, start, optimizers, phase)
            found.put(i, f"losses of the {phase}'s steps", losses)
            losses.clear()
            run.finish_iteration(record)
        return found, start

    def _acting(self, recording: Recording, run: Any) -> Any:
        """Draw the recorded actions."""
        distributions, steps = (
            self.distributions,
            iter(range(run.env_steps // run.config.env.num_envs, len(recording.action))),
        )

        def draw(policy: Any, noise: Any) -> torch.Tensor:
            action = torch.from_numpy(recording.action[next(steps)]).unsqueeze(1)
            return (
                action if policy is None or action.dtype == torch.int64 else action.to(noise.dtype)
            )

        kind = (
            distributions.Categorical if recording.action.ndim == 2 else distributions.JointPolicy
        )
        return patch.object(kind, "draw", draw)


def _noted(orders: list[np.ndarray], order: torch.Tensor) -> torch.Tensor:
    """Write an order down."""
    orders.append(order.numpy().copy())
    return order
