"""The passes of a cross-entropy over tiles of scores. Gradients are off here; see ``loss`` for autograd."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from tensorbed.backends.scores.scoring import Block
from tensorbed.vocabulary.scorer import Group, Scorer
from tensorbed.vocabulary.softmax import Gradient, Sums, Terms


@dataclass
class Outcome:
    """Losses of each vector, and for later their log-sum-exp: ``(n,)`` each."""

    loss: Tensor
    z_loss: Tensor
    lse: Tensor

    def settle(self, group: Group, sums: Sums) -> Tensor:
        """The group's sums are complete."""
        lse = self.lse[group.at] = sums.log_sum_exp()
        self.loss[group.at], self.z_loss[group.at] = sums.losses(lse)
        return lse


def forward(scorer: Scorer, target: Tensor, terms: Terms) -> Outcome:  # (n,)
    """Every tile once, none kept."""
    outcome, buffer = _empty(scorer), scorer.buffer()
    for group in scorer.groups():
        sums = _sums(scorer, group, target, terms)
        for start, _, tile in scorer.tiles(group, buffer):
            sums.absorb(tile, start)
        outcome.settle(group, sums)
    return outcome


def backward(scorer: Scorer, target: Tensor, terms: Terms, lse: Tensor, scales: tuple[Tensor, Tensor]) -> None:
    """Every tile once more, and its gradients.

    Shape:
        - scales: ``(n,)`` each, what the loss and the z-loss of each vector are multiplied by
    """
    buffer = scorer.buffer()
    for group in scorer.groups():
        at, sums = group.at, _sums(scorer, group, target, terms)
        gradient = sums.gradient_of(lse[at], scales[0][at], scales[1][at])
        for start, block, tile in scorer.tiles(group, buffer):
            _go_back(scorer, block, start, group, gradient, tile)
        scorer.finish(group)


def in_groups(scorer: Scorer, target: Tensor, terms: Terms, scales: tuple[Tensor, Tensor]) -> Outcome:
    """Scores of a group over all rows, then their gradients while the next group's scores take their place."""
    outcome = _empty(scorer)
    buffers = {start: scorer.x.new_empty((stop - start) * scorer.tiling.group) for start, stop in scorer.blocks}
    before: tuple[Group, Gradient] | None = None
    for group in chain(scorer.groups(), [None]):
        sums = None if group is None else _sums(scorer, group, target, terms)
        for start, stop, block in scorer.each_block():
            if before is not None:
                tile = _tile(buffers[start], stop - start, before[0])
                _go_back(scorer, block, start, *before, tile)
            if group is not None and sums is not None:
                tile = _tile(buffers[start], stop - start, group)
                scorer.write(block, start, group, tile)
                sums.absorb(tile, start)
        if before is not None:
            scorer.finish(before[0])
        if group is not None and sums is not None:
            lse = outcome.settle(group, sums)
            before = group, sums.gradient_of(lse, scales[0][group.at], scales[1][group.at])
    return outcome


def _go_back(scorer: Scorer, block: Block, start: int, group: Group, gradient: Gradient, tile: Tensor) -> None:
    """From a tile of scores to its gradients."""
    slope = scorer.through_softcap(tile)
    gradient.write(tile, start)
    if slope is not None:
        tile *= slope
    scorer.backward(block, start, group, tile)


def _sums(scorer: Scorer, group: Group, target: Tensor, terms: Terms) -> Sums:
    return Sums(terms, target[group.at], [start for start, _ in scorer.blocks], scorer.x.dtype)


def _tile(buffer: Tensor, rows: int, group: Group) -> Tensor:  # -> (rows, n)
    return buffer[: rows * group.count].view(rows, group.count)


def _empty(scorer: Scorer) -> Outcome:
    return Outcome(*(scorer.x.new_empty(scorer.x.shape[0]) for _ in range(3)))
