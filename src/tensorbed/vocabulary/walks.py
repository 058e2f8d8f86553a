"""The walks of a cross-entropy over tiles of scores. Gradients are off here; see ``loss`` for autograd."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tensorbed.backends.scores.projection import Part, Tape, Vectors
from tensorbed.vocabulary.scorer import Scorer
from tensorbed.vocabulary.softmax import Gradient, Sums, Terms


@dataclass
class Outcome:
    """Losses of each vector, and for later their log-sum-exp.

    Shape:
        - loss, z_loss, lse: ``(n,)``
        - x_grad: ``(n, cols)`` or ``None``
    """

    loss: Tensor
    z_loss: Tensor
    lse: Tensor
    x_grad: Tensor | None = None


@dataclass
class _Group:
    """A group of vectors whose scores lie in the buffer."""

    at: slice
    vectors: Vectors
    sums: Sums
    lse: Tensor = field(init=False)
    gradient: Gradient = field(init=False)


def forward(scorer: Scorer, x: Tensor, target: Tensor, terms: Terms) -> Outcome:  # (n, cols), (n,)
    """Every tile once, none kept."""
    outcome, buffer = _empty(x), scorer.buffer(x)
    for at in scorer.schedule.groups():
        group = _group(scorer, x, target, terms, at, grad=False)
        for start, _, tile, _ in scorer.tiles(group.vectors, buffer):
            group.sums.absorb(tile, start)
        _settle(group, outcome)
    return outcome


def backward(
    scorer: Scorer, x: Tensor, target: Tensor, terms: Terms, lse: Tensor, scales: tuple[Tensor, Tensor], *, grad: bool
) -> Tensor | None:
    """Every tile once more, and its gradients; those of ``x`` are returned if asked for.

    Shape:
        - scales: ``(n,)`` each, what the loss and the z-loss of each vector are multiplied by
    """
    x_grad = torch.empty_like(x) if grad else None
    buffer = scorer.buffer(x)
    for at in scorer.schedule.groups():
        group = _group(scorer, x, target, terms, at, grad=grad)
        group.gradient = group.sums.gradient_of(lse[at], scales[0][at], scales[1][at])
        for start, part, tile, tape in scorer.tiles(group.vectors, buffer):
            _go_back(scorer, part, start, group, tile, tape)
        scorer.projection.done(group.vectors)
        if x_grad is not None:
            x_grad[at] = scorer.projection.gradient_of(group.vectors)
    return x_grad


def in_groups(
    scorer: Scorer, x: Tensor, target: Tensor, terms: Terms, scales: tuple[Tensor, Tensor], *, grad: bool
) -> Outcome:
    """Scores of a group over all rows, then their gradients while the next group's scores take their place."""
    outcome, schedule = _empty(x), scorer.schedule
    outcome.x_grad = torch.empty_like(x) if grad else None
    buffers = {start: x.new_empty((stop - start) * schedule.group) for start, stop in schedule.blocks()}
    tapes: dict[int, Tape] = {}
    before: _Group | None = None
    for at in [*schedule.groups(), None]:
        now = None if at is None else _group(scorer, x, target, terms, at, grad=grad)
        for start, stop, part in scorer.parts():
            if before is not None:
                tile = _tile(buffers[start], stop - start, before)
                tape = _tape(scorer, part, start, before, tapes)
                if not schedule.keeps:
                    part.refill(before.vectors, tape)
                _go_back(scorer, part, start, before, tile, tape)
            if now is not None:
                tile = _tile(buffers[start], stop - start, now)
                scorer.write(part, start, now.vectors, tile, _tape(scorer, part, start, now, tapes))
                now.sums.absorb(tile, start)
        if before is not None:
            scorer.projection.done(before.vectors)
            if outcome.x_grad is not None:
                outcome.x_grad[before.at] = scorer.projection.gradient_of(before.vectors)
        if now is not None:
            _settle(now, outcome)
            now.gradient = now.sums.gradient_of(now.lse, scales[0][now.at], scales[1][now.at])
        before = now
    return outcome


def _tape(scorer: Scorer, part: Part, start: int, group: _Group, tapes: dict[int, Tape]) -> Tape:
    """One for each block where they are kept, written over by the next group; else one for all."""
    if not scorer.schedule.keeps:
        return scorer.scratch(part, group.vectors.count)
    if start not in tapes:
        tapes[start] = part.tape(scorer.schedule.group)
    return part.tape(group.vectors.count, tapes[start])


def _go_back(scorer: Scorer, part: Part, start: int, group: _Group, tile: Tensor, tape: Tape) -> None:
    """From a tile of scores to its gradients."""
    slope = scorer.through_softcap(tile)
    group.gradient.write(tile, start)
    if slope is not None:
        tile *= slope
    scorer.backward(part, start, group.vectors, tile, tape)


def _group(scorer: Scorer, x: Tensor, target: Tensor, terms: Terms, at: slice, *, grad: bool) -> _Group:
    starts = [start for start, _ in scorer.schedule.blocks()]
    return _Group(at, scorer.vectors(x[at], grad=grad), Sums(terms, target[at], starts, x.dtype))


def _tile(buffer: Tensor, rows: int, group: _Group) -> Tensor:  # -> (rows, n)
    n = group.vectors.count
    return buffer[: rows * n].view(rows, n)


def _empty(x: Tensor) -> Outcome:
    return Outcome(*(x.new_empty(x.shape[0]) for _ in range(3)))


def _settle(group: _Group, outcome: Outcome) -> None:
    """The group's sums are complete."""
    group.lse = group.sums.log_sum_exp()
    outcome.lse[group.at] = group.lse
    outcome.loss[group.at], outcome.z_loss[group.at] = group.sums.losses(group.lse)
