"""Films: images enlarged by whole factors, sides for H.264, frames not black."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from phasicrl.algorithm import train
from phasicrl.cli import main
from phasicrl.config import EnvConfig, LogConfig, ModelConfig
from phasicrl.envs.protocol import EnvError
from phasicrl.lab.film import video
from phasicrl.lab.film.filming import enlarge, tile
from phasicrl.lab.film.video import film
from phasicrl.training.evaluate import Evaluation
from tests.envs.simulators import TensorEnvs
from tests.envs.test_vector import sync
from tests.golden import Image
from tests.helpers import Corridor, corridor, read_film, tiny

imageio_ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="needs the extra `lab`")


SMALL_IMAGES = ModelConfig(channels=(4,), blocks=0, hidden_sizes=(8,))


def test_images_are_laid_out_in_a_square() -> None:
    images = np.arange(1, 4, dtype=np.uint8)[:, None, None, None] * np.ones((2, 4, 3), np.uint8)
    expected = np.block([[np.full((2, 4), 1), np.full((2, 4), 2)],
                         [np.full((2, 4), 3), np.zeros((2, 4))]])  # fmt: skip
    np.testing.assert_array_equal(tile(images)[..., 0], expected)
    assert tile(images[:1]).shape == (2, 4, 3)
    large = tile(np.zeros((3, 32, 64, 3), np.uint8))  # lines of 2 pixels
    assert large.shape == (66, 130, 3) and large[32:34].min() == large[:, 64:66].min() == 128
    assert not large[:32, :64].any() and not large[34:].min(2)[:, 66:].any()


def test_pixels_are_repeated_and_sides_are_even() -> None:
    image = np.arange(1, 7, dtype=np.uint8).reshape(1, 2, 3)
    large = enlarge(image, 3)  # factor 3, then padded to even height
    np.testing.assert_array_equal(large[:3], np.repeat(image, 3, axis=1).repeat(3, axis=0))
    assert large.shape == (4, 6, 3) and (large[3] == 0).all()
    assert enlarge(np.zeros((64, 64, 3), np.uint8), 512).shape == (512, 512, 3)


@pytest.mark.long
@pytest.mark.parametrize("own", [{"make_env": Image}, {"make_vector_env": sync(Image)}])
def test_images_that_an_agent_sees_are_filmed(tmp_path: Path, own: Any, capsys: Any) -> None:
    run = train(tiny(tmp_path, model=SMALL_IMAGES, log=LogConfig(console="plain")), **own)
    assert "images are read as 3 channels of 16×16" in capsys.readouterr().out
    path, result = film(run.directory, episodes=2, num_envs=1, size=64, **own)
    assert path.parent == run.directory / "videos" and len(result.returns) == 2
    images = read_film(path, 64, 64)
    assert images.shape == (12, 64, 64, 3)  # 2 × (first + 5 steps)
    assert all(image.max() > 150 and image.mean() < 100 for image in images)  # a bright dot on dark


@pytest.mark.long
def test_a_film_without_its_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends ffmpeg in this way; it only prints a line."""

    def write_beginning(path: str, *_: Any, **__: Any) -> Iterator[None]:
        Path(path).write_bytes(b"\0\0\0\x1cftypisom\0\0\2\0isomiso2mp41\0\0\0\x08free")
        while True:
            yield

    run = train(tiny(tmp_path, model=SMALL_IMAGES), make_env=Image)
    path, _ = film(run.directory, episodes=1, size=64, make_env=Image)
    before = path.read_bytes()
    monkeypatch.setattr(imageio_ffmpeg, "write_frames", write_beginning)
    with pytest.raises(OSError, match="is incomplete"):
        film(run.directory, episodes=1, size=64, make_env=Image)
    assert path.read_bytes() == before and [*path.parent.iterdir()] == [path]


@pytest.mark.long
def test_a_film_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run = train(tiny(tmp_path, model=SMALL_IMAGES), make_env=Image)
    (folder := tmp_path / "taken.mp4").mkdir()
    with pytest.raises(OSError, match=r"taken\.mp4"):
        film(run.directory, output=folder, episodes=1, make_env=Image)


