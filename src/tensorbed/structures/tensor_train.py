"""The tensor train (TT-matrix) of the paper's Section 4."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tensorbed.decompose.train import tt_svd
from tensorbed.structures.chain import ChainFormat, ChainMatrix
from tensorbed.structures.registry import register


@register("tensor_train")
@dataclass(frozen=True)
class TensorTrainMatrix(ChainMatrix):
    r"""``R_0 = R_N = 1``: a row is a vector, ``N - 2`` matrices and a vector multiplied (eq. 2).

    Almost every such table has full matrix rank ``min(I, J)`` where no row factor is smaller than its column factor, or
    none is larger (Theorem 1, which leaves that condition out; ``repr`` says where it is not met).
    """

    closed = False


@dataclass(frozen=True, kw_only=True, repr=False)
class TensorTrain(ChainFormat):
    """``tb.TensorTrain(rank=16)``, ``(ratio=50)``, ``(ranks=[8, 16])`` or, for fitting, ``(rel_error=0.1)``.

    ``ranks`` are the inner ones, ``(R_1, ..., R_{N-1})``.
    """

    structure = TensorTrainMatrix
    spelling = ("tt", "tensor train, which wants training after")

    @classmethod
    def candidates(cls, ratio: float) -> list[TensorTrain]:
        return [cls(ratio=each) for each in (4, 16, 64)]

    @classmethod
    def candidates_to_train(cls, ratio: float) -> list[TensorTrain]:
        """Of the ratio asked for, and smaller ones where some tables cannot be that small."""
        return [cls(ratio=each) for each in sorted({*(2**k for k in range(1, 13)), max(1.0, ratio)})]

    def decompose(
        self, tensor: Tensor, ranks: tuple[int, ...] | None, bound: float | None, start: list[Tensor] | None
    ) -> list[Tensor]:
        return tt_svd(tensor, ranks[1:-1] if ranks else None, bound)
