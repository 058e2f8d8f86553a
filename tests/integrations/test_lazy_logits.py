"""Logits that are not made yet: every program has the losses and gradients that it has with an ordinary head."""

import contextlib
import copy
import gc
import inspect
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensorbed as tb
from tensorbed.integrations.transformers import loss_without_logits

CLASSES, FEATURES = 37, 8
TARGET = torch.randint(0, CLASSES, (2, 5), generator=torch.Generator().manual_seed(3))


def entropy(logits, target=TARGET):
    return F.cross_entropy(logits.reshape(-1, CLASSES), target.reshape(-1))


def shifted(logits):
    return logits[..., :-1, :].contiguous()


# Each takes logits (2, 5, CLASSES) and gives what is compared: numbers, and losses that are added and differentiated.
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


@program
def a_write_through_a_slice(logits):
    logits[:, 0].zero_()
    return entropy(logits)


@program
def a_write_through_a_slice_that_has_a_name(logits):
    last = logits[:, -1]
    last[:, 3] = -100
    return entropy(logits), entropy(last, TARGET[:, -1])


@program
def a_write_to_the_base_of_a_view(logits):
    flat = logits.view(-1, CLASSES)
    logits.mul_(3)
    return entropy(flat), entropy(logits)


@program
def a_write_to_the_base_before_the_view(logits):
    logits.mul_(3)
    return entropy(logits.view(-1, CLASSES)), entropy(logits[:, 1:], TARGET[:, 1:])


@program
def a_write_to_a_view_of_a_view(logits):
    logits.view(-1, CLASSES)[2:7].mul_(2)
    return entropy(logits)


@program
def writes_to_views_that_overlap(logits):
    flat, first = logits.view(10, CLASSES), logits[0]
    first.mul_(0.5)
    flat[4].add_(1)
    logits[:, 1] = 0
    return entropy(flat), entropy(first, TARGET[0]), entropy(logits)


@program
def a_write_between_two_losses(logits):
    flat = logits.view(-1, CLASSES)
    before = entropy(flat)
    flat.mul_(2)
    return before, entropy(flat), entropy(logits)


@program
def a_write_to_the_base_after_the_loss_of_a_view(logits):
    before = F.cross_entropy(logits.view(-1, CLASSES), TARGET.view(-1))
    logits[..., 5] = -3
    return before, entropy(logits)


@program
def contiguous_is_the_same_tensor(logits):
    logits.contiguous().mul_(2)
    return entropy(logits)


@program
def contiguous_of_a_slice_is_a_copy(logits):
    copied = shifted(logits)
    copied.mul_(2)
    return entropy(copied, TARGET[:, 1:]), entropy(logits)


@program
def reshape_of_a_slice_is_a_copy(logits):
    copied = logits[:, 1:].reshape(-1, CLASSES)
    logits.mul_(3)
    return entropy(copied, TARGET[:, 1:]), entropy(logits)


@program
def reshape_of_the_whole_is_a_view(logits):
    flat = logits.reshape(-1, CLASSES)
    logits.mul_(3)
    return entropy(flat)


@program
def float_is_a_copy_or_the_same_tensor(logits):
    single = logits.float()
    single[:, 0] = 1
    return entropy(logits), entropy(single).to(logits.dtype)


@program
def the_base_is_written_after_float(logits):
    single = logits.float().view(-1, CLASSES)
    logits[:, 2].mul_(4)
    return entropy(logits), entropy(single).to(logits.dtype)


@program
def casts_to_its_own_dtype_and_device(logits):
    logits.to(logits.dtype).mul_(2)
    logits.to("cpu").add_(1)
    logits.to(dtype=torch.float64)[:, 1].add_(5)
    return entropy(logits)


@program
def a_view_of_a_copy(logits):
    copied = logits.to(torch.float64).view(-1, CLASSES)
    copied[3].zero_()
    return entropy(copied).to(logits.dtype), entropy(logits)


@program
def data_shares_its_numbers(logits):
    flat = logits.view(-1, CLASSES)
    logits.data.mul_(2)
    return entropy(flat), entropy(logits)


@program
def detach_shares_its_numbers(logits):
    detached = logits.detach()
    detached[0].zero_()
    return entropy(logits), detached


@program
def numbers_of_numpy_are_its_own(logits):
    logits.detach().numpy()[0, 1] = 0.25
    return entropy(logits)


@program
def an_output_argument(logits):
    flat = logits.detach().view(-1, CLASSES)
    torch.mul(flat, 2, out=flat)
    return entropy(logits)


@program
def writes_by_an_operator(logits):
    logits += 1
    logits[logits > 1] = -2
    return entropy(logits)


