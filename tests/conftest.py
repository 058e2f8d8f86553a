import os

import hypothesis
import pytest
import torch
from samples import SAMPLES

# Workers of pytest-xdist share the cores; more threads than cores only slow the small products here.
torch.set_num_threads(1)

# Nor are processes that compile for a worker any help: starting them takes longer than what they do.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# No test may depend on the time of day or on luck: no deadline, and the same examples every run.
hypothesis.settings.register_profile("tensorbed", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tensorbed")


def pytest_collection_modifyitems(items):
    """Marks the laws of the conformance suite that are others without compiled kernels; test files mark their own."""
    for item in items:
        if item.path.name == "test_conformance.py" and item.cls is not None and is_other_without_kernels(item):
            item.add_marker(pytest.mark.without_kernels)


LAWS_OF_EVERY_SIZE = {
    "test_the_loss_is_that_of_all_logits",
    "test_the_loss_allocates_neither_table_nor_logits",
    "test_a_memory_budget_is_kept",
}


def is_other_without_kernels(item):
    """Whether compiled kernels would compute it, and what computes in their stead is not tested by its own name."""
    given, law = item.callspec.params, item.originalname
    kind = given["sample"].structure.kind
    is_first = given["sample"] == SAMPLES[kind][0]
    if "impl" in given:
        return given["impl"] == "auto" and is_first
    if "compile" in law:
        return kind == "tensor_train"
    return item.cls.__name__ == "TestHead" and (is_first or law in LAWS_OF_EVERY_SIZE)
