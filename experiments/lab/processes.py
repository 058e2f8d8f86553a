"""One process or several: which of them writes, how many there are, and how they are stopped."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from experiments.lab.errors import ExperimentError

if TYPE_CHECKING:
    from accelerate import Accelerator


def first_process() -> bool:
    """The one that speaks and writes; known before there is an accelerator."""
    return os.environ.get("RANK", "0") == "0"


def started() -> int:
    """How many processes torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def accelerator_of(precision: str) -> Accelerator:
    """One process, or as many as torchrun started: fewer would train something else without saying so."""
    from accelerate import Accelerator

    mixed = "bf16" if precision == "bf16" else "no"
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=mixed)
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:  # accelerate launch on CPU does this
        raise ExperimentError("several processes were asked for and one was started; start them with torchrun.")
    if accelerator.num_processes != started():
        used = f"accelerate uses {accelerator.num_processes}"
        raise ExperimentError(f"{started()} processes were started, {used}; start them with torchrun.")
    return accelerator


def check_same_data(sizes: Sequence[Any]) -> None:
    """What the data of each process tells of itself: a model trained on two texts at once would be of neither."""
    for number, told in enumerate(sizes):
        if told != sizes[0]:
            raise ExperimentError(
                f"process {number} has other data than process 0: {told} instead of {sizes[0]}. Give all processes the "
                "same --data, on every machine."
            )


def part() -> None:
    """Part from the other processes: one that just ends may be aborted while its connections are still at work."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Interrupts:
    """While it is open, the first SIGINT or SIGTERM sets ``asked``; a second one stops at once."""

    asked = False

    def __enter__(self) -> Self:
        in_main = threading.current_thread() is threading.main_thread()  # Python lets no other thread do this
        kinds = (signal.SIGINT, signal.SIGTERM) if in_main else ()
        self._before: dict[int, Any] = {kind: signal.signal(kind, self._note) for kind in kinds}
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, kind: int, frame: FrameType | None) -> None:
        self.asked = True
        self.__exit__()
