"""Dropout that does not take a tenth of a training step on a processor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BITS = 16  # of a random number decide on one number of the tensor
_WHOLE = 2**_BITS


def dropout(x: Tensor, share: float) -> Tensor:
    """Zero for a share of the numbers, drawn at random; what is left is scaled up, so that the mean stays.

    torch's own draws a whole random number for each on a processor. Here four share one of 64 bits, and the share is
    rounded down to a multiple of 2**-16.
    """
    if x.device.type != "cpu":
        return F.dropout(x, share)
    dropped = int(share * _WHOLE)
    if not dropped:
        return x
    drawn = torch.empty(-(-x.numel() * _BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    bits = drawn.view(torch.int16)[: x.numel()].view(x.shape)
    kept = (bits >= dropped - _WHOLE // 2).to(x.dtype)
    scaled: Tensor = x * kept.mul_(_WHOLE / (_WHOLE - dropped))
    return scaled
