"""What is done besides training: raw rows turned into numbers once for all runs, such rows
from random numbers, and raw rows scored.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.files import writable_folder
from experiments.tasks.click_through.criteo import BINS


def prepare(
    raw: Annotated[str, typer.Argument(help="Criteo's raw rows: a file, gzip too, or a glob in quotes")],
    out: Annotated[Path, typer.Argument(help="folder to write, which is not there yet; to be given as --data")],
    on_bad_row: Annotated[str, typer.Option(help="error refuses it, skip leaves it out")] = "error",
    bins: Annotated[str, typer.Option(help="of numbers: squared-log or none")] = BINS[0],
    least: Annotated[int, typer.Option(min=1, help="sightings in training of a value with a row of its own")] = 2,
    modulo: Annotated[int | None, typer.Option(min=1, help="hash the numbers, such as 100000")] = None,
    validation: Annotated[float, typer.Option(help="share of the rows, after training's")] = 0.1,
    test: Annotated[float, typer.Option(help="share of the rows, the last ones")] = 0.1,
    time: Annotated[
        bool, typer.Option("--time", help="rows end with a time, one field more, and are split by it")
    ] = False,
    memory: Annotated[str, typer.Option(help="of the engine; what is beyond is spilled to disk")] = "3GB",
    engine: Annotated[str, typer.Option(help="duckdb, or spark for data beyond one machine")] = "duckdb",
) -> None:
    """Number the values of all features by frequency and write rows of numbers, split in order of time."""
    if on_bad_row not in ("error", "skip"):
        raise unknown("--on-bad-row", on_bad_row, ("error", "skip"))
    if bins not in BINS:
        raise unknown("--bins", bins, BINS)
    try:
        from experiments.tasks.click_through.engines import ENGINES
        from experiments.tasks.click_through.prepare import Preparation
    except ImportError as error:
        needs = "preparation needs the packages ibis-framework, duckdb and pyarrow: pip install '.[experiments]'"
        raise ExperimentError(f"{needs} ({error}).") from None
    if engine not in ENGINES:
        raise unknown("--engine", engine, ENGINES)
    options: dict[str, Any] = {"skips_bad_rows": on_bad_row == "skip", "memory": memory, "engine": engine, "time": time}
    written = Preparation(raw, out, bins, least, modulo, (validation, test), **options).run()
    rows = ", ".join(f"{count:,} for {split}" for split, count in written.rows.items())
    typer.echo(f"{out}: {rows}; {len(written.tables)} tables of {sum(written.tables.values()):,} rows in all")


def generate(
    out: Annotated[Path, typer.Argument(help="file of raw rows to write, to be given to prepare")],
    rows: Annotated[int, typer.Option(min=1)] = 1_000_000,
    values: Annotated[int | None, typer.Option(min=1, help="of each category; left out, as Criteo has them")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write raw rows of Criteo's shape from random numbers: Zipf's law, clicks by a planted model."""
    from experiments.tasks.click_through.synthetic import MOST_VALUES, Synthetic, write_raw

    if values is not None and values > MOST_VALUES:
        told = f"--values {values:,}: at most {MOST_VALUES:,} values of each category have texts of their own"
        raise ExperimentError(f"{told}, which are of eight hexadecimal digits.")
    writable_folder(out.absolute().parent, "OUT")
    if out.exists():
        raise ExperimentError(f"{out} is there already; give another file, or remove it first.")
    write_raw(out, rows, seed, Synthetic.of_size(values))
    typer.echo(f"{out}: {rows:,} rows")


def score(
    checkpoint: Annotated[Path, typer.Option(help="a model, or its folder, that a run with --keep-model left")],
    data: Annotated[Path, typer.Option(help="the folder that prepare wrote for its run; *.parquet may be gone")],
    batch: Annotated[int, typer.Option(min=1, help="rows that are scored together, at most")] = 4096,
) -> None:
    """Score raw rows from standard input, all with a label or all without: the probability of a click, a line each."""
    from experiments.tasks.click_through.scoring import Scorer, blocks_of_lines, has_label

    scorer = Scorer(checkpoint, data)
    number, labelled = 0, True
    for lines in blocks_of_lines(sys.stdin.fileno()):
        labelled = labelled if number else has_label(lines[0])
        for start in range(0, len(lines), batch):
            part = lines[start : start + batch]
            probabilities = scorer.scores(part, number + 1, labelled)
            number += len(part)
            typer.echo("\n".join(f"{probability:.6f}" for probability in probabilities))
