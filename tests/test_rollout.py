"""The phase buffer, and how it becomes minibatches.

Everything once, in random order, with all its fields side by side.
"""

import dataclasses

import pytest
import torch
from torch import Generator, Tensor

from phasicrl.config import MinibatchUnit
from phasicrl.optimize import MeanAccumulator
from phasicrl.rollout import (
    AuxiliaryProgress,
    AuxiliarySamples,
    PhaseBuffer,
    PolicySamples,
    Rollout,
    Samples,
)

S, L, A = 6, 4, 3


def cells(num_sequences: int = S, num_steps: int = L) -> Tensor:
    """Return cells `[S, L]` of their own numbers, 100 for each sequence and 1 for each step."""
    return 100 * torch.arange(num_sequences)[:, None] + torch.arange(num_steps)


def samples_at(cell: Tensor, state_size: int = 0) -> PolicySamples:
    """Return samples in which every field says in which cell it belongs."""
    return PolicySamples(
        obs=torch.stack([cell // 100, cell % 100], dim=-1).to(torch.uint8),
        first=cell % 2 == 0,
        state=cell[:, :1].float().expand(len(cell), state_size).contiguous(),
        action_mask=cell[..., None] % A == torch.arange(A),
        value_target=cell + 0.25,
        action=cell,
        old_log_prob=-cell.float(),
        old_value=cell + 0.5,
        advantage=cell + 0.75,
        weight=cell + 0.125,
    )


def assert_fields_line_up(samples: PolicySamples) -> None:
    wanted = samples_at(samples.action, samples.state.shape[1]).tensors()
    for name, tensor in samples.tensors().items():
        assert torch.equal(tensor, wanted[name]) and tensor.dtype == wanted[name].dtype, name


def split(
    samples: PolicySamples, num_minibatches: int, by: MinibatchUnit, generator: Generator | int = 0
) -> list[PolicySamples]:
    if isinstance(generator, int):
        generator = Generator().manual_seed(generator)
    order = samples.random_order(unit=by, generator=generator)
    return [each.gather() for each in samples.minibatches(num_minibatches, order, unit=by)]


def order(minibatches: list[PolicySamples]) -> list[int]:
    return torch.cat([minibatch.action.flatten() for minibatch in minibatches]).tolist()


@pytest.mark.parametrize("state_size", [0, 2])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 6])
def test_segments_are_used_exactly_once_and_whole(num_minibatches: int, state_size: int) -> None:
    """With a memory, segments stay sequences with their state."""
    minibatches = split(samples_at(cells(), state_size), num_minibatches, "segments")
    assert len(minibatches) == num_minibatches
    for minibatch in minibatches:
        assert_fields_line_up(minibatch)
        size = S // num_minibatches
        assert minibatch.action.shape == ((size, L) if state_size else (size * L, 1))
        rows = minibatch.action.reshape(size, L)
        # Consecutive steps of one segment, from its first step.
        assert torch.equal(rows - rows[:, :1], torch.arange(L).expand_as(rows))
        assert (rows[:, 0] % 100 == 0).all()
    assert sorted(order(minibatches)) == cells().flatten().tolist()


