"""The sample of Criteo that DeepLight publishes, values numbered already: 10,000 rows to train, as many to test.

A line is a label and 39 numbers, commas between. It is for trying things out: too small to tell formats apart.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from experiments.lab.errors import ExperimentError
from experiments.tasks.click_through.criteo import FEATURES, FIELDS
from experiments.tasks.click_through.in_memory import InMemory
from experiments.tasks.click_through.rows import batch_of

FILES = {"train": "deeplight_tiny_train_input.csv.gz", "test": "deeplight_tiny_test_input.csv.gz"}
_VALIDATION = 10  # the last of so many parts of the training rows


def load(folder: Path) -> InMemory:
    """Tables have a row for every number up to the largest of both files."""
    train, test = (read(folder / "criteo" / name) for name in FILES.values())
    cut = len(train) - len(train) // _VALIDATION
    rows = {"train": train[:cut], "validation": train[cut:], "test": test}
    sizes = 1 + np.concatenate([train, test])[:, 1:].max(axis=0)
    unseen = {split: shares_unseen(rows["train"], rows[split]) for split in ("validation", "test")}
    batches = {
        split: batch_of(torch.from_numpy(of[:, 0]).float(), torch.from_numpy(of[:, 1:])) for split, of in rows.items()
    }
    return InMemory(dict(zip(FEATURES, sizes.tolist(), strict=True)), batches, unseen, zlib.crc32(train.tobytes()))


def read(path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:  # -> (rows, FIELDS)
    """All lines, refused where one is of another form."""
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --data takes a folder with criteo/{path.name}.")
    try:
        with gzip.open(path, "rt", encoding="ascii") as lines:
            rows = np.loadtxt(lines, dtype=np.int64, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise ExperimentError(f"{path}: {' '.join(str(error).split())} Copy it anew.") from None
    if rows.shape[1] != FIELDS or rows.min(initial=0) < 0 or rows[:, 0].max(initial=0) > 1:
        raise ExperimentError(
            f"{path} is not of {FIELDS} columns, a label of 0 or 1 and numbers from 0 on. Copy it anew."
        )
    return rows


def shares_unseen(train: np.ndarray, others: np.ndarray) -> dict[str, float]:
    """The share of rows with a value that no training row has, by feature."""
    pairs = zip(FEATURES, train.T[1:], others.T[1:], strict=True)
    return {name: float(1 - np.isin(other, known).mean()) for name, known, other in pairs}
