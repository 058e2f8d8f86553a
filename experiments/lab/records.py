"""One JSON line a run, complete in itself: what, how, how good, how fast, with what."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from experiments.lab.errors import ExperimentError
from experiments.lab.files import text_of
from provenance import ROOT, commit, processor, versions

RESULTS = ROOT / "docs" / "results"
_PACKAGES = ("torch", "tensorbed", "accelerate")


def about() -> dict[str, Any]:
    """With what and when it was measured; nothing that names a person's machine or folders."""
    return {
        "versions": versions(_PACKAGES),
        "machine": {
            "system": platform.system(),
            "architecture": platform.machine(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def peak_memory() -> int:
    """The most bytes this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line in one write, so that runs side by side do not mix theirs; whole, or not at all."""
    line = (json.dumps(record) + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            try:
                if size:
                    file.seek(size - 1)
                    line = line if file.read(1) == b"\n" else b"\n" + line  # an editor may have left it out
                file.write(line)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise
    except OSError as error:
        raise ExperimentError(f"{path} could not be written: {error}. The result was: {line.decode()}") from error


def read(path: Path) -> list[dict[str, Any]]:
    """All records of a file, none where there is no file."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            advice = "Two lines in one: part them" if "Extra data" in str(error) else "Mend or remove the line"
            raise ExperimentError(f"{path}, line {number}: not a JSON object ({error}). {advice}.") from None
        if not isinstance(record, dict):
            raise ExperimentError(f"{path}, line {number}: not a JSON object. Mend or remove the line.")
        records.append(record)
    return records
