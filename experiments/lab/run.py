"""From options to a line of results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.lab.checkpoints import Checkpoints
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.files import alone, writable_folder
from experiments.lab.processes import first_process
from experiments.lab.records import RESULTS, about, append
from experiments.lab.settings import Settings
from experiments.lab.training import How, named, train
from experiments.tasks.sentiment import task


def run(
    config: str | None,
    options: Mapping[str, Any],
    how: How,
    results: Path | None,
    *,
    smoke: bool = False,
    search: bool = False,
    restart: bool = False,
    resume_if_possible: bool = False,
) -> str:
    """Train, and add the result to the file of runs or of searches; what came of it, in a sentence."""
    where = results or (how.out if smoke else RESULTS)
    settings = task.settle(config, options, where, smoke=smoke, search=search)
    how = replace(how, test=not search)
    folder = settings.folder(how.out)
    writable_folder(folder, "--out")
    writable_folder(where, "--results")
    with alone(folder) if first_process() else nullcontext():
        record = trained(settings, options, how, restart=restart, resume_if_possible=resume_if_possible)
        path = where / (task.SEARCH_FILE if search else task.RESULTS_FILE)
        if first_process():
            append(path, record)
            Checkpoints(folder, settings.as_record()).remove()
    return f"{told(record)}; a line was added to {path}"


def told(record: Mapping[str, Any]) -> str:
    """A result in words."""
    test = "" if record["test_accuracy"] is None else f"test accuracy {record['test_accuracy']:.4f}, "
    size = f", ratio {record['ratio']:,.0f}" if "ratio" in record else ""
    name = f"{record['dataset']} {record['row']} seed {record['seed']}"
    return f"{name}: {test}validation {record['val_accuracy']:.4f}{size}"


def trained(
    settings: Settings, options: Mapping[str, Any], how: How, *, restart: bool, resume_if_possible: bool
) -> dict[str, Any]:
    """The result of a run that is begun, or gone on with."""
    checkpoints = Checkpoints(settings.folder(how.out), settings.as_record())
    if how.resume:
        settings = as_before(settings, options, checkpoints)
    elif resume_if_possible:
        how = replace(how, resume=checkpoints.usable())
    elif checkpoints.path.exists() and not restart:
        raise ExperimentError(
            f"{checkpoints.path} is of a run that was stopped: --resume goes on with it, --restart begins anew."
        )
    try:
        return train(settings, how)
    except Diverged as error:
        if how.test:
            raise
        return diverged(settings, error)  # a point of a grid


def as_before(settings: Settings, options: Mapping[str, Any], checkpoints: Checkpoints) -> Settings:
    """The rate and the deviation the run began with, unless they are given: a search may have ended since."""
    begun = checkpoints.read()["settings"]
    left_out = [name for name in ("lr", "std") if options.get(name) is None and name in begun]
    return replace(settings, **{name: begun[name] for name in left_out})


def diverged(settings: Settings, error: Diverged) -> dict[str, Any]:
    """The line of a point of the grid whose loss was no number: tried, and the worst there is."""
    return {
        **named(settings),
        "val_accuracy": 0.0,
        "test_accuracy": None,
        "diverged": str(error),
        **about(),
    }
