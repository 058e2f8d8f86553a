"""``python -m tensorbed``, and the command ``tensorbed``."""

import json
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
    if arguments not in (["info"], ["info", "--json"]):
        return 'the command tensorbed needs typer and rich for all but info: pip install "typer>=0.15" "rich>=13"'
    from tensorbed.info import info

    facts = info()
    sys.stdout.write(f"{json.dumps(facts.as_dict(), indent=2) if '--json' in arguments else facts}\n")
    return None


if __name__ == "__main__":
    main()
