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
    """A chain of small tensors, the cores: each number of the table is a product of small matrices, one of each core.

    Give one of ``rank``, ``ranks``, ``ratio`` or, for fitting alone, ``rel_error``.

    Args:
        rank: one rank for every bond; 16 when nothing is said.
        ranks: one for each bond between two cores, ``(R_1, ..., R_{N-1})``.
        ratio: the largest uniform rank at which the dense table takes at least this many times the stored bytes.
        rel_error: the ranks that keep ``||W - fit||_F <= rel_error * ||W||_F`` for the table ``W``.
        order: how many cores there are.
        shape: the factors of rows and columns, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.TensorTrain(rank=16))
        >>> layer
        Embedding(25000, 256, tensor_train, shape=(35, 19, 38) x (8, 4, 8), ranks=(16, 16),
                  parameters=28,800, ratio=222.2)
        >>> [tuple(core.shape) for core in layer.cores]  # (R_{k-1}, I_k, J_k, R_k)
        [(1, 35, 8, 16), (16, 19, 4, 16), (16, 38, 8, 1)]
        >>> round(tb.Embedding(25_000, 256, tb.TensorTrain(ratio=50)).compression_ratio, 1)
        50.9
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
