"""A batch of indices of several tables as kernels take it: unique rows, their prefixes, and groups of equal slices.

All of it is found on the device by sorting and scanning. How many there are of anything the host never learns: memory
and launches are for as many as there can be, by the number of indices and the sizes of the tables.

Prefixes of a level are numbered in *slots*, those of a table side by side in ascending order. Slots, groups (the
prefixes of one level that one slice extends) and cells (one core of one table) are numbered level by level, table by
table; rows are the prefixes of the last level, and sorted positions are its children.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain
from tensorbed.backends.triton import launching
from tensorbed.backends.triton.launching import Tiles, power_of_2

_BLOCK = 256  # positions of a program


class Cell(NamedTuple):
    """One core of one table: its sizes, and where what belongs to it begins among those of all."""

    factor: int  # I_k
    below: int  # rows that have one prefix
    width: int
    rank: int
    inner: int
    outer: int
    rank_stride: int  # of a slice, from term to term of a sum; the joint of a ring has stride 1
    outer_stride: int
    slice: int  # numbers of a slice
    made: int  # left products of this level
    gradient: int
    partial: int  # chunks of gradients of slices
    slot: int
    group: int
    position: int  # of the table's first index
    key: int  # of the table's first row
    column: int  # of the output
    table_rows: int
    skipped: int  # an index that takes no part, or -1


class Level(NamedTuple):
    """The most there can be of a level, in all tables."""

    slots: int
    groups: int
    made: int
    partial: int
    tiles: int
    chunks: int
    width: int  # the largest, of any table, and so on
    inner: int
    outer: int


class Layout(NamedTuple):
    """Sizes of a call, from those of its tables and the numbers of their indices."""

    cells: tuple[int, ...]
    levels: tuple[Level, ...]
    tables: int
    total: int  # indices
    slots: int
    groups: int
    cols: tuple[int, ...]
    tiles: Tiles
    chunk: int  # rows of a group that are added up at once

    @property
    def order(self) -> int:
        return len(self.levels)

    @property
    def columns(self) -> int:
        """Of the output."""
        return sum(self.cols)


@lru_cache(maxsize=1024)
def layout_of(chains: tuple[Chain, ...], counts: tuple[int, ...], skipped: tuple[int, ...], tiles: Tiles) -> Layout:
    """Of chains of one order, with so many indices each."""
    order = chains[0].order
    # Chunks of at least as many rows as sums are long never hold more numbers than what they are added up from.
    chunk = max(256, power_of_2(max(_sizes(chain, k)[1] for chain in chains for k in range(1, order))))
    cells: list[Cell] = []
    levels: list[Level] = []
    gradient = slot = group = 0
    for k in range(order):
        first_slot, first_group, made, partial = slot, group, 0, 0
        most_tiles = most_chunks = 0
        position = key = column = 0
        for chain, count, skip in zip(chains, counts, skipped, strict=True):
            factor, rank, _, right = chain.core_shape(k)
            width, inner, outer = _sizes(chain, k)
            most = min(count, prod(chain.row_factors[: k + 1]))
            closing = k == order - 1
            strides = (chain.col_factors[k] * right, right if closing else 1)
            begins = (made, gradient, partial, slot, group, position, key, column)
            slice_size = prod(chain.core_shape(k)[1:])
            sizes = (factor, prod(chain.row_factors[k + 1 :]), width, rank, inner, outer, *strides, slice_size)
            cells.append(Cell(*sizes, *begins, chain.rows, skip))
            gradient, slot = gradient + factor * slice_size, slot + most
            position, key, column = position + count, key + chain.rows, column + chain.cols
            if k:
                chunks = most * width // chunk + min(factor, most)
                group, made, partial = group + factor, made + most * width * outer, partial + chunks * inner * outer
                most_tiles += most * width // tiles.rows + min(factor, most)
                most_chunks += chunks
        widest = tuple(max(_sizes(chain, k)[at] for chain in chains) for at in range(3))
        sums = (slot - first_slot, group - first_group, made, partial, most_tiles, most_chunks)
        levels.append(Level(*sums, *widest))
    after = cells[-1]._replace(gradient=gradient, slot=slot, group=group)  # where the last level ends
    numbers = tuple(number for cell in (*cells, after) for number in cell)
    cols = tuple(chain.cols for chain in chains)
    return Layout(numbers, tuple(levels), len(chains), sum(counts), slot, group, cols, tiles, chunk)


def _sizes(chain: Chain, k: int) -> tuple[int, int, int]:
    """Width, inner and outer; of the first core, which multiplies nothing, its columns alone."""
    return (chain.width(k), chain.inner(k), chain.outer(k)) if k else (1, 1, prod(chain.core_shape(0)[1:]))


class Groups(NamedTuple):
    """Tiles of the rows of groups: a program takes a tile."""

    ends: Tensor  # (groups,), how many tiles there are up to the end of each
    of_tile: Tensor  # (most tiles,), which group a tile is of; beyond the last one the number of groups


class Plan:
    """What is found about the indices of a call, on their device."""

    def __init__(self, layout: Layout, ids: Tensor, refusal: str | None) -> None:  # (total,) int64
        """Indices outside their tables fail with this sentence when the device comes to it: the host does not wait."""
        self.layout, self.device = layout, ids.device
        self.cells = launching.on_device(layout.cells, ids.device)
        keys, valid, self.kept = self._empty(torch.int64), self._empty(torch.uint8), self._empty(torch.float32)
        kernels = launching.plan_kernels()
        grid = (-(-layout.total // _BLOCK), layout.order)
        sizes = {"tables": layout.tables, "TABLES": power_of_2(layout.tables), "BLOCK": _BLOCK}
        sizes |= launching.options(layout.tiles)
        kernels.make_keys[grid[:1]](self.cells, ids, keys, valid, self.kept, layout.total, **sizes)
        if refusal is not None:
            torch._assert_async(valid.all(), refusal)
        keys, self.order = torch.sort(keys, stable=True)
        self.keys = keys
        marks = launching.empty((layout.order, layout.total), torch.int32, ids.device)
        kernels.mark_prefixes[grid](self.cells, keys, marks, layout.total, **sizes)
        counts = marks.cumsum(1)
        # Slots that nobody takes have no children, and are of no group.
        self.first_children, self.end_children = self._zeros(layout.slots), self._zeros(layout.slots)
        self.groups = self._zeros(layout.slots) + layout.groups
        self.parents, self.places = self._empty(torch.int64, layout.slots), self._empty(torch.int64)
        per_slot = (self.parents, self.groups, self.first_children, self.end_children)
        kernels.scatter_plan[grid](
            self.cells,
            keys,
            self.order,
            marks,
            counts,
            *per_slot,
            self.places,
            layout.total,
            levels=layout.order,
            **sizes,
        )
        sorted_groups, self.group_order = torch.sort(self.groups, stable=True)
        every = torch.arange(layout.groups + 1, device=ids.device)
        self.group_starts = torch.searchsorted(sorted_groups, every)
        self.tiles = self.grouped(layout.tiles.rows, sum(level.tiles for level in layout.levels))

    def _empty(self, dtype: torch.dtype, count: int | None = None) -> Tensor:
        return launching.empty((self.layout.total if count is None else count,), dtype, self.device)

    def _zeros(self, count: int) -> Tensor:
        return self._empty(torch.int64, count).zero_()

    def unique_rows(self) -> Tensor:  # -> (rows at most,) int64
        """Of a plan of one table: its rows, in ascending order, and -1 behind the last of them."""
        most = self.layout.levels[-1].slots
        first, end = self.first_children[-most:], self.end_children[-most:]
        return torch.where(first < end, self.keys.index_select(0, first), -1)

    def grouped(self, height: int, most: int) -> Groups:
        """The rows of each group in tiles of this height."""
        layout, fields = self.layout, self.cells.view(-1, len(Cell._fields))
        extended = fields[layout.tables : -1]  # all levels but the first
        width = torch.repeat_interleave(extended[:, 2], extended[:, 0], output_size=layout.groups)
        ends = ((self.group_starts.diff() * width + (height - 1)) // height).cumsum(0)
        return Groups(ends, torch.searchsorted(ends, torch.arange(most, device=self.device), right=True))


class Bags(NamedTuple):
    """Which bag an index is in, and what its row is multiplied by there."""

    bags_of: Tensor  # (total,)
    kept: Tensor  # (total,), 1 where an index takes part, else 0
    scales: Tensor  # (total,)
    bounds: Tensor | None  # (tables, bags + 1)


def pooling_of(
    plan: Plan, counts: Sequence[int], bounds: Sequence[Tensor] | None, weights: Tensor | None, means: Sequence[bool]
) -> Bags:
    """Of rows, where there are no bounds, each index is a bag of its own."""
    if bounds is None:
        # Every table gives as many rows.
        own = torch.arange(plan.layout.total, device=plan.device) % counts[0]
        return Bags(own, plan.kept, plan.kept, None)
    table_bounds = torch.stack([own.clamp(0, count) for own, count in zip(bounds, counts, strict=True)])
    begins = launching.on_device(tuple(accumulate(counts[:-1], initial=0)), plan.device)[:, None]
    joined, per_table = (table_bounds + begins).reshape(-1), table_bounds.shape[1]
    found = torch.searchsorted(joined, torch.arange(plan.layout.total, device=plan.device), right=True) - 1
    bags_of = found % per_table
    # Behind the last bag of its table an index is in none.
    kept = plan.kept * (bags_of < per_table - 1)
    scales = kept
    if any(means):
        members = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.long().cumsum(0)])
        sizes = members.index_select(0, joined).diff()
        each = sizes.index_select(0, found.clamp(0, sizes.shape[0] - 1)).clamp_min(1)
        if not all(means):
            pools_means = launching.on_device(tuple(map(int, means)), plan.device)
            each = torch.where(pools_means.index_select(0, found // per_table) > 0, each, 1)
        scales = kept / each
    return Bags(bags_of, kept, scales if weights is None else scales * weights, table_bounds)
