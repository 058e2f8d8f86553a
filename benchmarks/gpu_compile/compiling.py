"""Launches that compile instead: calls of the backend on tensors of the CPU, for a target that need not be there.

The backend is called as it is, so that each kernel is compiled for the very types, constants and sizes of its launches.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tensorbed.backends import triton as backend
from tensorbed.backends.triton import launching

_KEPT = Path("out/gpu-compile")


@dataclass(frozen=True)
class Target:
    """A processor to compile for. ``shared`` is what one program may have of its shared memory, in bytes."""

    name: str
    devices: str
    compiled: GPUTarget
    shared: int
    registers: int  # that one thread may have


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "A100", GPUTarget("cuda", 80, 32), 163 * 1024, 255),
        Target("sm_90", "H100, H200", GPUTarget("cuda", 90, 32), 227 * 1024, 255),
        Target("sm_100", "B200", GPUTarget("cuda", 100, 32), 227 * 1024, 255),
        Target("gfx942", "MI300X", GPUTarget("hip", "gfx942", 64), 64 * 1024, 512),
    )
}


@dataclass(frozen=True)
class Needs:
    """What the compiler says that a kernel needs: registers of a thread, and bytes that did not fit into them."""

    registers: int
    spilled: int
    shared: int
    warps: int

    def fits(self, target: Target) -> bool:
        return self.spilled == 0 and self.shared <= target.shared and self.registers <= target.registers


class _Absent:
    """In the place of the driver of a GPU that is not there."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_device(self) -> str:
        return self.target.name  # kernels are kept by it

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target.compiled


@contextmanager
def compiled_for(target: Target) -> Iterator[dict[tuple[str, str], Any]]:
    """In here a launch compiles its kernel and does nothing else; by name of the kernel and hash, what was compiled.

    Triton keeps it in a folder of its own, with what the assembler said: a command that is cut short goes on.
    """
    if backend.interpreted:
        raise SystemExit("TRITON_INTERPRET is set: kernels are interpreted then, and not compiled; unset it.")
    found: dict[tuple[str, str], Any] = {}
    run, make_cubin = JITFunction.run, CUDABackend.make_cubin

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.__name__, kernel.hash] = kernel
        return kernel

    def heard(self: Any, ptx: str, metadata: dict[str, Any], *options: Any) -> bytes:
        with redirect_stdout(StringIO()) as said:
            cubin: bytes = make_cubin(self, ptx, metadata, *options)
        metadata["ptxas"] = said.getvalue()
        return cubin

    def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)  # what nobody writes here may still be an index

    with ExitStack() as stack:
        said = {"TRITON_CACHE_DIR": str(_KEPT.absolute()), "TRITON_DUMP_PTXAS_LOG": "1"}
        stack.enter_context(patch.dict(os.environ, said))
        stack.enter_context(patch.object(JITFunction, "run", compile_only))
        stack.enter_context(patch.object(CUDABackend, "make_cubin", heard))
        stack.enter_context(patch.object(driver, "_active", _Absent(target)))
        stack.enter_context(patch.object(backend, "absent", lambda device=None: ""))
        stack.enter_context(patch.object(launching, "empty", zeros))
        stack.enter_context(patch.object(torch, "_assert_async", lambda *told: None))  # of what nobody wrote
        yield found


def needs(kernel: Any, target: Target) -> Needs:
    """From the assembler's report, or of AMD's from what the assembly says of itself."""
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    if target.compiled.backend == "cuda":
        said = kernel.metadata.ptxas
        registers = re.search(r"Used (\d+) registers", said)
        assert registers is not None, said
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
        return Needs(int(registers[1]), sum(map(int, spills)), shared, warps)
    assembly = kernel.asm["amdgcn"]
    sizes = {name: int(size) for name, size in re.findall(r"^\s+\.(\w+):\s+(\d+)$", assembly, re.MULTILINE)}
    spilled = 4 * (sizes["vgpr_spill_count"] + sizes["sgpr_spill_count"])
    # Most of it is asked for at the launch, and the assembly does not know of it.
    return Needs(sizes["vgpr_count"], spilled, max(shared, sizes["group_segment_fixed_size"]), warps)


def kernels(*modules: Any) -> set[str]:
    """The names of all kernels in these modules: functions of Triton's that return nothing."""
    found = set()
    for module in modules:
        for name, value in vars(module).items():
            returns = isinstance(value, JITFunction) and re.search(r"^\s+return \S", value.src, re.MULTILINE)
            if isinstance(value, JITFunction) and value.module == module.__name__ and not returns:
                found.add(name)
    return found


def compiled(target: Target, calls: Callable[[], None]) -> dict[str, list[Needs]]:
    """What every kernel that these calls launch needs, each way in which it is launched once."""
    with compiled_for(target) as found:
        calls()
    made: dict[str, list[Needs]] = {}
    for (name, _), kernel in found.items():
        made.setdefault(name, []).append(needs(kernel, target))
    return made


VERSION: str = triton.__version__
