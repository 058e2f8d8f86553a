"""What is shown while models train: a line for each on a terminal, plain lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.lab.errors import ExperimentError
from experiments.lab.task import Task


class Display(Progress):
    """Runs side by side from start to end, a line each; silent in all processes but the first."""

    def __init__(
        self, task: Task, names: Sequence[str], steps: int, *, main: bool = True, logs: Path | None = None
    ) -> None:
        console = _Console(quiet=not main)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not (main and console.is_terminal),
        )
        self.task, self.steps = task, steps
        self.board: Any = None
        if logs is not None and main:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                needs = "--tensorboard needs the package tensorboard: pip install '.[experiments]'."
                raise ExperimentError(needs) from None
            self.board = SummaryWriter(str(logs))
        width = max(map(len, names))
        self.lines = [Line(self, f"{name:<{width}}") for name in names]

    def stop(self) -> None:
        super().stop()
        if self.board is not None:
            self.board.close()

    def to_board(self, group: str, step: int, figures: Mapping[str, float]) -> None:
        if self.board is not None:
            for name, value in figures.items():
                self.board.add_scalar(f"{group}/{name}", value, step)


class Line:
    """One run, in whichever thread it is."""

    def __init__(self, display: Display, name: str) -> None:
        self.display, self.name = display, name
        self.bar = display.add_task(name, total=display.steps, start=False, figures="")
        self.begun, self.first, self.metric = 0.0, 0, ""

    def started(self, step: int = 0) -> None:
        self.begun, self.first = time.perf_counter(), step
        self.display.start_task(self.bar)

    def stepped(self, step: int, loss: float, speed: float) -> None:
        """After each step: the running loss, the last validation, tokens a second."""
        items = self.display.task.items
        figures = f"loss {loss:.4f}  {self.metric}{speed:,.0f} {items}/s"
        self.display.update(self.bar, completed=step, figures=figures)
        self.display.to_board("train", step, {"loss": loss, f"{items}_per_second": speed})

    def validated(self, step: int, figures: dict[str, Any]) -> None:
        """After each validation: a line that stays."""
        task, steps = self.display.task, self.display.steps
        value = task.metrics[0].written(figures[f"val_{task.metrics[0].name}"])
        self.metric = f"{task.metrics[0].name} {value}  "
        epoch = f"epoch {figures['epoch']}  " if task.stage == "epoch" else ""
        left = (time.perf_counter() - self.begun) / max(1, step - self.first) * (steps - step)
        told = f"step {step} of {steps}  loss {figures['train_loss']:.4f}  {self.metric}{left:.0f} s left"
        self.display.console.print(f"{self.name}  {epoch}{told}", highlight=False, soft_wrap=True)
        self.display.to_board("epoch", step, figures)


class _Console(Console):
    """Whoever reads may go away; the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
