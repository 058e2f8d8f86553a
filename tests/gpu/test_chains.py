"""The kernels of chains against products in double precision: values, gradients, bags, several tables, guards."""

from itertools import pairwise
from math import prod

import pytest
import torch
from guards import Guards, guarded

from tensorbed.backends.chain import Chain, take
from tensorbed.backends.triton import chains, launching
from tensorbed.backends.triton.chains import Table, compute
from tensorbed.testing import assert_near

TRAIN = Chain(101, (4, 5, 6), (2, 3, 4), (1, 2, 7, 1))
RING = Chain(101, (4, 5, 6), (2, 3, 4), (3, 2, 5, 3))
LOW_RANK = Chain(50, (50, 1), (1, 13), (1, 2, 1))
WIDE = Chain(40, (5, 8), (20, 9), (1, 33, 1))  # more than one tile of rows, columns and terms
DEEP = Chain(91, (2, 2, 2, 2, 3, 2), (2, 1, 2, 1, 3, 2), (2,) * 7)
CHAINS = {"train": TRAIN, "ring": RING, "low rank": LOW_RANK, "wide": WIDE, "deep": DEEP}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(chain, count, dtype, seed=0):
    """Cores and indices, some of them equal."""
    generator, device = torch.Generator().manual_seed(seed), torch.get_default_device()
    scale = prod(chain.ranks[1:]) ** (-0.5 / chain.order)
    numbers = [torch.randn(chain.core_shape(k), generator=generator, device="cpu") for k in range(chain.order)]
    cores = [(scale * core).to(device, dtype).requires_grad_() for core in numbers]
    ids = torch.randint(chain.rows, (count,), generator=generator, device="cpu").to(device)
    ids[:3] = torch.tensor([0, chain.rows - 1, int(ids[-1])])[:count]
    return cores, ids


