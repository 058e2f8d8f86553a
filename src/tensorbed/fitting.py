"""Fitting any format to a trained table: what is the same for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorbed.checks import require_float_dtype
from tensorbed.decompose.train import frobenius
from tensorbed.progress import track
from tensorbed.structures import Format, Params, Structure, Use
from tensorbed.structures.formats import Budget
from tensorbed.workers import one_thread_if_crowded

_BLOCK = 2**18  # numbers of the table compared at once


@dataclass(frozen=True)
class Fitted:
    """A structure, its tensors in the wanted dtype, and how far their table is from the given one."""

    structure: Structure
    params: Params
    error: float  # ||W - fit||_F / ||W||_F, measured


def fit_table(
    table: Tensor, format: Format, *, dtype: torch.dtype | None = None, reserved: int = 0, use: Use | None = None
) -> Fitted:
    """Fit ``format`` to a table that :func:`check_table` let pass.

    ``reserved`` bytes are stored besides and count against a ratio; errors are weighed by ``use`` where it is known.
    """
    dtype = dtype or table.dtype
    budget = Budget(table.shape[0], table.shape[1], dtype, reserved)
    with torch.no_grad(), one_thread_if_crowded(table.numel()):
        structure, found = _found(table, format, budget, use)
        # One after the other: each is let go once it is rounded.
        params = {spec.name: _owned(found.pop(spec.name), spec.dtype or dtype, table) for spec in structure.tensors()}
        for name, tensor in params.items():
            if not all(bool(torch.isfinite(part).all()) for part in tensor.reshape(-1).split(_BLOCK)):
                raise ValueError(f"{name} of the fit does not fit into {dtype}; give a wider dtype=.")
        error = relative_error(table, structure, params)
        if not math.isfinite(error):
            raise ValueError(f"rows of the fit do not fit into {dtype}; give a wider dtype=.")
        return Fitted(structure, params, error)


def _found(table: Tensor, format: Format, budget: Budget, use: Use | None) -> tuple[Structure, dict[str, Tensor]]:
    fit = format.fit(table, budget) if use is None else format.fit_to_use(table, budget, _checked(use, table))
    return fit.structure, dict(fit.params)


def _owned(tensor: Tensor, dtype: torch.dtype, table: Tensor) -> Tensor:
    """In a dtype, contiguous, and not the table's own memory."""
    made = tensor.detach().to(dtype).contiguous()
    shared = made.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    # A view of something larger would keep all of that.
    return made.clone() if shared or made.untyped_storage().nbytes() > made.nbytes else made


def _checked(use: Use, table: Tensor) -> Use:
    """Of this table's size, finite and on its device."""
    rows, cols = table.shape
    for name, given, size in (("counts", use.counts, (rows,)), ("moment", use.moment, (cols, cols))):
        if given is not None and (tuple(given.shape) != size or not bool(torch.isfinite(given).all())):
            raise ValueError(
                f"{name} of a table of {rows} x {cols} must be finite, of shape {size}, got {given.shape}."
            )
    return Use(*(None if t is None else t.detach().to(table.device) for t in (use.counts, use.moment)))


def check_table(table: Tensor) -> Tensor:
    """A finite, non-empty matrix of floating-point numbers, or an error that shows what is wrong and where."""
    if not isinstance(table, Tensor):
        raise TypeError(f"the table must be a tensor, got {type(table).__name__}; use torch.as_tensor(...).")
    if table.layout != torch.strided or table.is_meta:
        kind = "the meta device" if table.is_meta else f"layout {table.layout}"
        raise TypeError(f"the table must be an ordinary tensor with values, got one of {kind}; use .to_dense() first.")
    if table.dim() != 2 or table.numel() == 0:
        raise ValueError(f"the table must be a non-empty matrix (rows, cols), got shape {tuple(table.shape)}.")
    require_float_dtype(table.dtype)
    table = table.detach()
    for start in range(0, table.shape[0], max(1, _BLOCK // table.shape[1])):
        bad = ~torch.isfinite(table[start : start + max(1, _BLOCK // table.shape[1])])
        if bool(bad.any()):
            row, col = (int(v) for v in bad.nonzero()[0])
            raise ValueError(
                f"the table holds {float(table[start + row, col])} at row {start + row}, column {col}; "
                "a fit needs finite numbers: replace them first, for instance with torch.nan_to_num."
            )
    return table


def relative_error(table: Tensor, structure: Structure, params: Params) -> float:
    """``||W - fit||_F / ||W||_F`` in float64, a block of rows at a time."""
    norm = frobenius(table)
    height = max(1, _BLOCK // table.shape[1])
    squares = 0.0
    for start in track(range(0, table.shape[0], height), "measuring the fit"):
        block = table[start : start + height].double()
        index = torch.arange(start, start + block.shape[0], device=table.device)
        squares += float((block - structure.lookup(params, index, "auto").double()).square().sum())
    return math.sqrt(squares) / (norm or 1.0)
