"""The language model, everything but its embedding table the same for every table, and its loss over few words."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from tensorbed.structures import Format

TABLE_STD = 0.3  # of every table at birth: of 0.05, 0.3 and 1 the best or next to it for each format
OUTPUT_STD = 0.02
EXACT_WORDS = 500  # the most frequent words, seven tokens of eight
DRAWN_WORDS = 500  # of the others, in each step

State = tuple[Tensor, Tensor]


class LanguageModel(nn.Module):
    """Table, LSTM, a narrowing, and an ordinary output layer over all words.

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
        self.output = nn.Linear(dim, vocab)
        # Born knowing how frequent words are, it does not spend its first hundreds of steps on that.
        nn.init.normal_(self.output.weight, std=OUTPUT_STD)
        with torch.no_grad():
            self.output.bias.copy_(log_frequencies)
        # The table comes last: whatever it draws, the body has drawn the same numbers before it.
        self.table = tb.Embedding(vocab, dim, format, std=TABLE_STD)

    def hidden(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        out, state = self.recurrent(self.table(words), state)
        return self.narrow(out), state

    def body(self) -> dict[str, Tensor]:
        """Everything but the table."""
        return {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("table.")}


@dataclass(frozen=True)
class Candidates:
    """The words a training step compares its targets with, and what to add to their scores.

    A softmax over all words would take nine tenths of the time. Its sum is taken exactly over the frequent words and
    the step's own targets, and estimated from a draw over the rest, each drawn word standing for several.
    """

    words: Tensor  # (candidates,)
    offset: Tensor  # (candidates,)
    targets: Tensor  # (n,), places in words

    @classmethod
    def draw(cls, targets: Tensor, vocab: int, generator: torch.Generator) -> Candidates:  # targets: (n,)
        exact = torch.unique(torch.cat([torch.arange(min(EXACT_WORDS, vocab)), targets]))
        others = torch.ones(vocab, dtype=torch.bool).index_fill(0, exact, False).nonzero()[:, 0]
        drawn = others[torch.randperm(len(others), generator=generator)[:DRAWN_WORDS]]
        stands_for = math.log(len(others) / len(drawn)) if len(drawn) else 0.0
        offset = torch.cat([torch.zeros(len(exact)), torch.full((len(drawn),), stands_for)])
        return cls(torch.cat([exact, drawn]), offset, torch.searchsorted(exact, targets))

    def loss(self, output: nn.Linear, hidden: Tensor) -> Tensor:  # (n, dim) -> ()
        weight, bias = output.weight[self.words], output.bias[self.words]
        return F.cross_entropy(F.linear(hidden, weight, bias + self.offset), self.targets)
