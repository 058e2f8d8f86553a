"""The league of formats: a table and a picture, and which is best at each budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from experiments.lab import formats
from experiments.lab.report.document import document, items, pictures, table
from experiments.lab.report.plots import Point, Series, looks, size_picture
from experiments.lab.report.sentences import counted
from experiments.lab.report.summary import Reported

NOTE = (
    "Every cell is the same run but for the format of its tables and their size, how many times smaller they are than "
    "the full ones, counted in bytes. A cell without a run names the largest ratio that the format can have."
)
Key = tuple[str, float]  # format and budget
WHOLE = (formats.FULL, 1.0)


@dataclass(frozen=True)
class Standings(Reported):
    """The lines of a league by format, budget and seed; of a run done twice the later one counts."""

    @cached_property
    def lines(self) -> Mapping[Key, Mapping[int, Mapping[str, Any]]]:
        runs: defaultdict[Key, dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for settings, record in self.bench.recorded("league"):
            runs[settings.format, settings.ratio or 1.0][settings.seed] = record
        return runs

    @cached_property
    def points(self) -> dict[Key, Point]:
        """Cells that were run to their end."""
        name, found = f"{(*self.bench.task.tests, 'val')[0]}_{self.metric.name}", {}
        for cell, seeds in self.lines.items():
            if all(name in record and "diverged" not in record for record in seeds.values()):
                values = [record[name] for record in seeds.values()]
                ratio = next(iter(seeds.values()))["ratio"]
                found[cell] = Point(ratio, fmean(values), stdev(values) if len(values) > 1 else None)
        return found

    @property
    def budgets(self) -> list[float]:
        return sorted({budget for _, budget in self.lines if budget > 1})

    @property
    def names(self) -> list[str]:
        place = list(formats.known())
        names = {name for name, _ in self.lines if name != formats.FULL}
        return sorted(names, key=lambda name: (place.index(name.split("(")[0]), name))

    def first_seeds(self, budget: float) -> list[str]:
        """Formats at a budget, the best on validation first, by the first seed of each."""
        name = f"val_{self.metric.name}"
        values = {of: self.lines[of, size][0][name] for of, size in self.points if size == budget}
        return sorted(values, key=lambda of: values[of], reverse=self.metric.higher)

    def told(self, cell: Key, seeds: bool = True) -> str:
        """``59.1 ± 0.3 (3 seeds)``."""
        point, written = self.points[cell], self.metric.written
        deviation = "" if point.deviation is None else f" ± {written(point.deviation)}"
        return f"{written(point.mean)}{deviation}" + (f" ({counted(len(self.lines[cell]), 'seed')})" if seeds else "")

    def cell(self, cell: Key) -> str:
        if cell in self.points:
            return self.told(cell, seeds=False)
        record = next(iter(self.lines.get(cell, {0: {}}).values()))
        return f"at most {record['largest_ratio']:.4g}" if "largest_ratio" in record else "diverged" if record else ""

    def seen(self) -> list[str]:
        """The full table, and which formats are best at each budget; those that had more seeds come before others."""
        metric, full, said = self.metric, self.points.get(WHOLE), []
        if full is not None:
            said.append(f"The full table has a {self.split} {metric.name} of {self.told(WHOLE)}.")
        for budget in self.budgets:
            cells = [cell for cell in self.points if cell[1] == budget]
            cells.sort(key=lambda cell: self.points[cell].mean, reverse=metric.higher)
            cells.sort(key=lambda cell: len(self.lines[cell]), reverse=True)
            if cells:
                best, *others = cells
                beside = f", {metric.told(self.points[best].mean, full.mean)} the full table's" if full else ""
                second = f"; then {formats.label(others[0][0])}, {self.told(others[0])}" if others else ""
                name = formats.label(best[0])
                said.append(
                    f"{budget:g} times smaller: {name} is best of {len(cells)}, {self.told(best)}{beside}{second}."
                )
        return said

    def rows(self) -> list[tuple[str, ...]]:
        """Headings and lines of the table: a format a line, a budget a column."""
        lines = [(formats.label(name), *(self.cell((name, budget)) for budget in self.budgets)) for name in self.names]
        return [("format", *(f"{budget:g} times" for budget in self.budgets)), *lines]

    def picture(self) -> str:
        full, *series = [
            Series(formats.label(name), look, [point for (of, _), point in self.points.items() if of == name])
            for name, look in looks([formats.FULL, *self.names]).items()
        ]
        return size_picture("league", self.metric, self.split, full, [one for one in series if one.points])

    def report(self) -> tuple[str, str]:
        """As a text and as a page."""
        title = f"{self.bench.task.texts['title']}: a league of formats"
        seen = f"further right is smaller and {'higher' if self.metric.higher else 'lower'} is better."
        drawn = pictures([(f"{self.split.capitalize()} {self.metric.name} against size", seen, self.picture())])
        colours = [look.colour for look in looks([formats.FULL, *self.names]).values()][1:]
        return document(title, NOTE, {"": [items(self.seen()), table(self.rows(), colours), drawn]})