@program
def a_mask_that_is_filled(logits):
    logits.view(-1, CLASSES).masked_fill_(torch.arange(CLASSES) < 4, -1e4)
    return entropy(logits, TARGET.clamp_min(4))


@program
def metrics_without_gradients_come_first(logits):
    with torch.no_grad():
        right = (logits.argmax(-1) == TARGET).float().mean()
        view = logits.view(-1, CLASSES)
    with torch.inference_mode():
        highest = logits.max()
    return entropy(logits), right, view, highest.clone()


@program
def metrics_come_last(logits):
    loss = entropy(shifted(logits).float(), TARGET[:, 1:])
    return loss, logits.detach().softmax(-1), logits.logsumexp(-1).square().mean()


@program
def two_losses_of_one_call(logits):
    return entropy(shifted(logits), TARGET[:, 1:]), entropy(logits[:, :-2], TARGET[:, 2:]), entropy(logits) * 3


@program
def every_loss_by_itself(logits):
    return F.cross_entropy(logits.view(-1, CLASSES), TARGET.view(-1), reduction="none").square().sum()


@program
def the_gradient_of_logits(logits):
    loss = entropy(logits) * 2
    return loss, *torch.autograd.grad(loss, logits, retain_graph=True)


@program
def the_gradients_of_all_on_the_way(logits):
    cut = logits[:, 1:]
    copied = cut.contiguous()
    single = copied.float()
    flat = single.view(-1, CLASSES)
    loss = F.cross_entropy(flat, TARGET[:, 1:].reshape(-1)).to(logits.dtype)
    return loss, *torch.autograd.grad(loss, [logits, cut, copied, single, flat], retain_graph=True)


@program
def the_gradient_by_a_loss_with_logits_and_one_without(logits):
    flat = logits.view(-1, CLASSES)
    total = entropy(flat) + logits.square().mean()
    total = total + flat.exp().mean()
    return total, *torch.autograd.grad(total, [logits, flat], retain_graph=True)


@program
def the_gradient_of_made_logits(logits):
    loss = (logits / 2).softmax(-1).square().sum()
    return loss, *torch.autograd.grad(loss, logits, retain_graph=True)


@program
def a_gradient_that_is_not_there(logits):
    loss, other = entropy(logits), logits[:, 1]
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, other, retain_graph=True)
    assert torch.autograd.grad(loss, other, retain_graph=True, allow_unused=True) == (None,)
    (zero,) = torch.autograd.grad(loss, [other], retain_graph=True, materialize_grads=True)
    return loss, zero


@program
def retain_grad_before_the_loss(logits):
    logits.retain_grad()
    loss = entropy(logits)
    loss.backward(retain_graph=True)
    return loss, logits.grad.clone()


@program
def retain_grad_after_the_loss(logits):
    flat = logits.view(-1, CLASSES)
    loss = F.cross_entropy(flat, TARGET.view(-1))
    logits.retain_grad()
    flat.retain_grad()
    (loss + flat.square().sum()).backward(retain_graph=True)
    return loss, logits.grad.clone(), flat.grad.clone()


@program
def backward_into_logits_alone(logits):
    loss = entropy(logits)
    loss.backward(inputs=[logits], retain_graph=True)
    alone = logits.grad.clone()
    logits.grad = None
    (loss + logits.square().mean()).backward(inputs=[logits], retain_graph=True)
    return loss, alone, logits.grad.clone()


@program
def a_gradient_that_is_set(logits):
    flat = logits.view(-1, CLASSES)
    for one in (logits, flat):
        one.grad = torch.ones_like(one)
    alone = logits.grad.clone()
    flat.retain_grad()
    loss = F.cross_entropy(flat, TARGET.view(-1))
    loss.backward(retain_graph=True)
    return loss, alone, logits.grad.clone(), flat.grad.clone()


@program
def a_hook_before_the_loss(logits):
    logits.register_hook(lambda grad: grad * 2)
    return entropy(logits)


@program
def a_hook_after_the_loss(logits):
    seen = []
    flat = logits.float().view(-1, CLASSES)
    loss = F.cross_entropy(flat, TARGET.view(-1)).to(logits.dtype)
    logits.register_hook(lambda grad: seen.append(grad.clone()) or grad.clamp(-0.01, 0.01))
    loss.backward(retain_graph=True)
    return loss, *seen


@program
def a_hook_of_logits_that_nobody_holds(logits):
    def computed():
        flat = logits.view(-1, CLASSES)
        loss = F.cross_entropy(flat, TARGET.view(-1))
        flat.register_hook(lambda grad: grad.sign())
        return loss

    return computed()


@program
def a_hook_that_was_removed(logits):
    loss = entropy(logits)
    logits.register_hook(lambda grad: grad * 0).remove()
    with logits.register_hook(lambda grad: grad * 0):
        pass
    return loss, entropy(logits)


