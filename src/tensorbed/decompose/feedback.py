"""Rounding where an error made in one column is made good in the columns after it."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.decompose.powers import far_exponent, shifted

# What an error counts by itself, beside what the vectors make of it, whose mean square in a column is 1: rows are also
# looked up, and the vectors of tomorrow are not quite those that were seen.
_ITSELF = 1.0
_NO_MOMENT = "moment is no mean of h h^T over vectors h: it has negative eigenvalues; record it anew."


def metric(moment: Tensor) -> Tensor:  # (cols, cols) -> (cols, cols) float64, positive definite
    """The squared size of an error as a quadratic form: as vectors of this second moment see it, and by itself."""
    moment = moment.double()
    moment = shifted(moment, -far_exponent(moment))
    size = moment.diagonal().mean()
    if float(size) < 0:
        raise ValueError(_NO_MOMENT)
    seen = moment / size if float(size) > 0 else torch.zeros_like(moment)
    return (seen + seen.T) / 2 + _ITSELF * torch.eye(moment.shape[0], dtype=moment.dtype, device=moment.device)


def feedback(moment: Tensor) -> Tensor:  # (cols, cols) -> (cols, cols) float64, upper triangular
    r"""``F`` for rounding columns in turn under :func:`metric` ``M``, where :math:`M^{-1} = F^T F`.

    With columns ``a`` rounded, those after them at their best go on from ``w - e F[:a]``, where
    ``e = (w[a] - rounded) F[a, a]^{-1}`` (optimal brain surgery; Frantar et al. 2023, GPTQ). The error that remains is
    the sum of the squares of all ``e``.
    """
    inverse, singular = torch.linalg.inv_ex(metric(moment))
    return _root(inverse, upper=True, failed=bool(singular))


def root_of_metric(moment: Tensor) -> Tensor:  # (cols, cols) -> (cols, cols) float64, lower triangular
    """``L`` where :func:`metric` is :math:`L L^T`."""
    return _root(metric(moment))


def _root(matrix: Tensor, upper: bool = False, failed: bool = False) -> Tensor:
    factor: Tensor
    factor, indefinite = torch.linalg.cholesky_ex(matrix, upper=upper)
    if failed or bool(indefinite):
        raise ValueError(_NO_MOMENT)
    return factor
