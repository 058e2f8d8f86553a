"""From options to a line of results."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from experiments.lab.checkpoints import Checkpoints
from experiments.lab.errors import Diverged, ExperimentError
from experiments.lab.files import alone, writable_folder
from experiments.lab.processes import first_process, part
from experiments.lab.records import about, append
from experiments.lab.search import Bench
from experiments.lab.settings import How
from experiments.lab.task import Task
from experiments.lab.training import train


def run(task: Task, config: str | None, options: Mapping[str, Any], how: How) -> str:
    """Train, and add the result to the file of its kind; what came of it, in a sentence."""
    bench = Bench.of(task, how)
    settings = bench.settle(config, options, tiny=how.smoke, search=how.kind == "search")
    checkpoints = Checkpoints.of(task.name, settings, how)
    writable_folder(checkpoints.folder, "--out")
    writable_folder(bench.results, "--results")
    with alone(checkpoints.folder) if first_process() else nullcontext():
        if how.resume:
            # What a search finds is as it was when the run began: one may have ended since.
            names = {name for search in bench.plan.searches.values() for name in search.names}
            begun = checkpoints.read()["settings"]
            kept = {name: begun[name] for name in names if name in begun and options.get(name) is None}
            settings = replace(settings, **kept)
        elif how.resume_if_possible:
            how = replace(how, resume=checkpoints.usable())
        elif checkpoints.path.exists() and not how.restart:
            raise ExperimentError(
                f"{checkpoints.path} is of a run that was stopped: --resume goes on with it, --restart begins anew."
            )
        try:
            record = train(task, settings, how)
        except Diverged as error:
            if not how.kind:
                raise
            # A point of a grid or a cell of a league: tried, and the worst there is.
            worst = {f"val_{bench.metric.name}": bench.metric.worst}
            record = {**settings.as_line(task.name), **worst, "diverged": str(error), **about()}
        if first_process():
            append(bench.file(how.kind), record)
            checkpoints.path.unlink(missing_ok=True)  # nobody needs it any more
    part()
    return f"{told(task, record)}; a line was added to {bench.file(how.kind)}"


def told(task: Task, record: Mapping[str, Any]) -> str:
    """A result in words."""
    metric, *_ = task.metrics
    values = {f"{split} {each.name}": each for split in task.tests for each in task.metrics}
    known = {name: each for name, each in values.items() if record.get(name.replace(" ", "_")) is not None}
    tests = [f"{name} {record[name.replace(' ', '_')]:.{each.digits + 1}f}" for name, each in known.items()]
    validation = f"validation {record[f'val_{metric.name}']:.{metric.digits + 1}f}"
    size = [f"ratio {record['ratio']:,.0f}"] if "ratio" in record else []
    return f"{record['dataset']} {record['row']} seed {record['seed']}: {', '.join([*tests, validation, *size])}"
