"""What the laboratory has to know of the task: its rows, their order, the grid of learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.records import read
from experiments.settings import Settings, configured

NAME = "sentiment"
PAPER = Path(__file__).parent / "paper.toml"
CONFIGS = Path(__file__).parent / "configs"
RESULTS_FILE = "sentiment.jsonl"
SEARCH_FILE = "sentiment_search.jsonl"

# In the order they are run in: for IMDB first what the claim is about, and the two largest rings after all else.
SST5_ROWS = ("full", "LR3", "LR2", "LR1", "TT1", "TT2", "TT3", "TR1", "TR2", "TR3")
IMDB_ROWS = ("full", "TT3", "TT1", "TT2", "LR3", "LR2", "LR1", "TR6")
IMDB_LAST_ROWS = ("TR4", "TR5")
SST5_SEEDS = 5
# Beside the tables: texts padded to one length as in the paper's code, where the full table learnt a row for padding
# and a compressed one read zeros; and the full table with zeros.
PADDED_ROWS = ("full-padded", "full-zero-padded", "TT1-padded")
PADDED_SEEDS = 2

# Learning rate, and standard deviation of the drawn table (None is Glorot's, as in the paper; 1 is torch's own). The
# grid is the same for every format; a format is searched with its first row.
GRID: tuple[tuple[float, float | None], ...] = tuple((lr, std) for std in (None, 1.0) for lr in (7e-4, 2e-3))
SEARCHED_ROWS = {
    "sst5": {"full": "full", "low_rank": "LR3", "tensor_train": "TT1", "tensor_ring": "TR1"},
    "imdb": {"full": "full", "low_rank": "LR3", "tensor_train": "TT1", "tensor_ring": "TR4"},
}
SEARCH_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sst5": {"epochs": 6, "patience": 6},
    "imdb": {"epochs": 2, "patience": 2, "train_limit": 5000},
}


def runs() -> Iterator[tuple[str, str, int]]:
    """Dataset, row and seed of every run of the tables, the most telling first."""
    yield from (("imdb", row, 0) for row in IMDB_ROWS)
    yield from (("sst5", row, seed) for seed in range(SST5_SEEDS) for row in SST5_ROWS)
    yield from (("sst5", row, seed) for seed in range(PADDED_SEEDS) for row in PADDED_ROWS)
    yield from (("imdb", row, 0) for row in IMDB_LAST_ROWS)


def points(results: Path, dataset: str, format: str) -> dict[tuple[float, float | None], float]:
    """Validation accuracy of the points of a format's grid that have been tried."""
    return {
        (record["settings"]["lr"], record["settings"]["std"]): record["val_accuracy"]
        for record in read(results / SEARCH_FILE)
        if (record["dataset"], record["format"]) == (dataset, format)
    }


def found(results: Path, dataset: str, format: str) -> tuple[float, float | None] | None:
    """The point with the best validation accuracy, once the whole grid has been tried; of equals the earlier one."""
    tried = points(results, dataset, format)
    return max(GRID, key=lambda point: tried[point]) if set(GRID) <= set(tried) else None


def with_found(config: str, options: Mapping[str, Any], results: Path) -> Settings:
    """A row with the rate and the deviation that were found for its format, unless a rate is given."""
    settings = configured(CONFIGS, config, options)
    point = found(results, settings.dataset, settings.format)
    if point is None or options.get("lr") is not None:
        return settings
    rate, std = point
    return replace(settings, lr=rate, std=settings.std if options.get("std") is not None else std)
