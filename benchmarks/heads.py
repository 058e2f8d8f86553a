"""The heads under comparison, and the hidden vectors and targets that they are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tensorbed as tb
from benchmarks.peers import CannotRunError, require_memory
from benchmarks.workloads import zipf
from tensorbed.structures import Format

PLAIN = "plain"
FUSED = "torch fused"
DENSE = "tb dense"
LOW_16, LOW_96 = "tb low rank 16", "tb low rank 96"
TT_16, TT_96 = "tb TT rank 16", "tb TT rank 96"

CHUNKS = (256, 512, 1024)  # vectors at a time, of which PyTorch's fused loss gets the fastest
_CHECKED = 64  # vectors whose gradients are compared with the plain loss's
_FLOAT = 4  # bytes


@dataclass(frozen=True)
class HeadWorkload:
    """Classes, the shape of the tensor trains over them, and a batch of hidden vectors with their targets."""

    classes: int = 267_735
    row_factors: tuple[int, ...] = (60, 60, 75)
    col_factors: tuple[int, ...] = (8, 8, 8)
    tokens: int = 2048
    k: int = 10
    seed: int = 0

    @property
    def dim(self) -> int:
        return prod(self.col_factors)

    @property
    def title(self) -> str:
        shape = f"{self.row_factors} x {self.col_factors}"
        return f"heads: {self.classes:,} classes, {shape}, {self.tokens:,} vectors, Zipf targets"

    @cached_property
    def hidden(self) -> Tensor:  # -> (tokens, dim)
        """Standard normal, as after a layer's norm; the same every time."""
        return torch.randn(self.tokens, self.dim, generator=torch.Generator().manual_seed(self.seed + 1))

    @cached_property
    def target(self) -> Tensor:  # -> (tokens,)
        """Drawn as words are, frequent classes first."""
        return zipf(self.classes, self.tokens, torch.Generator().manual_seed(self.seed))

    def record(self) -> dict[str, Any]:
        """The sizes, for a result file."""
        return {
            "name": "heads",
            "classes": self.classes,
            "shape": [self.row_factors, self.col_factors],
            "tokens": self.tokens,
            "k": self.k,
            "unique_targets": int(self.target.unique().numel()),
            "seed": self.seed,
        }


class Head(Protocol):
    """What is asked of each of them; ``tb.Head`` has it all."""

    @property
    def weight(self) -> Tensor: ...  # (classes, dim)

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def loss(self, h: Tensor, target: Tensor) -> Tensor: ...  # (n, dim), (n,) -> ()

    def topk(self, h: Tensor, k: int) -> Any: ...  # (dim,) -> (k,), (k,)


class Plain(nn.Module):
    """What everybody writes first: all logits, then the loss."""

    def __init__(self, table: tb.Head) -> None:
        super().__init__()
        (self.weight,) = table.parameters()

    def loss(self, h: Tensor, target: Tensor) -> Tensor:  # (n, dim), (n,) -> ()
        return F.cross_entropy(h @ self.weight.T, target)

    def topk(self, h: Tensor, k: int) -> Any:  # (dim,) -> (k,), (k,)
        return torch.topk(h @ self.weight.T, k)


class Fused(Plain):
    """PyTorch's loss that makes the logits of ``chunk`` vectors at a time."""

    def __init__(self, table: tb.Head, chunk: int = CHUNKS[0]) -> None:
        if not hasattr(F, "linear_cross_entropy"):
            raise CannotRunError(f"torch {torch.__version__} has no linear_cross_entropy")
        super().__init__(table)
        self.chunk = chunk

    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk)
        return F.linear_cross_entropy(h, self.weight, target, options=options)


def _itself(table: tb.Head) -> Head:
    return table


def _dense(workload: HeadWorkload) -> tb.Dense:
    return tb.Dense()


def _low_rank(rank: int) -> Callable[[HeadWorkload], tb.LowRank]:
    return lambda workload: tb.LowRank(rank=rank)


def _tensor_train(rank: int) -> Callable[[HeadWorkload], tb.TensorTrain]:
    return lambda workload: tb.TensorTrain(rank=rank, shape=(workload.row_factors, workload.col_factors))


@dataclass(frozen=True)
class HeadPeer:
    """A head by name.

    Attributes:
        format: of its table. Those of equal format share one table, and one optimiser of it: weight, gradient and
            moments of a dense one are 2.2 GB.
        around: what computes with the table; by default the library's own head.
        scores: how many scores of the workload it holds at once, at most.
        chooses: whether it has a top-k of its own.
    """

    name: str
    format: Callable[[HeadWorkload], Format]
    around: Callable[[tb.Head], Head] = _itself
    scores: Callable[[HeadWorkload], int] = lambda workload: workload.tokens * workload.classes // 5
    chooses: bool = True

    def table(self, workload: HeadWorkload) -> tb.Head:
        """A table as drawn at birth, or :class:`CannotRunError` where training it would not fit."""
        meta = tb.Head(workload.dim, workload.classes, self.format(workload), device="meta")
        # Weight, gradient and the two moments of Adam; scores, their logarithms and their gradients.
        numbers = 4 * sum(parameter.numel() for parameter in meta.parameters()) + 3 * self.scores(workload)
        require_memory(_FLOAT * numbers)
        torch.manual_seed(workload.seed)
        return tb.Head(workload.dim, workload.classes, self.format(workload))


HEADS = (
    HeadPeer(PLAIN, _dense, Plain, scores=lambda workload: workload.tokens * workload.classes),
    HeadPeer(FUSED, _dense, Fused, scores=lambda workload: CHUNKS[-1] * workload.classes, chooses=False),
    HeadPeer(DENSE, _dense),
    HeadPeer(LOW_16, _low_rank(16)),
    HeadPeer(LOW_96, _low_rank(96)),
    HeadPeer(TT_16, _tensor_train(16)),
    HeadPeer(TT_96, _tensor_train(96)),
)


def check(head: Head, workload: HeadWorkload, gradient: Tensor) -> None:
    """Compare the first vectors' gradients of the mean loss with the plain loss's on the same table.

    Such a gradient has all scores of its vector in it, and the rows of all classes; the loss itself hardly differs from
    ``log(classes)`` at birth, whatever is computed.
    """
    h = workload.hidden[:_CHECKED].clone().requires_grad_()
    weight = head.weight.detach()
    (F.cross_entropy(h @ weight.T, workload.target[:_CHECKED], reduction="sum") / workload.tokens).backward()
    assert h.grad is not None
    apart = float((gradient[:_CHECKED] - h.grad).abs().max() / h.grad.abs().max())
    if not apart <= 1e-3:
        raise CannotRunError(f"gives other gradients: {apart:.1e} of the largest number apart")