def test_names_have_weights_and_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        video, "film_episodes", lambda *_, levels, **__: Evaluation("sampled", (1,), (5,), levels)
    )
    run = train(tiny(tmp_path), make_env=corridor).directory
    kinds: Any = product(("unseen", "train"), ("last", "best"))
    films = [film(run, levels=x, weights=y, make_env=corridor) for x, y in kinds]
    endings = ("", "-best", "-train", "-train-best")
    assert [path.name for path, _ in films] == [f"sampled-seed0{end}.mp4" for end in endings]
    assert [result.levels for _, result in films] == ["unseen"] * 2 + ["train"] * 2


def test_an_environment_without_images_or_levels_is_refused(tmp_path: Path) -> None:
    both: Any = (({"make_env": corridor}, {}), ({}, {"env.id": "gymnasium:tests.helpers:Corridor"}))
    for own, changes in both:
        run = train(tiny(tmp_path).with_updates(changes), **own)
        with pytest.raises(ValueError, match="no images to film; expected render_mode='rgb_array'"):
            film(run.directory, **own)
    run = train(replace(tiny(tmp_path), env=EnvConfig(id="gymnasium:CartPole-v1", num_envs=4)))
    with pytest.raises(ValueError, match="levels is train; expected unseen for an env"):
        film(run.directory, levels="train")


class Drawn(Corridor):
    """Corridor that draws the place of the agent, brighter from cell to cell."""

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> np.ndarray:
        return np.full((16, 32, 3), 40 + 40 * self._at, np.uint8)


def draw(render_mode: str | None = None) -> Drawn:
    """Make an environment that draws if this is asked for."""
    return Drawn(render_mode)


def draw_always() -> Drawn:
    return Drawn()


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("function", [draw, draw_always])
def test_what_a_function_makes_is_filmed(tmp_path: Path, function: Any, by_id: bool) -> None:
    name, output = f"{__name__}:{function.__name__}", tmp_path / "film.mp4"
    config = tiny(tmp_path).with_updates({"env.id": f"gymnasium:{name}"} if by_id else {})
    run = train(config, make_env=None if by_id else function).directory
    words = [str(run), "--size=16", f"--output={output}"] + [f"--make-env={name}"] * (not by_id)
    assert main(["video", "--episodes=1", *words]) == 0
    assert read_film(output, 16, 32)[0].mean() in (pytest.approx(x, abs=4) for x in (40, 80))


@pytest.mark.long
@pytest.mark.parametrize("shown", [
    np.zeros((16, 32, 3), np.int64), np.zeros((16, 32, 5), np.uint8), np.zeros((0, 0, 3)),
    np.zeros((16, 32), np.uint8), np.zeros((16, 3), np.uint8), None, NotImplementedError,
    np.full((16, 32, 3), -0.1), np.full((16, 32, 3), 255.1), np.full((16, 32, 3), np.nan), 0.5,
    RuntimeError, ValueError, [np.zeros((16, 32, 3), np.uint8), np.zeros((8, 32, 3), np.uint8)],
    (np.zeros((16, 32, 3), np.uint8), "x"),
])  # fmt: skip
def test_arrays_that_are_not_images_are_refused(tmp_path: Path, shown: Any) -> None:
    class Shows(Drawn):
        def render(self) -> Any:
            if isinstance(shown, type):
                raise shown("no display")
            return shown

    run = train(tiny(tmp_path), make_env=Shows)
    given = "" if isinstance(shown, np.ndarray | type) else type(shown).__name__
    kind, text = ValueError, rf".*{given}.*; expected \[height, width, 3 or 4\]"
    if isinstance(shown, type) and shown is not NotImplementedError:
        kind, text = EnvError, f"raised {shown.__name__}: no display$"
    with pytest.raises(kind, match=rf"^render\(\) of Shows {text}"):
        film(run.directory, make_env=Shows)
    assert not list(run.directory.glob("videos/*.mp4"))


def shows(render: Callable[[Any], Any]) -> type[Drawn]:
    return type("Shows", (Drawn,), {"render": render})


