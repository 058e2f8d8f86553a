"""What is shown while the models train: a line for each on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
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
    """Lines for all models from the start, filled one after the other."""

    def __init__(self, console: Console, names: Sequence[str], steps: int, tokens: int) -> None:
        self.console, self.steps, self.tokens = console, steps, tokens
        self.width = max(map(len, names))
        self.bars = Progress(
            TextColumn(f"{{task.description:<{self.width}}}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.lines = [self.bars.add_task(name, total=steps, start=False, figures="") for name in names]
        self.names = list(names)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bars.stop()

    def watches(self) -> Iterator[Line]:
        """The models' lines, the time of each beginning when it is asked for."""
        for number, line in enumerate(self.lines):
            self.bars.start_task(line)
            yield Line(self, number)


class Line:
    """Watches one model."""

    def __init__(self, display: Display, number: int) -> None:
        self.display, self.number = display, number
        self.begin = time.perf_counter()
        self.loss, self.perplexity = 0.0, ""

    def stepped(self, step: int, loss: float) -> None:
        self.loss = loss
        self._draw(step)

    def validated(self, step: int, perplexity: float) -> None:
        self.perplexity = f"perplexity {perplexity:.1f}  "
        self._draw(step)
        if not self.display.console.is_terminal:
            self._print(step)

    def _draw(self, step: int) -> None:
        figures = f"loss {self.loss:.2f}  {self.perplexity}{self._speed(step):,.0f} tokens/s"
        self.display.bars.update(self.display.lines[self.number], completed=step, figures=figures)

    def _print(self, step: int) -> None:
        name, steps = f"{self.display.names[self.number]:<{self.display.width}}", self.display.steps
        left = (time.perf_counter() - self.begin) / step * (steps - step)
        self.display.console.print(
            f"{name}  step {step:>{len(str(steps))}} of {steps}  loss {self.loss:.2f}  {self.perplexity}"
            f"{self._speed(step):,.0f} tokens/s  {left:.0f} s left",
            soft_wrap=True,
        )

    def _speed(self, step: int) -> float:
        return step * self.display.tokens / (time.perf_counter() - self.begin)
