"""Images by rays: place, size and color of shapes, by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phasicrl.lab.film.raycast import AMBIENT, RaycastCamera

mujoco = pytest.importorskip("mujoco", reason="needs the extra `mujoco`")

BALL = """
<mujoco>
  <asset><material name="green" rgba="0 1 0 1"/></asset>
  <worldbody>
    <geom type="{shape}" size="{size}" pos="{pos}" {color}/>
    <camera name="front" pos="0 -4 0" xyaxes="1 0 0 0 0 1" fovy="90"/>
  </worldbody>
</mujoco>"""


def drawn(
    *, shape: str = "sphere", size: str = "1", pos: str = "0 0 0", color: str = 'rgba="1 0 0 1"'
) -> np.ndarray:
    """Draw the view of a camera 4 m in front of the origin, 45° to each side."""
    text = BALL.format(shape=shape, size=size, pos=pos, color=color)
    model = mujoco.MjModel.from_xml_string(text)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = SimpleNamespace(camera_id=0, default_cam_config=None)
    env: Any = SimpleNamespace(model=model, data=data, mujoco_renderer=renderer)
    env.unwrapped = env
    return RaycastCamera(env, size=101).draw().astype(int)


def red(image: np.ndarray) -> np.ndarray:
    return (image[..., 0] > image[..., 2]) & (image[..., 1] == 0)


def test_a_ball_is_where_and_as_large_as_geometry_says() -> None:
    """Half of the image is tan 45° = 1 wide at distance 1.

    A ball of radius 1 at distance 4 fills up to 1 / √15 of that half.
    """
    ball = red(drawn())
    assert ball.sum() == pytest.approx(np.pi * (50.5 / np.sqrt(15)) ** 2, rel=0.03)
    rows, columns = np.nonzero(ball)
    assert (rows.mean(), columns.mean()) == pytest.approx((50, 50), abs=0.1)


def test_right_and_up_are_right_and_up() -> None:
    rows, columns = np.nonzero(red(drawn(size="0.2", pos="2 0 1")))
    expected = (50 + 50.5 * 2 / 4, 50 - 50.5 * 1 / 4)
    assert (columns.mean(), rows.mean()) == pytest.approx(expected, abs=0.5)


def test_surfaces_facing_the_camera_are_bright_and_edges_are_dark() -> None:
    image = drawn()
    shades = image[..., 0][red(image)]
    assert shades.max() == image[50, 50, 0] >= 254
    assert 255 * AMBIENT <= shades.min() < 255 * (AMBIENT + 0.2)


@pytest.mark.parametrize(("color", "expected"), [
    ('rgba="1 0 0 1"', (255, 0, 0)), ('material="green"', (0, 255, 0)),
    # The shape's color comes before the material's.
    ('material="green" rgba="1 0 0 1"', (255, 0, 0)),
])  # fmt: skip
def test_colors_equal_those_of_mujoco(color: str, expected: tuple[int, int, int]) -> None:
    assert drawn(color=color)[50, 50] == pytest.approx(expected, abs=1)


def test_planes_are_checkered_by_the_meter_below_an_even_sky() -> None:
    """A floor 1 m below, 4 m before the camera's edge of view.

    In row r it is 50 / (r - 50) m away, where 1 m has r - 50 pixels.
    """
    image = drawn(shape="plane", size="50 50 1", pos="0 0 -1", color='rgba="1 1 1 1"')
    away = 25
    row = image[50 + away, :, 0].astype(float)
    x = (np.arange(101) - 50) / away
    light = np.floor(x) % 2 == (0 if row[x > 0.3][0] > row[x < -0.3][-1] else 1)
    middle = np.abs(x - np.round(x)) > 0.1
    assert row[light & middle].min() > row[~light & middle].max(), "squares of 1 m alternate"
    assert (image[:45] == image[:45, :1]).all(), "the sky is even along each row"
