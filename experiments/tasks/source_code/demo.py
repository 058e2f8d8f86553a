"""``make demo``: the four rows side by side, as many at a time as there are cores, and a page of what came of them."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
from experiments.lab.formats import known
from experiments.lab.processes import Interrupts
from experiments.lab.report.plots import Point, Series, curve_picture, looks, size_picture
from experiments.lab.rows import configured, plan
from experiments.lab.task import Task
from experiments.lab.training import How, Training, result
from experiments.lab.watching import Display
from experiments.tasks.source_code.model import SourceCodeSettings
from pages import page

CONTENT = Path(__file__).with_name("demo.html")
CHANCE = 0.03  # of a perplexity: what another seed moves it by
OPTIONS = ("steps", "vocabulary", "dim", "batch", "seed")

Record = dict[str, Any]


def demo(
    steps: Annotated[int | None, typer.Option(help="training steps of each model")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="words at most, <unk> among them")] = None,
    dim: Annotated[int | None, typer.Option(help="numbers per word")] = None,
    batch: Annotated[int | None, typer.Option(help="places the corpus is read in at once")] = None,
    seed: Annotated[int | None, typer.Option(help="of all that is drawn")] = None,
    out: Annotated[Path, typer.Option(help="folder for demo.html and demo.json")] = Path("out"),
    data: Annotated[Path | None, typer.Option(help="folder of .py files, instead of the standard library")] = None,
) -> None:
    """Train the model four times, with full and with compressed tables at both ends, and write a page."""
    from experiments.tasks.source_code.task import TASK

    given = dict(zip(OPTIONS, (steps, vocabulary, dim, batch, seed), strict=True))
    rows: list[Any] = [configured(TASK, f"{dataset}-{row}", given) for dataset, row, _ in plan(TASK).runs]
    console = Console()
    lanes = TASK.load(rows[0], data)
    writable_folder(out, "--out")  # now, not when minutes of training would be lost
    corpus = lanes.corpus
    console.print(
        f"{len(corpus.train):,} tokens to train on, {len(corpus.valid):,} to validate on, {len(corpus.words):,} words"
    )
    records = run_all(TASK, rows, lanes)
    told = described(rows[0], lanes, data)
    console.print(results_table(records))
    write_whole(out / "demo.json", (json.dumps({**told, "tables": records}, indent=2) + "\n").encode())
    write_whole(out / "demo.html", as_html(told, records).encode())
    console.print(f"page: {out / 'demo.html'}", soft_wrap=True)


def run_all(task: Task, rows: Sequence[Any], data: Any) -> list[Record]:
    """Train all rows, as many at a time as there are cores.

    The products here are small: a core for each model is faster than all cores for one, and numbers do not depend on
    how many there are.
    """
    cores = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = [Training(task, row, How(), data) for row in rows]
    display, pool = Display(task, [shown(row.row) for row in rows], runs[0].steps), ThreadPoolExecutor(cores)
    try:
        with display, Interrupts() as interrupts, pool:
            futures = [pool.submit(run.train, line, interrupts) for run, line in zip(runs, display.lines, strict=True)]
            try:
                for future in futures:
                    future.result()
            finally:
                interrupts.asked = True  # an error of one ends all others at their next step, not in a minute
    finally:
        torch.set_num_threads(cores)
    return [result(run, {}) for run in runs]


def shown(row: str) -> str:
    """The name of a row in words."""
    return row.replace("_", " ")


def written(record: Record) -> str:
    """The format as it is written in code."""
    rank = record["settings"]["rank"]
    return f"tb.{known()[record['format']].__name__}({'' if rank is None else f'rank={rank}'})"


def described(settings: SourceCodeSettings, lanes: Any, folder: Path | None) -> dict[str, Any]:
    """All there is to tell beside the results."""
    scored = lanes.valid[:, 1:].flatten()
    corpus = lanes.corpus
    # Of a folder only the name: where it lies is no part of the results.
    source = f"the standard library of Python {platform.python_version()}" if folder is None else folder.resolve().name
    options = {name: getattr(settings, name) for name in OPTIONS} | ({} if folder is None else {"data": source})
    typed = " ".join(f"--{name} {value}" for name, value in options.items())
    return {
        "settings": settings.as_record(),
        "corpus": {
            "source": source,
            "files": corpus.files,
            "words": len(corpus.words),
            "train_tokens": len(corpus.train),
            "valid_tokens": len(corpus.valid),
            "scored_tokens": len(scored),
            "unknown_share": (scored == 0).double().mean().item(),
            "perplexity_by_frequency": (-corpus.log_frequencies()[scored].double().mean()).exp().item(),
        },
        "versions": {"Python": platform.python_version(), "PyTorch": torch.__version__, "tensorbed": tb.__version__},
        "command": f"python -m experiments source-code demo {typed}",
    }


def results_table(records: Sequence[Record]) -> Table:
    """For the terminal; narrow enough for the 80 columns of output that is none."""
    table = Table(title="One language model, four formats at both ends", box=box.SIMPLE_HEAD, show_edge=False)
    table.caption = "ratio: two full tables over the two kept; the paper has one over two, half"
    table.title_justify = table.caption_justify = "left"
    table.pad_edge, table.collapse_padding = False, True
    table.add_column("tables", style="bold", no_wrap=True)
    table.add_column("format", no_wrap=True)
    for heading in ("both", "ratio", "model", "perplexity"):
        table.add_column(heading, justify="right", no_wrap=True)
    for record in records:
        sizes = (f"{record['table_parameters']:,}", f"{record['ratio']:.1f}", f"{record['total_parameters']:,}")
        table.add_row(shown(record["row"]), written(record), *sizes, f"{record['val_perplexity']:.1f}")
    return table


def as_html(told: dict[str, Any], records: Sequence[Record]) -> str:
    """The page: what is seen, the table, two pictures, and how to get the same."""
    corpus, settings, first = told["corpus"], told["settings"], records[0]
    rest = first["total_parameters"] - first["table_parameters"]
    return page(
        "Both ends of a language model, full and compressed",
        CONTENT,
        seen=escape(seen(records)),
        rows="\n".join(table_row(record, look.colour) for record, look in zip(records, look_of(records), strict=True)),
        **pictures(records),
        command=escape(told["command"]),
        source=escape(corpus["source"]),
        versions=escape(", ".join(f"{name} {version}" for name, version in told["versions"].items())),
        **{name: f"{corpus[name]:,}" for name in ("files", "words", "train_tokens", "valid_tokens", "scored_tokens")},
        unknown=f"{corpus['unknown_share']:.1%}",
        by_frequency=f"{corpus['perplexity_by_frequency']:.0f}",
        body=f"{rest - corpus['words']:,}",
        hidden=str(2 * settings["dim"]),
        **{name: f"{settings[name]:,}" for name in ("steps", "dim", "batch", "seed", "window")},
        **{name: str(settings[name]) for name in ("lr", "std", "head_std")},
    )


def look_of(records: Sequence[Record]) -> list[Any]:
    """A colour for each row."""
    return list(looks(record["row"] for record in records).values())


def seen(records: Sequence[Record]) -> str:
    """What came of it: every compressed pair of tables beside the full one, which is the first row."""
    full, *smaller = records
    said = []
    for record in smaller:
        change = record["val_perplexity"] / full["val_perplexity"] - 1
        level = f"{abs(change):.1%} {'higher' if change > 0 else 'lower'}"
        chance = ", which may be chance" if abs(change) < CHANCE else ""
        beside = f"tables {record['ratio']:,.1f} times smaller, {level}{chance}"
        said.append(f"{shown(record['row'])} {record['val_perplexity']:.1f} ({beside})")
    return (
        f"With full tables the perplexity at the end is {full['val_perplexity']:.1f}; lower is better. With compressed "
        f"ones it is: {'; '.join(said)}."
    )


def table_row(record: Record, colour: str) -> str:
    """A line of the table; what is compared comes first, as far as a phone shows it."""
    cells = (
        f"{record['ratio']:,.1f}",
        f"{record['val_perplexity']:.1f}",
        f"{record['table_parameters']:,}",
        f"{record['total_parameters']:,}",
        f"{record['train_seconds']:.1f}",
    )
    return (
        f'<tr><th><i style="background:{colour}"></i>{escape(shown(record["row"]))}</th>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="word"><code>{escape(written(record))}</code></td></tr>'
    )


def pictures(records: Sequence[Record]) -> dict[str, str]:
    """Perplexities while training, and at the end against size."""
    from experiments.tasks.source_code.task import TASK

    metric, series = TASK.metrics[0], []
    for record, look in zip(records, look_of(records), strict=True):
        stages, values = zip(*((one["step"], one["val_perplexity"]) for one in record["epochs"]), strict=True)
        point = Point(record["ratio"], record["val_perplexity"], name=shown(record["row"]))
        series.append(Series(shown(record["row"]), look, [point], stages, values))
    full, *smaller = series
    return {
        "curves": curve_picture("curves", metric, TASK.stage, series, series),
        "sizes": size_picture("sizes", metric, "validation", full, smaller),
    }
