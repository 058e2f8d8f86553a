"""What the laboratory has to know of the task: its rows, their order, the grid of learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.records import read
from experiments.settings import Settings, configured

NAME = "sentiment"
CONFIGS = Path(__file__).parent / "configs"
RESULTS_FILE = "sentiment.jsonl"
SEARCH_FILE = "sentiment_search.jsonl"

# In the order of the paper's tables, and for IMDB the order they are run in: first what the claim is about.
SST5_ROWS = ("full", "LR3", "LR2", "LR1", "TT1", "TT2", "TT3", "TR1", "TR2", "TR3")
IMDB_ROWS = ("full", "TT3", "TT1", "TT2", "LR3", "LR2", "LR1", "TR6", "TR4", "TR5")
SST5_SEEDS = 5

# The grid is the same for every format; a format is searched with its largest table.
RATES = (5e-4, 1e-3, 2e-3)
SEARCHED_ROW = {"full": "full", "low_rank": "LR3", "tensor_train": "TT1", "tensor_ring": "TR1"}
SEARCH_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sst5": {"epochs": 5, "patience": 5},
    "imdb": {"epochs": 2, "patience": 2, "train_limit": 5000},
}


def runs() -> Iterator[tuple[str, str, int]]:
    """Dataset, row and seed of every run of the tables, the most telling first."""
    yield from (("sst5", row, 0) for row in SST5_ROWS)
    yield from (("imdb", row, 0) for row in IMDB_ROWS)
    yield from (("sst5", row, seed) for seed in range(1, SST5_SEEDS) for row in SST5_ROWS)


def searched_row(dataset: str, format: str) -> str:
    """The row a format's learning rate is searched with."""
    row = SEARCHED_ROW[format]
    return {"TR1": "TR4"}.get(row, row) if dataset == "imdb" else row


def searches(dataset: str, format: str) -> Iterator[Settings]:
    """The grid of one format."""
    name = f"{dataset}-{searched_row(dataset, format)}"
    for rate in RATES:
        yield configured(CONFIGS, name, {**SEARCH_OPTIONS[dataset], "lr": rate})


def searched_rate(results: Path, dataset: str, format: str) -> float | None:
    """The rate with the best validation accuracy, if the whole grid has been run; of equals the smaller."""
    found = {
        record["settings"]["lr"]: record["val_accuracy"]
        for record in read(results / SEARCH_FILE)
        if (record["dataset"], record["format"]) == (dataset, format)
    }
    if not set(RATES) <= set(found):
        return None
    return max(sorted(found), key=lambda rate: found[rate])


def with_searched_rate(config: str, options: Mapping[str, Any], results: Path) -> Settings:
    """A row with the rate that was found for its format, unless one is given."""
    settings = configured(CONFIGS, config, options)
    if options.get("lr") is not None:
        return settings
    rate = searched_rate(results, settings.dataset, settings.format)
    return settings if rate is None else configured(CONFIGS, config, {**options, "lr": rate})
