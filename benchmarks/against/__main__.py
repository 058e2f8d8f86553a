"""Whether this checkout is slower than another commit: the two built, and timed by processes in turns.

``python -m benchmarks.against COMMIT`` builds the commit from a temporary worktree and this checkout as it is, changes
included, each with its compiled kernels into a temporary folder. In each round a process of the old build, one of the
new build and one of the old build again time the workload; printed is the median over the rounds of each process's best
turn. ``old again / old`` is what a commit differs from itself, and a call is marked slower only where ``new / old``
exceeds 1.05 by more than that. Threads are torch's own: set OMP_NUM_THREADS on a machine that is in use.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.against.builds import Build, install, resolved, temporary_folder, worktree
from benchmarks.against.cases import CASES, Case, chosen
from benchmarks.against.ratios import AGAIN, ALLOWED, CONTESTANTS, NEW, OLD, Compared
from benchmarks.against.refusal import RefusalError
from benchmarks.against.rounds import Advance, asking, compared
from benchmarks.tables import Sheet, short
from provenance import ROOT, commit, processor, versions

ROUNDS = 9
_BUILDS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what was asked for; 2 with a sentence where that cannot be done."""
    options = parse(arguments)
    # A pipe has no width of its own, and rich's guess is too narrow for the table.
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        if options.list:
            console.print(listed().rich())
            return 0
        against(resolved(options.commit), chosen(options.only), options.rounds, console, options.json)
    except RefusalError as reason:
        sys.stderr.write(f"{reason}\n")
        return 2
    except KeyboardInterrupt:  # what was measured so far has been shown
        return 128 + signal.SIGINT
    return 0


def against(old: str, cases: Sequence[Case], rounds: int, console: Console, path: Path | None = None) -> list[Compared]:
    """Build the two, compare them case by case, and show what was measured, also where something ended it."""
    new = commit() or "this checkout"
    found: list[Compared] = []
    try:
        with _lines(path) as lines, temporary_folder() as folder, _progress(console) as progress:
            task = progress.add_task("", total=_BUILDS + len(cases) * rounds * len(CONTESTANTS))

            def advance(text: str) -> None:
                progress.update(task, advance=1, description=text)

            ask = asking(*_built(old, new, folder, advance))
            for case in cases:
                found.append(compared(case.name, rounds, ask, advance))
                _write(found[-1], {**about(), "old_commit": old, "new_commit": new}, lines)
    finally:
        if found:
            console.print(sheet(found, old, new, rounds).rich())
    return found


def _built(old: str, new: str, folder: Path, advance: Advance) -> tuple[Build, Build]:
    """Both in the same way; the worktree is gone when they are timed."""
    advance(f"building {old}")
    with worktree(old, folder / "worktree") as source:
        built = install(source, old, folder / "old")
    advance(f"building {new}")
    return built, install(ROOT, new, folder / "new")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True)


@contextmanager
def _lines(path: Path | None) -> Iterator[TextIO | None]:
    """The file, opened before anything is measured: one that cannot be written should not cost half an hour."""
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise RefusalError(f"{path} cannot be written: {error.strerror}.") from error
    with file:
        yield file


def _write(found: Compared, common: dict[str, Any], lines: TextIO | None) -> None:
    if lines is not None:
        lines.writelines(json.dumps({**common, **record}) + "\n" for record in found.records())
        lines.flush()


def about() -> dict[str, Any]:
    """What every line of JSON says: where, with what and when it was measured."""
    machine = {"cpu": processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return {
        "machine": {**machine, "load": os.getloadavg()[0]},
        "versions": versions(("torch", "numpy")),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def sheet(found: Iterable[Compared], old: str, new: str, rounds: int) -> Sheet:
    """Every call: its times, its ratio, and the noise that the ratio stands beside."""
    rows: list[tuple[str, ...]] = []
    notes = [
        f"milliseconds: of each process its best turn, of {rounds} round{'s' * (rounds > 1)} the median; "
        f"old again / old: what a commit differs from itself; slower: new / old is above {ALLOWED} by more than that"
    ]
    without: set[str] = set()
    for one in found:
        without |= one.without_kernels
        if one.reason is not None:
            rows.append((one.workload, "-", "-", "-", "-", "-", "not run"))
            notes.append(f"not run: {one.workload}, {one.reason}")
        for comparison in one.comparisons:
            times = [short(comparison.milliseconds(name)) for name in (OLD, NEW)]
            ratios = [f"{comparison.ratio:.3f}", f"{comparison.noise:.3f}"]
            verdict = "slower" if comparison.slower else ""
            rows.append((comparison.workload, comparison.call, *times, *ratios, verdict))
    notes += [f"{name}: without compiled kernels" for name in (OLD, NEW) if name in without]
    columns = ("workload", "call", f"{OLD} ms", f"{NEW} ms", f"{NEW} / {OLD}", f"{AGAIN} / {OLD}", "")
    return Sheet(f"{NEW} ({new}) against {OLD} ({old})", columns, rows, notes, words=2)


def listed() -> Sheet:
    """Every workload by the name that ``--only`` takes."""
    rows = [(case.name, case.title.partition(": ")[2], "" if case.by_default else "by name") for case in CASES.values()]
    return Sheet("workloads", ("name", "about", ""), rows, ["by name: run only where --only asks for it"], words=2)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, or a message and an end where they ask for nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.against",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("commit", nargs="?", metavar="COMMIT", help="a hash, a branch, a tag, HEAD~3")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="default: %(default)s")
    parser.add_argument("--only", action="append", metavar="NAME", help="a workload; may be given several times")
    parser.add_argument("--list", action="store_true", help="show the workloads and end")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a line of JSON for each call")
    options = parser.parse_args(arguments)
    if options.commit is None and not options.list:
        parser.error("COMMIT is missing: say with what to compare, for instance HEAD~1")
    return options


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number of rounds: at least one.")
    return number


if __name__ == "__main__":
    sys.exit(main())
