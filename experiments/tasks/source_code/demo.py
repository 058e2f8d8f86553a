"""``make demo``: the four rows side by side, as many at a time as there are cores, and a page of what came of them."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import tensorbed as tb
from experiments.lab.files import writable_folder, write_whole
from experiments.lab.formats import known, label
from experiments.lab.processes import Interrupts
from experiments.lab.report.document import table
from experiments.lab.report.plots import curve_picture, looks, size_picture
from experiments.lab.report.summary import Point
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.task import Task
from experiments.lab.training import Training, result
from experiments.lab.watching import Display
from experiments.tasks.source_code.corpus import Corpus
from pages import page

ROWS = ("python-full", "python-low_rank", "python-tensor_train", "python-smaller_train")
CONTENT = Path(__file__).with_name("demo.html")
CHANCE = 0.03  # of a perplexity: what another seed moves it by
# What is compared comes first, as far as a phone shows it.
HEADINGS = ("tables", "times smaller", "validation perplexity", "both tables", "whole model", "seconds", "format")

OPTIONS = ("steps", "vocabulary", "dim", "batch", "seed")

Record = dict[str, Any]


def demo(
    given: dict[str, Any],
    *,
    out: Annotated[Path, typer.Option(help="folder for demo.html and demo.json")] = Path("out"),
    data: Annotated[Path | None, typer.Option(help="folder of .py files, instead of the standard library")] = None,
) -> None:
    """Train the model four times, with full and with compressed tables at both ends, and write a page."""
    from experiments.tasks.source_code.task import TASK

    settings: list[Any] = [configured(TASK, config, given) for config in ROWS]
    corpus = TASK.load(settings[0], data)
    writable_folder(out, "--out")  # now, not when minutes of training would be lost
    console = Console()
    console.print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} to validate on, {len(corpus.words):,} words"
    )
    records = run_all(TASK, settings, corpus)
    # Of a folder only the name: where it lies is no part of the results.
    source = f"the standard library of Python {platform.python_version()}" if data is None else data.resolve().name
    options = {name: getattr(settings[0], name) for name in OPTIONS} | ({} if data is None else {"data": source})
    told = {
        "settings": settings[0].as_record(),
        "corpus": {"source": source, **described(corpus)},
        "versions": {"Python": platform.python_version(), "PyTorch": torch.__version__, "tensorbed": tb.__version__},
        "command": " ".join(["python -m experiments source-code demo", *(f"--{k} {v}" for k, v in options.items())]),
    }
    write_whole(out / "demo.json", (json.dumps({**told, "tables": records}, indent=2) + "\n").encode())
    write_whole(out / "demo.html", as_html(TASK, told, records).encode())
    console.print(shown_table(rows_of(records)))
    console.print(f"page: {out / 'demo.html'}", soft_wrap=True)


def run_all(task: Task, rows: Sequence[Any], data: Any) -> list[Record]:
    """Train all rows, as many at a time as there are cores.

    The products here are small: a core for each model is faster than all cores for one, and numbers do not depend on
    how many there are.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [Training(task, row, How(), data) for row in rows]
        display = Display(task, [label(row.row) for row in rows], runs[0].steps)
        with display, Interrupts() as interrupts, ThreadPoolExecutor(cores) as pool:
            lines = zip(runs, display.lines, strict=True)
            futures = [pool.submit(run.train, line, interrupts) for run, line in lines]
            try:
                for future in futures:
                    future.result()
            finally:
                interrupts.asked = True  # an error of one ends all others at their next step, not in a minute
    finally:
        torch.set_num_threads(cores)
    return [result(run, {}) for run in runs]


def written(record: Record) -> str:
    """The format as it is written in code."""
    rank = record["settings"]["rank"]
    return f"tb.{known()[record['format']].__name__}({'' if rank is None else f'rank={rank}'})"


