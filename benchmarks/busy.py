"""How much slower lookups become beside busy processes, and how much slower ``nn.Embedding`` does.

``python -m benchmarks.busy`` times forward, and forward with backward, in turns: alone, and beside a busy process for
each core. That leaves half of the machine; what waits for a thread that lost its core takes more than twice as long.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch
from rich.console import Console

from benchmarks.allocator import keep_freed_memory
from benchmarks.neighbours import busy_cores
from benchmarks.peers import AUTO, DENSE, PEERS, CannotRunError, Peer, build, draw
from benchmarks.tables import Sheet, short
from benchmarks.workloads import WORKLOADS, Workload

DEFAULT = ("IMDB TT1", "LM r16")

Call = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what was asked for and show a table."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    peers = [peer for peer in PEERS if peer.name in (options.implementation or (AUTO, DENSE))]
    rows: list[tuple[str, ...]] = []
    notes = [f"milliseconds, median of {options.rounds} rounds of {options.seconds} s alone and as long beside others"]
    for name in options.workload or DEFAULT:
        for peer in peers:
            try:
                rows += lines(WORKLOADS[name], peer, options.rounds, options.seconds)
            except CannotRunError as reason:
                notes.append(f"not run: {peer.name}, {name}: {reason}")
    columns = ("workload", "implementation", "call", "alone", "beside others", "times")
    title = f"beside a busy process for each core, float32, {torch.get_num_threads()} threads"
    # A pipe has no width of its own, and rich's guess is too narrow for the table.
    Console(width=None if sys.stdout.isatty() else 120).print(Sheet(title, columns, rows, notes, words=3).rich())
    return 0


def lines(workload: Workload, peer: Peer, rounds: int, seconds: float) -> Iterator[tuple[str, ...]]:
    """A line of the table for each call."""
    for name, call in calls_of(workload, peer).items():
        alone, beside = alternated(call, rounds, seconds)
        yield workload.name, peer.name, name, short(alone), short(beside), f"{beside / alone:.2f}"


def calls_of(workload: Workload, peer: Peer) -> dict[str, Call]:
    """What is timed, of a layer whose rows were checked."""
    layer = build(peer, workload, draw(workload))

    def forward() -> None:
        with torch.no_grad():
            layer(workload.ids)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        layer(workload.ids).backward(workload.gradient)

    return {"forward": forward, "forward+backward": both}


def alternated(call: Call, rounds: int, seconds: float) -> tuple[float, float]:
    """Milliseconds of a call alone and beside others, each the median of turns that alternate."""
    alone, beside = [], []
    call()  # memory and threads are there from the second one on
    for _ in range(rounds):
        alone.append(mean(call, seconds))
        with busy_cores():
            beside.append(mean(call, seconds))
    return median(alone), median(beside)


def mean(call: Call, seconds: float) -> float:
    """Milliseconds of a call. Every one counts: a few wait for a core, and the others run while they have it."""
    begin = now = time.perf_counter()
    calls = 0
    while calls == 0 or now - begin < seconds:
        call()
        calls += 1
        now = time.perf_counter()
    return 1e3 * (now - begin) / calls


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, or a message and an end where they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy", description=__doc__)
    parser.add_argument(
        "--workload", action="append", choices=list(WORKLOADS), help=f"one or more (default: {' and '.join(DEFAULT)})"
    )
    parser.add_argument(
        "--implementation",
        action="append",
        choices=[peer.name for peer in PEERS],
        help=f"one or more (default: {AUTO} and {DENSE})",
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.threads < 1:
        parser.error(f"--rounds {options.rounds} --threads {options.threads}: both are at least one")
    return options


if __name__ == "__main__":
    sys.exit(main())
