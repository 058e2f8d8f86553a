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


def tt_svd(
    tensor: Tensor, ranks: Sequence[int] | None = None, bound: float | None = None
) -> list[Tensor]:  # (n_1, ..., n_N) -> cores (R_{k-1}, n_k, R_k)
    """Cut after each core, from the left: to the ranks ``(R_1, ..., R_{N-1})``, or within an absolute error."""
    return balanced(cut_in_turn(tensor, ranks, bound, "fitting a tensor train"))


def cut_in_turn(tensor: Tensor, ranks: Sequence[int] | None, bound: float | None, label: str) -> list[Tensor]:
    """Cores as of a train, orthonormal but for the last two. Each cut has an equal share of the error that is left."""
    sizes, cuts = tensor.shape, tensor.dim() - 1
    cores: list[Tensor] = []
    rest, rank = tensor, 1
    for k in range(cuts):
        rest = rest.reshape(rank * sizes[k], -1)
        share, name = bound and bound / math.sqrt(cuts - k), f"{label}, cut {k + 1} of {cuts}"
        # Cuts to come need orthonormal factors before them; after the last one there are none.
        found = truncate(rest, rank=ranks[k] if ranks else None, bound=share, label=name, orthonormal=k < cuts - 1)
        cores.append(found.left.reshape(rank, sizes[k], -1))
        rest, rank, bound = found.right, found.left.shape[1], bound and left_of(bound, found.lost)
    return [*cores, rest.reshape(rank, sizes[-1], 1)]


def left_of(bound: float, lost: float) -> float:
    """Of an error, for the cuts to come: errors of successive cuts are orthogonal, so that their squares add up."""
    return math.sqrt(max(0.0, bound**2 - lost**2))


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
