"""The one index law: mixed-radix digits of a row or column number, in integer arithmetic only.

Everywhere in this library the *first* factor is the slowest (row-major, as :func:`torch.reshape` has it). The
paper's Algorithms 1 and 2 make the first factor the fastest; ``first="fastest"`` gives them as written.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, overload

import torch
from torch import Tensor

from tensorbed.checks import require_integer_indices, require_positive

First = Literal["slowest", "fastest"]

_INT64_MAX = 2**63 - 1


@overload
def unravel(index: Tensor, factors: Sequence[int], *, first: First = ...) -> tuple[Tensor, ...]: ...
@overload
def unravel(index: int, factors: Sequence[int], *, first: First = ...) -> tuple[int, ...]: ...


def unravel(
    index: Tensor | int, factors: Sequence[int], *, first: First = "slowest"
) -> tuple[Tensor, ...] | tuple[int, ...]:
    """Split an index into one digit per factor (Algorithm 1 of the paper with ``first="fastest"``).

    With factors ``(I_1, ..., I_N)`` and the first slowest,
    ``index = ((i_1 * I_2 + i_2) * I_3 + i_3) ...``.

    Shape:
        - index: ``(*)``, int32 or int64, each in ``[0, prod(factors))``; or a Python int
        - output: ``N`` tensors ``(*)`` of int64; or ``N`` Python ints

    Example::

        >>> unravel(7, (2, 3, 4))
        (0, 1, 3)
        >>> unravel(7, (2, 3, 4), first="fastest")
        (1, 0, 1)
    """
    order = _checked_order(factors, first)
    size = prod(factors)
    if isinstance(index, Tensor):
        require_integer_indices(index)
        index = check_range(index.long(), size)
        return digits(index, factors, order)
    index = _checked_int(index, "index")
    if not 0 <= index < size:
        raise IndexError(_out_of_range(index, size))
    found = dict.fromkeys(order, 0)
    for k in reversed(order):
        index, found[k] = divmod(index, factors[k])
    return tuple(found[k] for k in range(len(factors)))


@overload
def ravel(multi: Sequence[Tensor], factors: Sequence[int], *, first: First = ...) -> Tensor: ...
@overload
def ravel(multi: Sequence[int], factors: Sequence[int], *, first: First = ...) -> int: ...


def ravel(multi: Sequence[Tensor] | Sequence[int], factors: Sequence[int], *, first: First = "slowest") -> Tensor | int:
    """Join one digit per factor into an index: the inverse of :func:`unravel` (Algorithm 2 of the paper).

    Shape:
        - multi: ``N`` tensors ``(*)``, the k-th with values in ``[0, factors[k])``; or ``N`` Python ints
        - output: ``(*)`` of int64; or a Python int
    """
    order = _checked_order(factors, first)
    if len(multi) != len(factors):
        raise ValueError(f"{len(multi)} digits for {len(factors)} factors {tuple(factors)}: give one for each.")
    index: Tensor | int = 0
    for k in order:
        digit: Tensor | int = multi[k]
        if isinstance(digit, Tensor):
            require_integer_indices(digit)
            digit = check_range(digit.long(), factors[k], what=f"digit {k}")
        else:
            digit = _checked_int(digit, f"digit {k}")
            if not 0 <= digit < factors[k]:
                raise IndexError(_out_of_range(digit, factors[k], what=f"digit {k}"))
        index = index * factors[k] + digit
    return index


def digits(index: Tensor, factors: Sequence[int], order: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """Digits of int64 indices already known to be in range; row-major unless ``order`` says otherwise."""
    positions = range(len(factors)) if order is None else order
    found: dict[int, Tensor] = {}
    for k in reversed(list(positions)[1:]):
        found[k] = index % factors[k]
        index = index // factors[k]
    found[positions[0]] = index
    return tuple(found[k] for k in range(len(factors)))


def check_range(index: Tensor, size: int, *, what: str = "index") -> Tensor:
    """Return ``index``, or raise ``IndexError`` with the first offending value and the bound."""
    if index.numel():
        low, high = (int(v) for v in torch.aminmax(index))
        if low < 0 or high >= size:
            raise IndexError(_out_of_range(low if low < 0 else high, size, what=what))
    return index


def _out_of_range(value: int, size: int, what: str = "index") -> str:
    hint = "; negative indices do not wrap around" if value < 0 else ""
    table = f"a table of {size} rows" if what == "index" else f"a factor of {size}"
    return f"{what} {value} is out of range for {table} (valid: 0 to {size - 1}){hint}."


def _checked_int(value: object, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int or an integer tensor, got {value!r} ({type(value).__name__}).")
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
