"""Docstrings for the pages of the API reference, which are Markdown: what Sphinx would read is written as that."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:meth|class|func|attr|mod|math):`([^`]+)`")
_FORMULA = re.compile(r"^( *)\.\. math::[ \n]+(.+?)$", re.MULTILINE)
# Of LaTeX what formulas here have of it: dots, thin spaces, indices.
_PLAIN = ((r"\\c?dots", "..."), (r"\\,", ""), (r"[_^]\{\(?(\w+)\)?\}", r"_\1"), (r"\\(\w+)", r"\1"))
_EXAMPLE = re.compile(r"^( *)Example::\n\n((?:\1 {4}.*\n?|\n)+)", re.MULTILINE)


class MarkdownDocstrings(griffe.Extension):  # type: ignore[misc]
    """Names in backquotes, formulas as they stand, examples in fences."""

    def on_instance(self, *, obj: griffe.Object, **others: Any) -> None:
        """Called for everything that is read."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring of ours in Markdown."""
    text = _ROLE.sub(lambda name: f"`{_plain(name[1])}`", text)
    text = _FORMULA.sub(lambda formula: f"{formula[1]}    {_plain(formula[2])}", text)
    return _EXAMPLE.sub(_fenced, text)


def _plain(formula: str) -> str:
    for found, put in _PLAIN:
        formula = re.sub(found, put, formula)
    return formula


def _fenced(example: re.Match[str]) -> str:
    lines = [line[4:] for line in example[2].rstrip().split("\n")]
    return "\n".join([f"{example[1]}```pycon", *lines, f"{example[1]}```", ""])
