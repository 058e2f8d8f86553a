"""What commands have found, in tables for people, and all else that they say.

Everything goes through :func:`say` or the console here, which show what a file has put into a name or a message and
never obey it: no control characters, and no markup.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tensorbed.printable import printable, shortened

_WIDE = 200  # columns where nobody looks: a file or a pipe
_NARROW = 18  # of what is broken between words, however narrow the terminal is
_LONG = 2000  # characters of one line of a message; names in files may have a million


def say(*lines: str) -> None:
    """Lines on standard output, each of them one whatever is in it."""
    typer.echo("\n".join(map(printable, lines)))


def complain(message: str) -> None:
    """One line on standard error, whatever the message is; nowhere, if that was closed or its disk is full."""
    with suppress(OSError):
        typer.echo(shortened(" ".join(message.split()), _LONG), err=True)


# The library speaks of arguments, and of names in Python.
_WORDS = tuple(
    (re.compile(pattern), words)
    for pattern, words in (
        (r"(--[a-z-]+) \(\w+(?:=\w+)?\)", r"\1"),  # says both
        (r'\bskip=\["([^"]*)"\]', r"--skip \1"),
        (r"\bskip=(?!\w)", "--skip"),
        (r'\btied="untie"', "--untie"),
        (r"\binclude_heads=False", "--no-heads"),
        (r"\bmin_rows=(?=\d)", "--min-rows "),
        (r"\bmin_rows\b", "--min-rows"),
        (r"; if it is a head, name it in a pattern", ""),
        (r", or give formats= that are smaller", ""),
        (r"\btb\.QuantizedRows\b", "--format int4"),
    )
)


def in_its_words(message: str) -> str:
    """A message of the library with the options of the command in place of arguments."""
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message


class _Console(Console):
    """Strings are shown as they are."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)


def _console() -> Console:
    width = None if sys.stdout.isatty() else _WIDE
    return _Console(markup=False, emoji=False, highlight=False, soft_wrap=False, width=width)


@dataclass
class _Table:
    """Rows of cells under a head, each column to its side, ``<`` or ``>``; the first has names.

    A name is never broken. Where a table is wider than the terminal names have lines of their own, and the column that
    is called ``wraps`` is broken between words.
    """

    head: Sequence[str]
    sides: str
    wraps: str = ""
    rows: list[tuple[Sequence[str], str]] = field(default_factory=list)  # and their style

    def add(self, *cells: str, style: str = "") -> None:
        self.rows.append((cells, style))

    def show(self, console: Console) -> None:
        rows = [([printable(cell) for cell in cells], style) for cells, style in [(self.head, "bold"), *self.rows]]
        columns = list(zip(*(cells for cells, _ in rows), strict=True))
        widths = [max(map(cell_len, column)) for column in columns]
        apart = sum(widths) + 2 * len(widths) > console.width + 2
        if apart and self.wraps:
            place = self.head.index(self.wraps)
            others = sum(widths[1:]) - widths[place] + 2 * len(widths)
            widths[place] = max(_NARROW, min(widths[place], console.width - others))
        for cells, style in rows:
            lines = self._lines(cells, widths) if not apart else _under(cells[0], self._lines(cells[1:], widths[1:]))
            for line in lines:
                console.print(line, style=style or None, soft_wrap=True)

    def _lines(self, cells: Sequence[str], widths: Sequence[int]) -> list[str]:
        """Of the last columns."""
        parts = [
            [cell] if cell_len(cell) <= width else wrap(cell, width, break_long_words=False, break_on_hyphens=False)
            for cell, width in zip(cells, widths, strict=True)
        ]
        sides = self.sides[-len(cells) :]
        return ["  ".join(map(_padded, line, sides, widths)).rstrip() for line in zip_longest(*parts, fillvalue="")]


def _under(name: str, lines: Sequence[str]) -> list[str]:
    """A name and what belongs to it, in the same line where that begins with room enough."""
    first, *more = [f"  {line}" for line in lines]
    end = cell_len(name)
    return [name + first[end:], *more] if first[: end + 2].isspace() else [name, first, *more]


def _padded(cell: str, side: str, width: int) -> str:
    room = " " * (width - cell_len(cell))
    return cell + room if side == "<" else room + cell


