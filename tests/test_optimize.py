"""Clipping and Adam against hand-worked numbers and PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from phasicrl.optimize import Moments, adam_, clip, moments, restore_layout_, step_

YES, OPTIONS = torch.tensor(True), {"betas": (0.9, 0.999), "eps": 1e-5}

BETAS = (0.9, 0.999)
both_ways = pytest.mark.parametrize("at_once", [False, True])
YES = torch.tensor(True)


@both_ways
def test_adam_is_pytorchs(at_once: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,))]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    optimizer = torch.optim.Adam(theirs, lr=0.1, eps=1e-5)
    first, second = ([torch.zeros_like(tensor) for tensor in ours] for _ in range(2))
    steps = [torch.zeros(()) for _ in ours]
    options = {"betas": BETAS, "eps": 1e-5, "only_if": YES, "at_once": at_once}
    for number in range(20):
        optimizer.param_groups[0]["lr"] = rate = 0.1 / (1 + number)
        size = 10.0 ** (number % 5 - 3)
        gradients = [size * torch.randn(tensor.shape, generator=generator) for tensor in ours]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        adam_(ours, gradients, first, second, steps, rate=torch.tensor(rate), **options)
        expected = [parameter.detach() for parameter in theirs]
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@both_ways
def test_adam_moves_each_weight_by_its_own_gradient_in_any_layout(at_once: bool) -> None:
    """A convolution's weights are channels_last, its gradient need not be.

    PyTorch's kernel for all at once ignores strides.
    """
    weight = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gradient = torch.arange(1.0, 25.0).reshape(2, 3, 2, 2)
    mean, square = (torch.zeros_like(weight) for _ in range(2))
    adam_(
        [weight], [gradient], [mean], [square], [torch.zeros(())], rate=torch.tensor(0.1),
        betas=BETAS, eps=1.0, only_if=YES, at_once=at_once,
    )  # fmt: skip
    torch.testing.assert_close(mean, 0.1 * gradient)
    # The first step: both moments' bias is corrected.
    torch.testing.assert_close(weight, -0.1 * gradient / (gradient + 1))


@both_ways
def test_adam_leaves_everything_as_it_is_where_a_gradient_is_not_finite(at_once: bool) -> None:
    rows = [[1.0, 2.0], [0.5, -1.0], [0.3, 0.4], 7.0]
    changed, gradient = [torch.tensor(row) for row in rows], torch.tensor([1.0, torch.nan])
    weight, mean, square, step = changed
    adam_(
        [weight], [gradient], [mean], [square], [step], rate=torch.tensor(0.1), betas=BETAS,
        eps=1e-5, only_if=gradient.norm().isfinite(), at_once=at_once,
    )  # fmt: skip
    assert all(torch.equal(x, torch.tensor(row)) for x, row in zip(changed, rows, strict=True))


@both_ways
@pytest.mark.parametrize("eps_hat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_with_both_epsilons(at_once: bool, eps_hat: bool, dtype: torch.dtype) -> None:
    """By hand: gradient 2, moments 1 and 4, in the third step and, of another weight, the sixth."""
    for counts in ((3, 6), (3, 3)):
        weights, gradients, means, squares = (
            [torch.tensor([x], dtype=dtype) for _ in range(2)] for x in (1.0, 2.0, 1.0, 4.0)
        )
        steps = [torch.tensor(count - 1.0) for count in counts]
        adam_(
            weights, gradients, means, squares, steps, rate=0.1, betas=BETAS, eps=0.5,
            eps_hat=eps_hat, only_if=YES, at_once=at_once,
        )  # fmt: skip
        exact = 1e-12 if dtype is torch.float64 else 1e-6
        for weight, mean, square, step, count in zip(
            weights, means, squares, steps, counts, strict=True
        ):
            assert (mean.item(), square.item()) == pytest.approx((1.1, 4.0), rel=1e-6)
            root = (1 - 0.999**count) ** 0.5
            spread = (2.0 + 0.5) / root if eps_hat else 2.0 / root + 0.5
            moved = 0.1 / (1 - 0.9**count) * 1.1 / spread
            assert weight.item() == pytest.approx(1 - moved, rel=exact) and step.item() == count


@both_ways
def test_each_network_is_clipped_by_its_own_norm(at_once: bool) -> None:
    long, short = (
        [torch.tensor([[3.0, 0.0]]), torch.tensor([4.0, 12.0])],
        [torch.tensor([0.3, 0.4])],
    )
    (clipped, kept), norm = clip([long, short], 6.5, foreach=foreach)  # norms 13 and 0.5
    torch.testing.assert_close(clipped, [torch.tensor([[1.5, 0.0]]), torch.tensor([2.0, 6.0])])
    assert torch.equal(kept[0], short[0]) and norm.item() == pytest.approx((169 + 0.25) ** 0.5)
    assert long[0].tolist() == [[3.0, 0.0]], "the gradients themselves stay"
    ((unclipped,), norm) = clip([short], None, at_once=at_once)
    assert torch.equal(unclipped[0], short[0]) and norm.item() == pytest.approx(0.5)


def test_a_step_moves_only_the_given_parameters_with_their_groups_rate() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.Adam([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.01}])
    gradients: list[Tensor] = [torch.ones(1), -torch.ones(1)]
    step_(optimizer, [c, a], gradients, apply_if=YES)
    assert (a.item(), b.item(), c.item()) == (pytest.approx(0.1), 0, pytest.approx(-0.01))
    assert b not in optimizer.state and moments(optimizer, [a]).steps[0].item() == 1
    step_(optimizer, [a], [torch.full((1,), torch.inf)], apply_if=torch.tensor(False))
    assert a.item() == pytest.approx(0.1) and moments(optimizer, [a]).steps[0].item() == 1


def test_what_a_file_held_comes_to_where_the_parameters_are() -> None:
    """The number of steps too, which PyTorch leaves on the CPU; `meta` stands for a GPU."""
    before = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adam([before])
    before.grad = torch.ones(2, 3)
    optimizer.step()
    elsewhere = torch.nn.Parameter(torch.ones(2, 3, device="meta"))
    resumed = torch.optim.Adam([elsewhere])
    resumed.load_state_dict(optimizer.state_dict())
    restore_layout_(resumed)
    assert {value.device.type for value in resumed.state[elsewhere].values()} == {"meta"}


def test_moments_of_a_file_are_laid_out_as_their_parameters_are() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer, saved = torch.optim.Adam([weight]), torch.arange(24.0).view(2, 3, 2, 2)
    optimizer.state[weight] = {"exp_avg": saved}
    restore_layout_(optimizer)
    found = optimizer.state[weight]["exp_avg"]
    assert torch.equal(found, saved) and found.stride() == weight.stride() != saved.stride()
