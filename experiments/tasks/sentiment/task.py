"""What the laboratory has to know of the task: its rows, their order, the grid of rates, what options make of a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.lab.errors import unknown
from experiments.lab.records import read
from experiments.lab.settings import Settings, configured, recorded
from experiments.lab.settings import smoke as tiny

PAPER = Path(__file__).parent / "paper.toml"
CONFIGS = Path(__file__).parent / "configs"
RESULTS_FILE = "sentiment.jsonl"
SEARCH_FILE = "sentiment_search.jsonl"

# In the order they are run in: for IMDB first what the claim is about, and the two largest rings after all else.
SST5_ROWS = ("full", "LR3", "LR2", "LR1", "TT1", "TT2", "TT3", "TR1", "TR2", "TR3")
IMDB_ROWS = ("full", "TT3", "TT1", "TT2", "LR3", "LR2", "LR1", "TR6")
IMDB_LAST_ROWS = ("TR4", "TR5")
SST5_SEEDS = 10
# Beside the tables: texts padded to one length as in the paper's code, where the full table learnt a row for padding
# and a compressed one read zeros; and the full table with zeros.
PADDED_ROWS = ("full-padded", "full-zero-padded", "TT1-padded")
PADDED_SEEDS = 2
# And twice the epochs: trains are at their best towards the end of the schedule, the full table near its beginning.
LONG_ROWS = ("full-long", "TT1-long", "TT2-long", "TT3-long")
LONG_SEEDS = 5

# Learning rate, and standard deviation of the drawn table (None is Glorot's, as in the paper; 1 is torch's own). The
# grid of a dataset is the same for every format; a format is searched with its first row. On the small validation set
# of SST-5 one seed tells points apart by chance: theirs are means.
Point = tuple[float, float | None]
RATES = {"sst5": (7e-4, 2e-3, 5e-3, 1e-2), "imdb": (7e-4, 2e-3)}
GRIDS: dict[str, tuple[Point, ...]] = {
    dataset: tuple((lr, std) for std in (None, 1.0) for lr in rates) for dataset, rates in RATES.items()
}
SEARCH_SEEDS = {"sst5": 3, "imdb": 1}
SEARCHED_ROWS = {
    "sst5": {"full": "full", "low_rank": "LR3", "tensor_train": "TT1", "tensor_ring": "TR1"},
    "imdb": {"full": "full", "low_rank": "LR3", "tensor_train": "TT1", "tensor_ring": "TR4"},
}
SEARCH_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sst5": {"epochs": 5, "patience": 5},
    "imdb": {"epochs": 2, "patience": 2, "train_limit": 5000},
}


def runs() -> Iterator[tuple[str, str, int]]:
    """Dataset, row and seed of every run of the tables, the most telling first."""
    yield from (("imdb", row, 0) for row in IMDB_ROWS)
    yield from (("sst5", row, seed) for seed in range(SST5_SEEDS) for row in SST5_ROWS)
    yield from (("sst5", row, seed) for seed in range(PADDED_SEEDS) for row in PADDED_ROWS)
    yield from (("sst5", row, seed) for seed in range(LONG_SEEDS) for row in LONG_ROWS)
    yield from (("imdb", row, 0) for row in IMDB_LAST_ROWS)


def tried(settings: Settings) -> Settings:
    """A point of the grid under its own name."""
    return replace(settings, row=f"{settings.row}-lr{settings.lr:g}-std{settings.std or 'glorot'}")


def trials(results: Path, dataset: str, format: str) -> dict[tuple[Point, int], float]:
    """Validation accuracy of each point and seed of a format's grid that has been tried, with the settings of today."""
    lines = [record for record in read(results / SEARCH_FILE) if isinstance(record.get("val_accuracy"), float)]
    seen = {recorded(record): record["val_accuracy"] for record in lines}
    searched = configured(CONFIGS, f"{dataset}-{SEARCHED_ROWS[dataset][format]}", SEARCH_OPTIONS[dataset])
    wanted = {
        ((lr, std), seed): tried(replace(searched, lr=lr, std=std, seed=seed))
        for lr, std in GRIDS[dataset]
        for seed in range(SEARCH_SEEDS[dataset])
    }
    return {trial: seen[settings] for trial, settings in wanted.items() if settings in seen}


