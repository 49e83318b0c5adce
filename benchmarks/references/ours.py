"""Our side: `phasicrl.algorithm.learn` with a preset, on a recording."""

import itertools
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
    "env.id": "recorded", "env.vectorization": "sync", "env.distribution": "easy",
    "log.console": "off", "log.tensorboard": False, "checkpoint.every_minutes": None,
    "compute.device": "cpu", "compute.compile": "off", "compute.num_threads": 1,
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
        names = ("algorithm", "phases", "presets", "training.build", "models.distributions")
        self.algorithm, self.phases, self.presets, self.build, self.distributions = (
            fresh_import(f"phasicrl.{name}", {"torch": torch_}) for name in names
        )
        if mistake := float(os.environ.get(MISTAKE, "0")):
            right = self.phases.objectives.value_loss
            self.phases.objectives.value_loss = lambda *values, **options: (
                (1 + mistake) * right(*values, **options)
            )

    def quantities(
        self, case: Case, start: Arrays | None, given: list[np.ndarray] | None = None
    ) -> tuple[Quantities, Arrays, list[np.ndarray]]:
        """Run a case, in each process that shares it.

        Args:
            case: the comparison.
            start: initial weights; by default the preset's own.
            given: orders of samples; by default the run's own.

        Returns:
            The quantities, the initial weights, and the orders of all passes over samples, one
            process after the other.
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
            if "generator" not in options:  # of PyTorch's compiler
                return randperm(size, **options)
            order = randperm(size, **options) if given is None else torch.from_numpy(given.pop(0))
            orders.append(order.numpy().copy())
            return order

        with (
            tempfile.TemporaryDirectory() as folder,
            losses_noted() as losses,
            patch.object(torch, "randperm", noted),
            self.algorithm.connect_ranks(device="cpu", timeout=300) as world,
        ):
            changes["output_dir"] = world.broadcast_object(folder)
            config = self.presets.get_preset(case.preset).with_updates(changes | dict(case.changes))
            # The first environment is made to read its spaces only.
            make_env = playbacks(recording, first=world.rank * case.num_envs // world.size - 1)
            with self.build.start_run(config, make_env=make_env, world=world) as run:
                found, start = self._learn(case, run, recording, losses, start)
                return found, start, [*itertools.chain(*world.all_gather_object(orders))]

    def _learn(
        self, case: Case, run: Any, recording: Recording, losses: list[float], start: Arrays | None
    ) -> tuple[Quantities, Arrays]:
        """Call `learn`, and note what its calls get and return."""
        found, weights, learner = Quantities(), dict(run.agent.named_parameters()), run.learner
        if case.initial:
            found.put_initial(weights)
        if start is not None:
            self._load(learner, start)
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
            every = world.all_gather_object(losses)
            found.put(i, f"losses of the {phase}'s steps", np.mean(every, axis=0))
            losses.clear()

        world = learner.executor.world
        local = world.local_slice(case.num_envs)
        compute_targets, run_stage = self.phases.compute_targets, run.show

        def targets_noted(rollout: Any, reward: torch.Tensor, *others: Any) -> Any:
            samples, record = compute_targets(rollout, reward, *others)
            i = learner.iteration
            steps = slice((i - 1) * case.num_steps, i * case.num_steps)
            assert np.array_equal(rollout.obs.numpy(), recording.obs[steps, local].swapaxes(0, 1))
            for quantity, value in {
                "values": rollout.value, "log-probabilities": rollout.log_prob,
                "values after the rollout": rollout.next_value[:, -1],
                "rewards, normalized": reward, "advantages": samples.advantage,
                "value targets": rollout.value_target,
            }.items():  # fmt: skip
                found.put(i, quantity, world.all_gather_cat(value))
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
            self._acting(recording.action, local),
        ):
            run.callbacks.on_iteration = after_iteration
            self.algorithm.learn(run)
        executor = learner.executor
        compiled = [*executor._compiled_calls.values(), *executor._compiled_steps.values()]
        assert None not in compiled, "something could not be compiled"
        return found, start

    @staticmethod
    @torch.no_grad()
    def _load(learner: Any, start: Arrays) -> None:
        """Begin with these weights, and with them the average of PPO-EWMA."""
        for name, weight in learner.agent.named_parameters():
            weight.copy_(torch.from_numpy(start[name]))
        if learner.proximal is not None:
            learner.proximal.reset(learner.agent)

    def _acting(self, recorded: np.ndarray, local: slice) -> Any:
        """Have policies draw the recorded actions."""
        actions = (torch.from_numpy(action).unsqueeze(1) for action in recorded)
        if recorded.ndim > 2:
            return patch.object(
                self.distributions.JointPolicy, "draw",
                lambda policy, noise: next(actions)[local].to(noise.dtype),
            )  # fmt: skip

        def favoring(policy: Any, generator: Any) -> torch.Tensor:
            action = next(actions).unsqueeze(-1)
            return torch.zeros(policy.log_probs.shape).scatter(-1, action, -1e9)

        return patch.object(self.distributions.Categorical, "sample_noise", favoring)
