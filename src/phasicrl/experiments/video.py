"""Films of an agent, from the images it sees or from the environment's own rendering.

No screen is needed. Kind: effects.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.config import Config, Levels, Options, PolicyKind
from phasicrl.envs.gymnasium import options_for
from phasicrl.envs.make import for_evaluation
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.experiments.evaluate import Evaluation, acting_precision, load_agent
from phasicrl.experiments.raycast import RayCamera
from phasicrl.models.agent import EncoderFactory
from phasicrl.models.encoders import image_shape
from phasicrl.runs.directory import RunDirectory, WeightsKind
from phasicrl.session.build import EnvFactory
from phasicrl.session.evaluation import make_evaluation_envs, play

ImageOf = Callable[[np.ndarray], np.ndarray]
"""From observations to images, `[B, H, W, 3]`."""


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
    make_env: Callable[[], gym.Env] | None = None,
    make_vector_env: MakeVectorEnv | None = None,
    make_encoder: EncoderFactory | None = None,
    weights: WeightsKind = "last",
) -> tuple[Path, Evaluation]:
    """Film the agent of a run.

    Args:
        run_dir: Run directory.
        output: The file, H.264; else `videos/POLICY-seedSEED.mp4` in the run directory.
        num_envs: Environments side by side, in a square.
        episodes: Episodes played to their end, over all environments.
        policy: Drawn or most likely actions.
        levels: Procgen: the full distribution of levels, or those of the training.
        seed: Another seed, other episodes.
        fps: Images a second.
        size: At least this many pixels high and wide; images are enlarged by whole factors.
        make_env: what training was given, for runs on an environment of your own.
        make_vector_env: the same, for runs on a vector environment of your own.
        make_encoder: the same, for runs with a network of your own.
        weights: The last that were saved, or the best by the evaluations of the run.

    Returns:
        The file, and the episodes it shows.

    Raises:
        ValueError: not a run directory, or nothing to be seen in this environment.
        ImportError: the encoder is not installed.
    """
    _refuse_sizes(episodes, num_envs, fps, size)
    files = RunDirectory(Path(run_dir))
    own = {"make_env": make_env, "make_vector_env": make_vector_env}
    config = files.config_for(**own, make_encoder=make_encoder)
    output = output or files.path / "videos" / f"{policy}-seed{seed}.mp4"
    make = partial(make_evaluation_envs, num_envs=num_envs, levels=levels, seed=seed)
    envs, image_of = _open(config, make, **own)
    with closing(envs):
        agent = load_agent(files, config, envs, make_encoder, weights)
        with _writer(output, fps=fps, size=size) as write:
            played = play(
                agent,
                envs,
                episodes=episodes,
                policy=policy,
                seed=seed,
                precision=acting_precision(files),
                on_obs=lambda obs: write(tile(image_of(obs.numpy()))),
            )
    return output, Evaluation(policy, *played)


def _refuse_sizes(episodes: int, num_envs: int, fps: int, size: int) -> None:
    """Refuse numbers that no film can have."""
    if episodes < 1 or num_envs < 1:
        given = f"episodes is {episodes} and num_envs is {num_envs}"
        raise ValueError(f"{given}; give at least 1 of each")
    if num_envs > episodes:
        given = f"num_envs is {num_envs:,}, but only {episodes:,} episodes are played"
        raise ValueError(f"{given}; give more episodes, or fewer environments")
    if not 1 <= fps <= 240 or not 1 <= size <= 4096:
        given = f"fps is {fps} and size is {size}"
        raise ValueError(f"{given}; give 1 to 240 images a second, and 1 to 4,096 pixels")


def tile(images: np.ndarray) -> np.ndarray:
    """`[B, H, W, 3]` images as one, in a square of ⌈√B⌉ × ⌈√B⌉ without the rows that stay empty."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = np.zeros((rows * columns, *images.shape[1:]), images.dtype)
    sheet[: len(images)] = images
    return np.vstack([np.hstack(row) for row in sheet.reshape(rows, columns, *images.shape[1:])])


def enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Repeat pixels by the smallest whole factor that makes both sides at least `size`.

    Odd sides are padded to even ones, which H.264 asks for.
    """
    height, width, _ = image.shape
    factor = max(1, math.ceil(size / min(height, width)))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((0, large.shape[0] % 2), (0, large.shape[1] % 2), (0, 0)))


def _open(
    config: Config,
    make_envs: Callable[..., VectorEnv],
    make_env: EnvFactory | None,
    make_vector_env: MakeVectorEnv | None,
) -> tuple[VectorEnv, ImageOf]:
    """Environments, and a function from their observations to images."""
    if make_vector_env is not None:
        make_envs = partial(make_envs, make_env=make_env)  # which refuses both
        return _open_vector(config, make_envs, make_vector_env)
    envs = make_envs(config, make_env=make_env)
    if seen := _seen(envs):
        return envs, seen
    envs.close()
    return _open_rendered(config, envs.name, make_envs, make_env)


def _open_vector(
    config: Config, make_envs: Callable[..., VectorEnv], make_vector_env: MakeVectorEnv
) -> tuple[VectorEnv, ImageOf]:
    """A user's own vector environment, and what it shows: its observations, or its `render()`."""
    made: list[gym.vector.VectorEnv[Any, Any, Any]] = []

    def make(num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
        made.append(make_vector_env(num_envs))
        return made[-1]

    envs = make_envs(config, make_vector_env=make)
    if seen := _seen(envs):
        return envs, seen
    if made[-1].render_mode != "rgb_array":
        envs.close()
        raise ValueError(f"{envs.name} has no images to film; make it with render_mode='rgb_array'")

    def images(_: np.ndarray) -> np.ndarray:
        rendered = made[-1].render()
        if rendered is None or len(rendered) != envs.num_envs:
            shown = "nothing" if rendered is None else f"{len(rendered)} images"
            raise ValueError(
                f"{envs.name}: render() of the vector environment returned {shown}; "
                f"one for each of its {envs.num_envs} environments was expected"
            )
        return np.stack(rendered)

    return envs, images


def _seen(envs: VectorEnv) -> ImageOf | None:
    """From observations that are images to `[B, H, W, 3]`; None of other observations."""
    shape = tuple(envs.observation_space.shape or ())
    if len(shape) != 3 or envs.observation_space.dtype != np.uint8:
        return None
    return lambda obs: _as_rgb(obs, shape)


def _open_rendered(
    config: Config, name: str, make_envs: Callable[..., VectorEnv], make_env: EnvFactory | None
) -> tuple[VectorEnv, ImageOf]:
    """Gymnasium's environment of the same name, which can draw itself."""
    made: list[gym.Env[Any, Any]] = []
    options: dict[str, Any] = {}
    env_id = name.rpartition(":")[2]
    spec = None if make_env else gym.registry.get(env_id)
    is_mujoco = spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco.")
    if is_mujoco:  # else the camera stands where it is, and the runner leaves the image
        options["camera_name"] = "track"
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not look for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

    def make() -> gym.Env[Any, Any]:
        env = make_env() if make_env else gym.make(env_id, render_mode="rgb_array", **options)
        made.append(env)
        return env

    try:
        if make_env is None:
            options |= options_for(gym.spec(env_id), for_evaluation(config.env).options)
        # What is drawn must be in this process, and is made here: knobs of other back ends have no
        # effect on it.
        here = {"parallel": "sync", "num_threads": None, "pin_threads": True, "options": Options()}
        envs = make_envs(replace(config, env=replace(config.env, **here)), make_env=make)
    except gym.error.Error as error:
        why = f"its observations are vectors, and Gymnasium cannot draw it ({error})"
        raise ValueError(f"{name} has no images to film: {why}") from None
    if any(env.render_mode != "rgb_array" for env in made):
        envs.close()
        raise ValueError(f"{name} has no images to film; make it with render_mode='rgb_array'")

    # The first one was made to read its spaces; the others are made when the environments are first
    # reset.
    cameras: list[RayCamera] = []

    def images(obs: np.ndarray) -> np.ndarray:
        shown = made[-envs.num_envs :]
        if is_mujoco:
            cameras.extend(RayCamera(env) for env in shown[len(cameras) :])
            return np.stack([camera.draw() for camera in cameras])
        try:
            return np.stack([np.asarray(env.render()) for env in shown])
        except gym.error.DependencyNotInstalled as error:
            raise ImportError(f"drawing {name} needs a package that is missing: {error}") from error

    return envs, images


def _as_rgb(obs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Observations of either layout as `[B, H, W, 3]`; of stacked gray frames, the newest."""
    channels = image_shape(shape)[2]
    images = obs if shape[2] == channels else obs.transpose(0, 2, 3, 1)
    return images if channels == 3 else images[..., -1:].repeat(3, axis=-1)


@contextmanager
def _writer(path: Path, *, fps: int, size: int) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that adds images to the film at `path`."""
    try:
        import imageio_ffmpeg
    except ImportError:
        raise ImportError("films need imageio-ffmpeg: pip install 'phasicrl[video]'") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    stream: Any = None

    def write(image: np.ndarray) -> None:
        nonlocal stream
        large = np.ascontiguousarray(enlarge(image, size))
        if stream is None:
            settings = {"codec": "libx264", "output_params": ["-movflags", "+faststart"]}
            height, width, _ = large.shape
            stream = imageio_ffmpeg.write_frames(
                str(path), (width, height), fps=fps, macro_block_size=2, **settings
            )
            stream.send(None)
        stream.send(large)

    try:
        yield write
    finally:
        if stream is not None:
            stream.close()
