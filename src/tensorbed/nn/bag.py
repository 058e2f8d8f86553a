"""``torch.nn.EmbeddingBag`` over any structure."""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from tensorbed.backends.native.chains import Table, compute
from tensorbed.backends.native.graph_bags import can_trace, chain_bags
from tensorbed.backends.pooling import MODES, Bags, pool_rows, pool_unique, scale_by_frequency, scale_gradient
from tensorbed.checks import require_bool
from tensorbed.dispatch import (
    checked_indices,
    clamped_for_export,
    full_precision,
    is_exporting,
    is_plain,
    is_traced,
    is_transformed,
)
from tensorbed.functional import compiled_table, explain, lookup
from tensorbed.nn.options import TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.structures import Explanation, Format, Params, Use


class EmbeddingBag(StructuredTable):
    """Bags of rows pooled, with the arguments and behaviour of ``torch.nn.EmbeddingBag``.

    Rows at ``padding_idx`` do not take part.

    Args:
        num_embeddings, embedding_dim, format, padding_idx, std, impl: see :class:`Embedding`.
        mode: ``"sum"``, ``"mean"`` (as in torch the default) or ``"max"``.
        include_last_offset: the last entry of ``offsets`` is the end of the last bag.

    Shape:
        - input: ``(bags, length)``, or ``(n,)`` with offsets ``(bags,)``
        - per_sample_weights: like input, with ``mode="sum"`` only
        - output: ``(bags, embedding_dim)``

    Example::

        >>> layer = tb.EmbeddingBag(10_000_000, 64, tb.TensorTrain(rank=32), mode="sum")
        >>> layer(torch.tensor([4, 9, 9_999_999, 4]), torch.tensor([0, 3])).shape
        torch.Size([2, 64])
    """

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        format: Format,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        check_mode(mode, options.get("scale_grad_by_freq", False))
        require_bool(include_last_offset, "include_last_offset")
        super().__init__(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **options)
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    @options_shown
    def from_pretrained(
        cls,
        table: Tensor,
        format: Format,
        freeze: bool = True,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit a format to a trained table; see :meth:`Embedding.from_pretrained`."""
        check_mode(mode, options.get("scale_grad_by_freq", False))
        require_bool(include_last_offset, "include_last_offset")
        layer = cls._fitted(table, format, freeze, dtype, use, **options)
        layer.mode, layer.include_last_offset = mode, include_last_offset
        return layer

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:  # (bags, length) or (n,) -> (bags, embedding_dim)
        return self._pooled(self._bags(input, offsets, per_sample_weights))

    def explain(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Explanation:
        """What :meth:`forward` would do with these bags, counted and not done."""
        return self._explained(self._bags(input, offsets, per_sample_weights))

    def _explained(self, bags: Bags) -> Explanation:
        if not is_plain(bags.index) or self._by_itself(bags := bags.without_rest()):
            return explain(self.structure, bags.index, impl=self.impl)
        rows = torch.unique(bags.index)
        return explain(self.structure, rows, impl=self.impl).asked_by(bags.index.shape[0])

    def _by_itself(self, bags: Bags) -> bool:
        """Whether rows are looked up index by index, instead of each unique one once."""
        return self.impl == "reference" or bags.index.numel() == 0

    def _bags(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Bags:
        """The arguments of :meth:`forward`, checked: what can be refused is refused before anything is computed."""
        if per_sample_weights is not None and not isinstance(per_sample_weights, Tensor):
            raise TypeError(f"per_sample_weights must be a tensor, got {type(per_sample_weights).__name__}.")
        if per_sample_weights is not None and self.mode != "sum":
            raise ValueError(f'per_sample_weights needs mode="sum", as in torch; this layer has mode="{self.mode}".')
        if per_sample_weights is not None and per_sample_weights.dtype != self._dtype:
            raise TypeError(f"per_sample_weights is {per_sample_weights.dtype}, the layer {self._dtype}; convert it.")
        input = clamped_for_export(input, self.num_embeddings)
        bags = Bags.of(input, offsets, per_sample_weights, self.include_last_offset).checked()
        if is_plain(input):
            checked_indices(input, self.num_embeddings)  # all of them, also those that are in no bag
        return bags

    def _pooled(self, bags: Bags) -> Tensor:  # -> (bags, embedding_dim)
        """Checked bags pooled."""
        with full_precision(bags.index):
            if not is_plain(bags.index):
                traced = self._traced(bags)
                return self._pool_rows(bags) if traced is None else traced
            bags = bags.without_rest()
            table = self._compiled(bags)
            if table is not None:
                return compute([table])
            return self._pool_rows(bags) if self._by_itself(bags) else self._pool_unique(bags)

    @property
    def _is_linear(self) -> bool:
        """Whether bags are sums of weighted rows, and so are their gradients: what the kernels pool."""
        return self.mode != "max" and not self.scale_grad_by_freq

    def _compiled(self, bags: Bags) -> Table | None:
        """What to ask of the compiled kernels, where they pool such bags."""
        if not self._is_linear:
            return None
        table = compiled_table(self.structure, self.params(), bags.index, self.impl)
        if table is None:
            return None
        return table._replace(
            padding_idx=self.padding_idx,
            bounds=bags.bounds(),
            weights=None if bags.per_sample_weights is None else bags.per_sample_weights.resolve_neg(),
            mean=self.mode == "mean",
        )

    def _traced(self, bags: Bags) -> Tensor | None:
        """Pooled by an operator in a graph, where it knows how."""
        index = bags.index
        if not is_traced(index) or is_exporting() or is_transformed():
            return None
        if not self._is_linear or index.device.type != "cpu":
            return None
        found = self.structure.as_chain(self.params())
        if found is None or not can_trace(found[1], self.impl):
            return None
        weights, padding = bags.per_sample_weights, self.padding_idx
        return chain_bags(*found, index.long(), bags.bounds(), weights, self.mode == "mean", padding)

    def _pool_rows(self, bags: Bags) -> Tensor:
        params: Params = self.params()
        plainly = self.impl == "reference" or is_exporting()
        if plainly and self.structure.as_chain(params) is not None:
            params = self.structure.widened(params)  # in half precision bags are rounded once, as the kernels do it
        rows = lookup(self.structure, params, bags.index, impl=self.impl)
        if self.scale_grad_by_freq:
            rows = scale_by_frequency(rows, bags.index)
        return pool_rows(rows, bags, self.mode, self.padding_idx).to(self._dtype)

    def _pool_unique(self, bags: Bags) -> Tensor:
        unique, inverse, times = torch.unique(bags.index, return_inverse=True, return_counts=True)
        rows = lookup(self.structure, self.params(), unique, impl=self.impl)
        if self.scale_grad_by_freq:
            # Sums over many indices leave half precision before they are divided by their number.
            rows = scale_gradient(rows.float() if rows.dtype.itemsize < 4 else rows, times)
        padding = None
        if self.padding_idx is not None:
            at = (unique == self.padding_idx).nonzero()
            padding = int(at[0]) if at.numel() else None
        return pool_unique(rows, inverse, bags, self.mode, padding).to(self._dtype)

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f'{super().extra_repr()}, mode="{self.mode}"{last}'


def check_mode(mode: str, scale_grad_by_freq: bool) -> None:
    """A way of pooling, or an error that lists them."""
    if mode not in MODES:
        raise ValueError(f'mode={mode!r}: choose one of "sum", "mean", "max".')
    if mode == "max" and scale_grad_by_freq:
        raise ValueError('scale_grad_by_freq=True does not go with mode="max", as in torch.')
