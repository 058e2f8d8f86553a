"""Products of pairs of slices by the kernels for chains of cores, for tables that are no such chain."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.backends.chain import Chain, ChainOfCores
from tensorbed.dispatch import BACKENDS, Asked, Backend, World, chosen

_SPARSE = 8  # times as many numbers as values: where there are more, the values are sorted


def pair_products(left: Tensor, right: Tensor, pair: Tensor) -> Tensor:
    """``left[pair // b] @ right[pair % b]``, differentiable: rows of a chain of two cores. Eager alone.

    Shape:
        - left: ``(a, m, r)``
        - right: ``(b, r, k)``
        - pair: ``(n,)``, at least one
        - output: ``(n, m, k)``
    """
    (a, m, r), (b, _, k) = left.shape, right.shape
    chain = Chain(a * b, (a, b), (m, k), (1, r, 1))
    asked = Asked(None, {}, ChainOfCores(chain, [left.unsqueeze(1), right.unsqueeze(3)]), pair)
    return chosen(asked, World.EAGER).compute([asked], World.EAGER).view(-1, m, k)


def kernels_of_pairs(device: torch.device) -> Backend:
    """The backend that :func:`pair_products` takes there."""
    return next(backend for backend in reversed(BACKENDS.values()) if backend.knows(ChainOfCores, device))


def unique_numbers(numbers: Tensor, below: int) -> tuple[Tensor, Tensor]:  # (n,) -> (u,), (n,)
    """Numbers from 0 on without repetitions, ascending, and where each is among them."""
    if below > _SPARSE * numbers.shape[0]:
        unique, place = torch.unique(numbers, return_inverse=True)
        return unique, place
    marks = torch.zeros(below, dtype=torch.int64, device=numbers.device)
    marks[numbers] = 1
    return marks.nonzero()[:, 0], (marks.cumsum(0) - 1).index_select(0, numbers)
