"""Refusals that several modules share, each a sentence with what was given, what is allowed and the fix."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def frames_in_packages(*packages: str) -> int:
    """How many calls up the first line outside of these packages is: a warning should point there, to the user's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in packages:
        level, frame = level + 1, frame.f_back
    return level


def require_bool(value: object, name: str, advice: str = "") -> bool:
    """``True`` or ``False``, or an error that shows what was given in its place and adds the advice."""
    if not isinstance(value, bool):
        shown = f"{name} must be True or False, got {value!r} ({type(value).__name__})"
        raise TypeError(f"{shown}; {advice}." if advice else f"{shown}.")
    return value


def require_int(value: object, name: str) -> int:
    """A whole number, also numpy's, as a Python int; or an error that shows what it was."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise TypeError(f"{name} must be an int, got {value!r} ({type(value).__name__}).")
    return operator.index(value)


def require_positive(value: object, name: str) -> int:
    """A whole number of at least 1, or an error that shows it."""
    number = require_int(value, name)
    if number < 1:
        raise ValueError(f"{name}={number}: must be at least 1.")
    return number


def require_number(value: object, name: str, *, low: float, high: float = math.inf, inclusive: bool = False) -> float:
    """A finite number in ``(low, high)``, or in ``[low, high]``, or an error that shows it."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
        raise TypeError(f"{name} must be a number, got {value!r} ({type(value).__name__}).")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    inside = low <= number <= high if inclusive else low < number < high
    if not inside or number == math.inf:
        above, below = ("of at least", "at most") if inclusive else ("greater than", "less than")
        bound = f"{above} {low:g}" + ("" if high == math.inf else f" and {below} {high:g}")
        raise ValueError(f"{name}={value}: must be a finite number {bound}.")
    return number


def wrapped_padding_idx(padding_idx: int | None, rows: int) -> int | None:
    """A row number, negative ones counted from the end, as in ``torch.nn.Embedding``."""
    if padding_idx is None:
        return None
    padding_idx = require_int(padding_idx, "padding_idx")
    if not -rows <= padding_idx < rows:
        raise ValueError(f"padding_idx={padding_idx} is not a row of a table of {rows} (valid: {-rows} to {rows - 1}).")
    return padding_idx % rows


def require_integer_indices(index: Tensor, name: str = "index") -> None:
    """Indices are int32 or int64, as ``torch.nn.Embedding`` asks."""
    if not isinstance(index, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(index).__name__}; use torch.as_tensor(...).")
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int32 or int64, got {str(index.dtype)[6:]}; convert it with .long().")


def require_float_dtype(dtype: torch.dtype) -> None:
    """Tables hold floating-point numbers."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise TypeError(
            f"dtype={dtype!r}: a table holds floating-point numbers, torch.float32, bfloat16, float16 or float64."
        )


@contextmanager
def naming(owner: str) -> Iterator[None]:
    """Put the name of one among several before the sentence of an error about it; nothing when there is no name."""
    try:
        yield
    except (IndexError, TypeError, ValueError) as error:
        if not owner:
            raise
        raise type(error)(f"{owner}: {error}") from None
