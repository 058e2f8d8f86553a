"""One workload, measured with every implementation that can run it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.limit import Machine, limit
from benchmarks.memory import Extra, extra_memory
from benchmarks.peers import PEERS, CannotRunError, Peer, build, draw
from benchmarks.results import Result
from benchmarks.timing import Contestant, Timed, compare
from benchmarks.workloads import Workload

Advance = Callable[[str], None]  # told what was done, one step of the progress bar each


@dataclass(frozen=True)
class Settings:
    """How long to look: rounds, and seconds that each implementation may take for lookups and for steps."""

    rounds: int = 20
    budget: float = 2.0
    memory: bool = True

    def steps(self, peers: int = len(PEERS)) -> int:
        """Steps of the progress bar for one workload."""
        return peers + self.rounds + (peers if self.memory else 0)


def run(workload: Workload, machine: Machine, settings: Settings, advance: Advance) -> Result:
    """Times side by side, then, when the layers are gone, memory one by one."""
    times, reasons = _times(workload, settings, advance)
    result = Result(workload, limit(workload, machine), times, reasons)
    if settings.memory:
        for peer in PEERS:
            if peer.name in times:
                found = extra_memory(workload, peer, torch.get_num_threads())
                if isinstance(found, Extra):
                    result.memory[peer.name] = found
                else:
                    result.unmeasured[peer.name] = found
            advance(f"{workload.name}: memory of {peer.name}")
    return result


def _times(workload: Workload, settings: Settings, advance: Advance) -> tuple[dict[str, Timed], dict[str, str]]:
    contestants, reasons = enter(PEERS, workload, settings.budget, advance)
    times = compare(contestants, _told(range(settings.rounds), workload.name, advance), settings.budget)
    contestants.clear()
    gc.collect()  # optimisers refer to themselves, and gigabytes of moments with them
    return times, reasons


def enter(
    peers: Sequence[Peer], workload: Workload, budget: float, advance: Advance
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Build and warm up what can run; for the rest the reason.

    Each is warmed up before the next is built: only then are its gradient and its optimiser's state in memory, and the
    next one's question whether there is enough has a true answer.
    """
    cores = draw(workload)
    contestants: dict[str, Contestant] = {}
    reasons: dict[str, str] = {}
    for peer in peers:
        advance(f"{workload.name}: {peer.name}")
        try:
            layer = build(peer, workload, cores)
        except CannotRunError as reason:
            reasons[peer.name] = str(reason)
            continue
        entered = Contestant(layer, peer.optimiser(layer), workload.ids, workload.gradient, workload.calls)
        try:
            entered.warm_up(budget)
        except (RuntimeError, MemoryError) as error:
            reasons[peer.name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            continue
        contestants[peer.name] = entered
    return contestants, reasons


def _told(rounds: range, name: str, advance: Advance) -> Iterable[int]:
    for number in rounds:
        advance(f"{name}: round {number + 1} of {len(rounds)}")
        yield number
