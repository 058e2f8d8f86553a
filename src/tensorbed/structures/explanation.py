"""What a lookup would do, counted without doing it, and as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tensorbed.printable import printable


@dataclass(frozen=True)
class Explanation:
    """One forward of one table for one batch. ``print`` it, or take the numbers.

    Attributes:
        kind, description: the structure and its sizes.
        indices: how many the batch holds.
        unique_rows: how many different rows they are.
        prefixes: of a chain, how many different left products there are after each core; empty otherwise.
        multiply_adds_plain: were each index computed by itself; ``None`` where the structure does not say.
        multiply_adds: by the path taken, after reuse.
        path, why: the way taken and the reason.
    """

    kind: str
    description: str
    indices: int
    unique_rows: int
    prefixes: tuple[int, ...]
    multiply_adds_plain: int | None
    multiply_adds: int | None
    path: str
    why: str

    def asked_by(self, indices: int) -> Explanation:
        """The same work where repeated indices were put together before: it serves this many."""
        plain = self.multiply_adds_plain
        each = None if plain is None or self.indices == 0 else plain // self.indices
        return replace(self, indices=indices, multiply_adds_plain=None if each is None else each * indices)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        return {**asdict(self), "prefixes": list(self.prefixes)}

    def __str__(self) -> str:
        lines: list[tuple[str, str, str]] = [
            ("indices", f"{self.indices:,}", ""),
            ("unique rows", f"{self.unique_rows:,}", fewer(self.indices, self.unique_rows)),
        ]
        for k, count in enumerate(self.prefixes[:-1], start=1):
            lines.append((f"prefixes of {k}", f"{count:,}", fewer(self.unique_rows, count)))
        reused = fewer(self.multiply_adds_plain, self.multiply_adds)
        lines.append(("multiply-adds, each by itself", shown(self.multiply_adds_plain), ""))
        lines.append(("multiply-adds, as computed", shown(self.multiply_adds), reused))
        path = f"{'path':<{max(len(label) for label, _, _ in lines)}}  {self.path}: {self.why}"
        return "\n  ".join([f"{self.kind}, {self.description}", *aligned(lines, "<><"), path])

    __repr__ = __str__


@dataclass(frozen=True)
class Explanations:
    """One :class:`Explanation` a table, by name, and their totals."""

    tables: Mapping[str, Explanation]

    def __getitem__(self, name: str) -> Explanation:
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    indices = property(lambda self: self._total("indices"), doc="Of all tables together.")
    unique_rows = property(lambda self: self._total("unique_rows"), doc="Of all tables together.")
    multiply_adds_plain = property(lambda self: self._total("multiply_adds_plain"), doc="Of all tables together.")
    multiply_adds = property(lambda self: self._total("multiply_adds"), doc="Of all tables together.")

    def _total(self, name: str) -> int | None:
        """The sum over all tables, unless a part of it is unknown."""
        numbers = [getattr(table, name) for table in self.tables.values()]
        return None if None in numbers else sum(numbers)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        names = ("indices", "unique_rows", "multiply_adds_plain", "multiply_adds")
        tables = {name: table.to_dict() for name, table in self.tables.items()}
        return {"tables": tables, "total": {name: self._total(name) for name in names}}

    def __str__(self) -> str:
        head = ("table", "structure", "indices", "unique rows", "multiply-adds", "as computed", "change", "path")
        rows = [(name, table.kind, *_numbers(table), table.path) for name, table in self.tables.items()]
        return "\n".join(aligned([head, *rows, ("total", "", *_numbers(self), "")], "<<>>>><<"))

    __repr__ = __str__


def _numbers(one: Explanation | Explanations) -> tuple[str, str, str, str, str]:
    plain, made = one.multiply_adds_plain, one.multiply_adds
    return f"{one.indices:,}", f"{one.unique_rows:,}", shown(plain), shown(made), fewer(plain, made)


def shown(number: int | None) -> str:
    """With thousands separated."""
    return "not counted" if number is None else f"{number:,}"


def fewer(plain: float | None, made: float | None) -> str:
    """``4.6x fewer``, or more; nothing where they are equal or unknown."""
    if not plain or not made or plain == made:
        return ""
    times = max(plain, made) / min(plain, made)
    return f"{times:,.{1 if times < 9.95 else 0}f}x {'fewer' if made < plain else 'more'}"


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Lines of columns, each to its side, ``<`` or ``>``; a row is a line, whatever the names in it are."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    ]
