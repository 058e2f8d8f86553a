"""``python -m tensorbed``, and the command ``tensorbed``."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from tensorbed.cli import app
    except KeyboardInterrupt:  # while torch is imported; later the command itself says so
        sys.stderr.write("tensorbed: interrupted.\n")
        sys.exit(130)
    except ModuleNotFoundError as error:
        # Anything else that is missing is a fault to be seen.
        if error.name != "typer":
            raise
        sys.exit('the command tensorbed needs typer; install it with: pip install "tensorbed[cli]"')
    app(prog_name="tensorbed")


if __name__ == "__main__":
    main()
