"""What commands have found, in tables for people, and all else that they say; what goes wrong, in a line.

Everything goes through :func:`say` or the console here, which show what a file has put into a name or a message and
never obey it: no control characters, and no markup.
"""

import errno
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from tensorbed.compress.report import megabytes
from tensorbed.printable import printable, shortened

_WIDE = 200  # columns where nobody looks: a file or a pipe
_NARROW = 18  # of what is broken between words, however narrow the terminal is
_LONG = 2000  # characters of one line of a message; names in files may have a million
# typer brings click's exceptions from a copy of its own in some versions: their parent is found at its child.
_WrongUsage: Any = typer.BadParameter.__mro__[1]
# What systems say of a disk that is full, or broken, and of a file that is as large as it may be.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# What the library, torch and the system raise over what they were given; anything else is a fault to be seen.
_REFUSALS = (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def say(*lines: str) -> None:
    """Lines on standard output, each of them one whatever is in it."""
    typer.echo("\n".join(map(printable, lines)))


def complain(message: str) -> None:
    """One line on standard error, whatever the message is; nowhere, if that was closed or its disk is full."""
    with suppress(OSError):
        typer.echo(shortened(" ".join(message.split()), _LONG), err=True)


# The library speaks of arguments, and of names in Python.
_WORDS = (
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


def in_its_words(message: str) -> str:
    """A message of the library with the options of the command in place of arguments."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message


class OneLineErrors(TyperGroup):
    """Wrong usage ends with exit code 2, what is refused with 1, Ctrl-C with 130, and each with a line that says so."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            complain("tensorbed: interrupted; nothing half-written is left behind.")
            raise typer.Exit(130) from None  # what shells have for it

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except _WrongUsage as error:
            path = error.ctx.command_path if error.ctx else "tensorbed"
            if said := error.format_message():  # without arguments it was the help, shown by now
                complain(f"{path}: {said} (see {path} --help)")
            code = error.exit_code
        except _REFUSALS as error:
            said = in_its_words(str(error)) or type(error).__name__
            # What is written to files is said with the name of the file; without one it was standard output.
            if isinstance(error, OSError) and error.errno in _NOT_WRITTEN and error.filename is None:
                said = f"standard output cannot be written: {error.strerror}"
            complain(f"tensorbed: {said}")
            code = 1
        except SystemExit as error:
            # typer and rich end in silence where nobody reads any more.
            if isinstance(error.__context__, BrokenPipeError):
                complain("tensorbed: the output was closed before all of it was read.")
            code = error.code
        if alone:
            sys.exit(code)
        return code


class _Console(Console):
    """Strings are shown as they are."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else _WIDE
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=False, width=width)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def table(self, sides: str, *rows: Sequence[str], wraps: str = "", bold: int = 0) -> None:
        """Rows of cells under a head, each column to its side, ``<`` or ``>``; the first has names, which never break.

        Where a table is wider than the terminal names have lines of their own, and the column that is called ``wraps``
        is broken between words. The head is ``bold``, and one more row may be.
        """
        cells = [[printable(cell) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
        apart = sum(widths) + 2 * len(widths) > self.width + 2
        if apart and wraps:
            place = rows[0].index(wraps)
            others = sum(widths[1:]) - widths[place] + 2 * len(widths)
            widths[place] = max(_NARROW, min(widths[place], self.width - others))
        for number, row in enumerate(cells):
            lines = _under(row[0], _lines(row[1:], sides[1:], widths[1:])) if apart else _lines(row, sides, widths)
            for line in lines:
                self.print(line, style="bold" if number in (0, bold % len(rows)) else None, soft_wrap=True)


def _lines(cells: Sequence[str], sides: str, widths: Sequence[int]) -> list[str]:
    """Of one row."""
    parts = [
        [cell] if cell_len(cell) <= width else wrap(cell, width, break_long_words=False, break_on_hyphens=False)
        for cell, width in zip(cells, widths, strict=True)
    ]
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
    console = _Console()
    console.table("<<<>>>", *plan.cells(), wraps="format", bold=-1)
    _show_notes(console, (*plan.notes, *more_notes))


def show_inspection(inspection: Any) -> None:
    """An :class:`Inspection`."""
    console, rows = _Console(), [("layer", "is", "MB", "ratio", "std", "spectrum")]
    for one in inspection.layers:
        numbers = (megabytes(one.bytes), f"{one.ratio:,.1f}", f"{one.std:.3g}", one.bars)
        rows.append((one.name or "(alone)", f"{one.layer}, {one.kind} {one.sizes}", *numbers))
    console.table("<<>>><", *rows, wraps="is")
    for remark in inspection.remarks():
        console.print(remark)
    _show_notes(console, inspection.notes)


def _show_notes(console: Console, notes: Iterable[str]) -> None:
    """Each in one line, however long: some have a command to be copied."""
    for note in notes:
        console.print(f"note: {in_its_words(note)}", style="yellow", soft_wrap=True)


def show_compressed(done: Any) -> None:
    """A :class:`CompressedFolder`, and what to do next."""
    report, console = done.report, _Console()
    rows = [("table", "size", "format", "MB before", "after", "ratio", "fit error")]
    if done.unpacked is not None:
        rows.append(("unpacked from GGUF", "", done.dtype, *_sizes(done.disk_before, done.unpacked), ""))
    rows += [(*cells[:3], *cells[5:]) for cells in (entry.cells() for entry in report.entries)]  # but for numbers
    rows.append(("whole model", "", "", *_sizes(report.bytes_before, report.bytes_after), ""))
    rows.append(("weights on disk", "", "", *_sizes(done.disk_before, done.disk_after), ""))
    console.table("<<<>>>>", *rows, wraps="format", bold=-2)
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
    console, perplexity = _Console(), found.perplexity
    cut = f", {found.cut} of them cut" if found.cut else ""
    console.print(f"{found.texts:,} texts{cut}, {found.tokens:,} tokens")
    cosines = (f"cosine of {found.outputs}", f"{found.mean_cosine:.5f}", f"{found.worst_cosine:.5f}")
    console.table("<>>", ("", "mean", "worst"), cosines)
    console.print(f"worst: {found.worst_text[:100]}", style="dim")
    if perplexity is not None:
        console.print()
        numbers = (f"{perplexity.before:,.3f}", f"{perplexity.after:,.3f}", f"{perplexity.ratio:.4f}")
        name = f"perplexity over {perplexity.tokens:,} tokens"
        console.table("<>>>", ("", "before", "after", "ratio"), (name, *numbers))
    _show_notes(console, found.notes)


def _sizes(before: int, after: int) -> tuple[str, str, str]:
    return megabytes(before), megabytes(after), f"{before / max(1, after):,.2f}"
