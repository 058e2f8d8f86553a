"""Lookups of every implementation side by side: tables here; JSON lines, pictures and a page in ``out/bench``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import measure, page, plots, records, scaling
from benchmarks.allocator import keep_freed_memory
from benchmarks.floors import judge
from benchmarks.limit import Machine, measure_machine
from benchmarks.measure import Advance, Settings
from benchmarks.results import Curve, Report, Result
from benchmarks.tables import choice_sheet, curve_sheets, floors_sheet, one_row_sheet, summary_sheet, workload_sheet
from benchmarks.workloads import SHUFFLED, WORKLOADS, Workload

THREADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for, show it and write it."""
    options = _parser().parse_args(arguments)
    settings = Settings(memory=not options.no_memory)
    chosen = [WORKLOADS[name] for name in dict.fromkeys(options.workload or WORKLOADS)]
    sweeps = () if options.no_scaling or options.quick else scaling.SWEEPS
    if options.quick:
        settings = replace(settings, rounds=3, budget=0.5)
        if not options.workload:
            chosen = [workload for workload in chosen if workload.order != SHUFFLED]
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    torch.set_num_threads(THREADS)
    if not options.trim:
        keep_freed_memory()
    # A pipe has no width of its own, and rich's guess is too narrow for the tables.
    bench(chosen, settings, sweeps, options.out, Console(width=None if sys.stdout.isatty() else 120))
    return 0


def bench(
    workloads: Sequence[Workload],
    settings: Settings,
    sweeps: Sequence[scaling.Sweep],
    out: Path,
    console: Console,
    machine: Machine | None = None,
) -> Report:
    """Measure, print the tables as they come, and write the files; ``machine`` is measured unless known."""
    # Threads that wait for each other at every product are slowed far more than twofold by one busy neighbour.
    load = os.getloadavg()[0]
    threads = torch.get_num_threads()
    console.print(f"{records.cpu()}, {os.cpu_count()} cores, {threads} threads, float32, torch {torch.__version__}")
    console.print(f"load average before: {load:.2f}{', times may be disturbed' if load > 1 else ''}")
    machine = machine or measure_machine()
    console.print(f"matrix product {machine.flops / 1e9:.1f} GFLOP/s, copy {machine.bandwidth / 1e9:.1f} GB/s")
    results, curves = _measured(workloads, settings, sweeps, machine, console)
    report = Report(machine, threads, load, settings.rounds, results, curves)
    _show(report, console)
    # The numbers first: a picture that fails should not cost them.
    records.write(report, out / "results.jsonl")
    page.write(report, plots.draw(report, out), out / "index.html")
    console.print(f"\nwritten: {out / 'results.jsonl'}, {out / 'index.html'} and its pictures")
    return report


def _measured(
    workloads: Sequence[Workload],
    settings: Settings,
    sweeps: Sequence[scaling.Sweep],
    machine: Machine,
    console: Console,
) -> tuple[list[Result], list[Curve]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        total = len(workloads) * settings.steps() + scaling.steps(sweeps)
        advance = _advance(progress, total)
        results = []
        for workload in workloads:
            results.append(measure.run(workload, machine, settings, advance))
            console.print("", workload_sheet(results[-1], settings.rounds).rich(), sep="\n")
        return results, scaling.run(advance, sweeps)


def _advance(progress: Progress, total: int) -> Advance:
    task = progress.add_task("", total=total)
    return lambda text: progress.update(task, advance=1, description=text)


def _show(report: Report, console: Console) -> None:
    sheets = [*curve_sheets(report), one_row_sheet(report.results), choice_sheet(report.results)]
    floors = judge(report.results)
    sheets += [floors_sheet(floors), summary_sheet(floors)]
    for sheet in sheets:
        if sheet is not None:
            console.print("", sheet.rich(), sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=_positive, help=f"timed rounds (default: {Settings().rounds})")
    parser.add_argument(
        "--workload", nargs="+", action="extend", choices=list(WORKLOADS), help="one or more (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="three rounds, ids in frequency order only, no curves")
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
