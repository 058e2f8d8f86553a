"""A run as one page that needs no other file."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from benchmarks.floors import judge
from benchmarks.records import about
from benchmarks.results import HeadResult, Report
from benchmarks.tables import (
    Sheet,
    choice_sheet,
    curve_sheets,
    floors_sheet,
    heads_sheet,
    one_row_sheet,
    summary_sheet,
    workload_sheet,
)

_WORKLOADS = """
The limit is the larger of the operations of the cheapest plan known for these ids at the measured speed of a large
matrix product, and the bytes that must move at the measured speed of a copy. Efficiency is the limit over what was
measured. Extra memory is the peak of forward and backward beyond parameters, ids and the incoming gradient; the rows
and the gradients of the parameters count."""
_HEADS = """
From hidden vectors to the loss over all classes, and back to the vectors and the head's parameters. The plain loss and
PyTorch's fused one have a dense weight, the others a table of their format, all drawn at the same scale. Extra memory
is the peak of loss and gradients beyond parameters, vectors and targets; the gradients of the parameters count."""


def write(report: Report, pictures: Mapping[str, Path], path: Path, heads: Path | None = None) -> None:
    """Tables and pictures, these inlined; ``heads`` is the picture of the heads."""
    template = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    floors = judge(report.results, report.heads)
    details = [floors_sheet(floors), choice_sheet(report.results), one_row_sheet(report.results)]
    workloads = _sheets([workload_sheet(result, report.rounds) for result in report.results], "h3")
    text = template.substitute(
        facts=_facts(report),
        summary=_sheets([summary_sheet(floors)], "h2"),
        pictures="\n".join(_section(title, "", _picture(title, picture)) for title, picture in pictures.items()),
        heads=_section("Heads", _HEADS, _heads(report.heads, heads)),
        details=_sheets([sheet for sheet in details if sheet], "h2"),
        workloads=_section("Every workload", _WORKLOADS, workloads),
        curves=_section("How cost grows, in numbers", "", _sheets(curve_sheets(report), "h3")),
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
    return f'<figure><img alt="{escape(title)}" src="data:image/png;base64,{inlined}"></figure>'


def _heads(heads: HeadResult | None, picture: Path | None) -> str:
    shown = _picture("Training step and peak memory of every head", picture) if picture else ""
    return f"{shown}\n{_sheets([heads_sheet(heads)], 'h3')}" if heads else ""


def _section(title: str, text: str, body: str) -> str:
    """A heading and what is below it; nothing where there is nothing."""
    said = f"<p>{escape(text.strip())}</p>\n" if text else ""
    return f"<h2>{escape(title)}</h2>\n{said}{body}" if body else ""


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
