"""What commands have found, in tables for people, and all else that they say.

Everything goes through :func:`say` or the console here, which show what a file has put into a name or a message and
never obey it: no control characters, and no markup.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorbed.printable import printable, shortened

_WIDE = 200  # columns where nobody looks: a file or a pipe
_LONG = 2000  # characters of one line of a message; names in files may have a million


def say(*lines: str) -> None:
    """Lines on standard output, each of them one whatever is in it."""
    typer.echo("\n".join(map(printable, lines)))


def complain(message: str) -> None:
    """One line on standard error, whatever the message is."""
    typer.echo(shortened(" ".join(message.split()), _LONG), err=True)


class _Console(Console):
    """Strings are shown as they are."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return _Console(markup=False, emoji=False, highlight=False, soft_wrap=False, width=width)


def _table(head: Sequence[str], sides: str) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name, side in zip(head, sides, strict=True):
        made.add_column(name, justify="left" if side == "<" else "right", overflow="fold")
    return made


def show_compressed(done: Any) -> None:
    """A :class:`CompressedFolder`, and what to do next."""
    report, console = done.report, _console()
    table = _table(("table", "size", "format", "MB before", "after", "ratio", "fit error"), "<<<>>>>")
    for e in report.entries:
        error = "-" if e.error is None else f"{e.error:.3f}"
        sizes = (_megabytes(e.bytes_before), _megabytes(e.bytes_after), f"{e.ratio:,.1f}", error)
        table.add_row(" = ".join(e.names), f"{e.rows:,} x {e.cols:,}", e.format, *sizes)
    sizes = (_megabytes(report.bytes_before), _megabytes(report.bytes_after), f"{report.ratio:,.2f}", "")
    table.add_row("whole model", "", "", *sizes, style="bold")
    table.add_row(
        "weights on disk", "", "", _megabytes(done.disk_before), _megabytes(done.disk_after), _times(done), ""
    )
    console.print(table)
    for name, reason in report.left.items():
        console.print(f"left as it was: {name}, {reason}", style="dim")
    for note in (*report.notes, *done.notes):
        console.print(f"note: {note}", style="yellow")
    for warning in report.warnings:
        console.print(f"warning: {warning}", style="bold yellow")
    out, source = shlex.quote(str(done.out)), shlex.quote(str(done.source))
    console.print()
    console.print(f"written to {out}; compare it on texts of yours, one a line:")
    console.print(f"  tensorbed verify {out} --against {source} --texts texts.txt", soft_wrap=True)


def show_verified(found: Any) -> None:
    """A :class:`Verification`."""
    console, perplexity = _console(), found.perplexity
    cut = f", {found.cut} of them cut" if found.cut else ""
    console.print(f"{found.texts:,} texts{cut}, {found.tokens:,} tokens")
    table = _table(("", "mean", "worst"), "<>>")
    table.add_row(f"cosine of {found.outputs}", f"{found.mean_cosine:.5f}", f"{found.worst_cosine:.5f}")
    console.print(table)
    console.print(f"worst: {found.worst_text[:100]}", style="dim")
    if perplexity is not None:
        console.print()
        table = _table(("", "before", "after", "ratio"), "<>>>")
        numbers = (f"{perplexity.before:,.3f}", f"{perplexity.after:,.3f}", f"{perplexity.ratio:.4f}")
        table.add_row(f"perplexity over {perplexity.tokens:,} tokens", *numbers)
        console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", style="yellow")


def _times(done: Any) -> str:
    return f"{done.disk_before / max(1, done.disk_after):,.2f}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
