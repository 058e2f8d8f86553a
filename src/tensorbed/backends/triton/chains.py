"""Rows and bags of chains by the kernels for GPUs: launches, and autograd around them.

Unique rows whose left products would hold too much are computed in pieces, each a call of its own. Left products and
rows are kept in single precision and rounded once. Nothing here waits for the device. Gradients are sums over what the
plan has put side by side, added in one order: the same every time, whatever torch is told of determinism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, Cores, most_rows
from tensorbed.backends.graphs import ROWS, WORKS
from tensorbed.backends.triton import launching
from tensorbed.backends.triton.launching import power_of_2, side
from tensorbed.backends.triton.plan import Plan, layout_of, pooling_of
from tensorbed.dispatch import differentiable_once
from tensorbed.indexing import out_of_range


class Table(NamedTuple):
    """One table of a call, and what is asked of it, as in :class:`Asked`."""

    chain: Chain
    cores: Cores
    ids: Tensor
    bounds: Tensor | None = None
    weights: Tensor | None = None
    mean: bool = False
    skipped: int = -1  # an index that is in no bag


class Call:
    """Planned tables of one order: rows or bags of each side by side, and the gradients of their tensors."""

    def __init__(self, tables: Sequence[Table], checked: bool = False, is_piece: bool = False) -> None:
        first = tables[0]
        self.whole = is_piece or len(tables) > 1 or not in_pieces(first)
        self.dtype, self.device = first.cores[0].dtype, first.ids.device
        counts = tuple(table.ids.shape[0] for table in tables)
        self.weighted = [table.weights is not None for table in tables]
        self.counts = counts
        chains = self.chains = tuple(table.chain for table in tables)
        tiles = launching.tiles(max(max(chain.ranks) for chain in chains), self.dtype)
        self.layout = layout_of(chains, counts, tuple(table.skipped for table in tables), tiles)
        bounds = None if first.bounds is None else [table.bounds for table in tables if table.bounds is not None]
        with launching.current(self.device):
            ids = first.ids.contiguous() if len(tables) == 1 else torch.cat([table.ids for table in tables])
            self.plan = Plan(self.layout, ids, None if checked else _refusal(chains))
            weights = self._joined([table.weights for table in tables])
            self.bags = pooling_of(self.plan, counts, bounds, weights, [table.mean for table in tables])
        self.rows = counts[0] if self.bags.bounds is None else self.bags.bounds.shape[1] - 1
        self.shapes = [chain.core_shape(k) for k in range(self.layout.order) for chain in chains]
        self.ring = any(chain.joint > 1 for chain in chains)

    def _joined(self, weights: Sequence[Tensor | None]) -> Tensor | None:  # -> (total,)
        """Weights of all tables, in single precision, and 1 where a table has none."""
        if not any(self.weighted):
            return None
        ones = [
            torch.ones(n, device=self.device) if w is None else w for w, n in zip(weights, self.counts, strict=True)
        ]
        return torch.cat([w.detach().float() for w in ones])

    def forward(self, cores: Cores) -> Tensor:  # level by level, of each table -> (rows, sum of cols)
        out = launching.empty((self.rows, self.layout.columns), self.dtype, self.device)
        if out.numel():
            with launching.current(self.device):
                self._pool(self._rows(cores), out)
        return out

    def _rows(self, cores: Cores) -> Tensor:
        """Unique rows, in single precision."""
        if self.whole:
            return self._products(cores)[-1]
        rows = launching.empty((self.layout.levels[-1].made,), torch.float32, self.device)
        for piece, part in self._pieces(cores, rows):
            piece._pool(piece._products(cores)[-1], part)
        return rows

    def _pieces(self, cores: Cores, rows: Tensor) -> Iterator[tuple[Call, Tensor]]:
        """Calls for some of the unique rows each, and where those are among ``rows``; of the one table that it has."""
        chain = self.chains[0]
        most = most_rows(chain, self.layout.total)
        parts = zip(self.plan.unique_rows().split(most), rows.view(-1, chain.cols).split(most), strict=True)
        for ids, part in parts:
            yield Call([Table(chain, cores, ids)], checked=True, is_piece=True), part

    def backward(self, cores: Cores, grad: Tensor, weights: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Gradients of the cores, views of one tensor, and if asked for of the weights of each table that has any."""
        with launching.current(self.device):
            return self._backward(cores, grad.contiguous(), weights)

    def _backward(self, cores: Cores, grad: Tensor, weights: bool) -> tuple[list[Tensor], list[Tensor]]:
        numbers = sum(shape.numel() for shape in map(torch.Size, self.shapes))
        gradients = launching.empty((numbers,), torch.float32, self.device).zero_()
        of_weights: list[Tensor] = []
        if grad.numel():
            if weights:
                of_weights = self._weight_gradients(self._rows(cores), grad)
            self._add_gradients(cores, self._row_gradients(grad), gradients)
        elif weights:
            of_weights = [grad.new_zeros(n) for n, given in zip(self.counts, self.weighted, strict=True) if given]
        made = gradients.to(self.dtype).split([torch.Size(shape).numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(made, self.shapes, strict=True)], of_weights

    def _add_gradients(self, cores: Cores, below: Tensor, gradients: Tensor) -> None:
        """Those of the cores, for the gradients ``below`` of the unique rows."""
        if not self.whole:
            for piece, part in self._pieces(cores, below):
                piece._add_gradients(cores, piece._row_gradients(part), gradients)
            return
        layout, kept = self.layout, self._products(cores, rows=False)
        chunks = self.plan.grouped(layout.chunk, sum(level.chunks for level in layout.levels))
        for k in reversed(range(1, layout.order)):
            self._slice_gradients(k, cores, kept.pop(), below, gradients, chunks)
            below = self._left_gradients(k, cores, below, gradients)

    def _launch(self, kernel: Any, grid: Sequence[int], *arguments: Any, **sizes: Any) -> None:
        kernel[tuple(grid)](*arguments, tables=self.layout.tables, **sizes, **launching.options(self.layout.tiles))

    def _level(self, k: int, cores: Cores) -> dict[str, Any]:
        """What kernels of products are told of a level, by name."""
        order, tables = self.layout.order, self.layout.tables
        addresses = tuple(core.data_ptr() for core in cores)
        return {
            "cells": self.plan.cells,
            "addresses": launching.on_device(addresses, self.device),
            "slices": cores[0],
            "level": k,
            "tables": tables,
            "TABLES": power_of_2(tables),
            "FIRST": k == 1,
            "RING": self.ring and k == order - 1,
            "PRECISION": launching.precision(),
        }

    def _products(self, cores: Cores, rows: bool = True) -> list[Tensor]:
        """The left products of each level, the last of which are unique rows. Of the first they are slices."""
        layout, plan, kernels = self.layout, self.plan, launching.chain_kernels()
        made = [cores[0]]
        for k in range(1, layout.order if rows else layout.order - 1):
            level = layout.levels[k]
            made.append(launching.empty((level.made,), torch.float32, self.device))
            launching.launch_product(
                kernels.extend,
                lambda cols, level=level: (level.tiles, -(-level.outer // cols)),  # type: ignore[misc]
                layout.tiles,
                level.inner,
                level.outer,
                ROWS=layout.tiles.rows,
                left=made[k - 1],
                out=made[k],
                parents=plan.parents,
                order=plan.group_order,
                group_starts=plan.group_starts,
                tile_ends=plan.tiles.ends,
                tile_groups=plan.tiles.of_tile,
                WIDEN=launching.halves_as_single(),
                **self._level(k, cores),
            )
        return made

    def _pool(self, unique: Tensor, out: Tensor) -> None:
        layout, bounds, most = self.layout, self.bags.bounds, max(self.layout.cols)
        shape = {"BAGS": 16, "MEMBERS": 1} if bounds is None else {"BAGS": 1, "MEMBERS": 16}
        cols = side(128, most)
        self._launch(
            launching.chain_kernels().pool,
            (-(-self.rows // shape["BAGS"]), layout.tables, -(-most // cols)),
            self.plan.cells,
            unique,
            self.plan.places,
            self.bags.scales,
            self.bags.scales if bounds is None else bounds,
            out,
            self.rows,
            layout.columns,
            layout.order - 1,
            POOLED=bounds is not None,
            WIDEN=launching.halves_as_single(),
            COLS=cols,
            **shape,
        )

    def _row_gradients(self, grad: Tensor) -> Tensor:
        layout, plan, level = self.layout, self.plan, self.layout.levels[-1]
        out = launching.empty((level.made,), torch.float32, self.device)
        cols = side(128, max(layout.cols))
        self._launch(
            launching.chain_kernels().row_gradients,
            (level.slots, -(-max(layout.cols) // cols)),
            plan.cells,
            grad,
            self.bags.scales,
            self.bags.bags_of,
            plan.order,
            plan.first_children,
            plan.end_children,
            out,
            layout.columns,
            layout.order - 1,
            TABLES=power_of_2(layout.tables),
            MEMBERS=8,
            COLS=cols,
        )
        return out

    def _weight_gradients(self, unique: Tensor, grad: Tensor) -> list[Tensor]:
        layout, plan, block = self.layout, self.plan, 16
        out = launching.empty((layout.total,), torch.float32, self.device)
        self._launch(
            launching.chain_kernels().weight_gradients,
            (-(-layout.total // block),),
            plan.cells,
            unique,
            grad,
            self.bags.kept,
            plan.places,
            self.bags.bags_of,
            out,
            layout.total,
            layout.columns,
            layout.order - 1,
            TABLES=power_of_2(layout.tables),
            BLOCK=block,
            COLS=side(128, max(layout.cols)),
        )
        parts = out.to(self.dtype).split(list(self.counts))
        return [part for part, given in zip(parts, self.weighted, strict=True) if given]

    def _slice_gradients(
        self, k: int, cores: Cores, left: Tensor, below: Tensor, gradients: Tensor, chunks: Any
    ) -> None:
        layout, plan, level, kernels = self.layout, self.plan, self.layout.levels[k], launching.chain_kernels()
        tiles, told = layout.tiles, self._level(k, cores)
        partial = launching.empty((level.partial,), torch.float32, self.device)
        rows = side(tiles.rows, level.inner)
        launching.launch_product(
            kernels.slice_gradients,
            lambda cols: (level.chunks, -(-level.inner // rows) * -(-level.outer // cols)),
            tiles,
            layout.chunk,
            level.outer,
            left=left,
            below=below,
            partial=partial,
            parents=plan.parents,
            order=plan.group_order,
            group_starts=plan.group_starts,
            tile_ends=chunks.ends,
            tile_groups=chunks.of_tile,
            CHUNK=layout.chunk,
            ROWS=rows,
            **told,
        )
        block = side(256, level.inner * level.outer)
        self._launch(
            kernels.add_chunks,
            (level.groups, -(-level.inner * level.outer // block)),
            plan.cells,
            partial,
            gradients,
            chunks.ends,
            k,
            TABLES=told["TABLES"],
            RING=told["RING"],
            BLOCK=block,
        )

    def _left_gradients(self, k: int, cores: Cores, below: Tensor, gradients: Tensor) -> Tensor:
        """Of what level ``k`` extends; those of slices of the first core are written where they belong."""
        layout, plan, level, above = self.layout, self.plan, self.layout.levels[k], self.layout.levels[k - 1]
        out = gradients if k == 1 else launching.empty((above.made,), torch.float32, self.device)
        tiles = layout.tiles
        rows = side(tiles.rows, level.width)
        launching.launch_product(
            launching.chain_kernels().left_gradients,
            lambda cols: (above.slots, -(-level.width // rows) * -(-level.inner // cols)),
            tiles,
            tiles.depth,
            level.inner,
            below=below,
            out=out,
            groups=plan.groups,
            first_children=plan.first_children,
            end_children=plan.end_children,
            parents=plan.parents,
            ROWS=rows,
            **self._level(k, cores),
        )
        return out


def _refusal(chains: Sequence[Chain]) -> str:
    """What is said of an index outside its table; on a device nobody waits to learn which one it was."""
    return " Or ".join(out_of_range(None, rows) for rows in dict.fromkeys(chain.rows for chain in chains))


def in_pieces(table: Table) -> bool:
    """Whether the left products of its rows would hold too much at once: it is computed by itself then."""
    asked = table.ids.shape[0]
    return min(asked, table.chain.rows) > most_rows(table.chain, asked)


def by_level(tables: Sequence[Table]) -> list[Tensor]:
    """The cores of all tables, level by level, as kernels read them."""
    return [core.contiguous() for level in zip(*(table.cores for table in tables), strict=True) for core in level]


def compute(tables: Sequence[Table], checked: bool = False) -> Tensor:  # -> (n or bags, sum of cols)
    """What is asked of tables of one order, differentiable in the cores and the weights."""
    cores, weights = by_level(tables), [table.weights for table in tables if table.weights is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*cores, *weights)):
        made: Tensor = _Compute.apply(tables, checked, len(cores), *cores, *weights)
        return made
    return Call(tables, checked).forward(cores)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tables: Sequence[Table], checked: bool, cores: int, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.cores = Call(tables, checked), cores
        ctx.save_for_backward(*tensors)
        return ctx.call.forward(tensors[:cores])  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, tensors: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = any(ctx.needs_input_grad[3 + ctx.cores :])
        of_cores, of_weights = ctx.call.backward(tensors[: ctx.cores], grad, needed)
        return None, None, None, *of_cores, *(of_weights or [None] * (len(tensors) - ctx.cores))


class TritonRows:
    """Rows or bags of one table for a graph, whose backward makes the plan again."""

    def __init__(self, chain: Chain, cores: Cores, index: Tensor, *pooling: Any) -> None:
        bounds, self.weights, mean, skipped = pooling or ROWS
        self.call = Call([Table(chain, cores, index, bounds, self.weights, mean, skipped)])

    def rows(self, cores: Cores) -> Tensor:
        return self.call.forward([core.contiguous() for core in cores])

    def gradients(self, cores: Cores, grad: Tensor) -> list[Tensor]:
        """Of the cores, then of the weights if there are any; an operator's outputs share no memory."""
        of_cores, of_weights = self.call.backward([core.contiguous() for core in cores], grad, self.weights is not None)
        return [gradient.clone() for gradient in (*of_cores, *of_weights)]


WORKS["triton"] = TritonRows
