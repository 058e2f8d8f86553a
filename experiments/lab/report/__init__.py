"""From result lines to tables, pictures and sentences, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.lab.errors import ExperimentError
from experiments.lab.files import write_whole
from experiments.lab.records import read
from experiments.lab.report.league import league_html, league_markdown
from experiments.lab.report.page import html
from experiments.lab.report.summary import Summary, summarise
from experiments.lab.report.tables import markdown
from experiments.lab.search import Bench

__all__ = ["Summary", "html", "markdown", "reports", "summarise"]


def reports(bench: Bench) -> Iterator[str]:
    """Write what there is to tell of a task, its rows and its league; a sentence on each."""
    source, everything = bench.file(), read(bench.file())
    lines = bench.in_tables(everything)
    left_out = len(everything) - len(lines)
    others = f"; {left_out} lines are no runs of the tables as they are configured now" if left_out else ""
    standings = bench.recorded("league")
    if not lines and not standings:
        raise ExperimentError(
            f"{source} has no runs to report{others}; experiments sweep {bench.task.name} makes them."
        )
    if lines:
        summary = summarise(bench, lines)
        told = written(bench, "", markdown(summary), html(summary))
        yield f"{told}, from {len(lines)} runs{others}"
    if standings:
        told = written(bench, "league", league_markdown(bench), league_html(bench))
        yield f"{told}, from {len(standings)} runs"


def written(bench: Bench, kind: str, text: str, page: str) -> str:
    """The names of the two files, which are written whole."""
    paths = [bench.file(kind).with_suffix(suffix) for suffix in (".md", ".html")]
    for path, content in zip(paths, (text, page), strict=True):
        write_whole(path, content.encode())
    return " and ".join(map(str, paths))
