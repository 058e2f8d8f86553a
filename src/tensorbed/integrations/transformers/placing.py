"""A new folder: checked before any work is done, written beside itself, and put in place when it is complete."""

import errno
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from tensorbed.files.saving import sync, sync_folder
from tensorbed.integrations.transformers.folders import TOKEN, left_of, opened

_FULL = (errno.ENOSPC, errno.EDQUOT)  # what systems say of a disk without space, or without more for this user


def check_target(out: Path, source: Path, force: bool) -> None:
    """Refuse what would lose something, before any work is done; what a killed command took away is put back first."""
    here, there = out.resolve(), source.resolve()
    if here == there or here in there.parents or there in here.parents:
        raise ValueError(f"{out} and {source} lie in each other; write to a folder of its own.")
    if not here.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent}; make it first.")
    beside = _beside(here, "part")
    try:  # permissions do not tell of file systems that are read-only, nor of names that are too long
        beside.mkdir()
        beside.rmdir()
    except OSError as error:
        raise OSError(
            f"{here.parent} cannot be written to ({error.strerror}), and {here.name} would be in it; write to another "
            "folder, or change its permissions."
        ) from None
    if old := left_of(here):
        old.rename(here)
    if not here.exists() or (here.is_dir() and not any(here.iterdir())):
        return
    if not here.is_dir():
        raise FileExistsError(f"{out} is a file; name a folder.")
    if not force:
        raise FileExistsError(f"{out} exists already; --force (force=True) replaces it.")
    with suppress(OSError, ValueError):
        if opened(here).is_compressed:
            return
    raise FileExistsError(
        f"{out} was not written by tensorbed, its config.json does not say so, and it is not replaced; remove it "
        "yourself, or name another folder."
    )


def check_space(out: Path, needed: int) -> None:
    """Refuse what will not fit, before any work is done; something may fill the disk all the same."""
    free = shutil.disk_usage(out.resolve().parent).free
    if free < needed:
        raise OSError(
            f"{out} will take about {megabytes(needed)}, and its disk has {megabytes(free)} left; free some space, or "
            "write to another disk."
        )


def megabytes(count: int) -> str:
    """For people."""
    return f"{count / 1e6:,.1f} MB"


def _beside(out: Path, what: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(TOKEN)}.{what}")


@contextmanager
def put_in_place(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write into, which takes its place at the end: there is the old one or the new one.

    But for a kill between two renames: then the old one is in ``.OUT.*.old``, and :func:`check_target` brings it back.
    """
    target = out.resolve()  # of a link, what it points to is replaced
    part, old = _beside(target, "part"), _beside(target, "old")
    part.mkdir()
    try:
        yield part
        # Readable by whom the folder is, weights too, and written by the system and not only kept in its memory.
        mode = part.stat().st_mode & 0o666
        for path in (*part.rglob("*"), part):
            if path.is_file():
                path.chmod(mode)
                sync(path)
            else:
                sync_folder(path)
        if target.exists():
            target.rename(old)
        try:
            part.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own, of a full disk too
        if isinstance(error, OSError) and error.errno not in _FULL:
            raise
        said = f"{error.strerror}." if isinstance(error, OSError) else str(error)
        raise OSError(f"{out} cannot be written, and nothing of it is left: {said}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
