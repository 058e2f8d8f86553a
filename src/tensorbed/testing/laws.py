"""The laws of a structure, on its own operations: rows, project, full, initialise, fit."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorbed.fitting import fit_table
from tensorbed.functional import lookup, project
from tensorbed.structures.formats import RankedFormat
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_all_near,
    assert_near,
    assert_writes_are_noticed,
    backends,
    on,
    one_of_each,
    ranked,
    rounded,
    spread,
)


def _needs_gradient(draw: Draw) -> None:
    if not draw.differentiable:
        pytest.skip(f"{draw.structure.kind} declares that it has no gradient")


def needs_true_gradient(draw: Draw) -> None:
    """For comparisons with differences of values, which a rounding makes into steps."""
    _needs_gradient(draw)
    if hasattr(draw.structure, "packed"):
        pytest.skip(f"{draw.structure.kind} declares that its gradients pass a rounding")


class StructureLaws(Conformance):
    """Inherit with ``samples`` set."""

    def test_rows_are_rows_of_the_table(self, sample: Sample, impl: str, draw: Draw) -> None:
        p = draw.params(grad=False)
        table = draw.structure.full(p)
        assert table.shape == (sample.rows, sample.cols)
        for shape in ((), (1,), (7,), (3, 5), (2, 0, 3), (sample.rows + 3,)):
            index = draw.index(*shape)
            assert_near(lookup(draw.structure, p, index, impl=impl), table[index])
        assert_near(lookup(draw.structure, p, torch.arange(sample.rows), impl=impl), table)

    @on(one_of_each)
    def test_every_backend_can_be_named(self, sample: Sample, draw: Draw) -> None:
        """Also the one that auto takes."""
        p, index = draw.params(grad=False), draw.index(9)
        for impl in draw.structure.impls:
            assert_near(lookup(draw.structure, p, index, impl=impl), draw.structure.full(p)[index])

    @on(one_of_each)
    def test_any_integer_layout(self, sample: Sample, impl: str, draw: Draw) -> None:
        p = draw.params(grad=False)
        table = draw.structure.full(p)
        for index in (draw.index(4, 6).T, draw.index(9)[::2], draw.index(5, dtype=torch.int32)):
            assert_near(lookup(draw.structure, p, index, impl=impl), table[index.long()])

    def test_gradients_are_those_of_the_table(self, sample: Sample, impl: str, draw: Draw) -> None:
        _needs_gradient(draw)
        for dtype in (torch.float64, torch.float32):
            p = draw.params(dtype)
            leaves = [t for t in p.values() if t.requires_grad]
            index = draw.index(2, 9)
            grad = draw.normal(2, 9, sample.cols, dtype=dtype)
            made = torch.autograd.grad(lookup(draw.structure, p, index, impl=impl), leaves, grad)
            expected = torch.autograd.grad(draw.structure.full(p)[index], leaves, grad)
            assert_all_near(made, expected)

    @on(one_of_each)
    def test_writes_before_backward_are_noticed(self, sample: Sample, impl: str, draw: Draw) -> None:
        _needs_gradient(draw)
        p, index = draw.params(torch.float32), draw.index(9)
        leaves = [t for t in p.values() if t.requires_grad]
        assert_writes_are_noticed(partial(lookup, draw.structure, p, index, impl=impl), leaves, [*p.values(), index])

    @on(one_of_each)
    def test_gradcheck(self, sample: Sample, impl: str, draw: Draw) -> None:
        needs_true_gradient(draw)
        index = draw.index(5)
        assert torch.autograd.gradcheck(self._rows(draw, index, impl), self._leaves(draw), fast_mode=True)

    def test_reference_is_twice_differentiable(self, sample: Sample, draw: Draw) -> None:
        needs_true_gradient(draw)
        rows = self._rows(draw, draw.index(4), "reference")
        assert torch.autograd.gradgradcheck(rows, self._leaves(draw), fast_mode=True)

    @staticmethod
    def _leaves(draw: Draw) -> tuple[Tensor, ...]:
        return tuple(draw.params().values())

    @staticmethod
    def _rows(draw: Draw, index: Tensor, impl: str):  # type: ignore[no-untyped-def]
        names = [spec.name for spec in draw.structure.tensors()]
        return lambda *t: lookup(draw.structure, dict(zip(names, t, strict=True)), index, impl=impl)

    @spread("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_every_precision(self, sample: Sample, impl: str, draw: Draw, dtype: torch.dtype) -> None:
        exact = draw.params(grad=False)
        rounded = {name: t.to(dtype) if t.is_floating_point() else t for name, t in exact.items()}
        index = draw.index(40)
        rows = lookup(draw.structure, rounded, index, impl=impl)
        assert_near(rows, draw.structure.full(exact)[index].to(dtype))

    def test_project_is_a_product_with_a_block_of_rows(self, sample: Sample, draw: Draw) -> None:
        p = draw.params()
        leaves = [t for t in p.values() if t.requires_grad]
        x = draw.normal(2, 3, sample.cols).requires_grad_()
        for start, stop in ((0, sample.rows), (sample.rows // 3, sample.rows // 2), (5, 5)):
            made = project(draw.structure, p, x, start, stop)
            expected = x @ draw.structure.full(p)[start:stop].T
            assert_near(made, expected)
            if draw.differentiable and stop > start:
                grad = draw.normal(*made.shape)
                assert_all_near(
                    torch.autograd.grad(made, [x, *leaves], grad), torch.autograd.grad(expected, [x, *leaves], grad)
                )

    @on(one_of_each)
    def test_indices_outside_the_table_raise(self, sample: Sample, impl: str, draw: Draw) -> None:
        p = draw.params(grad=False)
        for bad in (sample.rows, sample.rows + 1, -1, 2**40):
            with pytest.raises(IndexError, match=rf"{bad} .*{sample.rows} rows \(valid: 0 to {sample.rows - 1}\)"):
                lookup(draw.structure, p, torch.tensor([0, bad]), impl=impl)
        for dtype in (torch.float32, torch.bool, torch.uint8):
            with pytest.raises(TypeError, match="int32 or int64"):
                lookup(draw.structure, p, torch.zeros(2, dtype=dtype), impl=impl)

    @on(one_of_each)
    def test_an_unknown_way_is_refused_by_name(self, sample: Sample, draw: Draw) -> None:
        with pytest.raises(ValueError, match='"auto", "reference"'):
            lookup(draw.structure, draw.params(grad=False), draw.index(2), impl="fastest")

    def test_drawn_tables_have_the_standard_deviation_asked_for(self, sample: Sample, draw: Draw) -> None:
        if not draw.structure.can_initialise:
            pytest.skip(f"{draw.structure.kind} declares that it cannot be drawn")
        for std in (1.0, 0.02):
            p = {s.name: torch.empty(s.shape) for s in draw.structure.tensors()}
            draw.structure.initialise(p, std, draw.generator)
            assert float(draw.structure.full(p).square().mean().sqrt()) == pytest.approx(std, rel=1e-4)

    def test_a_table_of_its_own_kind_is_fitted_exactly(self, sample: Sample, draw: Draw) -> None:
        if not draw.structure.fits_exactly:
            pytest.skip(f"{draw.structure.kind} declares that its fit is a search")
        table = draw.structure.full(draw.params(grad=False))
        found = fit_table(table, sample.format)
        assert found.structure.kind == draw.structure.kind
        assert found.error <= 1e-6

    @on(rounded)
    def test_packed_rows_are_the_same_to_the_bit(self, sample: Sample, draw: Draw) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            p = draw.params(dtype, grad=False)
            trained: Any = draw.structure
            structure, tensors = trained.packed(p)
            assert not hasattr(structure, "packed")
            assert structure.bytes(dtype) < draw.structure.bytes(dtype)
            for index in (torch.arange(sample.rows), draw.index(1), draw.index(40)):
                for impl in backends(structure):
                    rows = lookup(structure, tensors, index, impl=impl)
                    assert torch.equal(rows, lookup(draw.structure, p, index))

    def test_the_error_reported_is_the_error_made(self, sample: Sample, draw: Draw) -> None:
        table = draw.normal(sample.rows, sample.cols)
        found = fit_table(table, sample.format)
        made = found.structure.full(found.params)
        distance = float(torch.linalg.vector_norm(made - table) / torch.linalg.vector_norm(table))
        assert found.error == pytest.approx(distance, rel=1e-6, abs=1e-12)
        assert found.error <= 1.0

    @on(ranked)
    @spread("rel_error", [0.5, 0.1, 1e-3])
    def test_error_bounds_are_honoured(self, sample: Sample, draw: Draw, rel_error: float) -> None:
        format = self._sized(sample, rel_error=rel_error)
        # A table of decaying spectrum, so that there is something to cut.
        table = draw.normal(sample.rows, sample.cols) @ torch.diag(0.7 ** torch.arange(sample.cols)).double()
        for dtype in (torch.float64, torch.float32):
            found = fit_table(table.to(dtype), format)
            assert found.error <= rel_error

    @on(ranked)
    def test_ratios_are_kept_by_the_largest_rank(self, sample: Sample, draw: Draw) -> None:
        format = self._sized(sample, ratio=1.0)
        most = draw.budget.ratio(format.with_rank(draw.budget, 1, clip=True))
        for ratio in (most, most / 2, most / 5):
            structure = replace(format, ratio=ratio).bind(draw.budget)
            assert draw.budget.ratio(structure) >= ratio
            rank = max(getattr(structure, "ranks", None) or [getattr(structure, "rank", 0)])
            wider = format.with_rank(draw.budget, rank + 1, clip=True)
            assert draw.budget.ratio(wider) < ratio or wider == structure
        with pytest.raises(ValueError, match=f"{most:.4g} times smaller"):
            replace(format, ratio=most * 1.01).bind(draw.budget)

    @staticmethod
    def _sized(sample: Sample, **size: float) -> RankedFormat[Any]:
        format = sample.format
        assert isinstance(format, RankedFormat)
        return replace(format, **{**dict.fromkeys(format.sizes), **size})  # type: ignore[arg-type]

    def test_resized_tables_keep_their_rows(self, sample: Sample, draw: Draw) -> None:
        p = draw.params(grad=False)
        table = draw.structure.full(p)
        for rows in (sample.rows - 1, sample.rows + 1, 3 * sample.rows + 2):
            try:
                made, params = draw.structure.resized(p, max(1, rows))
            except NotImplementedError as error:
                pytest.skip(str(error))
            except ValueError:
                if rows > sample.rows:
                    raise
                continue
            assert (made.rows, made.cols, made.kind) == (max(1, rows), sample.cols, sample.structure.kind)
            assert [tuple(params[spec.name].shape) for spec in made.tensors()] == [s.shape for s in made.tensors()]
            kept = min(made.rows, sample.rows)
            after = made.full(params)
            assert_near(after[:kept], table[:kept])
            assert after[kept:].abs().max() <= 2 * table.abs().max() if made.rows > kept else True

    @on(one_of_each)
    def test_descriptions_are_frozen_hashable_and_picklable(self, sample: Sample, draw: Draw) -> None:
        structure = draw.structure
        assert structure == sample.structure
        assert hash(structure) == hash(sample.structure)
        assert pickle.loads(pickle.dumps(structure)) == structure
        with pytest.raises(FrozenInstanceError):
            structure.rows = 1  # type: ignore[misc]

    def test_declared_tensors(self, sample: Sample, draw: Draw) -> None:
        specs = draw.structure.tensors()
        names = [spec.name for spec in specs]
        assert len(set(names)) == len(names) > 0
        # Checkpoint tools take any name with "weight" in it for a dense matrix.
        assert not any("weight" in name or "." in name for name in names)
        assert draw.structure.numel == sum(t.numel() for t in draw.params(grad=False).values())
        assert draw.structure.bytes(torch.float32) == sum(
            t.numel() * t.element_size() for t in draw.params(torch.float32, grad=False).values()
        )
