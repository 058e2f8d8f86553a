"""Neighbours on the machine: a process for each core that never rests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

# Imports nothing that takes time, and ends with who started it, however that ended.
_BUSY = """
import os
parent = os.getppid()
print("busy", flush=True)
while os.getppid() == parent:
    sum(range(100_000))
"""


@contextmanager
def busy_cores() -> Iterator[list[int]]:
    """A busy process for each core from the first line of the block to its last; their ids."""
    with ExitStack() as stack:
        neighbours = [stack.enter_context(_neighbour()) for _ in range(os.cpu_count() or 1)]
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
        yield [neighbour.pid for neighbour in neighbours]


@contextmanager
def _neighbour() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-ISc", _BUSY], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
