"""``python -m benchmarks.click_through``: training steps with tables of 10^5 to 10^9 rows, full, hashed and as tensor
trains, beside PyTorch's sparse bags and TorchRec's fused ones.

Rows are those of ``experiments click-through --dataset synthetic``: 39 fields, 26 of them with large tables, ids by
Zipf's law, batches of 4,096. Each point is measured in a process of its own and written at once to
``out/click_through/results.jsonl``: started again, the command measures what is missing there, and with ``--anew`` all.
The picture is beside it. TorchRec is looked for in the folder that ``make .venv/.torchrec`` fills.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.click_through.contestants import CONTESTANTS, LONGER, SPARSE, TORCHREC, TRAIN
from benchmarks.click_through.picture import draw
from benchmarks.click_through.steps import Case, Point, measured
from benchmarks.floors import Floor
from benchmarks.memory import in_fresh_process
from benchmarks.tables import Sheet, floors_sheet
from provenance import ROOT, commit, processor, versions

ROWS = tuple(10**k for k in range(5, 10))
_PATIENCE = 300.0  # seconds for one point
Found = Mapping[Case, Point | str]  # a point, or the reason why there is none


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    file = options.out / "results.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)
    if options.anew:
        file.unlink(missing_ok=True)
    sys.path.append(str(options.torchrec))  # whose versions are told
    console = Console(width=None if sys.stdout.isatty() else 120)
    cases = [
        Case(name, rows, options.hidden, options.batch) for rows in options.rows for name in options.implementation
    ]
    missing = [case for case in cases if not isinstance(read(file).get(case), Point)]
    for case in track(missing, "points", console=console, transient=True, disable=not missing):
        found = in_fresh_process(measured, (case, options.seconds, str(options.torchrec)), options.threads, _PATIENCE)
        write(file, case, found, options.threads)
    points = {case: found for case, found in read(file).items() if case in cases}
    console.print(sheet(points, options).rich(), floors_sheet(floors(points)).rich(), sep="\n")
    draw(points, options.out / "scale.png")
    console.print(f"written: {file}, {options.out / 'scale.png'}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.click_through", description=__doc__)
    made.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="of each large table")
    made.add_argument("--implementation", nargs="+", choices=list(CONTESTANTS), default=list(CONTESTANTS))
    made.add_argument("--hidden", type=int, default=1024, help="neurons of each of the body's four layers")
    made.add_argument("--batch", type=int, default=4096)
    made.add_argument("--seconds", type=float, default=2.0, help="of steps, for the tables and for the whole model")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--torchrec", type=Path, default=ROOT / ".venv" / "torchrec", help="folder it is installed in")
    made.add_argument("--anew", action="store_true", help="measure again what was measured before")
    made.add_argument("--out", type=Path, default=Path("out/click_through"), help="folder (default: %(default)s)")
    return made


def write(file: Path, case: Case, found: Point | str, threads: int) -> None:
    """A line, complete in itself."""
    about = {"machine": processor(), "cores": os.cpu_count(), "threads": threads, "commit": commit()}
    packages = versions(("torch", "tensorbed", "torchrec", "fbgemm-gpu-cpu"))
    told = {"reason": found} if isinstance(found, str) else asdict(found)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({**asdict(case), **told, **about, "versions": packages}) + "\n")


def read(file: Path) -> dict[Case, Point | str]:
    """What was measured so far."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(of_line(json.loads(line)) for line in lines)


def of_line(line: dict[str, Any]) -> tuple[Case, Point | str]:
    case = Case(**{name: line[name] for name in Case.__dataclass_fields__})
    if "reason" in line:
        return case, line["reason"]
    return case, Point(**{name: line[name] for name in Point.__dataclass_fields__})


def sheet(points: Found, options: argparse.Namespace) -> Sheet:
    """A line a point."""
    columns = ("tables", "rows each", "tables, ms", "step, ms", "rows/s", "tables, MB", "model, MB")
    lines = [(case.implementation, f"{case.rows:,}", *cells(found)) for case, found in points.items()]
    reasons: dict[str, str] = {}
    for case, found in points.items():
        if isinstance(found, str):
            reasons.setdefault(case.implementation, f"not run: {case.implementation}, {case.rows:,} rows: {found}")
    title = f"training steps, batch {options.batch:,}, 39 fields of dim 16, four layers of {options.hidden}"
    notes = [
        "tables: forward, backward and optimiser of the tables alone; step, rows/s: the whole model; medians",
        "MB: the peak beyond what the process held before the tables were made",
        *reasons.values(),
    ]
    return Sheet(title, columns, lines, notes, words=1)


def cells(found: Point | str) -> tuple[str, ...]:
    if isinstance(found, str):
        return ("-",) * 5
    times = (f"{found.tables_ms:,.1f}", f"{found.step_ms:,.0f}", f"{found.rows_per_second:,.0f}")
    return (*times, *(f"{size / 1e6:,.0f}" for size in (found.tables_bytes, found.model_bytes)))


def floors(points: Found) -> list[Floor]:
    """The numbers to reach, of the tables alone: the body's share is everybody's."""
    taken = {
        (case.implementation, case.rows): found.tables_ms
        for case, found in points.items()
        if not isinstance(found, str)
    }
    asked = []
    for train, rows in product((TRAIN, LONGER), sorted({case.rows for case in points})):
        bounds = [(other, f"that of {other}", rows, most) for other, most in ((SPARSE, 1.5), (TORCHREC, 1.0))]
        bounds += [(train, "that of 10^7 rows", 10**7, 1.3)] if rows == 10**9 else []
        for other, told, others_rows, most in bounds:
            if {(train, rows), (other, others_rows)} <= set(taken):
                reached = taken[train, rows] / taken[other, others_rows]
                asked.append(Floor(f"step, {train}: times {told}", f"{rows:,}", most, reached, False))
    return asked


if __name__ == "__main__":
    main()
