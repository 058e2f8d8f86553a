"""Whether freed memory stays with the process.

By default glibc gives memory back to the system when much of it is free, and every page that is asked for again is
handed out by the kernel one by one, zeroed: a microsecond each on a virtual machine, 2 ms for the 8 MB of 4,096 rows,
several times what it takes to compute them. Which implementation pays depends on who freed what before it. Allocators
that training on CPUs is advised to use keep freed memory; here glibc is told to, for all alike. Blocks above 32 MiB it
takes from freed memory only where a large enough piece lies free: those rows depend on what ran before.

Where batches are of many lengths, glibc searches long lists for a piece that fits, and longer ones with every step. A
process that is started for hours can have jemalloc instead, which cannot be changed once it runs.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from ctypes.util import find_library

_TRIM, _MMAP = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
_KEPT = 2**30
_kept: list[bool] = []
_LARGEST = 32 * 2**20  # beyond this the kernel is asked for each block itself, and glibc allows no more


def keep_freed_memory() -> bool:
    """Ask for it; whether there is a glibc that does."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        _kept.append(bool(libc.mallopt(_TRIM, _KEPT)) and bool(libc.mallopt(_MMAP, _LARGEST)))
    return freed_memory_is_kept()


def freed_memory_is_kept() -> bool:
    """Whether it was asked for in this process."""
    return bool(_kept) and _kept[-1]


def jemalloc() -> dict[str, str]:
    """The environment in which a process that is started uses it; empty where there is none, or another was chosen.

    It keeps freed memory, too: by itself it gives back what was not used for ten seconds, all the time.
    """
    library = find_library("jemalloc") if sys.platform == "linux" and not os.environ.get("LD_PRELOAD") else None
    kept = os.environ.get("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1")
    return {"LD_PRELOAD": library, "MALLOC_CONF": kept} if library else {}