def described(corpus: Corpus) -> dict[str, Any]:
    """What the models read, and what is to be had without them."""
    scored = corpus.validation()[:, 1:].flatten()
    return {
        "files": corpus.files,
        "words": len(corpus.words),
        "train_tokens": len(corpus.train),
        "valid_tokens": len(corpus.valid),
        "scored_tokens": len(scored),
        "unknown_share": (scored == 0).double().mean().item(),
        "perplexity_by_frequency": (-corpus.log_frequencies()[scored].double().mean()).exp().item(),
    }


def rows_of(records: Sequence[Record]) -> list[tuple[str, ...]]:
    """Headings and lines of the table."""
    lines = [
        (
            label(record["row"]),
            f"{record['ratio']:,.1f}",
            f"{record['val_perplexity']:.1f}",
            f"{record['table_parameters']:,}",
            f"{record['total_parameters']:,}",
            f"{record['train_seconds']:.1f}",
            written(record),
        )
        for record in records
    ]
    return [HEADINGS, *lines]


def shown_table(rows: Sequence[Sequence[str]]) -> Table:
    """For the terminal; narrow enough for the 80 columns of output that is none: seconds are on the page."""
    made = Table(title="One language model, four formats at both ends", box=box.SIMPLE_HEAD, show_edge=False)
    made.title_justify, made.pad_edge, made.collapse_padding = "left", False, True
    for heading in ("tables", "ratio", "perplexity", "both", "model", "format"):
        made.add_column(heading, justify="left" if heading in ("tables", "format") else "right", no_wrap=True)
    for *figures, _, format in rows[1:]:
        made.add_row(*figures, format)
    return made


def as_html(task: Task, told: dict[str, Any], records: Sequence[Record]) -> str:
    """The page: what is seen, the table, two pictures, and how to get the same."""
    corpus, settings, first, metric = told["corpus"], told["settings"], records[0], task.metrics[0]
    rest = first["total_parameters"] - first["table_parameters"]
    series = []
    for record, look in zip(records, looks(record["row"] for record in records).values(), strict=True):
        stages, values = zip(*((one["step"], one["val_perplexity"]) for one in record["epochs"]), strict=True)
        point = Point(ratio=record["ratio"], test=(record["val_perplexity"],))
        series.append(replace(look, points=[point], stages=stages, values=values))
    return page(
        "Both ends of a language model, full and compressed",
        CONTENT.read_text(encoding="utf-8"),
        seen=escape(seen(records)),
        table=table(rows_of(records), [one.colour for one in series])[1],
        curves=curve_picture("curves", metric, task.stage, series, series),
        sizes=size_picture("sizes", metric, "validation", series[0], series[1:]),
        command=escape(told["command"]),
        source=escape(corpus["source"]),
        versions=escape(", ".join(f"{name} {version}" for name, version in told["versions"].items())),
        **{name: f"{corpus[name]:,}" for name in ("files", "words", "train_tokens", "valid_tokens", "scored_tokens")},
        unknown=f"{corpus['unknown_share']:.1%}",
        by_frequency=f"{corpus['perplexity_by_frequency']:.0f}",
        body=f"{rest - corpus['words']:,}",
        hidden=str(2 * settings["dim"]),
        **{
            name: f"{settings[name]:,}" for name in ("steps", "dim", "batch", "seed", "window", "lr", "std", "head_std")
        },
    )


def seen(records: Sequence[Record]) -> str:
    """What came of it: every compressed pair of tables beside the full one, which is the first row."""
    full, *smaller = records
    said = []
    for record in smaller:
        change = record["val_perplexity"] / full["val_perplexity"] - 1
        level = f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"
        chance = ", which may be chance" if abs(change) < CHANCE else ""
        beside = f"tables {record['ratio']:,.1f} times smaller, {level}{chance}"
        said.append(f"{label(record['row'])} {record['val_perplexity']:.1f} ({beside})")
    return (
        f"With full tables the perplexity at the end is {full['val_perplexity']:.1f}; lower is better. With compressed "
        f"ones it is: {'; '.join(said)}."
    )
