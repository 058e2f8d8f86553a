"""What scores and losses ask before they call a kernel: whether the kernels take their tensors, and where they are."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from tensorbed.backends import triton
from tensorbed.backends.pooling import pool_rows, with_padding
from tensorbed.dispatch import BACKENDS, Asked, World

NAME = "triton"


def asked_for(impl: str) -> bool:
    """Whether these kernels are meant: by their name, or by ``"auto"`` once they were measured on real hardware."""
    return impl == NAME or (impl == "auto" and triton.measured)


def serves(impl: str, tensor: Tensor) -> bool:
    """Whether the kernels compute with this tensor where ``impl`` was asked for."""
    if not asked_for(impl) or tensor.dtype not in triton.TYPES or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    return not triton.absent(tensor.device)


def require(tensor: Tensor) -> None:
    """``ValueError`` that says why there are no kernels where this tensor is, if there are none.

    Double precision is no reason: PyTorch computes it.
    """
    if why := triton.absent(tensor.device):
        raise ValueError(f'impl="{NAME}": {why}; or use impl="auto".')


def rows_of_codes(asked: Asked, world: World) -> Tensor:  # -> (n or bags, cols)
    """Rows by the kernels, bags of them by PyTorch."""
    if asked.made_of.floats.dtype not in triton.TYPES:
        return BACKENDS["reference"].compute([asked], world)
    rows = codes().rows(asked.made_of, asked.ids)
    return with_padding(rows, asked) if asked.bounds is None else pool_rows(rows, asked, asked.ids, world)


def softmax() -> ModuleType:
    """:mod:`tensorbed.backends.triton.softmax`, which imports Triton."""
    from tensorbed.backends.triton import softmax

    return softmax


def products() -> ModuleType:
    """:mod:`tensorbed.backends.triton.products`, which imports Triton."""
    from tensorbed.backends.triton import products

    return products


def codes() -> ModuleType:
    """:mod:`tensorbed.backends.triton.codes`, which imports Triton."""
    from tensorbed.backends.triton import codes

    return codes
