"""What the two ends of a language model cost: a training step of its head alone, and of the whole model.

``python -m benchmarks.language_model`` times ``head.loss`` and its gradients at the size of WikiText-2, in float32 and
under bfloat16 autocast, every format beside the plain loss from all logits, in turns. ``--step small`` takes one step
of a small body between tables of WikiText-103's vocabulary, with the plain loss beside, and ``--step paper`` one of the
paper's size, each with Adam at a tiny batch in a fresh process, in float32 and with ``--half`` under bfloat16 autocast:
seconds, and the peak of memory beyond what the process held before the model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tensorbed as tb
from benchmarks.allocator import keep_freed_memory
from benchmarks.composed import in_turns
from benchmarks.memory import Extra, in_fresh_process, peak_beyond
from experiments.tasks.language_model.model import LanguageModelSettings, Memory, TransformerXL
from tensorbed.structures import Format

WORDS, DIM, VECTORS = 33_278, 128, 1024
HEADS: dict[str, Format | None] = {
    "plain logits": None,
    "dense": tb.Dense(),
    "low rank, 8 x": tb.LowRank(ratio=8),
    "low rank, 40 x": tb.LowRank(ratio=40),
    "bands, 8 x": tb.Bands(ratio=8),
    "TT, 8 x": tb.TensorTrain(ratio=8),
    "TT, 40 x": tb.TensorTrain(ratio=40),
    "hashed, 40 x": tb.Hashed(ratio=40),
    "ring, 40 x": tb.TensorRing(ratio=40),
    "CP, 40 x": tb.CanonicalPolyadic(ratio=40),
}
PAPER = LanguageModelSettings(
    dataset="wikitext-103", row="full", vocabulary=267_735, dim=512, layers=16, heads=8, inner=2048, batch=1
)
SMALL = replace(PAPER, layers=2, batch=4)
TRAIN: dict[str, Any] = {"format": "tensor_train", "shape": ((60, 60, 75), (8, 8, 8)), "tables": 2}
# The large column factor comes first, where few rows are scored: a fifth of the multiplications of all rows.
SCORED_THROUGH_CORES: dict[str, Any] = {**TRAIN, "shape": ((60, 60, 75), (32, 4, 4)), "tables": 1}
# By name whether logits are made, and what a row changes.
STEPS: dict[str, dict[str, tuple[bool, LanguageModelSettings]]] = {
    "small": {
        "plain logits": (True, SMALL),
        "dense": (False, SMALL),
        "TT rank 96, two tables": (False, replace(SMALL, rank=96, **TRAIN)),
        "TT rank 16, one table": (False, replace(SMALL, rank=16, **SCORED_THROUGH_CORES)),
        "low rank 64, one table": (False, replace(SMALL, format="low_rank", rank=64)),
    },
    "paper": {
        "full": (False, PAPER),
        "LR1": (False, replace(PAPER, format="low_rank", rank=128)),
        "TT1": (False, replace(PAPER, rank=192, **TRAIN)),
        "TT3": (False, replace(PAPER, rank=96, **TRAIN)),
    },
}


class PlainLogits(TransformerXL):
    """The same with all logits of its dense table, and PyTorch's own loss."""

    def forward(self, words: Tensor, following: Tensor, memory: Memory | None = None) -> tuple[Tensor, Memory]:
        hidden, memory = self.hidden(words, memory)
        logits = F.linear(hidden, self.head.params()["table"], self.head.bias)
        return F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum"), memory


def head_step(format: Format | None, half: bool, rows: int = WORDS) -> Callable[[], None]:
    """The loss of one batch and its gradients."""
    torch.manual_seed(0)
    head: nn.Module = nn.Linear(DIM, rows) if format is None else tb.Head(DIM, rows, format, bias=True)
    x, target = torch.randn(VECTORS, DIM), torch.randint(0, rows, (VECTORS,))

    def step() -> None:
        head.zero_grad()
        hidden = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = head.loss(hidden, target) if isinstance(head, tb.Head) else F.cross_entropy(head(hidden), target)
        loss.backward()

    return step


