"""Executors: the ways to compute the rows of a chain for a batch of indices, forward and backward.

Every executor has the same three functions: ``prepare`` makes a tape, the work that rows and gradients share; ``rows``
and ``backward`` go on from it. They are called with gradients off, and all but the kernels with single or double
precision; see ``operators`` for autograd and for half precision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed import native
from tensorbed.contraction import cost
from tensorbed.contraction.chain import Chain, Cores, every_slice, full, times_every_slice
from tensorbed.contraction.compiled import Compiled, takes
from tensorbed.contraction.plan import Level, Plan, Prefixes, find_prefixes, make_plan
from tensorbed.contraction.products import Grouped, PerRow, Products, Tiled, sum_into


class Executor(Protocol):
    """One way to compute rows, chosen by name or by the counted cost."""

    def products_made(self, chain: Chain, counts: Sequence[int]) -> Sequence[int]:
        """Left products made at each level for a batch of this many unique prefixes."""

    def prepare(self, chain: Chain, cores: Cores, index: Tensor, prefixes: Prefixes | None) -> Any:
        """A tape for int64 indices ``(n,)`` in range."""

    def rows(self, chain: Chain, cores: Cores, tape: Any) -> Tensor:
        """The rows ``(n, cols)``."""

    def backward(self, chain: Chain, cores: Cores, tape: Any, grad: Tensor) -> list[Tensor]:
        """Gradients of the cores, in their stored shapes, for the rows' gradient ``(n, cols)``."""


@dataclass(frozen=True)
class Tape:
    """The plan and the left products that each level extended: ``lefts[k]`` is ``(n_k, R_0 * M_k, R_k)``."""

    plan: Plan
    lefts: tuple[Tensor, ...]
    products: Products


class LevelByLevel:
    """Left products of unique prefixes, extended core by core, each level by one kind of product."""

    def __init__(self, products: Products | None) -> None:
        self.products = products

    def products_made(self, chain: Chain, counts: Sequence[int]) -> Sequence[int]:
        return counts

    def prepare(self, chain: Chain, cores: Cores, index: Tensor, prefixes: Prefixes | None) -> Tape:
        products = self.products or (Grouped() if Grouped.takes(cores[0]) else Tiled())
        prefixes = prefixes or find_prefixes(index, chain.row_factors)
        plan = make_plan(prefixes, chain.row_factors, by_digit=products.by_digit)
        lefts = [chain.first(cores[0].index_select(0, plan.levels[0].digit))]
        for k in range(1, chain.order - 1):
            lefts.append(chain.after(_extend(chain, lefts[-1], cores[k], k, plan.levels[k], products), k))
        return Tape(plan, tuple(lefts), products)

    def rows(self, chain: Chain, cores: Cores, tape: Tape) -> Tensor:
        last = chain.order - 1
        unique = _extend(chain, tape.lefts[-1], cores[last], last, tape.plan.levels[last], tape.products)
        return unique.reshape(-1, chain.cols).index_select(0, tape.plan.position)

    def backward(self, chain: Chain, cores: Cores, tape: Tape, grad: Tensor) -> list[Tensor]:
        plan, products = tape.plan, tape.products
        grads: list[Tensor] = [cores[0]] * chain.order
        # Repeated rows are summed once, before anything is multiplied.
        grad = sum_into(grad.reshape(-1, chain.cols), plan.position, plan.unique_rows)
        for k in reversed(range(1, chain.order)):
            above = chain.closed(tape.lefts[k - 1], k)
            slices = chain.slices(cores[k], k)
            grad = grad.reshape(-1, chain.width(k), chain.outer(k))
            slice_grads, left_grads = torch.zeros_like(slices), torch.zeros_like(above)
            for at, part in plan.levels[k].parts(_height(chain, k, products)):
                left = above.index_select(0, part.parent)
                slice_grads += products.slice_gradients(left, grad[at], part, chain.row_factors[k])
                left_grads.index_add_(0, part.parent, products.multiply_transposed(grad[at], slices, part))
            grads[k] = chain.unslice(slice_grads, k)
            grad = chain.opened(left_grads, k)
        grads[0] = torch.zeros_like(cores[0])
        grads[0][plan.levels[0].digit] = grad.reshape(-1, *chain.core_shape(0)[1:])
        return grads


