"""The one index law: mixed-radix digits of a row or column number, in integer arithmetic only.

Everywhere in this library the *first* factor is the slowest (row-major, as :func:`torch.reshape` has it). The
paper's Algorithms 1 and 2 make the first factor the fastest; ``first="fastest"`` gives them as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, TypeVar

import torch
from torch import Tensor

from tensorbed.checks import require_integer_indices, require_positive

First = Literal["slowest", "fastest"]
Index = TypeVar("Index", Tensor, int)

_INT64_MAX = 2**63 - 1
CHECKED_BY_DEVICE = frozenset({"cuda"})  # and ROCm's, which go by this name


def unravel(index: Index, factors: Sequence[int], *, first: First = "slowest") -> tuple[Index, ...]:
    """Split an index into one digit per factor (Algorithm 1 of the paper with ``first="fastest"``).

    With factors ``(I_1, ..., I_N)`` and the first slowest,
    ``index = ((i_1 * I_2 + i_2) * I_3 + i_3) ...``.

    Shape:
        - index: ``(*)``, int32 or int64, each in ``[0, prod(factors))``; or a Python int
        - output: ``N`` tensors ``(*)`` of int64; or ``N`` Python ints

    Example::

        >>> tb.indexing.unravel(7, (2, 3, 4))
        (0, 1, 3)
        >>> tb.indexing.unravel(7, (2, 3, 4), first="fastest")
        (1, 0, 1)
    """
    order = _checked_order(factors, first)
    return digits(_checked(index, prod(factors), "index"), factors, order)


def ravel(multi: Sequence[Index], factors: Sequence[int], *, first: First = "slowest") -> Index:
    """Join one digit per factor into an index: the inverse of :func:`unravel` (Algorithm 2 of the paper).

    Shape:
        - multi: ``N`` tensors ``(*)``, the k-th with values in ``[0, factors[k])``; or ``N`` Python ints
        - output: ``(*)`` of int64; or a Python int

    Example::

        >>> tb.indexing.ravel((0, 1, 3), (2, 3, 4))
        7
    """
    order = _checked_order(factors, first)
    if len(multi) != len(factors):
        raise ValueError(f"{len(multi)} digits for {len(factors)} factors {tuple(factors)}: give one for each.")
    places = [_checked(digit, factors[k], f"digit {k}") for k, digit in enumerate(multi)]
    index = places[order[0]]
    for k in order[1:]:
        index = index * factors[k] + places[k]
    return index


def digits(index: Index, factors: Sequence[int], order: Sequence[int] | None = None) -> tuple[Index, ...]:
    """Digits of indices already known to be in range, as int64; row-major unless ``order`` says otherwise."""
    first, *rest = range(len(factors)) if order is None else order
    found: dict[int, Index] = {}
    for k in reversed(rest):
        found[k] = index % factors[k]
        index = index // factors[k]
    found[first] = index
    return tuple(found[k] for k in range(len(factors)))


def reads_values(device: torch.device) -> bool:
    """Whether checks look at numbers there. On a GPU the host would have to wait for them, and the device checks."""
    return device.type not in CHECKED_BY_DEVICE


def check_range(index: Tensor, size: int, *, what: str = "index") -> Tensor:
    """Return ``index``, or raise ``IndexError`` with the first offending value and the bound.

    On a GPU the device itself fails, once it comes to it, as in ``torch.nn.Embedding`` there.
    """
    if index.numel() and not reads_values(index.device):
        torch._assert_async(((index >= 0) & (index < size)).all(), out_of_range(None, size, what))
    elif index.numel():
        low, high = (int(v) for v in torch.aminmax(index))
        if low < 0 or high >= size:
            raise IndexError(out_of_range(low if low < 0 else high, size, what))
    return index


def out_of_range(value: int | None, size: int, what: str = "index") -> str:
    """What is said of an index or a digit outside of its table or factor, ``None`` where nobody knows which it is."""
    hint = "; negative indices do not wrap around" if value is not None and value < 0 else ""
    table = f"a table of {size} rows" if what == "index" else f"a factor of {size}"
    shown = f"some {what}" if value is None else f"{what} {value}"
    return f"{shown} is out of range for {table} (valid: 0 to {size - 1}){hint}."


def _checked(value: Index, size: int, what: str) -> Index:
    """An index or a digit in ``[0, size)``; a tensor of them as int64."""
    if isinstance(value, Tensor):
        require_integer_indices(value)
        return check_range(value.long(), size, what=what)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int or an integer tensor, got {value!r} ({type(value).__name__}).")
    if not 0 <= value < size:
        raise IndexError(out_of_range(value, size, what))
    return value


def _checked_order(factors: Sequence[int], first: First) -> range:
    """The positions of the factors from the slowest to the fastest."""
    if len(factors) == 0:
        raise ValueError("factors is empty: give at least one.")
    for k, factor in enumerate(factors):
        require_positive(factor, f"factors[{k}]")
    if prod(factors) > _INT64_MAX:
        raise ValueError(f"factors {tuple(factors)} span more than 2**63 - 1 indices, the most that int64 counts.")
    if first == "slowest":
        return range(len(factors))
    if first == "fastest":
        return range(len(factors) - 1, -1, -1)
    raise ValueError(f'first={first!r}: "slowest" (the library\'s law) or "fastest" (the paper\'s Appendix A).')