def head_peak(format: Format | None, half: bool) -> Extra:
    """Bytes of the same beyond the head."""
    return peak_beyond(head_step(format, half, 1000), head_step(format, half))


def model_step(logits: bool, half: bool, settings: LanguageModelSettings) -> Callable[[], None]:
    """A model, and one step of Adam."""
    torch.manual_seed(0)
    words = [str(k) for k in range(settings.vocabulary)]
    model = (PlainLogits if logits else TransformerXL)(settings, words)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    batch, following = torch.randint(0, settings.vocabulary, (2, settings.batch, settings.target))
    memory: list[Memory | None] = [None]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, memory[0] = model(batch, following, memory[0])
        loss.backward()
        optimizer.step()

    return step


def model_peak(logits: bool, half: bool, settings: LanguageModelSettings) -> Extra:
    """Bytes of a model and its first two steps."""
    tiny = model_step(logits, half, replace(PAPER, vocabulary=1000, layers=1))

    def steps() -> None:
        step = model_step(logits, half, settings)
        step()
        step()

    return peak_beyond(tiny, steps)


def model_time(logits: bool, half: bool, settings: LanguageModelSettings, steps: int) -> float:
    """Seconds of the fastest step after the first."""
    keep_freed_memory()
    step, times = model_step(logits, half, settings), []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def mebibytes(measured: Extra | str) -> str:
    return measured if isinstance(measured, str) else f"{measured.bytes / 2**20:,.0f}"


def show_heads(rounds: int, threads: int) -> None:
    """Milliseconds of every format in turns, and how often the plain loss takes as long."""
    table = Table(title=f"head.loss and gradients, {VECTORS:,} vectors, {WORDS:,} x {DIM}, {threads} threads")
    for column in ("head", "float32 ms", "plain / it", "bfloat16 ms", "plain / it", "peak MiB", "in bfloat16"):
        table.add_column(column, justify="left" if column == "head" else "right")
    times = [in_turns([head_step(format, half) for format in HEADS.values()], rounds) for half in (False, True)]
    for (name, format), *own in zip(HEADS.items(), *times, strict=True):
        speed = [cell for ms, of in zip(own, times, strict=True) for cell in (f"{ms:.0f}", f"{of[0] / ms:.2f}")]
        peaks = [mebibytes(in_fresh_process(head_peak, (format, half), threads)) for half in (False, True)]
        table.add_row(name, *speed, *peaks)
    Console(width=100).print(table)


def show_steps(size: str, half: bool, rounds: int, threads: int) -> None:
    """Each model by itself: two of them would not fit."""
    numbers = "bfloat16 autocast" if half else "float32"
    table = Table(title=f"one step of the {size} body, 267,735 words, Adam, {numbers}, {threads} threads")
    for column in ("model", "tokens", "seconds", "of the first", "peak MiB", "of the first"):
        table.add_column(column, justify="left" if column == "model" else "right")
    first: tuple[float, float] | None = None
    for name, (logits, settings) in STEPS[size].items():
        run = partial(in_fresh_process, threads=threads, patience=900)
        took = run(model_time, (logits, half, settings, rounds))
        peak = run(model_peak, (logits, half, settings))
        if isinstance(took, str) or isinstance(peak, str):
            table.add_row(name, "", str(took), "", str(peak), "")
            continue
        first = first or (took, peak.bytes)
        tokens, ratios = settings.batch * settings.target, (took / first[0], peak.bytes / first[1])
        table.add_row(name, f"{tokens:,}", f"{took:.2f}", f"{ratios[0]:.2f}", mebibytes(peak), f"{ratios[1]:.3f}")
    Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--step", choices=list(STEPS), help="a step of a whole model instead of heads")
    parser.add_argument("--half", action="store_true", help="that step under bfloat16 autocast")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    if arguments.step:
        show_steps(arguments.step, arguments.half, arguments.rounds, arguments.threads)
    else:
        show_heads(arguments.rounds, arguments.threads)


if __name__ == "__main__":
    main()