@pytest.mark.long
@pytest.mark.parametrize("in_vector", [False, True])
@pytest.mark.parametrize(("largest", "kind", "channels"), [
    (1, np.float32, 3), (255, np.float64, 3), (1, np.float16, 4), (255, np.uint8, 4),
])  # fmt: skip
def test_floats_and_alpha_are_filmed_as_bytes_of_red_green_and_blue(
    largest: int, kind: Any, channels: int, in_vector: bool, tmp_path: Path
) -> None:
    class Shows(Drawn):
        def render(self) -> np.ndarray:
            image = np.zeros((16, 32, channels), kind)
            image[..., 0] = largest * (self._steps > 0)  # dark at first: what is 1 shows later
            image[..., 1] = kind(0.4 * largest)
            return image

    envs: Any = {"make_vector_env": sync(Shows)} if in_vector else {"make_env": Shows}
    path, _ = film(train(tiny(tmp_path), **envs).directory, episodes=1, size=16, **envs)
    last = read_film(path, 16, 32)[-1]
    np.testing.assert_allclose(last.mean((0, 1)), (255, 0.4 * 255, 0), atol=8)


def test_images_that_change_their_size_are_refused(tmp_path: Path) -> None:
    make_env = shows(lambda env: np.zeros((16 + 2 * env._steps, 32, 3), np.uint8))
    run = train(tiny(tmp_path), make_env=make_env)
    with pytest.raises(ValueError, match=r"of Shows returned .*\(18, 32, 3\).* of one size"):
        film(run.directory, make_env=make_env)


def test_the_newest_of_a_list_of_images_is_filmed(tmp_path: Path) -> None:
    images = [np.zeros((16, 32, 3), np.uint8), np.full((16, 32, 3), 200, np.uint8)]
    make_env = partial(shows(lambda _: images), "rgb_array_list")
    run = train(tiny(tmp_path), make_env=make_env)
    path, _ = film(run.directory, episodes=1, size=16, make_env=make_env)
    assert read_film(path, 16, 32).min() > 190


def test_a_vector_environment_of_ones_own_is_filmed_as_it_renders(tmp_path: Path) -> None:
    """Two corridors side by side; each image is as bright as the cell is far."""
    run, own = train(tiny(tmp_path), make_vector_env=sync(Drawn)), sync(Drawn)
    path, result = film(run.directory, episodes=2, num_envs=2, size=16, make_vector_env=own)
    images = read_film(path, 16, 66)[:, :, np.r_[:32, 33:65]].astype(int)  # without the line
    assert len(images) >= max(result.lengths) and len(result.returns) == 2
    shown = images.mean(axis=(1, 3)).reshape(-1, 2, 32)
    assert (shown.std(axis=2) < 8).all()  # each is of one color, but for the codec
    cells = (shown.mean(axis=2) - 40) / 40
    assert np.abs(cells - cells.round()).max() < 0.2
    assert set(cells[0].round()) <= {0, 1} and (np.abs(np.diff(cells.round(), axis=0)) <= 3).all()
    assert cells.max() > 0.5


class DrawnTensors(TensorEnvs):
    """Simulator that draws, without the attributes that only Gymnasium asks for."""

    render_mode = "rgb_array"

    def render(self) -> np.ndarray:
        return np.full((self.num_envs, 16, 32, 3), 200, np.uint8)


def test_a_simulator_is_filmed_as_it_renders(tmp_path: Path) -> None:
    own = partial(DrawnTensors, Corridor, end="raw")
    run = train(tiny(tmp_path), make_vector_env=own)
    path, _ = film(run.directory, episodes=1, num_envs=1, size=16, make_vector_env=own)
    assert read_film(path, 16, 32).min() > 190


def test_a_vector_environment_that_shows_nothing_is_refused(tmp_path: Path) -> None:
    run = train(tiny(tmp_path), make_vector_env=sync(Corridor))
    with pytest.raises(ValueError, match="no images to film; expected render_mode='rgb_array'"):
        film(run.directory, make_vector_env=sync(Corridor))
    blind = type("Blind", (SyncVectorEnv,), {"render": lambda _: None})
    with pytest.raises(ValueError, match=r"a NoneType, not an array; expected \[1, height, width"):
        film(run.directory, make_vector_env=lambda num_envs: blind([Drawn] * num_envs))


class Counting(Drawn):
    """Environment that draws the number of steps of its episode of seven."""

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, *_ = super().step(action)
        return obs, 1.0, self._steps == 7, False, {}

    def render(self) -> np.ndarray:
        return np.full((16, 32, 3), 20 * self._steps, np.uint8)


