"""Results as JSON lines, each complete in itself: machine, versions, commit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.allocator import freed_memory_is_kept
from benchmarks.floors import judge
from benchmarks.heads import FUSED, HEADS
from benchmarks.peers import PEERS
from benchmarks.results import HeadResult, Report, Result
from provenance import commit, processor, versions
from tensorbed.info import info

_PACKAGES = ("torch", "tensorbed", "tensorly", "tensorly-torch", "torchtt", "numpy")


def write(report: Report, path: Path) -> None:
    """One line for each workload and implementation, each point of each curve, each head, and each floor."""
    common = about(report)
    lines = [json.dumps({**common, **record}) + "\n" for record in records(report)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")


def about(report: Report) -> dict[str, Any]:
    """What every record says: where, with what and when it was measured."""
    return {
        "machine": {
            "cpu": processor(),
            "cores": os.cpu_count(),
            "threads": report.threads,
            "load": report.load,
            "gemm_flops": report.machine.flops,
            "copy_bytes_per_second": report.machine.bandwidth,
        },
        "versions": versions(_PACKAGES),
        "kernels": str(info().kernels),
        "freed_memory_kept": freed_memory_is_kept(),
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds_asked": report.rounds,
    }


def records(report: Report) -> Iterator[dict[str, Any]]:
    for result in report.results:
        for peer in PEERS:
            yield {"kind": "lookup", "workload": result.workload.record(), **_lookup(result, peer.name)}
    for curve in report.curves:
        for point in curve.points:
            for name, taken in point.times.items():
                yield _scaling(curve.name, curve.about, point.at, name, taken, None)
            for name, reason in point.reasons.items():
                yield _scaling(curve.name, curve.about, point.at, name, None, reason)
    if report.heads:
        for head in HEADS:
            yield {"kind": "head", "workload": report.heads.workload.record(), **_head(report.heads, head.name)}
    for floor in judge(report.results, report.heads):
        yield {"kind": "floor", **asdict(floor), "verdict": floor.verdict}


def _lookup(result: Result, name: str) -> dict[str, Any]:
    timed, extra = result.times.get(name), result.memory.get(name)
    efficiency = result.efficiency(name)
    return {
        "implementation": name,
        "rounds": timed.rounds if timed else 0,
        "forward_rounds": len(timed.forward.rounds) if timed else 0,
        "forward_ms": timed.forward.record() if timed else None,
        "forward_grad_mode_ms": timed.tracked.record() if timed else None,
        "forward_backward_ms": timed.both.record() if timed else None,
        "training_step_ms": timed.step.record() if timed else None,
        "extra_memory_bytes": extra.bytes if extra else None,
        "extra_memory_method": extra.method if extra else result.unmeasured.get(name),
        "limit": asdict(result.limit),
        "efficiency": {"forward": efficiency[0], "forward_backward": efficiency[1]} if efficiency else None,
        "auto_speed_up": result.speed_up(name),
        "reason": result.reasons.get(name),
    }


def _head(heads: HeadResult, name: str) -> dict[str, Any]:
    timed, extra = heads.times.get(name), heads.memory.get(name)
    return {
        "implementation": name,
        "rounds": len(timed.step.rounds) if timed else 0,
        "topk_rounds": len(timed.topk.rounds) if timed and timed.topk else 0,
        "forward_backward_ms": timed.both.record() if timed else None,
        "training_step_ms": timed.step.record() if timed else None,
        "topk_ms": timed.topk.record() if timed and timed.topk else None,
        "parameter_bytes": heads.stored.get(name),
        "extra_memory_bytes": extra.bytes if extra else None,
        "extra_memory_method": extra.method if extra else heads.unmeasured.get(name),
        "batch_chunk_size": heads.chunk if name == FUSED else None,
        "batch_chunk_sizes_tried_ms": heads.chunks if name == FUSED else None,
        "step_over_fused": heads.over_fused(name),
        "extra_memory_share_of_plain": heads.share_of_memory(name),
        "topk_speed_up": heads.faster_topk(name),
        "reason": heads.reasons.get(name),
    }


def _scaling(curve: str, about: str, at: int, name: str, taken: float | None, reason: str | None) -> dict[str, Any]:
    measured = {"implementation": name, "forward_backward_ms": taken, "reason": reason}
    return {"kind": "scaling", "curve": curve, "about": about, "at": at, **measured}
