"""What a task is to the laboratory, and how it is found: by its folder.

``experiments/tasks/<name>/`` holds ``task.py`` with an object ``TASK``, ``report.toml`` with its titles and sentences,
``configs/`` with ``defaults.toml`` and a file for each row, and, where there is more, ``configs/sweep.toml`` (runs,
searches, budgets of the league) and ``paper.toml`` (the figures of a paper to stand beside ours).
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.batches import Batch, Source
from experiments.lab.errors import ExperimentError, unknown
from experiments.lab.formats import stored
from experiments.lab.metrics import Evaluation, Metric
from experiments.lab.settings import Settings, read_toml

if TYPE_CHECKING:
    from experiments.lab.training import Training

PARTS = ("task.py", "report.toml", "configs/defaults.toml")


class Task(ABC):
    """Data, model, loss and measure of one task. Whatever else a run needs is the laboratory's."""

    settings: ClassVar[type[Settings]] = Settings
    metrics: ClassVar[tuple[Metric, ...]]  # the first one selects
    tests: ClassVar[tuple[str, ...]] = ("test",)  # splits that are looked at once, by the selected model
    selects: ClassVar[bool] = True  # the best on validation; or else the last
    stage: ClassVar[str] = "epoch"  # what validations are counted in: epoch or step
    items: ClassVar[str] = "tokens"  # what its speed is counted in
    commands: ClassVar[Mapping[str, Callable[..., None]]] = {}  # more of them, as typer takes functions

    @abstractmethod
    def load(self, settings: Any, folder: Path | None) -> Any:
        """The data, from a folder or from where it is public; ``sizes()`` of it tells it from other data."""

    @abstractmethod
    def model(self, settings: Any, data: Any) -> nn.Module:
        """The model, drawn from torch's own random numbers."""

    @abstractmethod
    def batches(self, settings: Any, data: Any) -> Source:
        """What it is trained on."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, Any]:
        """Summed over the batch, and what goes on to the next one, if anything. The model is only called."""

    @abstractmethod
    def evaluate(self, evaluation: Evaluation, data: Any, split: str) -> dict[str, float]:
        """Every metric, and other figures, on ``validation`` or one of ``tests``."""

    def count(self, batch: Batch) -> float:
        """What the loss of a batch is a sum over: its rows, or tokens in them."""
        return batch.rows

    def divisor(self, settings: Any, batch: Batch) -> float:
        """What the summed loss of a whole batch is divided by."""
        return self.count(batch)

    def table_sizes(self, settings: Any) -> list[tuple[int, int]]:
        """Rows and columns of the tables, as far as they are known before there is data."""
        return [(settings.vocabulary, settings.dim)]

    def parameters(self, settings: Any, model: nn.Module) -> Iterable[Any]:
        """What the optimiser takes, groups if there are several."""
        return model.parameters()

    def ratio(self, model: nn.Module) -> float:
        """Bytes of all tables in full over the bytes of what is stored of them, without rows or biases beside them."""
        kept = [stored(layer).structure for layer in tables(model)]
        return float(sum(4 * each.rows * each.cols for each in kept) / sum(each.bytes(torch.float32) for each in kept))

    def after(self, run: Training) -> Mapping[str, Any]:
        """More figures for the result, by a step after training with the selected model."""
        return {}

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def folder(self) -> Path:
        return Path(str(sys.modules[type(self).__module__].__file__)).parent

    @property
    def configs(self) -> Path:
        return self.folder / "configs"

    @cached_property
    def texts(self) -> dict[str, Any]:
        return read_toml(self.folder / "report.toml")

    def check_tables(self, settings: Any) -> None:
        """Tables of this size, format and shape can be made; nothing is allocated to see it."""
        try:
            for rows, cols in self.table_sizes(settings):
                tb.Embedding(rows, cols, settings.table_format(rows, cols), device="meta")
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise ExperimentError(f"{settings.dataset} {settings.row}: {str(error).splitlines()[0]}") from None


def tables(model: nn.Module) -> list[Any]:
    """The layers of the library in a model, each table once: several may share the tensors of one."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "structure")]
    once: dict[int, Any] = {}
    for layer in layers:
        once.setdefault(id(next(iter(layer.params().values()))), layer)
    return list(once.values())


def decaying(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for an optimiser: weights of the body decay; tables, biases and norms do not."""
    kept = {id(tensor) for layer in tables(model) for tensor in layer.parameters()}
    weights = [tensor for tensor in model.parameters() if tensor.dim() == 2 and id(tensor) not in kept]
    others = [tensor for tensor in model.parameters() if tensor.dim() != 2 or id(tensor) in kept]
    return [{"params": weights}, {"params": others, "weight_decay": 0.0}]


def task_folders() -> dict[str, Path]:
    """Every folder that may hold a task, by name."""
    import experiments.tasks as places

    found = (folder for place in places.__path__ for folder in sorted(Path(place).glob("[!_.]*")) if folder.is_dir())
    return {folder.name: folder for folder in found}


def find(name: str) -> Task:
    """The task of that name, whole; it may be written with hyphens."""
    folders = task_folders()
    own = name.replace("-", "_")
    if own not in folders:
        raise unknown("task", name, folders)
    for part in PARTS:
        if not (folders[own] / part).exists():
            raise ExperimentError(f"the task {own} lacks a part: there is no {folders[own] / part}.")
    try:
        task = getattr(importlib.import_module(f"experiments.tasks.{own}.task"), "TASK", None)
    except TypeError as error:
        if "abstract" not in str(error):
            raise
        raise ExperimentError(f"the task {own} lacks a part: {error}.") from None
    if not isinstance(task, Task):
        kind = "an instance of a subclass of experiments.lab.task.Task"
        raise ExperimentError(f"the task {own} lacks a part: {folders[own] / 'task.py'} has no TASK, {kind}.")
    for part in ("title", "lead"):
        if part not in task.texts:
            raise ExperimentError(f"the task {own} lacks a part: there is no {part} in {folders[own] / 'report.toml'}.")
    if not getattr(task, "metrics", ()):
        raise ExperimentError(f"the task {own} lacks a part: its TASK has no metrics, of which the first one selects.")
    return task
