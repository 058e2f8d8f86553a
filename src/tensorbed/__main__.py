"""``python -m tensorbed``, and the command ``tensorbed``."""

import json
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from tensorbed.cli.commands import app
    except KeyboardInterrupt:  # while torch is imported; later the command itself says so
        sys.stderr.write("tensorbed: interrupted.\n")
        sys.exit(130)
    except ModuleNotFoundError as error:
        # Anything else that is missing is a fault to be seen.
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(_without_typer(sys.argv[1:]))
    app(prog_name="tensorbed")


def _without_typer(arguments: list[str]) -> str | None:
    """What a base install can tell of itself; for all else, how to install what is missing."""
    if arguments not in (["--version"], ["info"], ["info", "--json"]):
        needed = 'pip install "typer>=0.15" "rich>=13"'
        return f"the command tensorbed needs typer and rich for all but info and --version: {needed}"
    from tensorbed._version import __version__
    from tensorbed.info import info

    known = f"tensorbed {__version__}" if arguments == ["--version"] else str(info())
    if "--json" in arguments:
        known = json.dumps(info().as_dict(), indent=2)
    try:
        sys.stdout.write(f"{known}\n")
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python tries again at its end
        return f"tensorbed: standard output cannot be written: {error.strerror}"
    return None


if __name__ == "__main__":
    main()
