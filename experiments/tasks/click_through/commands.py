"""What is done besides training: raw rows turned into numbers once for all runs, and raw rows scored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.lab.errors import ExperimentError, unknown
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
    memory: Annotated[str, typer.Option(help="of DuckDB; what is beyond is spilled to disk")] = "3GB",
) -> None:
    """Number the values of all features by frequency and write rows of numbers, split in order of time."""
    if on_bad_row not in ("error", "skip"):
        raise unknown("--on-bad-row", on_bad_row, ("error", "skip"))
    if bins not in BINS:
        raise unknown("--bins", bins, BINS)
    try:
        from experiments.tasks.click_through.prepare import Preparation
    except ImportError as error:
        needs = "preparation needs the packages ibis-framework, duckdb and pyarrow: pip install '.[experiments]'"
        raise ExperimentError(f"{needs} ({error}).") from None
    written = Preparation(
        raw, out, bins, least, modulo, (validation, test), skips_bad_rows=on_bad_row == "skip", memory=memory
    ).run()
    rows = ", ".join(f"{count:,} for {split}" for split, count in written.rows.items())
    typer.echo(f"{out}: {rows}; {len(written.tables)} tables of {sum(written.tables.values()):,} rows in all")


def score(
    checkpoint: Annotated[Path, typer.Option(help="a model, or its folder, that a run with --keep-model left")],
    data: Annotated[Path, typer.Option(help="the folder that prepare wrote for its run")],
    batch: Annotated[int, typer.Option(min=1, help="rows that are scored together, at most")] = 4096,
) -> None:
    """Score raw rows from standard input, with a label or without: the probability of a click, a line each."""
    from experiments.tasks.click_through.scoring import Scorer, blocks_of_lines, checked_row

    scorer = Scorer(checkpoint, data)
    number = 0
    for lines in blocks_of_lines(sys.stdin.fileno()):
        for start in range(0, len(lines), batch):
            part = lines[start : start + batch]
            rows = [checked_row(line, number + place) for place, line in enumerate(part, 1)]
            number += len(part)
            typer.echo("\n".join(f"{probability:.6f}" for probability in scorer.scores(rows)))
