"""Strip under an image that shows the return so far, the value and the policy.

Kind: pure, but for a font that is read once.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phasicrl.models.agent import Agent
from phasicrl.system.machine import import_optional

_INK, _FAINT, _ACCENT = (235, 235, 235), (95, 95, 95), (230, 159, 0)
_BACKGROUND = (24, 24, 24)
_MAX_BARS = 64
"""Maximum number of bars drawn; half of them show continuous components if there are many of both
kinds."""


class Overlay:
    """Strip under an image with return so far, value, probabilities and continuous components.

    Each option of the discrete components is a bar, as high as its probability, in the order of a
    mask; the bar of the action is orange. Each continuous component is the range of actions with
    the mean, one deviation on both sides, and an orange line for the action.

    Args:
        agent: agent whose actions are drawn.

    Raises:
        ImportError: Pillow is missing.
    """

    def __init__(self, agent: Agent) -> None:
        _load_font(10)
        self._head = agent.policy_head
        low, high = self._head.bounds
        finite = low.isfinite() & high.isfinite()
        self._low, self._high = low.where(finite, -3.0), high.where(finite, 3.0)

    def draw_strip(
        self, policy: Any, value: Tensor, actions: Tensor, returns: Tensor, index: int, width: int
    ) -> np.ndarray:
        """Draw the strip of environment `index`, `[H, width, 3]` bytes.

        Args:
            policy: distributions of the actions, `[B, 1]`.
            value: values, `[B, 1]`.
            actions: actions before squash and clip, `[B, 1, …]`.
            returns: returns of the episodes so far, `[B]`.
            index: index of the environment.
            width: width in pixels.
        """
        from PIL import Image, ImageDraw

        unit = max(10, width // 32)  # the height of letters
        strip = Image.new("RGB", (width, 6 * unit), _BACKGROUND)
        draw, font = ImageDraw.Draw(strip), _load_font(unit)
        draw.text((unit / 2, unit / 3), f"return {float(returns[index]):.6g}", _INK, font)
        draw.text((width / 2, unit / 3), f"value {float(value[index]):.4g}", _INK, font)
        top, bottom = 2 * unit, 5.5 * unit
        row = actions[index, 0].reshape(-1)
        log_probs, mean, std = self._head.split_log_probs_means_stds(policy.dist_params[index, 0])
        gauges = self._make_action_gauges(row, mean, std)
        gauges = gauges[: max(_MAX_BARS - len(log_probs), _MAX_BARS // 2)]
        probabilities = log_probs.exp().tolist()[: _MAX_BARS - len(gauges)]
        taken, begin = set[int](), 0
        for choice, count in zip(row.tolist(), self._head.num_choices, strict=True):
            taken |= {begin + int(choice)} if count else set()
            begin += count
        step = (width - unit) / max(len(probabilities) + len(gauges), 1)
        for column, probability in enumerate(probabilities):
            left, right = unit / 2 + column * step, unit / 2 + (column + 0.8) * step
            draw.rectangle((left, bottom - 1, right, bottom), _FAINT)
            if probability > 0:
                color = _ACCENT if column in taken else _INK
                draw.rectangle((left, bottom - (bottom - top) * probability, right, bottom), color)
        for number, places in enumerate(gauges, start=len(probabilities)):
            left = unit / 2 + number * step
            _draw_action_gauge(draw, (left, top, left + 0.8 * step, bottom), *places)
        return np.asarray(strip)

    def _make_action_gauges(self, action: Tensor, mean: Tensor, std: Tensor) -> list[list[float]]:
        """Place mean − std, mean, mean + std and the action in the range, from 0 to 1."""
        places = [place for place, count in enumerate(self._head.num_choices) if not count]
        if not places:
            return []
        actions = action.repeat(4, 1)
        actions[:, places] = torch.stack([mean - std, mean, mean + std, action[places]])
        shown = self._head.env_action(actions)[:, places]
        return ((shown - self._low) / (self._high - self._low)).clamp(0, 1).T.tolist()


def _draw_action_gauge(draw: Any, box: tuple[float, ...], *places: float) -> None:
    """Draw a range from the bottom of a box to the top."""
    left, top, right, bottom = box
    low, mean, high, taken = (bottom - (bottom - top) * place for place in places)
    draw.rectangle(box, outline=_FAINT)
    draw.rectangle((left, high, right, low), _FAINT)
    draw.line((left, mean, right, mean), _INK, 2)
    draw.line((left, taken, right, taken), _ACCENT, 2)


@functools.cache
def _load_font(size: int) -> Any:
    """Load Pillow's own font."""
    return import_optional("PIL.ImageFont", "an overlay needs Pillow").load_default(size)