def counted_launches(monkeypatch):
    """The names of the kernels that are launched from here on."""
    kind, names = type(launching.chain_kernels().extend), []
    launch = kind.__getitem__

    def noted(kernel, grid):
        names.append(kernel.__name__)
        return launch(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", noted)
    return names


def rows_in_double(chain, cores, ids):
    return take(chain, [core.double() for core in cores], ids)


def assert_same(made, expected, leaves, units=None):
    """Values and gradients of one rounding, for a drawn gradient."""
    assert_near(made, expected.to(made.dtype), units=units)
    grad = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(made)
    found = torch.autograd.grad(made, leaves, grad, retain_graph=True)
    for one, other in zip(found, torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        assert_near(one, other, units=units)


@pytest.mark.tiles_as_they_are
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_products_of_many_tiles(precision, monkeypatch):
    """More rows, columns and terms than a tile has, of tiles as on a GPU. Interpreted, both are rounded alike."""
    monkeypatch.setattr(launching, "precision", lambda: precision)
    with guarded(monkeypatch) as guards:
        cores, ids = drawn(WIDE, 23, torch.float32)
        held = [guards.copy(core) for core in cores]
        assert_same(compute([Table(WIDE, held, guards.copy(ids))]), rows_in_double(WIDE, held, ids), held)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_rows_and_gradients(chain, dtype, monkeypatch):
    with guarded(monkeypatch) as guards:
        cores, ids = drawn(chain, 23, dtype)
        held = [guards.copy(core) for core in cores]
        assert_same(compute([Table(chain, held, guards.copy(ids))]), rows_in_double(chain, held, ids), held)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("chain", [TRAIN, RING, LOW_RANK], ids=["train", "ring", "low rank"])
def test_bags_and_gradients(chain, mode, dtype, monkeypatch):
    """Empty bags, one of skipped indices only, long ones, and indices behind the last bag, which are in none."""
    with guarded(monkeypatch) as guards:
        cores, ids = drawn(chain, 40, dtype)
        ids[5:8] = ids[30] = 2
        bounds = torch.tensor([0, 3, 3, 5, 8, 33, 36])
        weights = torch.linspace(-1, 2, 40).to(dtype).requires_grad_() if mode == "weighted" else None
        held = [guards.copy(core) for core in cores]
        own = None if weights is None else guards.copy(weights)
        table = Table(chain, held, guards.copy(ids), guards.copy(bounds), own, mode == "mean", skipped=2)
        rows = rows_in_double(chain, held, ids[:36]) * (1 if own is None else own[:36, None].double())
        kept = (ids[:36] != 2).double()
        sums = torch.stack([(rows * kept[:, None])[a:b].sum(0) for a, b in pairwise(bounds)])
        if mode == "mean":
            sums = sums / torch.stack([kept[a:b].sum().clamp_min(1) for a, b in pairwise(bounds)])[:, None]
        assert_same(compute([table]), sums, [*held, *([] if own is None else [own])])


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_rows_in_pieces_are_the_same(chain, monkeypatch):
    """In pieces of eight unique rows, of the last of which some are rows that nobody asks for."""
    cores, ids = drawn(chain, 23, torch.bfloat16)
    bounds, weights = torch.tensor([0, 3, 3, 20]), torch.linspace(-1, 2, 23).bfloat16().requires_grad_()
    leaves = [*cores, weights]
    table = Table(chain, cores, ids, bounds, weights, skipped=int(ids[4]))
    rows = rows_in_double(chain, cores, ids) * (weights.double() * (ids != ids[4]))[:, None]
    bags = torch.stack([rows[a:b].sum(0) for a, b in pairwise(bounds)])
    monkeypatch.setattr(chains, "most_rows", lambda chain, asked: 8)
    with guarded(monkeypatch):
        assert_same(compute([table]), bags, leaves)
        assert_same(
            compute([table._replace(bounds=None, weights=None, skipped=-1)]), rows_in_double(chain, cores, ids), cores
        )


@pytest.mark.parametrize("pools", [False, True], ids=["rows", "bags"])
def test_several_tables_are_one_launch_of_each_kernel(pools, monkeypatch):
    different = [TRAIN, RING, Chain(7, (2, 2, 2), (2, 2, 2), (1, 1, 3, 1)), TRAIN]
    counts = [12, 5, 30, 1] if pools else [9] * 4
    with guarded(monkeypatch) as guards:
        tables, expected, leaves = [], [], []
        for at, (chain, count) in enumerate(zip(different, counts, strict=True)):
            cores, ids = drawn(chain, count, torch.float32, seed=at)
            held = [guards.copy(core) for core in cores]
            rows, bounds, weights = rows_in_double(chain, held, ids), None, None
            leaves += held
            if pools:
                bounds = torch.tensor([0, count // 2, count])
                if at == 2:
                    weights = guards.copy(torch.linspace(1, 2, count).requires_grad_())
                    rows = rows * weights[:, None]
                    leaves.append(weights)
                rows = torch.stack([rows[: count // 2].sum(0), rows[count // 2 :].sum(0)])
                if at == 1:
                    rows = rows / torch.tensor([count // 2, count - count // 2])[:, None]
            tables.append(Table(chain, held, guards.copy(ids), bounds, weights, mean=pools and at == 1))
            expected.append(rows)
        launches = counted_launches(monkeypatch)
        made = compute(tables)
        assert launches == ["make_keys", "mark_prefixes", "scatter_plan", "extend", "extend", "pool"]
        assert_same(made, torch.cat(expected, 1), leaves)


@pytest.mark.parametrize("chain", [TRAIN, RING, LOW_RANK], ids=["train", "ring", "low rank"])
def test_indices_outside_the_table_are_refused_and_nothing_is_read_there(chain, monkeypatch):
    """The refusal comes from the device, later: until then kernels run on, with zeros in those rows."""
    told = []
    monkeypatch.setattr(torch, "_assert_async", lambda valid, message: told.append((bool(valid), message)))
    with guarded(monkeypatch) as guards:
        cores, ids = drawn(chain, 9, torch.float32)
        ids[2:6] = torch.tensor([-1, chain.rows, 2**40, -(2**62)])
        held = [guards.copy(core) for core in cores]
        rows = rows_in_double(chain, held, ids.clamp(0, chain.rows - 1))
        inside = ((ids >= 0) & (ids < chain.rows)).double()[:, None]
        assert_same(compute([Table(chain, held, guards.copy(ids))]), rows * inside, held)
    ((valid, message),) = told
    assert not valid
    assert f"some index is out of range for a table of {chain.rows} rows (valid: 0 to {chain.rows - 1})" in message


def test_more_indices_of_a_row_than_a_program_takes_at_once():
    cores, _ = drawn(TRAIN, 1, torch.float32)
    ids = torch.cat([torch.full((700,), 5), torch.arange(101), torch.full((30,), 100)])
    assert_same(compute([Table(TRAIN, cores, ids)]), rows_in_double(TRAIN, cores, ids), cores)


def test_the_same_numbers_every_time():
    """To the bit, and whatever the order of the batch: nothing is added up by whoever comes first."""
    cores, ids = drawn(RING, 60, torch.float32)
    bags = torch.arange(0, 61, 3)
    again = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            out = compute([Table(RING, cores, ids, bags)])
            again.append([out, *torch.autograd.grad(out.square().sum(), cores)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*again, strict=True))


def test_trying_sizes_leaves_gradients_as_they_are(monkeypatch):
    """A kernel that adds to what it is given is run once for every size that is tried, and counts once."""
    from triton.runtime.autotuner import Autotuner

    def run_once(call, quantiles):
        call()
        return [1.0] * len(quantiles)

    monkeypatch.setattr(Autotuner, "do_bench", staticmethod(run_once))
    monkeypatch.setattr(launching, "tuned", launching.tuned.__wrapped__)
    monkeypatch.setenv("TENSORBED_TRITON_TUNE", "1")
    cores, ids = drawn(LOW_RANK, 4, torch.float32)
    assert_same(compute([Table(LOW_RANK, cores, ids)]), rows_in_double(LOW_RANK, cores, ids), cores)


def test_sizes_are_tried_only_on_request(monkeypatch):
    kernel = launching.chain_kernels().extend
    tried = launching.tuned(kernel, 16, 128)
    assert {config.kwargs["COLS"] for config in tried.configs} == {16, 32, 64, 128}
    assert tried is launching.tuned(kernel, 16, 128)
    assert launching.tuned(launching.chain_kernels().left_gradients, 16, 128).restore_value == ["out"]
    assert not launching.tunes()
    monkeypatch.setenv("TENSORBED_TRITON_TUNE", "1")
    assert launching.tunes()


def test_guards_find_what_they_are_for():
    guards = Guards()
    held = guards.copy(torch.arange(5.0))
    assert bool(torch.as_strided(held, (6,), (1,))[5].isnan())
    guards.check()
    torch.as_strided(held, (6,), (1,))[5] = 0
    with pytest.raises(AssertionError, match="behind"):
        guards.check()
