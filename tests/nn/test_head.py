"""The head's own arguments, shorthands, refusals and explanations; its laws are in the conformance suite."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensorbed as tb
from tensorbed.backends.scores.scoring import RowScores
from tensorbed.structures.tensor_train import TensorTrainMatrix
from tensorbed.testing import assert_near
from tensorbed.testing.samples import most_held
from tensorbed.vocabulary.tiling import GROUPS, ONCE, TWICE, Task, choose, considered

pytestmark = pytest.mark.without_kernels

SHAPE = ((4, 5, 6), (2, 3, 4))
LEARNT = torch.ones(101, requires_grad=True)


@pytest.fixture
def head():
    torch.manual_seed(0)
    return tb.Head(24, 101, tb.TensorTrain(rank=3, shape=SHAPE), bias=True, std=1.0)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(2, 7, 24, generator=generator)
    return h.requires_grad_(), torch.randint(0, 101, (2, 7), generator=generator)


@pytest.mark.parametrize(
    ("layer", "kind", "numbers"),
    [
        (lambda: tb.TTHead(24, 101, 3, shape=SHAPE), "tensor_train", 4 * 2 * 3 + 5 * 3 * 3 * 3 + 6 * 3 * 4),
        (lambda: tb.TTHead(24, 101, ranks=(2, 4), shape=SHAPE), "tensor_train", 4 * 2 * 2 + 5 * 2 * 3 * 4 + 6 * 4 * 4),
        (lambda: tb.TTHead(24, 101, ratio=10, order=2), "tensor_train", None),
        (lambda: tb.Head(24, 101, tb.TensorRing(rank=2, shape=SHAPE)), "tensor_ring", 4 * (4 * 2 + 5 * 3 + 6 * 4)),
        (lambda: tb.Head(24, 101, tb.LowRank(rank=5)), "low_rank", 5 * 125),
        (lambda: tb.Head(24, 101, tb.LowRank(ratio=4)), "low_rank", None),
        (lambda: tb.Head(24, 101, tb.Dense()), "dense", 24 * 101),
    ],
)
def test_shorthands(layer, kind, numbers):
    head = layer()
    stored = sum(p.numel() for p in head.parameters())
    assert head.structure.kind == kind
    assert (head.in_features, head.num_classes, head.out_features) == (24, 101, 101)
    assert head.weight.shape == (101, 24)
    assert numbers in (None, stored)
    assert head.compression_ratio == pytest.approx(24 * 101 / stored)
    assert head(torch.zeros(24)).shape == (101,)


def test_cores_and_ratio_are_those_of_an_embedding_of_the_same_shape():
    embedding, head = tb.TTEmbedding(101, 24, 3, shape=SHAPE), tb.TTHead(24, 101, 3, shape=SHAPE)
    assert [c.shape for c in head.cores] == [c.shape for c in embedding.cores]
    assert head.compression_ratio == embedding.compression_ratio


def test_a_bias_counts_on_both_sides(head):
    cores = head.structure.numel
    assert head.compression_ratio == pytest.approx((24 * 101 + 101) / (cores + 101))
    assert "bias=True" in repr(head)
    assert torch.count_nonzero(head.bias) == 0


@pytest.mark.parametrize("format", [tb.TensorTrain, tb.TensorRing, tb.LowRank])
def test_fitted_to_a_linear_layer(format):
    torch.manual_seed(0)
    linear = nn.Linear(24, 101)
    head = tb.Head.from_pretrained(linear.weight, format(rank=2), bias=linear.bias, freeze=False)
    assert all(p.requires_grad for p in head.parameters())
    assert torch.equal(head.bias, linear.bias)
    assert head.bias is not linear.bias
    distance = torch.linalg.vector_norm(head.weight - linear.weight) / torch.linalg.vector_norm(linear.weight)
    assert head.fit_error == pytest.approx(float(distance.detach()), rel=1e-4)
    frozen = tb.Head.from_pretrained(linear.weight, format(rank=2), bias=linear.bias)
    assert not any(p.requires_grad for p in frozen.parameters())


def test_a_fit_by_error_keeps_it():
    torch.manual_seed(0)
    table = torch.randn(101, 24) @ torch.diag(0.5 ** torch.arange(24))
    assert tb.Head.from_pretrained(table, tb.TensorTrain(rel_error=0.2)).fit_error <= 0.2


def test_calling_with_targets_is_the_loss(head, batch):
    h, target = batch
    assert torch.equal(head(h, target, label_smoothing=0.1), head.loss(h, target, label_smoothing=0.1))


def test_hooks_see_every_use(head, batch):
    h, target = batch
    calls = []
    head.register_forward_pre_hook(lambda *_: calls.append(1))
    for use in (
        lambda: head(h),
        lambda: head.loss(h, target),
        lambda: head.log_prob(h, target),
        lambda: head.topk(h, 2),
        lambda: head.sample(h),
    ):
        use()
    assert len(calls) == 5


def test_functional_forms(head, batch):
    h, target = batch
    expected = F.cross_entropy(F.linear(h, head.weight, head.bias).flatten(0, 1), target.flatten())
    assert_near(tb.linear_cross_entropy(h, head, target), expected)
    given = tb.linear_cross_entropy(h, head.structure, target, params=head.params(), linear_bias=head.bias)
    assert_near(given, expected)
    assert_near(tb.linear_cross_entropy(h, head, target, impl="reference"), expected)
    other = torch.randn(101)
    assert_near(
        tb.linear_cross_entropy(h, head, target, linear_bias=other, reduction="none"),
        F.cross_entropy((h @ head.weight.T + other).flatten(0, 1), target.flatten(), reduction="none").view(2, 7),
    )


def test_the_reference_is_twice_differentiable(batch):
    head = tb.TTHead(24, 101, 2, shape=SHAPE, impl="reference", dtype=torch.float64)
    h, target = batch
    assert torch.autograd.gradgradcheck(
        lambda x: head.loss(x, target[0, :3]), h.detach()[0, :3].double().requires_grad_()
    )


def test_int32_targets_and_any_layout(head, batch):
    h, target = batch
    expected = head.loss(h, target)
    assert torch.equal(head.loss(h, target.int()), expected)
    assert_near(head.loss(h.transpose(0, 1), target.T), expected)
    strided = torch.stack([h.detach(), h.detach()], -1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(head.loss(strided, target), expected)


def test_a_class_can_be_banned_by_the_bias(head, batch):
    """Scores of -inf take no probability, in a block of their own too."""
    h, target = batch
    with torch.no_grad():
        head.bias[50:] = -torch.inf
    target = target % 50
    expected = F.cross_entropy(F.linear(h, head.weight[:50], head.bias[:50]).flatten(0, 1), target.flatten())
    for budget in (None, 2000):
        head.memory_budget = budget
        made = head.loss(h, target)
        assert_near(made, expected)
        (grad,) = torch.autograd.grad(made, h)
        (wanted,) = torch.autograd.grad(expected, h, retain_graph=True)
        assert_near(grad, wanted)
    assert int(head.sample(h.detach().expand(50, 2, 7, 24)).max()) < 50


def test_not_a_number_is_shown(head, batch):
    h, target = batch
    with torch.no_grad():
        h[0, 0] = torch.nan
    assert torch.isnan(head.loss(h, target))
    each = head.loss(h, target, reduction="none")
    assert each.isnan().sum() == 1


def test_ignored_vectors_may_hold_anything(head, batch):
    h, target = batch
    target[0, 0] = -100
    expected = head.loss(h, target)
    with torch.no_grad():
        h[0, 0] = torch.inf
    made = head.loss(h, target)
    assert_near(made, expected)
    (grad,) = torch.autograd.grad(made, h)
    assert torch.count_nonzero(grad[0, 0]) == 0


def test_scores_beyond_the_range_of_exp(head, batch):
    h, target = batch
    big = (h.detach() * 1e4).requires_grad_()
    made, expected = (
        head.loss(big, target),
        F.cross_entropy(F.linear(big, head.weight, head.bias).flatten(0, 1), target.flatten()),
    )
    assert_near(made, expected)
    assert_near(torch.autograd.grad(made, big)[0], torch.autograd.grad(expected, big)[0])


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda h, x, y: h.loss(x[..., :3], y), ValueError, "last size must be 24"),
        (lambda h, x, y: h.loss(x.long(), y), TypeError, "floating-point numbers, got int64"),
        (lambda h, x, y: h.loss([1.0], y), TypeError, "must be a tensor, got list"),
        (lambda h, x, y: h.loss(x, y[0]), ValueError, r"target has shape \(7,\)"),
        (lambda h, x, y: h.loss(x, y.float()), TypeError, "probabilities of all classes"),
        (lambda h, x, y: h.loss(x, y.to(torch.uint8)), TypeError, r"got uint8; convert it with .long\(\)"),
        (lambda h, x, y: h.loss(x, None), TypeError, "target must be a tensor"),
        (lambda h, x, y: h.loss(x.double(), y), ValueError, "are float64 and the table is float32"),
        (lambda h, x, y: h.loss(x, y, reduction="avg"), ValueError, "reduction='avg': choose one of \"mean\""),
        (lambda h, x, y: h.loss(x, y, label_smoothing=1.5), ValueError, "label_smoothing=1.5"),
        (lambda h, x, y: h.loss(x, y, z_loss=-1.0), ValueError, "z_loss=-1.0"),
        (lambda h, x, y: h.loss(x, y, z_loss=float("nan")), ValueError, "z_loss=nan"),
        (lambda h, x, y: h.loss(x, y, softcap=0.0), ValueError, "softcap=0.0"),
        (lambda h, x, y: h.loss(x, y, class_weight=torch.ones(3)), ValueError, r"class_weight has shape \(3,\)"),
        (lambda h, x, y: h.loss(x, y, class_weight=[1.0]), TypeError, "class_weight must be a tensor"),
        (lambda h, x, y: h.loss(x, y, ignore_index=1.5), TypeError, "ignore_index must be an int"),
        (lambda h, x, y: h.loss(x, y, ignore_index=10**30), ValueError, "does not fit"),
        (lambda h, x, y: h.loss(x, y, label_smoothing=-0.1), ValueError, "of at least 0 and at most 1"),
        (lambda h, x, y: h.loss(x, y, label_smoothing=True), TypeError, "label_smoothing must be a number"),
        (
            lambda h, x, y: h.loss(x, y, class_weight=torch.ones(101, requires_grad=True)),
            ValueError,
            "give class_weight",
        ),
        (lambda h, x, y: h.loss(x, y.to("meta")), ValueError, "target is on meta"),
        (lambda h, x, y: h.loss(x.to("meta"), y.to("meta")), ValueError, "vectors are on meta and the table is on cpu"),
        (lambda h, x, y: h.loss(x, y, smoothing=0.1), TypeError, "smoothing"),
        (lambda h, x, y: h(x, label_smoothing=0.1), TypeError, "unexpected label_smoothing"),
        (lambda h, x, y: h(x, task="guess"), TypeError, "unexpected task='guess'"),
        (lambda h, x, y: h.topk(x, 1.5), TypeError, "k must be an int"),
        (lambda h, x, y: h.sample(x, temperature=-1), ValueError, "temperature=-1"),
        (lambda h, x, y: h.sample(x, top_k=0), ValueError, "top_k=0"),
        (lambda h, x, y: h.explain(-1), ValueError, "vectors=-1"),
        (lambda h, x, y: h.explain(torch.zeros(3, 7)), ValueError, "last size must be 24"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h.structure, y, params={}), ValueError, "core_0 is missing"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h.structure, y, params=[x]), TypeError, "give params= with core_0"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h, y, linear_bias=torch.ones(101).double()), ValueError, "float64"),
        (lambda h, x, y: tb.Head(5, 5, tb.Dense(), "no"), TypeError, "bias must be True or False"),
        (lambda h, x, y: tb.TTHead.tied_to(tb.Embedding(5, 5, tb.LowRank())), TypeError, "use tb.Head for any"),
        (lambda h, x, y: h(x, y, smoothing=0.1), TypeError, "unexpected smoothing"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h.structure, y), TypeError, "give params= with core_0"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h, y, params={}), TypeError, "has its own tensors"),
        (lambda h, x, y: tb.linear_cross_entropy(x, nn.Linear(2, 2), y), TypeError, "expected a layer of tensorbed"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h, y, impl="fast"), ValueError, "impl='fast'"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h, y, memory_budget=0), ValueError, "memory_budget=0"),
        (lambda h, x, y: tb.linear_cross_entropy(x, h, y, linear_bias=torch.ones(2)), ValueError, "bias has shape"),
        (lambda h, x, y: tb.Head(0, 5, tb.Dense()), ValueError, "in_features=0"),
        (lambda h, x, y: tb.Head(5, -1, tb.Dense()), ValueError, "num_classes=-1"),
        (lambda h, x, y: tb.Head(5, 5, tb.Dense), TypeError, "format must be a format"),
        (lambda h, x, y: tb.Head(5, 5, tb.Dense(), impl="native"), ValueError, "impl='native'"),
        (lambda h, x, y: tb.Head(5, 5, tb.Dense(), memory_budget=1.5), TypeError, "memory_budget must be an int"),
    ],
)
def test_refusals(head, batch, use, error, match):
    h, target = batch
    before = {name: p.clone() for name, p in head.named_parameters()}
    with pytest.raises(error, match=match):
        use(head, h, target)
    assert all(torch.equal(before[name], p) for name, p in head.named_parameters())


@pytest.mark.parametrize("size", [19, 21, 1])
def test_a_bias_of_another_length_is_refused_everywhere(size):
    head = tb.Head(8, 20, tb.Dense(), memory_budget=75)
    head.bias = nn.Parameter(torch.ones(size))
    h = torch.ones(2, 8)
    for use in (head, lambda x: head.topk(x, 2), head.sample, lambda x: head.loss(x, torch.zeros(2).long())):
        with pytest.raises(ValueError, match=f"bias has shape .{size},.; one for each of 20 classes"):
            use(h)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_budget_set_later_is_checked_too(head, batch, wrong):
    head.memory_budget = wrong
    for use in (head, lambda x: head.topk(x, 2), head.sample):
        with pytest.raises(ValueError, match=f"memory_budget={wrong}"):
            use(batch[0])


def test_ignored_vectors_are_not_scored(head, batch):
    """Whatever they hold, nothing of it reaches the cores."""
    h, target = batch
    target[0] = -100
    with torch.no_grad():
        h[0] = torch.nan
    for reduction in ("mean", "none"):
        loss = head.loss(h, target, reduction=reduction)
        grads = torch.autograd.grad(loss.sum(), [h, *head.parameters()])
        assert all(torch.isfinite(g).all() for g in grads)
        assert torch.count_nonzero(grads[0][0]) == 0
    assert torch.count_nonzero(loss[0]) == 0


def test_a_loss_that_is_kept_holds_no_gradients(head, batch):
    h, target = batch
    loss = head.loss(h, target)
    loss.backward()
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        loss.grad_fn.saved_tensors  # noqa: B018


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gradients_of_scores_near_the_soft_cap_keep_their_digits(reduction):
    """A class whose scores are all near it has small gradients, and those as exact as others."""
    head = tb.Head(4, 30, tb.Dense(), bias=True)
    h, target = torch.linspace(1, 2, 24).view(6, 4), torch.full((6,), 2)
    with torch.no_grad():
        head.table.copy_(torch.linspace(-1, 1, 120).view(30, 4))
        head.bias[7] = 20.0
    grads = []
    for dtype in (torch.float32, torch.float64):
        loss = head.to(dtype).loss(h.to(dtype), target, softcap=4.0, reduction=reduction).sum()
        grads.append(torch.autograd.grad(loss, [head.bias, head.table]))
    for single, double in zip(*grads, strict=True):
        assert_near(single[7], double[7].float())


def test_a_loss_scales_its_gradients_without_asking_what_torch_does_not_tell(monkeypatch):
    """Nor copying those of a dense table; a graph that is kept makes them again."""
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    head, h, target = tb.Head(64, 3000, tb.Dense()), torch.randn(1024, 64), torch.arange(1024)
    assert head.explain(h, training=True).path == "rows, groups"
    expected = torch.autograd.grad(F.cross_entropy(h @ head.table.T, target), head.table)[0]
    for by in (1.0, 3.0):
        loss = head.loss(h, target) * by
        for keeps in (True, False):
            (grad,) = torch.autograd.grad(loss, head.table, retain_graph=keeps)
            assert_near(grad, by * expected)
        loss = head.loss(h, target) * by
        with most_held() as held:
            loss.backward()
        assert held() < head.table.nbytes


def test_huge_scores_without_a_z_loss(head, batch):
    h, target = batch
    made = head.loss(h.detach() * 1e20, target)
    assert_near(
        made, F.cross_entropy(F.linear(h.detach() * 1e20, head.weight, head.bias).flatten(0, 1), target.flatten())
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 5e-324])
def test_the_coldest_sample_is_the_best_class(head, batch, temperature):
    h = batch[0].detach()
    assert torch.equal(head.sample(h, temperature=temperature), head.topk(h, 1).indices[..., 0])


def test_gradients_of_a_compiled_half_precision_loss_are_scaled_before_they_are_rounded():
    torch.compiler.reset()
    torch.manual_seed(0)
    head = tb.TTHead(64, 500, 8, std=0.006)
    h, target = torch.randn(8192, 64), torch.randint(0, 500, (8192,))

    def loss(x):
        with torch.autocast("cpu", torch.float16):
            return head.loss(x, target)

    found = []
    for call in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        x = h.half().requires_grad_()
        (call(x) * 65536.0).backward()
        found.append(x.grad)
    assert_near(found[1], found[0])


def test_samples_in_graphs_and_transforms(head, batch):
    h = batch[0].detach()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: head.sample(x, top_k=1), fullgraph=True, backend="aot_eager")
    best = head.topk(h, 1).indices[..., 0]
    assert torch.equal(compiled(h), best)
    drawn = torch.func.vmap(lambda x: head.sample(x, top_k=1), randomness="different")(h)
    assert torch.equal(drawn, best)


def test_log_probabilities_of_no_class_raise_under_transforms_too(head, batch):
    h, target = batch
    target[0, 0] = -100
    with pytest.raises(IndexError):
        torch.func.grad(lambda x: head.log_prob(x, target).sum())(h)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_autocast_gives_what_a_linear_layer_gives(dtype, impl):
    head = tb.TTHead(24, 101, 3, shape=SHAPE, bias=True, dtype=dtype, impl=impl)
    h = torch.randn(5, 24, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected, made = F.linear(h, head.weight, head.bias), head(h)
        compiled = torch.compile(head, backend="aot_eager", fullgraph=True)(h)
    assert made.dtype == compiled.dtype == expected.dtype


class Multiplied(TorchDispatchMode):
    """The dtypes of what is multiplied."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm_):
            self.dtypes |= {tensor.dtype for tensor in args[-2:]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("format", [tb.Dense(), tb.LowRank(rank=4), tb.TensorTrain(rank=3, shape=SHAPE)])
def test_products_of_scores_are_of_half_precision_under_autocast_alone(format):
    head, h, target = tb.Head(24, 101, format), torch.randn(40, 24, requires_grad=True), torch.randint(0, 101, (40,))
    for enabled in (True, False):
        with Multiplied() as multiplied, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            head.loss(h, target).backward()
        assert (torch.bfloat16 in multiplied.dtypes) is enabled


@pytest.mark.parametrize(
    "terms", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weight": torch.linspace(0.5, 1.5, 101)}]
)
@pytest.mark.parametrize("format", [tb.Dense(), tb.TensorTrain(rank=3, shape=SHAPE)])
def test_gradients_of_sure_targets_err_under_autocast_as_those_of_a_linear_layer(format, terms):
    torch.manual_seed(0)
    head, h = tb.Head(24, 101, format, bias=True, std=0.05), torch.randn(64, 24)
    target, table, given = torch.zeros(64, dtype=torch.long), head.weight.detach().clone(), torch.zeros(101)
    given[0] = 9.0

    def gradients(loss_of, dtype, half):
        x, bias = h.to(dtype).requires_grad_(), given.to(dtype).requires_grad_()
        own = {name: term.to(dtype) if isinstance(term, torch.Tensor) else term for name, term in terms.items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return torch.autograd.grad(loss_of(x, bias, **own), (x, bias))

    def plain(x, bias, **own):
        return F.cross_entropy(F.linear(x, table.to(x.dtype), bias), target, **own)

    def ours(x, bias, **own):
        return tb.linear_cross_entropy(x, head, target, linear_bias=bias, **own)

    exact, of_plain = gradients(plain, torch.float64, half=False), gradients(plain, torch.float32, half=True)
    for grad, other, wanted in zip(gradients(ours, torch.float32, half=True), of_plain, exact, strict=True):
        unit = torch.finfo(torch.bfloat16).eps * float(wanted.norm())
        assert float((grad - wanted).norm()) <= float((other - wanted).norm()) + unit


def test_draws_are_fair_under_autocast():
    head, h = tb.Head(4, 1000, tb.Dense(), bias=True), torch.zeros(20_000, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        head.bias.fill_(100.0)
    with torch.autocast("cpu", torch.bfloat16):
        drawn = head.sample(h, generator=torch.Generator().manual_seed(0))
    # Five deviations of the mean of so many draws.
    assert abs(float(drawn.double().mean()) / 999 - 0.5) <= 5 * (12 * len(h)) ** -0.5


def test_cores_of_two_precisions_are_scored_in_the_wider_under_autocast():
    torch.manual_seed(0)
    head, h, target = tb.TTHead(24, 101, 3, shape=SHAPE), torch.randn(6, 24).bfloat16(), torch.arange(6)
    head.core_1.data = head.core_1.data.double()
    with torch.autocast("cpu", torch.bfloat16):
        loss = head.loss(h, target)
    assert float(loss) == pytest.approx(float(F.cross_entropy(h.double() @ head.weight.double().T, target)), rel=1e-5)


def test_vectors_that_float16_does_not_hold_have_a_loss_under_its_autocast():
    head = tb.TTHead(24, 101, 3, shape=SHAPE, std=1e-4)
    with torch.autocast("cpu", torch.float16):
        assert bool(head.loss(torch.full((2, 24), 1e5), torch.tensor([1, 2])).isfinite())


def test_a_dense_state_is_refused_by_name(head):
    with pytest.raises(RuntimeError, match=r"TTHead|Head.from_pretrained"):
        head.load_state_dict({"weight": torch.zeros(101, 24)}, strict=False)


def test_explanations_name_what_is_taken():
    head = tb.TTHead(512, 267735, 16, shape=((60, 60, 75), (8, 8, 8)), device="meta")
    few, many = head.explain(1), head.explain(torch.empty(4, 512, 512, device="meta"), training=True)
    assert few.path.startswith("cores")
    assert few.considered["rows, once"] > 10 * few.considered[few.path]
    # Through the cores a vector takes half of the dense product's multiply-adds.
    assert many.multiply_adds < 0.55 * many.multiply_adds_dense
    assert many.bytes < 0.15 * 2 * 2048 * 267735 * 4
    assert "<- taken" in str(many)
    assert json.loads(json.dumps(few.to_dict()))["vectors"] == 1
    wide = tb.TTHead(512, 267735, 96, shape=((60, 60, 75), (8, 8, 8)), device="meta").explain(2048, training=True)
    assert wide.path == "rows, groups"
    assert wide.multiply_adds < 1.3 * wide.multiply_adds_dense


def task(structure, tokens, budget=None, **asked):
    return Task.of(structure, tokens, 4, budget, **asked)


def test_passes_follow_what_is_asked_and_the_memory():
    structure = tb.TTHead(512, 267735, 96, shape=((60, 60, 75), (8, 8, 8)), device="meta").structure
    assert choose(task(structure, 2048, trains=True, at_once=True)).passes == GROUPS
    assert choose(task(structure, 2048, trains=True)).passes == TWICE
    assert choose(task(structure, 2048)).passes == ONCE
    assert choose(task(structure, 2048, 2**24, trains=True, at_once=True)).passes == TWICE


def test_what_costs_hardly_more_and_holds_far_less_is_taken():
    """Keeping all scores of a group spares a fourth of the products and would hold six times as much."""
    structure = tb.TTHead(512, 267735, 16, shape=((60, 60, 75), (32, 4, 4)), device="meta").structure
    asking = task(structure, 512, trains=True, at_once=True)
    taken, fitting = choose(asking), [one for one in considered(asking) if one.numbers <= asking.numbers]
    cheapest = min(fitting, key=lambda one: one.cost)
    assert (taken.passes, cheapest.passes) == (TWICE, GROUPS)
    assert cheapest.cost < taken.cost < 1.03 * cheapest.cost
    assert 6 * taken.numbers < cheapest.numbers


HEADS = {
    "train 16": lambda: tb.TTHead(512, 267735, 16, shape=((60, 60, 75), (8, 8, 8)), device="meta"),
    "train 96": lambda: tb.TTHead(512, 267735, 96, shape=((60, 60, 75), (8, 8, 8)), device="meta"),
    "ring 16": lambda: tb.Head(512, 267735, tb.TensorRing(rank=16, shape=((60, 60, 75), (8, 8, 8))), device="meta"),
    "low rank 64": lambda: tb.Head(512, 267735, tb.LowRank(rank=64), device="meta"),
    "dense": lambda: tb.Head(512, 267735, tb.Dense(), device="meta"),
    "wide": lambda: tb.TTHead(4096, 32000, 8, device="meta"),
    "huge": lambda: tb.TTHead(64, 10**7, 8, device="meta"),
    "deep": lambda: tb.TTHead(64, 2**17, 2, shape=((2,) * 17, (2,) * 6 + (1,) * 11), device="meta"),
}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 2048, 100_000])
def test_what_is_chosen_fits_into_the_memory_if_anything_does(kind, tokens):
    structure = HEADS[kind]().structure
    for budget in (None, 2**20, 2**24, 2**28):
        for asked in ({"trains": True, "at_once": True}, {"trains": True}, {}):
            asking = task(structure, tokens, budget, **asked)
            taken, all_of_them = choose(asking), list(considered(asking))
            if taken.numbers > asking.numbers:
                assert taken.numbers == min(one.numbers for one in all_of_them)
                assert budget is not None or kind in ("huge",)
            else:
                fitting = [one for one in all_of_them if one.numbers <= asking.numbers]
                cheapest = min(fitting, key=lambda one: one.cost)
                far_less = [
                    one for one in fitting if one.cost <= 1.03 * cheapest.cost and 4 * one.numbers <= cheapest.numbers
                ]
                assert taken.cost == min(far_less or [cheapest], key=lambda one: one.numbers).cost
            assert len(all_of_them) < 1000
            # Neither tiles of nothing nor blocks of one row, as long as there is memory.
            assert budget is not None or len(taken.groups()) * (structure.rows // taken.height) < 100_000


@pytest.mark.parametrize("tokens", [1, 3, 100, 2048])
@pytest.mark.parametrize("budget", [None, 1, 10**5, 10**7, 10**9])
def test_tiles_cover_every_vector_and_row_once(tokens, budget):
    structure = tb.TTHead(24, 101, 3, shape=SHAPE).structure
    for asked in ({"trains": True, "at_once": True}, {"trains": True}, {}, {"whole": True}):
        tiling = choose(task(structure, tokens, budget, **asked))
        tensors = [torch.empty(spec.shape) for spec in structure.tensors()]
        groups, blocks = tiling.groups(), tiling.scoring.open(tensors, torch.float32, False).blocks(tiling.height)
        assert [i for at in groups for i in range(at.start, at.stop)] == list(range(tokens))
        assert [i for a, b in blocks for i in range(a, b)] == list(range(101))
        assert max(at.stop - at.start for at in groups) <= tiling.group


@pytest.mark.parametrize("format", [tb.Dense(), tb.LowRank(rank=8)])
def test_a_block_that_all_groups_of_vectors_meet_is_cast_once(format, monkeypatch):
    """Under autocast each group read the whole table once more."""
    head, x = tb.Head(256, 8000, format, bias=False), torch.randn(512, 256)
    tiling = choose(Task.of(head.structure, 512, 4, None, trains=True, at_once=True))
    assert (tiling.passes, tiling.height) == (GROUPS, 8000)
    assert len(tiling.groups()) > 2
    read, real = [], type(head.structure).block
    monkeypatch.setattr(type(head.structure), "block", lambda *given: read.append(given) or real(*given))
    with torch.autocast("cpu", torch.bfloat16):
        head.loss(x, torch.arange(512)).backward()
    assert len(read) == 1


@pytest.mark.parametrize("trained", [False, True])
def test_rows_that_are_made_are_dropped(trained, monkeypatch):
    """Tables in bands held a block of each band otherwise, up to the whole table."""
    held, real = [], RowScores.close

    def close(scores):
        real(scores)
        held.append(hasattr(scores, "block") or hasattr(scores, "made"))

    monkeypatch.setattr(RowScores, "close", close)
    monkeypatch.setattr(TensorTrainMatrix, "scorings", lambda structure: [structure.by_rows(0)])
    head = tb.Head(64, 2000, tb.TensorTrain(rank=4), bias=False).requires_grad_(trained)
    head.loss(torch.randn(300, 64), torch.arange(300))
    assert len(held) > 2
    assert not any(held)


def test_scores_of_few_vectors_are_all_kept_where_the_table_is_larger():
    """Its gradient is written once then; scores of many vectors are held a part at a time."""
    structure = tb.Head(384, 30_522, tb.Dense(), device="meta").structure
    few, many = (choose(task(structure, tokens, None, trains=True, at_once=True)) for tokens in (64, 128))
    assert (few.passes, few.group) == (GROUPS, 64)
    assert many.group * many.height < 128 * 30_522


@pytest.mark.parametrize("mode", ["auto", "reference", "compiled"])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.Dense()], ids=["train", "dense"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_mean_over_targets_of_no_weight_is_nan(format, mode, smoothing):
    """Loss and gradients are those of torch, where an ignored vector has a gradient of 0 all the same."""
    torch.compiler.reset()
    torch.manual_seed(0)
    head = tb.Head(8, 20, format, std=1.0, impl="reference" if mode == "reference" else "auto")
    loss = torch.compile(head.loss, backend="eager") if mode == "compiled" else head.loss
    h, weight = torch.randn(4, 8, requires_grad=True), torch.ones(20)
    weight[3:5] = 0
    for target in (torch.tensor([3, 4, 3, -100]), torch.full((4,), -100)):
        for reduction in ("mean", "sum", "none"):
            said = {"reduction": reduction, "label_smoothing": smoothing}
            made = loss(h, target, class_weight=weight, **said)
            expected = F.cross_entropy(h @ head.weight.T, target, weight, **said)
            torch.testing.assert_close(made, expected, equal_nan=True)
            assert bool(made.isnan().all()) == (reduction == "mean")
            found, wanted = (torch.autograd.grad(one.sum(), h)[0] for one in (made, expected))
            torch.testing.assert_close(found, wanted, equal_nan=True)


def test_a_tied_head_draws_its_table_as_the_embedding_does():
    embedding = tb.Embedding(300, 16, tb.TensorTrain(rank=4))
    head = tb.Head.tied_to(embedding)
    head.reset_parameters()
    assert float(embedding.weight.detach().clone().square().mean().sqrt()) == pytest.approx(0.3, rel=1e-3)


@pytest.mark.parametrize(("options", "expected"), [({}, 0.25), ({"std": None}, 0.25), ({"std": 0.3}, 0.3)])
def test_one_table_for_both_ends_is_drawn_as_a_head_is(options, expected):
    embedding, head = tb.embedding_and_head(300, 16, tb.TensorTrain(rank=4), tied=True, **options)
    assert float(head.weight.detach().clone().square().mean().sqrt()) == pytest.approx(expected, rel=1e-3)
    embedding.reset_parameters()
    assert float(head.weight.detach().clone().square().mean().sqrt()) == pytest.approx(expected, rel=1e-3)
