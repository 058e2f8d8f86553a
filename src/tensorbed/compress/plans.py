"""What a plan is: a format for every table, with what each takes and loses, and all that were weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tensorbed.compress.report import note_on_size
from tensorbed.structures import Format
from tensorbed.structures.explanation import aligned

_NEAR = 0.9  # of the bytes allowed: a plan that takes less says what else there was


@dataclass(frozen=True)
class Option:
    """One format for one table: what it would take, and how far off it would be, ``None`` where nobody measured."""

    format: Format
    bytes: int
    ratio: float
    error: float | None


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
        rows = [
            (
                name,
                "{:,} x {:,}".format(*self.sizes[name]),
                repr(one.format),
                f"{one.bytes / 1e6:,.2f}",
                f"{one.ratio:,.1f}",
                "-" if one.error is None else f"{one.error:.3f}",
            )
            for name, one in self.chosen.items()
        ]
        total = ("all", "", "", f"{self.bytes / 1e6:,.2f}", f"{self.dense / max(1, self.bytes):,.1f}", "")
        return [head, *rows, total]

    def __str__(self) -> str:
        return "\n".join([*aligned(self.cells(), "<<<>>>"), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__


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
