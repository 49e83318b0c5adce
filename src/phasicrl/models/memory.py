"""Memory between encoder and heads. Kind: state (modules).

A memory maps features and a state to features and the next state. Networks without memory have a
state of width zero, so that the training loop is the same for both (OPPG impala_cnn.py:185).
"""

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from phasicrl.config import ModelConfig


class NoMemory(nn.Module):
    """Identity: features of each step are independent of other steps."""

    state_size = 0

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
    ) -> tuple[Float[Tensor, "S L D"], Float[Tensor, "S H"]]:  # fmt: skip
        """Return features `[S, L, D]` and state `[S, 0]` unchanged."""
        return features, state


class RecurrentMemory(nn.Module):
    """One LSTM or GRU layer (Hochreiter & Schmidhuber 1997; Cho et al. 2014).

    Args:
        num_inputs: width of the input features.
        config: options of the networks. `memory` is the kind of layer; `memory_size` the width of
            features and state (an LSTM's state has twice that: output and cell). `init` other than
            `torch` means orthogonal weights and zero biases (CleanRL ppo_atari_lstm.py:132-136).
        generator: random generator of the weights.
    """

    def __init__(self, num_inputs: int, config: ModelConfig, generator: Generator) -> None:
        super().__init__()
        self.is_lstm, size = config.memory == "lstm", config.memory_size
        self.num_features, self.state_size = size, 2 * size if self.is_lstm else size
        self.layer = (nn.LSTM if self.is_lstm else nn.GRU)(num_inputs, size)
        with torch.no_grad():
            for name, parameter in self.layer.named_parameters():
                if config.init == "torch":
                    parameter.uniform_(-(size**-0.5), size**-0.5, generator=generator)
                elif name.startswith("weight"):
                    nn.init.orthogonal_(parameter, generator=generator)
                else:
                    parameter.zero_()

    def forward(
        self, features: Float[Tensor, "S L D"], first: Bool[Tensor, "S L"],
        state: Float[Tensor, "S H"],
    ) -> tuple[Float[Tensor, "S L F"], Float[Tensor, "S H"]]:  # fmt: skip
        """Run over L steps of S sequences, with a zero state before every step that is `first`.

        Sequences are split where episodes begin, and the pieces run in parallel as one packed
        sequence of PyTorch, longest first: one call without padding, whose number of steps is that
        of the longest piece.
        """
        if first.shape[1] == 1:
            return self._step(features, first, state)
        num_sequences, num_steps = first.shape
        begins = first.clone()
        begins[:, 0] = True
        # [S·L], index of the piece of each step
        piece = begins.flatten().cumsum(0) - 1
        length = piece.bincount()
        rank = length.argsort(descending=True, stable=True).argsort()  # of pieces, longest first
        # [S·L], index of each step in its piece
        step = torch.arange(len(piece), device=piece.device) - (length.cumsum(0) - length)[piece]
        order = (step * len(length) + rank[piece]).argsort()
        batch_sizes = step.bincount()

        # Only the first piece of a sequence starts from its state, unless it begins an episode.
        start = state.new_zeros(len(length), self.state_size)
        pieces = piece.view(num_sequences, num_steps)
        start[rank[pieces[:, 0]]] = torch.where(first[:, :1], 0.0, state)
        packed = PackedSequence(features.flatten(0, 1)[order], batch_sizes.cpu())
        # An LSTM's state is its output followed by its cell.
        parts = tuple(x.contiguous() for x in start[None].split(self.num_features, dim=-1))
        output, end = self.layer(packed, parts if self.is_lstm else parts[0])
        end = (torch.cat(end, dim=-1) if self.is_lstm else end).squeeze(0)
        result = torch.empty_like(output.data).index_copy(0, order, output.data)
        return result.view(num_sequences, num_steps, -1), end[rank[pieces[:, -1]]]

    def _step(
        self, features: Float[Tensor, "S 1 D"], first: Bool[Tensor, "S 1"],
        state: Float[Tensor, "S H"],
    ) -> tuple[Float[Tensor, "S 1 F"], Float[Tensor, "S H"]]:  # fmt: skip
        """Run one step of S sequences, in operations that can be compiled and exported to ONNX."""
        before = torch.where(first, 0.0, state).split(self.num_features, dim=-1)
        (weights,) = self.layer.all_weights
        if self.is_lstm:
            output, cell = torch.lstm_cell(features[:, 0], before, *weights)
            return output.unsqueeze(1), torch.cat([output, cell], dim=-1)
        output = torch.gru_cell(features[:, 0], before[0], *weights)
        return output.unsqueeze(1), output


Memory = NoMemory | RecurrentMemory


def make_memory(num_inputs: int, config: ModelConfig, generator: Generator) -> Memory:
    """Make the memory that `config.memory` names, for features of width `num_inputs`."""
    if config.memory == "none":
        return NoMemory(num_inputs)
    return RecurrentMemory(num_inputs, config, generator)
