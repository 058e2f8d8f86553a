"""Why the command does not go on."""

from __future__ import annotations


class RefusalError(Exception):
    """One sentence for whoever called the command, which then ends with exit code 2."""
