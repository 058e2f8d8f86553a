"""``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over any structure."""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from tensorbed.backends.pooling import MODES, Bags
from tensorbed.checks import require_bool, require_integer_indices
from tensorbed.dispatch import Asked, World, checked_indices, world_of
from tensorbed.functional import explain, lookup, pooled, request
from tensorbed.nn.options import TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.structures import Explanation, Format, Use


class Embedding(StructuredTable):
    r"""A lookup table kept as a structured matrix, with the arguments and behaviour of ``torch.nn.Embedding``.

    A row is computed from the structure's few numbers; the table never exists. For a tensor train,

    .. math:: E[i, (j_1 \dots j_N)] = G^{(1)}[i_1, j_1] \, G^{(2)}[i_2, j_2] \cdots G^{(N)}[i_N, j_N]

    where :math:`(i_1, \dots, i_N)` are the digits of :math:`i`, first slowest (eq. 2 of the paper).

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns of the table.
        format: for instance ``tb.TensorTrain(rank=16)`` or ``tb.LowRank(ratio=8)``.
        padding_idx: a row that is constant (zero at birth, see ``padding_row``) and gets no gradient.
        scale_grad_by_freq: divide each row's gradient by how often the batch holds it.
        std: standard deviation of the table at birth, by default 0.3; ``"glorot"`` is ``sqrt(2 / (I + J))``.
        impl: the backend that computes rows; ``"auto"`` chooses, ``"reference"`` is plain PyTorch.
        max_norm, norm_type, sparse: accepted as in torch; ``max_norm`` and ``sparse=True`` raise.

    Shape:
        - index: ``(*)``, int32 or int64
        - output: ``(*, embedding_dim)``

    Example::

        >>> layer = tb.Embedding(25000, 256, tb.TensorTrain(rank=16))
        >>> layer(torch.tensor([[0, 7], [24999, 3]])).shape
        torch.Size([2, 2, 256])
    """

    def forward(self, index: Tensor) -> Tensor:  # (*) -> (*, embedding_dim)
        return lookup(
            self.structure,
            self.params(),
            index,
            impl=self.impl,
            padding_idx=self.padding_idx,
            padding_row=None if self.padding_idx is None else self.padding_row,
            scale_grad_by_freq=self.scale_grad_by_freq,
        )

    def explain(self, index: Tensor) -> Explanation:  # (*)
        """What :meth:`forward` would do with these indices, counted and not done: ``print(layer.explain(index))``."""
        return explain(self.structure, index, impl=self.impl)

    @classmethod
    @options_shown
    def from_pretrained(
        cls,
        table: Tensor,
        format: Format,
        freeze: bool = True,
        *,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit a format to a trained table.

        Args:
            table: ``(num_embeddings, embedding_dim)``, finite.
            format: to a rank, a ratio, or an error: ``tb.TensorTrain(rel_error=0.1)``.
            freeze: as in torch, the tensors do not require gradients unless ``freeze=False``.
            dtype: of the layer, by default the table's.
            use: how the table is used, where that is known (``tb.structures.Use``): errors are weighed by it.

        The relative Frobenius error that was reached is in ``fit_error``.
        """
        return cls._fitted(table, format, freeze, dtype, use, **options)


class ScaledEmbedding(Embedding):
    """Rows times a constant, ``embed_scale``, as some models multiply theirs by ``sqrt(embedding_dim)``.

    Where it was a tensor it is rounded to the dtype of the rows (``rounds_scale``), as a number it is not.
    """

    embed_scale: float = 1.0
    rounds_scale: bool = False

    def forward(self, index: Tensor) -> Tensor:  # (*) -> (*, embedding_dim)
        rows = super().forward(index)
        if self.rounds_scale:
            return rows * torch.tensor(self.embed_scale, dtype=rows.dtype, device=rows.device)
        return rows * self.embed_scale


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
