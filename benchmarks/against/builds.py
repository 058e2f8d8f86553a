"""Builds of the library, each in a folder of its own, and processes that import one of them and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from benchmarks.against.refusal import RefusalError
from provenance import ROOT

_LAST_LINES = 20  # of a build that failed: pip adds some of its own after the compiler's
_GIT = ("git", "-c", f"core.hooksPath={os.devnull}", "-C", str(ROOT))
_PIP = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Build:
    """A folder that holds the package tensorbed, compiled, and nothing else of a checkout."""

    commit: str
    folder: Path


@dataclass(frozen=True)
class Ended:
    """What a process said, and how it ended."""

    code: int
    output: str
    errors: str

    @property
    def last_line(self) -> str:
        """Of its errors: what a traceback says in the end."""
        lines = self.errors.strip().splitlines()
        return lines[-1].strip() if lines else f"it ended with exit code {self.code} and said nothing"


def run(command: Sequence[str], environment: Mapping[str, str], seconds: float | None = None) -> Ended:
    """A process in a group of its own, of which nothing is left when this one is interrupted.

    Compilers are children of children: a build that goes on would write into folders that are being removed.
    """
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ended(process.returncode, output, errors)


def resolved(commit: str) -> str:
    """The commit's short hash."""
    asked = ("rev-parse", "--verify", "--quiet", "--short=10", "--end-of-options", f"{commit}^{{commit}}")
    try:
        found = run([*_GIT, *asked], os.environ)
    except OSError as error:
        raise RefusalError(f"git cannot be run: {error.strerror}.") from error
    if found.code:
        raise RefusalError(f'"{commit}" is no commit of this repository; git log --oneline lists some.')
    return found.output.strip()


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """The commit checked out in a new folder, which is removed whatever happens."""
    try:
        added = run([*_GIT, "worktree", "add", "--quiet", "--detach", str(folder), commit], os.environ)
        if added.code:
            raise RefusalError(f"{commit} cannot be checked out beside this one: {added.last_line}.")
        yield folder
    finally:
        # Twice forced: files were made in it, and one whose adding was interrupted is locked.
        run([*_GIT, "worktree", "remove", "--force", "--force", str(folder)], os.environ)


def install(source: Path, commit: str, folder: Path) -> Build:
    """Build the sources, kernels included, into a folder."""
    # Without this a build whose kernels do not compile goes on without them.
    environment = {"TENSORBED_NATIVE": "1", **os.environ}
    done = run([sys.executable, "-m", "pip", "install", *_PIP, "--target", str(folder), str(source)], environment)
    if done.code:
        lines = (done.output + done.errors).rstrip().splitlines()[-_LAST_LINES:]
        raise RefusalError("\n".join([f"Building {commit} failed with exit code {done.code}; it said last:", *lines]))
    if not (folder / "tensorbed" / "__init__.py").exists():
        raise RefusalError(f"Building {commit} made no package tensorbed.")
    return Build(commit, folder)


def python_with(build: Build) -> tuple[list[str], dict[str, str]]:
    """How Python is called so that it imports this build, this checkout's benchmarks and the packages that are here.

    Packages are handed over as paths and ``-S`` leaves out what ``.pth`` files would do: one of an editable install
    makes Python import its checkout's sources before anything on a path.
    """
    own = {ROOT.resolve(), (ROOT / "src").resolve()}
    packages = [path for path in sys.path if path and Path(path).resolve() not in own]
    environment = {name: value for name, value in os.environ.items() if name != "TENSORBED_NATIVE_PATH"}
    environment["PYTHONPATH"] = os.pathsep.join([str(build.folder), str(ROOT), *packages])
    return [sys.executable, "-S"], environment


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, also where the process is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with tempfile.TemporaryDirectory(prefix="tensorbed-against-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
