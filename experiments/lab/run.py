"""From options to a line of results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.lab.checkpoints import Checkpoints
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.files import alone, writable_folder
from experiments.lab.processes import first_process
from experiments.lab.records import RESULTS, about, append
from experiments.lab.search import Bench
from experiments.lab.settings import Settings
from experiments.lab.task import Task
from experiments.lab.training import How, named, train


@dataclass(frozen=True)
class When:
    """What becomes of a checkpoint that is there already; of what kind the run is."""

    restart: bool = False
    resume_if_possible: bool = False
    smoke: bool = False
    kind: str = ""  # "search" or "league", if it is no run of the tables


BEGIN = When()


def run(
    task: Task, config: str | None, options: Mapping[str, Any], how: How, results: Path | None, when: When = BEGIN
) -> str:
    """Train, and add the result to the file of its kind; what came of it, in a sentence."""
    bench = Bench(task, results or (how.out if when.smoke else RESULTS))
    searching = when.kind == "search"
    settings = bench.settle(config, options, tiny=when.smoke, search=searching)
    how = replace(how, test=not searching)
    checkpoints = Checkpoints.of(task.name, settings, how.out)
    writable_folder(checkpoints.folder, "--out")
    writable_folder(bench.results, "--results")
    with alone(checkpoints.folder) if first_process() else nullcontext():
        searched = {name for search in bench.plan.searches.values() for name in search.names}
        record = trained(task, settings, how, when, [name for name in searched if options.get(name) is None])
        if first_process():
            append(bench.file(when.kind), record)
            checkpoints.remove()
    return f"{told(task, record)}; a line was added to {bench.file(when.kind)}"


def told(task: Task, record: Mapping[str, Any]) -> str:
    """A result in words."""
    values = [
        (f"{split} {metric.name}", record.get(f"{split}_{metric.name}"), metric)
        for split in task.tests
        for metric in task.metrics
    ]
    tests = "".join(f"{name} {value:.{metric.digits + 1}f}, " for name, value, metric in values if value is not None)
    size = f", ratio {record['ratio']:,.0f}" if "ratio" in record else ""
    name, metric = f"{record['dataset']} {record['row']} seed {record['seed']}", task.metrics[0]
    return f"{name}: {tests}validation {record[f'val_{metric.name}']:.{metric.digits + 1}f}{size}"


def trained(task: Task, settings: Settings, how: How, when: When, searched: list[str]) -> dict[str, Any]:
    """The result of a run that is begun, or gone on with."""
    checkpoints = Checkpoints.of(task.name, settings, how.out)
    if how.resume:
        # What a search finds is as it was when the run began: one may have ended since.
        begun = checkpoints.read()["settings"]
        settings = replace(settings, **{name: begun[name] for name in searched if name in begun})
    elif when.resume_if_possible:
        how = replace(how, resume=checkpoints.usable())
    elif checkpoints.path.exists() and not when.restart:
        raise ExperimentError(
            f"{checkpoints.path} is of a run that was stopped: --resume goes on with it, --restart begins anew."
        )
    try:
        return train(task, settings, how)
    except Diverged as error:
        if not when.kind:
            raise
        # A point of a grid or a cell of a league: tried, and the worst there is.
        metric = task.metrics[0]
        return {**named(task, settings), f"val_{metric.name}": metric.worst, "diverged": str(error), **about()}
