"""What a policy thinks, drawn under what it sees. Kind: pure, but for a font that is read once."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from torch import Tensor

from phasicrl.host.machine import optional_module
from phasicrl.models.agent import AgentOutput
from phasicrl.models.distributions import Policy
from phasicrl.models.heads import PolicyHead

_INK, _FAINT, _TAKEN = (235, 235, 235), (95, 95, 95), (230, 159, 0)
_BACKGROUND = (24, 24, 24)
_MOST_BARS = 64
"""Of more, nobody could tell one from the next; half of them are ranges, if both are too many."""


class Overlay:
    """A strip under an image: return so far, value, probabilities, continuous components.

    A bar for each option of the discrete components, as high as its probability, in a mask's order;
    what was taken is orange. For each continuous component the range of actions with the mean, one
    deviation on both sides, and an orange line for what was taken.

    Args:
        head: whose actions are drawn.

    Raises:
        ImportError: Pillow is missing.
    """

    def __init__(self, head: PolicyHead) -> None:
        _font(10)
        self._head = head
        self._in_mask = head.option_order.argsort()
        low, high = head.bounds.tolist()
        if head.stretches:
            low, high = [-1.0] * len(low), [1.0] * len(high)
        self._ranges = [
            (a, b) if math.isfinite(a) and math.isfinite(b) else (-3.0, 3.0)
            for a, b in zip(low, high, strict=True)
        ]

    def strip(
        self, said: AgentOutput, action: Tensor, returns: Tensor, index: int, width: int
    ) -> np.ndarray:
        """The strip of environment `index`, `[H, width, 3]` bytes.

        Args:
            said: of all environments, `[B, 1]`.
            action: that was taken, before squash and clip, `[B, 1, …]`.
            returns: of the episodes so far, `[B]`.
            index: which of them.
            width: in pixels.
        """
        from PIL import Image, ImageDraw

        unit = max(10, width // 32)  # the height of letters
        strip = Image.new("RGB", (width, 6 * unit), _BACKGROUND)
        draw, font = ImageDraw.Draw(strip), _font(unit)
        draw.text((unit / 2, unit / 3), f"return {float(returns[index]):.6g}", _INK, font)
        draw.text((width / 2, unit / 3), f"value {float(said.value[index]):.4g}", _INK, font)
        top, bottom = 2 * unit, 5.5 * unit
        probabilities, taken = self._options(said.policy, action, index)
        gauges = self._gauges(said.policy, action, index)
        gauges = gauges[: max(_MOST_BARS - len(probabilities), _MOST_BARS // 2)]
        probabilities = probabilities[: _MOST_BARS - len(gauges)]
        step = (width - unit) / max(len(probabilities) + len(gauges), 1)
        for column, probability in enumerate(probabilities):
            left, right = unit / 2 + column * step, unit / 2 + (column + 0.8) * step
            draw.rectangle((left, bottom - 1, right, bottom), _FAINT)
            if probability > 0:
                color = _TAKEN if column in taken else _INK
                draw.rectangle((left, bottom - (bottom - top) * probability, right, bottom), color)
        for number, (mean, spread, at) in enumerate(gauges):
            left = unit / 2 + (len(probabilities) + number) * step
            _gauge(draw, (left, top, left + 0.8 * step, bottom), mean, spread, at)
        return np.asarray(strip)

    def _options(self, policy: Policy, action: Tensor, index: int) -> tuple[list[float], set[int]]:
        """Probabilities of the options of all discrete components; which were taken."""
        head = self._head
        probabilities = policy.dist_params[index, 0, : head.mask_size].exp()[self._in_mask]
        row, taken, begin = action[index, 0].reshape(-1), set(), 0
        places = head.order[: len(row) - head.num_continuous] if head.action_shape else [0]
        widths = [width for number, width in head.groups for _ in range(number)]
        of_place = dict(zip(map(int, places), widths, strict=True))
        for place in sorted(of_place):
            taken.add(begin + int(row[place]))
            begin += of_place[place]
        return probabilities.tolist(), taken

    def _gauges(
        self, policy: Policy, action: Tensor, index: int
    ) -> list[tuple[float, float, float]]:
        """Mean, deviation and what was taken of each continuous component, range 0 to 1."""
        head, n = self._head, self._head.num_continuous
        if not n:
            return []
        mean, std = policy.dist_params[index, 0, head.mask_size :].split([n, n])
        row = action[index, 0].index_select(-1, head.order[-n:])
        if head.action.squash == "tanh":
            # The deviation is that of the draw; here it is the slope's share of it.
            mean, std, row = mean.tanh(), std * (1 - mean.tanh() ** 2), row.tanh()
        found = []
        for k, (low, high) in enumerate(self._ranges):
            scale = high - low
            places = (float(mean[k]) - low) / scale, (float(row[k]) - low) / scale
            found.append((places[0], float(std[k]) / scale, places[1]))
        return found


def _gauge(
    draw: Any, box: tuple[float, float, float, float], mean: float, spread: float, at: float
) -> None:
    """A range from the bottom of a box to its top."""
    left, top, right, bottom = box

    def height(share: float) -> float:
        return bottom - (bottom - top) * min(max(share, 0.0), 1.0)

    draw.rectangle(box, outline=_FAINT)
    draw.rectangle((left, height(mean + spread), right, height(mean - spread)), _FAINT)
    draw.line((left, height(mean), right, height(mean)), _INK, 2)
    draw.line((left, height(at), right, height(at)), _TAKEN, 2)


@functools.cache
def _font(size: int) -> Any:
    """Pillow's own font."""
    fonts = optional_module("PIL.ImageFont", "an overlay needs Pillow", "video")
    return fonts.load_default(size)
