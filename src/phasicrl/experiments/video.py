"""Films of an agent, from the images it sees or from the environment's own rendering; no screen needed. Kind: effects."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from torch import Generator

from phasicrl.config import Config, Options
from phasicrl.envs.gymnasium import options_for
from phasicrl.envs.make import for_evaluation
from phasicrl.envs.protocol import VectorEnv
from phasicrl.experiments.evaluate import Evaluation, Levels, PolicyKind, acting_precision, load_agent, make_evaluation_envs, play
from phasicrl.experiments.raycast import RayCamera
from phasicrl.models.agent import EncoderFactory
from phasicrl.models.encoders import image_shape
from phasicrl.runs.directory import RunDirectory


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
    make_encoder: EncoderFactory | None = None,
) -> tuple[Path, Evaluation]:
    """Film the agent of a run.

    Args:
        run_dir: Run directory.
        output: The file, H.264; otherwise `videos/POLICY-seedSEED.mp4` in the run directory.
        num_envs: Environments side by side, in a square.
        episodes: Episodes played to their end, over all environments.
        policy: Drawn or most likely actions.
        levels: Procgen: the full distribution of levels, or those of the training.
        seed: Another seed, other episodes.
        fps: Images a second.
        size: At least this many pixels high and wide; images are enlarged by whole factors.
        make_env: what training was given, for runs on an environment of your own.
        make_encoder: what training was given, for runs with a network of your own.

    Returns:
        The file, and the episodes it shows.

    Raises:
        ValueError: not a run directory, or nothing to be seen in this environment.
        ImportError: the encoder is not installed; the message says how.
    """
    if episodes < 1 or num_envs < 1:
        raise ValueError(f"episodes is {episodes} and num_envs is {num_envs}; give at least 1 of each")
    files = RunDirectory(Path(run_dir))
    config = files.config_for(make_env=make_env, make_encoder=make_encoder)
    output = output or files.path / "videos" / f"{policy}-seed{seed}.mp4"
    output.parent.mkdir(parents=True, exist_ok=True)
    envs, image_of = _open(config, num_envs=num_envs, levels=levels, seed=seed, make_env=make_env)
    try:
        agent = load_agent(files, config, envs, make_encoder=make_encoder)
        with _writer(output, fps=fps, size=size) as write:
            generator = Generator().manual_seed(seed)
            result = play(
                agent, envs, episodes=episodes, policy=policy, generator=generator, precision=acting_precision(files),
                on_obs=lambda obs: write(tile(image_of(obs.numpy()))),
            )  # fmt: skip
    finally:
        envs.close()
    return output, result


def tile(images: np.ndarray) -> np.ndarray:
    """`[B, H, W, 3]` images as one, in a square of ⌈√B⌉ × ⌈√B⌉ (rows that stay empty are left out)."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    _, height, width, depth = images.shape
    sheet = np.zeros((rows * columns, height, width, depth), dtype=images.dtype)
    sheet[: len(images)] = images
    return sheet.reshape(rows, columns, height, width, depth).swapaxes(1, 2).reshape(rows * height, columns * width, depth)


def enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Repeat pixels by the smallest whole factor that makes both sides at least `size`, and pad odd sides to even (H.264 asks for it)."""
    height, width, _ = image.shape
    factor = max(1, math.ceil(size / min(height, width)))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((0, large.shape[0] % 2), (0, large.shape[1] % 2), (0, 0)))


def _open(
    config: Config, *, num_envs: int, levels: Levels, seed: int, make_env: Callable[[], gym.Env] | None
) -> tuple[VectorEnv, Callable[[np.ndarray], np.ndarray]]:
    """Environments, and a function from their observations to images `[B, H, W, 3]`."""
    envs = make_evaluation_envs(config, num_envs=num_envs, levels=levels, seed=seed, make_env=make_env)
    shape = tuple(envs.observation_space.shape or ())
    if len(shape) == 3 and envs.observation_space.dtype == np.uint8:
        return envs, lambda obs: _as_rgb(obs, shape)
    envs.close()
    return _open_rendered(config, envs.name, num_envs=num_envs, levels=levels, seed=seed, make_env=make_env)


def _open_rendered(
    config: Config, name: str, *, num_envs: int, levels: Levels, seed: int, make_env: Callable[[], gym.Env] | None
) -> tuple[VectorEnv, Callable[[np.ndarray], np.ndarray]]:
    """Gymnasium's environment of the same name, which can draw itself."""
    made: list[gym.Env[Any, Any]] = []
    env_id, given = name.rpartition(":")[2], for_evaluation(config.env).options
    is_mujoco = make_env is None and env_id in gym.registry and str(gym.spec(env_id).entry_point).startswith("gymnasium.envs.mujoco.")
    # Without it the camera stands where it is, and the runner leaves the image.
    options: dict[str, Any] = {"camera_name": "track"} if is_mujoco else {}
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not look for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

    def make() -> gym.Env[Any, Any]:
        made.append(make_env() if make_env else gym.make(env_id, render_mode="rgb_array", **options))
        return made[-1]

    # What is drawn must be in this process, and is made here: knobs of other back ends have no
    # effect on it.
    config = replace(config, env=replace(config.env, parallel="sync", num_threads=None, pin_threads=True, options=Options()))
    try:
        if make_env is None:
            options |= options_for(gym.spec(env_id), given)
        envs = make_evaluation_envs(config, num_envs=num_envs, levels=levels, seed=seed, make_env=make)
    except gym.error.Error as error:
        raise ValueError(f"{name} has no images to film: its observations are vectors, and Gymnasium cannot draw it ({error})") from None
    if any(env.render_mode != "rgb_array" for env in made):
        envs.close()
        raise ValueError(f"{name} has no images to film; make it with render_mode='rgb_array'")

    # The first one was made to read its spaces; the others are made when the environments are first
    # reset.
    cameras: list[RayCamera] = []

    def images(obs: np.ndarray) -> np.ndarray:
        if is_mujoco:
            if not cameras:
                cameras.extend([RayCamera(env) for env in made[-num_envs:]])
            return np.stack([camera.draw() for camera in cameras])
        try:
            return np.stack([np.asarray(env.render()) for env in made[-num_envs:]])
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
    stream: Any = None

    def write(image: np.ndarray) -> None:
        nonlocal stream
        large = enlarge(image, size)
        if stream is None:
            sides = (large.shape[1], large.shape[0])
            stream = imageio_ffmpeg.write_frames(
                str(path), sides, fps=fps, codec="libx264", macro_block_size=2, output_params=["-movflags", "+faststart"]
            )
            stream.send(None)
        stream.send(np.ascontiguousarray(large))

    try:
        yield write
    finally:
        if stream is not None:
            stream.close()