def show_plan(plan: Any, more_notes: Sequence[str]) -> None:
    """A :class:`Plan`."""
    console = _console()
    head, *rows, total = plan.cells()
    table = _Table(head, "<<<>>>", wraps="format")
    for row in rows:
        table.add(*row)
    table.add(*total, style="bold")
    table.show(console)
    _show_notes(console, (*plan.notes, *more_notes))


def show_inspection(inspection: Any) -> None:
    """An :class:`Inspection`."""
    console = _console()
    table = _Table(("layer", "is", "MB", "ratio", "std", "spectrum"), "<<>>><", wraps="is")
    for one in inspection.layers:
        numbers = (f"{one.ratio:,.1f}", f"{one.std:.3g}", one.bars)
        table.add(one.name or "(alone)", f"{one.layer}, {one.kind} {one.sizes}", _megabytes(one.bytes), *numbers)
    table.show(console)
    for remark in inspection.remarks():
        console.print(remark)
    _show_notes(console, inspection.notes)


def _show_notes(console: Console, notes: Iterable[str]) -> None:
    """Each in one line, however long: some have a command to be copied."""
    for note in notes:
        console.print(f"note: {in_its_words(note)}", style="yellow", soft_wrap=True)


def show_compressed(done: Any) -> None:
    """A :class:`CompressedFolder`, and what to do next."""
    report, console = done.report, _console()
    table = _Table(("table", "size", "format", "MB before", "after", "ratio", "fit error"), "<<<>>>>", wraps="format")
    if done.unpacked is not None:
        sizes = (_megabytes(done.disk_before), _megabytes(done.unpacked), _times(done.disk_before, done.unpacked), "")
        table.add("unpacked from GGUF", "", done.dtype, *sizes)
    for e in report.entries:
        error = "-" if e.error is None else f"{e.error:.3f}"
        sizes = (_megabytes(e.bytes_before), _megabytes(e.bytes_after), f"{e.ratio:,.1f}", error)
        table.add(" = ".join(e.names), f"{e.rows:,} x {e.cols:,}", e.format, *sizes)
    sizes = (_megabytes(report.bytes_before), _megabytes(report.bytes_after), f"{report.ratio:,.2f}", "")
    table.add("whole model", "", "", *sizes, style="bold")
    sizes = (_megabytes(done.disk_before), _megabytes(done.disk_after), _times(done.disk_before, done.disk_after), "")
    table.add("weights on disk", "", "", *sizes)
    table.show(console)
    for name, reason in report.left.items():
        console.print(f"left as it was: {name}, {in_its_words(reason)}", style="dim")
    out, source = shlex.quote(str(done.out)), shlex.quote(str(done.source))
    console.print()
    console.print(f"written to {out}; compare it on texts of yours, one a line:")
    console.print(f"  tensorbed verify {out} --against {source} --texts texts.txt", soft_wrap=True)
    # Last, where they are seen.
    for warning in report.warnings:
        console.print(f"warning: {in_its_words(warning)}", style="bold yellow", soft_wrap=True)
    _show_notes(console, (*report.notes, *done.notes))


def show_verified(found: Any) -> None:
    """A :class:`Verification`."""
    console, perplexity = _console(), found.perplexity
    cut = f", {found.cut} of them cut" if found.cut else ""
    console.print(f"{found.texts:,} texts{cut}, {found.tokens:,} tokens")
    table = _Table(("", "mean", "worst"), "<>>")
    table.add(f"cosine of {found.outputs}", f"{found.mean_cosine:.5f}", f"{found.worst_cosine:.5f}")
    table.show(console)
    console.print(f"worst: {found.worst_text[:100]}", style="dim")
    if perplexity is not None:
        console.print()
        table = _Table(("", "before", "after", "ratio"), "<>>>")
        numbers = (f"{perplexity.before:,.3f}", f"{perplexity.after:,.3f}", f"{perplexity.ratio:.4f}")
        table.add(f"perplexity over {perplexity.tokens:,} tokens", *numbers)
        table.show(console)
    _show_notes(console, found.notes)


def _times(before: int, after: int) -> str:
    return f"{before / max(1, after):,.2f}"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
