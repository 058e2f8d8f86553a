"""The league of formats: a table and a picture, and which is best at each budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.lab import formats
from experiments.lab.report.page import STYLE, figure, items, table
from experiments.lab.report.plots import Point, Series, looks, size_picture
from experiments.lab.report.summary import Reported
from experiments.lab.report.tables import table_lines
from experiments.lab.search import Bench
from pages import page

CONTENT = Path(__file__).with_name("league.html")
NOTE = (
    "Every cell is the same run but for the format of its tables and their size, how many times smaller they are than "
    "the full ones, counted in bytes. A cell without a run names the largest ratio that the format can have."
)


@dataclass(frozen=True)
class Standings(Reported):
    """The lines of a league by format, budget and seed; of a run done twice the later one counts."""

    @cached_property
    def lines(self) -> Mapping[tuple[str, float], Mapping[int, Mapping[str, Any]]]:
        runs: defaultdict[tuple[str, float], dict[int, Mapping[str, Any]]] = defaultdict(dict)
        for settings, record in self.bench.recorded("league"):
            runs[settings.format, settings.ratio or 1.0][settings.seed] = record
        return runs

    @cached_property
    def points(self) -> dict[tuple[str, float], Point]:
        name = f"{(*self.bench.task.tests, 'val')[0]}_{self.metric.name}"
        found = {}
        for cell, seeds in self.lines.items():
            values = [record.get(name, self.metric.worst) for record in seeds.values() if "largest_ratio" not in record]
            if values:
                ratio = next(iter(seeds.values())).get("ratio", cell[1])
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

    def cell(self, name: str, budget: float) -> str:
        point, seeds = self.points.get((name, budget)), self.lines.get((name, budget), {})
        if point is not None:
            deviation = "" if point.deviation is None else f" ± {self.metric.written(point.deviation)}"
            return f"{self.metric.written(point.mean)}{deviation}"
        return "".join(f"at most {record['largest_ratio']:.4g}" for record in list(seeds.values())[:1])

    def rows(self) -> list[tuple[str, ...]]:
        """Headings and lines of the table: a format a line, a budget a column."""
        lines = [(formats.label(name), *(self.cell(name, budget) for budget in self.budgets)) for name in self.names]
        return [("format", *(f"{budget:g} times" for budget in self.budgets)), *lines]

    def seen(self) -> list[str]:
        """Which format is best at each budget, beside the full table."""
        said, metric, full = [], self.metric, self.points.get((formats.FULL, 1.0))
        for budget in self.budgets:
            of_budget = {name: point for (name, size), point in self.points.items() if size == budget}
            if of_budget:
                best = metric.best(of_budget, lambda name: of_budget[name].mean)  # noqa: B023 - used at once
                value = of_budget[best].mean
                beside = (
                    f", {metric.told(value, full.mean)} the full table's {metric.written(full.mean)}" if full else ""
                )
                said.append(
                    f"{budget:g} times smaller: {formats.label(best)} is best of {len(of_budget)}: {metric.name} "
                    f"{metric.written(value)}{beside}."
                )
        return said

    def picture(self) -> str:
        series = {
            name: Series(formats.label(name), look, [point for (of, _), point in self.points.items() if of == name])
            for name, look in looks([formats.FULL, *self.names]).items()
        }
        full = series.pop(formats.FULL)
        drawn = [one for one in series.values() if one.points]
        return size_picture("league", self.metric, self.split, full if full.points else None, drawn)


def league_markdown(bench: Bench) -> str:
    """The league as a text."""
    found = Standings(bench)
    lines = [f"# {title(bench)}", "", NOTE, "", "Written by `python -m experiments report` from the lines beside it."]
    return "\n".join([*lines, "", *(f"* {said}" for said in found.seen()), "", *table_lines(found.rows()), ""])


def league_html(bench: Bench) -> str:
    """The same as a page, with a picture."""
    found, name = Standings(bench), title(bench)
    picture = figure(f"{found.split.capitalize()} {found.metric.name} against size", "", found.picture())
    parts = {"seen": items(found.seen()), "table": table(found.rows()), "picture": picture}
    return page(name, CONTENT, style=STYLE, title=escape(name), note=escape(NOTE), **parts)


def title(bench: Bench) -> str:
    """Of the page."""
    return f"{bench.task.texts['title']}: a league of formats"
