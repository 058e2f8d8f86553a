"""Running the laboratory as a user does, in a process of its own."""

import json
import os
import subprocess
import sys
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


def try_point(folder, dataset, format, point, *scores):
    """Lines of one point of the grid as a search leaves them, one for each seed; a score alone is that of all."""
    from experiments.lab.records import append
    from experiments.tasks.sentiment import task

    of_all = range(task.SEARCH_SEEDS[dataset])
    for seed, score in zip(of_all, scores * len(of_all) if len(scores) == 1 else scores, strict=False):
        append(folder / task.SEARCH_FILE, tried_line(dataset, format, *point, score, seed))


def tried_line(dataset, format, lr, std, score, seed=0):
    """The line of one point of the grid with one seed."""
    from experiments.lab.settings import configured
    from experiments.tasks.sentiment import task

    options = {**task.SEARCH_OPTIONS[dataset], "lr": lr, "std": std, "seed": seed}
    settings = task.tried(configured(task.CONFIGS, f"{dataset}-{task.SEARCHED_ROWS[dataset][format]}", options))
    return {"dataset": dataset, "format": format, "val_accuracy": score, "settings": settings.as_record()}


def results(folder, name="sentiment.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(record):
    """What must be the same, bit for bit."""
    keys = ("train_loss", "val_loss", "val_accuracy")
    return [[epoch[key] for key in keys] for epoch in record["epochs"]], record["test_loss"], record["test_accuracy"]
