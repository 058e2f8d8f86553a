"""``python -m benchmarks.click_through.serving``: how fast raw rows are prepared, and how fast they are scored.

Rows of Criteo's shape are drawn, prepared, trained on for a few steps and scored, by the commands that a user would
type. Files of about 3 GB for the 10 million rows that are asked for lie below ``--out`` until the end. With ``--keep``
they stay there, and the next run measures scoring alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from benchmarks.floors import Floor
from benchmarks.tables import floors_sheet
from experiments.tasks.click_through.scoring import Scorer
from provenance import ROOT

ROWS = 10_000_000
BATCH = 4_096
_SINGLE = 1_000  # rows that are scored one by one
_WARM = 50
_TRAINED = 100_000  # rows, of which a model is made


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    kept = options.out / f"{options.rows}-rows"
    (kept if options.keep else options.out).mkdir(parents=True, exist_ok=True)
    with nullcontext(kept) if options.keep else TemporaryDirectory(dir=options.out) as folder:
        raw, data, runs = (Path(folder) / name for name in ("raw.tsv", "data", options.config))
        floors = [] if data.exists() else preparation(raw, data, options.rows)
        if not list(runs.glob("click_through/*/model.pt")):  # or training was stopped
            size = ("--config", options.config, "--epochs", "1", "--validations", "1", "--rows", str(_TRAINED))
            places = ("--data", str(data), "--out", str(runs), "--results", str(runs))
            experiment(*size, *places, "--keep-model", "--restart")
        (checkpoint,) = (runs / "click_through").iterdir()
        floors += scoring(Scorer(checkpoint, data), first_rows(raw, max(_SINGLE + _WARM, (_WARM + 1) * BATCH)))
    console.print(floors_sheet(floors).rich())


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.click_through.serving", description=__doc__)
    made.add_argument("--rows", type=int, default=ROWS, help="that are prepared (default: %(default)s)")
    made.add_argument("--config", default="criteo-tt1", help="of the model that scores (default: %(default)s)")
    made.add_argument("--out", type=Path, default=Path("out/click_through"), help="folder (default: %(default)s)")
    made.add_argument("--keep", action="store_true", help="the files, and take those that were kept before")
    return made


def preparation(raw: Path, data: Path, rows: int) -> list[Floor]:
    """Of rows that are drawn if they are not there."""
    if not raw.exists():
        experiment("generate", str(raw), "--rows", str(rows))
    seconds, peak = experiment("prepare", str(raw), str(data))
    return [
        Floor("preparation, rows/s", f"{rows:,} rows", 150_000, rows / seconds, True, ""),
        Floor("preparation, GiB at the peak", f"{rows:,} rows", 4, peak / 2**30, False, ""),
    ]


def experiment(*arguments: str) -> tuple[float, int]:
    """Seconds and bytes at the peak of ``python -m experiments click-through ...``, whose output is seen."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "experiments", "click-through", *arguments], cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"experiments click-through {arguments[0]} failed")
    return time.perf_counter() - begin, 1024 * usage.ru_maxrss


def first_rows(raw: Path, count: int) -> list[bytes]:
    with raw.open("rb") as lines:
        return [line.rstrip(b"\n") for line in islice(lines, count)]


def scoring(scorer: Scorer, lines: Sequence[bytes]) -> list[Floor]:
    """Of single rows, none of them seen before, and of batches beside the forward pass of training."""
    floors, all_threads = [], torch.get_num_threads()
    for threads in sorted({1, all_threads}):
        torch.set_num_threads(threads)
        scorer.at_hand.clear()
        single = [milliseconds(partial(scorer.scores, [line])) for line in lines[: _SINGLE + _WARM]]
        told = counted_threads(threads)
        floors.append(Floor("one row scored, median ms", told, 2, median(single[_WARM:]), False, ""))
    size = min(BATCH, len(lines) // 2)
    first, *batches = (lines[at : at + size] for at in range(0, len(lines) - size + 1, size))
    ids = torch.from_numpy(scorer.ids(first))
    # In turns, so that a busy moment is one for both; each batch is a new one, as a stream's are.
    calls = [(partial(scorer.model, ids), partial(scorer.scores, batch)) for batch in batches]
    ratio = median(milliseconds(score) / milliseconds(forward) for forward, score in calls)
    about = f"{size:,} new rows scored, times training's forward pass"
    return [*floors, Floor(about, counted_threads(all_threads), 1, ratio, False)]


def counted_threads(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"


def milliseconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
