"""Settings as options of the command line: their names, types and help texts, from the fields themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any

import typer

from experiments.lab.settings import Settings, hints


def with_settings(
    function: Callable[..., None], settings: type[Settings], names: Iterable[str] | None = None, **helps: str
) -> Callable[..., None]:
    """A function of ``(options, *, ...)`` for typer: with an option for each setting, or for those that are named."""
    told: dict[str, Any] = {}
    for each in fields(settings):
        if each.metadata and (names is None or each.name in names):  # names and shapes stand in files
            help = helps.get(each.name, each.metadata["help"])
            named = f"--{each.name.replace('_', '-')}"  # no --no- beside a flag
            kind = hints(settings)[each.name] | None
            told[each.name] = Annotated[kind, typer.Option(named, help=help, hidden=help is None)]

    def command(**given: Any) -> None:
        function({name: given.pop(name) for name in told}, **given)

    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    by_name = inspect.Parameter.KEYWORD_ONLY
    every = [inspect.Parameter(name, by_name, default=None, annotation=kind) for name, kind in told.items()]
    command.__signature__ = inspect.Signature([*every, *own])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*every, *own]}
    command.__doc__ = function.__doc__
    return command
