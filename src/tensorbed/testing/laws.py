"""The laws of a structure, on its own operations: rows, project, full, initialise, fit."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorbed.dispatch import BACKENDS
from tensorbed.fitting import fit_table
from tensorbed.functional import lookup, project
from tensorbed.structures.formats import RankedFormat
from tensorbed.testing import samples as choices
from tensorbed.testing.samples import (
    Conformance,
    Draw,
    Sample,
    assert_near,
    assert_same,
    backends,
    on,
    one_of_each,
    spread,
)


def _rows(draw: Draw, index: Tensor, impl: str, *tensors: Tensor) -> Tensor:
    return lookup(draw.structure, draw.structure.named(tensors), index, impl=impl)


class StructureLaws(Conformance):
    """Inherit with ``samples`` set."""

    def test_rows_are_rows_of_the_table(self, sample: Sample, impl: str, draw: Draw) -> None:
        p = draw.params(grad=False)
        table = draw.structure.full(p)
        assert table.shape == (sample.rows, sample.cols)
        for shape in ((), (1,), (7,), (3, 5), (2, 0, 3), (sample.rows + 3,)):
            index = draw.index(*shape)
            assert_near(lookup(draw.structure, p, index, impl=impl), table[index])
        for index in (torch.arange(sample.rows), draw.index(4, 6).T, draw.index(9)[::2], draw.index(5).int()):
            assert_near(lookup(draw.structure, p, index, impl=impl), table[index.long()])

    @on(one_of_each)
    def test_every_backend_can_be_named(self, sample: Sample, draw: Draw) -> None:
        """Also the one that auto takes."""
        p, index = draw.params(grad=False), draw.index(9)
        for impl in draw.structure.impls:
            assert_near(lookup(draw.structure, p, index, impl=impl), draw.structure.full(p)[index])
        with pytest.raises(ValueError, match='"auto", "reference"'):
            lookup(draw.structure, p, index, impl="fastest")

    def test_gradients_are_those_of_the_table(self, sample: Sample, impl: str, draw: Draw) -> None:
        for dtype in (torch.float64, torch.float32):
            p, index = draw.params(dtype), draw.index(2, 9)
            rows, expected = lookup(draw.structure, p, index, impl=impl), draw.structure.full(p)[index]
            assert_same(rows, expected, [t for t in p.values() if t.requires_grad], draw)

    @on(choices.trained, choices.smooth, one_of_each)
    def test_gradcheck(self, sample: Sample, impl: str, draw: Draw) -> None:
        rows = partial(_rows, draw, draw.index(5), impl)
        assert torch.autograd.gradcheck(rows, tuple(draw.params(torch.float64).values()), fast_mode=True)

    @on(choices.trained, choices.smooth)
    def test_reference_is_twice_differentiable(self, sample: Sample, draw: Draw) -> None:
        rows = partial(_rows, draw, draw.index(4), "reference")
        assert torch.autograd.gradgradcheck(rows, tuple(draw.params(torch.float64).values()), fast_mode=True)

    def test_project_is_a_product_with_a_block_of_rows(self, sample: Sample, draw: Draw) -> None:
        p, x = draw.params(), draw.normal(2, 3, sample.cols).requires_grad_()
        leaves = [x, *(t for t in p.values() if t.requires_grad)]
        for start, stop in ((0, sample.rows), (sample.rows // 3, sample.rows // 2), (5, 5)):
            made, expected = project(draw.structure, p, x, start, stop), x @ draw.structure.full(p)[start:stop].T
            assert_same(made, expected, leaves if stop > start else [], draw)

    @on(one_of_each)
    def test_indices_outside_the_table_raise(self, sample: Sample, impl: str, draw: Draw) -> None:
        p = draw.params(grad=False)
        for bad in (sample.rows, sample.rows + 1, -1, 2**40):
            bound = rf"out of range for a table of {sample.rows} rows \(valid: 0 to {sample.rows - 1}\)"
            # A device says no number: the host would have to wait for it.
            by_device = BACKENDS[impl].checks_on_device if impl in BACKENDS else False
            refusal, told = (RuntimeError, bound) if by_device else (IndexError, rf"{bad} is {bound}")
            with pytest.raises(refusal, match=told):
                lookup(draw.structure, p, torch.tensor([0, bad]), impl=impl)
        for dtype in (torch.float32, torch.bool, torch.uint8):
            with pytest.raises(TypeError, match="int32 or int64"):
                lookup(draw.structure, p, torch.zeros(2, dtype=dtype), impl=impl)

    @on(choices.drawn)
    def test_drawn_tables_have_the_standard_deviation_asked_for(self, sample: Sample, draw: Draw) -> None:
        for std in (1.0, 0.02):
            p = draw.undrawn(torch.float32)
            draw.structure.initialise(p, std, draw.generator)
            assert float(draw.structure.full(p).square().mean().sqrt()) == pytest.approx(std, rel=1e-4)

    @on(choices.fitted, choices.those(lambda s: s.structure.fits_exactly))
    def test_a_table_of_its_own_kind_is_fitted_exactly(self, sample: Sample, draw: Draw) -> None:
        found = fit_table(draw.structure.full(draw.params(grad=False)), sample.format)
        assert found.structure.kind == draw.structure.kind
        assert found.error <= 1e-6

    @on(choices.rounding)
    def test_packed_rows_are_the_same_to_the_bit(self, sample: Sample, draw: Draw) -> None:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            p = draw.params(dtype, grad=False)
            trained: Any = draw.structure
            structure, tensors = trained.packed(p)
            assert not structure.packs
            assert structure.bytes(dtype) < draw.structure.bytes(dtype)
            for index in (torch.arange(sample.rows), draw.index(1), draw.index(40)):
                for impl in backends(structure):
                    rows = lookup(structure, tensors, index, impl=impl)
                    same = impl if impl in draw.structure.impls else "auto"
                    assert torch.equal(rows, lookup(draw.structure, p, index, impl=same))

    @on(choices.fitted)
    def test_the_error_reported_is_the_error_made(self, sample: Sample, draw: Draw) -> None:
        table = draw.normal(sample.rows, sample.cols)
        found = fit_table(table, sample.format)
        made = found.structure.full(found.params)
        distance = float(torch.linalg.vector_norm(made - table) / torch.linalg.vector_norm(table))
        assert found.error == pytest.approx(distance, rel=1e-6, abs=1e-12)
        assert found.error <= 1.0

    @on(choices.bounded)
    @spread("rel_error", [0.5, 0.1, 1e-3])
    def test_error_bounds_are_honoured(self, sample: Sample, draw: Draw, rel_error: float) -> None:
        format = self._sized(sample, rel_error=rel_error)
        # A table of decaying spectrum, so that there is something to cut.
        table = draw.normal(sample.rows, sample.cols) @ torch.diag(0.7 ** torch.arange(sample.cols)).double()
        for dtype in (torch.float64, torch.float32):
            assert fit_table(table.to(dtype), format).error <= rel_error

    @on(choices.ranked)
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
        names = [spec.name for spec in draw.structure.tensors()]
        assert len(set(names)) == len(names) > 0
        # Checkpoint tools take any name with "weight" in it for a dense matrix.
        assert not any("weight" in name or "." in name for name in names)
        tensors = draw.params(torch.float32, grad=False).values()
        assert draw.structure.numel == sum(t.numel() for t in tensors)
        assert draw.structure.bytes(torch.float32) == sum(t.nbytes for t in tensors)
