"""A progress bar for work of more than a second, where a terminal is there to show it.

Written on the standard library because the library itself depends on torch and safetensors only.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from typing import TypeVar

from tensorbed.printable import printable

T = TypeVar("T")

_WIDTH = 30
_PATIENCE = 1.0  # seconds before anything is shown
_PAUSE = 0.1  # seconds between two drawings


def track(steps: Collection[T], label: str) -> Iterator[T]:
    """Yield the steps, drawing a bar on standard error once they have taken more than a second."""
    terminal = sys.stderr.isatty()
    begin = shown = time.monotonic()
    drawn = False
    try:
        for done, step in enumerate(steps):
            now = time.monotonic()
            if terminal and now - begin > _PATIENCE and now - shown > _PAUSE:
                _draw(label, done, len(steps), now - begin)
                shown, drawn = now, True
            yield step
    finally:
        if drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def _draw(label: str, done: int, total: int, seconds: float) -> None:
    filled = _WIDTH * done // total
    left = f"{seconds * (total - done) / done:.0f} s left" if done else ""
    sys.stderr.write(f"\r\033[K{printable(label)}  {'█' * filled}{'░' * (_WIDTH - filled)}  {done} of {total}  {left}")
    sys.stderr.flush()
