"""``python -m benchmarks.gpu_compile`` compiles every kernel for GPUs and writes what it needs; no GPU is needed.

It fails where a kernel is compiled by none of the calls, where registers spill, and where a program would need more
shared memory or registers than its target has. ``--quick`` compiles for one rank and two targets and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path

# Said, because Triton's own default changes with version 3.10.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from rich.progress import track

from tensorbed.backends import triton

if triton.reason:
    sys.exit(f"python -m benchmarks.gpu_compile: {triton.reason}")

from benchmarks.gpu_compile.calls import DTYPES, MODULES, RANKS, Case, compiled_case
from benchmarks.gpu_compile.compiling import TARGETS, Needs, kernels
from benchmarks.gpu_compile.page import written

PAGE = Path("docs/results/gpu.md")
Found = dict[Case, dict[str, list[Needs]]]
_QUICK = (("sm_80", "gfx942"), (16,))


def faults(found: Found) -> list[str]:
    """A sentence for everything that must not be."""
    said = []
    for (name, dtype, rank), by_kernel in found.items():
        target = TARGETS[name]
        for kernel, launches in by_kernel.items():
            said += [
                f"{kernel} for {name}, {dtype}, rank {rank}: {needs.registers} registers of {target.registers}, "
                f"{needs.spilled} bytes spilled, {needs.shared} bytes of shared memory of {target.shared}."
                for needs in launches
                if not needs.fits(target)
            ]
        missing = kernels(*MODULES) - set(by_kernel)
        said += [f"{kernel} is launched by no call of benchmarks/gpu_compile/calls.py." for kernel in sorted(missing)]
    return list(dict.fromkeys(said))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_compile", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one rank, two targets, no page")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--page", type=Path, default=PAGE)
    asked = parser.parse_args(arguments)
    targets, ranks = _QUICK if asked.quick else (tuple(TARGETS), RANKS)
    cases: list[Case] = list(product(targets, DTYPES, ranks))
    with ProcessPoolExecutor(asked.processes, mp_context=get_context("spawn")) as pool:
        compiled = track(pool.map(compiled_case, cases, chunksize=len(ranks)), "compiled", total=len(cases))
        found = dict(zip(cases, compiled, strict=True))
    said = faults(found)
    launches = sum(len(needs) for by_kernel in found.values() for needs in by_kernel.values())
    print(f"{launches} kernels compiled for {', '.join(targets)}: {len(said)} faults.")
    for fault in said:
        print(fault, file=sys.stderr)
    if not asked.quick:
        asked.page.write_text(written(found), encoding="utf-8")
        print(f"written: {asked.page}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
