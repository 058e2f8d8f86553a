"""The tables and pictures as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import repeat
from pathlib import Path

from experiments.report.plots import COLOUR, curve_picture, ratio_picture
from experiments.report.summary import TITLES, Entry, Summary, counted, findings
from experiments.report.tables import NOTES, entry_rows, search_rows
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
        f"<h2>{TITLES[dataset]}, beside the table</h2>{entry_table(entries, summary.entry(dataset, 'full'))}"
        for dataset, entries in summary.beside.items()
    ]
    return page(
        "Sentiment with full and compressed tables",
        CONTENT,
        style=STYLE,
        sections="\n".join(sections),
        findings=items(findings(summary)),
        notes=items(NOTES),
        search=table(search_rows(summary)) if summary.grids else "<p>No search was made.</p>",
        about=escape(described(summary)),
    )


def section(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """A dataset's table and pictures."""
    return f"""<h2>{TITLES[dataset]}</h2>
{entry_table(entries, summary.entry(dataset, "full"))}
<div class="pictures">
<figure><figcaption>Test accuracy against ratio, deviations over seeds</figcaption>{ratio_picture(entries)}</figure>
<figure><figcaption>Validation accuracy after each epoch, mean over seeds</figcaption>{curve_picture(entries)}</figure>
</div>"""


def entry_table(entries: Sequence[Entry], full: Entry | None) -> str:
    """A dataset's rows, each with its format's colour."""
    marks = [f'<i style="background:{COLOUR[entry.format]}"></i>' for entry in entries]
    return table(entry_rows(entries, full), marks)


def table(rows: Sequence[Sequence[str]], marks: Sequence[str] = ()) -> str:
    """Lines of text under their headings, which come first; ``marks`` stand before the lines."""
    head = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "\n".join(
        f"<tr><th>{mark}{escape(name)}</th>{''.join(f'<td>{escape(text)}</td>' for text in rest)}</tr>"
        for mark, (name, *rest) in zip(marks or repeat(""), rows[1:], strict=False)
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def items(texts: Sequence[str]) -> str:
    """A list."""
    return "\n".join(f"<li>{escape(text)}</li>" for text in texts)


def described(summary: Summary) -> str:
    """With what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in (summary.about["versions"] or {}).items())
    machine = summary.about["machine"] or {}
    threads = counted(machine.get("threads") or 0, "thread")
    place = f"{machine.get('processor')}, {machine.get('cores')} cores, {threads} a run"
    return f"{versions}; {place}; commit {', '.join(summary.about['commits'])}."
