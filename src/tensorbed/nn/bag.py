"""``torch.nn.EmbeddingBag`` over any structure."""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from tensorbed.backends.pooling import MODES, Bags
from tensorbed.checks import require_bool, require_integer_indices
from tensorbed.dispatch import Asked, World, checked_indices, world_of
from tensorbed.functional import explain, pooled, request
from tensorbed.nn.options import TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.structures import Explanation, Format, Use


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
        bags, world = self._bags(input, offsets, per_sample_weights)
        return pooled([self._asked(bags, world)], world)

    def explain(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Explanation:
        """What :meth:`forward` would do with these bags, counted and not done."""
        return self._explained(*self._bags(input, offsets, per_sample_weights))

    def _explained(self, bags: Bags, world: World) -> Explanation:
        index = bags.ids if world is not World.EAGER else bags.without_rest().ids
        if world is not World.EAGER or self.impl == "reference" or index.numel() == 0:
            return explain(self.structure, index, impl=self.impl)
        # Each row is looked up once.
        return explain(self.structure, torch.unique(index), impl=self.impl).asked_by(index.shape[0])

    def _bags(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> tuple[Bags, World]:
        """The arguments of :meth:`forward`, checked: what can be refused is refused before anything is computed."""
        if per_sample_weights is not None and not isinstance(per_sample_weights, Tensor):
            raise TypeError(f"per_sample_weights must be a tensor, got {type(per_sample_weights).__name__}.")
        if per_sample_weights is not None and self.mode != "sum":
            raise ValueError(f'per_sample_weights needs mode="sum", as in torch; this layer has mode="{self.mode}".')
        if per_sample_weights is not None and per_sample_weights.dtype != self._dtype:
            raise TypeError(f"per_sample_weights is {per_sample_weights.dtype}, the layer {self._dtype}; convert it.")
        require_integer_indices(input)
        world = world_of(input)
        return Bags.of(input, offsets, per_sample_weights, self.include_last_offset, world), world

    def _asked(self, bags: Bags, world: World) -> Asked:
        """Checked bags as what is asked of this table."""
        if world is World.EAGER:
            rest, bags = bags, bags.without_rest()
            checked_indices(rest.ids[bags.ids.shape[0] :], self.num_embeddings, world)
        return request(self.structure, self.params(), bags.ids, self.impl)._replace(
            padding_idx=self.padding_idx,
            bounds=bags.bounds,
            weights=bags.weights,
            mode=self.mode,
            by_frequency=self.scale_grad_by_freq,
        )

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f'{super().extra_repr()}, mode="{self.mode}"{last}'


def check_mode(mode: str, scale_grad_by_freq: bool) -> None:
    """A way of pooling, or an error that lists them."""
    if mode not in MODES:
        raise ValueError(f'mode={mode!r}: choose one of "sum", "mean", "max".')
    if mode == "max" and scale_grad_by_freq:
        raise ValueError('scale_grad_by_freq=True does not go with mode="max", as in torch.')
