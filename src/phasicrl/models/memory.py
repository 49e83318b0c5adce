"""Memory between encoder and heads: features and a state in, features and a state out. Kind: state (modules).

A memory's state is an argument and a result, never remembered inside the module. Networks without
memory have a state of width zero, so that the loop has one shape for both (OPPG impala_cnn.py:185).
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from phasicrl.config import Initialization


class NoMemory(nn.Module):
    """Passes features on: each time step stands for itself."""

    state_size = 0

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"]
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S H"]]:
        """Return both unchanged."""
        return features, state


class RecurrentMemory(nn.Module):
    """One LSTM or GRU layer (Hochreiter & Schmidhuber 1997; Cho et al. 2014).

    Args:
        kind: which.
        num_inputs: width of the features that come in.
        size: width of those that go out, and of the state (twice that for an LSTM: output and
            cell).
        init: `torch` keeps PyTorch's default; all others take orthogonal weights and no biases
            (CleanRL ppo_atari_lstm.py:109-114).
        generator: source of the weights.
    """

    def __init__(self, kind: Literal["lstm", "gru"], num_inputs: int, size: int, *, init: Initialization, generator: Generator) -> None:
        super().__init__()
        self.kind = kind
        self.num_features = size
        self.state_size = 2 * size if kind == "lstm" else size
        self.layer = (nn.LSTM if kind == "lstm" else nn.GRU)(num_inputs, size)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if init == "torch":
                    parameter.uniform_(-(size**-0.5), size**-0.5, generator=generator)
                elif name.startswith("weight"):
                    nn.init.orthogonal_(parameter, generator=generator)
                else:
                    parameter.zero_()

    def forward(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"], state: Float[Tensor, "S H"]
    ) -> tuple[Float[Tensor, "S L F"], Float[Tensor, "S H"]]:
        """Run over L steps of S sequences, starting from nothing at every step that is `first`.

        Episodes that begin inside are cut out and run beside each other, longest first, as
        PyTorch's packed sequences want them: one call, no padding, and as many steps as the longest
        piece has, not as L.
        """
        num_sequences, num_steps = first.shape
        begins = first.clone()
        begins[:, 0] = True
        piece = begins.flatten().cumsum(0) - 1  # [S·L]: number of the piece that each step belongs to
        length = piece.bincount()
        longest_first = length.argsort(descending=True, stable=True)
        rank = torch.empty_like(longest_first)
        rank[longest_first] = torch.arange(len(length), device=rank.device)
        step = torch.arange(len(piece), device=piece.device) - (length.cumsum(0) - length)[piece]  # [S·L]: inside of its piece
        order = (step * len(length) + rank[piece]).argsort()
        batch_sizes = (length.unsqueeze(0) > torch.arange(int(length.max()), device=length.device).unsqueeze(1)).sum(1)

        # Only a sequence's own first piece goes on from its state, and only if it does not begin an
        # episode.
        start = state.new_zeros(len(length), self.state_size)
        own = piece.view(num_sequences, num_steps)
        start[rank[own[:, 0]]] = torch.where(first[:, :1], 0.0, state)
        output, end = self._run(PackedSequence(features.flatten(0, 1)[order], batch_sizes.cpu()), start)
        result = torch.empty_like(output).index_copy(0, order, output)
        return result.view(num_sequences, num_steps, -1), end[rank[own[:, -1]]]

    def _run(self, packed: PackedSequence, start: Float[Tensor, "Q H"]) -> tuple[Float[Tensor, "M F"], Float[Tensor, "Q H"]]:
        """The layer over Q pieces, with its state as one tensor: an LSTM's output and cell lie side by side."""
        parts = tuple(part.contiguous().unsqueeze(0) for part in start.split(self.num_features, dim=-1))
        output, end = self.layer(packed, parts if self.kind == "lstm" else parts[0])
        return output.data, torch.cat(end, dim=-1).squeeze(0) if self.kind == "lstm" else end.squeeze(0)


Memory = NoMemory | RecurrentMemory


def make_memory(
    kind: Literal["none", "lstm", "gru"], num_inputs: int, size: int, *, init: Initialization, generator: Generator
) -> Memory:  # fmt: skip
    """The memory of that name for features of a width."""
    if kind == "none":
        return NoMemory(num_inputs)
    return RecurrentMemory(kind, num_inputs, size, init=init, generator=generator)
