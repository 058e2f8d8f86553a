"""With what a number was measured: processor, commit, versions of packages; no names of machines or people."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent
# What a number may depend on; results and documents do not change one.
SOURCES = ("src", "native", "benchmarks", "experiments", "provenance.py", "pyproject.toml", "constraints.txt")


def processor() -> str:
    """The processor's model, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def commit() -> str | None:
    """The commit the code is of, with ``-changed`` where the sources differ from it; none outside a repository."""
    found = _git("rev-parse", "--short=10", "HEAD")
    if found is None:
        return None
    return found + ("-changed" if _git("status", "--porcelain", "-uno", "--", *SOURCES) else "")


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of Python and of packages, none for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
