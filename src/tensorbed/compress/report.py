"""What is planned for the tables of a model, and what compressing them did: for people, programs and mail."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from tensorbed.printable import some
from tensorbed.structures import Format
from tensorbed.structures.explanation import aligned

# A fit that keeps less than this of a table has lost what the model knew; training brings it back, or another format.
TOO_FAR = 0.3
_NEAR = 0.9  # of the bytes allowed: a plan that takes less says what else there was
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
class Option:
    """One format for one table: what it would take, and how far off it would be, ``None`` where nobody measured."""

    format: Format
    bytes: int
    ratio: float
    error: float | None

    def cells(self) -> tuple[str, ...]:
        """For people."""
        return repr(self.format), megabytes(self.bytes), f"{self.ratio:,.1f}", _error(self.error)


@dataclass(frozen=True)
class Frontier:
    """Ratio and error of every option, by table."""

    options: Mapping[str, tuple[Option, ...]]

    def points(self, name: str) -> list[tuple[float, float]]:
        """``(ratio, error)`` of a table's options that no other beats in both, by ratio."""
        known = [(one.ratio, one.error) for one in self.options[name] if one.error is not None]
        return sorted(p for p in known if not any(q[0] >= p[0] and q[1] < p[1] for q in known))

    def figure(self) -> Any:
        """A matplotlib figure, a panel for each table and a line for each kind of format."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("drawing needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(5.5 * max(1, len(self.options)), 4), layout="constrained")
        panels = figure.subplots(1, max(1, len(self.options)), squeeze=False)[0]
        for axes, (name, options) in zip(panels, self.options.items(), strict=False):
            kinds = dict.fromkeys(type(one.format).__name__ for one in options if one.error is not None)
            for kind in kinds:
                drawn = [o for o in options if type(o.format).__name__ == kind and o.error is not None]
                line = sorted((one.ratio, one.error or 0.0) for one in drawn)
                axes.plot(*zip(*line, strict=True), marker="o", label=kind)
            axes.set(title=name, xlabel="times smaller", ylabel="relative error", xscale="log")
            axes.grid(alpha=0.3)
            axes.legend()
        return figure


@dataclass(frozen=True)
class Plan(Mapping[str, Format | None]):
    """Formats by table name, for :func:`tensorbed.compress_`; ``None`` leaves a table dense. ``print`` it.

    Attributes:
        sizes: rows and columns of each table.
        chosen: what was chosen, ``Dense`` where it stays.
        options: all that were weighed, the dense table first.
        allowed: bytes that all tables together may take.
        dense: bytes that they take as they are, those of a shared weight once.
        same_rows_as: of heads that were taken for such because of their size alone, the tables of that size.
    """

    sizes: Mapping[str, tuple[int, int]]
    chosen: Mapping[str, Option]
    options: Mapping[str, tuple[Option, ...]]
    allowed: float
    dense: int
    same_rows_as: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Format | None:
        format = self.chosen[name].format
        return None if format.is_plain else format

    def __iter__(self) -> Iterator[str]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def bytes(self) -> int:
        """Of all tables as planned."""
        return sum(option.bytes for option in self.chosen.values())

    @property
    def notes(self) -> list[str]:
        """What was decided without being told."""
        notes = [note_on_size(name, self.sizes[name][0], table) for name, table in self.same_rows_as.items()]
        larger = [self.bytes - one.bytes + o.bytes for name, one in self.chosen.items() for o in self.options[name]]
        larger = [size for size in larger if size > self.allowed]
        if larger and self.bytes < _NEAR * self.allowed:
            asked, above, taken = (self.dense / size for size in (self.allowed, min(larger), self.bytes))
            notes.append(
                f"{asked:.4g} times smaller was asked for; the formats weighed make the tables {above:.3g} or "
                f"{taken:.3g} times smaller, and nothing between: {taken:.3g} was taken."
            )
        return notes

    def frontier(self) -> Frontier:
        """Ratio against error of every format weighed; ``.figure()`` draws it."""
        return Frontier(self.options)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, for JSON."""
        tables = {
            name: {"rows": self.sizes[name][0], "cols": self.sizes[name][1], **asdict(one), "format": repr(one.format)}
            for name, one in self.chosen.items()
        }
        return {"tables": tables, "bytes": self.bytes, "allowed": self.allowed, "notes": self.notes}

    def cells(self) -> list[tuple[str, ...]]:
        """A table for people: a head, a row for each table, and all of them together."""
        head = ("table", "size", "format", "MB", "ratio", "error")
        rows = [(name, "{:,} x {:,}".format(*self.sizes[name]), *one.cells()) for name, one in self.chosen.items()]
        total = ("all", "", "", megabytes(self.bytes), f"{self.dense / max(1, self.bytes):,.1f}", "")
        return [head, *rows, total]

    def __str__(self) -> str:
        return "\n".join([*aligned(self.cells(), "<<<>>>"), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


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
        """Bytes before over bytes after."""
        return self.bytes_before / self.bytes_after

    def cells(self) -> tuple[str, ...]:
        """For people: names, size, format, sizes before and after, ratio, error."""
        names, size = " = ".join(self.names), f"{self.rows:,} x {self.cols:,}"
        return names, size, self.format, *_before_and_after(self), f"{self.ratio:,.1f}", _error(self.error)


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
        before_and_after = ("numbers before", "numbers after", "MB before", "MB after")
        head = ("table", "size", "format", *before_and_after, "ratio", "fit error")
        model = ("model", "", "", *_before_and_after(self), f"{self.ratio:,.2f}", "")
        return [head, *(entry.cells() for entry in self.entries), model]

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
    reasons = some([f"{name} ({reason})" for name, reason in left.items()], _SHOWN)
    advice = [text for option, text in _ADVICE.items() if any(option in reason for reason in left.values())]
    return f"{reasons}." + (f" To take them {', or '.join(advice)}." if advice else "")


def note_on_size(name: str, rows: int, table: str) -> str:
    """Said of a head that nothing but its size speaks for."""
    return (
        f"{name} was taken for a vocabulary head only because it has {rows:,} outputs, as many as {table} has rows; if "
        f'it is none, leave it out with skip=["{name}"].'
    )


def _before_and_after(sizes: Entry | Report) -> tuple[str, ...]:
    numbers = f"{sizes.numbers_before:,}", f"{sizes.numbers_after:,}"
    return *numbers, megabytes(sizes.bytes_before), megabytes(sizes.bytes_after)


def megabytes(count: int) -> str:
    """For people."""
    return f"{count / 1e6:,.2f}"


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.3f}"
