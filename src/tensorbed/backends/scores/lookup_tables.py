"""Scores of rows that are sums of codebook entries: each codebook times the vectors once, then sums of its results."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.coded import by_kernel
from tensorbed.backends.scores.scoring import Block, Scores, Vectors
from tensorbed.dispatch import recording


class LookupTables(Scores):
    """Vectors become tables ``(parts * words, n)`` of what every entry of every codebook scores."""

    structure: Any  # one with ``coded_block``

    def turned(self, x: Tensor) -> Tensor:  # (n, cols) -> (parts * words, n)
        books = self.tensors["codebooks"]
        turned = self.structure.turned(self.tensors, x).T.reshape(books.shape[0], -1, x.shape[0])
        return torch.bmm(books, turned).flatten(0, 1)

    def block(self, start: int, stop: int) -> Block:
        return _Entries(self, start, stop)


class _Entries(Block):
    """For each row the entries whose scores are summed."""

    def __init__(self, owner: LookupTables, start: int, stop: int) -> None:
        self.owner, self.at = owner, (start, stop)

    @property
    def _places(self) -> Tensor:  # -> (rows, parts)
        parts, words, _ = self.owner.tensors["codebooks"].shape
        codes = self.owner.tensors["codes"][slice(*self.at)]
        return codes.long() + torch.arange(parts, device=codes.device) * words

    def scores(self, vectors: Vectors, out: Tensor) -> None:
        block = self.owner.structure.coded_block(self.owner.tensors, *self.at)
        if not by_kernel("sums", block, vectors.data, out):
            out.copy_(F.embedding_bag(self._places, vectors.data, mode="sum"))

    def backward(self, vectors: Vectors, grad: Tensor) -> None:
        if vectors.grad is None:  # only a bias is trained
            return
        leaf = vectors.data.detach().requires_grad_()
        with recording(True):
            again = F.embedding_bag(self._places, leaf, mode="sum")
        vectors.grad += torch.autograd.grad(again, leaf, grad)[0]
