"""Films of trained agents. Kind: effects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gymnasium as gym

from phasicrl.config import Levels, PolicyKind
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.lab.film.filming import Film, film_episodes
from phasicrl.models.agent import EncoderFactory
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.session.evaluate import Evaluation, load_agent
from phasicrl.session.evaluation import refuse_levels


def film(
    run_dir: Path | str,
    *,
    output: Path | None = None,
    num_envs: int = 1,
    episodes: int = 3,
    policy: PolicyKind = "sampled",
    levels: Levels = "unseen",
    seed: int = 0,
    fps: int = 15,
    size: int = 512,
    overlay: bool = False,
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    weights: WeightsKind = "last",
) -> tuple[Path, Evaluation]:
    """Film the agent of a run.

    Args:
        run_dir: Run directory.
        output: The file, H.264; else `videos/POLICY-seedSEED.mp4` in the run directory, its name
            with `-train` and `-best` for these levels and weights.
        num_envs: Environments side by side, in a square.
        episodes: Episodes played to their end, over all environments.
        policy: Drawn or most likely actions.
        levels: Procgen: the full distribution of levels, or those of the training.
        seed: Another seed, other episodes.
        fps: Images a second.
        size: At least this many pixels high and wide; images are enlarged by whole factors.
        overlay: Show the return so far, the value and the policy under each image.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: the same, for runs on a vector environment of your own.
        make_encoder: the same, for runs with a network of your own.
        weights: The last that were saved, or the best by the evaluations of the run.

    Returns:
        The file, and the episodes it shows.

    Raises:
        ValueError: not a run, a film that is no .mp4, no levels to choose, nothing to be seen.
        ImportError: the encoder is not installed.
    """
    _refuse(output, episodes, num_envs, fps, size)
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own, make_encoder=make_encoder)
    refuse_levels(levels, None if any(own.values()) else config.env)
    others = "-train" * (levels == "train") + "-best" * (weights == "best")
    path = output or files.path / "videos" / f"{policy}-seed{seed}{others}.mp4"
    wanted = Film(
        num_envs=num_envs, episodes=episodes, policy=policy, levels=levels, seed=seed, fps=fps,
        size=size, overlay=overlay,
    )  # fmt: skip
    played = film_episodes(
        lambda envs: load_agent(files, config, envs, make_encoder, weights),
        config, path, wanted, precision=config.compute.policy_precision, **own,
    )  # fmt: skip
    return path, Evaluation(policy, *played, levels=levels)


def _refuse(output: Path | None, episodes: int, num_envs: int, fps: int, size: int) -> None:
    """Refuse names and numbers that no film can have."""
    if output is not None and output.suffix != ".mp4":
        raise ValueError(f"{output}: films end with .mp4; give {output.with_suffix('.mp4')}")
    if episodes < 1 or num_envs < 1:
        given = f"episodes is {episodes} and num_envs is {num_envs}"
        raise ValueError(f"{given}; give at least 1 of each")
    if num_envs > episodes:
        given = f"num_envs is {num_envs:,}, but only {episodes:,} episodes are played"
        raise ValueError(f"{given}; give more episodes, or fewer environments")
    if not 1 <= fps <= 240 or not 1 <= size <= 4096:
        given = f"fps is {fps} and size is {size}"
        raise ValueError(f"{given}; give 1 to 240 images a second, and 1 to 4,096 pixels")
