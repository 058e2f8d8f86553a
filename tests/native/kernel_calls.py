"""Calls of the kernels and the same calls in float64 by the plain path, for the tests beside this file."""

from contextlib import contextmanager

import pytest
import torch

from tensorbed.backends import native
from tensorbed.backends.chain import Chain, ChainOfCores, take
from tensorbed.backends.native.chains import Table, compute
from tensorbed.backends.torch import chain_rows

# Orders 2 to 6, odd and even sizes, trains, rings and low rank; the last core applied to each left product (most of
# them) and sorted by its digit (where the name says so); sums of more than one block of the products' depth.
CHAINS = {
    "train, order 2": Chain(33, (5, 7), (3, 5), (1, 33, 1)),
    "train, order 2, one row": Chain(1, (1, 1), (1, 1), (1, 1, 1)),
    "train, order 2, by digit": Chain(300, (11, 29), (3, 35), (1, 17, 1)),
    "train, order 3": Chain(25_000, (25, 30, 40), (3, 5, 7), (1, 16, 16, 1)),
    "train, order 3, rank 33": Chain(1001, (7, 11, 13), (7, 5, 3), (1, 33, 32, 1)),
    "train, order 3, by digit": Chain(990, (10, 9, 11), (1, 1, 49), (1, 5, 33, 1)),
    "train, order 3, a last core of megabytes": Chain(9_000, (2, 2, 2300), (2, 2, 15), (1, 3, 17, 1)),
    "train, order 3, rank 270": Chain(50, (3, 4, 5), (5, 1, 3), (1, 270, 259, 1)),
    "train, order 3, two columns at last": Chain(1_000, (10, 9, 12), (9, 7, 2), (1, 16, 17, 1)),
    "train, order 3, one column at last": Chain(500, (5, 9, 12), (3, 5, 1), (1, 7, 32, 1)),
    "train, order 4": Chain(2_000, (7, 5, 7, 11), (1, 3, 5, 7), (1, 7, 31, 3, 1)),
    "train, order 5": Chain(300, (2, 5, 3, 1, 13), (3, 1, 5, 1, 7), (1, 2, 17, 1, 4, 1)),
    "train, order 6": Chain(91, (2, 2, 2, 2, 3, 2), (1, 3, 1, 3, 1, 5), (1, 4, 9, 16, 8, 2, 1)),
    "ring, order 2": Chain(97, (7, 17), (3, 5), (3, 16, 3)),
    "ring, order 3": Chain(1999, (11, 13, 17), (3, 5, 7), (17, 16, 33, 17)),
    "ring, order 4": Chain(500, (3, 7, 5, 7), (1, 5, 1, 3), (5, 3, 7, 9, 5)),
    "ring, order 6": Chain(91, (2, 2, 2, 2, 3, 2), (3, 1, 1, 3, 1, 7), (2, 1, 3, 4, 2, 5, 2)),
    "low rank, few columns": Chain(50, (50, 1), (1, 13), (1, 33, 1)),
    "low rank, by digit": Chain(997, (997, 1), (1, 67), (1, 17, 1)),
    "low rank, rank 1": Chain(31, (31, 1), (1, 1), (1, 1, 1)),
}


def isas():
    """The instruction sets that were compiled and that run here, least first."""
    if native.module is None:
        return []
    return list(native.module.isas[: native.module.isas.index(native.module.isa) + 1])


def every_isa_with(names, cases, dtypes):
    """Every case on every instruction set, with the dtypes in turn: each dtype occurs on each set."""
    given = [
        pytest.param(isa, dtypes[(turn + k) % len(dtypes)], *case, id=f"{isa}-{name}")
        for turn, isa in enumerate(isas())
        for k, (name, case) in enumerate(cases.items())
    ]
    return pytest.mark.parametrize(("isa", "dtype", *names), given)


@contextmanager
def kernels_of(isa):
    before = native.module.use(isa)
    try:
        yield
    finally:
        native.module.use(before)


@contextmanager
def on_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw_cores(chain, dtype=torch.float64, seed=0):
    """Leaves with gradients, of a table with entries of size 1."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(chain.order):
        core = torch.randn(chain.core_shape(k), generator=generator, dtype=torch.float64) / chain.ranks[k] ** 0.5
        found.append(core.to(dtype).requires_grad_())
    return found


def draw_ids(chain, n, seed=1):
    """Uniform over the table, its first and last row and a repetition among them where there is room."""
    ids = torch.randint(0, chain.rows, (n,), generator=torch.Generator().manual_seed(seed))
    if n >= 4:
        ids[1], ids[2], ids[3] = 0, chain.rows - 1, ids[0]
    return ids


def draw_grad(n, cols, dtype=torch.float64, seed=2):
    return torch.randn(n, cols, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def exact(chain, cores, ids, grad):
    """Rows and gradients in float64, by plain PyTorch."""
    wide = [core.detach().double().requires_grad_() for core in cores]
    rows = take(chain, wide, ids)
    return rows.detach(), torch.autograd.grad(rows, wide, grad.double())


def by_kernels(chain, cores, ids, grad):
    rows = compute([Table(chain, cores, ids)])
    return rows.detach(), torch.autograd.grad(rows, cores, grad)


def by_reference(chain, cores, ids, grad):
    rows = take(chain, cores, ids)
    return rows.detach(), torch.autograd.grad(rows, cores, grad)


def by_torch(chain, cores, ids, grad):
    rows = chain_rows(ChainOfCores(chain, cores), ids)
    return rows.detach(), torch.autograd.grad(rows, cores, grad)


def norm(tensor):
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def assert_as_exact(made, theirs, wanted, absolute):
    """The error against float64 is no larger than that of other paths in the same dtype, but for a rounding.

    ``absolute`` is ``wanted`` with every number made positive on the way: where few numbers are compared, a sum that
    cancels is right to the last place by luck only, on either side.
    """
    unit = torch.finfo(made.dtype).eps
    assert made.shape == wanted.shape
    assert all(made.dtype == other.dtype for other in theirs)
    allowed = 1.5 * min(norm(other.double() - wanted) for other in theirs)
    allowed += unit * (norm(wanted) + norm(absolute) / wanted.numel() ** 0.5)
    assert norm(made.double() - wanted) <= allowed
