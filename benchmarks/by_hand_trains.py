"""Lookups of sums of Kronecker products and of non-linear trains beside plain PyTorch written by hand.

``python -m benchmarks.by_hand_trains`` times both at the LM, IMDB and CTR workloads, forward and with backward, in
turns: the library's layer, a gather and batched products for every id, and the same for the unique ids.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table as Shown
from torch import Tensor, nn

import tensorbed as tb
from benchmarks.peers import _Loop
from benchmarks.timing import Contestant, Timed, compare
from benchmarks.workloads import WORKLOADS, Table, Workload

NAMES = ("LM r16", "LM r16 shuffled", "LM r96", "IMDB TT1", "IMDB TT1 shuffled", "IMDB TT3", "CTR", "CTR shuffled")


class CanonicalPolyadicByHand(nn.Module):
    """The slices of each id multiplied term by term, and with the last one by a batched product."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.factors = nn.ParameterList([p.detach().clone() for p in layer.params().values()])  # (I_k, J_k, R) each

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        digits = torch.unravel_index(ids, [len(factor) for factor in self.factors])
        first, *others = [factor[digit] for factor, digit in zip(self.factors, digits, strict=True)]
        for other in others[:-1]:
            first = (first[:, :, None] * other[:, None]).flatten(1, 2)
        return torch.bmm(first, others[-1].transpose(1, 2)).flatten(1)


class NonlinearTrainByHand(nn.Module):
    """The slices of each id multiplied one after the other, an activation between."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.cores = nn.ParameterList([p.detach().clone() for p in layer.params().values()])  # (I_k, R, J_k, R') each

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        digits = torch.unravel_index(ids, [len(core) for core in self.cores])
        left: Tensor = self.cores[0][digits[0]].flatten(1, 2)
        for core, digit in zip(list(self.cores)[1:], digits[1:], strict=True):
            left = torch.bmm(F.relu(left), core[digit].flatten(2)).reshape(len(ids), -1, core.shape[3])
        return left.flatten(1)


class OfUnique(nn.Module):
    """The same for each id once."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, ids: Tensor) -> Tensor:  # (n,) -> (n, cols)
        unique, inverse = torch.unique(ids, return_inverse=True)
        return F.embedding(inverse, self.rows(unique))


CASES: dict[str, tuple[Callable[..., Any], type[nn.Module]]] = {
    "canonical_polyadic": (tb.CanonicalPolyadic, CanonicalPolyadicByHand),
    "nonlinear_train": (tb.NonlinearTrain, NonlinearTrainByHand),
}


def contestants(kind: str, workload: Workload) -> dict[str, Contestant]:
    """The library's layer, and two by hand with its numbers."""
    format, by_hand = CASES[kind]

    def layer(table: Table) -> tb.Embedding:
        torch.manual_seed(0)
        return tb.Embedding(table.rows, table.cols, format(rank=table.rank, shape=table.shape))

    own = [layer(table) for table in workload.tables]
    sides: dict[str, list[nn.Module]] = {
        "tensorbed": list(own),
        "by hand": [by_hand(one) for one in own],
        "by hand, unique": [OfUnique(by_hand(one)) for one in own],
    }
    whole = {name: _Loop(layers) if workload.many else layers[0] for name, layers in sides.items()}
    with torch.no_grad():
        made = [joined(workload.ids) for joined in whole.values()]
    for other in made[1:]:
        torch.testing.assert_close(made[0], other, rtol=1e-3, atol=1e-4)
    found = {}
    for name, joined in whole.items():
        entered = Contestant(joined, torch.optim.Adam(joined.parameters()), workload.ids, workload.gradient)
        entered.warm_up(1.0)
        found[name] = entered
    return found


def shown(kind: str, workload: Workload, timed: dict[str, Timed]) -> tuple[str, ...]:
    """A line: the layer's times, the better one's of those by hand, and how many times as long the layer took."""
    cells = []
    for of in ("forward", "both"):
        own, *hand = [getattr(one, of).median for one in timed.values()]
        cells += [f"{own:.2f}", f"{min(hand):.2f}", f"{own / min(hand):.2f}"]
    return kind, workload.name, *cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", action="append", choices=list(CASES))
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    table = Shown(title=f"milliseconds, {torch.get_num_threads()} threads")
    columns = ("format", "workload", "forward", "by hand", "ratio", "with backward", "by hand", "ratio")
    for column in columns:
        table.add_column(column)
    for kind in asked.kind or CASES:
        for name in asked.workload or NAMES:
            workload = WORKLOADS[name]
            table.add_row(*shown(kind, workload, compare(contestants(kind, workload), range(asked.rounds), 2.0)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
