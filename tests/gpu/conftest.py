"""The kernels for GPUs: on one (``make gpu``), or in Triton's interpreter on the CPU (``make gpu-check``).

Triton decides when a kernel is defined whether it is interpreted, so these tests have a process of their own, with
``TRITON_INTERPRET=1`` in its environment; in one with others, and without a GPU, they are skipped.
"""

import inspect
import os

import pytest
import torch
from guards import guarded

from tensorbed.backends import triton
from tensorbed.backends.triton import launching
from tensorbed.backends.triton.launching import Tiles

# Some versions of torch want it for their own products on CUDA where deterministic algorithms are asked for.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Laws that ask every backend themselves.
OF_EVERY_BACKEND = {"test_half_precision_is_rounded_once", "test_nothing_of_the_table_s_size_is_allocated"}

# Tests that give the kernels wrong numbers on purpose.
WITH_WRONG_NUMBERS = {
    "test_compiled_layers_compute_the_same",
    "test_indices_outside_the_table_raise",
    "test_targets_out_of_range_are_refused_without_a_number",
}


def is_about_a_backend(item):
    """Whether a law of a class that names backends is about them."""
    names_backends = getattr(item.cls, "impls", None) is not None
    asks = "impl" in inspect.signature(item.function).parameters or item.originalname in OF_EVERY_BACKEND
    return asks or not names_backends


def pytest_collection_modifyitems(config, items):
    why = triton.absent() and f"{triton.absent()}; make gpu-check interprets the kernels on the CPU"
    here = [item for item in items if "gpu" in item.path.parts]
    for item in here:
        if why:
            item.add_marker(pytest.mark.skip(reason=why))
    others = [item for item in here if not is_about_a_backend(item)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]


@pytest.fixture
def guards(monkeypatch):
    """Guards around all memory that kernels are given in a test."""
    with guarded(monkeypatch) as found:
        yield found


@pytest.fixture(autouse=True)
def where_the_kernels_run():
    """New tensors are where the kernels run."""
    with torch.device("cpu" if triton.interpreted else "cuda"):
        yield


@pytest.fixture(autouse=True)
def large_tiles(request, monkeypatch):
    """The interpreter takes milliseconds for a program of any size. Tests of tiles as they are have a marker for it."""
    if triton.interpreted and "tiles_as_they_are" not in request.keywords:
        monkeypatch.setattr(launching, "tiles", lambda rank, dtype: Tiles(1024, 128, 128, 4, 1))


@pytest.fixture(autouse=True)
def refusals_of_a_device_at_once(request, monkeypatch):
    """As on the CPU. A device that refuses by itself would refuse whatever the tests after this one ask of it too."""

    def refuse(valid, message):
        if not bool(valid):
            raise RuntimeError(message)

    if not triton.interpreted and getattr(request.node, "originalname", None) in WITH_WRONG_NUMBERS:
        monkeypatch.setattr(torch, "_assert_async", refuse)


@pytest.fixture(scope="session", autouse=True)
def quick_calls_of_kernels_parts():
    """Without this the interpreter prepares its language anew for every function that a kernel calls, each time.

    For those in one file once is enough.
    """
    if triton.absent() or not triton.interpreted:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    prepare, prepared = InterpretedFunction.__call__, set()

    def call(part, *given, **named):
        if part.fn.__module__ in prepared:
            return part.rewrite()(*given, **named)
        if not part.fn.__module__.startswith("tensorbed"):  # a launch prepares ours, and after it nothing is left
            prepared.add(part.fn.__module__)
        return prepare(part, *given, **named)

    prepared.update(f"tensorbed.backends.triton.{name}" for name in ("chain_kernels", "plan_kernels", "rounding"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield
