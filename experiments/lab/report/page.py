"""The tables and pictures as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import repeat
from pathlib import Path

from experiments.lab.report.plots import COLOUR, curve_picture, ratio_picture
from experiments.lab.report.sentences import (
    counted,
    findings,
    findings_beside,
    how_to_read,
    pace,
    ranges,
    row_names,
    searched,
)
from experiments.lab.report.summary import LABELS, TITLES, Entry, Summary
from experiments.lab.report.tables import LEAD, WORDS, entry_rows, notes, search_rows
from pages import page

CONTENT = Path(__file__).with_name("page.html")
STYLE = """main { max-width: 1180px }
table { margin: 12px 0 24px; font-size: 14px }
th, td { padding: 7px 8px }
dt { color: var(--ink); font-weight: 600 }
li { max-width: 80ch; margin: 6px 0 }
tbody th small { display: block; margin-left: 20px; font-weight: 400; color: var(--faint) }
"""


def html(summary: Summary) -> str:
    """Everything in one file: no script, nothing from elsewhere."""
    sections = [section(dataset, entries, summary) for dataset, entries in summary.tables.items()]
    sections += [section_beside(dataset, entries, summary) for dataset, entries in summary.beside.items()]
    return page(
        "Sentiment with full and compressed tables",
        CONTENT,
        style=STYLE,
        lead=escape(LEAD),
        findings=items(findings(summary)),
        names="\n".join(f"<dt>{escape(names)}</dt><dd>{escape(what)}</dd>" for names, what in row_names(summary)),
        sections="\n".join(sections),
        notes=items(notes(summary)),
        search=search(summary),
        about=escape(described(summary)),
    )


def section(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """A dataset's table and pictures."""
    full = summary.entry(dataset, "full")
    smaller = [entry for entry in entries if entry.format != "full"]
    seen = ranges(smaller, full) if smaller and full else ""
    pictures = [figure("Test accuracy against size", seen, ratio_picture(entries))]
    pictures += [
        figure(
            f"Validation accuracy after each epoch: {LABELS[format]}",
            pace(format, entries),
            curve_picture(format, entries),
        )
        for format in dict.fromkeys(entry.format for entry in smaller)
    ]
    return f"""<h2>{TITLES[dataset]}</h2>
{entry_table(entries, full)}
<p>{escape(how_to_read(entries))}</p>
<div class="pictures">
{"".join(pictures)}
</div>"""


def section_beside(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """Rows with one thing changed, and what that did."""
    return f"""<h2>{TITLES[dataset]}, beside the table</h2>
{entry_table(entries, summary.entry(dataset, "full"))}
<ul>
{items(findings_beside(summary, dataset))}
</ul>"""


def search(summary: Summary) -> str:
    """What the search for learning rates saw, and what it chose."""
    if not summary.grids:
        return "<p>No search was made.</p>"
    return f"<ul>\n{items(searched(summary))}\n</ul>\n{table(search_rows(summary))}"


def figure(title: str, seen: str, picture: str) -> str:
    """A picture under what it is and what is seen in it."""
    said = f"{seen[:1].upper()}{seen[1:]}"
    return f"<figure><figcaption><b>{escape(title)}</b> {escape(said)}</figcaption>{picture}</figure>\n"


def entry_table(entries: Sequence[Entry], full: Entry | None) -> str:
    """A dataset's rows, each with its format's colour and name."""
    marks = [f'<i style="background:{COLOUR[entry.format]}"></i>' for entry in entries]
    # Of the full table, its name says it.
    below = ["" if entry.format == "full" else f"<small>{LABELS[entry.format]}</small>" for entry in entries]
    return table(entry_rows(entries, full), marks, below)


def table(rows: Sequence[Sequence[str]], marks: Sequence[str] = (), below: Sequence[str] = ()) -> str:
    """Lines of text under their headings, which come first; ``marks`` and ``below`` are HTML around their names."""
    sides = [' class="word"' if name in WORDS else "" for name in rows[0]]
    head = "".join(f"<th{side}>{escape(text)}</th>" for side, text in zip(sides, rows[0], strict=True))
    body = "\n".join(
        f"<tr><th>{mark}{escape(name)}{after}</th>"
        + "".join(f"<td{side}>{escape(text)}</td>" for side, text in zip(sides[1:], rest, strict=True))
        + "</tr>"
        for mark, after, (name, *rest) in zip(marks or repeat(""), below or repeat(""), rows[1:], strict=False)
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
