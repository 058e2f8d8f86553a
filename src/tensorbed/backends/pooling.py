"""From rows to bags, and the gradient scaling that lookups and bags share: plain PyTorch, known to no structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.checks import require_integer_indices
from tensorbed.dispatch import is_exporting, is_traced, is_transformed

MODES = ("sum", "mean", "max")


@dataclass(frozen=True)
class Bags:
    """Which indices belong to which bag.

    Shape:
        - index: ``(n,)``
        - starts: ``(bags,)`` where each bag begins
        - end: where the last one ends, ``n`` or a tensor ``()``
        - per_sample_weights: ``(n,)`` or ``None``
    """

    index: Tensor
    starts: Tensor
    end: Tensor | int
    per_sample_weights: Tensor | None

    @classmethod
    def of(
        cls,
        index: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        include_last_offset: bool,
    ) -> Bags:
        """From the arguments of ``torch.nn.EmbeddingBag.forward``, checked."""
        require_integer_indices(index)
        if per_sample_weights is not None and per_sample_weights.shape != index.shape:
            raise ValueError(
                f"per_sample_weights has shape {tuple(per_sample_weights.shape)}; one weight for each index of "
                f"shape {tuple(index.shape)} is needed."
            )
        weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
        if index.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets go with 1-D indices; each row of 2-D indices is a bag: leave offsets=None.")
            starts = torch.arange(index.shape[0], device=index.device) * index.shape[1]
            return cls(index.reshape(-1), starts, index.numel(), weights)
        if index.dim() != 1:
            raise ValueError(f"indices of shape {tuple(index.shape)}: give 1-D with offsets, or 2-D, one bag a row.")
        if offsets is None:
            raise ValueError("1-D indices need offsets: where each bag begins, for instance torch.tensor([0, 4]).")
        require_integer_indices(offsets, "offsets")
        if offsets.dim() != 1:
            raise ValueError(f"offsets has shape {tuple(offsets.shape)}: give one number a bag.")
        offsets = offsets.long()
        if include_last_offset:
            if offsets.shape[0] == 0:
                raise ValueError("include_last_offset=True: offsets needs at least the end of the last bag.")
            return cls(index, offsets[:-1], offsets[-1], weights)
        return cls(index, offsets, index.shape[0], weights)

    def bounds(self) -> Tensor:
        """Where each bag begins, and where the last one ends: ``(bags + 1,)``."""
        return torch.cat([self.starts, torch.as_tensor(self.end, device=self.starts.device).reshape(1)])

    def without_rest(self) -> Bags:
        """Without indices beyond the end of the last bag, which torch's kernels would count into it."""
        end = int(self.end) if self.starts.shape[0] else 0
        if end == self.index.shape[0]:
            return self
        weights = None if self.per_sample_weights is None else self.per_sample_weights[:end]
        return Bags(self.index[:end], self.starts, end, weights)

    def checked(self) -> Bags:
        """The same bags, once their offsets begin at 0, do not fall and stay within the indices."""
        if self.index.is_meta or is_exporting():
            return self
        if is_traced(self.index):
            bounds = _check_bounds_op(self.bounds(), self.index.shape[0])
            return Bags(self.index, bounds[:-1], bounds[-1], self.per_sample_weights)
        _check_bounds(self.bounds(), self.index.shape[0])
        return self


def _check_bounds(bounds: Tensor, indices: int) -> None:
    first, last, falls = int(bounds[0]), int(bounds[-1]), bool((bounds.diff() < 0).any())
    if first != 0 and (bounds.shape[0] > 1 or first > indices):
        raise ValueError(f"offsets begins with {first}: the first bag begins at 0.")
    if falls or last > indices:
        shown = bounds.tolist() if bounds.shape[0] <= 16 else f"up to {int(bounds.max())}"
        raise ValueError(f"offsets must not fall and must stay within the {indices} indices, got {shown}.")


@torch.library.custom_op("tensorbed::check_bounds", mutates_args=())
def _check_bounds_op(bounds: Tensor, indices: int) -> Tensor:
    _check_bounds(bounds, indices)
    return bounds.clone()


@_check_bounds_op.register_fake
def _(bounds: Tensor, indices: int) -> Tensor:
    return torch.empty_like(bounds)


