"""The phase buffer, and how it becomes minibatches.

Everything once, in random order, with all its fields side by side.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Generator, Tensor

from phasicrl.config import MinibatchBy
from phasicrl.rollout import AuxiliarySamples, PhaseBuffer, PolicySamples, Rollout, Samples

S, L, A = 6, 4, 3


def cells(num_sequences: int = S, num_steps: int = L) -> Tensor:
    """`[S, L]`: every cell holds its own number, 100 for each sequence and 1 for each step."""
    return 100 * torch.arange(num_sequences)[:, None] + torch.arange(num_steps)


def identifiable(*, state_size: int = 0) -> PolicySamples:
    """Samples in which every field says in which cell it belongs."""
    cell = cells()
    return PolicySamples(
        obs=torch.stack([cell // 100, cell % 100], dim=-1).to(torch.uint8),
        first=cell % 2 == 0,
        state=cell[:, :1].float().expand(S, state_size).contiguous(),
        action_mask=cell[..., None] % A == torch.arange(A),
        value_target=cell + 0.25,
        action=cell,
        old_log_prob=-cell.float(),
        old_value=cell + 0.5,
        advantage=cell + 0.75,
        weight=cell + 0.125,
    )


def assert_fields_line_up(samples: PolicySamples) -> None:
    cell = samples.action
    assert samples.obs.dtype == torch.uint8
    assert torch.equal(samples.obs[..., 0].long() * 100 + samples.obs[..., 1].long(), cell)
    assert torch.equal(samples.first, cell % 2 == 0)
    assert samples.action_mask is not None
    assert torch.equal(samples.action_mask, cell[..., None] % A == torch.arange(A))
    assert torch.equal(samples.value_target, cell + 0.25)
    assert torch.equal(samples.old_log_prob, -cell.float())
    assert torch.equal(samples.old_value, cell + 0.5)
    assert torch.equal(samples.advantage, cell + 0.75)
    assert samples.weight is not None
    assert torch.equal(samples.weight, cell + 0.125)


def deal(
    samples: PolicySamples, num_minibatches: int, by: MinibatchBy, generator: Generator | int = 0
) -> list[PolicySamples]:
    generator = (
        generator if isinstance(generator, Generator) else Generator().manual_seed(generator)
    )
    order = samples.random_order(by=by, generator=generator)
    return [minibatch.gather() for minibatch in samples.minibatches(num_minibatches, order, by=by)]


def order(minibatches: list[PolicySamples]) -> list[int]:
    return torch.cat([minibatch.action.flatten() for minibatch in minibatches]).tolist()


@pytest.mark.parametrize("state_size", [0, 2])
@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 6])
def test_segments_are_dealt_out_exactly_once_and_whole(
    num_minibatches: int, state_size: int
) -> None:
    minibatches = deal(identifiable(state_size=state_size), num_minibatches, "segments")
    assert len(minibatches) == num_minibatches
    for minibatch in minibatches:
        assert_fields_line_up(minibatch)
        rows = minibatch.action.reshape(-1, L)
        assert len(rows) == S // num_minibatches
        # Consecutive steps of one segment, from its first step.
        assert torch.equal(rows - rows[:, :1], torch.arange(L).expand_as(rows))
        assert (rows[:, 0] % 100 == 0).all()
    assert sorted(order(minibatches)) == cells().flatten().tolist()


@pytest.mark.parametrize("num_minibatches", [1, 4, 24])
def test_transitions_are_dealt_out_exactly_once(num_minibatches: int) -> None:
    minibatches = deal(identifiable(), num_minibatches, "transitions")
    assert [tuple(minibatch.first.shape) for minibatch in minibatches] == [
        (S * L // num_minibatches, 1)
    ] * num_minibatches
    for minibatch in minibatches:
        assert_fields_line_up(minibatch)
        assert minibatch.state.shape == (S * L // num_minibatches, 0)
    assert sorted(order(minibatches)) == cells().flatten().tolist()


@pytest.mark.parametrize("state_size", [0, 2])
@pytest.mark.parametrize("by", ["segments", "transitions"])
def test_a_minibatch_has_its_number_of_steps_in_whatever_sequences(
    by: MinibatchBy, state_size: int
) -> None:
    """By it means are weighted: gathered and other minibatches count alike."""
    samples = identifiable(state_size=state_size if by == "segments" else 0)
    order = samples.random_order(by=by, generator=Generator())
    for minibatch in samples.minibatches(3, order, by=by):
        assert minibatch.num_steps == minibatch.materialize().num_steps == S * L // 3


def test_transitions_are_shuffled_across_and_within_segments() -> None:
    first, *_ = deal(identifiable(), 4, "transitions")
    segments = (first.action // 100).flatten().tolist()
    assert len(set(segments)) > 2
    assert segments != sorted(segments)


@pytest.mark.parametrize("by", ["segments", "transitions"])
def test_each_pass_has_an_order_of_its_own_which_follows_from_the_seed(by: MinibatchBy) -> None:
    samples, generator = identifiable(), Generator().manual_seed(5)
    first, second = order(deal(samples, 2, by, generator)), order(deal(samples, 2, by, generator))
    assert first != second
    assert first != order([samples])
    again = Generator().manual_seed(5)
    assert [order(deal(samples, 2, by, again)) for _ in range(2)] == [first, second]
    assert first != order(deal(samples, 2, by, 6))


def test_with_memory_segments_stay_sequences_and_keep_their_state() -> None:
    for minibatch in deal(identifiable(state_size=2), 3, "segments"):
        assert minibatch.action.shape == (2, L)
        assert torch.equal(minibatch.state, minibatch.action[:, :1].float().expand(2, 2))


def test_with_memory_transitions_are_refused() -> None:
    with pytest.raises(AssertionError, match="state of width 2"):
        deal(identifiable(state_size=2), 2, "transitions")


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("segments", "6 segments .* 4 minibatches"),
        ("transitions", "24 transitions .* 5 minibatches"),
    ],
)
def test_minibatches_that_do_not_divide_are_refused(by: MinibatchBy, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        deal(identifiable(), 4 if by == "segments" else 5, by)


def test_as_transitions_copies_nothing_and_keeps_what_belongs_together() -> None:
    samples = identifiable()
    flat = samples.as_transitions()
    assert len(flat) == S * L
    assert_fields_line_up(flat)
    assert torch.equal(flat.action, cells().reshape(S * L, 1))
    assert flat.state.shape == (S * L, 0)
    for field in dataclasses.fields(samples):
        if field.name not in ("state", "old_dist_params"):
            assert (
                getattr(flat, field.name).data_ptr() == getattr(samples, field.name).data_ptr()
            ), field.name


def test_samples_without_a_mask_stay_without() -> None:
    samples = dataclasses.replace(identifiable(), action_mask=None)
    assert samples.as_transitions().action_mask is None
    assert all(minibatch.action_mask is None for minibatch in deal(samples, 2, "segments"))


K, B, T = 3, 2, 5


def make_buffer(*, state_size: int = 0, num_actions: int | None = None) -> PhaseBuffer:
    return PhaseBuffer(
        K,
        B,
        T,
        obs_shape=(4, 4, 3),
        obs_dtype=torch.uint8,
        action_shape=(),
        action_dtype=torch.int64,
        state_size=state_size,
        num_actions=num_actions,
        device=torch.device("cpu"),
    )


def number(rollout: Rollout) -> None:
    """Put a number of its own into every field."""
    for value, tensor in enumerate(rollout.tensors().values(), start=1):
        tensor.fill_(value % 2 if tensor.dtype == torch.bool else value)


def write(buffer: PhaseBuffer) -> None:
    """Fill the phase: each cell holds the number of its segment and its step, as `cells` does."""
    for slot in range(K):
        rollout = buffer.next_rollout()
        cell = cells(B, T) + 100 * B * slot
        rollout.obs.copy_(cell[..., None, None, None].expand_as(rollout.obs) % 256)
        rollout.first.copy_(cell % 3 == 0)
        rollout.state.copy_(cell[:, :1].float().expand_as(rollout.state))
        rollout.value_target.copy_(cell + 0.5)
        if rollout.action_mask is not None:
            rollout.action_mask.copy_(cell[..., None] % A == torch.arange(A))


def assert_is_the_phase(samples: Samples) -> None:
    cell = cells(K * B, T)
    assert samples.obs.dtype == torch.uint8
    assert samples.obs.shape == (K * B, T, 4, 4, 3)
    assert torch.equal(samples.obs[:, :, 0, 0, 0].long(), cell % 256)
    assert torch.equal(samples.first, cell % 3 == 0)
    assert torch.equal(samples.state, cell[:, :1].float().expand(K * B, 2))
    assert torch.equal(samples.value_target, cell + 0.5)
    assert samples.action_mask is not None
    assert torch.equal(samples.action_mask, cell[..., None] % A == torch.arange(A))


def test_what_is_written_into_the_slots_is_the_phase() -> None:
    buffer = make_buffer(state_size=2, num_actions=A)
    write(buffer)
    assert_is_the_phase(buffer.segments())
    assert buffer.segments().obs.data_ptr() == buffer.rollout(0).obs.data_ptr()
    # A slot is a view: what is written later shows too.
    buffer.rollout(2).value_target[1, 4] = -1
    assert buffer.segments().value_target[5, 4] == -1


def test_auxiliary_samples_are_the_phase_with_the_old_policy_beside_it() -> None:
    buffer = make_buffer(state_size=2, num_actions=A)
    write(buffer)
    old_dist_params = cells(K * B, T)[..., None] + torch.tensor([0.1, 0.2, 0.3])
    samples = buffer.auxiliary_samples(old_dist_params)
    assert_is_the_phase(samples)
    assert samples.old_dist_params.data_ptr() == old_dist_params.data_ptr()  # nothing is copied
    assert torch.equal(samples.old_dist_params, old_dist_params)
    last = buffer.auxiliary_samples(old_dist_params, last=1)
    assert torch.equal(last.obs, samples.obs[-B:]) and len(last) == B
    assert samples.obs.data_ptr() == buffer.rollout(0).obs.data_ptr()
    for minibatch in samples.minibatches(3, torch.randperm(len(samples)), by="segments"):
        gathered = minibatch.gather()
        assert isinstance(gathered, AuxiliarySamples)
        torch.testing.assert_close(
            gathered.old_dist_params[..., 0] - 0.1, gathered.value_target - 0.5
        )


def test_policy_samples_take_each_field_from_its_place() -> None:
    buffer = make_buffer(state_size=2, num_actions=A)
    rollout = buffer.next_rollout()
    number(rollout)
    advantage = cells(B, T).float()
    samples = rollout.policy_samples(advantage)
    source = {
        name: name for name in ("obs", "first", "state", "action_mask", "value_target", "action")
    }
    source |= {"old_log_prob": "log_prob", "old_value": "value"}
    for name, origin in source.items():
        assert getattr(samples, name) is getattr(rollout, origin), name
    assert samples.advantage is advantage


def test_the_buffer_fills_slot_by_slot_and_is_written_over_after_clear() -> None:
    buffer = make_buffer()
    places = []
    for slot in range(K):
        assert not buffer.is_full
        rollout = buffer.next_rollout()
        assert buffer.num_filled == slot + 1
        places.append(rollout.obs.data_ptr())
    assert buffer.is_full
    assert len(set(places)) == K
    buffer.clear()
    assert not buffer.is_full
    assert buffer.next_rollout().obs.data_ptr() == places[0]


def test_a_full_buffer_takes_nothing_and_a_phase_under_way_gives_nothing() -> None:
    buffer = make_buffer()
    buffer.next_rollout()
    with pytest.raises(AssertionError, match="1 of 3 rollouts are filled"):
        buffer.segments()
    buffer.next_rollout()
    buffer.next_rollout()
    with pytest.raises(AssertionError, match="all 3 rollouts of the phase are filled"):
        buffer.next_rollout()


def test_rollouts_are_taken_out_and_loaded_back_by_name() -> None:
    old, new = make_buffer(num_actions=A).next_rollout(), make_buffer(num_actions=A).next_rollout()
    number(old)
    new.load(old.tensors())
    assert new.tensors().keys() == {field.name for field in dataclasses.fields(Rollout)}
    assert all(torch.equal(value, old.tensors()[name]) for name, value in new.tensors().items())


def test_without_masks_there_is_no_room_for_them() -> None:
    buffer = make_buffer()
    assert buffer.next_rollout().action_mask is None
    assert "action_mask" not in buffer.rollouts.tensors()


def test_a_rollout_of_another_size_is_not_loaded() -> None:
    """One environment's would be copied to all, silently."""
    rollout = make_buffer().next_rollout()
    saved = {name: tensor[:1].clone() for name, tensor in rollout.tensors().items()}
    with pytest.raises(ValueError, match=r"of a rollout has the shape \(1, .* is needed"):
        rollout.load(saved)
