"""Losses, scores and choices of heads with ``impl="triton"``, in the interpreter, against all logits."""

import pytest
import torch
import torch.nn.functional as F
from drawing import integers, normal
from test_no_waits import NoWaits

import tensorbed as tb
from tensorbed.backends import native, triton
from tensorbed.structures.formats import Budget

if triton.reason:
    pytest.skip(triton.reason, allow_module_level=True)

FORMATS = {
    "train": tb.TensorTrain(rank=3),
    "ring": tb.TensorRing(rank=2),
    "low rank": tb.LowRank(rank=4),
    "dense": tb.Dense(),
}
CODED = {
    "8 bits": tb.QuantizedRows(),
    "4 bits": tb.QuantizedRows(bits=4, group=5),
    "product": tb.ProductQuantized(parts=6),
    "rotated": tb.ProductQuantized(parts=6, rotate=True),
}
ROWS, COLS, TOKENS = 90, 12, 11
LITTLE = 4 * 60 * TOKENS  # bytes: of so little memory tiles are some rows and some vectors


def head_of(format, **options):
    torch.manual_seed(0)
    if format.can_fit and not format.bind(Budget(ROWS, COLS)).can_initialise:
        return tb.Head.from_pretrained(torch.randn(ROWS, COLS), format, **options)
    return tb.Head(COLS, ROWS, format, std=0.5, **options)


def batch(seed=1):
    return normal(TOKENS, COLS, seed=seed).requires_grad_(), integers(0, ROWS, (TOKENS,), seed=seed + 1)


def gradients(loss, head, h):
    leaves = [h, *(p for p in head.parameters() if p.requires_grad)]
    return torch.autograd.grad(loss, leaves)


OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "of each": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"class_weight": torch.linspace(0.5, 2, ROWS)},
    "weighted and smoothed": {"class_weight": torch.linspace(0.5, 2, ROWS), "label_smoothing": 0.2},
    "z loss": {"z_loss": 0.01},
    "capped": {"softcap": 3.0},
}


# Every option once, and every format in more than one tile.
CASES = [("train", options, None) for options in OPTIONS]
CASES += [(name, "weighted and smoothed", LITTLE) for name in FORMATS]


