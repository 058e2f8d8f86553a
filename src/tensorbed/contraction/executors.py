"""Executors: the ways to compute the rows of a chain for a batch of indices, forward and backward.

Every executor has the same three functions: ``prepare`` makes a tape, the work that rows and gradients share; ``rows``
and ``backward`` go on from it. They are called with gradients off; see ``operators`` for autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from tensorbed.contraction import cost
from tensorbed.contraction.chain import Chain, Cores, every_slice, full, times_every_slice
from tensorbed.contraction.plan import Plan, Prefixes, find_prefixes, make_plan
from tensorbed.contraction.products import Grouped, PerRow, Products, Tiled, sum_into


class Executor(Protocol):
    """One way to compute rows, chosen by name or by the counted cost."""

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

    def prepare(self, chain: Chain, cores: Cores, index: Tensor, prefixes: Prefixes | None) -> Tape:
        products = self.products or (Grouped() if Grouped.takes(cores[0]) else Tiled())
        prefixes = prefixes or find_prefixes(index, chain.row_factors)
        plan = make_plan(prefixes, chain.row_factors, by_digit=products.by_digit)
        lefts = [chain.first(cores[0].index_select(0, plan.levels[0].digit))]
        for k in range(1, chain.order - 1):
            left = lefts[-1].index_select(0, plan.levels[k].parent)
            lefts.append(chain.after(products.multiply(left, chain.slices(cores[k], k), plan.levels[k]), k))
        return Tape(plan, tuple(lefts), products)

    def rows(self, chain: Chain, cores: Cores, tape: Tape) -> Tensor:
        last, level = chain.order - 1, tape.plan.levels[-1]
        left = chain.closed(tape.lefts[-1], last).index_select(0, level.parent)
        unique = tape.products.multiply(left, chain.slices(cores[last], last), level)
        return unique.reshape(-1, chain.cols).index_select(0, tape.plan.position)

    def backward(self, chain: Chain, cores: Cores, tape: Tape, grad: Tensor) -> list[Tensor]:
        plan, products = tape.plan, tape.products
        grads: list[Tensor] = [cores[0]] * chain.order
        # Repeated rows are summed once, before anything is multiplied.
        grad = sum_into(grad.reshape(-1, chain.cols), plan.position, plan.unique_rows)
        for k in reversed(range(1, chain.order)):
            level = plan.levels[k]
            above = tape.lefts[k - 1]
            grad = grad.reshape(-1, chain.width(k), chain.outer(k))
            left = chain.closed(above, k).index_select(0, level.parent)
            slices = chain.slices(cores[k], k)
            grads[k] = chain.unslice(products.slice_gradients(left, grad, level, chain.row_factors[k]), k)
            grad = products.multiply_transposed(grad, slices, level)
            grad = chain.opened(sum_into(grad, level.parent, above.shape[0]), k)
        grads[0] = torch.zeros_like(cores[0])
        grads[0][plan.levels[0].digit] = grad.reshape(-1, *chain.core_shape(0)[1:])
        return grads


class WholeTable:
    """The table, then its rows. Within the memory law only where the table has no more rows than the batch."""

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
    "per_row": LevelByLevel(PerRow()),
    "grouped": LevelByLevel(None),
    "tiled": LevelByLevel(Tiled()),
    "whole_table": WholeTable(),
}


def choose(chain: Chain, index: Tensor, impl: str) -> tuple[Executor, Prefixes | None]:
    """The executor by name, or for ``"auto"`` the one of least counted cost; with the prefixes if they were found."""
    if impl != "auto":
        return EXECUTORS[impl], None
    prefixes = find_prefixes(index, chain.row_factors)
    costs = {"per_row": cost.per_row(chain, prefixes.counts), "grouped": cost.grouped(chain, prefixes.counts)}
    if prod(chain.row_factors) <= index.shape[0]:
        costs["whole_table"] = cost.whole_table(chain)
    return EXECUTORS[min(costs, key=costs.__getitem__)], prefixes
