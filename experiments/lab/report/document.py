"""A report as a text in Markdown and as one self-contained page, both of the same parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import repeat

from pages import page, unbroken

Part = tuple[Sequence[str], str]  # lines of Markdown, and HTML
WORDS = ("row", "shape", "set", "format", "std")  # columns of text, which stand left
STYLE = """main { max-width: 1180px }
table { margin: 12px 0 24px; font-size: 14px }
th, td { padding: 7px 8px }
dt { color: var(--ink); font-weight: 600 }
li { max-width: 80ch; margin: 6px 0 }
tbody th small { display: block; margin-left: 20px; font-weight: 400; color: var(--faint) }
"""


def document(
    title: str, lead: str, sections: Mapping[str, Sequence[Part]], *, heading: str | None = None, about: str = ""
) -> tuple[str, str]:
    """The text and the page; ``heading`` is the page's, ``about`` tells there with what it was measured."""
    lines = [f"# {title}", "", lead, "", "Written by `python -m experiments report` from the lines beside it.", ""]
    content = [f"<h1>{escape(heading or title)}</h1>", f'<p class="lead">{escape(lead)}</p>']
    for name, parts in sections.items():
        if name:
            lines += [f"## {name}", ""]
            content.append(f"<h2>{escape(name)}</h2>")
        for text, html in parts:
            lines += [*text, ""] if text else []
            content.append(html)
    told = f"{escape(about)} " if about else ""
    content.append(f'<p class="lead">{told}Written by <code>python -m experiments report</code>.</p>')
    return "\n".join(lines), page(heading or title, "\n".join(content), style=STYLE)


def items(texts: Sequence[str]) -> Part:
    """A list."""
    listed = "\n".join(f"<li>{escape(text)}</li>" for text in texts)
    return [f"* {text}" for text in texts], f"<ul>\n{listed}\n</ul>"


def names(meanings: Sequence[tuple[str, str]]) -> Part:
    """Names, and what they mean."""
    defined = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in meanings)
    return [f"* **{name}**: {meaning}" for name, meaning in meanings], f"<dl>\n{defined}\n</dl>"


def table(rows: Sequence[Sequence[str]], marks: Sequence[str] = (), below: Sequence[str] = ()) -> Part:
    """Lines under their headings, which come first; ``marks`` are colours, ``below`` what stands under a name."""
    rule = ["---" if name in WORDS else "---:" for name in rows[0]]
    lines = [rows[0], rule, *([unbroken(cell) for cell in row] for row in rows[1:])]
    sides = [' class="word"' if name in WORDS else "" for name in rows[0]]
    head = "".join(f"<th{side}>{escape(text)}</th>" for side, text in zip(sides, rows[0], strict=True))
    squares = [f'<i style="background:{colour}"></i>' for colour in marks]
    small = [f"<small>{escape(text)}</small>" if text else "" for text in below]
    body = "\n".join(
        f"<tr><th>{square}{escape(name)}{under}</th>"
        + "".join(f"<td{side}>{escape(text)}</td>" for side, text in zip(sides[1:], rest, strict=True))
        + "</tr>"
        for square, under, (name, *rest) in zip(squares or repeat(""), small or repeat(""), rows[1:], strict=False)
    )
    html = f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'
    return [f"| {' | '.join(line)} |" for line in lines], html


def pictures(drawn: Sequence[tuple[str, str, str]], note: str = "") -> Part:
    """On the page alone: what each is, what is seen in it, and the picture."""
    said = [f"<b>{escape(title)}</b> {escape(seen[:1].upper() + seen[1:])}" for title, seen, _ in drawn]
    figures = [f"<figure><figcaption>{one}</figcaption>{of[2]}</figure>\n" for one, of in zip(said, drawn, strict=True)]
    before = f"<p>{escape(note)}</p>\n" if note else ""
    return [], f'{before}<div class="pictures">\n{"".join(figures)}\n</div>'
