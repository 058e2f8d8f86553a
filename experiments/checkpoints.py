"""Where a run was, so that it goes on bit for bit: written whole or not at all, the last good one kept."""

from __future__ import annotations

import errno
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.errors import ExperimentError
from experiments.files import write_whole

NAME = "checkpoint.pt"


@dataclass
class Checkpoints:
    """The checkpoint of one run in a folder, due after so many steps or minutes, whichever comes first."""

    folder: Path
    fingerprint: str
    seed: int
    every_steps: int | None = None
    every_minutes: float | None = 5.0
    _steps: int = 0
    _time: float = field(default_factory=time.monotonic)

    @property
    def path(self) -> Path:
        """The one file."""
        return self.folder / NAME

    def due(self) -> bool:
        """Called once a step: is it time?"""
        self._steps += 1
        by_steps = self.every_steps is not None and self._steps >= self.every_steps
        by_time = self.every_minutes is not None and time.monotonic() - self._time >= 60 * self.every_minutes
        return by_steps or by_time

    def save(self, content: Mapping[str, Any]) -> None:
        """Replace the checkpoint; on a full disk the one before stays and the run stops with a message."""
        buffer = io.BytesIO()
        torch.save({"fingerprint": self.fingerprint, "seed": self.seed, **content}, buffer)
        try:
            write_whole(self.path, buffer.getbuffer())
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            raise ExperimentError(f"{NAME} could not be written: {reason}. {self.kept()}") from error
        self._steps, self._time = 0, time.monotonic()

    def load(self) -> dict[str, Any]:
        """What was saved; refused when it is of another configuration or damaged."""
        if not self.path.exists():
            raise ExperimentError(f"--resume: there is no checkpoint {self.path}; start without --resume.")
        try:
            content: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception as error:  # zip, pickle and torch each have their own
            raise ExperimentError(f"{self.path} is damaged: {error}. Remove it and start without --resume.") from None
        given = {"configuration": self.fingerprint, "seed": self.seed}
        found = {"configuration": content.get("fingerprint"), "seed": content.get("seed")}
        for name, value in given.items():
            if found[name] != value:
                raise ExperimentError(
                    f"{self.path} is of another {name} ({found[name]}, this run has {value}); "
                    "give the same options as before, or another --out, or start without --resume."
                )
        return content

    def kept(self) -> str:
        """A sentence on what is left of a run that stops."""
        if self.path.exists():
            return f"The last good checkpoint is {self.path}; --resume goes on from it."
        return "There was no checkpoint yet."

    def remove(self) -> None:
        """After the result is written nobody needs it."""
        self.path.unlink(missing_ok=True)
