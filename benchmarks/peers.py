"""The implementations under comparison, all holding the same table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

import tensorbed as tb
from benchmarks.workloads import AUTO, DENSE, GATHER, TENSORLY, Workload


class CannotRunError(Exception):
    """Why an implementation has no times; shown in its place."""


@dataclass(frozen=True)
class Peer:
    """An implementation by name; ``build`` makes its layer, or raises :class:`CannotRunError`."""

    name: str
    build: Callable[[Workload, tb.TTEmbedding], nn.Module]


def make_table(workload: Workload) -> tb.TTEmbedding:
    """The tensor train that every implementation holds."""
    torch.manual_seed(workload.seed)
    return _empty_layer(workload, "auto")


def build(peer: Peer, workload: Workload, table: tb.TTEmbedding) -> nn.Module:
    """The peer's layer with the values of ``table``, checked on a batch, or :class:`CannotRunError`."""
    try:
        layer = peer.build(workload, table)
        ids = workload.ids()
        with torch.no_grad():
            found, expected = layer(ids), _rows(table, ids)
    except ImportError as error:
        raise CannotRunError(f"not installed ({error.name})") from error
    except (RuntimeError, ValueError, MemoryError) as error:
        raise CannotRunError(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
    if found.shape != expected.shape:
        raise CannotRunError(f"gives {tuple(found.shape)}, not {tuple(expected.shape)}")
    apart = float((found.double() - expected).abs().max() / expected.abs().max())
    if apart > 1e-4:
        raise CannotRunError(f"gives other rows: {apart:.1e} of the largest number apart")
    return layer


def _rows(table: tb.TTEmbedding, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
    """The rows in double precision, by the definition of a tensor train and nothing of the library's own."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    digits = torch.unravel_index(unique, [core.shape[1] for core in table.cores])
    left = torch.ones(unique.shape[0], 1, 1, dtype=torch.float64)
    for core, digit in zip(table.cores, digits, strict=True):
        left = torch.einsum("nmr,rnjs->nmjs", left, core.double()[:, digit]).flatten(1, 2)
    return left.flatten(1)[inverse]


def _empty_layer(workload: Workload, impl: str) -> tb.TTEmbedding:
    shape = (workload.row_factors, workload.col_factors)
    return tb.TTEmbedding(workload.rows, workload.cols, workload.rank, shape=shape, impl=impl)


def _tensorbed(impl: str) -> Callable[[Workload, tb.TTEmbedding], nn.Module]:
    def make(workload: Workload, table: tb.TTEmbedding) -> nn.Module:
        if impl == "whole_table" and workload.rows > workload.tokens:
            raise CannotRunError("not for a table with more rows than the batch has tokens")
        layer = _empty_layer(workload, impl)
        layer.load_state_dict(table.state_dict())
        return layer

    return make


def _tensorly(workload: Workload, table: tb.TTEmbedding) -> nn.Module:
    import tltorch

    # It knows no padded rows: the product of the factors is its number of rows, of which only the real ones are asked.
    layer: nn.Module = tltorch.FactorizedEmbedding(
        prod(workload.row_factors),
        workload.cols,
        auto_tensorize=False,
        tensorized_num_embeddings=workload.row_factors,
        tensorized_embedding_dim=workload.col_factors,
        factorization="blocktt",
        rank=(1, *[workload.rank] * (len(workload.row_factors) - 1), 1),
    )
    with torch.no_grad():
        for factor, core in zip(layer.parameters(), table.cores, strict=True):
            factor.copy_(core)
    return layer


def _dense(workload: Workload, table: tb.TTEmbedding) -> nn.Module:
    return nn.Embedding(workload.rows, workload.cols, _weight=table.weight.detach())


PEERS = (
    Peer(AUTO, _tensorbed("auto")),
    Peer("tensorbed grouped", _tensorbed("grouped")),
    Peer("tensorbed per_row", _tensorbed("per_row")),
    Peer("tensorbed tiled", _tensorbed("tiled")),
    Peer("tensorbed whole_table", _tensorbed("whole_table")),
    Peer(GATHER, _tensorbed("reference")),
    Peer(TENSORLY, _tensorly),
    Peer(DENSE, _dense),
)
