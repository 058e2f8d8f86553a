"""Tables for the 39 fields of a click, by those who are compared: ids in, their rows side by side out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer, SparseAdam

import tensorbed as tb
from experiments.tasks.click_through.criteo import FEATURES

DIM, RANK, BUCKETS = 16, 16, 100_000
SMALL = 2_000  # tables of at most so many rows are full, whatever the format
RATE = 5e-4
FULL, HASHED, TRAIN, LONGER = "full", "hashed", "tensor train", "tensor train of 4 cores"
SPARSE, TORCHREC = "nn.EmbeddingBag sparse", "TorchRec fused"

Sizes = Mapping[str, int]  # rows by field


@dataclass(frozen=True)
class Contestant:
    """Tables and who trains them.

    Attributes:
        build: makes a module that takes a batch of ids to rows side by side, ``(batch, fields * DIM)``.
        optimiser: of its parameters; ``None`` where the backward pass updates them.
        given: a batch of ids ``(batch, fields)`` in the form that the module takes, made before anything is timed.
        needs: bytes of its tables and what trains them, as far as they grow with the rows.
    """

    build: Callable[[Sizes], nn.Module]
    optimiser: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    given: Callable[[Tensor], Any]
    needs: Callable[[Sizes], int]


class Own(nn.Module):
    """The library's own collection."""

    def __init__(self, sizes: Sizes, table: Callable[[int], tb.EmbeddingBag]) -> None:
        super().__init__()
        self.collection = tb.EmbeddingBagCollection({name: table(rows) for name, rows in sizes.items()})

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.collection(ids).values
        return values


class Sparse(nn.Module):
    """PyTorch's own bags, one after the other."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True, _weight=filled(rows)) for rows in sizes.values()
        )

    def forward(self, columns: tuple[Tensor, ...]) -> Tensor:  # (batch, 1) each
        return torch.cat([bag(column) for bag, column in zip(self.bags, columns, strict=True)], dim=1)


class TorchRec(nn.Module):
    """Its collection whose optimiser is fused into the backward pass.

    Its kernels for CPUs know no Adam: this is Adagrad with one number a row, for which they have to do less.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        from torchrec.optim import RowWiseAdagrad

        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=rows, feature_names=[name])
            for name, rows in sizes.items()
        ]
        self.fused = FusedEmbeddingBagCollection(configs, RowWiseAdagrad, {"lr": RATE})

    def forward(self, jagged: Any) -> Tensor:
        values: Tensor = self.fused(jagged).values()
        return values


def jagged(ids: Tensor) -> Any:
    """TorchRec's form of a batch: the ids of all fields one after another, one a bag."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    made = KeyedJaggedTensor(list(FEATURES), ids.T.flatten(), lengths=torch.ones(ids.numel(), dtype=torch.int64))
    made.offsets()  # which it keeps
    return made


def filled(rows: int) -> Tensor:
    """Any numbers: drawing gigabytes takes longer than the steps that are timed."""
    return torch.full((rows, DIM), 0.01)


def dense(rows: int) -> tb.EmbeddingBag:
    return tb.EmbeddingBag.from_pretrained(filled(rows), tb.Dense(), freeze=False, mode="sum")


def hashed(rows: int) -> tb.EmbeddingBag:
    return tb.EmbeddingBag(rows, DIM, tb.Hashed(buckets=BUCKETS), mode="sum") if rows > BUCKETS else dense(rows)


def train(order: int) -> Callable[[int], tb.EmbeddingBag]:
    """Tensor trains of so many cores: the paper has three and four."""
    format = tb.TensorTrain(rank=RANK, order=order)
    return lambda rows: tb.EmbeddingBag(rows, DIM, format, mode="sum") if rows > SMALL else dense(rows)


def adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(parameters, lr=RATE, fused=True)


def sparse_adam(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SparseAdam(list(parameters), lr=RATE)


def of_all_rows(numbers: int) -> Callable[[Sizes], int]:
    """Bytes where so many numbers are kept for each row of the full tables."""
    return lambda sizes: 4 * numbers * sum(sizes.values())


def of_few(sizes: Sizes) -> int:
    return of_all_rows(4 * DIM)({name: min(rows, BUCKETS) for name, rows in sizes.items()})


CONTESTANTS = {
    # Weight, gradient and the two moments of Adam.
    FULL: Contestant(lambda sizes: Own(sizes, dense), adam, lambda ids: ids, of_all_rows(4 * DIM)),
    HASHED: Contestant(lambda sizes: Own(sizes, hashed), adam, lambda ids: ids, of_few),
    TRAIN: Contestant(lambda sizes: Own(sizes, train(3)), adam, lambda ids: ids, of_few),
    LONGER: Contestant(lambda sizes: Own(sizes, train(4)), adam, lambda ids: ids, of_few),
    SPARSE: Contestant(
        Sparse, sparse_adam, lambda ids: tuple(ids.T.contiguous().unsqueeze(2).unbind(0)), of_all_rows(3 * DIM)
    ),
    TORCHREC: Contestant(TorchRec, None, jagged, of_all_rows(DIM + 1)),
}
