"""Peak memory of forward and backward, beyond what is held before the call, each in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from benchmarks.peers import PEERS, CannotRunError, Peer, build, draw
from benchmarks.workloads import Workload

Measured = TypeVar("Measured")
_PATIENCE = 90  # seconds for one measurement of lookups
_KERNEL, _RUSAGE = "VmHWM after a reset", "ru_maxrss: a lower bound where memory freed before was used again"


@dataclass(frozen=True)
class Extra:
    """Bytes at the peak of forward and backward beyond parameters, inputs and the incoming gradient.

    What comes out and the gradients are part of it. ``method`` is how the peak was read.
    """

    bytes: int
    method: str


def extra_memory(workload: Workload, peer: Peer, threads: int) -> Extra | str:
    """Of one implementation of lookups, or the reason why it is not known."""
    # A copy without the ids and the gradient that may be held here: the child draws its own.
    return in_fresh_process(_lookup, (replace(workload), PEERS.index(peer)), threads)


def in_fresh_process(
    measured: Callable[..., Measured], arguments: tuple[Any, ...], threads: int, patience: float = _PATIENCE
) -> Measured | str:
    """``measured(*arguments)`` in a process that has done nothing else, or the reason why not.

    Both are pickled: ``measured`` is a function of a module, and what it builds it builds there.
    """
    # A fork server imports torch once; its children are fresh all the same, for it never computes anything.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sender, threads, measured, arguments))
    process.start()
    sender.close()
    try:
        if not receiver.poll(patience):
            return f"memory not measured: more than {patience:.0f} s"
        found: Measured | str = receiver.recv()
        return found
    except EOFError:
        return "memory not measured: the process ended early, as one that runs out of memory does"
    finally:
        process.kill()
        process.join()


def peak_beyond(warm_up: Callable[[], None], call: Callable[[], None]) -> Extra:
    """Of one call, after a small one has made threads, workspaces and imports and left nothing else behind."""
    warm_up()
    peak = Peak()
    call()
    return peak.extra()


class Peak:
    """What is held at most from now on, beyond what is held now."""

    def __init__(self) -> None:
        gc.collect()
        _give_back()
        self.before, self.method = _reset_peak()

    def extra(self) -> Extra:
        return Extra(max(0, _peak(self.method) - self.before), self.method)


def measure(layer: nn.Module, workload: Workload) -> Extra:
    """Of one lookup and its gradients."""
    ids, gradient = workload.ids, workload.gradient

    def warm_up() -> None:
        layer(ids[:1]).backward(gradient[:1])
        layer.zero_grad(set_to_none=True)

    return peak_beyond(warm_up, lambda: layer(ids).backward(gradient))


def _lookup(workload: Workload, number: int) -> Extra:
    return measure(build(PEERS[number], workload, draw(workload), check=False), workload)


def _child(sender: Connection, threads: int, measured: Callable[..., Extra], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(threads)
    try:
        found: Extra | str = measured(*arguments)
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
