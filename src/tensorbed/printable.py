"""Text that files may have a part in, for a terminal."""

from __future__ import annotations

import unicodedata

# Controls, among them escape sequences; what turns the direction of writing; half characters; line separators.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str) -> str:
    r"""One line in which whatever a terminal would obey, and not show, is written out: ``\x1b``, ``\n``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNSEEN else char for char in text
    )
