"""Images of MuJoCo scenes without OpenGL, by rays that MuJoCo itself casts.

Kind: effects (reads a simulation).

MuJoCo draws with OpenGL, which cannot be installed without root, but also casts rays, which needs
the simulation alone. Images have shapes, colors and shading, and no textures, shadows and tendons.
An image of 240 × 240 pixels takes about 15 ms.
"""

from typing import Any

import gymnasium as gym
import numpy as np

from phasicrl.system.machine import import_optional

VISIBLE_GROUPS = np.array([1, 1, 1, 0, 0, 0], np.uint8)
"""Groups of shapes that MuJoCo's own viewer shows by default."""
UNSET_COLOR = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
"""MuJoCo's default of a shape's color, which leaves it to the material."""
SKY_TOP_COLOR, SKY_BOTTOM_COLOR = np.array([76.0, 128.0, 178.0]), np.array([220.0, 232.0, 242.0])
"""Colors at the upper and the lower edge of an image where nothing is hit."""
AMBIENT = 0.35
"""Brightness of a surface at its edge; 1 where the surface faces the camera."""


class RaycastCamera:
    """Camera that draws without OpenGL, with the view of the environment's own renderer.

    Args:
        env: MuJoCo environment of Gymnasium.
        size: height and width of the images in pixels.
    """

    def __init__(self, env: gym.Env[Any, Any], *, size: int = 240) -> None:
        base_env: Any = env.unwrapped
        self._mujoco = mujoco = import_optional("mujoco", "films need MuJoCo", "mujoco")
        model = base_env.model
        self._sim = (model, base_env.data)
        self._scene = mujoco.MjvScene(model, 1000)
        self._camera = _make_mjv_camera(mujoco, base_env.mujoco_renderer, *self._sim)
        down, right = np.meshgrid(*[(np.arange(size) + 0.5) / size * 2 - 1] * 2, indexing="ij")
        self._right, self._up, self._size = right.ravel(), -down.ravel(), size
        self._planes = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        self._colors = np.stack([self._compute_geom_color(geom) for geom in range(model.ngeom)])

    def draw(self) -> np.ndarray:
        """Draw the current scene, `[size, size, 3]` uint8."""
        origin, rays = self._make_rays()
        count = len(rays)
        hits, distance, normal = np.full(count, -1, np.int32), np.zeros(count), np.zeros((count, 3))
        options = (VISIBLE_GROUPS, True, -1)  # with static shapes, without an excluded body
        found = (hits, distance, normal.ravel())
        self._mujoco.mj_multiRay(*self._sim, origin, rays.ravel(), *options, *found, count, 1e10)
        points, facing = origin + rays * distance[:, None], np.abs((normal * rays).sum(1))
        return self._shade(hits, points, facing).reshape(self._size, self._size, 3)

    def _compute_geom_color(self, geom: int) -> np.ndarray:
        """Return the color of a shape, 0 to 255, times the mean of the material's texture.

        A shape without a color has its material's.
        """
        model, _ = self._sim
        material, color = model.geom_matid[geom], model.geom_rgba[geom]
        if material < 0:
            return 255 * color[:3]
        if (color == UNSET_COLOR).all():
            color = model.mat_rgba[material]
        texture = model.mat_texid[material, self._mujoco.mjtTextureRole.mjTEXROLE_RGB]
        if texture < 0 or self._planes[geom]:  # planes are checkered below
            return 255 * color[:3]
        start, channels = model.tex_adr[texture], model.tex_nchannel[texture]
        size = model.tex_height[texture] * model.tex_width[texture] * channels
        return color[:3] * model.tex_data[start : start + size].reshape(-1, channels)[:, :3].mean(0)

    def _make_rays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the camera's position `[3]` and a unit vector through each pixel `[N, 3]`.

        Pixels are row by row from the upper left.
        """
        mujoco = self._mujoco
        options = (mujoco.MjvOption(), mujoco.MjvPerturb(), self._camera)
        mujoco.mjv_updateScene(*self._sim, *options, mujoco.mjtCatBit.mjCAT_ALL, self._scene)
        view = self._scene.camera[0]
        forward, up = (np.array(vector, np.float64) for vector in (view.forward, view.up))
        right = np.cross(forward, up)
        half = view.frustum_top / view.frustum_near
        rays = forward + half * (self._right[:, None] * right + self._up[:, None] * up)
        # The scene has two cameras, one for each eye.
        position = np.stack([camera.pos for camera in self._scene.camera]).mean(0, dtype=np.float64)
        return position, rays / np.linalg.norm(rays, axis=1, keepdims=True)

    def _shade(self, hits: np.ndarray, points: np.ndarray, facing: np.ndarray) -> np.ndarray:
        """Return the colors `[N, 3]` of rays, with light from the camera.

        Planes are checkered to show motion.
        """
        images = SKY_BOTTOM_COLOR + (SKY_TOP_COLOR - SKY_BOTTOM_COLOR) * (self._up[:, None] + 1) / 2
        on = hits >= 0
        color = self._colors[hits[on]] * (AMBIENT + (1 - AMBIENT) * facing[on, None])
        color[(np.floor(points[on, :2]).sum(1) % 2 == 0) & self._planes[hits[on]]] *= 0.8
        images[on] = color
        return images.clip(0, 255).astype(np.uint8)


def _make_mjv_camera(mujoco: Any, renderer: Any, model: Any, data: Any) -> Any:
    """Make a camera like that of Gymnasium's own renderer."""
    camera = mujoco.MjvCamera()
    if renderer.camera_id >= 0:
        camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, renderer.camera_id
        return camera
    camera.type, camera.distance = mujoco.mjtCamera.mjCAMERA_FREE, model.stat.extent
    camera.lookat[:] = np.median(data.geom_xpos, axis=0)
    for name, value in (renderer.default_cam_config or {}).items():
        setattr(camera, name, value)
    return camera
