"""Films: images enlarged by whole factors, sides that H.264 accepts, frames not black."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from phasicrl.algorithm import train
from phasicrl.config import ModelConfig
from phasicrl.envs.vector import MakeVectorEnv
from phasicrl.experiments import video
from phasicrl.experiments.video import film
from phasicrl.session.filming import enlarge, tile
from tests.golden import Image
from tests.helpers import Corridor, corridor, read_film, tiny

pytest.importorskip("imageio_ffmpeg", reason="needs the extra `video`")


def test_images_are_laid_out_in_a_square() -> None:
    images = np.arange(3, dtype=np.uint8)[:, None, None, None] * np.ones(
        (3, 2, 4, 3), dtype=np.uint8
    )
    sheet = tile(images + 1)
    assert sheet.shape == (4, 8, 3)
    assert (
        (sheet[:2, :4] == 1).all()
        and (sheet[:2, 4:] == 2).all()
        and (sheet[2:, :4] == 3).all()
        and (sheet[2:, 4:] == 0).all()
    )
    assert tile(images[:1]).shape == (2, 4, 3)


def test_pixels_are_repeated_and_sides_are_even() -> None:
    image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    large = enlarge(image, 3)
    assert large.shape == (4, 6, 3)  # factor 3, then padded to even height
    assert (
        (large[:3, :3] == image[0, 0]).all()
        and (large[:3, 3:6] == image[0, 1]).all()
        and (large[3] == 0).all()
    )
    assert enlarge(np.zeros((64, 64, 3), np.uint8), 512).shape == (512, 512, 3)


def test_an_agent_that_sees_images_is_filmed_from_them(tmp_path: Path) -> None:
    config = tiny(tmp_path)
    config = replace(config, model=ModelConfig(channels=(4,), blocks=0, hidden_sizes=(8,)))
    run = train(config, make_env=Image)
    path, result = film(run.directory, episodes=2, num_envs=1, size=64, make_env=Image)
    assert path.parent == run.directory / "videos" and len(result.returns) == 2
    images = read_film(path, 64, 64)
    # 2 × (first + 5 steps), the first of the episode after, whose frame is shown at the end.
    assert images.shape == (
        13,
        64,
        64,
        3,
    )
    assert all(image.max() > 150 and image.mean() < 100 for image in images)  # a bright dot on dark


def test_what_was_played_says_on_which_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video, "film_episodes", lambda *_, **__: ((1.0,), (5,)))
    run = train(tiny(tmp_path), make_env=corridor).directory
    for levels in ("unseen", "train"):
        assert film(run, levels=levels, make_env=corridor)[1].levels == levels


def test_an_environment_that_cannot_be_seen_is_refused(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_env=corridor)
    with pytest.raises(ValueError, match="no images to film; make it with render_mode='rgb_array'"):
        film(run.directory, make_env=corridor)


class Drawn(Corridor):
    """A corridor that draws where the agent is: brighter from cell to cell."""

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        return np.full((16, 32, 3), 40 + 40 * self._at, np.uint8)


def vectors(kind: Callable[[], gym.Env]) -> MakeVectorEnv:
    same_step = AutoresetMode.SAME_STEP
    return lambda num_envs: SyncVectorEnv([kind] * num_envs, autoreset_mode=same_step)


def test_a_vector_environment_of_ones_own_is_filmed_as_it_renders(tmp_path: Path) -> None:
    """Two corridors side by side; each image is as bright as the cell is far."""
    run = train(tiny(tmp_path), make_vector_env=vectors(Drawn))
    path, result = film(
        run.directory, episodes=2, num_envs=2, size=16, make_vector_env=vectors(Drawn)
    )
    images = read_film(path, 16, 64).astype(int)
    assert len(images) >= max(result.lengths) and len(result.returns) == 2
    shown = images.mean(axis=(1, 3)).reshape(-1, 2, 32)
    assert (shown.std(axis=2) < 8).all()  # each is of one color, but for the codec
    cells = (shown.mean(axis=2) - 40) / 40
    assert np.abs(cells - cells.round()).max() < 0.2
    assert set(cells[0].round()) <= {0, 1} and (np.abs(np.diff(cells.round(), axis=0)) <= 3).all()
    assert cells.max() > 0.5


def test_a_vector_environment_that_sees_images_is_filmed_from_them(tmp_path: Path) -> None:
    config = replace(tiny(tmp_path), model=ModelConfig(channels=(4,), blocks=0, hidden_sizes=(8,)))
    run = train(config, make_vector_env=vectors(Image))
    path, _ = film(run.directory, episodes=1, size=64, make_vector_env=vectors(Image))
    assert read_film(path, 64, 64).max() > 150


def test_a_vector_environment_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_vector_env=vectors(Corridor))
    with pytest.raises(ValueError, match="no images to film; make it with render_mode='rgb_array'"):
        film(run.directory, make_vector_env=vectors(Corridor))

    class Blind(SyncVectorEnv):
        def render(self) -> None:
            return None

    with pytest.raises(ValueError, match="returned nothing; one for each of its 1 env"):
        film(run.directory, make_vector_env=lambda num_envs: Blind([Drawn] * num_envs))
    with pytest.raises(ValueError, match="make_env and make_vector_env were both given"):
        film(run.directory, make_env=Drawn, make_vector_env=vectors(Drawn))


def test_an_environment_that_draws_itself_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("pygame", reason="Gymnasium draws CartPole with pygame")
    config = tiny(tmp_path)
    config = replace(
        config, env=replace(config.env, id="gymnasium:CartPole-v1"), total_env_steps=64
    )
    run = train(config)
    path, _ = film(run.directory, episodes=1, size=100)
    images = read_film(path, 400, 600)
    # A white field with a cart on it.
    assert len(images) > 5 and images.mean() > 150 and images.std() > 1


def test_an_environment_of_mujoco_is_filmed_by_rays_which_need_no_opengl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mujoco = pytest.importorskip("mujoco", reason="needs the extra `mujoco`")
    for renderer in ("MjrContext", "mjr_render"):  # what needs OpenGL
        monkeypatch.setattr(mujoco, renderer, lambda *_: pytest.fail("OpenGL was asked for"))
    config = tiny(tmp_path)
    config = replace(config, env=replace(config.env, id="gymnasium:Hopper-v5"), total_env_steps=64)
    path, _ = film(train(config).directory, num_envs=2, episodes=2, size=240)
    images = read_film(path, 240, 480)
    left, right = images[:, :, :240].astype(int), images[:, :, 240:].astype(int)
    assert len(images) > 5 and np.abs(left - right).max() > 50, (
        "each environment is drawn by its own camera"
    )
    assert np.abs(left[0] - left[-1]).max() > 50, "it moves"


@pytest.mark.parametrize(
    "size", [{"num_envs": 10**6}, {"episodes": 0}, {"fps": 0}, {"size": 10**6}, {"num_envs": 0}]
)
def test_sizes_that_no_film_has_are_refused_before_anything_is_opened(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(size))):
        film("nothing is looked for there", **size)  # type: ignore[arg-type]
