"""Layers with options under ``torch.func`` and in forward mode, against dense rows that torch looks up."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap

import tensorbed as tb

ROWS, COLS = 8, 4
# Rows that occur several times in an example, in several examples, in one bag and in several.
INDEX = torch.tensor([[0, 3, 3], [3, 5, 3], [7, 7, 7], [2, 3, 0]])
FORMATS = [tb.Dense(), tb.LowRank(rank=2), tb.TensorTrain(rank=2, order=2)]
OPTIONS = [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}, {"scale_grad_by_freq": True, "padding_idx": 3}]
USES = [(use, options) for use in ("rows", "sum", "weighted", "mean") for options in OPTIONS]
USES += [("max", options) for options in OPTIONS[:2]]  # as in torch, it does not go with frequencies


class Case:
    """A layer and its dense twin as functions of the layer's parameters, on the same examples."""

    def __init__(self, format, use, options):
        torch.manual_seed(0)
        mode = {"rows": {}, "weighted": {"mode": "sum"}}.get(use, {"mode": use})
        made = tb.Embedding if use == "rows" else tb.EmbeddingBag
        self.layer = made(ROWS, COLS, format, dtype=torch.float64, std=1.0, **mode, **options)
        self.use, self.params = use, {name: p.detach() for name, p in self.layer.named_parameters()}
        self.along = {name: torch.randn_like(p) for name, p in self.params.items()}
        self.factors = torch.randn(COLS, dtype=torch.float64)
        self.examples = (INDEX, torch.rand(INDEX.shape, dtype=torch.float64))

    def layered(self, params, index, weights):  # (*bags, length) -> ()
        if self.use == "rows":
            return self.score(functional_call(self.layer, params, (index,)))
        bags = index.reshape(-1, index.shape[-1])
        given = (bags, None, weights.reshape(bags.shape)) if self.use == "weighted" else (bags,)
        return self.score(functional_call(self.layer, params, given))

    def dense(self, params, index, weights):  # (*bags, length) -> ()
        padding = self.layer.padding_idx
        table = self.layer.structure.full(params)
        if padding is not None:
            table = torch.where(torch.arange(ROWS)[:, None] == padding, 0.0, table)
        rows = F.embedding(index, table, padding, scale_grad_by_freq=self.layer.scale_grad_by_freq)
        if self.use == "rows":
            return self.score(rows)
        keep = (torch.ones_like(index) if padding is None else index != padding)[..., None]
        if self.use == "max":
            top = rows.masked_fill(keep == 0, -torch.inf).amax(-2)
            return self.score(top.masked_fill(~keep.any(-2), 0.0))
        rows = rows * weights[..., None] if self.use == "weighted" else rows
        size = keep.sum(-2).clamp_min(1) if self.use == "mean" else 1
        return self.score((rows * keep).sum(-2) / size)

    def score(self, vectors):
        return (vectors.sin() * self.factors).sum()


def tangent(f, case):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, case.along[name]) for name, p in case.params.items()}
        return forward_ad.unpack_dual(f(duals, *case.examples)).tangent


PROGRAMS = {
    "vmap of grad": lambda f, case: vmap(grad(f), in_dims=(None, 0, 0))(case.params, *case.examples),
    "vmap of jvp": lambda f, case: vmap(
        lambda *example: jvp(lambda p: f(p, *example), (case.params,), (case.along,))[1]
    )(*case.examples),
    "jvp": lambda f, case: jvp(lambda p: f(p, *case.examples), (case.params,), (case.along,)),
    "jvp of grad": lambda f, case: jvp(lambda p: grad(f)(p, *case.examples), (case.params,), (case.along,)),
    "jacfwd": lambda f, case: jacfwd(f)(case.params, *case.examples),
    "hessian": lambda f, case: hessian(f)(case.params, *case.examples),
    "dual numbers": tangent,
}


# Every program of every use, with the formats in turn: each format occurs with each program and with each use.
CASES = [(program, *use) for use in USES for program in PROGRAMS]


@pytest.mark.parametrize(
    ("program", "use", "options", "format"), [(*case, FORMATS[k % 3]) for k, case in enumerate(CASES)], ids=str
)
def test_transformed_layers_are_their_dense_twins(program, use, options, format):
    case = Case(format, use, options)
    run = PROGRAMS[program]
    torch.testing.assert_close(run(case.layered, case), run(case.dense, case))


@pytest.mark.parametrize("use", ["rows", "sum"])
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_frequencies_are_counted_example_by_example(format, use):
    """``vmap`` is a loop over examples, also where the gradient is taken around it (torch's own counts them all)."""
    case = Case(format, use, {"scale_grad_by_freq": True})
    around = grad(lambda p: vmap(case.layered, in_dims=(None, 0, 0))(p, *case.examples).sum())(case.params)
    one_by_one = [grad(case.dense)(case.params, *example) for example in zip(*case.examples, strict=True)]
    expected = {name: torch.stack([g[name] for g in one_by_one]).sum(0) for name in case.params}
    torch.testing.assert_close(around, expected)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("axis", [0, 1])
def test_bags_of_many_examples_have_offsets_of_their_own(mode, axis):
    layer = tb.TTEmbeddingBag(ROWS, COLS, 2, mode=mode, padding_idx=1)
    offsets = torch.tensor([[0, 2], [0, 3], [0, 0], [0, 1]])
    given = offsets.movedim(0, axis)
    expected = torch.stack([layer(*example) for example in zip(INDEX, offsets, strict=True)])
    torch.testing.assert_close(vmap(layer, (0, axis))(INDEX, given), expected)
    nested = vmap(vmap(layer))(INDEX.view(2, 2, 3), offsets.view(2, 2, 2))
    torch.testing.assert_close(nested, expected.view(2, 2, 2, COLS))
    with pytest.raises(ValueError, match="must stay within the 3 indices, got"):
        vmap(layer, (0, axis))(INDEX, given + 3 * (given == 3))


def test_targets_of_many_examples_are_checked():
    head = tb.TTHead(COLS, ROWS, rank=2)
    h, target = torch.randn(4, COLS), torch.tensor([1, 7, 8, -100])
    for transformed in (
        lambda: vmap(lambda h, y: head.loss(h[None], y[None]))(h, target),
        lambda: vmap(head.loss)(h.view(2, 2, COLS), target.view(2, 2)),
        lambda: grad(lambda h: head.loss(h, target))(h),
    ):
        with pytest.raises(IndexError, match="target 8 is out of range for 8 classes"):
            transformed()
