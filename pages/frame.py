"""What stands around the content of every page: its head and its style."""

from __future__ import annotations

from html import escape
from pathlib import Path
from string import Template

FRAME = Path(__file__).with_name("frame.html")


def page(title: str, content: str, /, *, style: str = "", **parts: str) -> str:
    """The whole page: HTML, with its ``$parts`` filled in if it has any, inside the frame; ``style`` is more CSS."""
    main = Template(content).substitute(parts) if parts else content
    frame = Template(FRAME.read_text(encoding="utf-8"))
    return frame.substitute(title=escape(title), style=style, main=main.strip())
