"""``python -m benchmarks.deviation``: train every cell of the grid, and say which deviation at birth is near the best.

Small models over the sources of Python's standard library, 300 steps each: an LSTM and a transformer language model,
and bags of words, with the deviation of the embedding, of the head, or of one table for both. Runs are added to
``docs/results/deviation.jsonl`` one by one, two or more side by side, and are not made again; the page
beside it is made from all of them, and printed. ``--table`` only does that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.deviation.page import of_record, page
from benchmarks.deviation.training import FORMATS, Trial, deviations
from benchmarks.deviation.worker import run_one, start
from provenance import ROOT, commit, processor, versions

RESULTS = ROOT / "docs" / "results" / "deviation.jsonl"


def trials() -> Iterator[Trial]:
    """The most telling first: every deviation at one rate, then at others, in wider models, then with more decay
    and with a warm-up."""
    uses = [("lstm", "tied"), ("lstm", "embedding"), ("transformer", "tied"), ("transformer", "embedding")]
    uses += [("bag", "embedding")]
    heads = [("lstm", "head"), ("transformer", "head")]
    yield from over_deviations([*uses, *heads], list(FORMATS), lr=3e-3)
    for lr in (1e-3, 1e-2):
        yield from over_deviations(uses, ["dense", "tt32"], lr=lr)
    yield from over_deviations([uses[0], uses[2]], ["tt32"], lr=1e-3, dim=384)
    yield from over_deviations(uses[:4], ["tt32"], lr=3e-3, decay=0.1)
    yield from over_deviations(uses[:4], ["tt32"], lr=3e-3, warm_up=True)


def over_deviations(uses: list[tuple[str, str]], formats: list[str], **options: Any) -> Iterator[Trial]:
    for model, use in uses:
        for format in formats:
            stds = deviations(options.get("dim", Trial.dim))
            yield from (Trial(model, use, format, std, **options) for std in stds)


def lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deviation", description=__doc__)
    parser.add_argument("--table", action="store_true", help="only make the page, of the runs that there are")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs side by side")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of result lines")
    given = parser.parse_args()
    if not given.table:
        train_all(given.results, given.jobs)
    text = page(lines(given.results))
    given.results.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
