"""The league of formats: a table and a picture, and which is best at each budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from experiments.lab import formats
from experiments.lab.league import largest_ratio
from experiments.lab.metrics import Metric
from experiments.lab.report.page import STYLE, figure, items, table
from experiments.lab.report.plots import Point, Series, looks, size_picture
from experiments.lab.report.tables import table_lines
from experiments.lab.search import Bench
from pages import page

CONTENT = Path(__file__).with_name("league.html")
NOTE = (
    "Every cell is the same run but for the format of its tables and their size, how many times smaller they are than "
    "the full ones, counted in bytes. A cell that is empty names the largest ratio that the format can have."
)


@dataclass(frozen=True)
class Standing:
    """A cell of the league's table: the values of its seeds, and how much smaller the tables were in fact."""

    values: tuple[float, ...]
    ratio: float

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return fmean(self.values)

    def written(self, metric: Metric) -> str:
        """Mean and deviation."""
        deviation = f" ± {metric.written(stdev(self.values))}" if len(self.values) > 1 else ""
        return f"{metric.written(self.mean)}{deviation}"


Standings = Mapping[tuple[str, float], Standing]  # by format and budget; the full table's budget is 1


def standings(bench: Bench) -> dict[tuple[str, float], Standing]:
    """Of all lines of the league; of a run done twice the later line counts."""
    metric, split = bench.task.metrics[0], (*bench.task.tests, "val")[0]
    runs: defaultdict[tuple[str, float], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for settings, record in bench.recorded("league"):
        runs[settings.format, settings.ratio or 1.0][settings.seed] = record
    return {
        cell: Standing(
            tuple(record.get(f"{split}_{metric.name}", metric.worst) for record in of.values()),
            next(iter(of.values())).get("ratio", cell[1]),
        )
        for cell, of in runs.items()
    }


def league_rows(bench: Bench, found: Standings) -> list[tuple[str, ...]]:
    """Headings and lines of the table: a format a line, a budget a column; an empty cell names the largest ratio."""
    budgets = sorted({budget for _, budget in found if budget > 1})
    names = [name for name in dict.fromkeys(name for name, _ in found) if name != formats.FULL]
    metric = bench.task.metrics[0]
    rows = [("format", *(f"{budget:g} times" for budget in budgets))]
    for name in names:
        most = {budget: largest_ratio(bench, name, budget) for budget in budgets}
        told = [
            found[name, budget].written(metric)
            if (name, budget) in found
            else (f"at most {most[budget]:.4g}" if most[budget] < budget else "to be run")
            for budget in budgets
        ]
        rows.append((formats.label(name), *told))
    return rows


def seen(bench: Bench, found: Standings) -> list[str]:
    """Which format is best at each budget, beside the full table."""
    metric, full = bench.task.metrics[0], found.get((formats.FULL, 1.0))
    said = []
    for budget in sorted({budget for _, budget in found if budget > 1}):
        names = [name for name, of in found if of == budget]
        best = metric.best(names, lambda name: found[name, budget].mean)  # noqa: B023 - used at once
        value = found[best, budget].mean
        beside = f", {metric.told(value, full.mean)} the full table's {metric.written(full.mean)}" if full else ""
        said.append(
            f"{budget:g} times smaller: {formats.label(best)} is best of {len(names)}, with a {metric.name} of "
            f"{metric.written(value)}{beside}."
        )
    return said


def league_markdown(bench: Bench) -> str:
    """The league as a text."""
    found = standings(bench)
    lines = [f"# {title(bench)}", "", NOTE, "", "Written by `python -m experiments report` from the lines beside it."]
    lines += ["", *(f"* {said}" for said in seen(bench, found)), "", *table_lines(league_rows(bench, found)), ""]
    return "\n".join(lines)


def league_html(bench: Bench) -> str:
    """The same as a page, with a picture."""
    found, metric = standings(bench), bench.task.metrics[0]
    names = list(dict.fromkeys([formats.FULL, *(name for name, _ in found)]))
    series = {
        name: Series(
            formats.label(name),
            look,
            [
                Point(cell.ratio, cell.mean, stdev(cell.values) if len(cell.values) > 1 else None)
                for (of, _), cell in found.items()
                if of == name
            ],
        )
        for name, look in looks(names).items()
    }
    full = series.pop(formats.FULL)
    split = (*bench.task.tests, "validation")[0]
    picture = size_picture("league", metric, split, full if full.points else None, list(series.values()))
    return page(
        title(bench),
        CONTENT,
        style=STYLE,
        title=escape(title(bench)),
        note=escape(NOTE),
        seen=items(seen(bench, found)),
        table=table(league_rows(bench, found)),
        picture=figure(f"{split.capitalize()} {metric.name} against size", "", picture),
    )


def title(bench: Bench) -> str:
    """Of the page."""
    return f"{bench.task.texts['title']}: a league of formats"
