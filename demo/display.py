"""What is shown while the models train: a line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn, track


def track_files(console: Console, files: Sequence[Path]) -> Iterable[Path]:
    """The files, with a bar on a terminal and a line elsewhere."""
    if console.is_terminal:
        return track(files, "reading sources", console=console, transient=True)
    console.print(f"reading {len(files)} source files")
    return files


class Display:
    """Lines for all models, from the start to the end."""

    def __init__(self, console: Console, names: Sequence[str], steps: int, tokens: int) -> None:
        self.console, self.steps, self.tokens = console, steps, tokens
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        width = max(map(len, names))
        self.lines = [Line(self, f"{name:<{width}}") for name in names]
        self.stopped = Event()

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """An error or an interrupt in here ends all trainings at their next step, not in a minute."""
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise


class Line:
    """Watches the training of one model, in whichever thread that is."""

    def __init__(self, display: Display, name: str) -> None:
        self.display, self.name = display, name
        self.task = display.bars.add_task(name, total=display.steps, start=False, figures="")
        self.begin, self.loss, self.perplexity = 0.0, 0.0, ""

    def started(self) -> None:
        self.begin = time.perf_counter()
        self.display.bars.start_task(self.task)

    def stepped(self, step: int, loss: float) -> None:
        if self.display.stopped.is_set():
            raise InterruptedError(f"{self.name} was stopped at step {step}.")
        self.loss = loss
        self._draw(step)

    def validated(self, step: int, perplexity: float) -> None:
        self.perplexity = f"perplexity {perplexity:.1f}  "
        self._draw(step)
        if not self.display.console.is_terminal:
            self._print(step)

    def _draw(self, step: int) -> None:
        figures = f"loss {self.loss:.2f}  {self.perplexity}{self._speed(step):,.0f} tokens/s"
        self.display.bars.update(self.task, completed=step, figures=figures)

    def _print(self, step: int) -> None:
        steps = self.display.steps
        left = (time.perf_counter() - self.begin) / step * (steps - step)
        self.display.console.print(
            f"{self.name}  step {step:>{len(str(steps))}} of {steps}  loss {self.loss:.2f}  {self.perplexity}"
            f"{self._speed(step):,.0f} tokens/s  {left:.0f} s left",
            soft_wrap=True,
        )

    def _speed(self, step: int) -> float:
        return step * self.display.tokens / (time.perf_counter() - self.begin)
