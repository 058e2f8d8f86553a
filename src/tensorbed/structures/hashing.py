"""Universal hashes of row numbers, in whole numbers of 64 bits that no step overflows."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.structures.base import TensorSpec

PRIME = 2**31 - 1
_HALF = 2**31  # row numbers below it are their own lower half


def constants_of(hashes: int) -> TensorSpec:
    """Where the constants ``a``, ``b`` and ``c`` of each hash are kept."""
    return TensorSpec("constants", (hashes, 3), torch.int64, trainable=False)


def draw_constants(constants: Tensor, generator: torch.Generator | None = None) -> Tensor:  # (hashes, 3)
    """Other hashes, in place."""
    return constants.random_(1, PRIME, generator=generator)


def check_constants(constants: Tensor) -> None:  # (hashes, 3)
    """``ValueError`` for numbers that :func:`draw_constants` does not draw."""
    least, most = (int(end) for end in constants.aminmax())
    if least < 1 or most >= PRIME:
        raise ValueError(f"constants of hashes go from {least} to {most}: they are from 1 to {PRIME - 1}.")


def hashed(constants: Tensor, index: Tensor, rows: int, buckets: int) -> Tensor:  # (hashes, 3), (n,) -> (n, hashes)
    r"""Which bucket each hash has for each of ``rows`` row numbers.

    .. math:: h(i) = (a\,(i \bmod 2^{31}) + b \lfloor i / 2^{31} \rfloor + c) \bmod (2^{31} - 1) \bmod \text{buckets}

    No product reaches ``2**63``, nor does one and the constant added to it. Division and remainder stand for shifts and
    masks, which ONNX has for unsigned numbers alone.
    """
    a, b, c = constants.unbind(1)
    index = index[:, None]
    if rows <= _HALF:
        return (index * a + c) % PRIME % buckets
    low, high = index % _HALF, torch.div(index, _HALF, rounding_mode="floor")
    return ((low * a + c) % PRIME + high * b % PRIME) % PRIME % buckets
