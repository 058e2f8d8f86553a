"""What can be wrong with what was given, said without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import Any


class ExperimentError(Exception):
    """Wrong input or a run that cannot go on; the message says what was given, what is allowed and what to do."""


class Stopped(ExperimentError):  # noqa: N818 - nothing is wrong
    """Somebody asked a run to stop, and it did."""


class Diverged(ExperimentError):  # noqa: N818 - as above
    """A loss or a gradient that is no number."""


def plain(text: str) -> str:
    """For a terminal, which obeys no file: control characters as they would be written in a program."""
    return "".join(sign if sign.isprintable() or sign == "\n" else ascii(sign)[1:-1] for sign in text)


def unknown(kind: str, given: str, known: Iterable[str], where: str = "") -> ExperimentError:
    """An error for a name that is not known, with the nearest one that is."""
    names = sorted(known)
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(given.lower(), list(folded), n=1, cutoff=0.5)
    hint = f'did you mean "{folded[near[0]]}"? ' if near else ""
    return ExperimentError(f'{where}unknown {kind} "{given}": {hint}known: {", ".join(names)}.')


def needed(module: str, what: str) -> Any:
    """A module of a package that only some of the laboratory needs; an error says how to get what is missing."""
    try:
        return import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise ExperimentError(f"{what} needs the package {package}: pip install '.[experiments]'.") from None
