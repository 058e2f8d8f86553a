"""A table that is made once and multiplied with in many calls, for as long as somebody holds it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from tensorbed.vocabulary.head_calls import as_autocast_asks, check_vectors
from tensorbed.vocabulary.scorer import Vocabulary


class HeldTable:
    """Made by the first call, in the precision of its vectors: autocast would cast it anew in every call."""

    def __init__(self) -> None:
        self.table: Tensor | None = None  # (rows, cols)

    def logits(self, vocabulary: Vocabulary, made: Callable[[], Tensor], h: Tensor) -> Tensor:
        """``h @ table.T + bias``: ``(*, cols) -> (*, rows)``; ``made`` makes the table."""
        check_vectors(vocabulary, h)
        h = as_autocast_asks(vocabulary, h)
        if self.table is None or (self.table.dtype, self.table.device) != (h.dtype, h.device):
            self.table = made().detach().to(h.dtype)
        bias = None if vocabulary.bias is None else vocabulary.bias.to(h.dtype)
        return F.linear(h, self.table, bias)
