"""Rows of a chain in PyTorch alone, and their gradients: every left product once, one batched product for a bucket.

Half precision is computed in single and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores
from tensorbed.backends.graphs import WORKS
from tensorbed.backends.torch.prefixes import Level, find_prefixes
from tensorbed.dispatch import full_precision, working_dtype
from tensorbed.indexing import check_range

_HELD = 2**20  # numbers that one step may always hold


@dataclass(frozen=True)
class Piece:
    """Some unique rows of a batch.

    Shape:
        - first: ``(n_1,)``, the slices of the first core
    """

    first: Tensor
    levels: tuple[Level, ...]

    @property
    def place(self) -> Tensor:  # -> (unique rows,)
        """Where each row is."""
        return self.levels[-1].place


@dataclass(frozen=True)
class SharedRows:
    """A batch of indices: its unique rows, in pieces that never hold as many numbers as the table has.

    Shape:
        - inverse: ``(n,)``, which unique row an index is
    """

    chain: Chain
    pieces: tuple[Piece, ...]
    inverse: Tensor

    @classmethod
    def of(cls, chain: Chain, index: Tensor) -> SharedRows:  # (n,) int64
        """``IndexError`` for an index outside the table."""
        found = find_prefixes(index, chain.row_factors)
        check_range(found.rows[[0, -1]], chain.rows)  # which ascend
        most = _most_rows(chain)
        parts = [found]
        if found.rows.shape[0] > most:
            parts = [find_prefixes(rows, chain.row_factors) for rows in found.rows.split(most)]
        return cls(chain, tuple(Piece(part.digits[0], part.levels()) for part in parts), found.inverse)

    def rows(self, cores: Cores) -> Tensor:  # -> (n, cols)
        with full_precision(self.inverse):
            if len(self.pieces) == 1:
                (piece,) = self.pieces
                rows = self._products(cores, piece).index_select(0, piece.place.index_select(0, self.inverse))
                return rows.to(cores[0].dtype)
            sizes = [piece.place.shape[0] for piece in self.pieces]
            unique = cores[0].new_empty(sum(sizes), self.chain.cols, dtype=working_dtype(*cores))
            for piece, part in zip(self.pieces, unique.split(sizes), strict=True):
                torch.index_select(self._products(cores, piece), 0, piece.place, out=part)
            return unique.index_select(0, self.inverse).to(cores[0].dtype)

    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]:  # (n, cols)
        """Of the cores, in their stored shapes. Left products are made again: all but the last are few."""
        dtype, grad = cores[0].dtype, grad.to(working_dtype(*cores))
        sums = [torch.zeros_like(core, dtype=grad.dtype, memory_format=torch.contiguous_format) for core in cores]
        with full_precision(self.inverse):
            if len(self.pieces) == 1:
                (piece,) = self.pieces
                self._add_gradients(cores, piece, piece.place.index_select(0, self.inverse), grad, sums)
                return [one.to(dtype) for one in sums]
            # Repeated rows are summed once, before anything is multiplied.
            sizes = [piece.place.shape[0] for piece in self.pieces]
            unique = grad.new_zeros(sum(sizes), self.chain.cols).index_add_(0, self.inverse, grad)
            for piece, part in zip(self.pieces, unique.split(sizes), strict=True):
                self._add_gradients(cores, piece, piece.place, part, sums)
            return [one.to(dtype) for one in sums]

    def _left_products(self, cores: Cores, piece: Piece) -> list[Tensor]:
        """Those that each core but the first extends: ``(n_k, R_0 * M_k, R_k)``, padding included."""
        chain = self.chain
        # Of large cores only what is asked for is widened.
        lefts = [chain.first(cores[0].index_select(0, piece.first).to(working_dtype(*cores)))]
        for k in range(1, chain.order - 1):
            lefts.append(chain.after(self._extended(lefts[-1], cores[k], k, piece.levels[k - 1]), k))
        return lefts

    def _products(self, cores: Cores, piece: Piece) -> Tensor:  # -> (n, cols)
        """The rows themselves, padding included."""
        last = self.chain.order - 1
        left = self._left_products(cores, piece)[-1]
        return self._extended(left, cores[last], last, piece.levels[-1]).view(-1, self.chain.cols)

    def _extended(self, left: Tensor, core: Tensor, k: int, level: Level) -> Tensor:  # -> (n, width, outer)
        chain = self.chain
        left, slices = chain.closed(left, k), chain.slices(core, k)
        made = left.new_empty(level.size, chain.width(k), chain.outer(k))
        for bucket in level.buckets:
            own, groups = slices.index_select(0, bucket.digit).to(left.dtype), bucket.digit.shape[0]
            above = left.index_select(0, bucket.source).view(groups, -1, chain.inner(k))
            torch.bmm(above, own, out=made[bucket.at].view(groups, -1, chain.outer(k)))
        return made

    def _add_gradients(self, cores: Cores, piece: Piece, place: Tensor, grad: Tensor, sums: list[Tensor]) -> None:
        """Add those of the cores for the gradient ``(n, cols)`` of the rows that are at ``place``."""
        chain = self.chain
        lefts = self._left_products(cores, piece)
        below = grad.new_zeros(piece.levels[-1].size, chain.cols).index_add_(0, place, grad)  # and of padding 0
        for k in reversed(range(1, chain.order)):
            left, slices = chain.closed(lefts.pop(), k), chain.slices(cores[k], k)
            of_slices = torch.zeros_like(slices, dtype=left.dtype, memory_format=torch.contiguous_format)
            of_left = torch.zeros_like(left)
            for bucket in piece.levels[k - 1].buckets:
                own, groups = slices.index_select(0, bucket.digit).to(left.dtype), bucket.digit.shape[0]
                above = left.index_select(0, bucket.source).view(groups, -1, chain.inner(k))
                part = below[bucket.at].reshape(groups, -1, chain.outer(k))
                of_slices.index_copy_(0, bucket.digit, torch.bmm(above.transpose(1, 2), part))
                made = torch.bmm(part, own.transpose(1, 2)).view(-1, *left.shape[1:])
                of_left.index_add_(0, bucket.source, made)
            sums[k] += chain.unslice(of_slices, k)
            below = chain.opened(of_left, k)
        sums[0].index_add_(0, piece.first, below.reshape(-1, *chain.core_shape(0)[1:]))


def _most_rows(chain: Chain) -> int:
    """Rows of a piece, so that no step of it holds as many numbers as a fourth of the table, unless that is small."""
    each = max(chain.width(k) * max(chain.inner(k), chain.outer(k)) for k in range(1, chain.order))
    return max(16, max(_HELD, chain.rows * chain.cols // 4) // (2 * each))


def _work(chain: Chain, cores: Cores, index: Tensor) -> SharedRows:
    return SharedRows.of(chain, index)


WORKS["torch"] = _work
