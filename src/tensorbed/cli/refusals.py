"""What goes wrong with a command: one line on standard error, and an exit code."""

from __future__ import annotations

import errno
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from tensorbed.cli import terminal

INTERRUPTED = 130  # what shells have for a command that Ctrl-C has ended
# typer brings click's exceptions from a copy of its own in some versions: their parent is found at its child.
_WrongUsage: Any = typer.BadParameter.__mro__[1]
# What systems say of a disk that is full, or broken, and of a file that is as large as it may be.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# What the library, torch and the system raise over what they were given; anything else is a fault to be seen.
_REFUSALS = (ArithmeticError, MemoryError, OSError, RuntimeError, TypeError, ValueError)


def _said(error: BaseException) -> str:
    # What is written to files is said with the name of the file; without one it was standard output.
    if isinstance(error, OSError) and error.errno in _NOT_WRITTEN and error.filename is None:
        return f"standard output cannot be written: {error.strerror}"
    return terminal.in_its_words(str(error)) or type(error).__name__


class OneLineErrors(TyperGroup):
    """Wrong usage ends with exit code 2, what is refused with 1, Ctrl-C with 130, and each with a line that says so."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            terminal.complain("tensorbed: interrupted; nothing half-written is left behind.")
            raise typer.Exit(INTERRUPTED) from None

    def main(self, *args: Any, **options: Any) -> Any:
        alone = options.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except _WrongUsage as error:
            path = error.ctx.command_path if error.ctx else "tensorbed"
            if said := error.format_message():  # without arguments it was the help, shown by now
                terminal.complain(f"{path}: {said} (see {path} --help)")
            code = error.exit_code
        except _REFUSALS as error:
            terminal.complain(f"tensorbed: {_said(error)}")
            code = 1
        except SystemExit as error:
            # typer and rich end in silence where nobody reads any more.
            if isinstance(error.__context__, BrokenPipeError):
                terminal.complain("tensorbed: the output was closed before all of it was read.")
            code = error.code
        if alone:
            sys.exit(code)
        return code
