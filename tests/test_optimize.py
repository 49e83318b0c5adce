"""Clipping and Adam against hand-worked numbers and PyTorch's own."""

import pytest
import torch
from torch import Tensor

from phasicrl import optimize
from phasicrl.optimize import AdamState, adam_, clip_gradients, get_adam_state

YES, OPTIONS = torch.tensor(True), {"betas": (0.9, 0.999), "eps": 1e-5}


@pytest.mark.parametrize("fused", [False, True])
def test_adam_is_pytorchs(fused: bool) -> None:
    torch.manual_seed(0)
    ours = [torch.randn(5, 3), torch.randn(4)]
    theirs = [torch.nn.Parameter(tensor.clone()) for tensor in ours]
    optimizer = torch.optim.Adam(theirs, lr=0.1, eps=1e-5)
    first, second = ([torch.zeros_like(tensor) for tensor in ours] for _ in range(2))
    state = AdamState(first, second, [torch.zeros(()) for _ in ours])
    for number in range(20):
        optimizer.param_groups[0]["lr"] = rate = 0.1 / (1 + number)
        gradients = [torch.randn_like(tensor) * 10.0 ** (number % 5 - 3) for tensor in ours]
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        adam_(ours, gradients, state, OPTIONS, rate=torch.tensor(rate), apply_if=YES, fused=fused)
        for parameter, tensor in zip(theirs, ours, strict=True):
            torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("fused", [False, True])
def test_adam_moves_each_weight_by_its_own_gradient_in_any_layout(fused: bool) -> None:
    """A convolution's weights are channels_last, its gradient need not be.

    PyTorch's kernel for all at once looks at no strides.
    """
    weight = torch.zeros(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    gradient = torch.arange(1.0, 25.0).reshape(2, 3, 2, 2)
    state = AdamState([torch.zeros_like(weight)], [torch.zeros_like(weight)], [torch.zeros(())])
    options = OPTIONS | {"eps": 1.0}
    adam_([weight], [gradient], state, options, rate=0.1, apply_if=YES, fused=fused)
    torch.testing.assert_close(state.first[0], 0.1 * gradient)
    # The first step: both moments' bias is corrected.
    torch.testing.assert_close(weight, -0.1 * gradient / (gradient + 1))


@pytest.mark.parametrize("fused", [False, True])
def test_adam_leaves_everything_as_it_is_where_a_gradient_is_not_finite(fused: bool) -> None:
    everything = [torch.tensor(x) for x in ([1.0, 2.0], [0.5, -1.0], [0.3, 0.4], 7.0)]
    changed = [tensor.clone() for tensor in everything]
    (weight, mean, square, step), gradient = changed, torch.tensor([1.0, torch.nan])
    state, is_finite = AdamState([mean], [square], [step]), gradient.norm().isfinite()
    adam_([weight], [gradient], state, OPTIONS, rate=0.1, apply_if=is_finite, fused=fused)
    assert all(map(torch.equal, changed, everything))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_in_both_precisions_and_with_both_epsilons(fused: bool, dtype: torch.dtype) -> None:
    """By hand: gradient 2, moments 1 and 4, in the third step and, of another weight, the sixth."""

    def root(count: int) -> float:
        return (1 - 0.999**count) ** 0.5

    for eps_hat in (False, True):
        weights, means, squares = (
            [torch.tensor([x], dtype=dtype) for _ in range(2)] for x in (1.0, 1.0, 4.0)
        )
        steps = [torch.tensor(2.0), torch.tensor(5.0)]
        gradients = [torch.tensor([2.0], dtype=dtype) for _ in range(2)]
        state = AdamState(means, squares, steps)
        options = OPTIONS | {"eps": 0.5, "eps_hat": eps_hat}
        adam_(weights, gradients, state, options, rate=0.1, apply_if=YES, fused=fused)
        assert [step.item() for step in steps] == [3, 6]
        exact = 1e-12 if dtype is torch.float64 else 1e-6
        for weight, mean, square, count in zip(weights, means, squares, (3, 6), strict=True):
            assert mean.item() == pytest.approx(1.1, rel=1e-6)
            assert square.item() == pytest.approx(4.0, rel=1e-6)
            spread = (2.0 + 0.5) / root(count) if eps_hat else 2.0 / root(count) + 0.5
            moved = 0.1 / (1 - 0.9**count) * 1.1 / spread
            assert weight.item() == pytest.approx(1 - moved, rel=exact)


@pytest.mark.parametrize("foreach", [False, True])
def test_each_network_is_clipped_by_its_own_norm(foreach: bool) -> None:
    long = [torch.tensor([[3.0, 0.0]]), torch.tensor([4.0, 12.0])]
    short = [torch.tensor([0.3, 0.4])]
    (clipped, kept), norm = clip_gradients([long, short], 6.5, foreach=foreach)  # norms 13 and 0.5
    torch.testing.assert_close(clipped, [torch.tensor([[1.5, 0.0]]), torch.tensor([2.0, 6.0])])
    assert torch.equal(kept[0], short[0]) and norm.item() == pytest.approx((169 + 0.25) ** 0.5)
    assert long[0].tolist() == [[3.0, 0.0]], "the gradients themselves stay"
    ((unclipped,), norm) = clip_gradients([short], None, foreach=foreach)
    assert unclipped[0].tolist() == short[0].tolist() and norm.item() == pytest.approx(0.5)


def test_a_step_moves_only_the_given_parameters_with_their_groups_rate() -> None:
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.Adam([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.01}])
    gradients: list[Tensor] = [torch.ones(1), -torch.ones(1)]
    optimize.eager_adam_step_(optimizer, [c, a], gradients, apply_if=YES)
    assert (a.item(), b.item(), c.item()) == (pytest.approx(0.1), 0, pytest.approx(-0.01))
    assert b not in optimizer.state and get_adam_state(optimizer, [a]).steps[0].item() == 1
    optimize.eager_adam_step_(optimizer, [a], [torch.full((1,), torch.inf)], apply_if=~YES)
    assert a.item() == pytest.approx(0.1) and get_adam_state(optimizer, [a]).steps[0].item() == 1


def test_what_a_file_held_comes_to_where_the_parameters_are() -> None:
    """The number of steps too, which PyTorch leaves on the CPU; `meta` stands for a GPU."""
    before = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = torch.optim.Adam([before])
    before.grad = torch.ones(2, 3)
    optimizer.step()
    elsewhere = torch.nn.Parameter(torch.ones(2, 3, device="meta"))
    resumed = torch.optim.Adam([elsewhere])
    optimize.load_state_(resumed, optimizer.state_dict())
    assert {value.device.type for value in resumed.state[elsewhere].values()} == {"meta"}
