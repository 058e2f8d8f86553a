"""Threads where cores are shared with other processes.

Operations that torch spreads over its threads wait for one another by spinning, several times in each: where another
process holds a core, all of them stand still until it lets go, and work takes ten times as long. One thread has nobody
to wait for, and whole pieces of work side by side nothing but their end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Barrier
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_SERIAL = 2**15  # numbers below which torch uses one thread anyway
_PROBED = 2**18  # numbers that an operation is tried on: small enough to be over before the other thread is waited for
_ALONE = 64  # tries by one thread
_SECONDS = 0.03  # for tries by all threads: several turns of the system's scheduler
# How many threads torch had before it was held to one.
_allowed: ContextVar[int | None] = ContextVar("_allowed", default=None)


@contextmanager
def one_thread_if_crowded(size: int) -> Iterator[None]:
    """Work on that many numbers by one thread where other processes hold the cores, else by all."""
    threads = torch.get_num_threads()
    if size < _SERIAL or threads == 1 or not crowded():
        yield
        return
    torch.set_num_threads(1)
    allowed = _allowed.set(threads)
    try:
        yield
    finally:
        _allowed.reset(allowed)
        torch.set_num_threads(threads)


def crowded() -> bool:
    """Whether all threads take longer for a small operation than one of them computes."""
    threads, numbers = torch.get_num_threads(), torch.zeros(_PROBED, device="cpu")
    torch.set_num_threads(1)
    begin = time.thread_time()
    for _ in range(_ALONE):
        numbers.add_(1)
    alone = (time.thread_time() - begin) / _ALONE
    torch.set_num_threads(threads)
    tries, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < _SECONDS:
        numbers.add_(1)
        tries += 1
    return (time.perf_counter() - begin) / tries > max(2 * alone, 1e-4)


class Workers(ThreadPoolExecutor):
    """``with Workers() as workers: workers.map(function, pieces)``: a thread for each core that torch may use."""

    def __init__(self) -> None:
        inside = torch.get_num_threads()  # each operation of the calling thread
        count = _allowed.get() or inside
        super().__init__(count, "tensorbed")
        ready = Barrier(count + 1)
        for _ in range(count):
            self.submit(_start, ready)
        ready.wait()
        # Each thread has a number of its own, but the last one set is that of threads to come, which are not ours.
        torch.set_num_threads(inside)

    def __exit__(self, *raised: object) -> None:
        self.shutdown(cancel_futures=True)

    def map(self, function: Callable[[T], R], pieces: Iterable[T]) -> list[R]:  # type: ignore[override]
        """The results in the order of the pieces."""

        def without_gradients(piece: T) -> R:
            with torch.no_grad():  # which is a setting of each thread
                return function(piece)

        return list(super().map(without_gradients, pieces))


def _start(ready: Barrier) -> None:
    torch.get_num_threads()  # a thread takes the common number when it first asks: after this it keeps its own
    torch.set_num_threads(1)
    ready.wait()
