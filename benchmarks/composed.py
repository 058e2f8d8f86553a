"""What composed and dense tables cost beside what they are made of.

``python -m benchmarks.composed`` times, in turns, lookups and the top 10 of a ``HotRows`` table beside the same of its
two parts computed alone, and logits, loss and top 10 of a dense head beside ``torch.nn.Linear``. Of each turn the
fastest call counts, and of the turns the median. Codes are drawn: what they stand for changes no time.
``python -m benchmarks.composed --bands`` has a training step of a head in bands beside the dense one, both without
logits, and the memory at its peak.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import tensorbed as tb
from benchmarks.memory import Extra, in_fresh_process, peak_beyond
from benchmarks.quantized import drawn, fastest
from tensorbed.structures import Format

ROWS, COLS = 30_522, 384
LOOKUPS, BEST = 2048, 10
VECTORS = (1, 64, 512)
BANDS_SIZE, BANDS_VECTORS = (267_735, 512), 512
Call = Callable[[], Any]


def in_turns(calls: Sequence[Call], rounds: int) -> list[float]:
    """Milliseconds of each call: the median of turns that alternate, of each its fastest call."""
    turns = [[fastest(call) for call in calls] for _ in range(rounds)]
    return [median(times) for times in zip(*turns, strict=True)]


def hot_rows(rows: int, cols: int) -> dict[str, tuple[Call, list[Call]]]:
    """Calls of a table of hot rows, and those of its parts for the same rows."""
    format = tb.HotRows()
    whole, whole_head = drawn(rows, cols, format)
    count = whole.params()["places"].shape[0]
    hot, hot_head = drawn(count, cols, format.hot)
    rest, rest_head = drawn(rows - count, cols, format.rest)
    index, x = torch.randint(0, rows, (LOOKUPS,)), torch.randn(1, cols)
    in_hot, in_rest = index[index < count], index[index >= count] - count
    return {
        f"{LOOKUPS:,} lookups": (lambda: whole(index), [lambda: hot(in_hot), lambda: rest(in_rest)]),
        f"top {BEST} of 1": (
            lambda: whole_head.topk(x, BEST),
            [lambda: hot_head.topk(x, BEST), lambda: rest_head.topk(x, BEST)],
        ),
    }


def dense_head(rows: int, cols: int) -> dict[str, tuple[Call, list[Call]]]:
    """Calls of a dense head, and those of ``torch.nn.Linear``."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(cols, rows, bias=False)
    head = tb.Head.from_pretrained(linear.weight.detach(), tb.Dense(), freeze=False)
    return {name: pair for n in VECTORS for name, pair in _of_vectors(n, head, linear).items()}


def _of_vectors(n: int, head: tb.Head, linear: torch.nn.Linear) -> dict[str, tuple[Call, list[Call]]]:
    x, target = torch.randn(n, head.in_features), torch.randint(0, head.num_classes, (n,))

    def loss(x: Tensor) -> Tensor:
        return head.loss(x, target)

    def plain_loss(x: Tensor) -> Tensor:
        return F.cross_entropy(linear(x), target)

    return {
        f"logits of {n}": (_off(lambda: head(x)), [_off(lambda: linear(x))]),
        f"top {BEST} of {n}": (_off(lambda: head.topk(x, BEST)), [_off(lambda: linear(x).topk(BEST))]),
        f"loss of {n}": (_off(lambda: loss(x)), [_off(lambda: plain_loss(x))]),
        f"loss of {n} and backward": (_stepped(head, x, loss), [_stepped(linear, x, plain_loss)]),
    }


def bands_head(rows: int, cols: int) -> dict[str, tuple[Call, list[Call]]]:
    """A training step of a head in the default bands, and that of a dense one."""
    return {
        f"loss of {BANDS_VECTORS} and backward": (_step_of(tb.Bands(), rows, cols), [_step_of(tb.Dense(), rows, cols)])
    }


def _step_of(format: Format, rows: int, cols: int, n: int | None = None) -> Call:
    torch.manual_seed(0)
    head = tb.Head(cols, rows, format)
    x, target = torch.randn(n or BANDS_VECTORS, cols), torch.randint(0, rows, (n or BANDS_VECTORS,))
    return _stepped(head, x, lambda x: head.loss(x, target))


def peak_of(format: Format, rows: int, cols: int) -> Extra:
    """Bytes of a training step beyond the head itself."""
    step = _step_of(format, rows, cols)
    return peak_beyond(_step_of(format, 1000, cols, 16), step)


def _off(call: Call) -> Call:
    def without_gradients() -> None:
        with torch.no_grad():
            call()

    return without_gradients


def _stepped(layer: torch.nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Call:
    def step() -> None:
        layer.zero_grad()
        loss(x.detach().requires_grad_()).backward()

    return step


def lines(calls: dict[str, tuple[Call, list[Call]]], rounds: int) -> list[tuple[str, ...]]:
    """For each call its milliseconds, those of its parts, and the ratio to their sum."""
    found: list[tuple[str, ...]] = []
    for name, (whole, parts) in calls.items():
        own, *others = in_turns([whole, *parts], rounds)
        found.append((name, f"{own:.2f}", " + ".join(f"{ms:.2f}" for ms in others), f"{own / sum(others):.2f}"))
    return found


def show(
    title: str, beside: str, calls: dict[str, tuple[Call, list[Call]]], size: tuple[int, int], rounds: int
) -> None:
    shown = Table(title=f"{title}, {size[0]:,} x {size[1]}, {torch.get_num_threads()} threads, milliseconds")
    for column in ("call", "whole", beside, "ratio"):
        shown.add_column(column, justify="left" if column == "call" else "right")
    for line in lines(calls, rounds):
        shown.add_row(*line)
    Console(width=100).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 on a machine that is in use")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--cols", type=int, default=COLS)
    parser.add_argument("--bands", action="store_true", help="a training step of a head in bands")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.bands:
        show("head in bands", "dense head", bands_head(*BANDS_SIZE), BANDS_SIZE, min(3, arguments.rounds))
        for format in (tb.Bands(), tb.Dense()):
            peak = in_fresh_process(peak_of, (format, *BANDS_SIZE), arguments.threads)
            found = peak if isinstance(peak, str) else f"{peak.bytes / 2**20:,.0f} MiB beyond the head, {peak.method}"
            Console(width=100).print(f"{format!r}: {found}")
        return
    size = arguments.rows, arguments.cols
    for title, beside, calls in (
        ("hot rows", "its parts alone", hot_rows(*size)),
        ("dense head", "nn.Linear", dense_head(*size)),
    ):
        show(title, beside, calls, size, arguments.rounds)


if __name__ == "__main__":
    main()
