"""Films of an agent from its observations or from the environment's own rendering.

No screen is needed. Kind: effects.
"""

import inspect
import math
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from phasicrl.config import ActionSelection, Levels
from phasicrl.config_io import atomic_write, check_output_file
from phasicrl.envs.checks import convert_errors
from phasicrl.envs.make import get_gym_maker
from phasicrl.lab.film.overlay import Overlay
from phasicrl.lab.film.raycast import RaycastCamera
from phasicrl.models.agent import Agent
from phasicrl.models.encoders import has_channels_first
from phasicrl.system.machine import import_optional
from phasicrl.training.evaluate import Evaluation, SavedAgent

MakeEnvs = Callable[[SavedAgent], Any]
"""Function that makes the environments of an agent."""
GetImages = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Function of observations and ends of episodes, `[B]`, that returns images `[B, H, W, 3]`."""


def film_episodes(
    saved: SavedAgent, load_agent: Callable[[Any], Agent], output: Path, *, num_envs: int = 1,
    episodes: int = 1, policy: ActionSelection = "sampled", levels: Levels = "unseen",
    seed: int = 0, fps: int | None = None, size: int = 512, overlay: bool = False,
) -> Evaluation:  # fmt: skip
    """Record a video of evaluation episodes, and return their results.

    Args:
        saved: configuration and environments of the run.
        load_agent: function that returns the agent for environments.
        output: H.264 file.
        num_envs: environments side by side, in a square.
        episodes: episodes over all environments.
        policy: kind of actions: sampled, or greedy (most likely).
        levels: levels of Procgen.
        seed: seed of the episodes.
        fps: images per second; None for the `render_fps` of a rendered environment, else 15.
        size: minimum height and width in pixels.
        overlay: show return, value and policy under each image.

    Raises:
        ValueError: the environment has no images.
        ImportError: the encoder, or the package that draws the overlay, is not installed.
    """
    envs, get_images, rate = _make_filmed_envs(saved, lambda x: x.make_envs(num_envs, levels, seed))
    with closing(envs), _open_film(output, fps=fps or rate, size=size) as write_to_film:
        agent = load_agent(envs)
        drawing = Overlay(agent) if overlay else None
        draw_strip: Callable[[int, int], np.ndarray] | None = None
        returns, side = torch.zeros(num_envs), size // math.ceil(math.sqrt(num_envs))

        def write_frame(obs: Tensor, ended: Tensor) -> None:
            images = get_images(obs.numpy(), ended.numpy())
            if draw_strip is not None:
                large = [enlarge(image, side) for image in images]
                strips = (draw_strip(index, image.shape[1]) for index, image in enumerate(large))
                images = np.stack([np.vstack(pair) for pair in zip(large, strips, strict=True)])
            write_to_film(tile(images))

        def write_step_frame(inputs: Any, distribution: Any, actions: Tensor) -> None:
            nonlocal draw_strip
            returns[inputs.first] = 0
            if drawing is not None:
                steps = (inputs.obs.unsqueeze(1), inputs.first.unsqueeze(1), inputs.state)
                value = agent.value(*steps, precision=saved.config.compute.policy_precision)
                draw_strip = partial(drawing.draw_strip, distribution, value, actions, returns)
            write_frame(inputs.obs, torch.zeros_like(inputs.first))

        def copy_returns(*step: Any) -> None:
            returns.copy_(step[-1].returns)

        return saved.run_episodes(
            agent, envs, levels, episodes=episodes, policy=policy, seed=seed,
            on_choice=write_step_frame, on_step=copy_returns, on_episode_end=write_frame,
        )  # fmt: skip


def tile(images: np.ndarray) -> np.ndarray:
    """Arrange `[B, H, W, 3]` images in ⌈√B⌉ columns, with gray lines between them."""
    columns, line = math.ceil(math.sqrt(len(images))), images.shape[2] // 32
    cells = np.pad(images, ((0, -len(images) % columns), (0, 0), (0, 0), (0, 0)))
    cells = np.pad(cells, ((0, 0), (0, line), (0, line), (0, 0)), constant_values=128)
    rows = [np.hstack([*cells[i : i + columns]]) for i in range(0, len(cells), columns)]
    return np.vstack(rows)[: -line or None, : -line or None]


def enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Repeat pixels by the smallest whole factor that makes both sides at least `size`.

    Odd sides are padded to even ones, as H.264 requires.
    """
    height, width, _ = image.shape
    factor = max(1, math.ceil(size / min(height, width)))
    large = image.repeat(factor, axis=0).repeat(factor, axis=1)
    return np.pad(large, ((0, large.shape[0] % 2), (0, large.shape[1] % 2), (0, 0)))


