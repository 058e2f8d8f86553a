"""How far a lookup walks through the library before the kernels have it."""

import sys
from pathlib import Path

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import native

SOURCE = str(Path(tb.__file__).parent)
MOST_FRAMES, MOST_FILES = 25, 6


def walked(call):
    """The files of the library whose functions a call enters, in order."""
    files = []

    def entered(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


@pytest.mark.skipif(not native.available, reason=f"no compiled kernels: {native.reason}")
@pytest.mark.parametrize("shape", [(1,), (3, 4)])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=4), tb.TensorRing(rank=3), tb.LowRank(rank=4)], ids=repr)
def test_an_eager_lookup_by_the_kernels_is_short(format, shape):
    layer, index = tb.Embedding(1000, 64, format), torch.zeros(shape, dtype=torch.int64)
    with torch.no_grad():
        layer(index)  # what is worked out once is not part of it
        files = walked(lambda: layer(index))
    assert len(files) <= MOST_FRAMES
    assert len(set(files)) <= MOST_FILES
