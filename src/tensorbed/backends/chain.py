r"""A chain of cores, open (tensor train) or closed (tensor ring), and its plain differentiable arithmetic.

The k-th core :math:`\mathcal{G}^{(k)} \in \mathbb{R}^{R_{k-1} \times I_k \times J_k \times R_k}` of the paper is
stored slice by slice, as ``(I_k, R_{k-1}, J_k, R_k)``: a digit of a row number picks one contiguous block, and
multiplying by it is one matrix product. A row of the table is

.. math:: E[(i_1 \dots i_N), (j_1 \dots j_N)] = \mathrm{tr}\; G^{(1)}[i_1, j_1] \cdots G^{(N)}[i_N, j_N],

where the trace is void for a train (:math:`R_0 = R_N = 1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tensorbed.dispatch import working_dtype
from tensorbed.indexing import digits, unravel

Cores = Sequence[Tensor]
_HELD = 2**20  # numbers that one step may always hold


@dataclass(frozen=True)
class Chain:
    """Sizes of a chain: ``rows`` are the real ones, ``prod(row_factors)`` the padded ones."""

    rows: int
    row_factors: tuple[int, ...]  # (I_1, ..., I_N)
    col_factors: tuple[int, ...]  # (J_1, ..., J_N)
    ranks: tuple[int, ...]  # (R_0, ..., R_N), R_0 == R_N

    @property
    def order(self) -> int:
        return len(self.row_factors)

    @property
    def cols(self) -> int:
        return prod(self.col_factors)

    @property
    def joint(self) -> int:
        """``R_0 = R_N``: 1 for a train, the width of the joint for a ring."""
        return self.ranks[0]

    def core_shape(self, k: int) -> tuple[int, int, int, int]:
        """Stored shape of core ``k`` (from 0): ``(I_k, R_{k-1}, J_k, R_k)``."""
        return (self.row_factors[k], self.ranks[k], self.col_factors[k], self.ranks[k + 1])

    @property
    def numel(self) -> int:
        """Numbers of all cores."""
        return sum(prod(self.core_shape(k)) for k in range(self.order))

    def width(self, k: int) -> int:
        """Rows of the left product that core ``k`` (from 1) multiplies: the joint, except at the last core."""
        made = prod(self.col_factors[:k])
        return made if k == self.order - 1 else made * self.joint

    def inner(self, k: int) -> int:
        """Length of the sums at core ``k`` (from 1): closing a ring sums over the joint too."""
        return self.ranks[k] * (self.joint if k == self.order - 1 else 1)

    def outer(self, k: int) -> int:
        """Columns of a slice of core ``k`` (from 1) as a matrix."""
        return self.col_factors[k] * (1 if k == self.order - 1 else self.ranks[k + 1])

    def multiply_adds(self, counts: Sequence[int]) -> int:
        """Of the products, when this many left products are made at each level."""
        return sum(counts[k] * self.width(k) * self.inner(k) * self.outer(k) for k in range(1, self.order))

    def packed(self) -> list[int]:
        """All sizes in one list, for operators that take numbers only."""
        return [self.rows, *self.row_factors, *self.col_factors, *self.ranks]

    @classmethod
    def unpacked(cls, sizes: Sequence[int]) -> Chain:
        """The inverse of :meth:`packed`."""
        n = (len(sizes) - 2) // 3
        return cls(sizes[0], tuple(sizes[1 : n + 1]), tuple(sizes[n + 1 : 2 * n + 1]), tuple(sizes[2 * n + 1 :]))

    # A level takes left products (n, width, inner) to (n, width, outer); below are the views and, for the ring's
    # last level only, the one reordering between how tensors are kept and how they are multiplied.

    def slices(self, core: Tensor, k: int) -> Tensor:
        """Core ``k`` as one matrix a digit: ``(I_k, R_{k-1}, J_k, R_k) -> (I_k, inner, outer)``."""
        if k == self.order - 1:
            core = core.permute(0, 3, 1, 2)
        return core.reshape(self.row_factors[k], self.inner(k), self.outer(k))

    def unslice(self, slices: Tensor, k: int) -> Tensor:
        """The inverse of :meth:`slices`."""
        i, left, j, right = self.core_shape(k)
        if k == self.order - 1:
            return slices.reshape(i, right, left, j).permute(0, 2, 3, 1)
        return slices.reshape(i, left, j, right)

    def closed(self, left: Tensor, k: int) -> Tensor:
        """Left products ready for core ``k``: ``(n, R_0 * M, R_{k-1}) -> (n, width, inner)``."""
        if k < self.order - 1 or self.joint == 1:
            return left
        n, m, r = left.shape[0], self.width(k), self.ranks[k]
        return left.reshape(n, self.joint, m, r).transpose(1, 2).reshape(n, m, self.joint * r)

    def opened(self, grad: Tensor, k: int) -> Tensor:
        """The inverse of :meth:`closed`, for gradients."""
        if k < self.order - 1 or self.joint == 1:
            return grad
        n, m, r = grad.shape[0], self.width(k), self.ranks[k]
        return grad.reshape(n, m, self.joint, r).transpose(1, 2).reshape(n, self.joint * m, r)

    def after(self, product: Tensor, k: int) -> Tensor:
        """What level ``k`` made, as left products of the next: ``(n, width, J_k * R_k) -> (n, width * J_k, R_k)``."""
        return product.reshape(product.shape[0], self.width(k) * self.col_factors[k], self.ranks[k + 1])


class ChainOfCores(NamedTuple):
    """A table that is a chain, for backends."""

    chain: Chain
    cores: Cores  # a tensor (I_k, R_{k-1}, J_k, R_k) each


def most_rows(chain: Chain, asked: int = 0) -> int:
    """Rows of a piece, so that no step of it holds as many numbers as a fourth of the table, unless that is small.

    With ``asked``, as many numbers as so many rows have are held anyway, and a piece may hold them.
    """
    each = max(chain.width(k) * max(chain.inner(k), chain.outer(k)) for k in range(1, chain.order))
    return max(16, max(_HELD, chain.rows * chain.cols // 4, asked * chain.cols) // (2 * each))


def widened(cores: Cores) -> list[Tensor]:
    """Half precision in single, so that a row is rounded once and not after each core."""
    dtype = working_dtype(*cores)
    return [core.to(dtype) for core in cores]


def take(chain: Chain, cores: Cores, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """Rows by one gathered slice and one small product a core and row: any device, any dtype, any derivative."""
    dtype, cores = cores[0].dtype, widened(cores)
    digit = digits(index, chain.row_factors)
    left = cores[0].index_select(0, digit[0]).flatten(1, 2)
    for k in range(1, chain.order):
        right = chain.slices(cores[k], k).index_select(0, digit[k])
        product = torch.bmm(chain.closed(left, k), right)
        left = product if k == chain.order - 1 else chain.after(product, k)
    return left.reshape(index.shape[0], chain.cols).to(dtype)


def full(chain: Chain, cores: Cores) -> Tensor:  # -> (rows, cols)
    """The whole table, one matrix product a core."""
    dtype, cores = cores[0].dtype, widened(cores)
    left = cores[0].flatten(1, 2)
    for k in range(1, chain.order):
        n, m = left.shape[0], chain.width(k)
        # Each left product extended by each digit, by one matrix for all digits: (inner, I_k * outer).
        every_slice = chain.slices(cores[k], k).transpose(0, 1).reshape(chain.inner(k), -1)
        product = (chain.closed(left, k).reshape(n * m, -1) @ every_slice).reshape(n, m, chain.row_factors[k], -1)
        product = product.transpose(1, 2).reshape(n * chain.row_factors[k], m, -1)
        left = product if k == chain.order - 1 else chain.after(product, k)
    return left.reshape(-1, chain.cols)[: chain.rows].to(dtype)


def sum_of_squares(chain: Chain, cores: Cores) -> Tensor:  # -> ()
    """Squared Frobenius norm of the real rows, without the table and with no padded row counted.

    By transfer matrices, or for a wide ring over a small table, where those would be larger than the table, by blocks
    of rows.
    """
    products = 3 * max(1, chain.order - 2) * (chain.joint * max(chain.ranks)) ** 3
    by_blocks = chain.joint > 1 and chain.rows * chain.cols * chain.joint * chain.ranks[-2] < products
    return _squares_by_blocks(chain, cores) if by_blocks else _squares_by_transfer(chain, cores)


def _squares_by_blocks(chain: Chain, cores: Cores) -> Tensor:
    """Row after row, a few values of the first digit at a time."""
    block = prod(chain.row_factors[1:])
    height = max(1, 2**20 // (block * chain.cols))
    total = torch.zeros((), dtype=torch.float64, device=cores[0].device)
    for start in range(0, chain.row_factors[0], height):
        first = cores[0][start : start + height]
        rows = min(chain.rows - start * block, first.shape[0] * block)
        if rows > 0:
            part = Chain(rows, (first.shape[0], *chain.row_factors[1:]), chain.col_factors, chain.ranks)
            total += full(part, [first, *cores[1:]]).double().square().sum()
    return total


def _squares_by_transfer(chain: Chain, cores: Cores) -> Tensor:
    """From the last core to the first two states are carried over the rows of the suffix: ``whole``, the sum over all,
    and ``part``, the sum over those below the suffix of ``rows``. A digit below that of ``rows`` frees the rest.
    """
    # A ring's transfers are R^2 x R^2; beyond rank 32 single precision is exact enough and twice as fast.
    dtype = torch.float64 if chain.joint * max(chain.ranks) <= 1024 else torch.float32
    whole: Tensor | None = None
    part: Tensor | None = None
    bound = chain.row_factors  # past the end, so that all digits lie below, where every padded row is real
    if chain.rows < prod(bound):
        bound = unravel(chain.rows, bound)
    for k in reversed(range(1, chain.order)):
        core = cores[k].detach().to(dtype)
        lower = _transfer(core[: bound[k]], whole)
        rest = lower if part is None else lower + _transfer(core[bound[k] : bound[k] + 1], part)
        whole, part = lower + _transfer(core[bound[k] :], whole), rest
    assert whole is not None
    assert part is not None
    # Only the trace of the last product is wanted.
    first = cores[0].detach().to(dtype)
    below, at = _kron(first[: bound[0]]), _kron(first[bound[0] : bound[0] + 1])
    return (below * whole.T).sum() + (at * part.T).sum()


def _transfer(core: Tensor, state: Tensor | None) -> Tensor:  # (i, R, j, R'), (R'^2, S) -> (R^2, S)
    """``sum_{i,j} (G[i,j] kron G[i,j]) @ state``, by the cheaper of forming that sum and applying each term.

    Without a state it is the identity, and the sum itself is returned.
    """
    _, left, _, right = core.shape
    mats = core.transpose(1, 2).reshape(-1, left, right)
    n, s = mats.shape[0], right**2 if state is None else state.shape[1]
    if state is None or n * left * right * (left + right) * s > (left * right) ** 2 * (n + s):
        return _kron(core) if state is None else _kron(core) @ state
    total = state.new_zeros(left, left, s)
    cube = state.reshape(right, right * s)
    chunk = max(1, 2**20 // (left * right * s))
    for start in range(0, n, chunk):
        part = mats[start : start + chunk]
        half = (part @ cube).reshape(-1, left, right, s)  # sum over the first right bond
        total += torch.einsum("nabs,ncb->acs", half, part)
    return total.reshape(left**2, s)


def _kron(core: Tensor) -> Tensor:  # (i, R, j, R') -> (R^2, R'^2)
    """``sum_{i,j} G[i,j] kron G[i,j]``."""
    _, left, _, right = core.shape
    flat = core.transpose(1, 2).reshape(-1, left * right)
    return (flat.T @ flat).reshape(left, right, left, right).transpose(1, 2).reshape(left**2, right**2)
