"""The tensor ring of the paper's Appendix C."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tensorbed.decompose.ring import improve, tr_svd
from tensorbed.structures.chain import ChainFormat, ChainMatrix
from tensorbed.structures.registry import register


@register("tensor_ring")
@dataclass(frozen=True)
class TensorRingMatrix(ChainMatrix):
    """``R_0 = R_N > 1``: the chain is closed by a trace."""

    closed = True
    fits_exactly = False  # alternating least squares may stop at a local optimum


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorRing(ChainFormat):
    """``tb.TensorRing(rank=8)``, ``(ratio=50)``, ``(ranks=[4, 8, 8])`` or, for fitting, ``(rel_error=0.1)``.

    ``ranks`` are ``(R_0, ..., R_{N-1})``; ``R_N = R_0``.
    """

    structure = TensorRingMatrix
    spelling = ("tr", "tensor ring, which wants training after")

    def decompose(
        self, tensor: Tensor, ranks: tuple[int, ...] | None, bound: float | None, start: list[Tensor] | None
    ) -> list[Tensor]:
        if start is not None:
            return improve(tensor, start, sweeps=2)
        # Sweeps lower the error at given ranks; a bound is kept by the cuts, and sweeps would not lower the ranks.
        found = tr_svd(tensor, ranks[:-1] if ranks else None, bound)
        return improve(tensor, found) if ranks else found
