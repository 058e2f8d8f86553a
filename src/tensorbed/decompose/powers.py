"""Tables of very large and very small numbers, by powers of two: what would overflow or vanish when it is squared."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor

# Exponents are moved by whole multiples of this: up to six tensors share such a power without rounding anything, and
# numbers below 2 ** 30, which stay where they are, can be squared and summed in float32.
_STRIDE = 60
_BLOCK = 2**22  # numbers of a norm taken at once

Number = TypeVar("Number", float, Tensor)


def largest(tensor: Tensor) -> float:
    """The largest magnitude, 0 of none."""
    return max(abs(float(end)) for end in tensor.aminmax()) if tensor.numel() else 0.0


def far_exponent(tensor: Tensor) -> int:
    """The power of two that a tensor is to be divided by before its numbers are squared; 0 for all but extreme ones."""
    size = largest(tensor)
    return _STRIDE * round(math.frexp(size)[1] / _STRIDE) if size else 0


def shifted(number: Number, exponent: float) -> Number:
    """``number * 2 ** exponent``, in two steps, because the power alone may be too large; itself for 0."""
    if not exponent:
        return number
    half = exponent // 2
    moved: Number = number * 2.0**half * 2.0 ** (exponent - half)
    return moved


def frobenius(table: Tensor) -> float:
    """Norm in float64, whatever the dtype, without a copy of the whole in it."""
    table = table.detach()
    exponent = far_exponent(table)
    parts = [
        torch.linalg.vector_norm(shifted(part.double(), -exponent) if exponent else part, dtype=torch.float64)
        for part in table.split(max(1, _BLOCK * len(table) // max(1, table.numel())))
    ]
    return shifted(float(torch.linalg.vector_norm(torch.stack(parts))), exponent) if parts else 0.0
