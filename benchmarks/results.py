"""What was measured, and the questions that the tables, the floors and the plots ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.limit import Limit, Machine
from benchmarks.memory import Extra
from benchmarks.peers import AUTO, DENSE, OURS, SPARSE
from benchmarks.timing import Timed
from benchmarks.workloads import Workload


@dataclass(frozen=True)
class Result:
    """One workload: times by implementation, and for the others the reason why there are none."""

    workload: Workload
    limit: Limit
    times: dict[str, Timed]
    reasons: dict[str, str]
    memory: dict[str, Extra] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)  # why memory is not known

    def speed_up(self, name: str) -> float | None:
        """How many times faster ``auto`` is, forward and backward."""
        if name not in self.times or AUTO not in self.times:
            return None
        return self.times[name].both.median / self.times[AUTO].both.median

    def efficiency(self, name: str) -> tuple[float, float] | None:
        """``limit / measured``, forward and forward with backward; not for tables that are kept in full."""
        if name not in self.times or name in (DENSE, SPARSE):
            return None
        timed = self.times[name]
        return self.limit.forward_ms / timed.forward.median, self.limit.both_ms / timed.both.median

    def best_of_ours(self, measure: str) -> tuple[str, float] | None:
        """The fastest of those ``auto`` may choose, by ``"forward"`` or ``"both"``, and its milliseconds."""
        found = {name: getattr(self.times[name], measure).median for name in OURS if name in self.times}
        return min(found.items(), key=lambda item: item[1]) if found else None

    def memory_bound(self) -> int:
        """Three times the unpooled rows, three times the cores, and 8 MB."""
        return 12 * (self.workload.unpooled_numbers + self.workload.core_numbers) + 8 * 10**6


@dataclass(frozen=True)
class Point:
    """Milliseconds of forward and backward at one place of a curve, by implementation."""

    at: int
    times: dict[str, float]
    reasons: dict[str, str]


@dataclass(frozen=True)
class Curve:
    """How cost grows with one quantity while the others stay."""

    name: str
    about: str
    points: list[Point]


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: Machine
    threads: int
    load: float
    rounds: int
    results: list[Result]
    curves: list[Curve]
