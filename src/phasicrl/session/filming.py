"""Films of an agent, from the images it sees or from the environment's own rendering.

No screen is needed. Kind: effects.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.config import Config, Levels, Options, PolicyKind, Precision
from phasicrl.envs.gymnasium import get_make_options
from phasicrl.envs.make import for_evaluation
from phasicrl.envs.protocol import VectorEnv
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.host.machine import optional_module
from phasicrl.models.agent import Agent, AgentOutput
from phasicrl.models.encoders import image_shape
from phasicrl.session.evaluation import Episodes, Seen, make_evaluation_envs, play
from phasicrl.session.overlay import Overlay
from phasicrl.session.raycast import RayCamera

MakeEnv = Callable[[], gym.Env]
ImageOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From observations, and where an episode has just ended, `[B]`, to images `[B, H, W, 3]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Film:
    """What is filmed, and how it looks.

    Attributes:
        num_envs: environments side by side, in a square.
        episodes: played to their end, over all environments.
        policy: drawn or most likely actions.
        levels: see `make_evaluation_envs`.
        seed: another one, other episodes.
        fps: images a second.
        size: at least this many pixels high and wide.
        overlay: whether return, value and policy are shown under each image.
    """

    num_envs: int = 1
    episodes: int = 1
    policy: PolicyKind = "sampled"
    levels: Levels = "unseen"
    seed: int = 0
    fps: int = 15
    size: int = 512
    overlay: bool = False


@torch.inference_mode()
def film_episodes(
    load: Callable[[VectorEnv], Agent],
    config: Config,
    output: Path,
    film: Film,
    *,
    precision: Precision = "fp32",
    **own: Any,
) -> Episodes:
    """Play episodes, and film them.

    Args:
        load: gives the agent for environments.
        config: of the run.
        output: the file, H.264.
        film: what is filmed.
        precision: in which the encoders act.
        own: `make_env` or `make_vector_env`, see `evaluate`.

    Raises:
        ValueError: nothing to be seen in this environment.
        ImportError: the encoder is not installed, or what draws the overlay.
    """
    num_envs, which = film.num_envs, {"levels": film.levels, "seed": film.seed}
    envs, image_of = _open(config, partial(make_evaluation_envs, num_envs=num_envs, **which), **own)
    with closing(envs), _writer(output, fps=film.fps, size=film.size) as write:
        agent = load(envs)
        overlay = Overlay(agent.policy_head) if film.overlay else None
        strip: Callable[[int, int], np.ndarray] | None = None
        returns, side = torch.zeros(num_envs), film.size // math.ceil(math.sqrt(num_envs))

        def show(obs: Tensor, ended: Tensor) -> None:
            images = image_of(obs.numpy(), ended.numpy())
            if strip is not None:
                large = [enlarge(image, side) for image in images]
                width = large[0].shape[1]
                images = np.stack(
                    [np.vstack([one, strip(k, width)]) for k, one in enumerate(large)]
                )
            write(tile(images))

        def show_choice(seen: Seen, said: AgentOutput, action: Tensor) -> None:
            nonlocal strip
            returns[seen.first] = 0
            if overlay is not None:
                strip = partial(overlay.strip, said, action, returns)
            show(seen.obs, torch.zeros_like(seen.first))

        def add(*told: Any) -> None:
            returns.copy_(told[-1].returns)

        return play(
            agent, envs, episodes=film.episodes, policy=film.policy, seed=film.seed,
            on_choice=show_choice, on_step=add, on_last=show, precision=precision,
        )  # fmt: skip


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
    make_env: MakeEnv | None,
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
    """A user's own vector environment, and what it shows: its observations, or its `render()`.

    One that resets in the step of the end cannot draw how that was: the image before is shown.
    """
    made: list[_Drawn] = []

    def make(num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
        vector = make_vector_env(num_envs)
        made.append(_Drawn(vector, partial(_render_all, vector)))
        return vector

    envs = make_envs(config, make_vector_env=make)
    if seen := _seen(envs):
        return envs, seen
    if made[-1].env.render_mode != "rgb_array":
        envs.close()
        raise ValueError(f"{envs.name} has no images to film; make it with render_mode='rgb_array'")

    def images(_: np.ndarray, ended: np.ndarray) -> np.ndarray:
        return np.where(ended[:, None, None, None], made[-1].last(), made[-1].now())

    return envs, images


def _render_all(vector: gym.vector.VectorEnv[Any, Any, Any]) -> np.ndarray:
    """The images of a user's vector environment, `[B, H, W, 3]`."""
    rendered = vector.render()
    if rendered is None or len(rendered) != vector.num_envs:
        shown = "nothing" if rendered is None else f"{len(rendered)} images"
        raise ValueError(
            f"render() of the vector environment returned {shown}; "
            f"one for each of its {vector.num_envs} environments was expected"
        )
    return np.stack(rendered)


