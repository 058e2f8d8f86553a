"""Counted cost of each executor, in units of one multiply-add of a large product.

What all of them do alike, finding the unique rows and handing each index its own, is left out. The counts are exact;
what a copied number and a call are worth in multiply-adds was measured on x86-64 CPUs with ``make bench`` and holds
within a factor of two across the workloads there, which is enough to choose by.
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorbed.contraction.chain import Chain

_COPY = 24  # moving one number through memory
_CALL = 150_000  # one tensor operation: dispatch, allocation
_GROUP = 120_000  # one more group in a grouped product
_STORE = 12  # writing one number that was just computed
_THIN = 2  # a product too small to fill the machine, against a large one


def per_row(chain: Chain, counts: Sequence[int]) -> int:
    """A gathered slice and a thin product a prefix, level by level."""
    total = 0
    for k in range(1, chain.order):
        left, slice_size, out = _sizes(chain, k)
        total += counts[k] * (_COPY * (left + slice_size + out) + _THIN * left * chain.outer(k)) + 6 * _CALL
    return total


def grouped(chain: Chain, counts: Sequence[int]) -> int:
    """A gathered left product a prefix, and one product a group."""
    total = 0
    for k in range(1, chain.order):
        left, _, out = _sizes(chain, k)
        groups = min(counts[k], chain.row_factors[k])
        total += counts[k] * (_COPY * (left + out) + left * chain.outer(k)) + groups * _GROUP + 14 * _CALL
    return total


def native(chain: Chain, counts: Sequence[int]) -> int:
    """The compiled kernels: each product once, its left factor read where it lies, one call."""
    total = _CALL // 5
    for k in range(1, chain.order):
        left, _, out = _sizes(chain, k)
        total += counts[k] * (left * chain.outer(k) + _STORE * out)
    return total


def whole_table(chain: Chain) -> int:
    """Every padded row once, by large products."""
    total, prefixes = 0, chain.row_factors[0]
    for k in range(1, chain.order):
        prefixes *= chain.row_factors[k]
        left, _, out = _sizes(chain, k)
        total += prefixes * (left * chain.outer(k) + _COPY * 2 * out) + 6 * _CALL
    return total


def multiply_adds(chain: Chain, counts: Sequence[int]) -> int:
    """Of the products alone, when this many left products are made at each level."""
    return sum(counts[k] * chain.width(k) * chain.inner(k) * chain.outer(k) for k in range(1, chain.order))


def _sizes(chain: Chain, k: int) -> tuple[int, int, int]:
    """Numbers in a left product, a slice and a product at level ``k``."""
    width, inner, outer = chain.width(k), chain.inner(k), chain.outer(k)
    return width * inner, inner * outer, width * outer
