"""What is timed in either build: the benchmark's lookups, bags and heads, by public names that old commits have too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from torch import nn
from torch.optim import Adam

import tensorbed as tb
from benchmarks.against.refusal import RefusalError
from benchmarks.heads import DENSE, HEADS, LOW_16, TT_16, TT_96, HeadPeer, HeadWorkload
from benchmarks.measure_heads import Entrant
from benchmarks.peers import Collected
from benchmarks.timing import Contestant, Times, compare
from benchmarks.workloads import SHUFFLED, WORKLOADS, Table, Workload

FORWARD, TRACKED, BOTH = "forward, no_grad", "forward, grad mode", "forward+backward"
STEP, TOPK = "loss training step", "top-k of one vector"

# A size at which a training step takes a fraction of a second: there are three processes of it a round.
HEAD_WORKLOAD = HeadWorkload(classes=32_768, row_factors=(32, 32, 32), col_factors=(8, 8, 8), tokens=512)
_HEADS = {DENSE: "Dense", LOW_16: "LowRank", TT_16: "TensorTrain", TT_96: "TensorTrain"}  # the formats' public names
_TURNS = 20  # of a process, at most; its budget of seconds ends most of them before
_FEWEST_TURNS = 3  # of a head, whatever its budget


@dataclass(frozen=True)
class Case:
    """A workload by name.

    Attributes:
        needs: public names of the library, without which a build does not run it.
        measure: times of each call, given a budget of seconds.
        by_default: whether it is run where none is named.
    """

    name: str
    title: str
    needs: tuple[str, ...]
    measure: Callable[[float], dict[str, Times]]
    by_default: bool = True


def layer_of(workload: Workload) -> nn.Module:
    """The library's layer for the workload, as drawn at birth."""
    if workload.many:
        return Collected([_bag(table) for table in workload.tables])
    (table,) = workload.tables
    return _bag(table) if workload.bag else tb.Embedding(table.rows, table.cols, _format(table))


def _bag(table: Table) -> nn.Module:
    return tb.EmbeddingBag(table.rows, table.cols, _format(table), mode="sum")


def _format(table: Table) -> tb.TensorTrain:
    return tb.TensorTrain(rank=table.rank, shape=table.shape)


def lookup_times(workload: Workload, budget: float) -> dict[str, Times]:
    """Lookups without gradients, and with their backward pass; where calls are short, lookups in grad mode too."""
    layer = layer_of(workload)
    entered = Contestant(layer, Adam(layer.parameters()), workload.ids, workload.gradient, workload.calls)
    entered.warm_up(budget)
    timed = compare({workload.name: entered}, range(_TURNS), budget)[workload.name]
    tracked = {TRACKED: timed.tracked} if workload.calls > 1 else {}
    return {FORWARD: timed.forward, **tracked, BOTH: timed.both}


def head_times(peer: HeadPeer, workload: HeadWorkload, budget: float) -> dict[str, Times]:
    """Training steps of the loss, and the best classes of one vector."""
    table = peer.table(workload)
    entrant = Entrant(peer.around(table), Adam(table.parameters(), lr=0.0))
    h, target = workload.hidden.clone().requires_grad_(), workload.target
    entrant.train(h, target)
    entrant.choose(workload.hidden[0], workload.k)
    entrant.steps.clear()
    entrant.choices.clear()
    for _ in _turns(budget):
        entrant.train(h, target)
    for _ in _turns(budget):
        entrant.choose(workload.hidden[0], workload.k)
    timed = entrant.timed()
    assert timed.topk is not None
    return {STEP: timed.step, TOPK: timed.topk}


def _turns(budget: float) -> Iterator[int]:
    """Until the seconds are used up, but some whatever they take and no more than a process has."""
    begin = time.perf_counter()
    for done in range(_TURNS):
        if done >= _FEWEST_TURNS and time.perf_counter() - begin > budget:
            return
        yield done


def _lookup_case(workload: Workload) -> Case:
    layer = "EmbeddingBagCollection" if workload.many else "EmbeddingBag" if workload.bag else "Embedding"
    bags = ("EmbeddingBag",) if workload.many else ()
    needs = (layer, *bags, "TensorTrain")
    # Ids in another order take the same code; python -m benchmarks --quick leaves them out as well.
    return Case(
        workload.name, workload.title, needs, partial(lookup_times, workload), by_default=workload.order != SHUFFLED
    )


def _head_case(peer: HeadPeer) -> Case:
    name = f"head {peer.name.removeprefix('tb ')}"
    title = f"{name}: {HEAD_WORKLOAD.title.removeprefix('heads: ')}"
    return Case(name, title, ("Head", _HEADS[peer.name]), partial(head_times, peer, HEAD_WORKLOAD))


def _all() -> list[Case]:
    lookups = [_lookup_case(workload) for workload in WORKLOADS.values()]
    return [*lookups, *[_head_case(peer) for peer in HEADS if peer.name in _HEADS]]


CASES = {case.name: case for case in _all()}


def chosen(names: list[str] | None) -> list[Case]:
    """Those named, once each, or those that are run by default."""
    if not names:
        return [case for case in CASES.values() if case.by_default]
    by_name = {name.lower(): case for name, case in CASES.items()}
    for name in names:
        if name.lower() not in by_name:
            (nearest,) = get_close_matches(name.lower(), by_name, n=1, cutoff=0.0)
            raise RefusalError(
                f'There is no workload "{name}"; the nearest is "{by_name[nearest].name}", and --list shows all.'
            )
    return list({by_name[name.lower()].name: by_name[name.lower()] for name in names}.values())