@pytest.mark.parametrize("num_minibatches", [1, 4, 24])
def test_transitions_are_used_exactly_once(num_minibatches: int) -> None:
    minibatches = split(samples_at(cells()), num_minibatches, "transitions")
    assert len(minibatches) == num_minibatches
    for minibatch in minibatches:
        assert_fields_line_up(minibatch)
        assert minibatch.action.shape == (S * L // num_minibatches, 1)
    assert sorted(order(minibatches)) == cells().flatten().tolist()
    if num_minibatches == 4:  # shuffled across and within segments
        segments = (minibatches[0].action // 100).flatten().tolist()
        assert len(set(segments)) > 2 and segments != sorted(segments)


@pytest.mark.parametrize(
    ("by", "state_size"), [("segments", 0), ("segments", 2), ("transitions", 0)]
)
def test_a_minibatch_has_its_number_of_steps(by: MinibatchUnit, state_size: int) -> None:
    """Means are weighted by it: gathered and other minibatches count alike."""
    samples = samples_at(cells(), state_size)
    order = samples.random_order(unit=by, generator=Generator())
    for minibatch in samples.minibatches(3, order, unit=by):
        assert minibatch.num_steps == minibatch.gather().first.numel() == S * L // 3


@pytest.mark.parametrize("by", ["segments", "transitions"])
def test_each_pass_has_its_own_order_which_follows_from_the_seed(by: MinibatchUnit) -> None:
    samples, generator = samples_at(cells()), Generator().manual_seed(5)
    first, second = (order(split(samples, 2, by, generator)) for _ in range(2))
    assert first != second and first != order([samples])
    again = Generator().manual_seed(5)
    assert [order(split(samples, 2, by, again)) for _ in range(2)] == [first, second]
    assert first != order(split(samples, 2, by, 6))


@pytest.mark.parametrize(
    ("state_size", "number", "by"),
    [(2, 2, "transitions"), (0, 4, "segments"), (0, 5, "transitions")],
)
def test_impossible_minibatches_fail(state_size: int, number: int, by: MinibatchUnit) -> None:
    with pytest.raises(AssertionError, match=r"width 2|do not divide"):
        split(samples_at(cells(), state_size), number, by)


def test_as_transitions_copies_nothing_and_keeps_what_belongs_together() -> None:
    samples = samples_at(cells())
    flat = samples.as_transitions()
    assert_fields_line_up(flat)
    assert torch.equal(flat.action, cells().reshape(S * L, 1)) and flat.state.shape == (S * L, 0)
    for name, tensor in flat.tensors().items():
        assert name == "state" or tensor.data_ptr() == getattr(samples, name).data_ptr(), name


K, B, T = 3, 2, 5


def make_buffer(*, state_size: int = 0, mask_size: int | None = None) -> PhaseBuffer:
    return PhaseBuffer(
        K, B, T, obs_shape=(4, 4, 3), obs_dtype=torch.uint8, action_shape=(),
        action_dtype=torch.int64, state_size=state_size, mask_size=mask_size,
        device=torch.device("cpu"),
    )  # fmt: skip


def number(rollout: Rollout) -> None:
    """Put its own number into every field."""
    for value, tensor in enumerate(rollout.tensors().values(), start=1):
        tensor.fill_(value % 2 if tensor.dtype == torch.bool else value)


def written() -> PhaseBuffer:
    """Return a filled phase, whose cells hold the numbers of `cells`."""
    buffer = make_buffer(state_size=2, mask_size=A)
    for slot in range(K):
        rollout, cell = buffer.next_rollout(), cells(B, T) + 100 * B * slot
        rollout.obs.copy_(cell[..., None, None, None].expand_as(rollout.obs) % 256)
        rollout.first.copy_(cell % 3 == 0)
        rollout.state.copy_(cell[:, :1].float().expand_as(rollout.state))
        rollout.value_target.copy_(cell + 0.5)
        assert rollout.action_mask is not None
        rollout.action_mask.copy_(cell[..., None] % A == torch.arange(A))
    return buffer


def assert_is_the_phase(samples: Samples) -> None:
    cell = cells(K * B, T)
    assert samples.obs.dtype == torch.uint8 and samples.obs.shape == (K * B, T, 4, 4, 3)
    assert torch.equal(samples.obs[:, :, 0, 0, 0].long(), cell % 256)
    assert torch.equal(samples.first, cell % 3 == 0)
    assert torch.equal(samples.state, cell[:, :1].float().expand(K * B, 2))
    assert torch.equal(samples.value_target, cell + 0.5)
    assert samples.action_mask is not None
    assert torch.equal(samples.action_mask, cell[..., None] % A == torch.arange(A))


def test_auxiliary_samples_are_the_phase_with_the_old_policy() -> None:
    buffer = written()
    old_dist_params = cells(K * B, T)[..., None] + torch.tensor([0.1, 0.2, 0.3])
    samples = buffer.auxiliary_samples(old_dist_params)
    assert_is_the_phase(samples)
    assert torch.equal(samples.old_dist_params, old_dist_params)
    last = buffer.auxiliary_samples(old_dist_params, num_last=1)
    assert torch.equal(last.obs, samples.obs[-B:]) and len(last) == B
    # Nothing is copied.
    assert samples.old_dist_params.data_ptr() == old_dist_params.data_ptr()
    assert samples.obs.data_ptr() == buffer.rollout(0).obs.data_ptr()
    for minibatch in samples.minibatches(3, torch.randperm(len(samples)), unit="segments"):
        gathered = minibatch.gather()
        assert isinstance(gathered, AuxiliarySamples)
        cell = gathered.old_dist_params[..., 0] - 0.1
        torch.testing.assert_close(cell, gathered.value_target - 0.5)


def test_the_buffer_fills_slot_by_slot_and_is_written_over_after_clear() -> None:
    buffer, places = make_buffer(), []
    for slot in range(K):
        with pytest.raises(AssertionError, match=f"{slot} of 3 rollouts"):
            buffer.as_segments()
        places.append(buffer.next_rollout().obs.data_ptr())
        assert buffer.num_filled == slot + 1 and buffer.is_full == (slot + 1 == K)
    assert len(set(places)) == K
    with pytest.raises(AssertionError, match="all 3 rollouts"):
        buffer.next_rollout()
    buffer.aux_progress = AuxiliaryProgress(torch.zeros(0), MeanAccumulator())
    buffer.clear()
    assert buffer.aux_progress is None and not buffer.is_full
    assert buffer.next_rollout().obs.data_ptr() == places[0]


def test_rollouts_are_taken_out_and_loaded_back_by_name() -> None:
    old, new = make_buffer(mask_size=A).next_rollout(), make_buffer(mask_size=A).next_rollout()
    number(old)
    new.load_tensors(old.tensors())
    fields = {field.name for field in dataclasses.fields(Rollout)}
    assert new.tensors().keys() == fields - {"weight"}
    assert all(torch.equal(value, old.tensors()[name]) for name, value in new.tensors().items())
    assert "action_mask" not in make_buffer().rollouts.tensors()


def test_a_rollout_of_another_size_is_not_loaded() -> None:
    """One environment's would be copied to all, silently."""
    rollout = make_buffer().next_rollout()
    saved = {name: tensor[:1].clone() for name, tensor in rollout.tensors().items()}
    with pytest.raises(ValueError, match=r"shape \(1, "):
        rollout.load_tensors(saved)
