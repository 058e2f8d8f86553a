"""Paths that files name, and links: what is read or written because of them stays below its root."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath


def path_below(root: Path, path: object, named_in: Path) -> str:
    """A path that a file names, as ``a/b`` and empty for the root itself; refused where it is not below the root.

    Refused are absolute paths, ``..`` and what Windows takes for either, on every system, and links that lead out.
    """
    windows = PureWindowsPath(path if isinstance(path, str) else "/")
    stays = not windows.anchor and ".." not in windows.parts and not {"\\", "\0"} & set(str(path))
    if not stays or leads_outside(root, root / str(path)):
        raise ValueError(
            f"{named_in} names {path!r}: paths in it stay below {root}, written a/b, without '..' and without links "
            "that lead out."
        )
    below = PurePosixPath(str(path)).as_posix()
    return "" if below == "." else below


def leads_outside(root: Path, path: Path) -> bool:
    """Whether links make a path under the root one of somewhere else.

    The cache of Hugging Face keeps a model's files in ``blobs`` and has links to them in ``snapshots``: those of the
    same model are not outside.
    """
    home = root.resolve()
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return True
    return not target.is_relative_to(home) and target.parent != _blobs(home)


def _blobs(home: Path) -> Path | None:
    """Of ``models--NAME/snapshots/COMMIT`` or a folder in it: ``models--NAME/blobs``."""
    for folder in home.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent / "blobs"
    return None
