"""Left products kept from forward to backward, made again, or never held at once: the gradients do not tell."""

import pytest
import torch

from tensorbed.backends import native
from tensorbed.backends.chain import Chain
from tensorbed.backends.native.chains import KernelRows, Table, compute
from tensorbed.backends.torch import SharedRows
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import (
    CHAINS,
    by_kernels,
    draw_cores,
    draw_grad,
    draw_ids,
    every_isa_with,
    exact,
    isas,
    kernels_of,
    on_threads,
)

from tensorbed.backends.native import chains as compiled

every_isa = pytest.mark.parametrize("isa", isas())

# With one row asked of each, the left products of the last level but one are 64 times the rows, 26 MB in single
# precision: they are not kept.
UNKEPT = Chain(3_200, (40, 40, 2), (8, 8, 1), (1, 8, 64, 1))
ONE_OF_EACH = torch.arange(0, 3_200, 2)
# A ring's left products are as many times wider as the joint is: 33 MB of those that are held throughout, more than
# may be, so that the rows are computed in runs.
IN_RUNS = Chain(24_000, (20, 20, 20, 3), (2, 2, 1, 1), (16, 16, 16, 16, 16))


def called(tables, grad, keep):
    """Rows and gradients by one call, which keeps or does not."""
    with torch.no_grad():
        call = compiled.Planned(tables)
        tensors = [core for table in tables for core in table.cores]
        return [call.forward(tensors, keep=keep), *call.backward(tensors, grad)]


@every_isa_with(
    ["chain"],
    {name: (chain,) for name, chain in {**CHAINS, "unkept": UNKEPT}.items()},
    [torch.float32, torch.float64, torch.bfloat16],
)
def test_gradients_are_the_same_with_and_without_a_tape(isa, dtype, chain):
    cores, ids = draw_cores(chain, dtype), ONE_OF_EACH if chain is UNKEPT else draw_ids(chain, 200)
    tables = [Table(chain, cores, ids)]
    grad = draw_grad(ids.shape[0], chain.cols, dtype)
    with kernels_of(isa):
        kept, made_again = called(tables, grad, keep=True), called(tables, grad, keep=False)
    for one, other in zip(kept, made_again, strict=True):
        assert torch.equal(one, other)


def test_tables_of_one_call_may_keep_or_not():
    chains = [UNKEPT, CHAINS["train, order 4"], CHAINS["ring, order 3"], CHAINS["low rank, by digit"]]
    n = ONE_OF_EACH.shape[0]
    tables = [Table(chain, draw_cores(chain, seed=k), draw_ids(chain, n, k)) for k, chain in enumerate(chains)]
    tables[0] = tables[0]._replace(ids=ONE_OF_EACH)
    grad = draw_grad(n, sum(chain.cols for chain in chains))
    found = called(tables, grad, keep=True)
    for one, other in zip(found, called(tables, grad, keep=False), strict=True):
        assert torch.equal(one, other)
    made, at, col = iter(found[1:]), found[0], 0
    for table in tables:
        columns = slice(col, col + table.chain.cols)
        rows, grads = exact(table.chain, table.cores, table.ids, grad[:, columns])
        assert_near(at[:, columns], rows)
        for wanted in grads:
            assert_near(next(made), wanted)
        col += table.chain.cols


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_that_are_not_kept_are_made_again(dtype, threads):
    cores, ids = draw_cores(UNKEPT, dtype), ONE_OF_EACH
    grad = draw_grad(ids.shape[0], UNKEPT.cols, dtype)
    with on_threads(threads):
        rows, grads = by_kernels(UNKEPT, cores, ids, grad)
    wanted, wanted_grads = exact(UNKEPT, cores, ids, grad)
    for one, other in zip([rows, *grads], [wanted, *wanted_grads], strict=True):
        assert_near(one, other.to(dtype))


@every_isa
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_runs_of_a_wide_ring_add_up(isa, dtype, threads):
    cores = draw_cores(IN_RUNS, dtype)
    ids = torch.randperm(IN_RUNS.rows, generator=torch.Generator().manual_seed(0))[:11_000]
    ids = torch.cat([ids, ids[:50]])
    grad = draw_grad(ids.shape[0], IN_RUNS.cols, dtype)
    with kernels_of(isa), on_threads(threads):
        rows, grads = by_kernels(IN_RUNS, cores, ids, grad)
    wanted, wanted_grads = exact(IN_RUNS, cores, ids, grad)
    for one, other in zip([rows, *grads], [wanted, *wanted_grads], strict=True):
        assert_near(one, other.to(dtype))


def test_a_tape_serves_gradients_as_often_as_asked():
    chain = CHAINS["train, order 4"]
    cores, ids = draw_cores(chain), draw_ids(chain, 300)
    rows = compute([Table(chain, cores, ids)])
    for seed in range(3):
        grad = draw_grad(300, chain.cols, seed=seed)
        made = torch.autograd.grad(rows, cores, grad, retain_graph=True)
        for one, other in zip(made, exact(chain, cores, ids, grad)[1], strict=True):
            assert_near(one, other)


def test_a_prepared_batch_gives_its_rows_as_often_as_asked():
    chain = CHAINS["train, order 4"]
    cores, ids = [core.detach() for core in draw_cores(chain)], draw_ids(chain, 300)
    for batch in (KernelRows(chain, cores, ids), SharedRows.of(chain, ids)):
        assert torch.equal(batch.rows(cores), batch.rows(cores))
