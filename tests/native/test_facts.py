"""What the compiled extension says of itself."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorbed.backends import native

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from tensorbed import _native


def test_the_typed_module_is_the_loaded_one():
    assert _native is native.module


def test_the_instruction_set_in_use_is_one_that_was_compiled():
    assert _native.isas[0] == "baseline"
    assert _native.isa in _native.isas


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_the_threads_are_torchs():
    """Two OpenMP runtimes in one process would be two pools of threads for the same cores."""
    # In a process of its own, where no other test has imported anything.
    code = "from tensorbed.backends import native; print(open('/proc/self/maps').read())"
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert Path(_native.__file__).name in maps
    assert len(set(re.findall(r"/\S*/lib(?:g|i)?omp\S*", maps))) <= 1
