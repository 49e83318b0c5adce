"""Our side: `phasicrl.algorithm.learn` with a preset, on a recording."""

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
    "log.tensorboard": False, "checkpoint.every_minutes": None, "compute.device": "cpu",
    "compute.compile": "off", "compute.num_threads": 1, "compute.policy_precision": "fp32",
    "compute.aux_precision": "fp32", "compute.take_turns": False,
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
            for name in ("algorithm", "phases", "presets", "training.build", "models.distributions")
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
            case: the comparison.
            start: initial weights; by default the preset's own.

        Returns:
            The quantities, the initial weights, and the orders of all passes over samples.
        """
        recording, orders = case.experience(), []
        changes = QUIET | {
            "env.num_envs": case.num_envs, "ppo.num_steps": case.num_steps,
            "total_env_steps": case.budget,
        }  # fmt: skip
        if recording.obs.dtype == np.uint8:  # minibatches of images stay whole
            changes["compute.micro_batch"] = None
        randperm = torch.randperm

        def noted(size: int, **options: Any) -> torch.Tensor:
            order = randperm(size, **options)
            orders.append(order.numpy().copy())
            return order

        with (
            tempfile.TemporaryDirectory() as folder,
            losses_noted() as losses,
            patch.object(torch, "randperm", noted),
        ):
            config = self.presets.get_preset(case.preset).with_updates(
                changes | {"output_dir": folder} | dict(case.changes)
            )
            # The first environment is made to read its spaces only.
            with self.build.start_run(config, make_env=playbacks(recording, first=-1)) as run:
                return *self._learn(case, run, recording, losses, start), orders

    def _learn(
        self, case: Case, run: Any, recording: Recording, losses: list[float], start: Arrays | None
    ) -> tuple[Quantities, Arrays]:
        """Call `learn`, and note what its calls get and return."""
        found, weights, learner = Quantities(), dict(run.agent.named_parameters()), run.learner
        if case.initial:
            found.put_initial(weights)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(torch.from_numpy(start[name]) if start is not None else weight)
        start = {name: weight.detach().double().numpy().copy() for name, weight in weights.items()}
        if learner.reward_normalizer is not None and case.counts_from is not None:
            moments = learner.reward_normalizer.moments
            moments.count.fill_(case.counts_from)
            moments.sum_of_squares.fill_(case.counts_from)
        adams = learner.optimizers
        optimizers = {
            name: [adam]
            for name, adam in adams.items()
            if name != "aux" or adam is not adams["policy"]
        }

        def put_state(phase: str) -> None:
            i = learner.iteration
            found.put_state(i, weights, start, optimizers, phase)
            rate = adams["policy"].param_groups[0]["lr"]
            found.put(i, f"learning rate after the {phase}", rate)
            found.put(i, f"losses of the {phase}'s steps", losses)
            losses.clear()

        compute_targets, run_stage = self.phases.compute_targets, run.show

        def targets_noted(rollout: Any, reward: torch.Tensor, *others: Any) -> Any:
            samples, record = compute_targets(rollout, reward, *others)
            i = learner.iteration
            steps = slice((i - 1) * case.num_steps, i * case.num_steps)
            assert np.array_equal(rollout.obs.numpy(), recording.obs[steps].swapaxes(0, 1))
            for quantity, value in {
                "values": rollout.value, "log-probabilities": rollout.log_prob,
                "values after the rollout": rollout.next_value[:, -1],
                "rewards, normalized": reward, "advantages": samples.advantage,
                "value targets": rollout.value_target,
            }.items():  # fmt: skip
                found.put(i, quantity, value)
            return samples, record

        def stage(name: str) -> None:
            if name == "auxiliary":
                put_state("policy phase")
            run_stage(name)

        def after_iteration(_: Any, record: dict[str, float]) -> None:
            put_state("auxiliary phase" if "losses/aux/kl_loss" in record else "policy phase")

        run.show = stage
        with (
            patch.object(self.phases, "compute_targets", targets_noted),
            self._acting(recording),
        ):
            run.callbacks.on_iteration = after_iteration
            self.algorithm.learn(run)
        return found, start

    def _acting(self, recording: Recording) -> Any:
        """Have policies draw the recorded actions."""
        actions = iter(recording.action)

        def draw(policy: Any, noise: Any) -> torch.Tensor:
            action = torch.from_numpy(next(actions)).unsqueeze(1)
            return (
                action if policy is None or action.dtype == torch.int64 else action.to(noise.dtype)
            )

        discrete = recording.action.ndim == 2
        kind = self.distributions.Categorical if discrete else self.distributions.JointPolicy
        return patch.object(kind, "draw", draw)
