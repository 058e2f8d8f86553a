"""Lookups beside the best that plain PyTorch does for the same table, written by hand.

``python -m benchmarks.by_hand`` looks up the ids of the language model, the classifier and the recommender of
:mod:`benchmarks.workloads` in tables of the library and in modules written here, which hold the same numbers: first
without gradients, then forward and backward. Of each turn the fastest call counts, and of the turns the median.

Another format is another line of :data:`CASES`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tensorbed as tb
from benchmarks.composed import Call, in_turns
from benchmarks.workloads import WORKLOADS, Workload

NAMES = ("LM r16", "IMDB TT1", "CTR")
BOUND = 1.5  # times the module by hand
PRIME = 2**31 - 1


class _Held(nn.Module):
    """A module that holds the numbers of a layer of the library."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.structure = layer.structure
        for name, tensor in layer.params().items():
            own = tensor.detach().clone()
            if tensor.requires_grad:
                self.register_parameter(name, nn.Parameter(own))
            else:
                self.register_buffer(name, own)


class DenseByHand(_Held):
    table: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return F.embedding(ids, self.table)


class HashedByHand(_Held):
    table: Tensor
    constants: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        hashes, buckets = self.structure.hashes, self.structure.buckets
        if hashes == 1:
            a, _, c = self.constants[0]
            return F.embedding((ids * a + c) % PRIME % buckets, self.table)
        places, signs = (ids[:, None] * self.constants[:, 0] + self.constants[:, 2]).split(hashes, 1)
        weights = (1 - 2 * (signs % PRIME % 2)).to(self.table.dtype)
        return F.embedding_bag(places % PRIME % buckets, self.table, mode="sum", per_sample_weights=weights)


