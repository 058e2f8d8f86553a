"""Tables of codes with and without the compiled kernels, in the same run: lookups, scores of a few vectors, top 10.

``python -m benchmarks.quantized`` times the two in turns, of each turn the fastest call, and prints the median turn
beside a dense table's. Codes are drawn: what they stand for changes no time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.structures import Format
from tensorbed.structures.formats import Budget
from tensorbed.vocabulary.tiling import choose

SIZES = {"MiniLM": (30_522, 384), "SmolLM2": (49_152, 576)}
FORMATS: dict[str, Callable[[int], Format]] = {
    "int8": lambda cols: tb.QuantizedRows(bits=8),
    "int4, groups of 32": lambda cols: tb.QuantizedRows(bits=4),
    "product, parts of 2": lambda cols: tb.ProductQuantized(parts=cols // 2),
    "product, parts of 4": lambda cols: tb.ProductQuantized(parts=cols // 4),
}
LOOKUPS, VECTORS, BEST = 2048, (1, 32), 10
_BURST = 0.05  # seconds: a turn repeats its call for so long


@contextmanager
def kernels(on: bool) -> Iterator[None]:
    """With the compiled kernels, or as an install without a compiler computes."""
    before = native.available
    native.available = before and on
    choose.cache_clear()  # which ways there are depends on it
    try:
        yield
    finally:
        native.available = before
        choose.cache_clear()


def drawn(rows: int, cols: int, format: Format) -> tuple[tb.Embedding, tb.Head]:
    """An embedding of drawn codes, and the head tied to it."""
    torch.manual_seed(0)
    embedding = tb.Embedding.__new__(tb.Embedding)
    embedding._set_up(format.bind(Budget(rows, cols)), None, torch.float32)
    for tensor in embedding.params().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)
        elif tensor.element_size() > 1:  # numbers of rows
            torch.arange(tensor.shape[0], out=tensor)
        else:
            tensor.random_(torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max + 1)
    embedding.requires_grad_(False)
    return embedding, tb.Head.tied_to(embedding)


def calls_of(embedding: tb.Embedding, head: tb.Head) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    index = torch.randint(0, embedding.num_embeddings, (LOOKUPS,))
    vectors = {count: torch.randn(count, embedding.embedding_dim) for count in VECTORS}
    return {
        f"{LOOKUPS:,} lookups": partial(embedding, index),
        **{f"scores of {count}": partial(head, x) for count, x in vectors.items()},
        f"top {BEST} of 1": partial(head.topk, vectors[1], BEST),
    }


def fastest(call: Callable[[], Any]) -> float:
    """Milliseconds of the fastest of some calls, one after the other, the first not counted."""
    call()  # chooses its way
    end = time.perf_counter() + _BURST
    seconds: list[float] = []
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * min(seconds)


def in_turns(sides: list[tuple[bool, Callable[[], Any]]], rounds: int) -> list[float]:
    """Milliseconds of each call, kernels on or off: the median of turns that alternate, of each its fastest call."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for times, (on, call) in zip(found, sides, strict=True):
            with kernels(on):
                times.append(fastest(call))
    return [median(times) for times in found]


def rows_of(name: str, rounds: int) -> Iterator[tuple[str, ...]]:
    """The lines of one table size."""
    rows, cols = SIZES[name]
    dense = calls_of(*drawn(rows, cols, tb.Dense()))
    for label, make in FORMATS.items():
        pair = drawn(rows, cols, make(cols))
        for what, call in calls_of(*pair).items():
            plain, compiled, other = in_turns([(False, call), (True, call), (True, dense[what])], rounds)
            faster = f"{plain / compiled:.1f}"
            yield label, what, f"{plain:.2f}", f"{compiled:.2f}", faster, f"{other:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="append", choices=list(SIZES), help="one or more; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that is in use")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not native.available:
        raise SystemExit(f"no compiled kernels to compare with: {native.reason}")
    for name in arguments.table or SIZES:
        rows, cols = SIZES[name]
        title = f"{name}, {rows:,} x {cols}, float32, {torch.get_num_threads()} threads, milliseconds"
        shown = Table(title=title)
        for column in ("format", "call", "plain", "kernels", "times faster", "dense"):
            shown.add_column(column, justify="left" if column in ("format", "call") else "right")
        for line in rows_of(name, arguments.rounds):
            shown.add_row(*line)
        Console(width=100).print(shown)


if __name__ == "__main__":
    main()
