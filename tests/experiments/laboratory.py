"""Running the laboratory as a user does, in a process of its own, and lines as it leaves them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PATIENCE = 240


def command(*arguments):
    return [sys.executable, "-m", "experiments", *map(str, arguments)]


def run(*arguments, before=(), **options):
    words = [*before, *command(*arguments)[1:]] if before else command(*arguments)
    done = subprocess.run(
        words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False, **options
    )
    return done.returncode, done.stdout, done.stderr


def try_point(bench, dataset, format, point, *scores):
    """Lines of one point of the grid as a search leaves them, one for each seed; a score alone is that of all."""
    from experiments.lab.records import append

    of_all = range(bench.plan.search(dataset).seeds)
    for seed, score in zip(of_all, scores * len(of_all) if len(scores) == 1 else scores, strict=False):
        append(bench.file("search"), tried_line(bench, dataset, format, point, score, seed))


def tried_line(bench, dataset, format, point, score, seed=0):
    """The line of one point of the grid with one seed."""
    from experiments.lab.rows import configured

    search = bench.plan.search(dataset)
    row = configured(bench.task, f"{dataset}-{search.rows[format]}", search.options)
    settings = search.tried(replace(row, seed=seed, **search.options_of(point)))
    return {"dataset": dataset, "format": format, "val_accuracy": score, "settings": settings.as_record()}


def results(folder, name="source_code.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(record):
    """What must be the same, bit for bit."""
    keys = ("train_loss", "val_loss", "val_perplexity", "gradient_norm")
    return [[epoch[key] for key in keys] for epoch in record["epochs"]], record["val_perplexity"]