class _Renderer:
    """Images of an environment, with an image before each reset.

    Environments reset in the step in which an episode ends, too late to draw the end.

    Args:
        env: environment or vector environment of Gymnasium. Its `reset` is replaced.
        draw: function that returns the image or images.
        shape: leading dimensions of the images.
    """

    def __init__(self, env: Any, draw: Callable[[], Any], shape: tuple[int, ...] = ()) -> None:
        self.env, self._draw, self._shape, self._reset = env, draw, shape, env.reset
        self._last: np.ndarray | None = None
        self._peak = 0.0  # the largest float so far, over 1 if they are from 0 to 255
        env.reset = self._reset_after_drawing

    def draw(self) -> np.ndarray:
        """Draw the current state as bytes without alpha; convert floats in [0, 1] or [0, 255].

        Raises:
            ValueError: the result is not an image; ffmpeg would take other arrays as bytes.
            EnvError: the environment raised an error.
        """
        image, what = np.empty(0), "is not implemented"
        text = f"render() of {type(getattr(self.env, 'unwrapped', self.env)).__name__}"
        with convert_errors(text), suppress(NotImplementedError):
            given = self._draw()
            what = f"returned a {type(given).__name__}, not an array"
            with suppress(ValueError):
                image = np.array(given)
                if image.ndim:
                    what = f"returned an array {image.shape} of {image.dtype}"
        if not self._shape and image.ndim == 4:
            image = image[-1]  # the newest of a list
        if image.size and image.dtype.kind == "f":
            what += f" from {image.min():g} to {image.max():g}"
            self._peak = max(self._peak, image.max())
            if image.min() >= 0 and self._peak <= 255:
                image = np.rint(image * (255 if self._peak <= 1 else 1)).astype(np.uint8)
        size = (image if self._last is None else self._last).shape[-3:-1]
        shapes = [(*self._shape, *size, channels) for channels in (3, 4)]
        if image.dtype != np.uint8 or image.ndim < 3 or not image.size or image.shape not in shapes:
            expected = ", ".join([*map(str, self._shape), "height, width, 3 or 4"])
            rule = f"[{expected}] of one size, of uint8 or of float from 0 to 1 or 255"
            raise ValueError(f"{text} {what}; expected {rule}")
        image = self._last = image[..., :3]
        return image

    def get_last_image(self) -> np.ndarray:
        """Return the last drawn image; draws one if there is none."""
        return self.draw() if self._last is None else self._last

    def _reset_after_drawing(self, **given: Any) -> Any:
        if self._last is not None:  # some environments cannot draw before their first reset
            self.draw()
        return self._reset(**given)


def _make_filmed_envs(saved: SavedAgent, make_envs: MakeEnvs) -> tuple[Any, GetImages, float]:
    """Make environments, a function that returns their images, and images per second.

    Images are the observations, else the result of `render()`. A vector environment that resets in
    the step of the end cannot draw the end; the image before is repeated.
    """
    renderers: list[_Renderer] = []
    if make_vector_env := saved.env_objects["make_vector_env"]:

        def make_vector(num_envs: int) -> gym.vector.VectorEnv[Any, Any, Any]:
            vector = make_vector_env(num_envs)
            renderers.append(_Renderer(vector, getattr(vector, "render", list), (num_envs,)))
            return vector

        saved = replace(saved, env_objects={"make_vector_env": make_vector})
    envs = make_envs(saved)
    shape = tuple(envs.observation_space.shape or ())
    if len(shape) == 3 and envs.observation_space.dtype == np.uint8:
        channels_first = has_channels_first(shape, saved.config.model.image_layout)
        return envs, lambda obs, _: _to_rgb(obs, channels_first), 15
    if not make_vector_env:
        envs.close()
        envs = _make_gym_envs(saved, envs.name, make_envs, renderers)
    modes = [getattr(each.env, "render_mode", None) for each in renderers]
    if not {*modes} <= {"rgb_array", "rgb_array_list"}:
        envs.close()
        raise ValueError(
            f"{envs.name} has no images to film; expected render_mode='rgb_array' and render()"
        )

    def render_images(_: np.ndarray, ended: np.ndarray) -> np.ndarray:
        if make_vector_env:
            vector = renderers[-1]
            return np.where(ended[:, None, None, None], vector.get_last_image(), vector.draw())
        pairs = zip(renderers, ended, strict=True)
        return np.stack([each.get_last_image() if end else each.draw() for each, end in pairs])

    return envs, render_images, getattr(renderers[-1].env, "metadata", {}).get("render_fps") or 15


