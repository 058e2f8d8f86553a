"""The kernels for GPUs in Triton's interpreter, on the CPU: ``make gpu-check``.

Triton decides when a kernel is defined whether it is interpreted, so the variable is set before anything here is
imported, and only where these tests are run by themselves: in one process with the others they are skipped.
"""

import pytest

from tensorbed.backends import triton


def pytest_collection_modifyitems(items):
    why = triton.reason or ("" if triton.interpreted else "TRITON_INTERPRET=1 is not set: make gpu-check")
    for item in items:
        if why and "gpu" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=why))
