"""The numbers to reach, and what a run reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.heads import FUSED, PLAIN, TT_16, TT_96
from benchmarks.peers import AUTO, DENSE, TENSORLY, TORCH
from benchmarks.results import HeadResult, Result

EFFICIENCY_FORWARD, EFFICIENCY_BOTH = 0.35, 0.25
_SLACK = 1.2  # of the best implementation's time, for the one that is chosen
_ONE_ROW = {"no_grad": 4.0, "grad mode": 5.0}
_MANY_ROWS = 25_000
HEAD_STEP = {TT_16: 1.0, TT_96: 1.5}  # of the time that PyTorch's fused loss and Adam take with a dense weight
HEAD_STEP_GOAL = 1.25  # at rank 96, where rows are made; wished for, not asked
_HEAD_MEMORY = 15.0  # per cent of what the plain loss takes
_HEAD_TOPK = 3.0


@dataclass(frozen=True)
class Floor:
    """One number asked of one workload; ``least`` says which side is the good one."""

    about: str
    workload: str
    asked: float
    reached: float | None
    least: bool  # at least, or at most
    unit: str = "x"

    @property
    def met(self) -> bool | None:
        """``None`` where it was not measured."""
        if self.reached is None:
            return None
        return self.reached >= self.asked if self.least else self.reached <= self.asked

    @property
    def margin(self) -> float:
        """By what factor it is kept; below one it is missed."""
        if self.reached is None or not self.reached:
            return 0.0 if self.least else inf
        return self.reached / self.asked if self.least else self.asked / self.reached

    @property
    def verdict(self) -> str:
        return {None: "not run", True: "met", False: "missed"}[self.met]


def judge(results: Sequence[Result], heads: HeadResult | None = None) -> list[Floor]:
    """Every floor of every workload, and of the heads if there were any, grouped by what they ask."""
    asked = (_tensorly, _plain_torch, _efficiency, _training, _one_row, _memory, _choice)
    found = [floor for of in asked for result in results for floor in of(result)]
    return found if heads is None else [*found, *_heads(heads)]


def _tensorly(result: Result) -> Iterator[Floor]:
    if TENSORLY in result.times and not _is(result, "one row"):
        least = 3.0 if _is(result, "CTR") else 10.0
        about = f"fwd+bwd, times faster than {TENSORLY}"
        yield Floor(about, result.workload.name, least, result.speed_up(TENSORLY), True)


def _plain_torch(result: Result) -> Iterator[Floor]:
    if _is(result, "LM r16", "TT-Rec", "CTR"):
        about = f"fwd+bwd, times faster than {TORCH}"
        yield Floor(about, result.workload.name, 3.0, result.speed_up(TORCH), True)


def _efficiency(result: Result) -> Iterator[Floor]:
    if _is(result, "LM", "NMT", "TT-Rec"):
        forward, both = result.efficiency(AUTO) or (None, None)
        yield Floor("efficiency, forward", result.workload.name, EFFICIENCY_FORWARD, forward, True, "")
        yield Floor("efficiency, fwd+bwd", result.workload.name, EFFICIENCY_BOTH, both, True, "")


def _training(result: Result) -> Iterator[Floor]:
    if result.workload.rows >= _MANY_ROWS:
        dense, auto = result.times.get(DENSE), result.times.get(AUTO)
        reached = dense.step.median / auto.step.median if dense and auto else None
        yield Floor(f"training step, times faster than {DENSE} with Adam", result.workload.name, 1.0, reached, True)


def _one_row(result: Result) -> Iterator[Floor]:
    if _is(result, "one row"):
        dense, auto = result.times.get(DENSE), result.times.get(AUTO)
        for about, measure in (("no_grad", "forward"), ("grad mode", "tracked")):
            reached = getattr(auto, measure).median / getattr(dense, measure).median if dense and auto else None
            name = result.workload.name
            yield Floor(f"lookup in {about}, times that of {DENSE}", name, _ONE_ROW[about], reached, False)


def _memory(result: Result) -> Iterator[Floor]:
    extra = result.memory.get(AUTO)
    reached = extra.bytes / 1e6 if extra else None
    bound = result.memory_bound() / 1e6
    yield Floor(
        "extra memory of fwd+bwd: 3 x rows + 3 x cores + 8 MB", result.workload.name, bound, reached, False, "MB"
    )


def _choice(result: Result) -> Iterator[Floor]:
    for about, measure in (("forward", "forward"), ("fwd+bwd", "both")):
        best, auto = result.best_of_ours(measure), result.times.get(AUTO)
        reached = getattr(auto, measure).median / best[1] if best and auto else None
        yield Floor(f"auto, {about}, times that of the best of ours", result.workload.name, _SLACK, reached, False)


def _heads(heads: HeadResult) -> Iterator[Floor]:
    for name, most in HEAD_STEP.items():
        about = f"head's training step, times that of {FUSED}"
        yield Floor(about, f"head, {name}", most, heads.over_fused(name), False)
    for name in HEAD_STEP:
        share = heads.share_of_memory(name)
        about = f"head's extra memory in fwd+bwd, of that of {PLAIN}"
        yield Floor(about, f"head, {name}", _HEAD_MEMORY, None if share is None else 100 * share, False, "%")
    about = f"head's topk of one vector, times faster than {PLAIN}"
    yield Floor(about, f"head, {TT_16}", _HEAD_TOPK, heads.faster_topk(TT_16), True)


def _is(result: Result, *names: str) -> bool:
    """Whether the workload is one of these, in any order of its ids; ``LM`` is all ranks."""
    name = result.workload.name.removesuffix(" shuffled")
    return any(name == asked or name.startswith(f"{asked} r") for asked in names)