def _make_gym_envs(saved: SavedAgent, name: str, make: MakeEnvs, renderers: list[_Renderer]) -> Any:
    """Make Gymnasium's environments of the same name, which render images."""
    config, user_env, env_id = saved.config, saved.env_objects["make_env"], name.partition(":")[2]
    spec = gym.registry.get(env_id, gym.registry.get(env_id.rpartition(":")[2]))
    if user_env and "render_mode" in inspect.signature(user_env).parameters:
        user_env = partial(user_env, render_mode="rgb_array")
    is_mujoco = not user_env and str(spec and spec.entry_point).startswith("gymnasium.envs.mujoco.")
    # A fixed camera would lose a runner.
    options = {"render_mode": "rgb_array"} | ({"camera_name": "track"} if is_mujoco else {})
    get_camera = cache(RaycastCamera)  # possible after the first reset

    def draw_env(env: gym.Env[Any, Any]) -> Any:
        return get_camera(env).draw() if is_mujoco else env.render()

    free_indices: list[int] = []  # of closed environments: a first one, and those that failed

    def make_env() -> gym.Env[Any, Any]:
        env, index = gym.Wrapper(maker()), free_indices.pop(0) if free_indices else len(renderers)
        renderers[index : index + 1] = [_Renderer(env, partial(draw_env, env))]

        def close_and_free_index() -> None:  # not called by an environment that closes itself
            free_indices.append(index)
            env.env.close()

        env.close = close_and_free_index
        return env

    try:
        maker = user_env or get_gym_maker(env_id, config.env, **options)
        # The environments run in this process, without options of other back ends.
        changes = {"env.vectorization": "sync", "env.num_threads": None, "env.options": {}}
        objects = {"make_env": make_env, "make_vector_env": None}
        return make(replace(saved, config=config.with_updates(changes), env_objects=objects))
    except gym.error.Error as error:
        rule = "images as observations, or an environment that Gymnasium can draw"
        raise ValueError(f"{name} has no images to film; expected {rule} ({error})") from None


def _to_rgb(obs: np.ndarray, channels_first: bool) -> np.ndarray:
    """Convert observations of either layout to `[B, H, W, 3]`, gray frames to the newest."""
    images = obs.transpose(0, 2, 3, 1) if channels_first else obs
    return images if images.shape[-1] == 3 else images[..., -1:].repeat(3, axis=-1)


@contextmanager
def _open_film(path: Path, *, fps: float, size: int) -> Iterator[Callable[[np.ndarray], None]]:
    """Open a film, and yield a function that adds an image."""
    imageio_ffmpeg = import_optional("imageio_ffmpeg", "films need imageio-ffmpeg")
    check_output_file(path)
    stream: Any = None

    def write_to_film(image: np.ndarray) -> None:
        nonlocal stream
        large = np.ascontiguousarray(enlarge(image, size))
        if stream is None:
            temporary.open("ab").close()  # ffmpeg's errors do not say what failed
            stream = imageio_ffmpeg.write_frames(
                str(temporary), large.shape[1::-1], fps=fps, macro_block_size=2,
                output_params=["-movflags", "+faststart", "-f", "mp4"],
            )  # fmt: skip
            stream.send(None)
        stream.send(large)

    with atomic_write(path) as temporary:
        try:
            yield write_to_film
        finally:
            if stream is not None:
                stream.close()
        # Ask ffmpeg for its first frames: imageio does not see that it has failed.
        words = [imageio_ffmpeg.get_ffmpeg_exe(), "-nostdin", "-i", str(temporary), "-c", "copy"]
        words += ["-t", "0.1", "-f", "null", "-"]
        end = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if end.returncode:
            raise OSError(f"{path} is incomplete; the disk may be full")
