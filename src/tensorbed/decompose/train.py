"""TT-SVD (Oseledets 2011) of a table, and what trains and rings share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.decompose.powers import frobenius
from tensorbed.decompose.truncate import truncate


class Folded:
    """A table, with rows of zeros up to ``prod I_k``, as the N-way tensor of the paper, in one copy.

    Shape:
        - table: ``(rows, prod J_k)``
        - tensor: ``(I_1 J_1, ..., I_N J_N)``
    """

    def __init__(
        self, table: Tensor, row_factors: Sequence[int], col_factors: Sequence[int], dtype: torch.dtype
    ) -> None:
        order, slab = len(row_factors), math.prod(row_factors[1:])
        pairs = [n for pair in zip(row_factors, col_factors, strict=True) for n in pair]
        held = torch.zeros(pairs, dtype=dtype, device=table.device)
        self.tensor = held.view([i * j for i, j in zip(row_factors, col_factors, strict=True)])
        # (I_1, ..., I_N, J_1, ..., J_N): as in the table, which first digits cut into slabs of rows.
        self._rows = held.permute([*range(0, 2 * order, 2), *range(1, 2 * order, 2)])
        full, self._within = divmod(table.shape[0], slab)
        self._rows[:full] = table[: full * slab].reshape(-1, *self._rows.shape[1:])
        self._last = self._rows[full:]  # slabs with padding
        if self._within:
            self._write(slice(self._within), table[full * slab :])

    def _tail(self) -> Tensor:
        """Rows of the slabs with padding, a copy."""
        return self._last.reshape(math.prod(self._last.shape[: self._last.dim() // 2]), -1).clone()

    def _write(self, block: slice, rows: Tensor) -> None:
        tail = self._tail()
        tail[block] = rows
        self._last.copy_(tail.view(self._last.shape))

    def padding(self) -> Tensor:  # -> (prod I_k - rows, cols)
        """The rows after the table's."""
        return self._tail()[self._within :]

    def fill(self, rows: Tensor) -> None:  # (prod I_k - rows, cols)
        """Write the rows after the table's."""
        self._write(slice(self._within, None), rows)


class ErrorBudget:
    """A squared error to be spent over several cuts: an equal share each, what one leaves goes to the rest.

    The errors of successive cuts are orthogonal, so their squares add up.
    """

    def __init__(self, bound: float, cuts: int) -> None:
        self.left, self.cuts = bound**2, cuts

    def share(self) -> float:
        return math.sqrt(self.left / self.cuts)

    def spend(self, lost: float) -> None:
        self.left = max(0.0, self.left - lost**2)
        self.cuts -= 1


def cut(
    matrix: Tensor, rank: int | None, budget: ErrorBudget | None, label: str, orthonormal: bool = True
) -> tuple[Tensor, Tensor]:  # (m, n) -> (m, r), (r, n)
    """To a rank, or within its share of an error."""
    if budget is None:
        found = truncate(matrix, rank=rank, label=label, orthonormal=orthonormal)
    else:
        found = truncate(matrix, bound=budget.share(), label=label, orthonormal=orthonormal)
        budget.spend(found.lost)
    return found.left, found.right


def tt_svd(
    tensor: Tensor, ranks: Sequence[int] | None = None, bound: float | None = None
) -> list[Tensor]:  # (n_1, ..., n_N) -> cores (R_{k-1}, n_k, R_k)
    """Cut after each core, from the left: to the ranks ``(R_1, ..., R_{N-1})``, or within an absolute error."""
    sizes = tensor.shape
    cuts = len(sizes) - 1
    budget = ErrorBudget(bound, cuts) if bound is not None else None
    cores: list[Tensor] = []
    rest, rank = tensor, 1
    for k in range(cuts):
        label = f"fitting a tensor train, cut {k + 1} of {cuts}"
        rest = rest.reshape(rank * sizes[k], -1)
        # Cuts to come need orthonormal factors before them; after the last one there are none.
        left, rest = cut(rest, ranks[k] if ranks else None, budget, label, orthonormal=k < cuts - 1)
        cores.append(left.reshape(rank, sizes[k], -1))
        rank = left.shape[1]
    cores.append(rest.reshape(rank, sizes[-1], 1))
    return balanced(cores)


def balanced(cores: Sequence[Tensor]) -> list[Tensor]:
    """Scale the cores to one root mean square without changing their product, so that they train at one pace."""
    sizes = [frobenius(core) / math.sqrt(core.numel()) for core in cores]
    if not all(sizes):
        return list(cores)
    level = math.exp(sum(math.log(s) for s in sizes) / len(sizes))
    return [core * (level / s) for core, s in zip(cores, sizes, strict=True)]


def split_core(core: Tensor, i: int, j: int) -> Tensor:
    """A core over ``n_k = I_k J_k`` as it is stored: ``(R, I J, R') -> (I, R, J, R')``."""
    left, _, right = core.shape
    return core.reshape(left, i, j, right).transpose(0, 1).contiguous()
