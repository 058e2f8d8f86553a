"""Training speed of rows against the full table, step by step in turns, so that a busy machine is busy for all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

from experiments.lab.errors import ExperimentError
from experiments.lab.settings import configured
from experiments.lab.training import How, Training
from experiments.tasks.sentiment.data import load
from experiments.tasks.sentiment.task import CONFIGS


@dataclass(frozen=True)
class Speed:
    """Of one row: tokens a second, a processor second, and how they stand to the full table's."""

    row: str
    per_second: float
    per_processor_second: float
    relative: float


def speeds(dataset: str, rows: Sequence[str], steps: int, data: Path | None) -> list[Speed]:
    """Medians over the steps, the same batches for every row; ``relative`` is the median ratio of times."""
    settings = [configured(CONFIGS, f"{dataset}-{row}", {}) for row in ("full", *rows)]
    texts = load(settings[0], data)
    contestants = [Training(one, How(), texts) for one in settings]
    wall: list[list[float]] = [[] for _ in contestants]
    processor: list[list[float]] = [[] for _ in contestants]
    tokens = []
    for number, batch in enumerate(islice(contestants[0].train_batches.epoch(), steps + 1)):
        for place, contestant in enumerate(contestants):
            begun, worked = time.perf_counter(), time.process_time()
            contestant.step(batch)
            if number:  # the first step allocates
                wall[place].append(time.perf_counter() - begun)
                processor[place].append(time.process_time() - worked)
        tokens.append(batch.tokens.numel())
    counted = tokens[1:]
    if not counted:
        raise ExperimentError(f"{dataset} has {len(tokens)} batch; two are needed to measure a speed.")
    return [
        Speed(
            one.row,
            median(n / t for n, t in zip(counted, wall[place], strict=True)),
            median(n / t for n, t in zip(counted, processor[place], strict=True)),
            median(full / t for full, t in zip(wall[0], wall[place], strict=True)),
        )
        for place, one in enumerate(settings)
    ]
