"""Factors of a table's sizes, the padding they cost, and the ranks a shape can use."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sequence

from tensorbed.checks import frames_in_packages, require_positive
from tensorbed.indexing import ravel
from tensorbed.printable import shortened

Shape = tuple[tuple[int, ...], tuple[int, ...]]

MAX_PADDING = 0.05
# The rank at which parameters are counted: ends cost R, inner cores R^2, so the inner ones get the small factors.
_REFERENCE_RANK = 16
# A few milliseconds of searching.
_MOST_STEPS = 2_500
_MOST_FACTORS = 64  # 63 factors of 2 hold every table
_MOST_FACTORED = 2**20  # larger sizes may have so many factorisations that looking for the best takes minutes


def suggest_shape(num_embeddings: int, embedding_dim: int, order: int = 3) -> Shape:
    """Factors ``((I_1, ..., I_N), (J_1, ..., J_N))`` for a table, chosen for the fewest parameters.

    Among row factors whose product exceeds ``num_embeddings`` by at most 5 % and whose largest is at most twice the
    smallest, the ones with the fewest tensor-train parameters ``sum_k R_{k-1} I_k J_k R_k`` at one uniform rank.
    The columns are factored exactly, as evenly as they go. Where no factors meet both bounds (very small tables,
    high orders) the balance is kept and the bound on the padding is doubled until some do.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        order: how many factors each has, ``N``.

    Example::

        >>> tb.suggest_shape(25000, 256)
        ((35, 19, 38), (8, 4, 8))
    """
    num_embeddings = require_positive(num_embeddings, "num_embeddings")
    embedding_dim = require_positive(embedding_dim, "embedding_dim")
    order = require_positive(order, "order")
    if order < 2:
        raise ValueError(f"order={order}: a chain has at least 2 cores.")
    if embedding_dim > 2**31 or order > _MOST_FACTORS:
        raise ValueError(f"embedding_dim={embedding_dim}, order={order}: at most 2**31 and {_MOST_FACTORS}.")
    if num_embeddings > 2**62:
        raise ValueError(f"num_embeddings={num_embeddings}: rows are counted in int64, 2**62 at the most.")
    return _suggest(num_embeddings, embedding_dim, order)


@functools.lru_cache(maxsize=4096)
def _suggest(rows: int, cols: int, order: int) -> Shape:
    even = factor_evenly(cols, order)
    if even[0] == 1 and cols > 1:
        _say_uneven(cols, (even[-1], *even[: order - 2], even[-2]))
    # The inner cores cost R times more than the ends, so they take the smallest column factors.
    ends, inner = (even[-1], even[-2]), even[: order - 2]
    padding = MAX_PADDING
    while (best := _Search(rows, ends, inner, padding).best) is None:
        padding *= 2
    return best[2], (ends[0], *inner, ends[1])


@functools.cache
def _say_uneven(cols: int, factors: tuple[int, ...]) -> None:
    """Once for each size: a cached function runs once."""
    order = len(factors)
    near = range(cols, cols + 64) if 2**order <= 2 * cols else ()
    better = next((size for size in near if factor_evenly(size, order)[0] > 1), None)
    advice = f"a size such as {better} factors well" if better else "a lower order may suit it better"
    warnings.warn(
        f"embedding_dim={cols} does not split into {order} factors above 1: using {factors}. It works, with "
        f"fewer useful ranks; {advice}.",
        stacklevel=frames_in_packages("tensorbed"),
    )


class _Search:
    """The cheapest balanced row factors for given column factors: inner factors by descent, ends by a short scan.

    Exact for every table it can walk in ``_MOST_STEPS`` steps (all below 10^7 rows at orders 2 to 4); beyond, the
    best of what was seen, within a fraction of a percent.
    """

    def __init__(self, rows: int, ends: tuple[int, int], inner: tuple[int, ...], padding: float) -> None:
        order = len(inner) + 2
        self.rows, self.ends, self.inner = rows, ends, inner
        self.most_rows = math.floor(rows * (1 + padding))
        # With all factors in [f, 2f] and a product of I: f (2f)^(N-1) >= I, and F (F/2)^(N-1) <= the padded I.
        self.least = max(1, math.floor((rows / 2 ** (order - 1)) ** (1 / order)))
        self.most = math.ceil((self.most_rows * 2 ** (order - 1)) ** (1 / order))
        self.steps = 0
        self.best: tuple[float, int, tuple[int, ...]] | None = None  # (parameters, padded rows, factors)
        self._descend((), 0)

    def _descend(self, chosen: tuple[int, ...], cost: int) -> None:
        """Try every next inner factor. Column factors ascend, so row factors descend: large meets small."""
        if len(chosen) == len(self.inner):
            self._scan_ends(chosen, cost)
            return
        weight = _REFERENCE_RANK * self.inner[len(chosen)]
        left = len(self.inner) - len(chosen)
        # The factors still to come are at most this one, and the ends at most twice it: smaller cannot reach I.
        enough = (self.rows / (4 * math.prod(chosen))) ** (1 / (left + 2))
        low = max(self.least, math.floor(enough), -(-chosen[0] // 2) if chosen else 1)
        for factor in range(low, (chosen[-1] if chosen else self.most) + 1):
            self.steps += 1
            now, spent = (*chosen, factor), cost + weight * factor
            least = spent + _REFERENCE_RANK * -(-now[0] // 2) * sum(self.inner[len(now) :])
            # Then nothing that starts with these inner factors, or with a larger last one, can win.
            if (self.best is not None and least > self.best[0]) or self.steps > _MOST_STEPS:
                break
            self._descend(now, spent)

    def _scan_ends(self, inner: tuple[int, ...], cost: int) -> None:
        """Best ``a * b >= rows / prod(inner)`` for the two ends, walking out from the continuous optimum."""
        needed = -(-self.rows // math.prod(inner))
        low = -(-max(inner) // 2) if inner else self.least
        high = 2 * min(inner) if inner else self.most
        if needed > high * high:
            return
        low = max(low, -(-needed // high))
        first, last = self.ends
        start = min(max(round(math.sqrt(needed * last / first)), low), high)
        for walk in (range(start, high + 1), range(start - 1, low - 1, -1)):
            for a in walk:
                self.steps += 1
                if self.best is not None and cost + first * a + last * needed / a > self.best[0]:
                    break
                b = max(-(-needed // a), low, -(-a // 2))
                padded = math.prod(inner) * a * b
                if b <= min(high, 2 * a) and padded <= self.most_rows:
                    found = (cost + first * a + last * b, padded, (a, *inner, b))
                    self.best = found if self.best is None else min(self.best, found)
                if self.steps > _MOST_STEPS:
                    return


def factor_evenly(size: int, order: int) -> tuple[int, ...]:
    """``order`` factors of ``size``, ascending, with the smallest sum: as even as an exact factorisation goes."""
    return min(_factorisations(size, order, 1), key=lambda f: (sum(f), f[-1]))


def _factorisations(size: int, order: int, least: int) -> Iterator[tuple[int, ...]]:
    if order == 1:
        yield (size,)
        return
    for factor in divisors_of(size):
        if factor < least:
            continue
        if factor**order > size:
            break
        for rest in _factorisations(size // factor, order - 1, factor):
            yield (factor, *rest)


@functools.lru_cache(maxsize=4096)
def divisors_of(size: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [d for d in range(1, math.isqrt(size) + 1) if size % d == 0]
    return tuple(sorted({*small, *(size // d for d in small)}))


def as_shape(shape: object) -> Shape:
    """A user's shape as two tuples of positive ints, or an error that shows what one looks like."""
    try:
        row_factors, col_factors = (tuple(f) for f in shape)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise ValueError(
            f"shape={shortened(repr(shape), 300)}: give the row factors and the column factors, for instance "
            "((25, 30, 40), (4, 8, 8))."
        ) from None
    if max(len(row_factors), len(col_factors)) > _MOST_FACTORS:
        raise ValueError(
            f"the shape has {len(row_factors)} row and {len(col_factors)} column factors; at most {_MOST_FACTORS} of "
            "each."
        )
    given = repr(shape)
    rows = tuple(require_positive(factor, f"a row factor of shape {given}") for factor in row_factors)
    return rows, tuple(require_positive(factor, f"a column factor of shape {given}") for factor in col_factors)


