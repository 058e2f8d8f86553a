"""The command ``tensorbed``. It needs typer, which ``tensorbed[cli]`` brings; the library does not.

Results go to standard output, what went wrong to standard error. Exit codes: 0 done, 1 refused with the reason, 2 wrong
usage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tensorbed.info import info as collect
from tensorbed.inspection import inspect as look_into
from tensorbed.planning import plan as make_plan

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)

AsJson = Annotated[bool, typer.Option("--json", help="As JSON, for programs.")]


@app.callback()
def main() -> None:
    """Embedding tables as tensor trains, tensor rings and other structured matrices, for PyTorch."""


@app.command()
def info(as_json: AsJson = False) -> None:
    """Versions, threads, and whether the compiled kernels are in use."""
    facts = collect()
    typer.echo(json.dumps(facts.as_dict(), indent=2) if as_json else str(facts))


@app.command()
def plan(
    sizes: Annotated[list[str], typer.Argument(metavar="ROWSxDIM...", help="Tables, for instance 267735x512.")],
    ratio: Annotated[float | None, typer.Option(help="How many times smaller all tables together shall be.")] = None,
    budget: Annotated[str | None, typer.Option(help="Or what they may take: 20MB, 512KiB.")] = None,
    as_json: AsJson = False,
) -> None:
    """Formats for tables that will be trained from scratch, under a ratio or a budget."""
    with _reported():
        found = make_plan(dict(map(_table, sizes)), ratio=ratio, budget=budget, purpose="train")
    _show(found, as_json)


def _table(text: str) -> tuple[str, tuple[int, int]]:
    match = re.fullmatch(r"(\d+)[x*](\d+)", text.lower())
    if match is None:
        raise ValueError(f"{text!r} is not a table; give rows and columns as ROWSxDIM, for instance 267735x512.")
    return text, (int(match[1]), int(match[2]))


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A file of tensorbed.save.")],
    as_json: AsJson = False,
) -> None:
    """What is in a file: layers, sizes, the scale of their tables and their spectrum."""
    with _reported():
        found = look_into(file)
    _show(found, as_json)


def _show(found: Any, as_json: bool) -> None:
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


@contextmanager
def _reported() -> Iterator[None]:
    """What the library refuses, as one line and exit code 1."""
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"tensorbed: {error}", err=True)
        raise typer.Exit(1) from None
