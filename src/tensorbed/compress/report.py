"""What compressing a model did: a table for people, a dict for programs, a page for mail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from tensorbed.structures.explanation import aligned

# A fit that keeps less than this of a table has lost what the model knew; training brings it back, or another format.
TOO_FAR = 0.3
_SHOWN = 4  # tables named in one warning
# What to do about a reason to stay, by the option that it names.
_ADVICE = {
    "min_rows": "lower min_rows",
    "skip=": "leave out the pattern of skip=",
    "include_heads": "leave out include_heads=False",
}
# Columns in the order for a page: names, ratio, fit error and MB are what a phone shows, size and format stand last.
_ON_A_PAGE = (0, 7, 8, 5, 6, 3, 4, 1, 2)


@dataclass(frozen=True)
class Entry:
    """One table: where it is used, what it was and what it is."""

    names: tuple[str, ...]
    rows: int
    cols: int
    format: str
    numbers_before: int
    numbers_after: int
    bytes_before: int
    bytes_after: int
    error: float | None  # relative, of the fit; None where there was none
    same_rows_as: str | None = None  # the table that a head was taken to belong to because of its size alone

    @property
    def ratio(self) -> float:
        return self.bytes_before / self.bytes_after


@dataclass(frozen=True)
class Report:
    """``print`` it, or take the numbers.

    Attributes:
        entries: the tables that were compressed.
        numbers_before, numbers_after, bytes_before, bytes_after: of the whole model, what is shared counted once.
        left: why others were not, by name.
    """

    entries: tuple[Entry, ...]
    numbers_before: int
    numbers_after: int
    bytes_before: int
    bytes_after: int
    left: dict[str, str]

    @property
    def ratio(self) -> float:
        """Of the whole model."""
        return self.bytes_before / max(1, self.bytes_after)

    @property
    def notes(self) -> list[str]:
        """What was decided without being told."""
        return [note_on_size(e.names[0], e.rows, e.same_rows_as) for e in self.entries if e.same_rows_as is not None]

    @property
    def warnings(self) -> list[str]:
        """What a user should know before going on."""
        found = [
            f"{entry.names[0]}: the fit is off by {entry.error:.0%}; train the model further, or take a format that "
            "keeps more, tb.QuantizedRows for instance."
            for entry in self.entries
            if entry.error is not None and entry.error > TOO_FAR
        ]
        return found if self.entries else [f"nothing was compressed: {why_nothing(self.left)}"]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        entries = [{**asdict(e), "names": list(e.names), "ratio": e.ratio} for e in self.entries]
        said = {"notes": self.notes, "warnings": self.warnings}
        return {**asdict(self), "entries": entries, "ratio": self.ratio, **said}

    def _cells(self) -> list[Sequence[str]]:
        sizes_before_and_after = ("numbers before", "numbers after", "MB before", "MB after")
        head = ("table", "size", "format", *sizes_before_and_after, "ratio", "fit error")
        rows = [
            (
                " = ".join(e.names),
                f"{e.rows:,} x {e.cols:,}",
                e.format,
                f"{e.numbers_before:,}",
                f"{e.numbers_after:,}",
                _megabytes(e.bytes_before),
                _megabytes(e.bytes_after),
                f"{e.ratio:,.1f}",
                "-" if e.error is None else f"{e.error:.3f}",
            )
            for e in self.entries
        ]
        sizes = (_megabytes(self.bytes_before), _megabytes(self.bytes_after), f"{self.ratio:,.2f}", "")
        return [head, *rows, ("model", "", "", f"{self.numbers_before:,}", f"{self.numbers_after:,}", *sizes)]

    def __str__(self) -> str:
        return "\n".join([*aligned(self._cells(), "<<<>>>>>>"), *self._said()])

    def _said(self) -> list[str]:
        lines = [f"left: {name}, {reason}" for name, reason in self.left.items()]
        lines += [f"note: {note}" for note in self.notes]
        return lines + [f"warning: {warning}" for warning in self.warnings]

    __repr__ = __str__

    def to_html(self) -> str:
        """One page without anything from elsewhere."""
        head, *rows = [[escape(row[column]) for column in _ON_A_PAGE] for row in self._cells()]
        cells = "".join(f"<th>{cell}</th>" for cell in head)
        body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
        said = "".join(f"<p>{escape(line)}</p>" for line in self._said())
        return (
            "<!doctype html><html lang=en><meta charset=utf-8>"
            '<meta name=viewport content="width=device-width, initial-scale=1"><title>compressed</title><style>'
            "body{font:15px system-ui;margin:1em}table{display:block;overflow-x:auto;border-collapse:collapse}"
            "td,th{padding:.4em .8em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}"
            "th,td:first-child{white-space:normal}"
            "td:first-child,th:first-child,td:nth-child(n+8),th:nth-child(n+8){text-align:left}</style>"
            f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>{said}</html>"
        )


def why_nothing(left: Mapping[str, str]) -> str:
    """Where no table is compressed: the reasons by name, and which options would have to be others."""
    if not left:
        return "the model has no torch.nn.Embedding or torch.nn.EmbeddingBag."
    shown = [f"{name} ({reason})" for name, reason in list(left.items())[:_SHOWN]]
    more = len(left) - len(shown)
    reasons = ", ".join(shown) + (f" and {more} more" if more else "")
    advice = [text for option, text in _ADVICE.items() if any(option in reason for reason in left.values())]
    return f"{reasons}." + (f" To take them {', or '.join(advice)}." if advice else "")


def note_on_size(name: str, rows: int, table: str) -> str:
    """Said of a head that nothing but its size speaks for."""
    return (
        f"{name} was taken for a vocabulary head only because it has {rows:,} outputs, as many as {table} has rows; if "
        f'it is none, leave it out with skip=["{name}"].'
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f}"
