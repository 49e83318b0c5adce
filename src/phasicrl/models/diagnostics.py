"""Diagnostics of networks, for the metrics. Kind: pure."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from phasicrl.config import Precision
from phasicrl.distributed import World
from phasicrl.models.agent import Agent
from phasicrl.models.encoders import autocast
from phasicrl.spaces import select_keys


@torch.no_grad()
def diagnose_networks(
    agent: Agent, obs: Shaped[Tensor, "N *shape"], *, precision: Precision, world: World
) -> dict[str, float]:
    """Measure the fractions of dormant features and of clipped inputs.

    Args:
        agent: networks to measure.
        obs: stored observations of this process, `[N, …]`.
        precision: precision of the encoder.
        world: processes whose observations are measured together.
    """
    with autocast(precision, obs.device):
        inputs = select_keys(agent.reader(obs), agent.config.policy_obs)
        features = agent.encoder(inputs).float().abs().mean(0)
    dormant = dormant_fraction(world.all_gather_cat(features[None]).mean(0))
    record = {"network/dormant_fraction": float(dormant)}
    if agent.reader.normalizer is not None:
        clipped = {"observations/clipped_fraction": agent.reader.clipped_fraction(obs)}
        record |= world.average_record(clipped)
    return record


def dormant_fraction(activation: Float[Tensor, " D"], *, tau: float = 0.025) -> Float[Tensor, ""]:
    """Return the fraction of units whose activation is at most τ times the average, 0-d.

    All units are dormant if every activation is 0.

    Source: Sokar et al. 2023, "The dormant neuron phenomenon in deep reinforcement learning",
    definition 3.1, with τ = 0.025.

    Args:
        activation: mean absolute activation of each unit, `[D]`.
        tau: threshold τ.
    """
    return (activation <= tau * activation.mean()).float().mean()
