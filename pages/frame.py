"""What stands around the content of every page: its head and its style."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

FRAME = Path(__file__).with_name("frame.html")


def page(title: str, content: Path, /, *, style: str = "", **parts: str) -> str:
    """The whole page: a file's HTML with its ``$parts`` filled in, inside the frame; ``style`` is more CSS."""
    main = Template(content.read_text(encoding="utf-8")).substitute(parts)
    frame = Template(FRAME.read_text(encoding="utf-8"))
    return frame.substitute(title=escape(title), style=style, main=main.strip())
