"""Their side.

Stable-Baselines3's `PPO.learn` on a recording, from the package that is installed beside this
program.
"""

from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
from references.cases import Case
from references.playback import Player, played
from references.quantities import Arrays, Quantities
from references.substitute import (
    draws_given,
    fresh_import,
    losses_noted,
    optimizers_noted,
    stand_in,
    torch_and_numpy,
)


class Side:
    """Their package, imported in a precision.

    Args:
        path: unused: it is an installed package.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        self.precision = precision
        self.orders: list[np.ndarray] = []
        # What these import is not substituted for others.
        for name in ("pandas", "matplotlib.pyplot", "torch.utils.tensorboard"):
            with suppress(ImportError):
                fresh_import(name, {})
        random = stand_in(np.random, permutation=lambda number: self.orders.pop(0))
        substitutes = torch_and_numpy(precision, of_numpy={"random": random})
        self.kinds = {
            "PPO": fresh_import("stable_baselines3.ppo.ppo", substitutes).PPO,
            "MaskablePPO": fresh_import("sb3_contrib.ppo_mask.ppo_mask", substitutes).MaskablePPO,
        }
        self.vec_env = fresh_import("stable_baselines3.common.vec_env", substitutes)

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool
    ) -> Quantities:
        """Run `PPO.learn` or `MaskablePPO.learn` with its defaults.

        Args:
            case: the comparison.
            start: initial weights, by our names.
            orders: orders of all passes over samples, which are numbered as ours.
            turned: whether each minibatch's samples are added up in the opposite order.
        """
        size = case.num_envs * case.num_steps // case.minibatches
        self.orders = [
            order.reshape(-1, size)[:, ::-1].reshape(-1) if turned else order for order in orders
        ]
        player, found = Player(case.experience()), Quantities()
        with draws_given(player.action), losses_noted() as losses, optimizers_noted() as adams:
            model = self.kinds[case.program](
                "MlpPolicy",
                played(self.vec_env.VecEnv, player, self.precision),
                n_steps=case.num_steps,
                batch_size=size,
                device="cpu",
            )
            weights = found.begin(model.policy, start, case)
            train, iterations = model.train, []

            def watched() -> None:
                buffer = model.rollout_buffer
                iterations.append(len(iterations) + 1)
                names = {
                    "values": "values",
                    "log-probabilities": "log_probs",
                    "advantages": "advantages",
                    "value targets": "returns",
                }
                for quantity, name in names.items():
                    found.put(iterations[-1], quantity, getattr(buffer, name).T)
                train()
                found.put_state(iterations[-1], weights, start, {"policy": adams}, "policy phase")
                found.put(iterations[-1], "losses of the policy phase's steps", losses)
                losses.clear()

            with patch.object(model, "train", watched):
                model.learn(case.budget)
        assert not self.orders, f"{len(self.orders)} orders were left"
        return found
