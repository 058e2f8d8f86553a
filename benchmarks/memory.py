"""Peak memory of forward and backward, beyond what is held before the call, each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import nn

from benchmarks.peers import PEERS, CannotRunError, Peer, build, draw
from benchmarks.workloads import Workload

_PATIENCE = 90  # seconds for one measurement
_KERNEL, _RUSAGE = "VmHWM after a reset", "ru_maxrss: a lower bound where memory freed before was used again"


@dataclass(frozen=True)
class Extra:
    """Bytes at the peak of forward and backward beyond parameters, ids and the incoming gradient.

    Output rows and the parameters' gradients are part of it. ``method`` is how the peak was read.
    """

    bytes: int
    method: str


def extra_memory(workload: Workload, peer: Peer, threads: int) -> Extra | str:
    """Measured in a fresh process that has imported this one implementation only, or the reason why not."""
    # A fork server imports torch once; its children are fresh all the same, for it never computes anything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    # A copy without the ids and the gradient that may be held here: the child draws its own.
    process = context.Process(target=_child, args=(sender, replace(workload), PEERS.index(peer), threads))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_PATIENCE):
            return f"memory not measured: more than {_PATIENCE} s"
        found: Extra | str = receiver.recv()
        return found
    except EOFError:
        return "memory not measured: the process ended early, as one that runs out of memory does"
    finally:
        process.kill()
        process.join()


def measure(layer: nn.Module, workload: Workload) -> Extra:
    """Of one call, after one of a single entry has made threads, workspaces and imports."""
    ids, gradient = workload.ids, workload.gradient
    layer(ids[:1]).backward(gradient[:1])
    layer.zero_grad(set_to_none=True)
    gc.collect()
    _give_back()
    before, method = _reset_peak()
    layer(ids).backward(gradient)
    return Extra(max(0, _peak(method) - before), method)


def _child(sender: Connection, workload: Workload, number: int, threads: int) -> None:
    torch.set_num_threads(threads)
    peer = PEERS[number]
    try:
        found: Extra | str = measure(build(peer, workload, draw(workload), check=False), workload)
    except CannotRunError as reason:
        found = str(reason)
    sender.send(found)


def _give_back() -> None:
    """Hand freed memory back to the system: glibc keeps it, and a call that uses it again would seem to need none."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_peak() -> tuple[int, str]:
    """Bytes held now, from which on the peak counts, and how it will be read."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return _peak(_RUSAGE), _RUSAGE
    return _status("VmRSS"), _KERNEL


def _peak(method: str) -> int:
    return _status("VmHWM") if method == _KERNEL else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
