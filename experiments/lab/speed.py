"""Training speed of rows against the first one, step by step in turns, so that a busy machine is busy for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.task import Task
from experiments.lab.training import Training


@dataclass(frozen=True)
class Speed:
    """Of one row: tokens a second, a processor second, and how they stand to the first row's."""

    row: str
    per_second: float
    per_processor_second: float
    relative: float


def speeds(task: Task, rows: Sequence[str], steps: int, data: Path | None) -> list[Speed]:
    """Medians over the steps, the same batches for every row; ``relative`` is the median ratio of times."""
    settings = [configured(task, row, {}) for row in rows]
    loaded = task.load(settings[0], data)
    contestants = [Training(task, one, How(), loaded) for one in settings]
    wall: list[list[float]] = [[] for _ in contestants]
    processor: list[list[float]] = [[] for _ in contestants]
    counts = []
    for number, batch in enumerate(islice(contestants[0].source.batches(0), steps + 1)):
        for place, contestant in enumerate(contestants):
            begun, worked = time.perf_counter(), time.process_time()
            contestant.step(batch)
            if number:  # the first step allocates
                wall[place].append(time.perf_counter() - begun)
                processor[place].append(time.process_time() - worked)
        counts.append(batch.numbers)
    counted = counts[1:]
    if not counted:
        raise ExperimentError(f"{settings[0].dataset} has {len(counts)} batch; two are needed to measure a speed.")
    return [
        Speed(
            one.row,
            median(n / t for n, t in zip(counted, wall[place], strict=True)),
            median(n / t for n, t in zip(counted, processor[place], strict=True)),
            median(first / t for first, t in zip(wall[0], wall[place], strict=True)),
        )
        for place, one in enumerate(settings)
    ]