@program
def backward_from_logits(logits):
    weight = torch.linspace(0, 1, CLASSES, dtype=logits.dtype).expand_as(logits)
    torch.autograd.backward(logits, weight, retain_graph=True)
    logits.backward(weight, retain_graph=True)
    return entropy(logits)


@program
def what_it_says_of_itself(logits):
    assert logits.to(logits.dtype) is logits.to(logits.device) is logits.contiguous() is logits
    assert logits.requires_grad
    assert not logits.is_leaf
    assert logits[:, 1:].stride() == (5 * CLASSES, CLASSES, 1)
    assert not logits[:, 1:].is_contiguous()
    assert logits.view(-1, CLASSES).is_contiguous()
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        logits[:, 1:].view(-1, CLASSES)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        logits.view(3, CLASSES)
    return entropy(logits)


def head_of(format, dtype, bias=True, frozen=False):
    torch.manual_seed(0)
    table = torch.randn(CLASSES, FEATURES, dtype=dtype)
    return tb.Head.from_pretrained(
        table, format, freeze=frozen, bias=torch.randn(CLASSES, dtype=dtype) if bias else None
    )


def outcome(run, head, dtype, lazily):
    """What a program gives, and the gradients of the sum of its losses."""
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES, bias=False, dtype=dtype), head).train()
    loss_without_logits(model, lazily)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(FEATURES))
    x = torch.randn(2, 5, FEATURES, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    logits = model(x)
    assert (type(logits) is not torch.Tensor) is lazily
    given = run(logits)
    given = given if isinstance(given, tuple) else (given,)
    losses = [loss for loss in given if loss.requires_grad and loss.dim() == 0]
    sum(losses).backward()
    gradients = {name: p.grad.clone() for name, p in (*model.named_parameters(), ("x", x)) if p.grad is not None}
    model.zero_grad()
    return [tensor.detach().clone() for tensor in given], gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_end_as_with_an_ordinary_head(name, dtype):
    if name == "backward_into_logits_alone" and "has_torch_function" not in inspect.getsource(torch.autograd.backward):
        pytest.skip("this version of torch does not tell a tensor that backward was asked for into it")
    head = head_of(tb.TensorTrain(rank=4), dtype)
    wanted, expected = outcome(PROGRAMS[name], head, dtype, lazily=False)
    found, gradients = outcome(PROGRAMS[name], head, dtype, lazily=True)
    near = {"rtol": 2e-5, "atol": 2e-6}  # a copy of doubles may be single
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **near)
    assert gradients.keys() == expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(gradients[key], grad, msg=lambda said, key=key: f"{key}: {said}", **near)


@pytest.mark.parametrize(
    ("format", "options"),
    [(tb.ProductQuantized(parts=4), {}), (tb.Dense(), {"bias": False}), (tb.TensorTrain(rank=4), {"frozen": True})],
    ids=["codes", "dense", "frozen"],
)
def test_other_heads(format, options):
    head = head_of(format, torch.float64, **options)
    for name in ("a_write_to_the_base_of_a_view", "the_gradients_of_all_on_the_way", "a_hook_after_the_loss"):
        wanted, expected = outcome(PROGRAMS[name], head, torch.float64, lazily=False)
        found, gradients = outcome(PROGRAMS[name], head, torch.float64, lazily=True)
        torch.testing.assert_close((found, gradients), (wanted, expected), rtol=2e-5, atol=2e-6)


def test_logits_without_memory():
    head = loss_without_logits(tb.Head(FEATURES, CLASSES, tb.LowRank(rank=2), device="meta"))
    logits = head(torch.randn(2, 5, FEATURES, device="meta"))
    assert (logits * 2).shape == (2, 5, CLASSES)
    assert entropy(logits, TARGET.to("meta")).is_meta


def test_nothing_to_train_is_nothing_to_train():
    head = loss_without_logits(head_of(tb.LowRank(rank=2), torch.float32, frozen=True).train())
    logits = head(torch.randn(3, FEATURES))
    assert not logits.requires_grad
    assert not F.cross_entropy(logits, torch.arange(3)).requires_grad


@contextlib.contextmanager
def counted(monkeypatch):
    """How often logits were made."""
    calls, forward = [], tb.Head.forward

    def counting(head, h, target=None, *, task="", **options):
        calls.extend([] if task else [1])
        return forward(head, h, target, task=task, **options)

    with monkeypatch.context() as patch:
        patch.setattr(tb.Head, "forward", counting)
        yield calls


