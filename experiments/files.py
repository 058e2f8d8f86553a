"""Reading what may be damaged, and writing whole files or none."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from experiments.errors import ExperimentError


def gzip_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a packed text, from 1."""
    if not path.is_file():
        raise ExperimentError(f"{path} does not exist; --data takes the folder that holds {path.parent.name}/.")
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ExperimentError(
            f"{path.name} is damaged or cut short after line {number}: {error}. Copy it anew."
        ) from None
    except UnicodeDecodeError:
        raise ExperimentError(f"{path.name}, line {number + 1}: not UTF-8.") from None


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """The new file or the old one, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
