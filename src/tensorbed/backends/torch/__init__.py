"""Chains of cores in PyTorch alone, on any device: unique rows, every left product once, a batched product a bucket.

Half precision is computed in single and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores, Cores, most_rows
from tensorbed.backends.graphs import WORKS, graph_output
from tensorbed.backends.pooling import pooled_or_padded
from tensorbed.dispatch import Asked, Backend, World, differentiable_once, full_precision, working_dtype
from tensorbed.indexing import check_range


class Torch(Backend):
    """For installs without a compiler, and devices without kernels of their own."""

    name = "torch"
    limits = "with chains of cores"

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        return making is ChainOfCores

    def why(self, device: torch.device) -> str:
        return "there are no compiled kernels" if device.type == "cpu" else f"the indices are on {device}"

    def takes(self, asked: Asked, world: World) -> bool:
        in_world = world is World.COMPILED or (world is World.EAGER and asked.ids.numel() > 0)
        return in_world and isinstance(asked.made_of, ChainOfCores)

    def compute_table(self, asked: Asked, world: World) -> Tensor:
        if world is World.COMPILED:
            return graph_output(asked, self.name)
        return pooled_or_padded(partial(chain_rows, asked.made_of), asked)


def chain_rows(made_of: ChainOfCores, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows, differentiable in the cores. ``index`` holds at least one."""
    chain, cores = made_of
    if torch.is_grad_enabled() and any(core.requires_grad for core in cores):
        rows: Tensor = _SharedRows.apply(chain, index, *cores)  # type: ignore[no-untyped-call]
        return rows
    return SharedRows.of(chain, index).rows(cores)


class _SharedRows(torch.autograd.Function):
    """What was found about the indices is kept between forward and backward."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, index: Tensor, *cores: Tensor) -> Tensor:
        ctx.batch = SharedRows.of(chain, index)
        ctx.save_for_backward(*cores)
        return ctx.batch.rows(cores)  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, cores: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.batch.gradients(cores, grad)


class Bucket(NamedTuple):
    """Slices of a core that about as many prefixes take, padded to one number of them."""

    at: slice  # where their left products are among those of the level, a slice of the core after the other
    digit: Tensor  # (g,), which slices
    source: Tensor  # (g * height,), where the left products are that they extend; padding extends what comes before it


class Level(NamedTuple):
    """The prefixes that end at one core, by the slice that they take."""

    size: int  # of their left products, padding included
    place: Tensor  # (n,), where the left product of each prefix is
    buckets: tuple[Bucket, ...]


class Prefixes(NamedTuple):
    """Unique rows of a batch and their unique prefixes, in ascending order at each level."""

    rows: Tensor  # (u,), the unique row numbers
    digits: tuple[Tensor, ...]  # (n_k,) a level, which slice a prefix takes ...
    parents: tuple[Tensor, ...]  # ... and which prefix it extends
    inverse: Tensor  # (n,), which unique row an index is

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of unique prefixes at each level."""
        return tuple(digit.shape[0] for digit in self.digits)

    def levels(self) -> tuple[Level, ...]:
        """All levels after the first, whose left products are slices of the first core in the order of the prefixes."""
        levels: list[Level] = []
        for digit, parent in zip(self.digits[1:], self.parents[1:], strict=True):
            source = levels[-1].place.index_select(0, parent) if levels else parent
            levels.append(_level(digit, source))
        return tuple(levels)


def _level(digit: Tensor, source: Tensor) -> Level:  # (n,) twice
    """Prefixes by slice, slices by how many of them there are: up to 1, 2, 4, 8, ... in a bucket.

    Padding at most doubles the prefixes. The host waits once, to learn how many there are of each slice.
    """
    order = torch.argsort(digit, stable=True)
    digits, counts = torch.unique_consecutive(digit.index_select(0, order), return_counts=True)
    ends, place, start = counts.cumsum(0), torch.empty_like(order), 0
    sizes = counts.to("cpu", torch.float64).log2_().ceil_()
    buckets = []
    for size in sizes.unique().tolist():
        picked = (sizes == size).nonzero()[:, 0].to(order.device)
        last, count = ends.index_select(0, picked) - 1, counts.index_select(0, picked)
        height = int(count.max())
        step = torch.arange(height, device=order.device)
        prefix = order[torch.minimum(last[:, None], (last - count + 1)[:, None] + step)].reshape(-1)
        stop = start + prefix.shape[0]
        # From the end, so that of a prefix that padding repeats the first place is kept.
        place[prefix.flip(0)] = torch.arange(start, stop, device=order.device).flip(0)
        buckets.append(Bucket(slice(start, stop), digits.index_select(0, picked), source.index_select(0, prefix)))
        start = stop
    return Level(start, place, tuple(buckets))


def find_prefixes(index: Tensor, row_factors: Sequence[int]) -> Prefixes:
    """Unique rows, then the unique prefixes of the unique prefixes, down to the first digit."""
    rows, inverse = torch.unique(index, sorted=True, return_inverse=True)
    values, digits, parents = rows, [], []
    for factor in reversed(row_factors[1:]):
        above = values // factor
        digits.append(values - above * factor)
        # Sorted rows have sorted prefixes: equal ones stand side by side and need no second sort.
        values, parent = torch.unique_consecutive(above, return_inverse=True)
        parents.append(parent)
    digits.append(values)
    parents.append(values.new_empty(0))
    return Prefixes(rows, tuple(reversed(digits)), tuple(reversed(parents)), inverse)


class Piece(NamedTuple):
    """Some unique rows of a batch."""

    first: Tensor  # (n_1,), the slices of the first core
    levels: tuple[Level, ...]

    @property
    def place(self) -> Tensor:  # -> (unique rows,)
        """Where each row is."""
        return self.levels[-1].place


class SharedRows(NamedTuple):
    """A batch of indices: its unique rows, in pieces that never hold as many numbers as the table has."""

    chain: Chain
    pieces: tuple[Piece, ...]
    inverse: Tensor  # (n,), which unique row an index is

    @classmethod
    def of(cls, chain: Chain, index: Tensor) -> SharedRows:  # (n,) int64
        """``IndexError`` for an index outside the table."""
        found = find_prefixes(index, chain.row_factors)
        check_range(found.rows[[0, -1]], chain.rows)  # which ascend
        most = most_rows(chain)
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
        lefts = [cores[0].index_select(0, piece.first).to(working_dtype(*cores)).flatten(1, 2)]
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


WORKS["torch"] = lambda chain, cores, index: SharedRows.of(chain, index)
