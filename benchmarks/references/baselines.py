"""Their side: the parts of openai/baselines that need no TensorFlow.

`VecNormalize` and the advantages of `ppo2`'s `Runner`, on a recording.

Their networks are TensorFlow 1's, and cannot be run: values are ours.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from references.cases import Case
from references.playback import Player, played
from references.quantities import Arrays, Quantities
from references.substitute import fresh_import, importing, invented, packages_in, torch_and_numpy

PACKAGES = ("baselines", "baselines.common", "baselines.common.vec_env", "baselines.ppo2")


class Side:
    """Their modules, imported in a precision.

    Args:
        path: of their repository.
        precision: `float32` or `float64`.
    """

    def __init__(self, path: Path, precision: str) -> None:
        folders = packages_in(path, PACKAGES)
        substitutes = folders | {
            "tensorflow": invented("tensorflow"),
            "baselines.common.tf_util": invented("tf_util", get_session=None),
        }
        substitutes |= {"numpy": torch_and_numpy(precision)["numpy"]}
        substitutes["baselines.common.tile_images"] = invented("tile_images", tile_images=None)
        self.vec_env = fresh_import("baselines.common.vec_env.vec_env", substitutes)
        folders["baselines.common.vec_env"].VecEnvWrapper = self.vec_env.VecEnvWrapper
        self.normalize = fresh_import("baselines.common.vec_env.vec_normalize", substitutes)
        self.runner = fresh_import("baselines.ppo2.runner", substitutes)
        self.substitutes = substitutes

    def quantities(
        self, case: Case, start: Arrays, orders: list[np.ndarray], *, turned: bool, given: Arrays
    ) -> Quantities:
        """Collect with `Runner.run` from a `VecNormalize`; nothing is trained.

        Args:
            case: the comparison.
            start: unused.
            orders: unused.
            turned: unused.
            given: quantities of ours, for the values.
        """
        player, found = Player(case.experience()), Quantities()
        shape = (case.num_envs, case.num_steps)
        scaled: list[np.ndarray] = []
        with importing(self.substitutes):
            envs = self.normalize.VecNormalize(
                played(self.vec_env.VecEnv, player, "float64"),
                ob=False,
                gamma=case.settings["reward_gamma"],
            )
        step_wait = envs.step_wait

        def watched() -> tuple[Any, ...]:
            answer = step_wait()
            scaled.append(answer[1])
            return answer

        def step(*_: Any, **__: Any) -> tuple[Any, ...]:
            iteration, step = divmod(player.at, case.num_steps)
            return (
                player.action(),
                given[f"{iteration + 1}|values|"].reshape(shape)[:, step],
                None,
                np.zeros(player.num_envs),
            )

        def value(*_: Any, **__: Any) -> np.ndarray:
            return given[f"{player.at // case.num_steps}|values after the rollout|"]

        envs.step_wait = watched
        model = SimpleNamespace(initial_state=None, step=step, value=value)
        runner = self.runner.Runner(
            env=envs, model=model, nsteps=case.num_steps, gamma=case.settings["gamma"], lam=0.95
        )
        for iteration in range(1, case.iterations + 1):
            scaled.clear()
            _, returns, _, _, values, *_ = runner.run()
            found.put(iteration, "rewards, normalized", np.stack(scaled, axis=1))
            found.put(iteration, "value targets", returns.reshape(shape))
            found.put(iteration, "advantages", (returns - values).reshape(shape))
        return found
