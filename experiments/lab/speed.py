"""Training speed of rows against the first one, step by step in turns, so that a busy machine is busy for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from experiments.lab.errors import ExperimentError
from experiments.lab.rows import configured
from experiments.lab.settings import How
from experiments.lab.task import Task
from experiments.lab.training import Training


class Speed(NamedTuple):
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
    taken: list[list[tuple[int, float, float]]] = [[] for _ in contestants]  # tokens, seconds, processor seconds
    for batch in islice(contestants[0].source.batches(0), steps + 1):
        for contestant, times in zip(contestants, taken, strict=True):
            begun, worked = time.perf_counter(), time.process_time()
            contestant.step(batch)
            times.append((batch.numbers, time.perf_counter() - begun, time.process_time() - worked))
    if len(taken[0]) < 2:
        raise ExperimentError(f"{settings[0].dataset} has {len(taken[0])} batch; two are needed to measure a speed.")
    of_all = [times[1:] for times in taken]  # the first step allocates
    return [
        Speed(
            row.row,
            median(tokens / seconds for tokens, seconds, _ in times),
            median(tokens / seconds for tokens, _, seconds in times),
            median(first / mine for (_, first, _), (_, mine, _) in zip(of_all[0], times, strict=True)),
        )
        for row, times in zip(settings, of_all, strict=True)
    ]
