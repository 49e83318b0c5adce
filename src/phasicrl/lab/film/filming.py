"""Films of an agent, from the images it sees or from the environment's own rendering.

No screen is needed. Kind: effects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.config import Levels, PolicyKind
from phasicrl.envs.make import gymnasium_maker
from phasicrl.lab.film.overlay import Overlay
from phasicrl.lab.film.raycast import RayCamera
from phasicrl.models.agent import Agent
from phasicrl.system.machine import optional_module
from phasicrl.training.evaluate import Evaluation, SavedAgent
from phasicrl.training.evaluation import play

MakeEnvs = Callable[[SavedAgent], Any]
"""Makes the environments of an agent."""
ImageOf = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From observations, and where an episode has just ended, `[B]`, to images `[B, H, W, 3]`."""


@torch.inference_mode()
def film_episodes(
    saved: SavedAgent, load: Callable[[Any], Agent], output: Path, *, num_envs: int = 1,
    episodes: int = 1, policy: PolicyKind = "sampled", levels: Levels = "unseen", seed: int = 0,
    fps: int = 15, size: int = 512, overlay: bool = False,
) -> Evaluation:  # fmt: skip
    """Film evaluation episodes.

    Args:
        saved: configuration and environments of the run.
        load: returns the agent for environments.
        output: H.264 file.
        num_envs: environments side by side, in a square.
        episodes: episodes over all environments.
        policy: sampled or most likely actions.
        levels: levels of Procgen.
        seed: seed of the episodes.
        fps: images per second.
        size: minimum height and width in pixels.
        overlay: whether return, value and policy are shown under each image.

    Raises:
        ValueError: the environment has no images.
        ImportError: the encoder, or the package that draws the overlay, is not installed.
    """
    envs, image_of = _open(saved, lambda saved: saved.make_envs(num_envs, levels, seed))
    with closing(envs), _writer(output, fps=fps, size=size) as write:
        agent = load(envs)
        shown = Overlay(agent) if overlay else None
        strip: Callable[[int, int], np.ndarray] | None = None
        returns, side = torch.zeros(num_envs), size // math.ceil(math.sqrt(num_envs))

        def on_last(obs: Tensor, ended: Tensor) -> None:
            images = image_of(obs.numpy(), ended.numpy())
            if strip is not None:
                large = [enlarge(image, side) for image in images]
                strips = (strip(index, image.shape[1]) for index, image in enumerate(large))
                images = np.stack([np.vstack(pair) for pair in zip(large, strips, strict=True)])
            write(tile(images))

        def on_choice(seen: Any, output: Any, action: Tensor) -> None:
            nonlocal strip
            returns[seen.first] = 0
            if shown is not None:
                strip = partial(shown.strip, output, action, returns)
            on_last(seen.obs, torch.zeros_like(seen.first))

        def on_step(*step: Any) -> None:
            returns.copy_(step[-1].returns)

        played = play(
            agent, envs, episodes=episodes, policy=policy, seed=seed,
            on_choice=on_choice, on_step=on_step, on_last=on_last,
            precision=saved.config.compute.policy_precision,
        )  # fmt: skip
    return Evaluation(policy, *played, levels)


def tile(images: np.ndarray) -> np.ndarray:
    """Arrange `[B, H, W, 3]` images in a square of ⌈√B⌉ columns, without empty rows."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    sheet = np.zeros((rows * columns, *images.shape[1:]), images.dtype)
    sheet[: len(images)] = images
    return np.vstack([np.hstack(row) for row in sheet.reshape(rows, columns, *images.shape[1:])])


def enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Repeat pixels by the smallest whole factor that makes both sides at least `size`.

    Odd sides are padded to even ones, as H.264 requires.
    """
    height, width, _ = image.shape
    factor = max(1, math.ceil(size / min(height, width)))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((0, large.shape[0] % 2), (0, large.shape[1] % 2), (0, 0)))


class _Drawn:
    """Images of an environment, also of the one before its latest reset.

    Environments reset in the step in which an episode ends, when it is too late to draw the end.

    Args:
        env: environment or vector environment of Gymnasium. Its `reset` is replaced.
        draw: returns its image or images.
        shape: leading dimensions of what `draw` returns.
    """

    def __init__(self, env: Any, draw: Callable[[], Any], shape: tuple[int, ...] = ()) -> None:
        self.env, self._draw, self._shape, self._reset = env, draw, shape, env.reset
        self._last: np.ndarray | None = None
        env.reset = self._draw_and_reset

    def now(self) -> np.ndarray:
        """Draw the current state.

        Raises:
            ValueError: no image was drawn; ffmpeg would take other arrays as bytes.
        """
        image = np.array(self._draw())
        if image.dtype != np.uint8 or (*image.shape[:-3], *image.shape[-1:]) != (*self._shape, 3):
            expected = ", ".join([*map(str, self._shape), "height, width, 3"])
            raise ValueError(
                f"render() returned an array {image.shape} of {image.dtype}; expected "
                f"[{expected}] of uint8"
            )
        self._last = image
        return image

    def last(self) -> np.ndarray:
        """Return the latest image; each reset draws one before it."""
        return self.now() if self._last is None else self._last

    def _draw_and_reset(self, **given: Any) -> Any:
        if self._last is not None:  # some environments cannot be drawn before their first reset
            self.now()
        return self._reset(**given)


