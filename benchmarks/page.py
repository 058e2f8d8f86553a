"""A run as one page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from benchmarks.floors import judge
from benchmarks.records import about
from benchmarks.results import Report
from benchmarks.tables import (
    Sheet,
    choice_sheet,
    curve_sheets,
    floors_sheet,
    one_row_sheet,
    summary_sheet,
    workload_sheet,
)


def write(report: Report, pictures: Mapping[str, Path], path: Path) -> None:
    """Tables and pictures, these inlined."""
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    floors = judge(report.results)
    details = [floors_sheet(floors), choice_sheet(report.results), one_row_sheet(report.results)]
    text = template.substitute(
        facts=_facts(report),
        summary=_sheets([summary_sheet(floors)], "h2"),
        pictures="\n".join(_picture(title, picture) for title, picture in pictures.items()),
        details=_sheets([sheet for sheet in details if sheet], "h2"),
        workloads=_sheets([workload_sheet(result, report.rounds) for result in report.results], "h3"),
        curves=_sheets(curve_sheets(report), "h3"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _facts(report: Report) -> str:
    known = about(report)
    machine, versions = known["machine"], known["versions"]
    facts = {
        "machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, float32",
        "matrix product": f"{report.machine.flops / 1e9:,.1f} GFLOP/s",
        "copy": f"{report.machine.bandwidth / 1e9:,.1f} GB/s, read and written",
        "load before": f"{machine['load']:.2f}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
        "commit": known["commit"] or "none",
        "time": known["time"],
    }
    return "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(fact))}</dd>" for name, fact in facts.items())


def _picture(title: str, path: Path) -> str:
    inlined = b64encode(path.read_bytes()).decode("ascii")
    image = f'<img alt="{escape(title)}" src="data:image/png;base64,{inlined}">'
    return f"<h2>{escape(title)}</h2>\n<figure>{image}</figure>"


def _sheets(sheets: Sequence[Sheet], heading: str) -> str:
    return "\n".join(_sheet(sheet, heading) for sheet in sheets)


def _sheet(sheet: Sheet, heading: str) -> str:
    head = "".join(_cell("th", column, k < sheet.words) for k, column in enumerate(sheet.columns))
    rows = ["".join(_cell("td", cell, k < sheet.words) for k, cell in enumerate(row)) for row in sheet.rows]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    notes = "\n".join(f'<p class="note">{escape(note)}</p>' for note in sheet.notes)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'<{heading}>{escape(sheet.title)}</{heading}>\n<div class="wide">{table}</div>\n{notes}'


def _cell(tag: str, text: str, word: bool) -> str:
    classes = [name for name, applies in (("word", word), (text, text in ("met", "missed"))) if applies]
    of = f' class="{" ".join(classes)}"' if classes else ""
    return f"<{tag}{of}>{escape(text)}</{tag}>"
