"""What a process of the study does; apart from the command, which processes that are spawned cannot import."""

from __future__ import annotations

import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.deviation.training import VOCABULARY, Trial, run
from experiments.tasks.source_code.corpus import Corpus, read_corpus


@cache
def corpus() -> Corpus:
    return read_corpus(Path(sysconfig.get_path("stdlib")), VOCABULARY)


def start() -> None:
    """Of each process: the products here are small, a core for each run is faster than all cores for one."""
    torch.set_num_threads(1)


def run_one(trial: Trial) -> dict[str, Any]:
    begun = time.perf_counter()
    outcome = run(trial, corpus())
    return {**trial.record(), **outcome, "seconds": round(time.perf_counter() - begun, 1)}
