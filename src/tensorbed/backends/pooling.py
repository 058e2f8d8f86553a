"""From rows to bags, and the gradient scaling that lookups and bags share: plain PyTorch, known to no structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.checks import require_integer_indices
from tensorbed.dispatch import Asked, World, of_all_examples, working_dtype
from tensorbed.indexing import check_range, reads_values

MODES = ("sum", "mean", "max")


def bounds_of(
    index: Tensor, offsets: Tensor | None, include_last_offset: bool, world: World
) -> Tensor:  # -> (bags + 1,) int64
    """Where each bag begins and the last one ends, from the checked arguments of ``torch.nn.EmbeddingBag.forward``."""
    if index.dim() == 2:
        if offsets is not None:
            raise ValueError("offsets go with 1-D indices; each row of 2-D indices is a bag: leave offsets=None.")
        if world is World.EAGER and index.shape[1]:  # in one operation; graphs should not ask for the size
            return torch.arange(0, index.numel() + 1, index.shape[1], device=index.device)
        return torch.arange(index.shape[0] + 1, device=index.device) * index.shape[1]
    if index.dim() != 1:
        raise ValueError(f"indices of shape {tuple(index.shape)}: give 1-D with offsets, or 2-D, one bag a row.")
    if offsets is None:
        raise ValueError("1-D indices need offsets: where each bag begins, for instance torch.tensor([0, 4]).")
    require_integer_indices(offsets, "offsets")
    if offsets.dim() != 1:
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}: give one number a bag.")
    if offsets.device != index.device:
        where = f"offsets are on {offsets.device} and indices on {index.device}"
        raise ValueError(f"{where}: move the offsets, for instance with offsets.to(index.device).")
    bounds = offsets.long()
    if not include_last_offset:
        bounds = torch.cat([bounds, bounds.new_full((1,), index.shape[0])])
    elif offsets.shape[0] == 0:
        raise ValueError("include_last_offset=True: offsets needs at least the end of the last bag.")
    return _checked_bounds(bounds, index.shape[0], world)


def _checked_bounds(bounds: Tensor, indices: int, world: World) -> Tensor:
    """The same bounds, once they begin at 0, do not fall and stay within the indices."""
    if world is World.META or world is World.EXPORTED:
        return bounds
    if world is World.COMPILED or world is World.RECORDED:
        checked: Tensor = _check_bounds_op(bounds, indices)
        return checked
    if world is World.TRANSFORMED:
        examples = of_all_examples(bounds).reshape(-1, bounds.shape[0])
        if not reads_values(bounds.device):
            _check_bounds(examples, indices)
        elif (wrong := examples[~_are_bounds(examples, indices)]).shape[0]:
            _check_bounds(wrong[0], indices)
        return bounds
    return _check_bounds(bounds, indices)


def _are_bounds(bounds: Tensor, indices: int) -> Tensor:  # (*examples, bags + 1) -> (*examples)
    first, last = bounds[..., 0], bounds[..., -1]
    begins = first == 0 if bounds.shape[-1] > 1 else first <= indices
    return begins & (bounds.diff() >= 0).all(-1) & (last <= indices)


def _check_bounds(bounds: Tensor, indices: int) -> Tensor:
    if not reads_values(bounds.device):
        told = f"offsets must begin at 0, must not fall and must stay within the {indices} indices."
        torch._assert_async(_are_bounds(bounds, indices).all(), told)
        return bounds
    first, last, falls = int(bounds[0]), int(bounds[-1]), bool((bounds.diff() < 0).any())
    if first != 0 and (bounds.shape[0] > 1 or first > indices):
        raise ValueError(f"offsets begins with {first}: the first bag begins at 0.")
    if falls or last > indices:
        shown = bounds.tolist() if bounds.shape[0] <= 16 else f"up to {int(bounds.max())}"
        raise ValueError(f"offsets must not fall and must stay within the {indices} indices, got {shown}.")
    return bounds


@torch.library.custom_op("tensorbed::check_bounds", mutates_args=())
def _check_bounds_op(bounds: Tensor, indices: int) -> Tensor:
    return _check_bounds(bounds, indices).clone()


@_check_bounds_op.register_fake
def _(bounds: Tensor, indices: int) -> Tensor:
    return torch.empty_like(bounds)


def with_padding(rows: Tensor, asked: Asked, index: Tensor | None = None) -> Tensor:  # (n, cols) -> (n, cols)
    """The rows, and the padding row in the places of ``padding_idx``; of other indices where they were clamped."""
    if asked.padding_idx is None:
        return rows
    index = asked.ids if index is None else index
    padding = rows.new_zeros(()) if asked.padding_row is None else asked.padding_row.to(rows.dtype)
    return torch.where(index.eq(asked.padding_idx)[:, None], padding, rows)


def pool_rows(rows: Tensor, asked: Asked, index: Tensor, world: World) -> Tensor:  # (n, cols), (n,) -> (bags, cols)
    """One row for each index pooled in plain PyTorch: compiled, exported, twice differentiable."""
    assert asked.bounds is not None
    rows = scale_by_frequency(rows, index, world) if asked.by_frequency else rows
    starts, end, weights = asked.bounds[:-1], asked.bounds[-1], asked.weights
    (n, cols), count = rows.shape, starts.shape[0]
    if n == 0:
        # Sums of nothing keep what trains in the graph: it has a gradient, if an empty one.
        return rows.new_zeros(count, cols) + rows.sum() + (0 if weights is None else weights.sum())
    at = torch.arange(n, device=rows.device)
    marks = torch.zeros(n + 1, dtype=torch.int64, device=rows.device)
    # Bags that begin at or before a position, less one: empty bags begin where the next one does.
    bag = marks.index_add(0, starts, torch.ones_like(starts)).cumsum(0)[:n] - 1
    keep = at < end
    if asked.padding_idx is not None:
        keep = keep & (index != asked.padding_idx)
    # With no bag at all everything lies beyond the end; keep its entries harmless.
    bag = bag.clamp_min(0)
    # Half precisions count to 256 and sum no better: pool in single.
    dtype = rows.dtype
    rows = rows.float() if dtype.itemsize < 4 else rows
    if weights is not None:
        rows = rows * weights[:, None].to(rows.dtype)
    nothing = -torch.inf if asked.mode == "max" else 0.0
    rows, pooled = rows.masked_fill(~keep[:, None], nothing), rows.new_full((max(count, 1), cols), nothing)
    sizes = rows.new_zeros(max(count, 1)).index_add(0, bag, keep.to(rows.dtype))
    if asked.mode == "max":
        pooled = pooled.scatter_reduce(0, bag[:, None].expand(n, cols), rows, "amax")
        pooled = pooled.masked_fill((sizes == 0)[:, None], 0.0)
    else:
        pooled = pooled.index_add(0, bag, rows)
        if asked.mode == "mean":
            pooled = pooled / sizes.clamp_min(1)[:, None]
    return pooled[:count].to(dtype)


def pooled_or_padded(rows_of: Callable[[Tensor], Tensor], asked: Asked) -> Tensor:  # -> (n or bags, cols)
    """What is asked of a table whose rows ``rows_of`` makes, with at least one index."""
    return with_padding(rows_of(asked.ids), asked) if asked.bounds is None else pool_unique(rows_of, asked)


def pool_unique(rows_of: Callable[[Tensor], Tensor], asked: Asked) -> Tensor:  # -> (bags, cols)
    """Each row once, as a small table for torch's own bag kernels: no row is written once an index."""
    asked = _within_bags(asked)
    unique, inverse, times = torch.unique(asked.ids, return_inverse=True, return_counts=True)
    rows = rows_of(unique)
    # torch's kernels add up the gradients of half precisions in half precision: pool in single.
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    wide = scale_gradient(wide, times, World.EAGER) if asked.by_frequency else wide
    padding, weights = None, asked.weights
    if asked.padding_idx is not None:
        at = (unique == asked.padding_idx).nonzero()
        padding = int(at[0]) if at.numel() else None
    pooled = F.embedding_bag(
        inverse,
        wide,
        asked.bounds,
        mode=asked.mode,
        per_sample_weights=None if weights is None else weights.to(wide.dtype),
        include_last_offset=True,
        padding_idx=padding,
    )
    return pooled.to(rows.dtype)