@pytest.mark.parametrize(("name", "options", "memory_budget"), CASES)
def test_the_loss_and_its_gradients_are_those_of_all_logits(name, options, memory_budget):
    head = head_of(FORMATS[name], bias=True, impl="triton", memory_budget=memory_budget)
    torch.nn.init.normal_(head.bias)
    (h, target), said = batch(), OPTIONS[options]
    said = {name: value.to(h.device) if isinstance(value, torch.Tensor) else value for name, value in said.items()}
    target[3] = -100
    loss = head.loss(h, target, **said)
    plain = head_of(FORMATS[name], bias=True, impl="reference")
    plain.load_state_dict(head.state_dict())
    wanted = plain.loss(h, target, **said)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    pairs = zip(gradients(loss.sum(), head, h), gradients(wanted.sum(), plain, h), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", ["train", "dense"])
def test_half_precision_is_computed_in_single_and_rounded_once(name):
    for dtype in (torch.bfloat16, torch.float16):
        head = head_of(FORMATS[name], impl="triton").to(dtype)
        h, target = batch()
        h = h.detach().to(dtype).requires_grad_()
        loss = head.loss(h, target)
        plain = head_of(FORMATS[name], impl="reference").to(dtype)
        plain.load_state_dict(head.state_dict())
        torch.testing.assert_close(loss, plain.loss(h, target))
        for one, other in zip(gradients(loss, head, h), gradients(plain.loss(h, target), plain, h), strict=True):
            torch.testing.assert_close(one, other, rtol=0.02, atol=2e-3)


def test_autocast_multiplies_in_bfloat16():
    head, (h, target) = head_of(FORMATS["train"], impl="triton"), batch()
    with torch.autocast(h.device.type, dtype=torch.bfloat16):
        loss = head.loss(h, target)
    torch.testing.assert_close(loss, F.cross_entropy(head(h), target), rtol=0.02, atol=0.02)
    for one, other in zip(gradients(loss, head, h), gradients(F.cross_entropy(head(h), target), head, h), strict=True):
        torch.testing.assert_close(one, other, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("name", {**FORMATS, **CODED})
def test_logits_and_choices_are_those_of_the_table(name):
    head = head_of({**FORMATS, **CODED}[name], impl="triton")
    h, _ = batch()
    wanted = h @ head.weight.T
    torch.testing.assert_close(head(h), wanted, rtol=1e-5, atol=1e-5)
    for n in (1, TOKENS):
        found = head.topk(h[:n], 5)
        torch.testing.assert_close(found.values, torch.topk(wanted[:n], 5).values, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(wanted[:n].gather(1, found.indices), found.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CODED)
def test_losses_of_tables_of_codes(name):
    head, (h, target) = head_of(CODED[name], impl="triton"), batch()
    loss, wanted = head.loss(h, target), F.cross_entropy(h @ head.weight.T, target)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(one, h)[0] for one in (loss, wanted)), rtol=1e-4, atol=1e-6)


def test_batches_all_ignored_have_no_gradient():
    head, (h, target) = head_of(FORMATS["train"], impl="triton"), batch()
    loss = head.loss(h, torch.full_like(target, -100))
    assert loss.isnan()
    assert all((grad == 0).all() for grad in gradients(loss, head, h))


def test_results_are_the_same_to_the_bit_every_time():
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for _ in range(2):
            head, (h, target) = head_of(FORMATS["train"], bias=True, impl="triton", memory_budget=LITTLE), batch()
            loss = head.loss(h, target)
            found.append([loss, *gradients(loss, head, h)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_targets_out_of_range_are_refused_without_a_number():
    head, (h, target) = head_of(FORMATS["train"], impl="triton"), batch()
    for bad in (ROWS, -1):
        target[2] = bad
        with pytest.raises(RuntimeError, match=rf"out of range for {ROWS} classes"):
            head.loss(h, target)


def test_explanations_name_the_backend():
    told = head_of(FORMATS["train"], impl="triton").explain(TOKENS, training=True)
    assert told.impl == "triton"
    assert told.considered[told.path] == min(told.considered.values())
    assert "triton" in str(told)


def test_double_precision_is_computed_by_pytorch():
    head, (h, target) = head_of(FORMATS["train"], impl="triton").double(), batch()
    h = h.detach().double()
    torch.testing.assert_close(head.loss(h, target), F.cross_entropy(h @ head.weight.T, target))


def test_where_there_are_no_kernels_their_name_says_why(monkeypatch):
    head, (h, target) = head_of(FORMATS["train"], impl="triton"), batch()
    monkeypatch.setattr(triton, "absent", lambda device=None: "torch sees no GPU")
    for call in (lambda: head(h), lambda: head.loss(h, target), lambda: head.topk(h, 3)):
        with pytest.raises(ValueError, match='impl="triton": torch sees no GPU; or use impl="auto"'):
            call()


@pytest.mark.parametrize(("name", "memory_budget"), [*((name, None) for name in FORMATS), ("train", LITTLE)])
def test_a_step_of_a_head_waits_for_no_device(name, memory_budget, monkeypatch):
    monkeypatch.setattr(native, "available", False)
    head = head_of(FORMATS[name], bias=True, impl="triton", memory_budget=memory_budget)
    h, target = batch()
    target[3] = -100
    with NoWaits():
        loss = head.loss(h, target, label_smoothing=0.1)
        loss.backward()
    assert h.grad is not None


def test_a_compiled_loss_is_the_eager_one():
    head, (h, target) = head_of(FORMATS["train"], impl="triton"), batch()
    compiled = torch.compile(head.loss, backend="aot_eager", fullgraph=True)
    loss, wanted = compiled(h, target), head.loss(h, target)
    torch.testing.assert_close(loss, wanted)
    for one, other in zip(gradients(loss, head, h), gradients(wanted, head, h), strict=True):
        torch.testing.assert_close(one, other)
