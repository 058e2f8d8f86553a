"""A task, to train a row of it, or what is done with all rows of a task: ``python -m experiments``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.lab.errors import ExperimentError, Stopped, unknown
from experiments.lab.options import with_settings
from experiments.lab.processes import first_process
from experiments.lab.records import RESULTS
from experiments.lab.rows import datasets
from experiments.lab.search import Bench
from experiments.lab.task import Task, find, task_folders

OUT = Path("out/experiments")

Name = Annotated[str, typer.Argument(metavar="TASK", help="the name of its folder")]
Data = Annotated[Path | None, typer.Option(help="folder that holds the data; left out, what is public is taken")]
Out = Annotated[Path, typer.Option(help="checkpoints, logs")]
Results = Annotated[Path | None, typer.Option(help="where result lines are added; docs/results, with --smoke --out")]
Jobs = Annotated[int, typer.Option(min=1, help="runs side by side, the cores divided among them")]
Smoke = Annotated[bool, typer.Option("--smoke", help="tiny slices, in seconds")]


class Tasks(TyperGroup):
    """Every folder of a task is a command."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(name.replace("_", "-") for name in task_folders()), *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name.replace("-", "_") not in task_folders():
            raise unknown("task or command", cmd_name, self.list_commands(ctx))
        made = typer.main.get_command(commands_of(find(cmd_name)))
        made.name = cmd_name
        return made


app = typer.Typer(cls=Tasks, help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def commands_of(task: Task) -> typer.Typer:
    """Training a row, with the settings of the task for options, and what commands the task has of its own."""
    help = f"{task.texts['title']}: train one row and add a line to its results."
    group = typer.Typer(help=help, add_completion=False)
    train = with_settings(partial(train_row, task), task.settings, dataset=" or ".join(datasets(task)))
    group.callback(invoke_without_command=True, help=help)(train)
    for name, more in task.commands.items():
        group.command(name)(more)
    return group


def train_row(
    task: Task,
    options: dict[str, Any],
    *,
    ctx: typer.Context,
    config: Annotated[str | None, typer.Option(help="a row, such as dataset-full, or a TOML file")] = None,
    data: Data = None,
    out: Out = OUT,
    results: Results = None,
    smoke: Smoke = False,
    search: Annotated[bool, typer.Option("--search", help="a point of the grid: short, validation only")] = False,
    kind: Annotated[str, typer.Option(hidden=True)] = "",
    resume: Annotated[bool, typer.Option("--resume", help="go on from the checkpoint in --out")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="begin anew where there is a checkpoint")] = False,
    resume_if_possible: Annotated[bool, typer.Option(hidden=True)] = False,
    checkpoint_steps: Annotated[int | None, typer.Option(min=1)] = None,
    checkpoint_minutes: Annotated[float, typer.Option(min=0)] = 5.0,
    accumulate: Annotated[int, typer.Option(min=1, help="pieces a batch is computed in")] = 1,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="shard the model over processes (torchrun)")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write logs below --out")] = False,
    keep_model: Annotated[bool, typer.Option("--keep-model", help="leave the trained model in --out")] = False,
) -> None:
    """One run, and what came of it; nothing, where one of the task's own commands is asked for."""
    if ctx.invoked_subcommand is not None:
        return
    from experiments.lab.run import When, run
    from experiments.lab.training import How

    how = How(data, out, resume, checkpoint_steps, checkpoint_minutes, accumulate, fsdp, tensorboard, keep_model)
    when = When(restart, resume_if_possible, smoke, "search" if search else kind)
    told = run(task, config, options, how, results, when)
    if first_process():
        print(told)


def swept(task: Task, data: Path | None, out: Path, results: Path | None, jobs: int, smoke: bool) -> Any:
    """A sweep over the places that were given."""
    from experiments.lab.sweep import Sweep

    bench = Bench(task, (results or (out if smoke else RESULTS)).resolve())
    return Sweep(bench, data and data.resolve(), out.resolve(), jobs, smoke)


def check_failed(failed: list[str]) -> None:
    """Runs that failed are the command's failure."""
    if failed:
        raise ExperimentError(f"{len(failed)} runs failed: {', '.join(failed)}. The same command retries them.")


@app.command()
def sweep(
    task: Name,
    data: Data = None,
    out: Out = OUT,
    results: Results = None,
    jobs: Jobs = 1,
    seeds: Annotated[int | None, typer.Option(min=1, help="only so many seeds of each row")] = None,
    smoke: Smoke = False,
) -> None:
    """Run all rows of a task that have no results yet; stopped and started again, it goes on."""
    check_failed(swept(find(task), data, out, results, jobs, smoke).run(seeds))


@app.command()
def league(
    task: Name,
    budgets: Annotated[str | None, typer.Option(help="how many times smaller, with commas, such as 8,40")] = None,
    formats: Annotated[str | None, typer.Option(help="with commas; left out, all that can be trained")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="of each cell")] = None,
    data: Data = None,
    out: Out = OUT,
    results: Results = None,
    jobs: Jobs = 1,
    smoke: Smoke = False,
) -> None:
    """Run one task over formats at equal stored bytes; stopped and started again, it goes on."""
    from experiments.lab.league import league_of

    sweep = swept(find(task), data, out, results, jobs, smoke)
    check_failed(league_of(sweep.bench, formats, budgets, seeds).run(sweep))


@app.command()
def report(
    task: Annotated[str | None, typer.Argument(help="left out, every task that has results")] = None,
    results: Annotated[Path, typer.Option(help="folder with the result lines; the report is written there")] = RESULTS,
) -> None:
    """Turn result lines into tables, as Markdown and as one page with plots."""
    from experiments.lab.report import reports

    benches = [Bench(find(name), results) for name in ([task] if task else task_folders())]
    chosen = benches if task else [bench for bench in benches if bench.file().exists() or bench.file("league").exists()]
    if not chosen:
        raise ExperimentError(f"{results} has no runs to report; experiments sweep TASK makes them.")
    for bench in chosen:
        for told in reports(bench):
            print(told)


@app.command()
def speed(
    task: Name,
    dataset: Annotated[str | None, typer.Option(help="left out, the first one")] = None,
    rows: Annotated[str | None, typer.Option(help="the one to compare with first, with commas; left out, all")] = None,
    steps: Annotated[int, typer.Option(min=2)] = 20,
    data: Data = None,
) -> None:
    """Training speed of rows against the first one, in turns; tokens a second."""
    from experiments.lab.speed import speeds

    bench = Bench(find(task), RESULTS)
    chosen = dataset or datasets(bench.task)[0]
    known = dict.fromkeys(row for of, row, _ in bench.plan.runs if of == chosen and "-" not in row)
    names = [f"{chosen}-{row}" for row in (rows.split(",") if rows else known)]
    for found in speeds(bench.task, names, steps, data):
        items = bench.task.items
        figures = f"{found.per_second:>8,.0f} {items}/s  {found.per_processor_second:>8,.0f} a processor second"
        print(f"{found.row:<14}{figures}  {found.relative:.2f} of the first")


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
        told = error.format_message()
        sys.exit(_fail(f"error: {told}") if told else 2)  # without arguments the help was shown


def _fail(text: str, code: int = 2) -> int:
    if first_process():
        print(text, file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
