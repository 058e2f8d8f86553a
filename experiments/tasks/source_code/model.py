"""The language model: a table of words at each end in a format of choice, and between them what is always the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.settings import Settings, option

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class SourceCodeSettings(Settings):
    """Of the model and of the windows it reads."""

    vocabulary: int = option(10_000, "words at most, <unk> among them", least=2)
    dim: int = option(96, "numbers per word", least=1)
    head_std: float = option(0.1, "of the head's table as it is drawn", above=0)
    steps: int = option(1000, "training steps", least=1)
    epochs: int = option(1, least=1)  # of no use: it is a stream
    patience: int | None = option(None, least=1)
    window: int = option(32, "tokens per lane and step, as far back as gradients go", least=1)
    validations: int = option(8, "spread over the steps", least=1)


class LanguageModel(nn.Module):
    """Embedding, LSTM, a narrowing, and a head over all words.

    Shape:
        - words: ``(length, batch)``
        - hidden: ``(length, batch, dim)``
    """

    def __init__(self, settings: SourceCodeSettings, log_frequencies: Tensor) -> None:
        super().__init__()
        vocabulary, dim = len(log_frequencies), settings.dim
        format = settings.table_format(vocabulary, dim)
        self.recurrent = nn.LSTM(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        # The tables come last: whatever they draw, the body has drawn the same numbers before them. One call of
        # tb.embedding_and_head would make both with one spread; here the embedding likes a larger one than the head.
        self.embedding = tb.Embedding(vocabulary, dim, format, std=settings.std)
        self.head = tb.Head(dim, vocabulary, format, bias=True, std=settings.head_std)
        # Born knowing how frequent words are, it does not spend its first hundreds of steps on that.
        assert self.head.bias is not None
        with torch.no_grad():
            self.head.bias.copy_(log_frequencies)

    def hidden(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        out, state = self.recurrent(self.embedding(words), state)
        return self.narrow(out), state

    def forward(self, words: Tensor, following: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The loss, exact and over all words, summed over the tokens."""
        hidden, state = self.hidden(words, state)
        return self.head.loss(hidden, following, reduction="sum"), state
