"""How far long work is: a bar on standard error where that is a terminal, and else a line every ten seconds.

Written on the standard library because the library itself depends on torch and safetensors only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from tensorbed.printable import printable

T = TypeVar("T")

_WIDTHS = (30, 20, 10)  # characters of a bar, the most that there is room for
_SHORTEST = 10  # characters of a name, however narrow the terminal is
_COLUMNS = 80  # of a terminal that does not tell
_PATIENCE = 1.0  # seconds before a bar is drawn
_PAUSE = 0.1  # seconds between two drawings
_SILENCE = 10.0  # seconds between two lines where nobody sees bars


@dataclass(eq=False)
class _Task:
    """One thing that is under way; without steps, what those inside of it are about."""

    label: str
    total: int = 0
    done: int = 0
    begin: float = 0.0

    def __str__(self) -> str:
        return printable(self.label) + (f" {self.done + 1} of {self.total}" if self.total > 1 else "")

    def left(self, now: float) -> str:
        return f"{(now - self.begin) * (self.total - self.done) / self.done:.0f} s left" if self.done else ""


class _Tasks(threading.local):
    """What is under way in a thread, the outermost first, and when that was last shown."""

    def __init__(self) -> None:
        self.all: list[_Task] = []
        self.shown = 0.0
        self.is_drawn = False

    @contextmanager
    def within(self, task: _Task) -> Iterator[None]:
        if not any(one.total for one in self.all):
            self.shown = task.begin
        here = self.all  # a generator may be closed by another thread, which has a list of its own
        here.append(task)
        try:
            yield
        finally:
            here.remove(task)
            if self.is_drawn and not any(one.total for one in here):
                _write("\r\033[K")
                self.is_drawn = False

    def show(self) -> None:
        """Called at every step: draw or write if it is time for it."""
        now = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            begin = min(task.begin for task in self.all if task.total)
            if now - begin > _PATIENCE and now - self.shown > _PAUSE:
                _write(f"\r\033[K{self._bar(now)}")
                self.shown, self.is_drawn = now, True
        elif now - self.shown >= _SILENCE:
            told, place = self._told()
            _write(", ".join(filter(None, [*map(str, told), told[place].left(now)])) + "\n")
            self.shown = now

    def _told(self) -> tuple[list[_Task], int]:
        """What is worth telling, and the place in it of the outermost with several steps: its bar runs once."""
        told = [task for task in self.all if task.total != 1 or task is self.all[-1]]
        return told, next((place for place, task in enumerate(told) if task.total > 1), len(told) - 1)

    def _bar(self, now: float) -> str:
        """One line of the terminal, since what has two cannot be wiped; where it is narrow, shorter."""
        (told, place), room = self._told(), _COLUMNS - 1
        with suppress(OSError, ValueError, AttributeError):
            room = (os.get_terminal_size(sys.stderr.fileno()).columns or _COLUMNS) - 1
        task = told[place]
        before = ", ".join([*map(str, told[:place]), printable(task.label)])
        count = "  ".join(filter(None, (f"{task.done} of {task.total}", task.left(now))))
        inside = ", ".join(map(str, told[place + 1 :]))
        space = room - len(count) - 4
        width = next((width for width in _WIDTHS if width + len(before) + len(inside) + 2 <= space), _WIDTHS[-1])
        kept = max(space - width, _SHORTEST)
        before = before if len(before) <= kept else f"...{before[3 - kept :]}"
        filled = width * task.done // task.total
        drawn = f"{before}  {'█' * filled}{'░' * (width - filled)}  {count}  {inside}".rstrip()
        return drawn if len(drawn) <= room else f"{drawn[: room - 3]}..."


_TASKS = _Tasks()


def track(steps: Collection[T], label: str) -> Iterator[T]:
    """Yield the steps. Once they have taken a second a bar is drawn; without a terminal, a line every ten.

    Steps inside of steps are shown together: the bar is that of the outermost with several.
    """
    task = _Task(label, len(steps), begin=time.monotonic())
    with _TASKS.within(task):
        for done, step in enumerate(steps):
            task.done = done
            _TASKS.show()
            yield step


@contextmanager
def about(name: str) -> Iterator[None]:
    """Say what the steps inside are about, a table by its name; nothing when there is no name."""
    with _TASKS.within(_Task(name)) if name else nullcontext():
        yield


def _write(text: str) -> None:
    """Whatever becomes of it: nobody loses their work because a pipe was closed."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
