"""A task, to train a row of it, or what is done with all rows of a task: ``python -m experiments``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from experiments.lab.errors import ExperimentError, Stopped, plain, unknown
from experiments.lab.processes import first_process
from experiments.lab.records import RESULTS
from experiments.lab.rows import Bench, datasets
from experiments.lab.settings import How, with_options
from experiments.lab.sweep import Sweep
from experiments.lab.task import Task, find, task_folders

Name = Annotated[str, typer.Argument(metavar="TASK", help="the name of its folder")]


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
        command = typer.main.get_command(commands_of(find(cmd_name)))
        command.name = cmd_name
        return command


app = typer.Typer(cls=Tasks, help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def commands_of(task: Task) -> typer.Typer:
    """Training a row, with the settings of the task for options, and what commands the task has of its own."""
    help = f"{task.texts['title']}: train one row and add a line to its results."
    group = typer.Typer(help=help, add_completion=False)
    train = with_options(partial(train_row, task), task.settings, How, dataset=" or ".join(datasets(task)))
    group.callback(invoke_without_command=True, help=help)(train)
    for name, more in task.commands.items():
        group.command(name)(more)
    return group


def train_row(
    task: Task,
    options: dict[str, Any],
    how: dict[str, Any],
    *,
    ctx: typer.Context,
    config: Annotated[str | None, typer.Option(help="a row, such as dataset-full, or a TOML file")] = None,
) -> None:
    """One run, and what came of it; nothing, where one of the task's own commands is asked for."""
    if ctx.invoked_subcommand is not None:
        return
    from experiments.lab.training import run

    told = run(task, config, options, How(**how))
    if first_process():
        print(told)


def check_failed(failed: list[str]) -> None:
    """Runs that failed are the command's failure."""
    if failed:
        raise ExperimentError(f"{len(failed)} runs failed: {', '.join(failed)}. The same command retries them.")


def sweep(
    given: dict[str, Any],
    *,
    task: Name,
    seeds: Annotated[int | None, typer.Option(min=1, help="only so many seeds of each row")] = None,
) -> None:
    """Run all rows of a task that have no results yet; stopped and started again, it goes on."""
    check_failed(Sweep(find(task), **given).run(seeds))


def league(
    given: dict[str, Any],
    *,
    task: Name,
    budgets: Annotated[str | None, typer.Option(help="how many times smaller, with commas, such as 8,40")] = None,
    formats: Annotated[str | None, typer.Option(help="with commas; left out, all that can be trained")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="of the full table and the best of each budget")] = None,
) -> None:
    """Run one task over formats at equal stored bytes and report it; stopped and started again, it goes on."""
    from experiments.lab.league import league_of

    sweep = Sweep(find(task), **given)
    failed = league_of(sweep.bench, formats, budgets, seeds).run(sweep)
    if sweep.bench.recorded("league"):
        tell_reports(sweep.bench)
    check_failed(failed)


for command in (sweep, league):
    app.command(command.__name__)(with_options(command, Sweep))


@app.command()
def report(
    task: Annotated[str | None, typer.Argument(help="left out, every task that has results")] = None,
    results: Annotated[Path, typer.Option(help="folder with the result lines; the report is written there")] = RESULTS,
) -> None:
    """Turn result lines into tables, as Markdown and as one page with plots."""
    benches = [Bench(find(name), results) for name in ([task] if task else task_folders())]
    chosen = benches if task else [bench for bench in benches if bench.file().exists() or bench.file("league").exists()]
    if not chosen:
        raise ExperimentError(f"{results} has no runs to report; experiments sweep TASK makes them.")
    for bench in chosen:
        tell_reports(bench)


def tell_reports(bench: Bench) -> None:
    """Write them, and say where."""
    from experiments.lab.report.tables import reports

    for told in reports(bench):
        print(told)


@app.command()
def speed(
    task: Name,
    dataset: Annotated[str | None, typer.Option(help="left out, the first one")] = None,
    rows: Annotated[str | None, typer.Option(help="the one to compare with first, with commas; left out, all")] = None,
    steps: Annotated[int, typer.Option(min=2)] = 20,
    data: Annotated[Path | None, typer.Option(help="folder that holds the data")] = None,
) -> None:
    """Training speed of rows against the first one, in turns; tokens a second."""
    from experiments.lab.speed import speeds

    bench = Bench(find(task), RESULTS)
    chosen = dataset or datasets(bench.task)[0]
    known = dict.fromkeys(row for of, row, _ in bench.plan.runs if of == chosen and "-" not in row)
    names = [f"{chosen}-{row}" for row in (rows.split(",") if rows else known)]
    for row, per_second, per_processor_second, relative in speeds(bench.task, names, steps, data):
        figures = f"{per_second:>8,.0f} {bench.task.items}/s  {per_processor_second:>8,.0f} a processor second"
        print(f"{row:<14}{figures}  {relative:.2f} of the first")


def main() -> None:
    """Errors of the laboratory without a traceback: one sentence and exit code 2, or 130 for a run that was stopped."""
    try:
        code = app(standalone_mode=False)
        told = "stopped." if code else ""  # typer gives it back for Ctrl-C, where the task did not see it
    except ExperimentError as error:
        code, told = (130, str(error)) if isinstance(error, Stopped) else (2, f"error: {error}")
    except (typer.Abort, KeyboardInterrupt):
        code, told = 130, "stopped."
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        said = error.format_message()
        code, told = 2, said and f"error: {said}"  # without arguments the help was shown
    if told and first_process():
        print(plain(told), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
