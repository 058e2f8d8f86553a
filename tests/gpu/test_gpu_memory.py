"""What a step holds beside its layer and batch: nothing of the order of the table, however large its left products are.

Sizes of what is allocated do not depend on values, so that tensors here have none, and kernels do nothing.
"""

import pytest
import torch

import tensorbed as tb
from tensorbed.backends import graphs
from tensorbed.backends.triton import launching
from tensorbed.testing.samples import largest_allocation, most_held

CASES = {
    "train": (267_735, 512, tb.TensorTrain(rank=16), torch.float32, 4_096, 0),
    "train of large rank": (267_735, 512, tb.TensorTrain(rank=96), torch.float32, 4_096, 0),
    "train in bfloat16": (267_735, 512, tb.TensorTrain(rank=96), torch.bfloat16, 4_096, 0),
    "train of order 5": (267_735, 256, tb.TensorTrain(rank=64, order=5), torch.float32, 4_096, 0),
    "ring": (1_000_000, 64, tb.TensorRing(rank=32, order=4), torch.float32, 64_000, 0),
    "ring in bags": (1_000_000, 64, tb.TensorRing(rank=32, order=4), torch.float32, 64_000, 20),
    "bags": (11_000_000, 64, tb.TensorTrain(rank=32), torch.float32, 100_000, 20),
    "low rank": (267_735, 512, tb.LowRank(rank=64), torch.float32, 4_096, 0),
}


class NoKernels:
    """In the place of a module of kernels: each can be launched, and does nothing."""

    def __getattr__(self, name):
        return self

    def __getitem__(self, grid):
        return lambda *given, **named: None


@pytest.mark.parametrize(("rows", "cols", "format", "dtype", "n", "bag"), CASES.values(), ids=CASES)
def test_forward_and_backward_hold_nothing_of_the_table_s_size(rows, cols, format, dtype, n, bag, monkeypatch):
    for module in ("chain_kernels", "plan_kernels"):
        monkeypatch.setattr(launching, module, NoKernels)
    with torch.device("meta"):
        layer = tb.Embedding(rows, cols, format, dtype=dtype)
        ids, bounds = torch.empty(n, dtype=torch.int64), torch.empty(n // bag + 1, dtype=torch.int64) if bag else None
        grad = torch.empty(n // bag if bag else n, cols, dtype=dtype)
    chain = layer.structure.chain
    cores = [p.detach().view(chain.core_shape(k)) for k, p in enumerate(layer.parameters())]
    told = (chain.packed(), "triton", bounds, None, False, -1)
    with most_held() as held, largest_allocation() as largest:
        out = graphs.chain_op._init_fn(ids, cores, *told)
        gradients = graphs.chain_backward_op._init_fn(grad, ids, cores, *told)
    assert [out.shape, *(one.shape for one in gradients)] == [grad.shape, *(core.shape for core in cores)]
    assert largest() < rows * cols / 4
    assert held() < rows * cols * grad.element_size() / 2, f"{held() / 1e6:.0f} MB"
