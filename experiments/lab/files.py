"""Reading what may be damaged, and writing whole files or none."""

from __future__ import annotations

import fcntl
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.lab.errors import ExperimentError


def gzip_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of a packed text, from 1."""
    if not path.exists():
        raise ExperimentError(f"{path} does not exist; --data takes a folder with all of {path.parent.name}/.")
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            # Line by line: a file that is decoded in blocks tells of a wrong byte before the lines above it are read.
            for line in file:
                try:
                    text = line.decode("utf-8" if number else "utf-8-sig")
                except UnicodeDecodeError:
                    while file.read(2**20):  # whether it is a damaged file is known at its end
                        continue
                    told = f"{path.name}, line {number + 1}: not UTF-8; convert the file, as iconv does."
                    raise ExperimentError(told) from None
                yield number + 1, text.replace("\r\n", "\n")
                number += 1
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ExperimentError(
            f"{path.name} is damaged or cut short after line {number}: {error}. Copy it anew."
        ) from None
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {error.strerror}.") from None


def check_folder(folder: Path | None) -> None:
    """A folder that was given is there."""
    if folder is not None and not folder.is_dir():
        what = "this is a file, not a folder" if folder.exists() else "there is no such folder"
        raise ExperimentError(f"--data {folder}: {what}; leave it out for data that can be fetched.")


def text_of(path: Path) -> str:
    """The whole of a text file, with or without a byte order mark."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExperimentError(f"{path} is not UTF-8: {error.reason} at byte {error.start}.") from None
    except OSError as error:
        raise ExperimentError(f"{path} cannot be read: {error.strerror}.") from None


def writable_folder(folder: Path, option: str) -> None:
    """Make it, and see that files can be written there, before anything long is begun."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ExperimentError(f"{option} {folder} cannot be written to: {error.strerror}.") from None


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder for one run: a second one is refused, and a kill sets it free."""
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ExperimentError(
                f"{folder} is in use by a run that has not ended; wait for it, or give another --out."
            ) from None
        yield


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """The new file or the old one, whatever happens in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")  # one name: what a kill leaves behind is overwritten
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def fetched(path: str, split: str, **options: Any) -> Iterable[dict[str, Any]]:
    """A split of a public dataset, by the package ``datasets``, which keeps it in its own cache."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise ExperimentError(
            "fetching the public originals needs the package datasets: pip install '.[experiments]', "
            "or give a folder that holds them with --data."
        ) from None
    try:
        records: Iterable[dict[str, Any]] = load_dataset(path, split=split, **options)
    except Exception as error:  # of the network, the host, the cache: each package below has its own
        raise ExperimentError(
            f"{options.get('data_files', {}).get(split, path)} could not be fetched: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''} Give a folder that holds it with --data."
        ) from error
    return records
