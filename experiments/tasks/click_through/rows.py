"""Rows of numbers from Parquet files, streamed: what lies in memory is one window of row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.lab.batches import Batch, evenly
from experiments.lab.errors import ExperimentError

LABEL = "label"


def batch_of(labels: Tensor, ids: Tensor) -> Batch:  # (rows,), (rows, features)
    """Labels come first: speed is counted in rows."""
    return Batch({"labels": labels, "ids": ids})


class Streamed:
    """Batches of a split, epoch after epoch.

    With a seed row groups come in random order, and the rows of each window of them are shuffled together. What is in
    a batch follows from its step alone: a run goes on from any step, and reads nothing of the windows before it.
    """

    def __init__(
        self,
        path: Path,
        file: Any,  # as pyarrow has it open
        features: Sequence[str],
        size: int,
        *,
        seed: int | None = None,
        epochs: int = 1,
        validations: int = 1,
        window: int = 8,
        most: int | None = None,
    ) -> None:
        self.path, self.file, self.features = path, file, list(features)
        self.size, self.seed, self.epochs, self.window = size, seed, epochs, window
        self.counts: list[int] = []  # rows that are used of each row group
        left = most or file.metadata.num_rows
        for group in range(self.file.metadata.num_row_groups):
            self.counts.append(min(left, self.file.metadata.row_group(group).num_rows))
            left -= self.counts[-1]
        self.ends = evenly(epochs * len(self), epochs * validations)

    def __len__(self) -> int:
        return -(-sum(self.counts) // self.size)

    def batches(self, start: int = 0) -> Iterator[Batch]:
        for epoch in range(start // max(len(self), 1), self.epochs):
            yield from self.epoch(epoch, max(0, start - epoch * len(self)))

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        """From a batch on."""
        groups, draw = torch.arange(len(self.counts)), self.generator(epoch)
        if draw is not None:
            groups = groups[torch.randperm(len(groups), generator=draw)]
        skipped = start * self.size
        labels, ids = torch.empty(0), torch.empty(0, len(self.features), dtype=torch.int32)
        for number, window in enumerate(groups.split(self.window)):
            rows = sum(self.counts[group] for group in window)
            if skipped >= rows:
                skipped -= rows
                continue
            more = self.read(window.tolist(), self.generator(epoch, 1 + number))
            labels, ids = (torch.cat([old, new[skipped:]]) for old, new in zip((labels, ids), more, strict=True))
            skipped, whole = 0, len(labels) - len(labels) % self.size
            for at in range(0, whole, self.size):
                yield batch_of(labels[at : at + self.size], ids[at : at + self.size])
            labels, ids = labels[whole:], ids[whole:]
        if len(labels):
            yield batch_of(labels, ids)

    def generator(self, epoch: int, window: int = 0) -> torch.Generator | None:
        """Of the order of the row groups, or of the rows in a window of them."""
        if self.seed is None:
            return None
        return torch.Generator().manual_seed(((1_000_003 * self.seed + epoch) * 1_000_003 + window) % 2**63)

    def read(self, groups: Sequence[int], draw: torch.Generator | None) -> tuple[Tensor, Tensor]:
        from pyarrow.lib import ArrowException

        try:
            parts = [self.file.read_row_group(group)[: self.counts[group]] for group in groups]
        except (ArrowException, OSError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            told = f"{self.path} is damaged or cut short: {reason}."
            raise ExperimentError(f"{told} python -m experiments click-through prepare writes it anew.") from None
        labels = torch.from_numpy(np.concatenate([part[LABEL].to_numpy() for part in parts])).float()
        ids = torch.from_numpy(np.concatenate([numbers_of(part, self.features) for part in parts]))
        if draw is None:
            return labels, ids
        order = torch.randperm(len(labels), generator=draw)
        return labels[order], ids[order]


def numbers_of(table: Any, features: Sequence[str]) -> np.ndarray[Any, Any]:  # -> (rows, features)
    """Columns side by side."""
    return np.stack([table[feature].to_numpy() for feature in features], axis=1)
