"""Small rows of several tables are made apart and put into the output in the order of the batch: nobody can tell."""

import pytest
import torch

from tensorbed.backends import native
from tensorbed.backends.chain import Chain
from tensorbed.backends.native.chains import Table, compute
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import draw_cores, draw_grad, draw_ids, exact, isas, kernels_of, on_threads

# Rows of 1 to 64 numbers, which are small in single precision, among them a ring and one sorted by its last digit; a
# table of four rows, of which each is asked for many times; and rows of 105 numbers, which are not small.
CHAINS = [
    Chain(10_000, (30, 20, 17), (4, 2, 2), (1, 16, 16, 1)),
    Chain(4, (2, 1, 2), (4, 2, 2), (1, 16, 16, 1)),
    Chain(900, (10, 9, 10), (3, 1, 5), (4, 3, 5, 4)),
    Chain(300, (11, 29), (1, 1), (1, 3, 1)),
    Chain(25_000, (25, 30, 40), (3, 5, 7), (1, 16, 16, 1)),
    Chain(5_000, (5_000, 1), (1, 64), (1, 7, 1)),
]


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.float64, 2), (torch.bfloat16, 3)])
@pytest.mark.parametrize("padded", [False, True])
def test_rows_and_gradients_of_many_tables_are_those_of_each(isa, dtype, threads, padded):
    n = 700  # not a multiple of what is put at a time
    tables = []
    for k, chain in enumerate(CHAINS):
        ids = draw_ids(chain, n, k)
        padding = {"padding_idx": int(ids[5]), "padding_row": torch.full((chain.cols,), 3.0, dtype=dtype)}
        tables.append(Table(chain, draw_cores(chain, dtype, seed=k), ids, **(padding if padded and k % 2 else {})))
    grad = draw_grad(n, sum(chain.cols for chain in CHAINS), dtype)
    tensors = [core for table in tables for core in table.cores]
    with kernels_of(isa), on_threads(threads):
        rows = compute(tables)
        found = iter(torch.autograd.grad(rows, tensors, grad))
        with torch.no_grad():
            assert torch.equal(compute(tables), rows)  # without a thought of gradients
    for table, own, back in zip(tables, *(t.split([c.cols for c in CHAINS], 1) for t in (rows, grad)), strict=True):
        skipped = table.ids == (-1 if table.padding_idx is None else table.padding_idx)
        wanted, gradients = exact(table.chain, table.cores, table.ids, back.masked_fill(skipped[:, None], 0.0))
        assert_near(own, wanted.masked_fill(skipped[:, None], 3.0).to(dtype))
        for gradient in gradients:
            assert_near(next(found), gradient.to(dtype))
