"""The paper's classifier: embedding, two bidirectional LSTM layers, a linear head on their last states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.settings import Settings

PAD, UNKNOWN, FIRST_WORD = 0, 1, 2


class Classifier(nn.Module):
    """Class scores of texts of equal length.

    Shape:
        - tokens: ``(texts, length)``
        - output: ``(texts, classes)``
    """

    def __init__(self, settings: Settings, classes: int) -> None:
        super().__init__()
        self.embedding = tb.Embedding(
            settings.vocabulary,
            settings.dim,
            settings.table_format(),
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
