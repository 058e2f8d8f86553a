"""Times of the contestants as ratios, beside what a commit differs from itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

OLD, NEW, AGAIN = "old", "new", "old again"
CONTESTANTS = (OLD, NEW, AGAIN)
ALLOWED = 1.05  # new/old up to which nothing is called slower, on a machine without noise


@dataclass(frozen=True)
class Comparison:
    """One call of one workload.

    Attributes:
        times: milliseconds by contestant, of each round's process its best turn. ``old`` and ``old again`` are the
            same build: what they differ by, a commit differs from itself.
    """

    workload: str
    call: str
    times: Mapping[str, Sequence[float]]

    def milliseconds(self, contestant: str) -> float:
        """The median of the rounds."""
        return median(self.times[contestant])

    @property
    def ratio(self) -> float:
        """``new / old``."""
        return self.milliseconds(NEW) / self.milliseconds(OLD)

    @property
    def noise(self) -> float:
        """``old again / old``, which would be 1 on a machine without noise."""
        return self.milliseconds(AGAIN) / self.milliseconds(OLD)

    @property
    def slower(self) -> bool:
        """Whether ``new / old`` exceeds what is allowed by more than the noise, whichever way that went."""
        return self.ratio > ALLOWED * max(self.noise, 1 / self.noise)

    def record(self) -> dict[str, Any]:
        """For a line of JSON."""
        return {
            "kind": "against",
            "workload": self.workload,
            "call": self.call,
            "new_over_old": self.ratio,
            "old_again_over_old": self.noise,
            "slower": self.slower,
            "rounds": len(self.times[OLD]),
            **{f"{name.replace(' ', '_')}_ms": list(self.times[name]) for name in CONTESTANTS},
            "reason": None,
        }


@dataclass(frozen=True)
class Compared:
    """A workload's calls, or the reason why there are none."""

    workload: str
    comparisons: Sequence[Comparison] = ()
    reason: str | None = None
    without_kernels: frozenset[str] = field(default_factory=frozenset)  # contestants

    def records(self) -> list[dict[str, Any]]:
        """For lines of JSON, of which a workload that was not run has one."""
        if self.reason is not None:
            return [{"kind": "against", "workload": self.workload, "reason": self.reason}]
        return [comparison.record() for comparison in self.comparisons]
