"""Text that files may have a part in, for messages and for a terminal: of one line, of a length to be read."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Controls, among them escape sequences; what turns the direction of writing; half characters; line separators.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
_LONGEST = 1000  # characters of a message about a file


def printable(text: str) -> str:
    r"""One line in which whatever a terminal would obey, and not show, is written out: ``\x1b``, ``\n``, ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _UNSEEN else char for char in text
    )


def shortened(text: str, most: int = _LONGEST) -> str:
    """Both ends of a text that is longer than ``most``, printable."""
    if len(text) > most:
        end = most // 3
        text = f"{text[: most - end - 5]} ... {text[-end:]}"
    shown = printable(text)
    return shown if len(shown) <= most else shortened(shown, most)


def some(names: Sequence[str], most: int = 3, apart: str = ", ") -> str:
    """The first of many, and how many more there are."""
    more = len(names) - most
    return apart.join(names[:most]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def short_messages() -> Iterator[None]:
    """Shorten what is said of a file while it is read: its names may be of any length and of any characters."""
    try:
        yield
    except (TypeError, ValueError) as error:
        said = str(error)
        if shortened(said) == said:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(shortened(said)) from None