def test_an_ordinary_step_makes_no_logits(monkeypatch):
    head = loss_without_logits(head_of(tb.TensorTrain(rank=4), torch.bfloat16).train())
    h = torch.randn(2, 5, FEATURES, dtype=torch.bfloat16, requires_grad=True)
    with counted(monkeypatch) as calls:
        logits = head(h)
        loss = entropy(shifted(logits).float(), TARGET[:, 1:]) + entropy(logits)
        loss.backward()
        assert not calls
        logits.detach()
        logits.sum()
    assert calls == [1]
    assert h.grad is not None


def test_what_nobody_holds_is_not_made(monkeypatch):
    head = loss_without_logits(head_of(tb.TensorTrain(rank=4), torch.float64).train())
    logits = head(torch.randn(2, 5, FEATURES, dtype=torch.float64, requires_grad=True))
    loss = entropy(logits.float())
    copies = []
    to = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda *args: copies.append(1) or to(*args))
    logits.sum()
    assert not copies
    loss.backward()


def test_logits_and_their_losses_are_freed():
    head = loss_without_logits(head_of(tb.TensorTrain(rank=4), torch.float32).train())

    def dead(use):
        h = torch.randn(2, 5, FEATURES, requires_grad=True)
        hidden = h * 1
        logits = head(hidden)
        watched = weakref.ref(logits), weakref.ref(hidden)
        use(logits)
        return watched

    gc.collect()
    gc.disable()  # by counting alone, as memory is freed between two steps
    try:
        for use in (entropy, lambda logits: entropy(logits).backward(), torch.sum, lambda logits: logits.retain_grad()):
            assert [watched() for watched in dead(use)] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("use", [torch.sum, entropy], ids=["logits", "loss"])
def test_logits_of_weights_that_are_gone_are_refused(use):
    head = loss_without_logits(head_of(tb.TensorTrain(rank=4), torch.float32).train())
    h = torch.randn(2, 5, FEATURES, requires_grad=True)
    logits = head(h)
    entropy(logits).backward()
    torch.optim.SGD(head.parameters(), 0.1).step()
    with pytest.raises(RuntimeError, match="before the optimiser's step"):
        use(logits)
    assert head(h).sum().isfinite()


def test_transforms_have_ordinary_logits():
    model = loss_without_logits(
        nn.Sequential(nn.Linear(FEATURES, FEATURES), head_of(tb.LowRank(rank=2), torch.float32))
    )
    x, params = torch.randn(2, 5, FEATURES), dict(model.named_parameters())
    found = torch.func.grad(lambda params: entropy(torch.func.functional_call(model, params, (x,))))(params)
    entropy(model(x)).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.grad)


def test_parameters_of_one_call_are_those_of_its_logits():
    model = loss_without_logits(
        nn.Sequential(nn.Linear(FEATURES, FEATURES), head_of(tb.LowRank(rank=2), torch.float32))
    )
    other = copy.deepcopy(model)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    x = torch.randn(2, 5, FEATURES)
    given = {name: param.detach().clone().requires_grad_() for name, param in other.named_parameters()}
    entropy(torch.func.functional_call(model, given, (x,))).backward()
    entropy(other(x)).backward()
    for name, param in other.named_parameters():
        torch.testing.assert_close(given[name].grad, param.grad)
    with pytest.raises(RuntimeError, match="has changed since the head was called"):
        entropy(torch.func.functional_call(model, dict(other.named_parameters()), (x,)))


def test_a_second_derivative_is_refused_by_name():
    head = loss_without_logits(head_of(tb.TensorTrain(rank=4), torch.float32).train())
    logits = head(torch.randn(2, 5, FEATURES, requires_grad=True))
    (grad,) = torch.autograd.grad(entropy(logits), logits, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*loss_without_logits.model, on=False"):
        grad.square().sum().backward(retain_graph=True)
    for param in head.parameters():  # another way from the penalty to the parameters is not taken for the whole
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.square().sum() + param.square().sum(), param, retain_graph=True)


def test_a_reference_head_has_second_derivatives():
    head = head_of(tb.TensorTrain(rank=4), torch.float64)
    head.impl = "reference"
    h = torch.randn(2, 5, FEATURES, dtype=torch.float64, requires_grad=True)
    second = []
    for lazily in (False, True):
        loss = entropy(loss_without_logits(head, lazily)(h))
        (first,) = torch.autograd.grad(loss, h, create_graph=True)
        second.append(torch.autograd.grad(first.square().sum(), [h, *head.parameters()]))
    torch.testing.assert_close(second[1], second[0])


def test_compiled_models_break_their_graph_there():
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), head_of(tb.TensorTrain(rank=4), torch.float32))
    x = torch.randn(2, 5, FEATURES)

    def loss(x):
        return entropy(shifted(model(x)).float(), TARGET[:, 1:])

    loss(x).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss_without_logits(model)
    torch.compile(loss, backend="eager")(x).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, expected[name])
