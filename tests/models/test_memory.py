"""Memories against single steps and against a loop; what a state depends on."""

from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from phasicrl.config import ModelConfig
from phasicrl.models.memory import Memory, RecurrentMemory, make_memory

S, L, D, SIZE = 4, 7, 3, 5


def any_memory(kind: Any, init: Any = "torch", seed: int = 0) -> Memory:
    config = ModelConfig(memory=kind, memory_size=SIZE, init=init)
    return make_memory(D, config, Generator().manual_seed(seed))


def memory_of(kind: str) -> RecurrentMemory:
    memory = any_memory(kind, "orthogonal")
    assert isinstance(memory, RecurrentMemory)
    with torch.no_grad():  # biases that are not zero, or a wrong one would not show
        for name, parameter in memory.named_parameters():
            if "bias" in name:
                parameter.uniform_(-1, 1, generator=Generator().manual_seed(1))
    return memory.double()


def inputs(memory: RecurrentMemory, starts: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = Generator().manual_seed(2)
    features = torch.randn(S, L, D, generator=generator, dtype=torch.float64)
    first = torch.rand(S, L, generator=generator) < starts
    first[0], first[1, 0], first[2, 0] = False, True, False
    state = torch.randn(S, memory.state_size, generator=generator, dtype=torch.float64)
    return features, first, state


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("starts", [0.0, 0.3, 1.0])
def test_a_sequence_is_its_steps_with_resets_before_episodes(kind: str, starts: float) -> None:
    memory = memory_of(kind)
    features, first, state = inputs(memory, starts)
    cell = (nn.LSTMCell if kind == "lstm" else nn.GRUCell)(D, SIZE).double()
    weights = memory.layer.state_dict().items()
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in weights})
    expected = torch.zeros(S, L, SIZE, dtype=torch.float64)
    ends = torch.zeros_like(state)
    for s in range(S):
        now = state[s : s + 1]
        for t in range(L):
            now = torch.zeros_like(now) if first[s, t] else now
            if kind == "lstm":
                now = torch.cat(cell(features[s : s + 1, t], (now[:, :SIZE], now[:, SIZE:])), dim=1)
            else:
                now = cell(features[s : s + 1, t], now)
            expected[s, t] = now[0, :SIZE]
        ends[s] = now[0]
    output, end = memory(features, first, state)
    torch.testing.assert_close((output, end), (expected, ends), rtol=0, atol=1e-12)
    # Many steps are as many single calls.
    for t in range(L):
        step, state = memory(features[:, t : t + 1], first[:, t : t + 1], state)
        torch.testing.assert_close(step[:, 0], expected[:, t], rtol=0, atol=1e-12)
    torch.testing.assert_close(state, ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_gradients_stop_at_the_beginning_of_an_episode(kind: str) -> None:
    memory = memory_of(kind)
    features, first, state = inputs(memory)
    first[:] = False
    first[:, 3] = True
    features.requires_grad_()
    state.requires_grad_()
    output, _ = memory(features, first, state)
    before, start = torch.autograd.grad(output[:, 3:].sum(), [features, state], retain_graph=True)
    assert (before[:, :3] == 0).all() and (before[:, 3:] != 0).any() and (start == 0).all()
    earlier, start = torch.autograd.grad(output[:, 2].sum(), [features, state])
    assert (earlier[:, 0] != 0).all() and (start != 0).any(dim=1).all()


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_weights_come_from_the_generator_and_are_orthogonal_without_biases(kind: str) -> None:
    def made(init: str, seed: int, global_seed: int = 0) -> dict[str, Tensor]:
        torch.manual_seed(global_seed)
        return dict(any_memory(kind, init, seed).state_dict())

    for init in ("orthogonal", "torch"):
        weights, again, other = made(init, 0), made(init, 0, 1), made(init, 1)
        for name, value in weights.items():
            is_zero = init == "orthogonal" and "bias" in name
            assert torch.equal(value, again[name]) and value.any() == (not is_zero)
            assert is_zero or not torch.equal(value, other[name])
            if init == "torch":
                assert value.abs().max() <= SIZE**-0.5
            elif not is_zero:
                gram = value.T @ value
                torch.testing.assert_close(gram, torch.eye(len(gram)), rtol=0, atol=1e-5)
