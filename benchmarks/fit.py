"""Fitting a table of WikiText-103's size: seconds, memory beside the table, and the error reached.

``python -m benchmarks.fit`` fits each format in a process of its own, so that one's memory is not another's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tensorbed as tb

FORMATS: dict[str, Any] = {
    "tensor train, rank 96": lambda: tb.TensorTrain(rank=96, shape=((60, 60, 75), (8, 8, 8))),
    "tensor train, rel_error 0.5": lambda: tb.TensorTrain(rel_error=0.5, shape=((60, 60, 75), (8, 8, 8))),
    "tensor ring, rank 16": lambda: tb.TensorRing(rank=16, shape=((60, 60, 75), (8, 8, 8))),
    "low rank, rank 48": lambda: tb.LowRank(rank=48),
}


def made_table(rows: int, cols: int) -> torch.Tensor:
    """A drawn table whose singular values fall as those of trained ones do, slowly."""
    torch.manual_seed(0)
    table = torch.randn(rows, cols)
    return table.mul_(1 / (1 + torch.arange(cols)).float().sqrt())


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, rows: int, cols: int) -> tuple[float, int, float, float]:
    """Seconds, peak bytes beyond the table, relative error and ratio of one fit."""
    table = made_table(rows, cols)
    before = peak_bytes()
    start = time.perf_counter()
    layer = tb.Embedding.from_pretrained(table, FORMATS[name]())
    seconds = time.perf_counter() - start
    assert layer.fit_error is not None
    return seconds, peak_bytes() - before, layer.fit_error, layer.compression_ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=267_735)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="one or more; all by default")
    arguments = parser.parse_args()
    shown = Table(title=f"Fitting {arguments.rows:,} x {arguments.cols}, float32, {torch.get_num_threads()} threads")
    for column in ("format", "seconds", "extra memory, GiB", "relative error", "ratio"):
        shown.add_column(column, justify="left" if column == "format" else "right")
    context = multiprocessing.get_context("spawn")
    for name in arguments.format or FORMATS:
        with context.Pool(1) as pool:
            seconds, extra, error, ratio = pool.apply(measure, (name, arguments.rows, arguments.cols))
        shown.add_row(name, f"{seconds:.1f}", f"{extra / 2**30:.2f}", f"{error:.4f}", f"{ratio:.1f}")
    Console().print(shown)


if __name__ == "__main__":
    main()
