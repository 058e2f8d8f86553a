"""What the compiled extension says of itself."""

import os

import pytest

from tensorbed import native

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from tensorbed import _native


def test_the_typed_module_is_the_loaded_one():
    assert _native is native.module


def test_the_instruction_set_in_use_is_one_that_was_compiled():
    assert _native.isas[0] == "baseline"
    assert _native.isa in _native.isas


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads /proc")
def test_the_threads_are_torchs():
    """Two OpenMP runtimes in one process would be two pools of threads for the same cores."""
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/libgomp" in line or "/libomp" in line or "/libiomp" in line}
    assert len(files) <= 1, files
