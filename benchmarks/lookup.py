"""Looking up rows, forward and backward, against other implementations of the same table.

Prints a table for each workload and one of the floors that ``tensorbed`` must reach, and writes the times with the
machine and the versions as JSON lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table
from torch import nn

import tensorbed as tb
from benchmarks.peers import PEERS, CannotRunError, build, make_table
from benchmarks.timing import Timed, compare
from benchmarks.workloads import AUTO, WORKLOADS, Workload

THREADS = 2
ROUNDS = 20


@dataclass(frozen=True)
class Result:
    """One workload: times by implementation, and for the others the reason why there are none."""

    workload: Workload
    times: dict[str, Timed]
    reasons: dict[str, str]

    def speed_up(self, name: str) -> float | None:
        """How many times faster ``auto`` is, forward and backward."""
        if name not in self.times or AUTO not in self.times:
            return None
        return self.times[name].both.median / self.times[AUTO].both.median


def run(workload: Workload, rounds: int, console: Console) -> Result:
    """Build what can be built and time it."""
    table = make_table(workload)
    layers: dict[str, nn.Module] = {}
    reasons: dict[str, str] = {}
    for peer in PEERS:
        try:
            layers[peer.name] = build(peer, workload, table)
        except CannotRunError as reason:
            reasons[peer.name] = str(reason)
    turns = track(range(rounds), workload.name, console=console, transient=True)
    return Result(workload, compare(layers, workload.ids(), workload.gradient(), turns), reasons)


def show(result: Result, rounds: int) -> Table:
    """The times side by side."""
    notes = [
        f"milliseconds, median (middle half) of {rounds} rounds taken in turns",
        "speed-up: of auto over each, forward + backward",
    ]
    notes += [f"not run: {name}, {reason}" for name, reason in result.reasons.items()]
    table = Table(
        title=result.workload.title, title_justify="left", caption=escape("\n".join(notes)), caption_justify="left"
    )
    table.add_column("implementation", no_wrap=True)
    for title in ("forward", "forward + backward", "speed-up"):
        table.add_column(title, justify="right", no_wrap=True)
    for peer in PEERS:
        timed = result.times.get(peer.name)
        if timed is None:
            table.add_row(peer.name, "-", "-", "-")
            continue
        speed_up = "" if peer.name == AUTO else _factor(result.speed_up(peer.name))
        table.add_row(peer.name, _spread(timed.forward.record()), _spread(timed.both.record()), speed_up)
    return table


def show_floors(results: Sequence[Result]) -> Table:
    """What ``auto`` must reach, forward and backward, and what it reached."""
    table = Table(title="floors, forward + backward", title_justify="left")
    for title in ("workload", "against", "at least", "reached", ""):
        table.add_column(title, justify="right" if title in ("at least", "reached") else "left")
    for result in results:
        for name, least in result.workload.floors.items():
            reached = result.speed_up(name)
            verdict = "not run" if reached is None else "[green]met[/]" if reached >= least else "[red]missed[/]"
            table.add_row(result.workload.name, name, _factor(least), _factor(reached), verdict)
    return table


def records(results: Sequence[Result], rounds: int, load: float) -> list[dict[str, Any]]:
    """One record for each workload and implementation, complete in itself."""
    common = {
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "threads": torch.get_num_threads(), "load": load},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "tensorbed": tb.__version__,
            "tensorly": _version("tensorly"),
            "tensorly-torch": _version("tensorly-torch"),
        },
        "commit": _commit(),
        "rounds": rounds,
    }
    found = []
    for result in results:
        for peer in PEERS:
            timed = result.times.get(peer.name)
            times = {
                "forward_ms": timed.forward.record() if timed else None,
                "forward_backward_ms": timed.both.record() if timed else None,
                "auto_speed_up": result.speed_up(peer.name),
                "reason": result.reasons.get(peer.name),
            }
            found.append({**common, "workload": result.workload.record(), "implementation": peer.name, **times})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen workloads, show and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lookup", description="Time lookups side by side.")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help="timed rounds (default: %(default)s)")
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="repeatable (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/lookup.jsonl"), help="JSON lines (default: %(default)s)")
    options = parser.parse_args(arguments)
    chosen = [WORKLOADS[name] for name in dict.fromkeys(options.workload or WORKLOADS)]
    return measure(chosen, options.rounds, options.out, Console())


def measure(workloads: Sequence[Workload], rounds: int, out: Path, console: Console) -> int:
    """Time the workloads one after the other, print their tables, and write one file."""
    torch.set_num_threads(THREADS)
    # Threads that wait for each other at every product are slowed far more than twofold by one busy neighbour.
    load = os.getloadavg()[0]
    console.print(f"{_cpu()}, {os.cpu_count()} cores, {THREADS} threads, float32, torch {torch.__version__}")
    console.print(f"load average before: {load:.2f}{', times may be disturbed' if load > 1 else ''}")
    results = []
    for workload in workloads:
        results.append(run(workload, rounds, console))
        console.print("", show(results[-1], rounds), sep="\n")
    if any(workload.floors for workload in workloads):
        console.print("", show_floors(results), sep="\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(json.dumps(record) + "\n" for record in records(results, rounds, load)), encoding="utf-8")
    console.print(f"\nwritten to {out}")
    return 0


def _spread(times: dict[str, float]) -> str:
    median, lower, upper = (_short(times[key]) for key in ("median", "lower_quartile", "upper_quartile"))
    return f"{median} [dim]({lower}-{upper})[/dim]"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{_short(value)} x"


def _short(value: float) -> str:
    """Three digits: more would promise what a shared machine cannot keep."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rounds: at least one.")
    return number


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit that was timed, marked when files differ from it; none outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
