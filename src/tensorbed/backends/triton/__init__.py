"""The kernels for GPUs, in Triton, or why there are none: what is asked before Triton itself is imported.

``reason`` is one line that says why this install has none, empty where it has them. Whether there is a device for them
is asked by :func:`absent`, later: asking would start CUDA in processes that fork. With ``TRITON_INTERPRET=1`` in the
environment Triton's interpreter runs the kernels on the CPU: slowly, for tests.
"""

from __future__ import annotations

import json
import os
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

LEAST_VERSION = (3, 6)
LEAST_CAPABILITY = (7, 0)
TYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels compute with


def passed(result: Path) -> bool:
    """Whether this is what ``make gpu`` wrote on a GPU where tests ran and none failed."""
    try:
        told = json.loads(result.read_text(encoding="utf-8"))
        tests = {name: int(told["tests"][name]) for name in ("tests", "failures", "errors", "skipped")}
        on_a_gpu = bool(told["capability"])
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return on_a_gpu and tests["tests"] > tests["skipped"] and not tests["failures"] and not tests["errors"]


# Until such a file is in the repository, nobody has seen the kernels run on a GPU, and they are taken by their name
# alone.
measured = passed(Path(__file__).with_name("measured.json"))
interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")  # as Triton reads it

_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-windows")


def version() -> str:
    """Of the installed Triton, whichever package it comes from; empty where there is none, "unknown" if none says."""
    if find_spec("triton") is None:
        return ""
    for package in _PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def not_installed() -> str:
    """Why this install has no kernels for GPUs and what to do, in one line; empty where it has."""
    installed = version()
    if not installed:
        return 'triton is not installed: pip install "triton>=3.6"'
    numbers = re.match(r"(\d+)(?:\.(\d+))?", installed)
    if numbers is None:
        return 'triton is of an unknown version: pip install --upgrade "triton>=3.6"'
    if tuple(int(part or 0) for part in numbers.groups()) < LEAST_VERSION:
        return f'triton {installed} is too old: pip install --upgrade "triton>=3.6"'
    return ""


reason = not_installed()


def absent(device: torch.device | None = None) -> str:
    """Why the kernels cannot be had, on this device or on any, and what to do, in one line; empty where they can."""
    if reason or (interpreted and (device is None or device.type == "cpu")):
        return reason
    if not torch.cuda.is_available():  # ROCm's devices go by this name too
        return "torch sees no GPU: look at its driver, and at whether this torch is built for CUDA or ROCm"
    if device is not None and device.type != "cuda":
        return f"the tensors are on {device}: move the layer and the indices to a GPU"
    if torch.version.hip is not None:
        return ""
    devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())] if device is None else [device]
    best = max(devices, key=torch.cuda.get_device_capability)
    major, minor = torch.cuda.get_device_capability(best)
    if (major, minor) >= LEAST_CAPABILITY:
        return ""
    least = ".".join(map(str, LEAST_CAPABILITY))
    told = f"{torch.cuda.get_device_name(best)} has compute capability {major}.{minor}, Triton needs {least} or later"
    return f'{told}: use impl="torch" on it, or another GPU'