def _within_bags(asked: Asked) -> Asked:
    """Without indices beyond the last bag, which torch's kernels would count into it: where nobody has looked yet."""
    if asked.bounds is None or reads_values(asked.ids.device):
        return asked
    check_range(asked.ids, asked.table.rows)
    end = int(asked.bounds[-1]) if asked.bounds.shape[0] > 1 else 0
    return asked._replace(ids=asked.ids[:end], weights=None if asked.weights is None else asked.weights[:end])


def scale_by_frequency(rows: Tensor, index: Tensor, world: World) -> Tensor:  # (*, cols), (*) -> (*, cols)
    """The rows unchanged; on the way back each gradient divided by how often its index occurs."""
    if world is World.EXPORTED or not torch.is_grad_enabled():
        return rows
    flat = index.reshape(-1)
    ordered = flat.sort().values
    times = torch.searchsorted(ordered, flat, right=True) - torch.searchsorted(ordered, flat)
    return scale_gradient(rows, times.reshape(index.shape), world)


def scale_gradient(rows: Tensor, times: Tensor, world: World) -> Tensor:  # (*, cols), (*) -> (*, cols)
    """The rows unchanged; on the way back each gradient divided by ``times``."""
    scale = times.to(working_dtype(rows)).reciprocal()[..., None]  # half precision cannot count far
    # What follows tangents and vmap is a class of its own, because torch.compile takes none that says how.
    transformed = world is World.TRANSFORMED or world is World.RECORDED
    function = _TransformedScaleGradient if transformed else _ScaleGradient
    scaled: Tensor = function.apply(rows, scale)  # type: ignore[no-untyped-call]
    return scaled


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(rows: Tensor, scale: Tensor) -> Tensor:
        return rows.view_as(rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return (grad * scale).to(grad.dtype), None


class _TransformedScaleGradient(_ScaleGradient):
    """The same for ``vmap`` and for forward mode, whose tangents are not scaled, as torch's are not."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, rows: Tensor, scale: None) -> Tensor:
        return rows.view_as(rows)
