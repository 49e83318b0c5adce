"""Measures of a network's state, for the metrics. Kind: pure."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from phasicrl.config import Precision
from phasicrl.distributed import World
from phasicrl.models.agent import Agent
from phasicrl.models.encoders import in_precision


@torch.no_grad()
def network_diagnostics(
    agent: Agent, obs: Shaped[Tensor, "N *shape"], *, precision: Precision, world: World
) -> dict[str, float]:
    """Measure the shares of dormant features and of clipped observations.

    Args:
        agent: networks to measure.
        obs: observations of this process.
        precision: precision of the encoder.
        world: processes whose observations are measured together.
    """
    with in_precision(precision, obs.device):
        features = agent.encoder(agent.reader(obs)).float().abs().mean(0)
    dormant = dormant_fraction(world.all_gather_cat(features[None]).mean(0))
    record = {"network/dormant_fraction": float(dormant)}
    if agent.reader.normalizer is not None:
        clipped = {"observations/clipped_fraction": agent.reader.clipped_fraction(obs)}
        record |= world.mean_of(clipped)
    return record


def dormant_fraction(mean_size: Float[Tensor, " D"], *, below: float = 0.025) -> Float[Tensor, ""]:
    """Return the share of units whose mean activation is at most `below` times the mean unit's.

    As Sokar et al. 2023, "The dormant neuron phenomenon in deep reinforcement learning",
    definition 3.1, with their τ = 0.025; all are dormant where every unit is 0.
    """
    return (mean_size <= below * mean_size.mean()).float().mean()
