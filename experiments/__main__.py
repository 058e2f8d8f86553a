"""``python -m experiments``: the paper's tasks, one command each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.lab.errors import ExperimentError, Stopped, unknown
from experiments.lab.processes import first_process
from experiments.lab.records import RESULTS

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
OUT = Path("out/experiments")

Data = Annotated[
    Path | None, typer.Option(help="folder that holds sst5/ and imdb/; left out, the originals are fetched")
]
Out = Annotated[Path, typer.Option(help="checkpoints, logs")]
Results = Annotated[Path | None, typer.Option(help="where result lines are added; docs/results, with --smoke --out")]


@app.command()
def sentiment(
    config: Annotated[str | None, typer.Option(help="a row, such as sst5-tt1, or a TOML file")] = None,
    dataset: Annotated[str | None, typer.Option(help="sst5 or imdb")] = None,
    format: Annotated[str | None, typer.Option(help="full, lr, tt or tr")] = None,
    rank: Annotated[int | None, typer.Option(help="of the table")] = None,
    lr: Annotated[float | None, typer.Option(help="learning rate; left out, what the search found")] = None,
    std: Annotated[float | None, typer.Option(help="of the drawn table; left out, what the search found")] = None,
    dropout: Annotated[float | None, typer.Option()] = None,
    epochs: Annotated[int | None, typer.Option(help="at most")] = None,
    batch: Annotated[int | None, typer.Option(help="texts in a batch")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16")] = None,
    phrases: Annotated[bool | None, typer.Option("--phrases", help="train on all phrases of SST-5")] = None,
    seed: Annotated[int | None, typer.Option(help="left out, the row's own, or 0")] = None,
    data: Data = None,
    out: Out = OUT,
    results: Results = None,
    smoke: Annotated[bool, typer.Option(help="a tiny slice, in seconds")] = False,
    search: Annotated[bool, typer.Option(help="a point of the grid: short, validation only")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="go on from the checkpoint in --out")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="begin anew where there is a checkpoint")] = False,
    resume_if_possible: Annotated[bool, typer.Option(hidden=True)] = False,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1)] = None,
    checkpoint_minutes: Annotated[float, typer.Option(min=0)] = 5.0,
    accumulate: Annotated[int, typer.Option(min=1, help="pieces a batch is computed in")] = 1,
    fsdp: Annotated[bool, typer.Option(help="shard the model over processes (torchrun)")] = False,
    tensorboard: Annotated[bool, typer.Option(help="write logs below --out")] = False,
) -> None:
    """Train one row of the sentiment tables and add a line to its results."""
    from experiments.lab.run import run
    from experiments.lab.training import How

    options: dict[str, Any] = {
        "dataset": dataset, "format": format, "rank": rank, "lr": lr, "std": std, "dropout": dropout, "epochs": epochs,
        "batch": batch, "precision": precision, "phrases": phrases, "seed": seed,
    }  # fmt: skip
    how = How(data, out, resume, checkpoint_steps, checkpoint_minutes, accumulate, fsdp, tensorboard)
    when = {"restart": restart, "resume_if_possible": resume_if_possible}
    told = run(config, options, how, results, smoke=smoke, search=search, **when)
    if first_process():
        print(told)


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="sentiment")],
    table: Annotated[bool, typer.Option("--table", help="all rows of the paper's tables")] = False,
    data: Data = None,
    out: Out = OUT,
    results: Results = None,
    jobs: Annotated[int, typer.Option(min=1, help="runs side by side, the cores divided among them")] = 1,
    seeds: Annotated[int | None, typer.Option(min=1, help="only so many seeds of each row")] = None,
    smoke: Annotated[bool, typer.Option(help="tiny slices")] = False,
) -> None:
    """Run all rows that have no results yet; stopped and started again, it goes on."""
    from experiments.lab.sweep import Sweep

    if task != "sentiment":
        raise unknown("task", task, ["sentiment"])
    if not table:
        raise ExperimentError("say what to run: --table, all rows of the paper's tables.")
    where = results or (out if smoke else RESULTS)
    failed = Sweep(data and data.resolve(), out.resolve(), where.resolve(), jobs, smoke).run(seeds)
    if failed:
        raise ExperimentError(f"{len(failed)} runs failed: {', '.join(failed)}. Started again, the sweep retries them.")


@app.command()
def report(
    results: Annotated[Path, typer.Option(help="folder with the result lines; the report is written there")] = RESULTS,
) -> None:
    """Turn the result lines into the paper's tables, as Markdown and as one page with plots."""
    from experiments.lab.files import write_whole
    from experiments.lab.records import read
    from experiments.lab.report import html, markdown, summarise
    from experiments.tasks.sentiment import task

    source = results / task.RESULTS_FILE
    everything = read(source)
    lines = task.in_tables(everything, results)
    left_out = len(everything) - len(lines)
    others = f"; {left_out} lines are no runs of the tables as they are configured now" if left_out else ""
    if not lines:
        raise ExperimentError(
            f"{source} has no runs to report{others}; experiments sweep sentiment --table makes them."
        )
    summary = summarise(lines, task.grids(results), task.PAPER)
    texts = {"sentiment.md": markdown(summary), "sentiment.html": html(summary)}
    for name, text in texts.items():
        write_whole(results / name, text.encode())
    print(f"{' and '.join(str(results / name) for name in texts)}, from {len(lines)} runs{others}")


@app.command()
def speed(
    dataset: Annotated[str, typer.Option(help="sst5 or imdb")] = "imdb",
    rows: Annotated[str, typer.Option(help="rows beside the full table, with commas")] = "TT1,TT2,TT3",
    steps: Annotated[int, typer.Option(min=2)] = 20,
    data: Data = None,
) -> None:
    """Training speed of rows against the full table, in turns; tokens a second."""
    from experiments.lab.speed import speeds

    for found in speeds(dataset, rows.split(","), steps, data):
        figures = f"{found.per_second:>8,.0f} tokens/s  {found.per_processor_second:>8,.0f} a processor second"
        print(f"{found.row:<6}{figures}  {found.relative:.2f} of full")


def main() -> None:
    """Errors of the laboratory without a traceback: one sentence and exit code 2, or 130 for a run that was stopped."""
    try:
        code = app(standalone_mode=False)
        if code:  # typer gives it back for Ctrl-C, where the task did not see it
            sys.exit(_fail("stopped.", code))
    except Stopped as stop:
        sys.exit(_fail(str(stop), 130))
    except ExperimentError as error:
        sys.exit(_fail(f"error: {error}"))
    except typer.Exit as end:
        sys.exit(end.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(_fail("stopped.", 130))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_fail(f"error: {error.format_message()}"))


def _fail(text: str, code: int = 2) -> int:
    if first_process():
        print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
