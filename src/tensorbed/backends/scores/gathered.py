"""Scores of rows that are sums of a few entries which all rows share: entries are scored once, rows gather theirs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.scoring import Cost, Scores, Scoring, Vectors

_GATHER = 8  # multiply-adds that adding the score of one entry is worth
_SUMMED = 2**18  # scores that are summed at once, before they are where they belong


def gathering(structure: Any, entries: int, each: int) -> Scoring:
    """The way for a structure with ``entry_scores`` and ``entries_of``: of so many entries ``each`` for a row."""
    adds = entries * structure.cols + structure.rows * each * _GATHER
    return Scoring("gathered entries", Cost(multiply_adds=adds, turned=entries), partial(GatheredScores, structure))


class GatheredScores(Scores):
    """Vectors become tables ``(entries, n)`` of what every entry scores, of which a row of the table sums a few."""

    structure: Any

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (entries, n)
        scores: Tensor = self.structure.entry_scores(self.tensors, x)
        return scores

    def open(self, start: int, stop: int) -> None:
        super().open(start, stop)
        self._entries: tuple[Tensor, Tensor | None] | None = None

    @property
    def entries(self) -> tuple[Tensor, Tensor | None]:  # (rows of the block, each), twice
        """Which entries the rows of the open block sum, and with which signs if not all are 1."""
        if self._entries is None:
            self._entries = self.structure.entries_of(self.tensors, self.start, self.stop)
        return self._entries

    def write(self, vectors: Vectors, out: Tensor) -> None:
        places, signs = self.entries
        if places.shape[1] == 1 and signs is None:
            torch.index_select(vectors.data, 0, places[:, 0], out=out)
            return
        height = max(1, _SUMMED // max(1, out.shape[1]))
        for at in range(0, out.shape[0], height):
            part = slice(at, at + height)
            own = None if signs is None else signs[part].to(out.dtype)
            out[part] = F.embedding_bag(places[part], vectors.data, mode="sum", per_sample_weights=own)

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        if vectors.grad is None:  # only a bias is trained
            return
        places, signs = self.entries
        for j, place in enumerate(places.unbind(1)):
            vectors.grad.index_add_(0, place, grad if signs is None else grad * signs[:, j, None].to(grad.dtype))
