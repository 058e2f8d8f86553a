"""Guards around every tensor that kernels are handed: reads outside show as NaN in results, writes as guards gone.

Fresh memory is NaN too, so that what nobody wrote is not read.
"""

from contextlib import contextmanager

import torch

from tensorbed.backends.triton import launching

WIDTH = 64  # numbers before and after


def guard_of(dtype):
    """A number that nobody computes: of whole numbers one that is an address or a size of nothing."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min // 2


def is_guard(numbers):
    return numbers.isnan() if numbers.dtype.is_floating_point else numbers == guard_of(numbers.dtype)


class Guards:
    def __init__(self):
        self.around = []

    def empty(self, shape, dtype, device):
        """Memory between guards, as :func:`launching.empty`."""
        count = torch.Size(shape).numel()
        memory = torch.full((count + 2 * WIDTH,), guard_of(dtype), dtype=dtype, device=device)
        self.around.append(memory)
        return memory[WIDTH : WIDTH + count].view(*shape)

    def copy(self, tensor):
        """The same numbers between guards; what trains, trains."""
        copied = self.empty(tensor.shape, tensor.dtype, tensor.device)
        return copied.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    def check(self):
        for memory in self.around:
            assert bool(is_guard(memory[:WIDTH]).all()), "written before a tensor"
            assert bool(is_guard(memory[memory.numel() - WIDTH :]).all()), "written behind a tensor"


@contextmanager
def guarded(monkeypatch):
    """Guards around all memory that kernels are given in here, checked at the end."""
    guards = Guards()
    with monkeypatch.context() as patch:
        patch.setattr(launching, "empty", guards.empty)
        yield guards
    guards.check()
    assert guards.around, "no kernel was given memory"
