"""Ids, cores and batches of every shape that a caller may have."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import tensorbed as tb
from tensorbed.backends import native
from tensorbed.backends.chain import Chain, full
from tensorbed.backends.native.chains import Table, compute
from tensorbed.testing import assert_near

if not native.available:
    pytest.skip(f"no compiled kernels: {native.reason}", allow_module_level=True)

from kernel_calls import CHAINS, by_kernels, draw_cores, draw_grad, draw_ids, exact, isas, kernels_of, on_threads

from tensorbed import _native

every_isa = pytest.mark.parametrize("isa", isas())
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS.keys())


def assert_exact(chain, cores, ids, made, made_grads, grad):
    rows, grads = exact(chain, cores, ids, grad)
    for one, other in zip([made, *made_grads], [rows, *grads], strict=True):
        assert_near(one, other.to(one.dtype))


def layers(rows=997, cols=36, **options):
    torch.manual_seed(0)
    for format in (tb.TensorTrain(rank=5), tb.TensorRing(rank=3), tb.LowRank(rank=4)):
        yield tb.Embedding(rows, cols, format, **{"dtype": torch.float64, "std": 1.0, **options})


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_no_ids_give_no_rows_and_zero_gradients(shape):
    for impl in ("auto", "native"):
        for layer in layers(impl=impl):
            out = layer(torch.empty(shape, dtype=torch.int64))
            assert out.shape == (*shape, 36)
            grads = torch.autograd.grad(out.sum(), list(layer.parameters()), allow_unused=True)
            assert all(grad is None or grad.count_nonzero() == 0 for grad in grads)


def test_a_plan_of_no_ids_computes_nothing():
    """Handed to the kernels themselves, which layers do not do."""
    chain = CHAINS["ring, order 4"]
    cores = draw_cores(chain)
    handle = _native.Chain(chain.rows, chain.row_factors, chain.col_factors, chain.ranks)
    bounds, out = torch.zeros(3, dtype=torch.int64), torch.full((2, chain.cols), 7.0, dtype=torch.float64)
    made = [torch.full(core.shape, 7.0, dtype=torch.float64) for core in cores]
    addresses = [core.data_ptr() for core in cores]
    for asked, expected in (
        (_native.Asked(handle, 0, 0, 1, -1, 0, -1, 0, False), 7.0),
        (_native.Asked(handle, 0, 0, 1, -1, bounds.data_ptr(), 2, 0, False), 0.0),  # two empty bags
    ):
        batch = _native.Batch(1, [asked], 1)
        batch.forward(addresses, [out.data_ptr()], [chain.cols], [0], True, 1)
        assert torch.equal(out, torch.full_like(out, expected))
        batch.backward(addresses, [out.data_ptr()], [chain.cols], [one.data_ptr() for one in made], [0], 1)
        assert all(one.count_nonzero() == 0 for one in made)


def test_the_default_device_is_no_concern_of_tables_on_the_cpu():
    """What the kernels write to is made on the CPU, whatever is made elsewhere."""
    ids = torch.arange(12).reshape(3, 4)
    bag = tb.EmbeddingBag(997, 36, tb.TensorTrain(rank=5), mode="sum")
    weights = torch.rand(3, 4, requires_grad=True)
    for call in (*layers(), bag, lambda ids: bag(ids, per_sample_weights=weights)):
        expected = call(ids)
        with torch.device("meta"):
            out = call(ids)
            made = torch.autograd.grad(out.sum(), weights, allow_unused=True)
        assert torch.equal(out, expected)
        assert made[0] is None or made[0].is_cpu


def test_fake_tensors_made_from_real_ones_are_not_computed():
    """They have no memory to write to."""
    ids = torch.arange(12).reshape(3, 4)
    bag = tb.EmbeddingBag(997, 36, tb.TensorTrain(rank=5), mode="mean")
    collection = tb.EmbeddingBagCollection(dict.fromkeys("abcd", bag))
    for call, shape in [
        *((layer, (3, 4, 36)) for layer in layers()),
        (bag, (3, 36)),
        (lambda ids: collection(ids).values, (3, 144)),
    ]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            out = call(ids)
        assert isinstance(out, FakeTensor)
        assert out.shape == shape


@every_isa
@every_chain
def test_one_row(isa, chain):
    cores = draw_cores(chain)
    for row in (0, chain.rows // 2, chain.rows - 1):
        ids, grad = torch.tensor([row]), draw_grad(1, chain.cols)
        with kernels_of(isa):
            assert_exact(chain, cores, ids, *by_kernels(chain, cores, ids, grad), grad)


@every_isa
@pytest.mark.parametrize("threads", [1, 4])
@every_chain
def test_all_rows_equal(isa, threads, chain):
    cores, n = draw_cores(chain), 3_000
    ids, grad = torch.full((n,), chain.rows - 1), draw_grad(n, chain.cols)
    with kernels_of(isa), on_threads(threads):
        rows, grads = by_kernels(chain, cores, ids, grad)
    assert torch.equal(rows, rows[:1].expand(n, -1))
    # The gradient of one row that got the sum of all.
    assert_exact(chain, cores, ids[:1], rows[:1], grads, grad.sum(0, keepdim=True))


OTHERS = {
    "train, of more rows than one product": Chain(2500, (2, 1300), (6, 5), (1, 4, 1)),
    "train, an odd height and two columns at last": Chain(63, (2, 40), (5, 2), (1, 33, 1)),
    "train, an even height and two columns at last": Chain(63, (2, 40), (6, 2), (1, 33, 1)),
    "train, one column": Chain(63, (2, 40), (1, 1), (1, 33, 1)),
}


@every_isa
@pytest.mark.parametrize("chain", [*CHAINS.values(), *OTHERS.values()], ids=[*CHAINS, *OTHERS])
def test_rows_that_follow_one_another_are_those_that_do_not(isa, chain):
    """All rows of a prefix are one product then; those of every other row are made one by one."""
    ids = torch.arange(chain.rows // 50, chain.rows)[:2_450]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        cores, grad = draw_cores(chain, dtype), draw_grad(ids.shape[0], chain.cols, dtype)
        with kernels_of(isa), on_threads(2):
            rows, grads = by_kernels(chain, cores, ids, grad)
            apart = [by_kernels(chain, cores, ids[k::2], grad[k::2])[0] for k in range(min(2, ids.shape[0]))]
        for k, other in enumerate(apart):
            assert torch.equal(rows[k::2], other)
        if dtype == torch.float64:
            assert_exact(chain, cores, ids, rows, grads, grad)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ranks", [(1, 3, 2, 1), (2, 1, 3, 2)], ids=["train", "ring"])
def test_a_million_ids(threads, ranks):
    chain = Chain(30_000, (31, 31, 32), (1, 2, 2), ranks)
    cores, n = draw_cores(chain, torch.float32), 10**6
    ids, grad = draw_ids(chain, n), draw_grad(n, chain.cols, torch.float32)
    with on_threads(threads):
        rows, grads = by_kernels(chain, cores, ids, grad)
    # By the table: the plain path would gather a slice an id.
    wide = [core.detach().double().requires_grad_() for core in cores]
    table = full(chain, wide)
    assert_near(rows, table.detach()[ids].float())
    table_grad = torch.zeros_like(table).index_add(0, ids, grad.double())
    for one, other in zip(grads, torch.autograd.grad(table, wide, table_grad), strict=True):
        assert_near(one, other.float())


def test_ids_may_lie_apart_or_be_one_expanded():
    chain = CHAINS["train, order 3"]
    cores = draw_cores(chain)
    square = draw_ids(chain, 900).reshape(300, 3)
    for ids in (square[:, 1], square[::7, 2], square.T[0], torch.tensor([77]).expand(40)):
        grad = draw_grad(ids.shape[0], chain.cols)
        assert_exact(chain, cores, ids.contiguous(), *by_kernels(chain, cores, ids, grad), grad)


def test_ids_of_every_shape_and_integer_type():
    for layer in layers():
        ids = torch.randint(0, 997, (4, 5, 3))
        expected = layer(ids.reshape(-1))
        for given in (ids, ids.int(), ids.int().mT.contiguous().mT):
            assert torch.equal(layer(given), expected.reshape(4, 5, 3, 36))
        assert torch.equal(layer(ids[2, 1, 0]), expected.reshape(4, 5, 3, 36)[2, 1, 0])
        assert torch.equal(layer(ids.transpose(0, 2)), expected.reshape(4, 5, 3, 36).transpose(0, 2))


def test_cores_may_be_views_in_any_order():
    """Of one tensor that holds more, transposed, cut out with a step, expanded."""
    chain = CHAINS["train, order 3"]
    plain = draw_cores(chain)
    ids, grad = draw_ids(chain, 100), draw_grad(100, chain.cols)
    held = torch.cat([core.detach().reshape(-1) for core in plain]).requires_grad_()
    at, views = 0, []
    for core in plain:
        views.append(held[at : at + core.numel()].view(core.shape))
        at += core.numel()
    rows = compute([Table(chain, views, ids)])
    wanted, wanted_grads = exact(chain, plain, ids, grad)
    assert_near(rows, wanted)
    (made,) = torch.autograd.grad(rows, held, grad)
    assert_near(made, torch.cat([one.reshape(-1) for one in wanted_grads]))
    for turn in (
        lambda core: core.detach().permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
        lambda core: torch.stack([core.detach(), torch.zeros_like(core)], -1)[..., 0],
    ):
        turned = [turn(core).requires_grad_() for core in plain]
        assert not turned[1].is_contiguous()
        assert_exact(chain, plain, ids, *by_kernels(chain, turned, ids, grad), grad)
    one = [core.detach()[:1].expand(core.shape).requires_grad_() for core in plain]
    rows = by_kernels(chain, one, ids, grad)[0]
    assert torch.equal(rows, rows[:1].expand_as(rows))


def test_frozen_cores_get_no_gradient_and_the_others_theirs():
    chain = CHAINS["ring, order 4"]
    plain = draw_cores(chain)
    ids, grad = draw_ids(chain, 100), draw_grad(100, chain.cols)
    wanted = exact(chain, plain, ids, grad)[1]
    for trained in ([0], [3], [1, 2], [0, 3]):
        cores = [core.detach().clone().requires_grad_(k in trained) for k, core in enumerate(plain)]
        compute([Table(chain, cores, ids)]).backward(grad)
        for k, core in enumerate(cores):
            assert (core.grad is not None) == (k in trained)
            if core.grad is not None:
                assert_near(core.grad, wanted[k])


def test_one_tensor_may_be_several_cores():
    chain = Chain(100, (5, 5, 5), (3, 3, 3), (4, 4, 4, 4))
    (shared,) = draw_cores(Chain(5, (5,), (3,), (4, 4)))
    ids, grad = draw_ids(chain, 60), draw_grad(60, 27)
    rows = compute([Table(chain, [shared] * 3, ids)])
    wanted, wanted_grads = exact(chain, [shared] * 3, ids, grad)
    assert_near(rows, wanted)
    assert_near(torch.autograd.grad(rows, shared, grad)[0], sum(wanted_grads))


@every_isa
@pytest.mark.parametrize("rows", [2**31 + 5, 2**32 - 1, 2**32, 2**32 + 1, 10**12], ids=str)
@pytest.mark.parametrize("joint", [1, 2], ids=["train", "ring"])
def test_tables_of_more_rows_than_32_bits_count(isa, rows, joint):
    chain = Chain(rows, (10_000, 10_000, 10_000), (1, 3, 2), (joint, 2, 3, joint))
    cores = draw_cores(chain)
    edges = [i for e in (2**31, 2**32, rows) for i in (e - 2, e - 1, e, e + 1) if i < rows]
    ids = torch.cat([torch.tensor([0, *edges]), draw_ids(chain, 150)])
    grad = draw_grad(ids.shape[0], chain.cols)
    with kernels_of(isa):
        for some in (slice(None), slice(30)):  # few ids are sorted another way
            assert_exact(chain, cores, ids[some], *by_kernels(chain, cores, ids[some], grad[some]), grad[some])


@every_isa
@pytest.mark.parametrize("rows", [1, 2, 2**10, 2**11, 2**11 + 1, 2**12, 2**22, 2**22 + 1, 2**31 - 1])
def test_ids_are_told_apart_at_every_size_of_table(isa, rows):
    """Sorting looks at as many bits as the table's rows have."""
    chain = Chain(rows, (2**11, 2**10, 2**10), (1, 1, 1), (1, 1, 1, 1))
    cores, ids, grad = draw_cores(chain), draw_ids(chain, 300), draw_grad(300, 1)
    with kernels_of(isa):
        assert_exact(chain, cores, ids, *by_kernels(chain, cores, ids, grad), grad)


@every_isa
def test_padding_rows_are_shown_and_get_no_gradient(isa):
    ids = torch.randint(0, 997, (40, 6), generator=torch.Generator().manual_seed(0))
    ids[::3, 2], ids[5] = 996, 996
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for layer, plain in zip(
            layers(padding_idx=-1, dtype=dtype),
            layers(padding_idx=-1, dtype=torch.float64, impl="reference"),
            strict=True,
        ):
            layer.padding_row.copy_(torch.linspace(-2, 2, 36))
            plain.load_state_dict(layer.state_dict())
            for given in (ids, torch.full((50,), 996)):
                grad = draw_grad(given.numel(), 36, dtype).reshape(*given.shape, 36)
                with kernels_of(isa):
                    out = layer(given)
                    made = torch.autograd.grad(out, list(layer.parameters()), grad)
                wide = plain(given)
                assert_near(out, wide.to(dtype))
                assert torch.equal(out[given == 996], layer.padding_row.expand(int((given == 996).sum()), 36))
                wanted = torch.autograd.grad(wide, list(plain.parameters()), grad.double())
                for one, other in zip(made, wanted, strict=True):
                    assert_near(one, other.to(dtype))
