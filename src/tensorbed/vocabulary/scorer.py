"""Scores of vectors over a vocabulary, tile by tile: the structure's, a bias, a constant padding row, a soft cap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tensorbed.backends.scores.projection import Part, Tape, Vectors
from tensorbed.structures import Structure
from tensorbed.vocabulary.schedule import Schedule


@dataclass(frozen=True)
class Vocabulary:
    """What scores are made from.

    Shape:
        - tensors: the structure's, in its order
        - bias: ``(rows,)`` or ``None``
        - padding_row: ``(cols,)``, constant, in place of row ``padding_idx``; ``None`` where there is none
    """

    structure: Structure
    tensors: tuple[Tensor, ...]
    bias: Tensor | None = None
    padding_idx: int | None = None
    padding_row: Tensor | None = None

    @property
    def floats(self) -> tuple[Tensor, ...]:
        """All that is multiplied with or added to the vectors."""
        return (*self.tensors, *(() if self.bias is None else (self.bias,)))

    @property
    def trains(self) -> bool:
        """Whether anything in it asks for a gradient."""
        return any(t.requires_grad for t in (*self.tensors, self.bias) if t is not None)

    def detached(self) -> Vocabulary:
        """The same, asking for no gradient."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, tensors=tuple(t.detach() for t in self.tensors), bias=bias)


class Scorer:
    """The scores of one call. Called with gradients off; those asked for add up here."""

    def __init__(self, vocabulary: Vocabulary, schedule: Schedule, dtype: torch.dtype, softcap: float | None) -> None:
        self.schedule, self.softcap = schedule, softcap
        self.projection = schedule.way.open(vocabulary.tensors, dtype)
        self.bias = None if vocabulary.bias is None else vocabulary.bias.detach().to(dtype)
        learns = vocabulary.bias is not None and vocabulary.bias.requires_grad
        self.bias_grad = torch.zeros_like(self.bias) if learns and self.bias is not None else None
        self.padding_idx = vocabulary.padding_idx
        self.padding: Tensor | None = None  # the constant row, its columns in the order that vectors have here
        if vocabulary.padding_row is not None:
            row = vocabulary.padding_row.detach().to(dtype=dtype, device=vocabulary.tensors[0].device)
            self.padding = self.projection.vectors(row[None], grad=False).data[:, 0]
        self._room: Tape | None = None

    def vectors(self, x: Tensor, *, grad: bool) -> Vectors:  # (n, cols)
        return self.projection.vectors(x, grad=grad)

    def parts(self) -> Iterator[tuple[int, int, Part]]:
        """The blocks in their order, each closed when the next is asked for."""
        for start, stop in self.schedule.blocks():
            part = self.projection.part(start, stop)
            yield start, stop, part
            part.close()

    def tiles(self, vectors: Vectors, buffer: Tensor) -> Iterator[tuple[int, Part, Tensor, Tape]]:
        """Blocks with their scores ``(rows, n)``, each in the buffer in place of the one before."""
        n = vectors.count
        for start, stop, part in self.parts():
            tile, tape = buffer[: (stop - start) * n].view(stop - start, n), self.scratch(part, n)
            self.write(part, start, vectors, tile, tape)
            yield start, part, tile, tape

    def buffer(self, x: Tensor) -> Tensor:
        """Room for the largest tile."""
        return x.new_empty(self.schedule.height * self.schedule.group)

    def scratch(self, part: Part, n: int) -> Tape:
        """A tape that is overwritten by the next part. The first part and group asked for are the largest."""
        if self._room is None:
            self._room = part.tape(self.schedule.group)
        return part.tape(n, self._room)

    def write(self, part: Part, start: int, vectors: Vectors, tile: Tensor, tape: Tape) -> None:
        """Scores of a block: ``tile`` is ``(rows of the part, n)``."""
        part.scores(vectors, tile, tape)
        at = self._padding_in(start, tile)
        if at is not None and self.padding is not None:
            tile[at] = self.padding @ vectors.data
        if self.bias is not None:
            tile += self.bias[start : start + tile.shape[0], None]
        if self.softcap is not None:
            tile.div_(self.softcap).tanh_().mul_(self.softcap)

    def backward(self, part: Part, start: int, vectors: Vectors, grad: Tensor, tape: Tape) -> None:
        """Add what the gradient of a block's scores, after the soft cap was undone, gives; ``grad`` is used up."""
        if self.bias_grad is not None:
            self.bias_grad[start : start + grad.shape[0]] += grad.sum(1)
        at = self._padding_in(start, grad)
        if at is not None and self.padding is not None:
            if vectors.grad is not None:
                vectors.grad.addr_(self.padding, grad[at])
            grad[at] = 0
        part.backward(vectors, grad, tape)

    def through_softcap(self, scores: Tensor) -> Tensor | None:  # (rows, n)
        """``d capped / d score`` from the capped scores."""
        return None if self.softcap is None else 1 - (scores / self.softcap).square_()

    def _padding_in(self, start: int, tile: Tensor) -> int | None:
        at = None if self.padding_idx is None else self.padding_idx - start
        return at if at is not None and 0 <= at < tile.shape[0] else None
