"""Memory between encoder and heads: features and a state in, features and a state out. Kind: state (modules).

A memory's state is an argument and a result, never remembered inside the module. Networks without memory have a state of width
zero, so that the loop has one shape for both (OPPG impala_cnn.py:185).
"""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor, nn


class Memory(Protocol):
    """What stands between the encoder and the heads."""

    state_size: int
    """Width H of the state; 0 where time steps are independent of each other."""

    def __call__(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"]
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S H"]]:
        """Run over L steps of S sequences; `first` marks the steps before which the state is reset."""
        ...


class NoMemory(nn.Module):
    """Passes features on: each time step stands for itself."""

    state_size = 0

    def forward(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"]
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S H"]]:
        """Return both unchanged."""
        return features, state
