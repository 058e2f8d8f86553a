"""What is installed and what it runs on, for people and for programs."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tensorbed._version import __version__
from tensorbed.backends import native, triton

_REMEDY = 'install a C++ compiler and run "pip install --force-reinstall --no-deps ." to get them'


@dataclass(frozen=True)
class Kernels:
    """The compiled kernels: what they were built for, or the ``reason`` why there are none."""

    available: bool
    reason: str = ""
    isa: str = ""
    isas: tuple[str, ...] = ()
    openmp: bool = False
    nanobind: str = ""
    file: str = ""

    def __str__(self) -> str:
        if not self.available:
            line = f"pure Python (no compiled extension: {self.reason})"
            # For other reasons a compiler is no remedy.
            return f"{line}; {_REMEDY}" if self.reason == native.NOT_BUILT else line
        threads = "OpenMP" if self.openmp else "one thread (built without OpenMP)"
        return f"compiled, {self.isa} (of {', '.join(self.isas)}), {threads}, nanobind {self.nanobind}"


@dataclass(frozen=True)
class GpuKernels:
    """The kernels for GPUs: with what they run, or the ``reason`` why they cannot."""

    available: bool
    reason: str = ""
    triton: str = ""
    interpreted: bool = False
    measured: bool = False
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.available:
            return f"none ({self.reason})"
        where = "interpreted on the CPU (TRITON_INTERPRET=1)" if self.interpreted else ", ".join(self.devices)
        named = "" if self.measured else ', for impl="triton" alone: this version has no result of make gpu'
        return f"triton {self.triton}, {where}{named}"


@dataclass(frozen=True)
class Info:
    """What ``tensorbed info`` prints."""

    tensorbed: str
    torch: str
    python: str
    platform: str
    threads: int
    cpus: int
    kernels: Kernels
    gpu_kernels: GpuKernels

    def as_dict(self) -> dict[str, Any]:
        """The same facts for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"tensorbed: {self.tensorbed}\ntorch: {self.torch}\npython: {self.python}, {self.platform}\n"
            f"threads: {self.threads} (of {self.cpus} CPUs)\nkernels: {self.kernels}\n"
            f"GPU kernels: {self.gpu_kernels}"
        )


def info() -> Info:
    """The versions, the threads and the kernels in use."""
    kernels, module = Kernels(False, native.reason), native.module
    if module is not None:
        built = {"isa": module.isa, "isas": tuple(module.isas), "openmp": module.openmp, "nanobind": module.nanobind}
        kernels = Kernels(True, file=module.__file__ or "", **built)
    return Info(
        tensorbed=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        threads=torch.get_num_threads(),
        cpus=os.cpu_count() or 1,
        kernels=kernels,
        gpu_kernels=_gpu_kernels(),
    )


def _gpu_kernels() -> GpuKernels:
    why = triton.absent()
    devices = () if why or triton.interpreted else range(torch.cuda.device_count())
    return GpuKernels(
        available=not why,
        reason=why,
        triton=triton.version(),
        interpreted=triton.interpreted,
        measured=triton.measured,
        devices=tuple(torch.cuda.get_device_name(at) for at in devices if not triton.absent(torch.device("cuda", at))),
    )