def _open(saved: SavedAgent, make_envs: MakeEnvs) -> tuple[Any, ImageOf]:
    """Make environments, and a function that returns their images.

    Images are the observations, else the environment's `render()`. A vector environment that resets
    in the step of the end cannot draw it: the image before is repeated.
    """
    drawn: list[_Drawn] = []
    if make_vector_env := saved.env_objects["make_vector_env"]:

        def make_vector(num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
            vector = make_vector_env(num_envs)
            drawn.append(_Drawn(vector, vector.render, (num_envs,)))
            return vector

        saved = replace(saved, env_objects={"make_vector_env": make_vector})
    envs = make_envs(saved)
    shape = tuple(envs.observation_space.shape or ())
    if len(shape) == 3 and envs.observation_space.dtype == np.uint8:
        return envs, lambda obs, _: _as_rgb(obs, shape)
    if not make_vector_env:
        envs.close()
        envs = _make_drawn(saved, envs.name, make_envs, drawn)
    if any(each.env.render_mode != "rgb_array" for each in drawn):
        envs.close()
        raise ValueError(f"{envs.name} has no images to film; make it with render_mode='rgb_array'")

    def images(_: np.ndarray, ended: np.ndarray) -> np.ndarray:
        if make_vector_env:
            return np.where(ended[:, None, None, None], drawn[-1].last(), drawn[-1].now())
        # The first one was made to read its spaces, the others at the first reset.
        shown = zip(drawn[-envs.num_envs :], ended, strict=True)
        return np.stack([each.last() if end else each.now() for each, end in shown])

    return envs, images


def _make_drawn(saved: SavedAgent, name: str, make_envs: MakeEnvs, drawn: list[_Drawn]) -> Any:
    """Make Gymnasium's environments of the same name, which can be drawn."""
    config, make_env, env_id = saved.config, saved.env_objects["make_env"], name.rpartition(":")[2]
    spec = None if make_env else gym.registry.get(env_id)
    is_mujoco = spec is not None and str(spec.entry_point).startswith("gymnasium.envs.mujoco.")
    # A fixed camera would lose a runner.
    options = {"render_mode": "rgb_array"} | ({"camera_name": "track"} if is_mujoco else {})
    camera_of = functools.cache(RayCamera)  # can be made after the first reset only

    def draw(env: gym.Env[Any, Any]) -> Any:
        try:
            return camera_of(env).draw() if is_mujoco else env.render()
        except gym.error.DependencyNotInstalled as error:
            raise ImportError(f"drawing {name} needs a package that is missing: {error}") from error

    def make() -> gym.Env[Any, Any]:
        env = maker()
        drawn.append(_Drawn(env, partial(draw, env)))
        return env

    try:
        maker = make_env or partial(gymnasium_maker(env_id, config.env), **options)
        # Drawn environments are made here, in this process: options of back ends have no effect.
        here = {"env.parallel": "sync", "env.num_threads": None, "env.options": {}}
        objects = {"make_env": make, "make_vector_env": None}
        return make_envs(replace(saved, config=config.with_updates(here), env_objects=objects))
    except gym.error.Error as error:
        raise ValueError(
            f"{name} has no images to film: its observations are vectors, and Gymnasium cannot "
            f"draw it ({error})"
        ) from None


def _as_rgb(obs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert observations of either layout to `[B, H, W, 3]`; of gray frames, the newest."""
    images = obs.transpose(0, 2, 3, 1) if shape[0] < min(shape[1:]) else obs
    return images if images.shape[-1] == 3 else images[..., -1:].repeat(3, axis=-1)


@contextmanager
def _writer(path: Path, *, fps: int, size: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Open a film; returns a function that adds an image."""
    imageio_ffmpeg = optional_module("imageio_ffmpeg", "films need imageio-ffmpeg")
    path.parent.mkdir(parents=True, exist_ok=True)
    stream: Any = None

    def write(image: np.ndarray) -> None:
        nonlocal stream
        large = np.ascontiguousarray(enlarge(image, size))
        if stream is None:
            stream = imageio_ffmpeg.write_frames(
                str(path), large.shape[1::-1], fps=fps, macro_block_size=2,
                output_params=["-movflags", "+faststart"],
            )  # fmt: skip
            stream.send(None)
        stream.send(large)

    try:
        yield write
    finally:
        if stream is not None:
            stream.close()
