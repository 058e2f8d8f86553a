"""The language model: a table of words at each end in a format of choice, and between them what is always the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tensorbed as tb
from tensorbed.structures import Format

# Of the tables at birth, whatever their format. In 300 steps a head's 0.1 was better than 0.02, or within a percent of
# it, for each format; 0.2 for both ends was worse by 3 or 4 % for full tables and for a train of rank 16.
EMBEDDING_STD = 0.3
HEAD_STD = 0.1

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Embedding, LSTM, a narrowing, and a head over all words.

    Shape:
        - words: ``(length, batch)``
        - hidden: ``(length, batch, dim)``
    """

    def __init__(self, log_frequencies: Tensor, dim: int, format: Format, seed: int) -> None:
        super().__init__()
        vocab = len(log_frequencies)
        torch.manual_seed(seed)
        self.recurrent = nn.LSTM(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        # The tables come last: whatever they draw, the body has drawn the same numbers before them. One call of
        # tb.embedding_and_head would make both with one spread; here the embedding likes a larger one than the head.
        self.embedding = tb.Embedding(vocab, dim, format, std=EMBEDDING_STD)
        self.head = tb.Head(dim, vocab, format, bias=True, std=HEAD_STD)
        # Born knowing how frequent words are, it does not spend its first hundreds of steps on that.
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias.copy_(log_frequencies)

    def hidden(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        out, state = self.recurrent(self.embedding(words), state)
        return self.narrow(out), state

    def body(self) -> dict[str, Tensor]:
        """Everything but the two tables; the head's bias is no part of its table."""
        tables = {f"{end}.{name}" for end in ("embedding", "head") for name in getattr(self, end).params()}
        return {name: tensor for name, tensor in self.state_dict().items() if name not in tables}
