"""Strips under images: heights of bars and places of lines, by hand."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from phasicrl.config import ActionConfig
from phasicrl.models.heads import PolicyHead

pytest.importorskip("PIL", reason="needs the extra `lab`")
from phasicrl.lab.film import overlay
from phasicrl.lab.film.overlay import _ACCENT, _FAINT, _INK, Overlay

WIDTH, UNIT = 320, 10
TOP, BOTTOM = 2 * UNIT, 5.5 * UNIT
Box, Discrete, MultiDiscrete = gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete


def head_of(space: gym.Space[Any], **action: Any) -> PolicyHead:
    return PolicyHead(space, ActionConfig(**action), partial(nn.Linear, 4))


def drawn(
    head: PolicyHead, dist_params: Tensor, action: Tensor, *, value: float = 0.0,
    so_far: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Draw the strip of the second of two environments; the first has other numbers."""
    policy = head.distribution(torch.stack([dist_params.flip(0), dist_params]).unsqueeze(1))
    actions = torch.stack([torch.zeros_like(action), action]).unsqueeze(1)
    values = torch.tensor([[9.0], [value]])
    strip = Overlay(SimpleNamespace(policy_head=head)).draw_strip(  # type: ignore[arg-type]
        policy, values, actions, torch.tensor([9.0, so_far]), 1, WIDTH
    )
    assert strip.shape == (6 * UNIT, WIDTH, 3)
    return strip


def column(image: np.ndarray, number: int, count: int) -> np.ndarray:
    """Return the pixels in the middle of a bar, from the strip's top."""
    step = (WIDTH - UNIT) / count
    return image[:, round(UNIT / 2 + (number + 0.4) * step)].astype(int)


def rows(pixels: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    return np.flatnonzero((pixels == color).all(axis=-1))


def test_bars_are_as_high_as_probabilities_and_what_was_taken_is_orange() -> None:
    image = drawn(head_of(Discrete(3)), torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor(1))
    for number, (probability, color) in enumerate([(0.6, _INK), (0.3, _ACCENT), (0.1, _INK)]):
        found = rows(column(image, number, 3), color)
        assert found.max() == pytest.approx(BOTTOM, abs=1)
        assert len(found) == pytest.approx(probability * (BOTTOM - TOP), abs=2.5)


def test_masked_options_have_no_bar() -> None:
    head = head_of(Discrete(3))
    policy = head(torch.zeros(4), torch.tensor([False, True, True]))
    image = drawn(head, policy.dist_params, torch.tensor(2))
    assert not len(rows(column(image, 0, 3), _INK)) and len(rows(column(image, 0, 3), _FAINT))
    assert len(rows(column(image, 2, 3), _ACCENT)) > 3


def test_bars_are_in_a_masks_order_whatever_the_heads() -> None:
    """The head has the logits of the component with two options before that with three."""
    head = head_of(MultiDiscrete([3, 2]))
    of_two, of_three = torch.tensor([0.2, 0.8]), torch.tensor([0.1, 0.3, 0.6])
    image = drawn(head, torch.cat([of_two, of_three]).log(), torch.tensor([2, 0]))
    taken = [len(rows(column(image, number, 5), _ACCENT)) for number in range(5)]
    free = [len(rows(column(image, number, 5), _INK)) for number in range(5)]
    expected = np.array([0.1, 0.3, 0.6, 0.2, 0.8]) * (BOTTOM - TOP)
    assert np.array(taken) == pytest.approx(expected * [0, 0, 1, 1, 0], abs=2.5)
    assert np.array(free) == pytest.approx(expected * [1, 1, 0, 0, 1], abs=2.5)


def gauge(image: np.ndarray) -> tuple[float, float]:
    """Return the places of mean and action in a range, as shares from the bottom."""
    pixels = column(image, 0, 1)
    places = (float(rows(pixels, color).mean()) for color in (_INK, _ACCENT))
    mean, taken = ((BOTTOM - place) / (BOTTOM - TOP) for place in places)
    return mean, taken


def test_a_continuous_component_is_a_range_with_mean_and_action() -> None:
    """In [-2, 6] the mean 0 is at a quarter, the action 4 at three."""
    head = head_of(Box(-2, 6, (1,), np.float32))
    image = drawn(head, torch.tensor([0.0, 1.0]), torch.tensor([4.0]))
    assert gauge(image) == pytest.approx((0.25, 0.75), abs=0.05)
    faint = rows(column(image, 0, 1), _FAINT)  # one deviation, an eighth of the range, on each side
    inside = faint[(faint > TOP + 1) & (faint < BOTTOM - 1)]
    assert inside.min() == pytest.approx(BOTTOM - 0.375 * (BOTTOM - TOP), abs=2.5)
    assert inside.max() == pytest.approx(BOTTOM - 0.125 * (BOTTOM - TOP), abs=2.5)


def test_a_squashed_component_is_shown_where_it_acts() -> None:
    """tanh(0.5493) is 0.5, at three quarters of [-1, 1]; tanh(-0.5493) at one."""
    head = head_of(Box(-2, 6, (1,), np.float32), squash="tanh")
    image = drawn(head, torch.tensor([0.5493, 0.2]), torch.tensor([-0.5493]))
    assert gauge(image) == pytest.approx((0.75, 0.25), abs=0.05)


def test_values_outside_the_range_are_shown_at_its_end() -> None:
    head = head_of(Box(-1, 1, (1,), np.float32))
    mean, taken = gauge(drawn(head, torch.tensor([-5.0, 0.01]), torch.tensor([7.0])))
    assert mean == pytest.approx(0, abs=0.06) and taken == pytest.approx(1, abs=0.06)


def test_return_and_value_are_this_environments() -> None:
    head, dist_params = head_of(Discrete(2)), torch.tensor([0.5, 0.5]).log()
    action, half = torch.tensor(0), WIDTH // 2
    plain = drawn(head, dist_params, action)
    other = drawn(head, dist_params, action, so_far=-12.5)
    assert (plain[:, half:] == other[:, half:]).all() and (plain != other).any()
    other = drawn(head, dist_params, action, value=3.25)
    assert (plain[:, :half] == other[:, :half]).all() and (plain != other).any()


@pytest.mark.parametrize(("options", "numbers", "bars", "ranges"), [
    (500, 1, 63, 1), (500, 40, 32, 32), (3, 100, 3, 61), (40, 24, 40, 24),
])  # fmt: skip
def test_many_options_and_components_share_the_strip(
    options: int, numbers: int, bars: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes: list[tuple[float, ...]] = []
    monkeypatch.setattr(overlay, "_draw_action_gauge", lambda draw, box, *_: boxes.append(box))
    space = gym.spaces.Tuple((Discrete(options), Box(-1, 1, (numbers,), np.float32)))
    logits = torch.full((options,), 1 / options).log()
    dist_params = torch.cat([logits, torch.zeros(numbers), torch.ones(numbers)])
    image = drawn(head_of(space), dist_params, torch.zeros(1 + numbers))
    assert len(boxes) == ranges
    assert all(0 < left < right < WIDTH for left, _, right, _ in boxes)
    step = (WIDTH - UNIT) / (bars + ranges)
    assert boxes[0][0] == pytest.approx(UNIT / 2 + bars * step)
    assert len(rows(column(image, bars - 1, bars + ranges), _INK)), "the last option's bar"
