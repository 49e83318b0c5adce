"""Max-pools: the formula for the compiler against PyTorch's kernel, and which calls are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Generator, Tensor

from phasicrl.algorithm import learn
from phasicrl.config import ComputeConfig, ModelConfig
from phasicrl.execution import compiled as fused
from phasicrl.execution import pooling
from phasicrl.execution.compiled import can_fuse
from phasicrl.execution.pooling import MaxPool
from phasicrl.runs.run import resume_run, start_run
from tests.golden import Picture
from tests.helpers import tiny, tiny_aux

Padding = Literal["symmetric", "same"]


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Nothing is kept from other tests, and the compiler leaves functions as they are, for inputs like those it saw; notes the first one's shape."""
    shapes: list[tuple[int, ...]] = []

    def as_it_is(function: Callable[..., Any], inputs: list[Tensor]) -> Callable[..., Any]:
        shapes.append(tuple(inputs[0].shape))
        layout = [(x.shape, x.dtype, x.is_contiguous()) for x in inputs]

        def compiled(*given: Tensor) -> Any:
            assert [(x.shape, x.dtype, x.is_contiguous()) for x in given] == layout, "compiled code would read these as something else"
            return function(*given)

        return compiled

    monkeypatch.setattr(pooling, "fuse", as_it_is)
    pooling._kernels.clear()
    pooling._calls.clear()
    yield shapes
    pooling._kernels.clear()


