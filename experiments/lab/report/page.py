"""The tables and pictures as one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from itertools import repeat
from pathlib import Path

from experiments.lab.formats import FULL, label
from experiments.lab.report.plots import LINES, Look, Point, Series, curve_picture, looks, size_picture
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
from experiments.lab.report.summary import Entry, Summary
from experiments.lab.report.tables import WORDS, entry_rows, notes, search_rows
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
    heading = summary.texts.get("heading", summary.texts["title"])
    return page(
        heading,
        CONTENT,
        style=STYLE,
        heading=escape(heading),
        lead=escape(summary.texts["lead"]),
        findings=items(findings(summary)),
        names="\n".join(f"<dt>{escape(names)}</dt><dd>{escape(what)}</dd>" for names, what in row_names(summary)),
        sections="\n".join(sections),
        notes=items(notes(summary)),
        search=search(summary),
        about=escape(described(summary)),
    )


def section(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """A dataset's table and pictures."""
    metric, stage = summary.metric, summary.bench.task.stage
    full = summary.entry(dataset, FULL)
    smaller = [entry for entry in entries if entry.format != FULL]
    seen = ranges(summary, smaller, full) if smaller and full else ""
    of_format = {
        format: Series(label(format), look, [Point.of(entry) for entry in entries if entry.format == format])
        for format, look in looks(summary.formats).items()
    }
    ours = [of_format[format] for format in summary.formats if format != FULL and of_format[format].points]
    whole = of_format[FULL] if of_format[FULL].points else None
    picture = size_picture(f"{dataset}-ratio", metric, summary.split, whole, ours)
    split, name = summary.split.capitalize(), metric.name
    pictures = [figure(f"{split} {name} against size", seen, picture)]
    when = "after each epoch" if stage == "epoch" else "while training"
    everything = curves(entries, of_format)
    for format in dict.fromkeys(entry.format for entry in smaller):
        shown = curves([entry for entry in entries if entry.format in (FULL, format)], of_format)
        drawn = curve_picture(f"{dataset}-{format}-curves", metric, stage, shown, everything)
        title = f"Validation {name} {when}: {label(format)}"
        pictures.append(figure(title, pace(summary, format, entries), drawn))
    return f"""<h2>{summary.title(dataset)}</h2>
{entry_table(summary, entries, full)}
<p>{escape(how_to_read(summary, entries))}</p>
<div class="pictures">
{"".join(pictures)}
</div>"""


def curves(entries: Sequence[Entry], of_format: dict[str, Series]) -> list[Series]:
    """What is drawn of rows while they train: a format's colour, a line of its own for each row."""

    def look(place: int, entry: Entry) -> Look:
        line = "-" if entry.format == FULL else LINES[(place - (entries[0].format == FULL)) % len(LINES)]
        return replace(of_format[entry.format].look, line=line)

    return [
        Series(entry.row, look(place, entry), (), entry.stages, entry.mean_curve, entry.early_stops)
        for place, entry in enumerate(entries)
    ]


def section_beside(dataset: str, entries: Sequence[Entry], summary: Summary) -> str:
    """Rows with one thing changed, and what that did."""
    return f"""<h2>{summary.title(dataset)}, beside the table</h2>
{entry_table(summary, entries, summary.entry(dataset, FULL))}
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


def entry_table(summary: Summary, entries: Sequence[Entry], full: Entry | None) -> str:
    """A dataset's rows, each with its format's colour and name."""
    look = looks(summary.formats)
    marks = [f'<i style="background:{look[entry.format].colour}"></i>' for entry in entries]
    # Of the full table, its name says it.
    below = ["" if entry.format == FULL else f"<small>{label(entry.format)}</small>" for entry in entries]
    return table(entry_rows(summary, entries, full), marks, below)


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
