"""The command ``tensorbed``. It needs typer, which ``tensorbed[cli]`` brings; the library does not."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from tensorbed.info import info as collect

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Embedding tables as tensor trains, tensor rings and other structured matrices, for PyTorch."""


@app.command()
def info(as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False) -> None:
    """Versions, threads, and whether the compiled kernels are in use."""
    facts = collect()
    typer.echo(json.dumps(facts.as_dict(), indent=2) if as_json else str(facts))
