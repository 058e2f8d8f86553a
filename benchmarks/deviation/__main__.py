"""``python -m benchmarks.deviation``: train every cell of the grid, and say which deviation at birth is near the best.

Small models over the sources of Python's standard library, 300 steps each: an LSTM and a transformer language model,
and bags of words, with the deviation of the embedding, of the head, or of one table for both. Runs are added to
``docs/results/deviation.jsonl`` one by one, two or more side by side, and are not made again; ``--table`` only prints.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.deviation.training import DIM, FORMATS, GLOROT_STD, LINEAR_STD, Trial
from benchmarks.deviation.worker import run_one, start
from provenance import ROOT, commit, processor, versions

RESULTS = ROOT / "docs" / "results" / "deviation.jsonl"
STDS = (GLOROT_STD, LINEAR_STD, 1 / DIM**0.5, 0.3, 1.0)
NEAR = 1.02  # of the best loss of a cell


def trials() -> Iterator[Trial]:
    """The most telling first: every deviation at one rate, then at others, then with more decay and with a warm-up."""
    uses = [("lstm", "tied"), ("lstm", "embedding"), ("transformer", "tied"), ("transformer", "embedding")]
    uses += [("bag", "embedding")]
    heads = [("lstm", "head"), ("transformer", "head")]
    yield from over_deviations([*uses, *heads], list(FORMATS), lr=3e-3)
    for lr in (1e-3, 1e-2):
        yield from over_deviations(uses, ["dense", "tt32"], lr=lr)
    yield from over_deviations(uses[:4], ["tt32"], lr=3e-3, decay=0.1)
    yield from over_deviations(uses[:4], ["tt32"], lr=3e-3, warm_up=True)


def over_deviations(uses: list[tuple[str, str]], formats: list[str], **options: Any) -> Iterator[Trial]:
    for model, use in uses:
        for format in formats:
            yield from (Trial(model, use, format, std, **options) for std in STDS)


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def of_record(record: dict[str, Any]) -> Trial:
    return Trial(**{name: record[name] for name in Trial.__dataclass_fields__})


def train_all(path: Path, jobs: int) -> None:
    seen = {of_record(record) for record in lines(path)}
    missing = [trial for trial in trials() if trial not in seen]
    about = {"commit": commit(), "processor": processor(), "versions": versions(("torch", "tensorbed"))}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")
    with Progress(*columns) as bar, ProcessPoolExecutor(jobs, mp_context=context, initializer=start) as pool:
        task = bar.add_task("runs", total=len(missing))
        for done in as_completed([pool.submit(run_one, trial) for trial in missing]):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**done.result(), **about}) + "\n")
            bar.advance(task)


def by_cell(records: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[float, float]]:
    """Loss by deviation, for every cell that was run with all of them."""
    cells: defaultdict[tuple[Any, ...], dict[float, float]] = defaultdict(dict)
    for record in records:
        trial = of_record(record)
        cells[trial.cell()][trial.std] = record["loss"]
    return {cell: losses for cell, losses in cells.items() if set(losses) == set(STDS)}


def shown(records: list[dict[str, Any]]) -> Table:
    table = Table(title="validation loss by the deviation at birth; * within 2 % of the best of its line")
    for name in ("model", "table", "format", "rate", "decay", "warm-up"):
        table.add_column(name)
    for std in STDS:
        table.add_column(f"{std:.3g}", justify="right")
    for cell, losses in sorted(by_cell(records).items(), key=str):
        best = min(losses.values())
        model, use, format, lr, decay, warm_up, _ = cell
        figures = [f"{losses[std]:.3f}{'*' if losses[std] <= NEAR * best else ' '}" for std in STDS]
        table.add_row(model, use, format, f"{lr:g}", f"{decay:g}", "yes" if warm_up else "", *figures)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deviation", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only print the runs that there are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of result lines")
    given = parser.parse_args()
    if not given.table:
        train_all(given.results, given.jobs)
    Console(width=140).print(shown(lines(given.results)))


if __name__ == "__main__":
    main()
