"""What is shown while a model trains: a live line on a terminal, plain lines elsewhere, TensorBoard on request."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from experiments.lab.errors import ExperimentError


class Watch:
    """One run from start to end; silent in all processes but the first."""

    def __init__(self, name: str, steps: int, *, main: bool = True, logs: Path | None = None) -> None:
        self.name, self.main = name, main
        self.console = _Console(quiet=not main)
        self.board = _board(logs) if logs is not None and main else None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            disable=not (main and self.console.is_terminal),
        )
        self.task = self.bar.add_task(name, total=steps, figures="")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()
        if self.board is not None:
            self.board.close()

    def step(self, step: int, loss: float, metric: float | None, speed: float) -> None:
        """After each step: the running loss, the last validation metric, tokens a second."""
        metric_text = "" if metric is None else f"val {metric:.4f}  "
        self.bar.update(self.task, completed=step, figures=f"loss {loss:.4f}  {metric_text}{speed:,.0f} tokens/s")
        if self.board is not None:
            self.board.add_scalar("train/loss", loss, step)
            self.board.add_scalar("train/tokens_per_second", speed, step)

    def epoch(self, step: int, figures: dict[str, Any]) -> None:
        """After each epoch: a line that stays."""
        told = "  ".join(
            f"{key} {value:.4f}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        self.say(f"{self.name}  {told}")
        if self.board is not None:
            for key, value in figures.items():
                self.board.add_scalar(f"epoch/{key}", value, step)

    def say(self, text: str) -> None:
        """A line."""
        self.console.print(text, highlight=False, soft_wrap=True)


class _Console(Console):
    """Whoever reads may go away; the run goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ExperimentError("--tensorboard needs the package tensorboard: pip install '.[experiments]'.") from None
    return SummaryWriter(str(folder))
