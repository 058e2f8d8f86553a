"""The numbers as sheets, shown alike on the terminal and on the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from benchmarks.floors import HEAD_STEP, HEAD_STEP_GOAL, Floor
from benchmarks.heads import FUSED, HEADS, PLAIN, TT_16, TT_96, HeadPeer
from benchmarks.peers import AUTO, OURS, PEERS
from benchmarks.results import HeadResult, Report, Result
from benchmarks.timing import Times

_STYLES = {"met": "green", "missed": "red", "slower": "red", "not run": "dim"}


@dataclass(frozen=True)
class Sheet:
    """A table of words: the first ``words`` columns are text, the others numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    notes: Sequence[str] = field(default_factory=list)
    words: int = 1

    def rich(self) -> Table:
        caption = escape("\n".join(self.notes))
        table = Table(
            title=escape(self.title),
            title_justify="left",
            caption=caption,
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
        )
        for k, column in enumerate(self.columns):
            table.add_column(column, justify="left" if k < self.words else "right")
        for row in self.rows:
            table.add_row(*[_styled(cell) for cell in row])
        return table


def workload_sheet(result: Result, rounds: int) -> Sheet:
    """Every implementation on one workload."""
    columns = ("implementation", "forward", "fwd+bwd", "Adam step", "extra MB", "efficiency", "auto faster by")
    work = result.limit
    bound = result.memory_bound() / 1e6
    notes = [
        f"milliseconds, median of {rounds} rounds taken in turns of up to 30 ms, half of them within ±; "
        "efficiency: limit / measured, forward and fwd+bwd; auto faster by: in fwd+bwd",
        f"limit: {short(work.forward_ms)} ms forward, {short(work.both_ms)} ms fwd+bwd; memory bound: {bound:,.1f} MB",
    ]
    notes += _few_rounds(result, rounds)
    notes += [f"not run: {name}, {reason}" for name, reason in result.reasons.items()]
    notes += [f"{name}: {reason}" for name, reason in result.unmeasured.items()]
    rows = [_workload_row(result, peer.name) for peer in PEERS]
    return Sheet(result.workload.title, columns, rows, notes)


def _workload_row(result: Result, name: str) -> tuple[str, ...]:
    timed = result.times.get(name)
    if timed is None:
        return (name, *6 * ["-"])
    extra, efficiency = result.memory.get(name), result.efficiency(name)
    return (
        name,
        spread(timed.forward),
        spread(timed.both),
        spread(timed.step),
        f"{extra.bytes / 1e6:,.1f}" if extra else "-",
        "/".join(f"{value:.2f}" for value in efficiency) if efficiency else "",
        "" if name == AUTO else factor(result.speed_up(name)),
    )


def _few_rounds(result: Result, rounds: int) -> list[str]:
    """Those whose time was used up before the last round."""
    few = [f"{name} {timed.rounds}" for name, timed in result.times.items() if timed.rounds < rounds]
    return [f"fewer rounds: {'; '.join(few)}"] if few else []


def floors_sheet(floors: Sequence[Floor]) -> Sheet:
    """What must be reached, and what was."""
    rows = [(floor.about, floor.workload, _asked(floor), _reached(floor), floor.verdict) for floor in floors]
    met = sum(floor.met is True for floor in floors)
    judged = sum(floor.met is not None for floor in floors)
    return Sheet(
        f"numbers to reach: {met} of {judged} met", ("number", "workload", "asked", "reached", ""), rows, words=2
    )


def summary_sheet(floors: Sequence[Floor]) -> Sheet:
    """Each number once: on how many workloads it is met, and where it is furthest from what is asked."""
    kinds = {floor.about: [other for other in floors if other.about == floor.about] for floor in floors}
    rows = []
    for about, same in kinds.items():
        judged = [floor for floor in same if floor.reached is not None]
        worst = min(judged, key=lambda floor: floor.margin, default=None)
        met = sum(floor.met is True for floor in judged)
        at = (worst.workload, _asked(worst), _reached(worst)) if worst else ("-", _asked(same[0]), "-")
        verdict = "not run" if not judged else "met" if met == len(judged) else "missed"
        rows.append((about, at[0], f"{met} of {len(judged)}", *at[1:], verdict))
    columns = ("number", "worst on", "met on", "asked there", "reached there", "")
    return Sheet("numbers to reach, in short", columns, rows, words=2)


def _asked(floor: Floor) -> str:
    return f"{'>=' if floor.least else '<='} {short(floor.asked)} {floor.unit}".rstrip()


def _reached(floor: Floor) -> str:
    return "-" if floor.reached is None else f"{short(floor.reached)} {floor.unit}".rstrip()


def choice_sheet(results: Sequence[Result]) -> Sheet | None:
    """``auto`` against those that it may choose, forward and backward."""
    if not results:
        return None
    rows = []
    for result in results:
        best, auto = result.best_of_ours("both"), result.times.get(AUTO)
        times = [result.times.get(name) for name in (AUTO, *OURS)]
        shown = [short(timed.both.median) if timed else "-" for timed in times]
        over = f"{auto.both.median / best[1]:.2f} x" if best and auto else "-"
        rows.append((result.workload.name, best[0] if best else "-", *shown, over))
    columns = ("workload", "best", "auto", *[name.removeprefix("tensorbed ") for name in OURS], "auto / best")
    return Sheet("auto against the best of ours, fwd+bwd, ms", columns, rows, words=2)


def one_row_sheet(results: Sequence[Result]) -> Sheet | None:
    """Microseconds of lookups too small for the clock, with and without gradients."""
    small = [result for result in results if result.workload.calls > 1]
    if not small:
        return None
    rows = []
    for result in small:
        for name, timed in result.times.items():
            taken = (timed.forward, timed.tracked, timed.both)
            rows.append((name, *[short(1e3 * times.median) for times in taken]))
    return Sheet("one row, microseconds a call", ("implementation", "no_grad", "grad mode", "fwd+bwd"), rows)


def curve_sheets(report: Report) -> list[Sheet]:
    """The curves' numbers, fwd+bwd in milliseconds."""
    found = []
    for curve in report.curves:
        met = {name for point in curve.points for name in (*point.times, *point.reasons)}
        names = [peer.name for peer in PEERS if peer.name in met]
        rows = [
            (f"{point.at:,}", *[short(point.times[name]) if name in point.times else "-" for name in names])
            for point in curve.points
        ]
        reasons: dict[str, str] = {}
        for point in curve.points:
            for name, reason in point.reasons.items():
                reasons.setdefault(name, f"{name} from {point.at:,} on: {reason}")
        title = f"fwd+bwd by {curve.name}, ms ({curve.about})"
        found.append(Sheet(title, (curve.name, *names), rows, list(reasons.values()), words=0))
    return found


def heads_sheet(heads: HeadResult) -> Sheet:
    """Every head on one batch."""
    topk = f"top {heads.workload.k}"
    columns = ("head", "stored MB", "fwd+bwd", "Adam step", "x fused", "extra MB", "of plain", topk, "faster by")
    rounds = f"{heads.rounds} rounds" if heads.rounds > 1 else "one round"
    notes = [
        f"milliseconds, median of {rounds} of training steps and more of {topk}, taken in turns, half of them within ±",
        f"x fused: Adam step, times that of {FUSED}, asked <= {HEAD_STEP[TT_16]:g} of {TT_16} and "
        f"<= {HEAD_STEP[TT_96]:g} of {TT_96} (goal: {HEAD_STEP_GOAL:g})",
        f"extra MB: peak of fwd+bwd beyond parameters, vectors and targets; {topk}: of one vector, against {PLAIN}",
    ]
    if heads.chunks:
        tried = ", ".join(f"{short(taken)} ms at {chunk}" for chunk, taken in heads.chunks.items())
        notes.append(f"{FUSED}: batch_chunk_size={heads.chunk}, the fastest of those tried: {tried}")
    notes += [f"not run: {name}, {reason}" for name, reason in heads.reasons.items()]
    notes += [f"{name}: {reason}" for name, reason in heads.unmeasured.items()]
    return Sheet(heads.workload.title, columns, [_head_row(heads, peer) for peer in HEADS], notes)


def _head_row(heads: HeadResult, peer: HeadPeer) -> tuple[str, ...]:
    name = peer.name
    timed, extra, share = heads.times.get(name), heads.memory.get(name), heads.share_of_memory(name)
    if timed is None:
        return (name, *8 * ["-"])
    return (
        f"{name}, {heads.chunk} at a time" if name == FUSED else name,
        f"{heads.stored[name] / 1e6:,.1f}",
        spread(timed.both),
        spread(timed.step),
        factor(heads.over_fused(name)),
        f"{extra.bytes / 1e6:,.0f}" if extra else "-",
        "-" if share is None else f"{100 * share:.1f} %",
        spread(timed.topk) if timed.topk else "",
        factor(heads.faster_topk(name)) if timed.topk else "",
    )


def spread(times: Times) -> str:
    """The median, and how far the quartiles are from it on average, as a share of it."""
    found = times.record()
    apart = (found["upper_quartile"] - found["lower_quartile"]) / 2
    return f"{short(found['median'])} ±{100 * apart / found['median']:.0f}%"


def factor(value: float | None) -> str:
    return "-" if value is None else f"{short(value)} x"


def short(value: float) -> str:
    """Three digits: more would promise what a shared machine cannot keep."""
    if value < 0.0995:
        return f"{value:.4f}"
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def _styled(cell: str) -> str:
    style = _STYLES.get(cell)
    return f"[{style}]{cell}[/]" if style else escape(cell)