class _Drawn:
    """What an environment shows, and what it showed before its latest reset.

    Environments begin anew in the step of the end. After that it is too late to draw the end.

    Args:
        env: of Gymnasium, a single one or a vector of them. Its `reset` is replaced.
        draw: gives its image, or its images.
    """

    def __init__(self, env: Any, draw: Callable[[], Any]) -> None:
        self.env, self._draw, self._reset = env, draw, env.reset
        self._last: np.ndarray | None = None
        env.reset = self._draw_and_reset

    def now(self) -> np.ndarray:
        """Draw it as it is.

        Raises:
            ValueError: what it shows is no image; ffmpeg would take its bytes as they are.
        """
        image = np.array(self._draw())
        if image.dtype != np.uint8 or image.ndim < 3 or image.shape[-1] != 3:
            raise ValueError(
                f"render() returned an image {image.shape} of {image.dtype}; "
                "[height, width, 3] of uint8 was expected"
            )
        self._last = image
        return image

    def last(self) -> np.ndarray:
        """How it was when it was drawn last; it is drawn before each reset."""
        return self.now() if self._last is None else self._last

    def _draw_and_reset(self, **given: Any) -> Any:
        if self._last is not None:  # some environments cannot be drawn before they have begun
            self.now()
        return self._reset(**given)


def _seen(envs: VectorEnv) -> ImageOf | None:
    """From observations that are images to `[B, H, W, 3]`; None of other observations."""
    shape = tuple(envs.observation_space.shape or ())
    if len(shape) != 3 or envs.observation_space.dtype != np.uint8:
        return None
    return lambda obs, _: _as_rgb(obs, shape)


def _open_rendered(
    config: Config,
    name: str,
    make_envs: Callable[..., VectorEnv],
    make_env: MakeEnv | None,
) -> tuple[VectorEnv, ImageOf]:
    """Gymnasium's environment of the same name, which can draw itself."""
    made: list[_Drawn] = []
    options: dict[str, Any] = {}
    env_id = name.rpartition(":")[2]
    spec = None if make_env else gym.registry.get(env_id)
    is_mujoco = spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco.")
    if is_mujoco:  # else the camera stands where it is, and the runner leaves the image
        options["camera_name"] = "track"
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame must not look for a screen
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")

    camera_of = functools.cache(RayCamera)  # which can be made after the first reset only

    def draw(env: gym.Env[Any, Any]) -> Any:
        try:
            return camera_of(env).draw() if is_mujoco else env.render()
        except gym.error.DependencyNotInstalled as error:
            raise ImportError(f"drawing {name} needs a package that is missing: {error}") from error

    def make() -> gym.Env[Any, Any]:
        env = make_env() if make_env else gym.make(env_id, render_mode="rgb_array", **options)
        made.append(_Drawn(env, partial(draw, env)))
        return env

    try:
        if make_env is None:
            options |= get_make_options(gym.spec(env_id), for_evaluation(config.env).options)
        # What is drawn must be in this process, and is made here: knobs of other back ends have no
        # effect on it.
        here = {"parallel": "sync", "num_threads": None, "options": Options()}
        envs = make_envs(replace(config, env=replace(config.env, **here)), make_env=make)
    except gym.error.Error as error:
        why = f"its observations are vectors, and Gymnasium cannot draw it ({error})"
        raise ValueError(f"{name} has no images to film: {why}") from None
    if any(drawn.env.render_mode != "rgb_array" for drawn in made):
        envs.close()
        raise ValueError(f"{name} has no images to film; make it with render_mode='rgb_array'")

    # The first one was made to read its spaces; the others are made when the environments are first
    # reset.
    def images(_: np.ndarray, ended: np.ndarray) -> np.ndarray:
        shown = zip(made[-envs.num_envs :], ended, strict=True)
        return np.stack([drawn.last() if end else drawn.now() for drawn, end in shown])

    return envs, images


def _as_rgb(obs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Observations of either layout as `[B, H, W, 3]`; of stacked gray frames, the newest."""
    channels = image_shape(shape)[2]
    images = obs if shape[2] == channels else obs.transpose(0, 2, 3, 1)
    return images if channels == 3 else images[..., -1:].repeat(3, axis=-1)


@contextmanager
def _writer(path: Path, *, fps: int, size: int) -> Iterator[Callable[[np.ndarray], None]]:
    """A function that adds images to the film at `path`."""
    imageio_ffmpeg = optional_module("imageio_ffmpeg", "films need imageio-ffmpeg", "video")
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
