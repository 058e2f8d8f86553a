"""Processes of the contestants in turns, round by round."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.against.builds import Build, python_with, run
from benchmarks.against.ratios import AGAIN, CONTESTANTS, NEW, OLD, Compared, Comparison
from benchmarks.against.refusal import RefusalError
from benchmarks.against.worker import WRONG_BUILD
from benchmarks.timing import in_turns

BUDGET = 0.5  # seconds of a process for each kind of call, beside the seconds in which it imports torch
_PATIENCE = 600.0  # seconds


@dataclass(frozen=True)
class Answer:
    """What one process measured: milliseconds of the best turn by call, or the reason why there are none."""

    times: Mapping[str, float] = field(default_factory=dict)
    kernels: bool = True
    reason: str | None = None


Ask = Callable[[str, str], Answer]  # a contestant, a workload
Advance = Callable[[str], None]  # told what is done next, one step of the progress bar each


def compared(workload: str, rounds: int, ask: Ask, advance: Advance) -> Compared:
    """Every contestant once a round, in an order drawn anew each round; nothing more of one that cannot run."""
    times: dict[str, dict[str, list[float]]] = {}
    without_kernels = set()
    for number, contestant in enumerate(in_turns(CONTESTANTS, range(rounds))):
        advance(f"{workload}: round {1 + number // len(CONTESTANTS)} of {rounds}, {contestant}")
        found = ask(contestant, workload)
        if found.reason is not None:
            return Compared(workload, reason=f"{contestant}: {found.reason}")
        if not found.kernels:
            without_kernels.add(contestant)
        for call, taken in found.times.items():
            times.setdefault(call, {name: [] for name in CONTESTANTS})[contestant].append(taken)
    comparisons = [Comparison(workload, call, by_contestant) for call, by_contestant in times.items()]
    return Compared(workload, comparisons, without_kernels=frozenset(without_kernels))


def asking(old: Build, new: Build, budget: float = BUDGET) -> Ask:
    """Ask processes of the two builds, of which the old one stands for two contestants."""
    builds = {OLD: old, NEW: new, AGAIN: old}
    return lambda contestant, workload: ask_worker(builds[contestant], workload, budget)


def ask_worker(build: Build, workload: str, budget: float) -> Answer:
    """What a fresh process of this build says."""
    python, environment = python_with(build)
    asked = ["-m", "benchmarks.against.worker", workload, "--build", str(build.folder), "--budget", str(budget)]
    try:
        ended = run([*python, *asked], environment, _PATIENCE)
    except subprocess.TimeoutExpired:
        return Answer(reason=f"it took more than {_PATIENCE:.0f} s")
    if ended.code == WRONG_BUILD:
        raise RefusalError(f"A process of {build.commit} could not be used: {ended.last_line}")
    if ended.code:
        return Answer(reason=ended.last_line)
    said = json.loads(ended.output.splitlines()[-1])
    times = {call: taken["min"] for call, taken in said.get("times", {}).items()}
    return Answer(times, said["kernels"], said.get("reason"))
