"""TT-SVD (Oseledets 2011) of a table, and what trains and rings share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tensorbed.decompose.truncate import truncate


def tensorize(table: Tensor, row_factors: Sequence[int], col_factors: Sequence[int]) -> Tensor:
    """A padded table as the N-way tensor of the paper: ``(prod I_k, J) -> (I_1 J_1, ..., I_N J_N)``."""
    order = len(row_factors)
    split = table.reshape(*row_factors, *col_factors)
    pairs = [axis for k in range(order) for axis in (k, order + k)]
    return split.permute(pairs).reshape([i * j for i, j in zip(row_factors, col_factors, strict=True)])


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
        rest = rest.reshape(rank * sizes[k], -1)
        label = f"fitting a tensor train, cut {k + 1} of {cuts}"
        if budget is not None:
            found = truncate(rest, bound=budget.share(), label=label)
            budget.spend(found.lost)
        else:
            assert ranks is not None
            found = truncate(rest, rank=ranks[k], label=label)
        cores.append(found.left.reshape(rank, sizes[k], -1))
        rest, rank = found.right, found.left.shape[1]
    cores.append(rest.reshape(rank, sizes[-1], 1))
    return balanced(cores)


def balanced(cores: Sequence[Tensor]) -> list[Tensor]:
    """Scale the cores to one root mean square without changing their product, so that they train at one pace."""
    sizes = [float(core.double().square().mean().sqrt()) for core in cores]
    if not all(sizes):
        return list(cores)
    level = math.exp(sum(math.log(s) for s in sizes) / len(sizes))
    return [core * (level / s) for core, s in zip(cores, sizes, strict=True)]


def split_core(core: Tensor, i: int, j: int) -> Tensor:
    """A core over ``n_k = I_k J_k`` as it is stored: ``(R, I J, R') -> (I, R, J, R')``."""
    left, _, right = core.shape
    return core.reshape(left, i, j, right).transpose(0, 1).contiguous()


def frobenius(table: Tensor) -> float:
    """Norm in float64, whatever the dtype, without a copy of the whole in it."""
    flat = table.detach().reshape(-1)
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in flat.split(2**22)]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0
