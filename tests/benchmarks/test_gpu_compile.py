"""The kernels for GPUs compiled without one: what the compilers say, what is refused, and the model on paper."""

import pytest
import torch

from tensorbed.backends import triton

if triton.reason or triton.interpreted:
    pytest.skip(triton.reason or "TRITON_INTERPRET=1 leaves nothing to compile", allow_module_level=True)

import tensorbed as tb
from benchmarks.gpu_compile import calls, expected
from benchmarks.gpu_compile.__main__ import faults
from benchmarks.gpu_compile.compiling import TARGETS, Needs, compiled, kernels
from benchmarks.gpu_compile.page import model, written
from benchmarks.workloads import WORKLOADS
from tensorbed.functional import explain
from tensorbed.structures.formats import Budget

SMALL = Needs(registers=32, spilled=0, shared=1024, warps=4)


def every_case(needs=SMALL, names=None):
    by_kernel = {name: [needs] for name in names or kernels(*calls.MODULES)}
    return {(target, dtype, rank): by_kernel for target in TARGETS for dtype in calls.DTYPES for rank in calls.RANKS}


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_a_kernel_is_compiled_for_a_device_that_is_not_there(target):
    found = compiled(TARGETS[target], lambda: calls.tiles_of_the_loss(torch.bfloat16, 8))
    assert set(found) == {"absorb_strips", "absorb_merge", "differentiate_tile"}
    for launches in found.values():
        assert all(8 <= needs.registers <= TARGETS[target].registers for needs in launches)
        assert all(needs.fits(TARGETS[target]) for needs in launches)


def test_kernels_are_those_that_return_nothing():
    found = kernels(*calls.MODULES)
    assert {"extend", "quantized_scores", "times_many", "absorb_strips"} <= found
    assert not {name for name in found if name.startswith("_")} | found & {"rounded"}


@pytest.mark.parametrize(
    ("needs", "said"),
    [
        (Needs(40, 16, 1024, 4), "16 bytes spilled"),
        (Needs(40, 0, 300 * 1024, 4), "307200 bytes of shared memory"),
        (Needs(600, 0, 0, 4), "600 registers"),
    ],
)
def test_what_does_not_fit_is_a_fault(needs, said):
    assert faults(every_case()) == []
    found = faults(every_case(needs))
    assert len(found) == len(kernels(*calls.MODULES)) * len(every_case())
    assert all(said in fault for fault in found)


def test_a_kernel_that_nobody_calls_is_a_fault():
    assert "extend is launched by no call of benchmarks/gpu_compile/calls.py." in faults(every_case(names=["pool"]))


def test_the_page_has_a_row_for_each_kernel_and_dtype():
    page = written(every_case())
    for kernel in kernels(*calls.MODULES):
        assert page.count(f"| `{kernel}` |") == len(calls.DTYPES)
    assert "No kernel of this page was run on a GPU." in page
    assert "Spilled: 0 bytes" in page


def test_multiply_adds_on_paper_are_those_that_a_lookup_counts():
    for workload in WORKLOADS.values():
        counted = 0
        for at, table in enumerate(workload.tables):
            structure = tb.TensorTrain(rank=table.rank, shape=table.shape).bind(Budget(table.rows, table.cols))
            counted += explain(structure, workload.table_ids(at), impl="torch").multiply_adds
        launches = expected.lookup(workload, 4).forward
        assert sum(launch.multiply_adds for launch in launches if launch.name.startswith("extend")) == counted


def test_a_floor_is_the_larger_of_bytes_and_multiply_adds():
    device = expected.Device("made up", 100.0, {"float32": 10.0})
    assert expected.Launch("reads", 1, 1000).floor(device, "float32") == 10
    assert expected.Launch("computes", 1000, 1).floor(device, "float32") == 200
    assert expected.Launch("computes", 1000, 1).expected(device, "float32") > 200


def test_the_model_is_marked_as_expectation():
    assert "assumptions" in model()
    assert all(workload in model() for workload in WORKLOADS)
