"""Rounding where an error made in one column is made good in the columns after it."""

from __future__ import annotations

import torch
from torch import Tensor

# What an error counts by itself, beside what the vectors make of it, whose mean square in a column is 1: rows are also
# looked up, and the vectors of tomorrow are not quite those that were seen.
_ITSELF = 1.0


def metric(moment: Tensor) -> Tensor:  # (cols, cols) -> (cols, cols) float64, positive definite
    """The squared size of an error as a quadratic form: as vectors of this second moment see it, and by itself."""
    moment = moment.double()
    size = moment.diagonal().mean()
    seen = moment / size if float(size) > 0 else torch.zeros_like(moment)
    return (seen + seen.T) / 2 + _ITSELF * torch.eye(moment.shape[0], dtype=moment.dtype, device=moment.device)


def feedback(moment: Tensor) -> Tensor:  # (cols, cols) -> (cols, cols) float64, upper triangular
    r"""``F`` for rounding columns in turn under :func:`metric` ``M``, where :math:`M^{-1} = F^T F`.

    With columns ``a`` rounded, those after them at their best go on from ``w - e F[:a]``, where
    ``e = (w[a] - rounded) F[a, a]^{-1}`` (optimal brain surgery; Frantar et al. 2023, GPTQ). The error that remains is
    the sum of the squares of all ``e``.
    """
    factor: Tensor = torch.linalg.cholesky(torch.linalg.inv(metric(moment)), upper=True)
    return factor
