"""Lookups and heads side by side with others: tables here; JSON lines, pictures and a page in ``out/bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import measure, measure_heads, page, plots, records, scaling
from benchmarks.allocator import keep_freed_memory
from benchmarks.floors import judge
from benchmarks.heads import HeadWorkload
from benchmarks.limit import Machine, measure_machine
from benchmarks.measure import Advance, Settings
from benchmarks.measure_heads import HeadSettings
from benchmarks.results import Report
from benchmarks.tables import (
    choice_sheet,
    curve_sheets,
    floors_sheet,
    heads_sheet,
    one_row_sheet,
    summary_sheet,
    workload_sheet,
)
from benchmarks.workloads import SHUFFLED, WORKLOADS, Workload
from provenance import processor

THREADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, show it and write it."""
    options = parse(arguments)
    torch.set_num_threads(THREADS)
    if not options.trim:
        keep_freed_memory()
    # A pipe has no width of its own, and rich's guess is too narrow for the tables.
    bench(plan(options), options.out, Console(width=None if sys.stdout.isatty() else 120))
    return 0


@dataclass(frozen=True)
class Plan:
    """What to measure, and how long to look."""

    workloads: Sequence[Workload]
    settings: Settings = field(default_factory=Settings)
    sweeps: Sequence[scaling.Sweep] = ()
    heads: HeadWorkload | None = None
    head_settings: HeadSettings = field(default_factory=HeadSettings)

    def steps(self) -> int:
        """Steps of the progress bar."""
        heads = self.head_settings.steps() if self.heads else 0
        return len(self.workloads) * self.settings.steps() + scaling.steps(self.sweeps) + heads


def plan(options: argparse.Namespace) -> Plan:
    """What the options ask for."""
    settings, head_settings = Settings(memory=not options.no_memory), HeadSettings(memory=not options.no_memory)
    chosen = [WORKLOADS[name] for name in dict.fromkeys(options.workload or WORKLOADS)]
    sweeps = () if options.no_scaling or options.quick else scaling.SWEEPS
    if options.quick:
        settings = replace(settings, rounds=3, budget=0.5)
        head_settings = replace(head_settings, rounds=1, memory=False)
        if not options.workload:
            chosen = [workload for workload in chosen if workload.order != SHUFFLED]
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
        head_settings = replace(head_settings, rounds=options.rounds)
    if options.heads_only:
        chosen, sweeps = [], ()
    # Who names lookups is at work on them, and heads take minutes.
    heads = None if options.no_heads or options.workload else HeadWorkload()
    return Plan(chosen, settings, sweeps, heads, head_settings)


def bench(asked: Plan, out: Path, console: Console, machine: Machine | None = None) -> Report:
    """Measure, print the tables as they come, and write the files; ``machine`` is measured unless known."""
    # Threads that wait for each other at every product are slowed far more than twofold by one busy neighbour.
    load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    console.print(f"{processor()}, {os.cpu_count()} cores, {threads} threads, float32, torch {torch.__version__}")
    console.print(f"load average before: {load:.2f}{', times may be disturbed' if load > 1 else ''}")
    machine = machine or measure_machine()
    console.print(f"matrix product {machine.flops / 1e9:.1f} GFLOP/s, copy {machine.bandwidth / 1e9:.1f} GB/s")
    report = _measured(asked, Report(machine, threads, load, asked.settings.rounds, [], []), console)
    _show(report, console)
    # The numbers first: a picture that fails should not cost them.
    records.write(report, out / "results.jsonl")
    of_heads = plots.draw_heads(report.heads, out) if report.heads else None
    page.write(report, plots.draw(report, out), out / "index.html", of_heads)
    console.print(f"\nwritten: {out / 'results.jsonl'}, {out / 'index.html'} and its pictures")
    return report


def _measured(asked: Plan, blank: Report, console: Console) -> Report:
    """The report with what was asked for in it."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        advance = _advance(progress, asked.steps())
        results = []
        for workload in asked.workloads:
            results.append(measure.run(workload, blank.machine, asked.settings, advance))
            console.print("", workload_sheet(results[-1], asked.settings.rounds).rich(), sep="\n")
        heads = measure_heads.run(asked.heads, asked.head_settings, advance) if asked.heads else None
        if heads:
            console.print("", heads_sheet(heads).rich(), sep="\n")
        return replace(blank, results=results, curves=scaling.run(advance, asked.sweeps), heads=heads)


def _advance(progress: Progress, total: int) -> Advance:
    task = progress.add_task("", total=total)
    return lambda text: progress.update(task, advance=1, description=text)


def _show(report: Report, console: Console) -> None:
    sheets = [*curve_sheets(report), one_row_sheet(report.results), choice_sheet(report.results)]
    floors = judge(report.results, report.heads)
    sheets += [floors_sheet(floors), summary_sheet(floors)]
    for sheet in sheets:
        if sheet is not None:
            console.print("", sheet.rich(), sep="\n")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, or a message and an end where they make no sense together."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.heads_only and options.workload:
        parser.error("--workload names lookups, --heads-only leaves all of them out")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    rounds = f"timed rounds (default: {Settings().rounds} of lookups, {HeadSettings().rounds} of heads' training steps)"
    parser.add_argument("--rounds", type=_positive, help=rounds)
    parser.add_argument(
        "--workload",
        nargs="+",
        action="extend",
        choices=list(WORKLOADS),
        help="lookups, one or more, and no heads (default: all, and heads)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three rounds, ids in frequency order only, no curves; heads in one round, without their memory",
    )
    heads = parser.add_mutually_exclusive_group()
    heads.add_argument("--no-heads", action="store_true", help="lookups only")
    heads.add_argument("--heads-only", action="store_true", help="no lookups and no curves; 10 GB of memory")
    parser.add_argument("--no-scaling", action="store_true", help="no curves")
    parser.add_argument("--no-memory", action="store_true", help="no peak memory")
    parser.add_argument(
        "--trim", action="store_true", help="let the C library give freed memory back to the system, as by default"
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder (default: %(default)s)")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} rounds: at least one.")
    return number


if __name__ == "__main__":
    sys.exit(main())
