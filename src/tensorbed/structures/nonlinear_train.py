"""A tensor train with a non-linearity between its cores: what the paper leaves to future work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.pairs import kernels_of_pairs, pair_products, unique_numbers
from tensorbed.backends.torch import find_prefixes
from tensorbed.indexing import digits
from tensorbed.structures.base import Params, mean_square, rounded, scale_to_std
from tensorbed.structures.chain import CoresMatrix, FactorsFormat
from tensorbed.structures.explanation import Explanation
from tensorbed.structures.formats import Budget
from tensorbed.structures.registry import register

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "tanh": torch.tanh, "gelu": F.gelu}


@register("nonlinear_train")
@dataclass(frozen=True)
class NonlinearTrainMatrix(CoresMatrix):
    r"""A tensor train whose left products go through an activation :math:`\phi` after each core but the last.

    .. math::
        L_1 = \phi(G^{(1)}[i_1]), \quad L_k = \phi(L_{k-1} G^{(k)}[i_k]), \quad E[i] = L_{N-1} G^{(N)}[i_N]

    Rows that begin with the same digits share those products, as in a train. Vectors cannot be passed through the
    cores: heads make rows, a block after the other.
    """

    closed = False
    fits_exactly = False

    activation: str

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.activation)

    def _activated(self, product: Tensor, k: int) -> Tensor:  # (n, width, J_k * R_k) -> (n, width * J_k, R_k)
        """What core ``k`` made, as left products of the next."""
        return ACTIVATIONS[self.activation](self.chain.after(product, k))

    def _first(self, p: Params, digit: Tensor) -> Tensor:  # (n,) -> (n, J_1, R_1)
        return ACTIVATIONS[self.activation](p["core_0"].index_select(0, digit).flatten(1, 2))

    def _slices(self, p: Params, k: int) -> Tensor:  # -> (I_k, R_{k-1}, J_k * R_k)
        return self.chain.slices(p[f"core_{k}"], k)

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        digit, last = digits(index, self.row_factors), self.chain.order - 1
        left = self._first(p, digit[0])
        for k in range(1, last):
            left = self._activated(torch.bmm(left, self._slices(p, k).index_select(0, digit[k])), k)
        return torch.bmm(left, self._slices(p, last).index_select(0, digit[last])).reshape(index.shape[0], self.cols)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """As :meth:`take`, each left product once for all rows that begin so, and products by the kernels."""
        if index.shape[0] == 0:
            return self.rows_of(p, index)
        wide, last = self.widened(p), self.chain.order - 1
        rows = self._products(wide, index, last)
        return rounded(rows.reshape(index.shape[0], self.cols), p)

    def _products(self, p: Params, number: Tensor, k: int) -> Tensor:  # (n,) -> (n, width, outer)
        """Those of core ``k`` and the left products before it, for prefixes of ``k + 1`` digits by their number."""
        factor = self.row_factors[k]
        above = torch.div(number, factor, rounding_mode="floor")
        unique, place = unique_numbers(above, math.prod(self.row_factors[:k]))
        left = self._first(p, unique) if k == 1 else self._activated(self._products(p, unique, k - 1), k - 1)
        return pair_products(left, self._slices(p, k), place * factor + (number - above * factor))

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        left = self._first(p, torch.arange(self.row_factors[0], device=p["core_0"].device))
        for k in range(1, self.chain.order):
            product = torch.einsum("amr,brk->abmk", left, self._slices(p, k)).flatten(0, 1)
            left = product if k == self.chain.order - 1 else self._activated(product, k)
        return left.reshape(-1, self.cols)[: self.rows]

    def explain(self, index: Tensor, impl: str) -> Explanation:  # (n,)
        told, counts = super().explain(index, impl), find_prefixes(index, self.row_factors).counts
        if impl != "auto" or not index.shape[0]:
            return replace(told, prefixes=counts)
        kernels, made = kernels_of_pairs(index.device), self.chain.multiply_adds(counts)
        return replace(told, prefixes=counts, path=kernels.name, why=kernels.why(index.device), multiply_adds=made)

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        """Draw cores that keep the size of left products, then scale the last by the deviation that was measured."""
        squares = torch.zeros(())
        while squares == 0:  # of few small cores an activation may let nothing pass
            for k, spec in enumerate(self.specs):
                p[spec.name].normal_(std=self.ranks[k] ** -0.5, generator=generator)
            squares = mean_square(self, p, generator)
        scale_to_std({"last": p[self.specs[-1].name]}, squares, 1, std)

    def describe(self) -> str:
        return f"{super().describe()}, {self.activation}"


def check_activation(activation: str) -> None:
    """One that is known, or an error that lists them."""
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        names = ", ".join(f'"{name}"' for name in ACTIVATIONS)
        raise ValueError(f"activation={activation!r} for NonlinearTrain: choose one of {names}.")


@dataclass(frozen=True, kw_only=True, repr=False)
class NonlinearTrain(FactorsFormat[NonlinearTrainMatrix]):
    """A tensor train with an activation after each core but the last, for training from scratch.

    A trained table cannot be fitted by it. Give ``rank`` or ``ratio``.

    Args:
        rank: of every bond between two cores; 16 when nothing is said.
        ratio: the largest rank at which the dense table takes at least this many times the stored bytes.
        rel_error: refused, because there is no fit.
        order: how many cores there are.
        shape: the factors of rows and columns, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.
        activation: ``"relu"``, ``"tanh"`` or ``"gelu"``.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.NonlinearTrain(rank=16, activation="tanh"))
        >>> round(layer.compression_ratio, 1)
        222.2
    """

    sizes: ClassVar[tuple[str, ...]] = ("rank", "ratio")

    activation: str = "relu"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.activation)

    def with_rank(self, budget: Budget, rank: int, *, clip: bool) -> NonlinearTrainMatrix:
        """Never clipped: behind an activation a train has a use for more rank than a linear one."""
        row_factors, col_factors = self.factors(budget)
        ranks = (1, *[rank] * (len(row_factors) - 1), 1)
        return NonlinearTrainMatrix(budget.rows, budget.cols, row_factors, col_factors, ranks, self.activation)
