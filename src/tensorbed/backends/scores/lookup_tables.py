"""Scores of rows that are sums of codebook entries: each codebook times the vectors once, then sums of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.projection import Part, Projection, Tape, Vectors, each_of, leaves_of
from tensorbed.dispatch import recording


class LookupTables(Projection):
    """Tables ``(entries, n)`` of what every entry of every codebook scores, and for each row the entries it sums.

    Args:
        tables: the structure's tensors and vectors ``(cols, n)`` to ``(entries, n)``, differentiable.
        places: ``(start, stop) -> (stop - start, parts)`` int64, which entries a row has.
        sums: takes ``(start, stop)``, the tables and where to write the scores, and returns whether it could.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        dtype: torch.dtype,
        tables: Callable[[Sequence[Tensor], Tensor], Tensor],
        places: Callable[[int, int], Tensor],
        sums: Callable[[int, int, Tensor, Tensor], bool],
    ) -> None:
        super().__init__(any(tensor.requires_grad for tensor in tensors))
        self.leaves = leaves_of(tensors, dtype)
        self.tables, self.places, self.summed = tables, places, sums
        self.trained = [leaf for leaf in self.leaves if leaf.requires_grad]
        self.sums = [torch.zeros_like(leaf) for leaf in self.trained]

    def vectors(self, x: Tensor, *, grad: bool) -> Vectors:  # (n, cols)
        data = x.T.contiguous()
        vectors = _Tabled(data, torch.zeros_like(data) if grad else None)
        vectors.leaf = data.detach().requires_grad_(grad)
        with recording(grad or self.wanted):
            vectors.graph = self.tables(self.leaves, vectors.leaf)
        vectors.made = vectors.graph.detach()
        vectors.made_grad = torch.zeros_like(vectors.made) if grad or self.wanted else None
        return vectors

    def done(self, vectors: Vectors) -> None:
        """From the gradient of the tables to those of the vectors and the codebooks."""
        assert isinstance(vectors, _Tabled)
        if vectors.made_grad is None:
            return
        wanted = [*([vectors.leaf] if vectors.leaf.requires_grad else []), *self.trained]
        made = list(torch.autograd.grad(vectors.graph, wanted, vectors.made_grad))
        if vectors.leaf.requires_grad:
            assert vectors.grad is not None
            vectors.grad += made.pop(0)
        for total, one in zip(self.sums, made, strict=True):
            total += one
        vectors.made_grad = None

    def part(self, start: int, stop: int) -> Part:
        return _Entries(self, start, stop)

    def gradients(self) -> list[Tensor | None]:
        return each_of(self.leaves, self.sums)


class _Tabled(Vectors):
    """Vectors with their tables."""

    leaf: Tensor
    graph: Tensor
    made: Tensor
    made_grad: Tensor | None


class _Entries(Part):
    def __init__(self, owner: LookupTables, start: int, stop: int) -> None:
        self.owner, self.at = owner, (start, stop)

    @property
    def places(self) -> Tensor:
        return self.owner.places(*self.at)

    def scores(self, vectors: Vectors, out: Tensor, tape: Tape) -> None:
        assert isinstance(vectors, _Tabled)
        if not self.owner.summed(*self.at, vectors.made, out):
            out.copy_(F.embedding_bag(self.places, vectors.made, mode="sum"))

    def backward(self, vectors: Vectors, grad: Tensor, tape: Tape) -> None:
        assert isinstance(vectors, _Tabled)
        if vectors.made_grad is None:  # only a bias is trained
            return
        leaf = vectors.made.detach().requires_grad_()
        with recording(True):
            again = F.embedding_bag(self.places, leaf, mode="sum")
        vectors.made_grad += torch.autograd.grad(again, leaf, grad)[0]
