"""A folder of a model into a folder of the compressed model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorbed.convert import compress_
from tensorbed.finding import Formats
from tensorbed.integrations.transformers.folders import (
    Folder,
    check_target,
    copy_rest,
    load_model,
    load_tokenizer,
    opened,
    put_in_place,
    quiet,
)
from tensorbed.planning import plan
from tensorbed.report import Report
from tensorbed.structures import Format


@dataclass(frozen=True)
class CompressedFolder:
    """What was written, and what the user should know of it.

    Attributes:
        disk_before, disk_after: bytes of the weights on disk.
    """

    source: Path
    out: Path
    report: Report
    disk_before: int
    disk_after: int
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, for JSON."""
        return {
            "source": str(self.source),
            "out": str(self.out),
            "report": self.report.to_dict(),
            "disk_before": self.disk_before,
            "disk_after": self.disk_after,
            "notes": list(self.notes),
        }


def compress_folder(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: Format | None,
    *,
    ratio: float | None = None,
    budget: str | int | None = None,
    min_rows: int = 2000,
    skip: Sequence[str] = (),
    untie: bool = False,
    include_heads: bool = True,
    force: bool = False,
) -> CompressedFolder:
    """Compress the model of a folder into another, which has the tokenizer and all small files of the first.

    Args:
        out: written beside itself and put in place when complete; ``force`` replaces one that is there.
        format: or ``None``, to have a format chosen for each table by :func:`tensorbed.plan` under ``ratio`` or
            ``budget``.
    """
    source, out = Path(source), Path(out)
    folder = opened(source)
    check_target(out, source, force)
    if folder.is_compressed:
        raise ValueError(f"{source} is compressed already; compress the model it was made of.")
    model, notes = load_model(folder)
    formats: Formats = format or _planned(model, ratio, budget, min_rows, skip)
    report = compress_(
        model,
        formats,
        min_rows=min_rows,
        skip=skip,
        tied="untie" if untie else "keep",
        include_heads=include_heads,
    )
    if not report.entries:
        raise ValueError(f"{source}: {report.warnings[0]} Lower --min-rows (min_rows) if a table is too small.")
    with put_in_place(out) as part:
        notes += _written(folder, model, part)
    after = opened(out).weight_bytes
    return CompressedFolder(source, out, report, folder.weight_bytes, after, tuple(notes))


def _planned(model: Any, ratio: float | None, budget: str | int | None, min_rows: int, skip: Sequence[str]) -> Formats:
    return plan(model, ratio=ratio, budget=budget, min_rows=min_rows, skip=skip)


def _written(folder: Folder, model: Any, part: Path) -> list[str]:
    """The rest of the folder first, so that what the model itself saves prevails."""
    left = copy_rest(folder, part)
    with quiet():
        model.save_pretrained(part / folder.inside)
        if folder.gguf:
            load_tokenizer(folder).save_pretrained(part / folder.inside)
    return [f"{name} was not copied: it is larger than what belongs to a tokenizer." for name in left]