@pytest.mark.parametrize("mode", [None, *AutoresetMode])
def test_films_show_the_end_of_an_episode(tmp_path: Path, mode: AutoresetMode | None) -> None:
    """A vector that resets itself in the step of the end repeats the image before."""
    own: dict[str, Any] = {"make_env": Counting}
    if mode is not None:
        own = {"make_vector_env": lambda n: SyncVectorEnv([Counting] * n, autoreset_mode=mode)}
    path, _ = film(train(tiny(tmp_path), **own).directory, episodes=2, size=16, **own)
    shown = read_film(path, 16, 32).mean(axis=(1, 2, 3)) / 20
    end = 6 if mode is AutoresetMode.SAME_STEP else 7
    assert shown == pytest.approx([*range(7), end] * 2, abs=0.2)


def test_a_restarted_environment_is_filmed_in_its_place(tmp_path: Path) -> None:
    """The second of three breaks, whatever its own calls of `close` are."""

    class Fragile(Counting):
        fourth_steps = 0

        def reset(self, **options: Any) -> tuple[np.ndarray, dict[str, Any]]:
            self.close()
            return super().reset(**options)

        def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            Fragile.fourth_steps += self._steps == 3
            if self._steps == 3 and Fragile.fourth_steps == 2:
                raise RuntimeError("broken")
            return super().step(action)

    run = train(tiny(tmp_path).with_updates({"env.max_restarts": 2}), make_env=Counting)
    with pytest.warns(RuntimeWarning, match="restart 1 of 2"):
        path, _ = film(run.directory, episodes=3, num_envs=3, size=16, make_env=Fragile)
    shown = read_film(path, 34, 66)[:, [8, 8, 25], [16, 49, 16], 0] / 20
    others, second = [*range(5), *range(4, 8), *range(5)], [*range(4), 0, *range(4), *range(3, 8)]
    np.testing.assert_allclose(shown.T, [others, second, others], atol=0.2)


@pytest.mark.long
def test_an_environment_that_draws_itself_is_filmed(tmp_path: Path) -> None:
    pytest.importorskip("pygame", reason="Gymnasium draws CartPole with pygame")
    config = tiny(tmp_path).with_updates({"env.id": "gymnasium:CartPole-v1"})
    path, _ = film(train(config).directory, episodes=1, size=100)
    images = read_film(path, 400, 600)
    assert next(imageio_ffmpeg.read_frames(str(path)))["fps"] == 50  # its metadata's render_fps
    assert len(images) > 5 and images.mean() > 150 and images.std() > 1  # a cart on white


@pytest.mark.long
def test_mujoco_is_filmed_without_opengl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mujoco = pytest.importorskip("mujoco", reason="needs the extra `mujoco`")
    for renderer in ("MjrContext", "mjr_render"):  # what needs OpenGL
        monkeypatch.setattr(mujoco, renderer, lambda *_: pytest.fail("OpenGL was asked for"))
    config = tiny(tmp_path).with_updates({"env.id": "envpool:Hopper-v5"})  # filmed in Gymnasium
    path, _ = film(train(config).directory, num_envs=2, episodes=2, size=240)
    images = read_film(path, 240, 488)  # a line of 7 between them, and one at the edge
    left, right = images[:, :, :240].astype(int), images[:, :, 247:487].astype(int)
    assert len(images) > 5 and np.abs(left - right).max() > 50, "each has its own camera"
    assert np.abs(left[0] - left[-1]).max() > 50, "it moves"


@pytest.mark.parametrize("wrong", [
    {"num_envs": 10**6}, {"episodes": 0}, {"fps": 0}, {"size": 10**6}, {"num_envs": 0},
    {"policy": "Greedy"},
])  # fmt: skip
def test_numbers_and_names_that_no_film_has_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*; expected "):
        film("no run", **wrong)
    for name, kind in product(("film.gif", "film"), (Path, str)):
        with pytest.raises(ValueError, match=rf"output is {name}; expected .*film\.mp4$"):
            film("no run", output=cast(Any, kind(name)))


@pytest.mark.long
def test_sigterm_ends_a_film_that_pygame_draws(tmp_path: Path) -> None:
    words = ["video", "cartpole-ppg", "--episodes", "1", "--output", str(tmp_path / "x.mp4")]
    code = "import signal; from phasicrl import cli; from phasicrl.lab.film import filming\n"
    code += f"filming.tile = lambda images: signal.raise_signal(15)\ncli.main({words})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGTERM
