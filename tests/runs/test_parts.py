"""Another number of processes: each gets the state of its environments."""

import itertools

import pytest
import torch
from torch import Generator

from phasicrl.distributed import World
from phasicrl.optimize import MeanAccumulator
from phasicrl.runs import parts
from phasicrl.runs.parts import RankState


def test_rows_go_to_the_process_that_has_their_environments() -> None:
    """Three rollouts of four environments, from two processes to one, two and four."""
    whole = torch.arange(12).view(3, 4)
    old = [
        RankState({"learner": {"generator": 0}, "num_filled": 3, "env_steps": 0},
                  {"old-policy-000001": {"x": half.flatten()},
                   "rollout-000001-000": {"x": half[0]}})
        for half in whole.split(2, dim=1)
    ]  # fmt: skip
    for size, rank in [(1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3)]:
        world = World(rank, size)
        own = whole[:, world.local_slice(4)]
        policies, rollout = parts._reshard(old, world).chunks.values()
        assert torch.equal(policies["x"], own.flatten())
        assert torch.equal(rollout["x"], own[0])


@pytest.mark.parametrize("size", [1, 4])
def test_metrics_of_an_unfinished_phase_are_those_of_all_processes(size: int) -> None:
    old, means = [], MeanAccumulator()
    for kl in (1.0, 3.0):  # of 100 steps each
        part = MeanAccumulator()
        part.add(("kl",), torch.tensor([kl]), 100)
        state = {"learner": {"generator": 0}, "auxiliary": {"means": part.state_dict()}}
        old.append(RankState(state, {}))
    new = parts._reshard(old, World(0, size)).state["auxiliary"]["means"]
    means.load_state_dict(new, torch.device("cpu"))
    means.add(("kl",), torch.tensor([5.0]), 200 / size)
    assert means.result() == {"kl": 3.5}


def test_processes_shuffle_by_different_generators() -> None:
    states = [Generator().manual_seed(rank).get_state() for rank in range(2)]
    old = [
        RankState({"learner": {"generator": state}, "env_steps": 64, "collector": 1}, {})
        for state in states
    ]
    new = [parts._reshard(old, World(rank, 4)).state for rank in range(4)]
    found = [each["learner"]["generator"] for each in new]
    assert all(map(torch.equal, found, states))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))
    assert {each["collector"] for each in new} == {None}
