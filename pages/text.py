"""Text in the tables of Markdown pages."""

from __future__ import annotations


def unbroken(text: str) -> str:
    """The text on one line: a narrow screen breaks cells at their spaces, and a row becomes many lines high."""
    return text.replace(" ", "\u00a0")
