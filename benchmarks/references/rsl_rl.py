"""Their side: rsl_rl's `PPO` on a recording, with its own storage, networks and learning rates."""

import sys
from pathlib import Path

import numpy as np
import torch
from references.cases import Case
from references.playback import Player
from references.quantities import Arrays, Quantities
from references.substitute import draws_given, fresh_import, losses_noted, torch_and_numpy


class Side:
    """Their package, imported from a checkout in a precision.

    Args:
        path: checkout.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.precision = getattr(torch, precision)
        self.orders: list[torch.Tensor] = []
        self.tensordict = fresh_import("tensordict", {})  # compiled code needs the real torch
        sys.path.insert(0, str(path))
        substitutes = torch_and_numpy(
            precision, of_torch={"randperm": lambda size, **_: self.orders.pop(0)}
        )
        self.algorithms, self.models, self.modules, self.storage = (
            fresh_import(f"rsl_rl.{name}", substitutes)
            for name in ("algorithms", "models", "modules.distribution", "storage")
        )

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run their loop of rollouts and updates.

        Args:
            case: the comparison.
            start: initial weights, by our names.
            orders: orders of all passes over samples, which are numbered as ours.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        num_envs, num_steps = case.num_envs, case.num_steps
        size = num_envs * num_steps // case.minibatches
        for order in orders:  # theirs are numbered step by step
            order = order.reshape(-1, size)[:, ::-1].reshape(-1) if turned else order
            self.orders.append(torch.from_numpy(order % num_steps * num_envs + order // num_steps))
        player, found = Player(case.experience()), Quantities()
        recording = player.recording

        def seen() -> object:
            obs = torch.from_numpy(player.seen()).to(self.precision)
            return self.tensordict.TensorDict({"all": obs}, batch_size=[num_envs])

        groups, actions = {"actor": ["all"], "critic": ["all"]}, recording.action.shape[2:]
        gaussian = {"class_name": self.modules.GaussianDistribution, "std_type": "log"}
        actor, critic = (
            self.models.MLPModel(seen(), groups, name, width, (64, 64), "tanh", False, gauss)
            for name, width, gauss in (("actor", *actions, gaussian), ("critic", 1, None))
        )
        agent = torch.nn.ModuleDict({"actor": actor, "critic": critic})
        weights = found.begin(agent, start, case)
        storage = self.storage.RolloutStorage("rl", num_envs, num_steps, seen(), actions)
        ppo = self.algorithms.PPO(
            actor, critic, storage, num_learning_epochs=1, num_mini_batches=case.minibatches,
            **case.settings,
        )  # fmt: skip
        for iteration in range(1, case.iterations + 1):
            with torch.inference_mode():
                for _ in range(num_steps):
                    with draws_given(player.action):
                        ppo.act(seen())
                    n = player.step()
                    reward = torch.from_numpy(recording.reward[n]).to(self.precision)
                    ppo.process_env_step(seen(), reward, torch.from_numpy(recording.ended[n]), {})
                ppo.compute_returns(seen())
            for quantity, tensor in {
                "values": storage.values, "log-probabilities": storage.actions_log_prob,
                "advantages": storage.advantages, "value targets": storage.returns,
            }.items():  # fmt: skip
                found.put(iteration, quantity, tensor.squeeze(-1).T)
            with losses_noted() as losses:
                ppo.update()
            found.put(iteration, "losses of the policy phase's steps", losses)
            found.put(iteration, "learning rate after the policy phase", ppo.learning_rate)
            found.put_state(iteration, weights, start, {"policy": [ppo.optimizer]}, "policy phase")
        assert not self.orders, f"{len(self.orders)} orders were left"
        return found
