"""Random tensors, the same at every run on every device: drawn on the CPU, then where the kernels run."""

import torch


def normal(*shape, seed, dtype=torch.float32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def integers(low, high, shape, *, seed, dtype=torch.int64):
    numbers = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)
