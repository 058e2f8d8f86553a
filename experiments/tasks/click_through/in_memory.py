"""Rows that lie in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from experiments.lab.batches import Batch, Epochs
from experiments.tasks.click_through.model import ClickThroughSettings


@dataclass(frozen=True)
class InMemory:
    """Rows of numbers by split, and how many of its values training has not seen."""

    tables: Mapping[str, int]
    splits: Mapping[str, Batch]
    unseen: Mapping[str, Mapping[str, float]]  # shares by split and feature
    maps: int

    def sizes(self) -> dict[str, Any]:
        return {**{split: [batch.rows] for split, batch in self.splits.items()}, "maps": self.maps}

    def training(self, settings: ClickThroughSettings) -> Epochs:
        train = self.splits["train"].take(slice(settings.rows))
        return Epochs([train], settings.batch, settings.seed, settings.epochs, settings.validations)

    def in_order(self, settings: ClickThroughSettings, split: str) -> Iterator[Batch]:
        return Epochs([self.splits[split].take(slice(settings.rows))], settings.batch).batches()

    def told(self) -> dict[str, Any]:
        """For the line of results."""
        return {"unseen": self.unseen}
