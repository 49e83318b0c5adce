"""Films of trained agents. Kind: effects."""

import math
from pathlib import Path
from typing import Any

from phasicrl.config import ActionSelection, Levels
from phasicrl.lab.film.filming import film_episodes
from phasicrl.runs.directory import WeightsKind
from phasicrl.training.evaluate import Evaluation, SavedAgent


def film(
    run_dir: Path | str, *, output: Path | None = None, num_envs: int = 1, episodes: int = 3,
    policy: ActionSelection = "sampled", levels: Levels = "unseen", seed: int = 0,
    fps: int | None = None, size: int = 512, overlay: bool = False, weights: WeightsKind = "last",
    **user_objects: Any,
) -> tuple[Path, Evaluation]:  # fmt: skip
    """Record a video of the agent of a run, and return its path and episodes.

    Args:
        run_dir: Run directory.
        output: H.264 file; none: `videos/POLICY-seedSEED.mp4` in the run directory (`./NAME` for
            an agent of phasicrl), with `-train` for training levels and `-best` for best weights.
        num_envs: Environments side by side, in a square.
        episodes: Episodes in total, over all environments.
        policy: Kind of actions: sampled, or greedy (most likely).
        levels: Procgen: `unseen` (the full distribution), or `train` (the training levels).
        seed: Seed of the episodes.
        fps: Frames per second; none: `render_fps` of a rendered environment, else 15.
        size: Minimum height and width in pixels; images are enlarged by whole factors.
        overlay: Show the return so far, the value and the policy under each image.
        weights: Last weights, or best weights by the evaluations during the run.
        user_objects: custom environments and networks, see `train`.

    Returns:
        The file and its episodes.

    Raises:
        ValueError: `run_dir` is not a run directory, a number or name is out of its range, or the
            environment lacks the levels or renders no images.
        ImportError: the video encoder is not installed.
    """
    if output is not None and (output := Path(output)).suffix != ".mp4":
        raise ValueError(f"output is {output}; expected {output.with_suffix('.mp4')}")
    for name, value, low, high in (
        ("episodes", episodes, 1, math.inf), ("num_envs", num_envs, 1, episodes),
        ("fps", 15 if fps is None else fps, 1, 240), ("size", size, 1, 4096),
    ):  # fmt: skip
        if not low <= value <= high:
            raise ValueError(f"{name} is {value:,}; expected {low} to {high:,}")
    if policy not in ("greedy", "sampled"):
        raise ValueError(f"policy is {policy!r}; expected greedy or sampled")
    saved = SavedAgent.from_run(run_dir, levels, **user_objects)
    tail = "-train" * (levels == "train") + "-best" * (weights == "best")
    path = output or saved.run_directory.output_folder / "videos" / f"{policy}-seed{seed}{tail}.mp4"
    return path, film_episodes(
        saved, lambda envs: saved.load_agent(envs, weights), path, num_envs=num_envs, seed=seed,
        episodes=episodes, policy=policy, levels=levels, fps=fps, size=size, overlay=overlay,
    )  # fmt: skip
