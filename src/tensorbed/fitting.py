"""Fitting any format to a trained table: what is the same for all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorbed.checks import require_float_dtype
from tensorbed.decompose.powers import far_exponent, largest, shifted
from tensorbed.progress import track
from tensorbed.structures import Format, Params, Structure, Use
from tensorbed.structures.formats import Budget, Fit, OutOfRangeError, fitted
from tensorbed.workers import one_thread_if_crowded

_BLOCK = 2**18  # numbers of the table compared at once
_MOST_SEEN = 2.0**63  # times that a row can have been looked up
_ROOM = 16  # times the smallest number of all digits: where a table reaches no further, rounding may cost more than it
_WORSE = 1.01  # than the fit before it was rounded; more is refused


@dataclass(frozen=True)
class Fitted(Fit):
    """A structure, its tensors in the wanted dtype, and how far their table is from the given one."""

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
        use = None if use is None else _checked(use, table)
        fit = fitted(format, table, budget, use)
        small = largest(table) < _ROOM * torch.finfo(dtype).tiny
        possible = _possible_error(table, format, budget, use, fit) if small else math.inf
        structure, found = fit.structure, dict(fit.params)
        del fit
        # One after the other: each is let go once it is rounded.
        params = {spec.name: _owned(found.pop(spec.name), spec.dtype or dtype, table) for spec in structure.tensors()}
        for name, tensor in params.items():
            require_finite(tensor, f"{name} of the fit", table)
        error = relative_error(table, structure, params)
        if not math.isfinite(error):
            raise _too_large("a row of the fit", dtype, table)
        if error > _WORSE * possible + torch.finfo(dtype).eps:
            problem = f"rows of the fit lose digits in {dtype}, whose numbers have all of them from"
            worse = f", and the relative error would be {error:.2g} where {possible:.2g} is possible"
            raise _out_of_range(f"{problem} {torch.finfo(dtype).tiny:.3g} on", dtype, table, worse, "multiply")
        return Fitted(structure, params, error)


def _possible_error(table: Tensor, format: Format, budget: Budget, use: Use | None, fit: Fit) -> float:
    """That of a fit before it is rounded; in float64, where nothing is wider, that of a table near size 1."""
    if budget.dtype == torch.float64:
        table = shifted(table.double(), -far_exponent(table))
        fit = fitted(format, table, budget, use)
    return relative_error(
        table, fit.structure, {n: t.double() if t.is_floating_point() else t for n, t in fit.params.items()}
    )


def require_finite(rounded: Tensor, what: str, table: Tensor) -> None:
    """What a dtype holds of a finite table, or an error with the dtype's limit."""
    if not all(bool(torch.isfinite(part).all()) for part in rounded.reshape(-1).split(_BLOCK)):
        raise _too_large(what, rounded.dtype, table)


def _too_large(what: str, dtype: torch.dtype, table: Tensor) -> OutOfRangeError:
    problem = f"{what} does not fit into {dtype}, whose numbers end at {torch.finfo(dtype).max:.3g}"
    return _out_of_range(problem, dtype, table, "", "divide")


def _out_of_range(problem: str, dtype: torch.dtype, table: Tensor, worse: str, verb: str) -> OutOfRangeError:
    wider = "no dtype is wider:" if dtype == torch.float64 else "give a wider dtype=, or"
    return OutOfRangeError(f"{problem}: the table's go up to {largest(table):.3g}{worse}; {wider} {verb} the table.")


def _owned(tensor: Tensor, dtype: torch.dtype, table: Tensor) -> Tensor:
    """In a dtype, contiguous, and not the table's own memory."""
    made = tensor.detach().to(dtype).contiguous()
    shared = made.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    # A view of something larger would keep all of that.
    return made.clone() if shared or made.untyped_storage().nbytes() > made.nbytes else made


def _checked(use: Use, table: Tensor) -> Use:
    """Of this table's size, possible and on its device."""
    if not isinstance(use, Use):
        raise TypeError(f"use must be a tb.structures.Use(counts=..., moment=...), got {type(use).__name__}.")
    rows, cols = table.shape
    for name, given, size in (("counts", use.counts, (rows,)), ("moment", use.moment, (cols, cols))):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(given).__name__}; use torch.as_tensor(...).")
        if given is not None and (tuple(given.shape) != size or not bool(torch.isfinite(given).all())):
            raise ValueError(
                f"{name} of a table of {rows} x {cols} must be finite, of shape {size}, got {given.shape}."
            )
    if use.counts is not None and not (float(use.counts.amin()) >= 0 and float(use.counts.amax()) <= _MOST_SEEN):
        least, most = (float(end) for end in use.counts.aminmax())
        raise ValueError(f"counts go from {least:g} to {most:g}: rows are looked up 0 to 2**63 times.")
    return Use(*(None if t is None else t.detach().to(table.device) for t in (use.counts, use.moment)))


def check_table(table: Tensor) -> Tensor:
    """A finite, non-empty matrix of floating-point numbers, or an error that shows what is wrong and where."""
    if not isinstance(table, Tensor):
        raise TypeError(f"the table must be a tensor, got {type(table).__name__}; use torch.as_tensor(...).")
    if table.is_meta:
        told = "load them first, or have compress_ draw new ones with fit=False"
        raise TypeError(f"the table is on the meta device and has no values to fit; {told}.")
    if table.layout != torch.strided:
        raise TypeError(f"the table must be an ordinary tensor, got one of layout {table.layout}; use .to_dense().")
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
    exponent = far_exponent(table)
    height = max(1, _BLOCK // table.shape[1])
    distances, norms = [], []
    for start in track(range(0, table.shape[0], height), "measuring the fit"):
        block = shifted(table[start : start + height].double(), -exponent)
        index = torch.arange(start, start + block.shape[0], device=table.device)
        made = shifted(structure.lookup(params, index, "auto").double(), -exponent)
        distances.append(float(torch.linalg.vector_norm(block - made)))
        norms.append(float(torch.linalg.vector_norm(block)))
    return math.hypot(*distances) / (math.hypot(*norms) or 1.0)
