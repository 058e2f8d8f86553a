"""Where a run was, so that it goes on bit for bit: written whole or not at all, the last good one kept."""

from __future__ import annotations

import errno
import io
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from experiments.lab.errors import ExperimentError
from experiments.lab.files import write_whole
from experiments.lab.processes import started
from experiments.lab.settings import How, S, Settings, made

NAME = "checkpoint.pt"
MODEL = "model.pt"
ANEW = "Train it anew, with --keep-model."
M = TypeVar("M", bound=nn.Module)
CONTENT = ("model", "optimizer", "scheduler", "processes", "source", "state", "best", "data")


@dataclass
class Checkpoints:
    """The checkpoint of one run in a folder, due after so many steps or minutes, whichever comes first."""

    folder: Path
    settings: Mapping[str, Any]  # of the run it belongs to
    every_steps: int | None = None
    every_minutes: float = 5.0
    _steps: int = 0
    _time: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, task: str, settings: Settings, how: How) -> Checkpoints:
        folder = how.out / task / f"{settings.dataset}-{settings.row}-{settings.seed}"
        told = {"task": task, **settings.as_record(), "fsdp": how.fsdp, "processes": started()}
        return cls(folder, told, how.checkpoint_steps, how.checkpoint_minutes)

    @property
    def path(self) -> Path:
        return self.folder / NAME

    def due(self) -> bool:
        self._steps += 1
        by_steps = self.every_steps is not None and self._steps >= self.every_steps
        return by_steps or time.monotonic() - self._time >= 60 * self.every_minutes

    def save(self, content: Mapping[str, Any], name: str = NAME) -> None:
        """Replace the checkpoint; on a full disk the one before stays and the run stops with a message.

        Under another name it may hold the trained model alone, for the task's commands.
        """
        buffer = io.BytesIO()
        torch.save({"settings": dict(self.settings), **content}, buffer)
        try:
            write_whole(self.folder / name, buffer.getbuffer())
        except OSError as error:
            reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            raise ExperimentError(f"{name} could not be written: {reason}. {self.kept()}") from error
        self._steps, self._time = 0, time.monotonic()

    def load(self) -> dict[str, Any]:
        """What was saved; refused when it is of another configuration or damaged."""
        content = self.read()
        theirs, ours = content["settings"], self.settings
        names = [name for name in {**theirs, **ours} if name != "fingerprint" and theirs.get(name) != ours.get(name)]
        if names:
            other = ", ".join(f"{name} {theirs.get(name)} (now {ours.get(name)})" for name in names)
            raise ExperimentError(
                f"{self.path} is of another configuration: {other}. Give the same options as before, or another --out, "
                "or begin anew with --restart."
            )
        return content

    def read(self) -> dict[str, Any]:
        if not self.path.exists():
            raise ExperimentError(f"--resume: there is no checkpoint {self.path}; start without --resume.")
        return _read(self.path, CONTENT, "Begin anew with --restart.")

    def usable(self) -> bool:
        """Is there one, whole and of this configuration?"""
        try:
            return bool(self.load())
        except ExperimentError:
            return False

    def kept(self) -> str:
        """A sentence on what is left of a run that stops."""
        if self.path.exists():
            return f"The last good checkpoint is {self.path}; with the same options --resume goes on from it."
        return "There was no checkpoint yet."


def damaged(path: Path, reason: object) -> ExperimentError:
    """A kept model that cannot be used."""
    return ExperimentError(f"{path} is damaged: {str(reason).rstrip('.')}. {ANEW}")


def trained(path: Path, task: str, kind: type[S]) -> tuple[S, dict[str, Any]]:
    """Settings and tensors of a model of this task, from its file, its folder or the checkpoint of a run."""
    file = path / MODEL if path.is_dir() else path
    if not file.exists():
        raise ExperimentError(f"there is no {file}; a run with --keep-model leaves one.")
    content = _read(file, ("best",), ANEW)
    if not isinstance(content["best"], dict):
        raise damaged(file, "it has no tensors by name")
    told = dict(content["settings"])
    if (other := told.pop("task", None)) != task:
        raise ExperimentError(f"{file} is a model of the task {other}, not of {task}.")
    own = {name: value for name, value in told.items() if name not in ("fingerprint", "fsdp", "processes")}
    if not content["best"]:
        raise ExperimentError(f"{file} has no model yet: a run selects one by its first validation.")
    return made(kind, own, f"{file}: "), content["best"]


def rebuilt(build: Callable[[], M], tensors: Mapping[str, Any], path: Path) -> M:
    """The model that the settings of a file describe, with the file's tensors; refused when they are another one's.

    It is built without memory first: settings of a damaged file may describe layers of any size.
    """
    with torch.device("meta"):
        try:
            empty = build()
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:  # of a table that cannot be as they say
            raise damaged(path, f"its settings describe no model: {str(error).splitlines()[0]}") from None
        try:
            empty.load_state_dict(tensors, assign=True)
        except RuntimeError as error:  # the first line of several names the class only
            raise damaged(path, (str(error).splitlines()[1:] or [str(error)])[0].strip()[:300]) from None
    model = build()
    model.load_state_dict(tensors)
    return model


def _read(path: Path, wanted: Iterable[str], advice: str) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as parts:  # torch reads numbers that changed since they were written
            if (changed := parts.testzip()) is not None:
                raise ExperimentError(f"{changed} in it is not what was written")
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        missing = {"settings", *wanted} - set(content)
        if missing:
            raise ExperimentError(f"it has no {', '.join(sorted(missing))}")
        if not isinstance(content["settings"], dict):
            raise ExperimentError("it has no settings by name")
    except Exception as error:  # zip, pickle and torch each have their own
        spoken = isinstance(error, (ExperimentError, OSError, RuntimeError)) and str(error)
        reason = spoken.splitlines()[0].split(". ")[0] if spoken else "it is no file of tensors"
        raise ExperimentError(f"{path} is damaged: {reason}. {advice}") from None
    return content