def pool_rows(rows: Tensor, bags: Bags, mode: str, padding_idx: int | None) -> Tensor:  # (n, cols) -> (bags, cols)
    """One row for each index pooled in plain PyTorch: compiled, exported, twice differentiable."""
    n, cols = rows.shape
    count = bags.starts.shape[0]
    if n == 0:
        # Sums of nothing keep what trains in the graph: it has a gradient, if an empty one.
        weights = bags.per_sample_weights
        return rows.new_zeros(count, cols) + rows.sum() + (0 if weights is None else weights.sum())
    at = torch.arange(n, device=rows.device)
    marks = torch.zeros(n + 1, dtype=torch.int64, device=rows.device)
    # Bags that begin at or before a position, less one: empty bags begin where the next one does.
    bag = marks.index_add(0, bags.starts, torch.ones_like(bags.starts)).cumsum(0)[:n] - 1
    keep = at < bags.end
    if padding_idx is not None:
        keep = keep & (bags.index != padding_idx)
    # With no bag at all everything lies beyond the end; keep its entries harmless.
    bag = bag.clamp_min(0)
    # Half precisions count to 256 and sum no better: pool in single.
    dtype = rows.dtype
    rows = rows.float() if dtype.itemsize < 4 else rows
    if bags.per_sample_weights is not None:
        rows = rows * bags.per_sample_weights[:, None].to(rows.dtype)
    sizes = torch.zeros(max(count, 1), dtype=rows.dtype, device=rows.device).index_add(0, bag, keep.to(rows.dtype))
    if mode == "max":
        low = rows.masked_fill(~keep[:, None], -torch.inf)
        empty = rows.new_full((max(count, 1), cols), -torch.inf)
        pooled = empty.scatter_reduce(0, bag[:, None].expand(n, cols), low, "amax")
        pooled = pooled.masked_fill((sizes == 0)[:, None], 0.0)
    else:
        zeros = rows.new_zeros(max(count, 1), cols)
        pooled = zeros.index_add(0, bag, rows.masked_fill(~keep[:, None], 0.0))
        if mode == "mean":
            pooled = pooled / sizes.clamp_min(1)[:, None]
    return pooled[:count].to(dtype)


def pool_unique(rows: Tensor, inverse: Tensor, bags: Bags, mode: str, padding: int | None) -> Tensor:
    """Unique rows ``(u, cols)`` as a small table for torch's own bag kernels: no row is written once an index."""
    # torch's kernels add up the gradients of half precisions in half precision: pool in single.
    wide = rows.float() if rows.dtype.itemsize < 4 else rows
    weights = bags.per_sample_weights
    pooled = F.embedding_bag(
        inverse,
        wide,
        bags.bounds(),
        mode=mode,
        per_sample_weights=None if weights is None else weights.to(wide.dtype),
        include_last_offset=True,
        padding_idx=padding,
    )
    return pooled.to(rows.dtype)


def scale_by_frequency(rows: Tensor, index: Tensor) -> Tensor:  # (*, cols), (*) -> (*, cols)
    """The rows unchanged; on the way back each gradient divided by how often its index occurs."""
    if is_exporting() or not torch.is_grad_enabled():
        return rows
    ordered = index.reshape(-1).sort().values
    flat = index.reshape(-1)
    times = torch.searchsorted(ordered, flat, right=True) - torch.searchsorted(ordered, flat)
    return scale_gradient(rows, times.reshape(index.shape))


def scale_gradient(rows: Tensor, times: Tensor) -> Tensor:  # (*, cols), (*) -> (*, cols)
    """The rows unchanged; on the way back each gradient divided by ``times``."""
    # Half precision cannot count far.
    wide = torch.float64 if rows.dtype == torch.float64 else torch.float32
    scale = times.to(wide).reciprocal()[..., None]
    function = _TransformedScaleGradient if is_transformed() else _ScaleGradient
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
    """The same for ``vmap`` and for forward mode, whose tangents are not scaled, as torch's are not.

    A class of its own, because ``torch.compile`` takes no function that says how its tangents go.
    """

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, rows: Tensor, scale: None) -> Tensor:
        return rows.view_as(rows)