def _extend(
    chain: Chain, left: Tensor, core: Tensor, k: int, level: Level, products: Products
) -> Tensor:  # (parents, R_0 * M, R) -> (n, width, outer)
    """Left products of a level's prefixes, some at a time: what is gathered for them is larger than they are."""
    left, slices = chain.closed(left, k), chain.slices(core, k)
    height = _height(chain, k, products)
    parts = [products.multiply(left.index_select(0, part.parent), slices, part) for _, part in level.parts(height)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


# Numbers of left products gathered at once: some megabytes, which the processor's cache holds until they are used.
_GATHERED = 2**22


def _height(chain: Chain, k: int, products: Products) -> int:
    """Prefixes multiplied at once."""
    gathered = min(_GATHERED, _held(chain))
    each = max(chain.width(k), chain.outer(k) if products.gathers_slices else 0) * chain.inner(k)
    return max(32, gathered // each)


@dataclass(frozen=True)
class Runs:
    """Unique rows in ascending runs, each to be computed by itself: ``inverse`` is which unique row an index is."""

    rows: tuple[Tensor, ...]
    inverse: Tensor


class InRuns:
    """Another executor, on a run of rows after the other where the left products of all would rival the table.

    A ring's are ``R`` times wider than a train's. Nothing is kept between forward and backward then.
    """

    def __init__(self, executor: LevelByLevel) -> None:
        self.executor = executor

    def products_made(self, chain: Chain, counts: Sequence[int]) -> Sequence[int]:
        return self.executor.products_made(chain, counts)

    def prepare(self, chain: Chain, cores: Cores, index: Tensor, prefixes: Prefixes | None) -> Tape | Runs:
        prefixes = prefixes or find_prefixes(index, chain.row_factors)
        runs = _runs(chain, prefixes)
        if len(runs) == 1:
            return self.executor.prepare(chain, cores, index, prefixes)
        return Runs(runs, prefixes.inverse)

    def rows(self, chain: Chain, cores: Cores, tape: Tape | Runs) -> Tensor:
        if isinstance(tape, Tape):
            return self.executor.rows(chain, cores, tape)
        parts = [self.executor.rows(chain, cores, self.executor.prepare(chain, cores, r, None)) for r in tape.rows]
        return torch.cat(parts).index_select(0, tape.inverse)

    def backward(self, chain: Chain, cores: Cores, tape: Tape | Runs, grad: Tensor) -> list[Tensor]:
        if isinstance(tape, Tape):
            return self.executor.backward(chain, cores, tape, grad)
        sizes = [run.shape[0] for run in tape.rows]
        unique = sum_into(grad.reshape(-1, chain.cols), tape.inverse, sum(sizes))
        sums = [torch.zeros_like(core) for core in cores]
        for run, part in zip(tape.rows, torch.split(unique, sizes), strict=True):
            made = self.executor.backward(chain, cores, self.executor.prepare(chain, cores, run, None), part)
            for total, one in zip(sums, made, strict=True):
                total += one
        return sums


def _runs(chain: Chain, prefixes: Prefixes) -> tuple[Tensor, ...]:
    """The unique rows, cut where the left products of a run's last prefixes reach what may be held at once."""
    each = chain.joint * prod(chain.col_factors[:-1]) * chain.ranks[-2]
    most, count = max(16, _held(chain) // each), prefixes.counts[-2]
    if count <= most:
        return (prefixes.rows,)
    starts = torch.arange(most, count, most, device=prefixes.rows.device)
    return torch.tensor_split(prefixes.rows, torch.searchsorted(prefixes.parents[-1], starts).tolist())


def _held(chain: Chain) -> int:
    """Numbers that one step may hold: never as many as the table has, unless that is small itself."""
    return max(2**20, chain.rows * chain.cols // 4)


class WholeTable:
    """The table, then its rows. Within the memory law only where the table has no more rows than the batch."""

    def products_made(self, chain: Chain, counts: Sequence[int]) -> Sequence[int]:
        return list(accumulate(chain.row_factors, mul))

    def prepare(self, chain: Chain, cores: Cores, index: Tensor, prefixes: Prefixes | None) -> Tensor:
        return index

    def rows(self, chain: Chain, cores: Cores, tape: Tensor) -> Tensor:
        return full(chain, cores).index_select(0, tape)

    def backward(self, chain: Chain, cores: Cores, tape: Tensor, grad: Tensor) -> list[Tensor]:
        lefts = [chain.first(cores[0])]
        for k in range(1, chain.order - 1):
            lefts.append(chain.after(times_every_slice(chain, lefts[-1], cores[k], k), k))
        grads: list[Tensor] = [cores[0]] * chain.order
        grad = sum_into(grad.reshape(-1, chain.cols), tape, prod(chain.row_factors))
        for k in reversed(range(1, chain.order)):
            left = chain.closed(lefts[k - 1], k)
            n, m, inner = left.shape
            i = chain.row_factors[k]
            grad = grad.reshape(n, i, m, chain.outer(k)).transpose(1, 2).reshape(n * m, -1)
            made = (left.reshape(n * m, inner).T @ grad).reshape(inner, i, -1).transpose(0, 1)
            grads[k] = chain.unslice(made, k)
            grad = chain.opened((grad @ every_slice(chain, cores[k], k).T).reshape(n, m, inner), k)
        grads[0] = grad.reshape(chain.core_shape(0))
        return grads


EXECUTORS: dict[str, Executor] = {
    "per_row": InRuns(LevelByLevel(PerRow())),
    "grouped": InRuns(LevelByLevel(None)),
    "tiled": InRuns(LevelByLevel(Tiled())),
    "whole_table": WholeTable(),
}


if native.available:
    EXECUTORS["native"] = Compiled()


def considered(chain: Chain, counts: Sequence[int], indices: int, *, native: bool) -> dict[str, float]:
    """Counted cost of every executor that ``"auto"`` may take, for a batch of so many unique prefixes and indices.

    ``native`` says whether the compiled kernels take the tensors, where there are kernels.
    """
    costs: dict[str, float] = {"per_row": cost.per_row(chain, counts), "grouped": cost.grouped(chain, counts)}
    if native and "native" in EXECUTORS:
        costs["native"] = cost.native(chain, counts)
    if prod(chain.row_factors) <= indices:
        costs["whole_table"] = cost.whole_table(chain)
    return costs


def cheapest(costs: Mapping[str, float]) -> str:
    """The name of least cost, the first of equals."""
    return min(costs, key=costs.__getitem__)


def choose(chain: Chain, cores: Cores, index: Tensor, impl: str) -> tuple[Executor, Prefixes | None]:
    """The executor by name, or for ``"auto"`` the one of least counted cost; with the prefixes if they were found."""
    if impl != "auto":
        return EXECUTORS[impl], None
    if takes(cores, index):
        # They make the same products as the others, copy less and call once: there is nothing to count.
        return EXECUTORS["native"], None
    prefixes = find_prefixes(index, chain.row_factors)
    return EXECUTORS[cheapest(considered(chain, prefixes.counts, index.shape[0], native=False))], prefixes
