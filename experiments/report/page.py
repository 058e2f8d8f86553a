"""The tables and pictures as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from experiments.report.plots import COLOUR, curve_picture, ratio_picture
from experiments.report.summary import TITLES, Entry, Summary, findings
from experiments.report.tables import HEADINGS, NOTES, cells
from pages import page

CONTENT = Path(__file__).with_name("page.html")
STYLE = """main { max-width: 1180px }
table { margin: 12px 0 24px; font-size: 14px }
th, td { padding: 7px 10px }
li { max-width: 80ch; margin: 6px 0 }
"""


def html(summary: Summary) -> str:
    """Everything in one file: no script, nothing from elsewhere."""
    sections = [section(dataset, entries, summary) for dataset, entries in summary.tables.items()]
    sections += [
        f"<h2>{TITLES[dataset]}, padded</h2>{table(entries, summary.entry(dataset, 'full'))}"
        for dataset, entries in summary.padded.items()
    ]
    return page(
        "Sentiment with full and compressed tables",
        CONTENT,
        style=STYLE,
        sections="\n".join(sections),
        findings=items(findings(summary)),
        notes=items(NOTES),
        about=escape(described(summary)),
    )


def section(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """A dataset's table and pictures."""
    return f"""<h2>{TITLES[dataset]}</h2>
{table(entries, summary.entry(dataset, "full"))}
<div class="pictures">
<figure><figcaption>Test accuracy against ratio, deviations over seeds</figcaption>{ratio_picture(entries)}</figure>
<figure><figcaption>Validation accuracy after each epoch, mean over seeds</figcaption>{curve_picture(entries)}</figure>
</div>"""


def table(entries: Sequence[Entry], full: Entry | None) -> str:
    """Rows under their headings."""
    head = "".join(f"<th>{escape(name)}</th>" for name in HEADINGS)
    body = "\n".join(line(entry, full) for entry in entries)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def line(entry: Entry, full: Entry | None) -> str:
    """A row of the table, with its format's colour."""
    name, *rest = cells(entry, full)
    others = "".join(f"<td>{escape(text)}</td>" for text in rest)
    return f'<tr><th><i style="background:{COLOUR[entry.format]}"></i>{escape(name)}</th>{others}</tr>'


def items(texts: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"<li>{escape(text)}</li>" for text in texts)


def described(summary: Summary) -> str:
    """With what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in (summary.about["versions"] or {}).items())
    machine = summary.about["machine"] or {}
    place = f"{machine.get('processor')}, {machine.get('cores')} cores, {machine.get('threads')} threads a run"
    return f"{versions}; {place}; commit {', '.join(summary.about['commits'])}."
