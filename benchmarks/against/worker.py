"""One workload timed in a process of its own, with the tensorbed of one build: a line of JSON.

``python -m benchmarks.against`` starts it, with the build first on the path and without the site packages' own hooks:
an editable install would put the sources of its checkout before any path.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import tensorbed as tb
from benchmarks.against.cases import CASES, Case
from benchmarks.allocator import keep_freed_memory
from benchmarks.peers import CannotRunError

WRONG_BUILD = 2  # exit code


def foreign_files(modules: Mapping[str, ModuleType], build: Path) -> list[str]:
    """Files of tensorbed's modules that are not of the build."""
    found = []
    for name, module in list(modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "tensorbed" and file and not Path(file).resolve().is_relative_to(build.resolve()):
            found.append(file)
    return found


def require_build(build: Path) -> None:
    """End the process, with a sentence, where something of tensorbed was imported from elsewhere."""
    foreign = foreign_files(sys.modules, build)
    if foreign:
        sys.stderr.write(f"tensorbed was imported from {foreign[0]} and not from the build in {build}.\n")
        raise SystemExit(WRONG_BUILD)


def answer(case: Case, budget: float) -> dict[str, Any]:
    """Times of the case's calls, or the reason why there are none."""
    missing = [name for name in case.needs if not hasattr(tb, name)]
    if missing:
        return {"reason": f"this build has no tb.{missing[0]}"}
    try:
        times = case.measure(budget)
    except (CannotRunError, RuntimeError, ValueError, TypeError, AttributeError, MemoryError) as error:
        said = (str(error).splitlines() or [""])[0]
        return {"reason": said if isinstance(error, CannotRunError) else f"{type(error).__name__}: {said}"}
    return {"times": {call: taken.record() for call, taken in times.items()}}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against.worker", description=__doc__)
    parser.add_argument("workload", choices=list(CASES), metavar="WORKLOAD")
    parser.add_argument("--build", type=Path, required=True, help="the folder that tensorbed must come from")
    parser.add_argument("--budget", type=float, required=True, help="seconds for each kind of call")
    options = parser.parse_args(arguments)
    require_build(options.build)
    keep_freed_memory()
    torch.manual_seed(0)
    found = answer(CASES[options.workload], options.budget)
    require_build(options.build)  # once more: some modules are imported when they are needed
    about = {"file": tb.__file__, "kernels": "tensorbed._native" in sys.modules, "threads": torch.get_num_threads()}
    print(json.dumps({"workload": options.workload, **about, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
