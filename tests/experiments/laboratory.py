"""Running the laboratory as a user does, in a process of its own, and lines as it leaves them."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PATIENCE = 240
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
needs_gloo = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this build of torch has no gloo"
)


def command(*arguments):
    return [sys.executable, "-m", "experiments", *map(str, arguments)]


def run(*arguments, before=(), **options):
    words = [*before, *command(*arguments)[1:]] if before else command(*arguments)
    done = subprocess.run(
        words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False, **options
    )
    return done.returncode, done.stdout, done.stderr


def in_two_processes(task, config, data, folder, *more):
    """The line of results of a run by torchrun."""
    places = ("--data", data, "--out", folder, "--results", folder)
    code, _, told = run(task, "--config", config, *places, *more, before=TORCHRUN)
    assert code == 0, told
    (record,) = results(folder, f"{task.replace('-', '_')}.jsonl")
    return record


def assert_two_processes_trained_as_one(two, one, rel=1e-3):
    """Norms of gradients are compared too: after clipping, and with Adam, losses do not show a wrong factor."""
    assert (two["processes"], two["total_parameters"]) == (2, one["total_parameters"])
    validated = next(name for name in ("val_loss", "val_logloss") if name in one["epochs"][0])
    for mine, theirs in zip(one["epochs"], two["epochs"], strict=True):
        for name in ("train_loss", validated):
            assert theirs[name] == pytest.approx(mine[name], rel=rel)
        assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=1e-3)


class KillError(Exception):
    """What ends a run that is killed."""


@contextmanager
def killed(monkeypatch, when):
    """A run that is started in here is gone before the first step for which ``when(run, steps made)`` is true."""
    from experiments.lab.training import Training

    made, real = count(), Training.step

    def step(run, batch):
        if when(run, next(made)):
            raise KillError
        return real(run, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "step", step)
        with pytest.raises(KillError):
            yield


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