class QuotientRemainderByHand(_Held):
    quotient: Tensor
    remainder: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        buckets, combine = self.structure.buckets, self.structure.combine
        first, second = F.embedding(ids // buckets, self.quotient), F.embedding(ids % buckets, self.remainder)
        if combine == "concat":
            return torch.cat([first, second], 1)
        return first * second if combine == "multiply" else first + second


class DeepHashByHand(_Held):
    constants: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        hashes = (ids[:, None] * self.constants[:, 0] + self.constants[:, 2]) % PRIME % 10**6
        x, layers = hashes.float() * (2 / (10**6 - 1)) - 1, self.structure.layers
        for k in range(layers):
            x = F.mish(torch.addmm(getattr(self, f"bias_{k}"), x, getattr(self, f"layer_{k}")))
        product: Tensor = x @ getattr(self, f"layer_{layers}")
        return product


class CanonicalPolyadicByHand(_Held):
    """The slices of each id multiplied term by term, and with the last one by a batched product."""

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        factors = list(self.parameters())  # (I_k, J_k, R) each
        digits = torch.unravel_index(ids, [len(factor) for factor in factors])
        first, *others = [factor[digit] for factor, digit in zip(factors, digits, strict=True)]
        for other in others[:-1]:
            first = (first[:, :, None] * other[:, None]).flatten(1, 2)
        return torch.bmm(first, others[-1].transpose(1, 2)).flatten(1)


class NonlinearTrainByHand(_Held):
    """The slices of each id multiplied one after the other, an activation between."""

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        cores = list(self.parameters())  # (I_k, R, J_k, R') each
        digits = torch.unravel_index(ids, [len(core) for core in cores])
        left = cores[0][digits[0]].flatten(1, 2)
        for core, digit in zip(cores[1:], digits[1:], strict=True):
            left = torch.bmm(F.relu(left), core[digit].flatten(2)).reshape(len(ids), -1, core.shape[3])
        return left.flatten(1)


class LowRankByHand(_Held):
    u: Tensor
    v: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return F.linear(F.embedding(ids, self.u), self.v)


class TrainByHand(_Held):
    """The slices of each id multiplied one after the other."""

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return rows_of_train(list(self.parameters()), ids)


def rows_of_train(cores: list[Tensor], ids: Tensor) -> Tensor:  # (I_k, R, J_k, R') each, (n,) -> (n, cols)
    digits = torch.unravel_index(ids, [len(core) for core in cores])
    left = cores[0][digits[0]].flatten(1, 2)
    for core, digit in zip(cores[1:], digits[1:], strict=True):
        left = torch.bmm(left, core[digit].flatten(2)).reshape(len(ids), -1, core.shape[3])
    return left.flatten(1)


class BandsByHand(nn.Module):
    """The adaptive embedding: of each band the ids that it has, their rows, and these put where the ids stood."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.cols, self.ends = layer.structure.cols, layer.structure.ends
        self.bands = nn.ModuleList(map(part_by_hand, parts_of(layer)))

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        rows, begin = torch.empty(len(ids), self.cols), 0
        for band, end in zip(self.bands, self.ends, strict=True):
            at = ((ids >= begin) & (ids < end)).nonzero()[:, 0]
            rows = rows.index_copy_(0, at, band(ids.index_select(0, at) - begin))
            begin = end
        return rows


class PermutedByHand(nn.Module):
    places: Tensor

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.register_buffer("places", layer.places.clone())
        (self.part,) = map(part_by_hand, parts_of(layer))

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        rows: Tensor = self.part(self.places[ids])
        return rows


@dataclass(frozen=True)
class _Part:
    """One of the tables that a table of the library is made of, and its tensors."""

    structure: Any
    tensors: Mapping[str, Tensor]

    def params(self) -> Mapping[str, Tensor]:
        return self.tensors


def parts_of(layer: Any) -> list[_Part]:
    return [_Part(*pair) for pair in layer.structure.with_tensors(layer.params())]


def part_by_hand(part: _Part) -> nn.Module:
    return {"dense": DenseByHand, "low_rank": LowRankByHand, "tensor_train": TrainByHand}[part.structure.kind](part)


class Rounded(torch.autograd.Function):
    """Rows of 8 bits, the number that is furthest from zero the code -128; gradients pass."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
        low, high = rows.aminmax(dim=1, keepdim=True)
        width = torch.where(high >= -low, -high, -low) / 128
        return (rows / width).round_().clamp_(-128, 127).mul_(width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def rounded(rows: Tensor) -> Tensor:  # (n, cols) -> (n, cols)
    made: Tensor = Rounded.apply(rows)  # type: ignore[no-untyped-call]
    return made


class RoundedTableByHand(_Held):
    table: Tensor

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return rounded(F.embedding(ids, self.table))


class RoundedTrainByHand(_Held):
    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        cores = [rounded(core.flatten(1)).view_as(core) for core in self.parameters()]
        return rows_of_train(cores, ids)


class OfUnique(nn.Module):
    """Each id once."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        unique, inverse = torch.unique(ids, return_inverse=True)
        return F.embedding(inverse, self.rows(unique))


@dataclass(frozen=True)
class Case:
    """A format, its module by hand, and the rows below which a table of the recommender stays dense.

    Where a row takes work, the module that computes each row once stands beside the one that does not; the faster
    counts.
    """

    format: tb.structures.Format | Callable[[int], tb.structures.Format]  # or that of a table of so many rows
    by_hand: Callable[[Any], nn.Module]
    dense_below: int = 1000
    shares_rows: bool = False

    def format_of(self, rows: int) -> tb.structures.Format:
        return self.format if isinstance(self.format, tb.structures.Format) else self.format(rows)

    def modules(self, layer: Any) -> list[nn.Module]:
        """By hand, with the numbers of a layer."""
        if layer.structure.kind == "dense":
            return [DenseByHand(layer)] * (1 + self.shares_rows)
        plain = self.by_hand(layer)
        return [plain, OfUnique(plain)] if self.shares_rows else [plain]


def shuffled(format: tb.structures.Format, rows: int) -> tb.Permuted:
    return tb.Permuted(format, order=torch.randperm(rows))


CASES = {
    "hashed": Case(tb.Hashed(ratio=10), HashedByHand),
    "hashed, signed sums of 2": Case(tb.Hashed(ratio=10, hashes=2, signed=True), HashedByHand),
    "quotient multiply remainder": Case(tb.QuotientRemainder(ratio=10), QuotientRemainderByHand),
    "quotient add remainder": Case(tb.QuotientRemainder(ratio=10, combine="add"), QuotientRemainderByHand),
    "quotient concat remainder": Case(tb.QuotientRemainder(ratio=10, combine="concat"), QuotientRemainderByHand),
    "deep hash": Case(tb.DeepHash(hashes=256, hidden=256), DeepHashByHand, dense_below=100_000, shares_rows=True),
    "canonical polyadic": Case(tb.CanonicalPolyadic(rank=16), CanonicalPolyadicByHand, shares_rows=True),
    "non-linear train": Case(tb.NonlinearTrain(rank=16), NonlinearTrainByHand, shares_rows=True),
    "bands": Case(tb.Bands(), BandsByHand, shares_rows=True),
    "permuted low rank": Case(partial(shuffled, tb.LowRank(rank=4)), PermutedByHand, shares_rows=True),
    "permuted train": Case(partial(shuffled, tb.TensorTrain(rank=16)), PermutedByHand, shares_rows=True),
    "straight-through table": Case(tb.StraightThrough(), RoundedTableByHand, shares_rows=True),
    "straight-through train": Case(tb.StraightThrough(tb.TensorTrain(rank=16)), RoundedTrainByHand, shares_rows=True),
}


def layers_of(case: Case, workload: Workload) -> list[nn.Module]:
    """The layer of the library, then the modules by hand, of the same numbers; each takes the ids of the workload."""
    torch.manual_seed(0)
    if not workload.many:
        (table,) = workload.tables
        layer = tb.Embedding(table.rows, table.cols, case.format_of(table.rows))
        return [layer, *case.modules(layer)]
    bags = {}
    for k, table in enumerate(workload.tables):
        format = tb.Dense() if table.rows < case.dense_below else case.format_of(table.rows)
        bags[f"C{k}"] = tb.EmbeddingBag(table.rows, table.cols, format, mode="sum")
    fields = tb.EmbeddingBagCollection(bags)
    by_hand = zip(*(case.modules(table) for table in fields.tables.values()), strict=True)
    return [fields, *(_SideBySide(list(tables)) for tables in by_hand)]


class _SideBySide(nn.Module):
    def __init__(self, tables: list[nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(tables)

    def forward(self, ids: Tensor) -> Tensor:  # (B, F) -> (B, sum of cols)
        columns = ids.T.contiguous()
        return torch.cat([table(column) for table, column in zip(self.tables, columns, strict=True)], 1)


def calls(layer: nn.Module, workload: Workload) -> tuple[Call, Call]:
    """A lookup without gradients, and one with backward."""

    def values() -> Tensor:
        out = layer(workload.ids)
        rows: Tensor = out[0] if isinstance(out, tuple) else out  # of a collection, values and their split
        return rows

    def forward() -> Tensor:
        with torch.no_grad():
            return values()

    def both() -> None:
        layer.zero_grad()
        values().backward(workload.gradient)

    return forward, both


def lines(workload: Workload, rounds: int, names: list[str]) -> Iterator[tuple[str, ...]]:
    """For each case and pass milliseconds of the library, by hand, and their ratio."""
    for name in names:
        layers = layers_of(CASES[name], workload)
        passes = zip(*(calls(layer, workload) for layer in layers), strict=True)
        for which, (ours, *theirs) in zip(("forward", "and backward"), passes, strict=True):
            mine, *by_hand = in_turns([ours, *theirs], rounds)
            yield name, which, f"{mine:.3f}", f"{min(by_hand):.3f}", f"{mine / min(by_hand):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that is in use")
    parser.add_argument("--workload", action="append", choices=NAMES)
    parser.add_argument("--case", action="append", choices=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.workload or NAMES:
        title = f"{name}: milliseconds, {torch.get_num_threads()} threads; at most {BOUND} times by hand is asked for"
        shown = Table(title=title)
        for column in ("format", "pass", "tensorbed", "by hand", "ratio"):
            shown.add_column(column, justify="left" if column in ("format", "pass") else "right")
        for line in lines(WORKLOADS[name], arguments.rounds, arguments.case or list(CASES)):
            shown.add_row(*line)
        Console(width=100).print(shown)


if __name__ == "__main__":
    main()
