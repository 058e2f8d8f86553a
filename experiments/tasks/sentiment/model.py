"""The paper's classifier: embedding, two bidirectional LSTM layers, a linear head on their last states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.settings import Settings, option

PAD = 0


@dataclass(frozen=True, kw_only=True)
class SentimentSettings(Settings):
    """Of the classifier and its texts."""

    vocabulary: int = option(25_000, least=3)  # padding, the unknown word and one more
    dim: int = option(256, least=1)
    hidden: int = option(128, least=1)
    layers: int = option(2, least=1)
    dropout: float = option(0.5, "of embeddings, between layers and before the head", least=0, below=1)
    max_tokens: int | None = option(None, least=1)  # the last ones of each text
    pad_to: int | None = option(None, least=1)  # shorter texts are padded at their end, and the LSTM reads the padding
    pad_row: str = option("zero", choices=("zero", "trained"))  # what it reads there; "trained" is a row as any other
    phrases: bool = option(False, "train on all phrases of SST-5")
    train_limit: int | None = option(None, least=1)  # train on so many texts; words are counted on all
    examples: int | None = option(None, least=1)  # as if each split had only so many texts


class Classifier(nn.Module):
    """Class scores of texts of equal length.

    Shape:
        - tokens: ``(texts, length)``
        - output: ``(texts, classes)``
    """

    def __init__(self, settings: SentimentSettings, classes: int) -> None:
        super().__init__()
        self.embedding = tb.Embedding(
            settings.vocabulary,
            settings.dim,
            settings.table_format(settings.vocabulary, settings.dim),
            padding_idx=PAD if settings.pad_row == "zero" else None,
            std="glorot" if settings.std is None else settings.std,
        )
        between = settings.dropout if settings.layers > 1 else 0.0
        self.lstm = nn.LSTM(
            settings.dim, settings.hidden, settings.layers, batch_first=True, bidirectional=True, dropout=between
        )
        self.dropout = nn.Dropout(settings.dropout)
        self.head = nn.Linear(2 * settings.hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, (state, _) = self.lstm(self.dropout(self.embedding(tokens)))  # (2 layers, texts, hidden)
        last = torch.cat([state[-2], state[-1]], dim=-1)  # the top layer's end in each direction
        scores: Tensor = self.head(self.dropout(last))
        return scores