def check_shape(shape: object, num_embeddings: int, embedding_dim: int) -> Shape:
    """A user's shape, of two equal lengths and holding the table, or an error with the fix."""
    row_factors, col_factors = as_shape(shape)
    given = f"shape ({row_factors}, {col_factors})"
    if len(row_factors) != len(col_factors) or len(row_factors) < 2:
        raise ValueError(
            f"{given} has {len(row_factors)} row and {len(col_factors)} column factors; "
            "both need the same number, at least 2."
        )
    held = math.prod(row_factors)
    if held < num_embeddings:
        enough = (*row_factors[:-1], -(-num_embeddings // math.prod(row_factors[:-1])))
        raise ValueError(
            f"{given} holds {held} rows, fewer than num_embeddings={num_embeddings}; "
            f"raise a factor, for instance {enough}, or leave shape=None."
        )
    if held > 2**63 - 1:
        raise ValueError(f"{given} holds too many rows; rows are counted in int64, 2**63 - 1 at the most.")
    made = math.prod(col_factors)
    if made != embedding_dim:
        # Numbers from a damaged file may be of any size.
        sane = embedding_dim <= _MOST_FACTORED
        instance = f", for instance {factor_evenly(embedding_dim, len(col_factors))}" if sane else ""
        raise ValueError(
            f"{given} makes rows of {made} numbers, but embedding_dim={embedding_dim}; the column factors must "
            f"multiply to it exactly{instance}."
        )
    return row_factors, col_factors


def useful_ranks(sizes: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Clip ``(R_0, ..., R_N)`` to what cores over ``sizes`` (the ``I_k J_k``) can use.

    A bond wider than ``R_{k-1} I_k J_k``, or than ``I_{k+1} J_{k+1} R_{k+1}``, holds linearly dependent columns:
    it can be narrowed without changing the table. ``R_0 = R_N`` are the ends of a train (1) or the joint of a ring,
    which has no use for more than the widest bond of a train that holds every table.
    """
    most = max(min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes)))
    clipped = [min(rank, most) for rank in ranks]
    for k in range(1, len(sizes)):
        clipped[k] = min(clipped[k], clipped[k - 1] * sizes[k - 1])
    for k in range(len(sizes) - 1, 0, -1):
        clipped[k] = min(clipped[k], clipped[k + 1] * sizes[k])
    return tuple(clipped)


def guarantees_full_rank(shape: Shape, rows: int) -> bool:
    """Whether almost every chain of this shape, whatever its ranks, makes ``rows`` rows of full matrix rank.

    Theorem 1 of the paper, and where its proof holds. There are cores for which every row whose digits are all below
    ``J_k`` is a unit vector, each a different one: all the columns where ``I_k >= J_k`` for every ``k``, unless padding
    cuts some of those rows off; where ``I_k <= J_k``, all the rows. What some cores reach almost all do. It is not true
    of other shapes, as the paper has it: ``((2, 7, 1), (4, 1, 5))`` at rank 2 has matrix rank 8 of 14.
    """
    pairs = list(zip(*shape, strict=True))
    if any(i < j for i, j in pairs):
        return all(i <= j for i, j in pairs)
    return all(i == j for i, j in pairs) or ravel([j - 1 for _, j in pairs], shape[0]) < rows
