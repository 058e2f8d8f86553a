"""From result lines to tables, pictures and sentences, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab.errors import ExperimentError
from experiments.lab.files import write_whole
from experiments.lab.records import read
from experiments.lab.report.league import Standings
from experiments.lab.report.summary import summarise
from experiments.lab.report.tables import tables_report
from experiments.lab.search import Bench


def reports(bench: Bench) -> Iterator[str]:
    """Write what there is to tell of a task, its rows and its league; a sentence on each."""
    everything = read(bench.file())
    lines, standings = bench.in_tables(everything), bench.recorded("league")
    left_out = len(everything) - len(lines)
    others = f"; {left_out} lines are no runs of the tables as they are configured now" if left_out else ""
    if not lines and not standings:
        raise ExperimentError(
            f"{bench.file()} has no runs to report{others}; experiments sweep {bench.task.name} makes them."
        )
    if lines:
        told = written(bench, "", *tables_report(summarise(bench, lines)))
        yield f"{told}, from {len(lines)} runs{others}"
    if standings:
        told = written(bench, "league", *Standings(bench).report())
        yield f"{told}, from {len(standings)} runs"


def written(bench: Bench, kind: str, text: str, page: str) -> str:
    """The names of the two files, which are written whole."""
    paths = [bench.file(kind).with_suffix(suffix) for suffix in (".md", ".html")]
    for path, content in zip(paths, (text, page), strict=True):
        write_whole(path, content.encode())
    return " and ".join(map(str, paths))
