"""README.md as the page of a package index shows it, where links to files of this folder would lead nowhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PICTURE = re.compile(r"<picture>.*?</picture>\n*", re.DOTALL)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<words>[^\]]*)\]\((?!https?://)(?P<file>[^)#\s]+)[^)]*\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``[project]`` that pyproject.toml asks for here."""
    text = Path("README.md").read_text(encoding="utf-8")
    return {"readme": {"text": for_an_index(text), "content-type": "text/markdown"}}


def for_an_index(text: str) -> str:
    """With the names of files in place of links to them, and without their pictures."""
    text = _PICTURE.sub("", text)
    return _LINK.sub(lambda link: "" if link["picture"] else f"{link['words']} ({link['file']})", text)
