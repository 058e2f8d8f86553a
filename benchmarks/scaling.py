"""How the cost of a lookup grows: with rows, tokens, rank and order, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.measure import Advance, enter
from benchmarks.peers import AUTO, DENSE, NATIVE, PEERS, TENSORLY, TORCH, Peer
from benchmarks.results import Curve, Point
from benchmarks.timing import compare
from benchmarks.workloads import Table, Workload

SHOWN = (AUTO, NATIVE, TORCH, TENSORLY, DENSE)
_ROUNDS, _BUDGET = 7, 1.5
_LONGEST = 2000.0  # milliseconds: beyond, an implementation is not followed further along a curve
_LARGEST = 12 * 10**9  # bytes: the same for what it would hold

_ROWS, _COLS, _RANK, _TOKENS = 267_735, 64, 16, 4096


@dataclass(frozen=True)
class Sweep:
    """One quantity, its values, and the workload at each."""

    name: str
    about: str
    values: Sequence[int]
    workload: Callable[[int], Workload]


def _at(rows: int = _ROWS, tokens: int = _TOKENS, rank: int = _RANK, order: int = 3) -> Workload:
    return Workload("scaling", (Table.suggested(rows, _COLS, rank, order),), tokens)


SWEEPS = (
    Sweep("rows", f"rank {_RANK}, order 3, {_TOKENS:,} tokens", [10**k for k in range(4, 10)], lambda n: _at(rows=n)),
    Sweep("tokens", f"{_ROWS:,} rows, rank {_RANK}, order 3", [10**k for k in range(7)], lambda n: _at(tokens=n)),
    Sweep("rank", f"{_ROWS:,} rows, order 3, {_TOKENS:,} tokens", [2**k for k in range(2, 9)], lambda n: _at(rank=n)),
    Sweep("order", f"{_ROWS:,} rows, rank {_RANK}, {_TOKENS:,} tokens", range(2, 7), lambda n: _at(order=n)),
)


def steps(sweeps: Sequence[Sweep] = SWEEPS) -> int:
    """Steps of the progress bar."""
    return sum(len(sweep.values) for sweep in sweeps) * len(SHOWN)


def run(advance: Advance, sweeps: Sequence[Sweep] = SWEEPS, rounds: int = _ROUNDS) -> list[Curve]:
    """Every curve, of dim 64 and Zipf ids in frequency order."""
    return [_curve(sweep, rounds, advance) for sweep in sweeps]


def _curve(sweep: Sweep, rounds: int, advance: Advance) -> Curve:
    dropped: dict[str, str] = {}
    points = []
    for value in sweep.values:
        point = _point(value, sweep.workload(value), dropped, rounds, lambda _: advance(f"scaling: {sweep.name}"))
        slow = {name: f"{taken / 1e3:.1f} s at {value:,}" for name, taken in point.times.items() if taken > _LONGEST}
        dropped.update(slow)
        points.append(point)
    return Curve(sweep.name, sweep.about, points)


def _point(value: int, workload: Workload, dropped: dict[str, str], rounds: int, advance: Advance) -> Point:
    reasons = dict(dropped)
    peers: list[Peer] = []
    for peer in PEERS:
        if peer.name not in SHOWN:
            continue
        if peer.name in dropped:
            advance("")
        elif peer.needs(workload) > _LARGEST:
            advance("")
            reasons[peer.name] = f"needs {peer.needs(workload) / 1e9:.0f} GB"
        else:
            peers.append(peer)
    contestants, refused = enter(peers, workload, _BUDGET, advance)
    times = {name: timed.both.median for name, timed in compare(contestants, range(rounds), _BUDGET).items()}
    contestants.clear()
    gc.collect()  # optimisers refer to themselves, and gigabytes of moments with them
    return Point(value, times, {**reasons, **refused})
