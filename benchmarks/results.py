"""What was measured, and the questions that the tables, the floors and the plots ask of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.heads import DENSE as DENSE_HEAD
from benchmarks.heads import FUSED, PLAIN, HeadWorkload
from benchmarks.limit import Limit, Machine
from benchmarks.memory import Extra
from benchmarks.peers import AUTO, DENSE, OURS, SPARSE
from benchmarks.timing import Timed, Times
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
class HeadTimed:
    """What one head took, by the round.

    Attributes:
        both: the loss and its gradients.
        step: a training step, that is ``zero_grad``, these, and Adam on the head's parameters.
        topk: the best classes of one vector; ``None`` for those who have no top-k of their own.
    """

    both: Times
    step: Times
    topk: Times | None


@dataclass(frozen=True)
class HeadResult:
    """All heads on one batch, and for those that have no times the reason."""

    workload: HeadWorkload
    rounds: int
    times: dict[str, HeadTimed] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)  # bytes of parameters
    memory: dict[str, Extra] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)  # why memory is not known
    chunks: dict[int, float] = field(default_factory=dict)  # what PyTorch's fused loss took with each option

    @property
    def chunk(self) -> int | None:
        """The option that PyTorch's fused loss was fastest with."""
        return min(self.chunks, key=self.chunks.__getitem__, default=None)

    def over_fused(self, name: str) -> float | None:
        """A training step, as so many times that of PyTorch's fused loss, whoever calls it faster."""
        found, fused = self.times.get(name), self.times.get(FUSED)
        if found is None or fused is None:
            return None
        best = min(self.times[who].step.median for who in (FUSED, DENSE_HEAD) if who in self.times)
        return found.step.median / best

    def share_of_memory(self, name: str) -> float | None:
        """Extra memory, as a share of the plain loss's."""
        found, plain = self.memory.get(name), self.memory.get(PLAIN)
        return found.bytes / plain.bytes if found and plain and plain.bytes else None

    def faster_topk(self, name: str) -> float | None:
        """How many times faster the best classes are found than among all logits."""
        found, plain = (timed.topk if (timed := self.times.get(who)) else None for who in (name, PLAIN))
        return plain.median / found.median if found and plain else None


@dataclass(frozen=True)
class Report:
    """A whole run."""

    machine: Machine
    threads: int
    load: float
    rounds: int
    results: list[Result]
    curves: list[Curve]
    heads: HeadResult | None = None
