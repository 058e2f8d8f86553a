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
from experiments.settings import Settings
from experiments.settings import smoke as tiny


def settle(config: str | None, options: Mapping[str, Any], results: Path, *, smoke: bool, search: bool) -> Settings:
    """The settings of a run: a row's file, or full tables on SST-5, and the options on top."""
    name = config or f"{options.get('dataset') or 'sst5'}-full"
    if config is None and options.get("format") is not None:
        options = {**options, "row": named(options)}
    if search:
        dataset = options.get("dataset") or name.split("-")[0]
        options = {**task.SEARCH_OPTIONS[dataset], **{k: v for k, v in options.items() if v is not None}}
    settings = task.with_found(name, options, results)
    return tiny(settings) if smoke else settings


def named(options: Mapping[str, Any]) -> str:
    """A name for what is no row of the paper."""
    rank = options.get("rank")
    return str(options["format"]) + ("" if rank is None else f"-rank{rank}")


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
    if search:
        settings = replace(settings, row=f"{settings.row}-lr{settings.lr:g}-std{settings.std or 'glorot'}")
    folder = plan.out / f"{settings.dataset}-{settings.row}-{settings.seed}"
    if resume_if_possible and (folder / NAME).exists():
        plan = replace(plan, resume=True)
    record = train(settings, plan)
    if not PartialState().is_main_process:
        return
    append(where / (task.SEARCH_FILE if search else task.RESULTS_FILE), record)
    (folder / NAME).unlink(missing_ok=True)
