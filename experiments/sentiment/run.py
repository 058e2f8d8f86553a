"""From options to a line of results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from experiments.checkpoints import NAME
from experiments.records import RESULTS, append
from experiments.sentiment import task
from experiments.sentiment.train import How, train
from experiments.settings import Settings, configured
from experiments.settings import smoke as tiny


def settle(config: str | None, options: Mapping[str, Any], results: Path, *, smoke: bool, search: bool) -> Settings:
    """The settings of a run: a row's file, or full tables on SST-5, and the options on top."""
    name = config or f"{options.get('dataset') or 'sst5'}-full"
    given = {option: value for option, value in options.items() if value is not None}
    row = task.with_found(name, {"seed": given.get("seed", 0)}, results)
    if search:
        settings = configured(task.CONFIGS, name, {**task.SEARCH_OPTIONS[row.dataset], **given})
        return tried(tiny(settings) if smoke else settings)
    settings = task.with_found(name, given, results)
    settings = replace(settings, row=changed(row, settings, given))
    return tiny(settings) if smoke else settings


def tried(settings: Settings) -> Settings:
    """A point of the grid under its own name."""
    return replace(settings, row=f"{settings.row}-lr{settings.lr:g}-std{settings.std or 'glorot'}")


def changed(row: Settings, settings: Settings, given: Mapping[str, Any]) -> str:
    """The row's name with what was changed of it: no sweep may take such a run for a row of the tables."""
    names = [name for name in given if name != "seed" and getattr(row, name) != getattr(settings, name)]
    if "format" in names or "dataset" in names:
        rank = "" if settings.rank is None else f"-rank{settings.rank}"
        return "-".join([settings.format + rank, *(f"{n}={given[n]}" for n in names if n not in ("format", "rank"))])
    return "-".join([settings.row, *(f"{name}={given[name]}" for name in names)])


def run(
    config: str | None,
    options: Mapping[str, Any],
    how: Mapping[str, Any],
    results: Path | None,
    *,
    smoke: bool,
    search: bool,
    resume_if_possible: bool,
) -> None:
    """Train, and add the result to the file of runs or of searches."""
    where = results or (how["out"] if smoke else RESULTS)
    settings = settle(config, options, where, smoke=smoke, search=search)
    plan = How(**{**how, "test": not search})
    folder = plan.out / f"{settings.dataset}-{settings.row}-{settings.seed}"
    if resume_if_possible and (folder / NAME).exists():
        plan = replace(plan, resume=True)
    record = train(settings, plan)
    if not PartialState().is_main_process:
        return
    append(where / (task.SEARCH_FILE if search else task.RESULTS_FILE), record)
    (folder / NAME).unlink(missing_ok=True)