def points(results: Path, dataset: str, format: str) -> dict[Point, float]:
    """Validation accuracy of the points of a format's grid that have been tried with every seed, the mean over them."""
    scores: defaultdict[Point, list[float]] = defaultdict(list)
    for (point, _), score in trials(results, dataset, format).items():
        scores[point].append(score)
    return {point: fmean(of) for point, of in scores.items() if len(of) == SEARCH_SEEDS[dataset]}


def grids(results: Path) -> dict[tuple[str, str], dict[Point, float]]:
    """The points of every dataset and format that has any."""
    of_all = {
        (dataset, format): points(results, dataset, format)
        for dataset, rows in SEARCHED_ROWS.items()
        for format in rows
    }
    return {key: tried for key, tried in of_all.items() if tried}


def found(results: Path, dataset: str, format: str) -> Point | None:
    """The point with the best validation accuracy, once the whole grid has been tried; of equals the earlier one."""
    scores = points(results, dataset, format)
    grid = GRIDS[dataset]
    return max(grid, key=lambda point: scores[point]) if set(grid) <= set(scores) else None


def with_found(config: str, options: Mapping[str, Any], results: Path) -> Settings:
    """A row with the rate and the deviation found for its format, where neither its file nor the options tell them."""
    settings = configured(CONFIGS, config, options)
    point = found(results, settings.dataset, settings.format)
    if point is None:
        return settings
    return configured(CONFIGS, config, options, {"lr": point[0], "std": point[1]})


def settle(config: str | None, options: Mapping[str, Any], results: Path, *, smoke: bool, search: bool) -> Settings:
    """The settings of a run: a row's file, or full tables on SST-5, and the options on top."""
    given = {option: value for option, value in options.items() if value is not None}
    dataset = given.get("dataset", "sst5")
    if config is None and dataset not in SEARCHED_ROWS:
        raise unknown("dataset", dataset, SEARCHED_ROWS)
    name = f"{dataset}-full" if config is None else config
    row = with_found(name, {}, results)
    if search:
        settings = configured(CONFIGS, name, {**SEARCH_OPTIONS[row.dataset], **given})
        return tried(tiny(settings) if smoke else settings)
    settings = with_found(name, given, results)
    settings = replace(settings, row=changed(row, settings, given))
    return tiny(settings) if smoke else settings


def changed(row: Settings, settings: Settings, given: Mapping[str, Any]) -> str:
    """The row's name with what was changed of it: no sweep may take such a run for a row of the tables."""
    names = [name for name in given if name != "seed" and getattr(row, name) != getattr(settings, name)]
    if "format" in names or "dataset" in names:
        rank = "" if settings.rank is None else f"-rank{settings.rank}"
        return "-".join([settings.format + rank, *(f"{n}={given[n]}" for n in names if n not in ("format", "rank"))])
    return "-".join([settings.row, *(f"{name}={given[name]}" for name in names)])


def in_tables(records: Iterable[Mapping[str, Any]], results: Path) -> list[Mapping[str, Any]]:
    """The lines that are runs of the tables' rows as they are configured today.

    Seeds of a row have to agree in the rate and the deviation too: those count that the search has found, or, where
    it has not ended or no such run was made, those of the row's last line.
    """
    known = {(dataset, row): with_found(f"{dataset}-{row}", {}, results) for dataset, row, _ in runs()}
    kept: defaultdict[tuple[str, str], list[tuple[Settings, Mapping[str, Any]]]] = defaultdict(list)
    for record in records:
        settings = recorded(record)
        row = None if settings is None else known.get((settings.dataset, settings.row))
        if settings and row and replace(settings, lr=row.lr, std=row.std, seed=row.seed) == row:
            kept[settings.dataset, settings.row].append((replace(settings, seed=row.seed), record))
    ended = {key for key, row in known.items() if found(results, row.dataset, row.format)}
    counted = {
        key: known[key] if key in ended and known[key] in dict(lines) else lines[-1][0] for key, lines in kept.items()
    }
    return [record for key, lines in kept.items() for settings, record in lines if settings == counted[key]]
