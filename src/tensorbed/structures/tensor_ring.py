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
    """A closed chain of small tensors, the cores, whose first and last one meet: a tensor train with its ends joined.

    Give one of ``rank``, ``ranks``, ``ratio`` or, for fitting alone, ``rel_error``.

    Args:
        rank: one rank for every bond; 16 when nothing is said.
        ranks: one for each bond, ``(R_0, ..., R_{N-1})``; the last bond is the first, ``R_N = R_0``.
        ratio: the largest uniform rank at which the dense table takes at least this many times the stored bytes.
        rel_error: the ranks that keep ``||W - fit||_F <= rel_error * ||W||_F`` for the table ``W``.
        order: how many cores there are.
        shape: the factors of rows and columns, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.

    Example::

        >>> tb.Embedding(25_000, 256, tb.TensorRing(rank=8)).cores[0].shape  # (R_0, I_1, J_1, R_1)
        torch.Size([8, 35, 8, 8])
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