def pictures(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Few different numbers, so that most windows have several maxima; channels_last."""
    x = torch.randint(-2, 2, shape, generator=Generator().manual_seed(0)).to(dtype)
    return x.contiguous(memory_format=torch.channels_last)


def both(pool: MaxPool, x: Tensor) -> tuple[Tensor, Tensor]:
    """Values, and the gradient of a sum with other weights everywhere."""
    x = x.detach().requires_grad_()
    y = pool(x)
    weights = torch.randn(y.shape, generator=Generator().manual_seed(1)).to(y.dtype)
    return y.detach(), torch.autograd.grad(y, x, weights)[0]


@pytest.mark.parametrize("padding", ["symmetric", "same"])
@pytest.mark.parametrize("shape", [(3, 5, 8, 6), (1, 1, 2, 2), (2, 16, 2, 10)])
def test_the_formula_gives_pytorchs_values_and_gradients_to_the_bit(
    asked: list[tuple[int, ...]], padding: Padding, shape: tuple[int, ...]
) -> None:
    pool, x = MaxPool(padding, *shape[2:]), pictures(*shape)
    expected = both(pool, x)
    pool.compiled = True
    found = both(pool, x)
    assert len(asked) == 2 and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert found[1].is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        for _ in range(pooling.ENOUGH_CALLS):
            assert torch.equal(pool(x), expected[0])
    assert len(asked) == 3


def test_of_equal_maxima_the_first_has_the_gradient() -> None:
    """All of a window is equal: its first pixel inside the picture counts, by hand."""
    pool = MaxPool("symmetric", 4, 4)
    pool.compiled = True
    _, gradient = both(pool, torch.zeros(1, 1, 4, 4).contiguous(memory_format=torch.channels_last))
    assert {(int(i), int(j)) for i, j in gradient[0, 0].nonzero()} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_bf16_rounds_once() -> None:
    pool, x = MaxPool("symmetric", 8, 8), pictures(2, 16, 8, 8, dtype=torch.bfloat16)
    values, gradient = both(pool, x)
    pool.compiled = True
    found, rounded_once = both(pool, x)
    pool.compiled = False
    weights = torch.randn(values.shape, generator=Generator().manual_seed(1)).bfloat16()
    full = x.float().requires_grad_()
    exact = torch.autograd.grad(pool(full), full, weights.float())[0]
    assert (
        torch.equal(found, values) and torch.equal(rounded_once, exact.bfloat16()) and found.dtype == rounded_once.dtype == torch.bfloat16
    )
    torch.testing.assert_close(rounded_once, gradient, rtol=0.02, atol=0.02)


def test_what_is_no_number_stays_none() -> None:
    pool, x = MaxPool("symmetric", 4, 4), pictures(1, 2, 4, 4)
    pool.compiled = True
    x[0, 0, 1, 1] = float("nan")
    assert both(pool, x)[0][0, 0].isnan().all() and not both(pool, x)[0][0, 1].isnan().any()


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 4, 5), (0, 3, 4, 4)])
def test_odd_sizes_and_no_pictures_are_left_to_pytorch(asked: list[tuple[int, ...]], shape: tuple[int, ...]) -> None:
    pool = MaxPool("symmetric", *shape[2:])
    pool.compiled = True
    assert pool(pictures(*shape).requires_grad_()).shape == (shape[0], 3, (shape[2] + 1) // 2, (shape[3] + 1) // 2)
    assert not asked


def test_pictures_by_channel_and_other_precisions_are_left_to_pytorch(asked: list[tuple[int, ...]]) -> None:
    pool = MaxPool("symmetric", 4, 4)
    pool.compiled = True
    pool(torch.zeros(2, 3, 4, 4, requires_grad=True))
    pool(pictures(2, 3, 4, 4, dtype=torch.float64).requires_grad_())
    assert not asked


def test_shapes_and_precisions_have_code_of_their_own(asked: list[tuple[int, ...]]) -> None:
    pool = MaxPool("symmetric", 4, 4)
    pool.compiled = True
    for size in (2, 5):
        for dtype in (torch.float32, torch.bfloat16):
            both(pool, pictures(size, 3, 4, 4, dtype=dtype))
    both(pool, pictures(2, 3, 4, 4))
    assert len(asked) == 8


def test_without_a_gradient_only_frequent_sizes_are_compiled(asked: list[tuple[int, ...]]) -> None:
    """As in a rollout: the same batch at every step, then one of another size."""
    pool = MaxPool("symmetric", 4, 4)
    pool.compiled = True
    with torch.inference_mode():
        for _ in range(pooling.ENOUGH_CALLS - 1):
            pool(pictures(5, 3, 4, 4))
        pool(pictures(6, 3, 4, 4))
        assert not asked
        pool(pictures(5, 3, 4, 4))
        assert asked == [(5, 4, 4, 3)]
        for _ in range(2 * pooling.ENOUGH_CALLS):
            for _ in range(30):
                pool(pictures(5, 3, 4, 4))
            pool(pictures(6, 3, 4, 4))
    assert asked == [(5, 4, 4, 3)]


def test_pools_that_cannot_be_compiled_run_eagerly_and_say_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("no compiler\nand much more")

    pool, x = MaxPool("symmetric", 4, 4), pictures(2, 3, 4, 4)
    expected = both(pool, x)
    monkeypatch.setattr(pooling, "fuse", broken)
    pool.compiled = True
    with pytest.warns(RuntimeWarning, match=r"max-pools of \(2, 4, 4, 3\) run eagerly: no compiler$"):
        assert torch.equal(both(pool, x)[1], expected[1])
    assert torch.equal(both(pool, x)[1], expected[1])  # a second warning would be an error here


@pytest.mark.parametrize("wrong", [pooling.pool, pooling.pool_backward])
@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_compiled_pools_that_are_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., Any], factor: float) -> None:
    def fuse(function: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        scale = factor if function.func is wrong else 1.0
        return lambda *given: (function(*given)[0] * scale, *function(*given)[1:])

    pool, x = MaxPool("symmetric", 4, 4), pictures(2, 3, 4, 4)
    expected = both(pool, x)
    monkeypatch.setattr(pooling, "fuse", fuse)
    pool.compiled = True
    with pytest.warns(RuntimeWarning, match="other numbers"):
        found = both(pool, x)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.skipif(not can_fuse(), reason="there is no C++ compiler")
@pytest.mark.parametrize(
    ("padding", "channels", "dtype"), [("symmetric", 16, torch.float32), ("same", 5, torch.float32), ("symmetric", 16, torch.bfloat16)]
)
def test_code_that_is_really_compiled(monkeypatch: pytest.MonkeyPatch, padding: Padding, channels: int, dtype: torch.dtype) -> None:
    monkeypatch.setattr(pooling, "fuse", fused.fuse)
    pool, x = MaxPool(padding, 6, 8), torch.randn(4, channels, 6, 8, generator=Generator().manual_seed(0)).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    values, gradient = both(pool, x)
    pool.compiled = True
    found = both(pool, x)
    with torch.inference_mode():
        for _ in range(pooling.ENOUGH_CALLS):
            assert torch.equal(pool(x), values)
    assert len(pooling._kernels) == 2 and all(pooling._kernels.values())
    assert torch.equal(found[0], values)
    torch.testing.assert_close(
        found[1], gradient, rtol=0.0 if dtype == torch.float32 else 0.02, atol=0.0 if dtype == torch.float32 else 0.02
    )


def test_both_networks_of_a_run_have_compiled_pools_and_so_after_a_resumption(tmp_path: Path, asked: list[tuple[int, ...]]) -> None:
    model = ModelConfig(channels=(4,), blocks=0, hidden_sizes=(16,))
    config = replace(tiny(tmp_path, aux=tiny_aux()), model=model, compute=ComputeConfig(device="cpu", compile="pools"))
    with start_run(config, make_env=Picture) as run:
        learn(run)
        found = [module.compiled for module in run.agent.modules() if isinstance(module, MaxPool)]
        assert found == [True, True] and asked
        run.save()
    with resume_run(run.directory, make_env=Picture) as again:
        assert [module.compiled for module in again.agent.modules() if isinstance(module, MaxPool)] == [True, True]
