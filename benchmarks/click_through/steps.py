"""One point of the curve, in a process that has done nothing else: training steps, and the memory at their peak."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.allocator import keep_freed_memory
from benchmarks.click_through.contestants import CONTESTANTS, DIM, Contestant, adam
from benchmarks.memory import Peak
from benchmarks.peers import CannotRunError, require_memory
from experiments.tasks.click_through.criteo import FEATURES
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings
from experiments.tasks.click_through.synthetic import Synthetic

BATCHES = 8  # different ones, over and over
_FEWEST, _MOST = 3, 50  # steps that are timed
_WARM = 2  # and those before them
_LARGEST = 12 * 10**9  # bytes: no more is asked of a machine, as along the curves of make bench


@dataclass(frozen=True)
class Case:
    """Whose tables, how many rows each of the 26 large ones has, the width of the body, and the rows of a batch."""

    implementation: str
    rows: int
    hidden: int = 1024
    batch: int = 4096


@dataclass(frozen=True)
class Point:
    """Medians in milliseconds, and bytes at the peak.

    Attributes:
        tables_ms: a step of the tables alone: forward, backward from a given gradient, optimiser.
        step_ms: a step of the whole model, with its body and its loss.
        rows_per_second: of the whole model.
        tables_bytes: of training the tables alone, they themselves and the optimiser's state included.
        model_bytes: the same of the whole model.
    """

    tables_ms: float
    step_ms: float
    rows_per_second: float
    parameters: int
    tables_bytes: int
    model_bytes: int


class Tables:
    """The tables of a contestant, and what trains them."""

    def __init__(self, contestant: Contestant, rows: int) -> None:
        self.module = contestant.build(Synthetic.of_size(rows).tables)
        self.optimisers = [contestant.optimiser(self.module.parameters())] if contestant.optimiser else []

    def step(self, given: Any, gradient: Tensor) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        self.module(given).backward(gradient)
        for optimiser in self.optimisers:
            optimiser.step()


class Model(Tables):
    """The same under layers that tell clicks, trained by Adam."""

    def __init__(self, tables: Tables, hidden: int) -> None:
        settings = ClickThroughSettings(dataset="synthetic", row="scale", dim=DIM, hidden=hidden)
        self.module, self.body = tables.module, ClickModel(settings, dict.fromkeys(FEATURES, 1)).body
        self.optimisers = [*tables.optimisers, adam(self.body.parameters())]

    def step(self, given: Any, labels: Tensor) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad()
        scores = self.body(self.module(given)).squeeze(1)
        F.binary_cross_entropy_with_logits(scores, labels).backward()
        for optimiser in self.optimisers:
            optimiser.step()


def measured(case: Case, seconds: float, torchrec: str = "") -> Point:
    """A point, or :class:`CannotRunError`; TorchRec may be installed in a folder of its own."""
    keep_freed_memory()
    if torchrec:
        sys.path.append(torchrec)
    contestant = CONTESTANTS[case.implementation]
    need = contestant.needs(Synthetic.of_size(case.rows).tables)
    if need > _LARGEST:
        raise CannotRunError(f"needs {need / 1e9:.0f} GB")
    require_memory(need)
    gradient = torch.randn(case.batch, len(FEATURES) * DIM) / case.batch
    try:
        warm_up(case, contestant, gradient)
    except ImportError as error:
        raise CannotRunError(f"{error.name} is not installed: make .venv/.torchrec") from error
    batches = drawn(case, contestant)
    torch.manual_seed(0)
    peak = Peak()
    tables = Tables(contestant, case.rows)
    tables_ms = milliseconds(lambda batch: tables.step(batch[0], gradient), batches, seconds)
    tables_bytes = peak.extra().bytes
    model = Model(tables, case.hidden)
    step_ms = milliseconds(lambda batch: model.step(*batch), batches, seconds)
    parameters = sum(parameter.numel() for parameter in tables.module.parameters())
    return Point(tables_ms, step_ms, 1e3 * case.batch / step_ms, parameters, tables_bytes, peak.extra().bytes)


def warm_up(case: Case, contestant: Contestant, gradient: Tensor) -> None:
    """Threads, workspaces and imports are made before memory is counted."""
    Tables(contestant, 1).step(contestant.given(torch.zeros(case.batch, len(FEATURES), dtype=torch.int64)), gradient)


def drawn(case: Case, contestant: Contestant) -> list[tuple[Any, Tensor]]:
    """Batches and their labels, in the contestant's form."""
    data = Synthetic.of_size(case.rows)
    made = []
    for step in range(BATCHES):
        labels, ids = data.rows(case.batch, 0, step)
        made.append((contestant.given(torch.from_numpy(ids)), torch.from_numpy(labels)))
    return made


def milliseconds(
    step: Callable[[tuple[Any, Tensor]], None], batches: list[tuple[Any, Tensor]], seconds: float
) -> float:
    """The median of as many steps as the seconds allow, after some that make the optimiser's state."""
    taken: list[float] = []
    for number, batch in enumerate(cycle(batches)):
        begin = time.perf_counter()
        step(batch)
        if number >= _WARM:
            taken.append(1e3 * (time.perf_counter() - begin))
        if len(taken) == _MOST or (len(taken) >= _FEWEST and sum(taken) >= 1e3 * seconds):
            break
    return median(taken)
