"""``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over any structure."""

from __future__ import annotations

from typing import Self, Unpack

import torch
from torch import Tensor

from tensorbed.checks import require_bool
from tensorbed.functional import Pooling, bags, check_mode, explain, explain_bags, lookup, request_bags
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
        """Look up rows: ``layer.weight[index]`` without the table.

        An index outside ``[0, num_embeddings)`` raises ``IndexError``.

        Shape:
            - index: ``(*)``, int32 or int64
            - output: ``(*, embedding_dim)``
        """
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
        """What :meth:`forward` would do with these indices, counted from them alone: no row is computed.

        Example::

            >>> layer = tb.Embedding(25_000, 256, tb.TensorTrain(rank=16))
            >>> print(layer.explain(torch.arange(1000).repeat(3)))
            tensor_train, 25,000 x 256, shape=(35, 19, 38) x (8, 4, 8), ranks=(16, 16)
              indices                             3,000
              unique rows                         1,000  3.0x fewer
              ...
        """
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
        """Fit a format to a trained table. The relative error that was reached is in ``fit_error``.

        Args:
            table: the trained table, all of its numbers finite.
            format: to a rank, a ratio, or an error: ``tb.TensorTrain(rel_error=0.1)``.
            freeze: as in torch, the tensors do not require gradients unless ``freeze=False``.
            dtype: of the layer, by default the table's.
            use: how the table is used, where that is known (``tb.structures.Use``): errors are weighed by it.
            options: the others of the layer, ``padding_idx`` for instance.

        Shape:
            - table: ``(num_embeddings, embedding_dim)``

        Example::

            >>> trained = torch.nn.Embedding(4096, 64)
            >>> layer = tb.Embedding.from_pretrained(trained.weight, tb.QuantizedRows(bits=8))
            >>> layer.fit_error < 0.01
            True
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
        num_embeddings, embedding_dim, format, padding_idx, scale_grad_by_freq, std, impl: see :class:`Embedding`.
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
        """Fit a format to a trained table, with the arguments of :meth:`Embedding.from_pretrained` and of the layer.

        Example::

            >>> trained = torch.nn.EmbeddingBag(4096, 64, mode="sum")
            >>> layer = tb.EmbeddingBag.from_pretrained(trained.weight, tb.QuantizedRows(bits=8), mode="sum")
            >>> layer(torch.tensor([[4, 9], [4095, 4]])).shape
            torch.Size([2, 64])
        """
        check_mode(mode, options.get("scale_grad_by_freq", False))
        require_bool(include_last_offset, "include_last_offset")
        layer = cls._fitted(table, format, freeze, dtype, use, **options)
        layer.mode, layer.include_last_offset = mode, include_last_offset
        return layer

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:  # (bags, length) or (n,) -> (bags, embedding_dim)
        """Pool bags of rows.

        Shape:
            - input: ``(bags, length)``, or ``(n,)`` with ``offsets``; int32 or int64
            - offsets: ``(bags,)``, where each bag begins, or ``(bags + 1,)`` with ``include_last_offset``
            - per_sample_weights: like input, with ``mode="sum"`` only
            - output: ``(bags, embedding_dim)``
        """
        return bags(self.structure, self.params(), self._pooling, input, offsets, per_sample_weights)

    def explain(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Explanation:
        """What :meth:`forward` would do with these bags, counted from the indices alone: no row is computed."""
        bags = request_bags(self.structure, self.params(), self._pooling, input, offsets, per_sample_weights)
        return explain_bags(*bags)

    @property
    def _pooling(self) -> Pooling:
        return Pooling(self.mode, self.include_last_offset, self.padding_idx, self.scale_grad_by_freq, self.impl)

    def extra_repr(self) -> str:
        last = ", include_last_offset=True" if self.include_last_offset else ""
        return f'{super().extra_repr()}, mode="{self.mode}"{last}'
