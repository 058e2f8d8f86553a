"""Shorthands: a layer and the format of the paper, the tensor train, under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, Unpack

import torch
from torch import Tensor

from tensorbed.checks import require_bool
from tensorbed.nn.embedding import Embedding, EmbeddingBag
from tensorbed.nn.head import Head
from tensorbed.nn.options import Deviation, TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.shapes import Shape
from tensorbed.structures import Structure, Use
from tensorbed.structures.formats import DEFAULT_RANK
from tensorbed.structures.tensor_train import TensorTrain, TensorTrainMatrix


def _sizes(rank: int, **others: Any) -> dict[str, Any]:
    """The default rank gives way to another way of saying the size; one that was given, 16 too, does not."""
    given = {name: value for name, value in others.items() if value is not None}
    return given if given and rank is DEFAULT_RANK else {"rank": rank, **given}


def _general(shorthand: type[StructuredTable]) -> str:
    """The name of the layer that takes any format."""
    return next(layer.__name__ for layer in (Embedding, EmbeddingBag, Head) if issubclass(shorthand, layer))


def _check_freeze(shorthand: type[StructuredTable], freeze: object) -> None:
    """What stands where other layers have a format, or constructors a rank, is not taken for ``freeze``."""
    require_bool(
        freeze,
        "freeze",
        f"a size goes by its name, {shorthand.__name__}.from_pretrained(table, rank=16), "
        f"and a format to tb.{_general(shorthand)}.from_pretrained(table, format)",
    )


class _OfTrain(StructuredTable):
    """Layers over a tensor train and nothing else."""

    def _set_up(self, structure: Structure, *args: Any, **options: Any) -> None:
        if not isinstance(structure, TensorTrainMatrix):
            name, general = type(self).__name__, _general(type(self))
            raise TypeError(f"a {name} has a tensor train, not a {structure.kind} table; use tb.{general} for any.")
        super()._set_up(structure, *args, **options)


class TTEmbedding(_OfTrain, Embedding):
    """:class:`Embedding` over a tensor train, with the train's size in the place of a format.

    Args:
        num_embeddings, embedding_dim, padding_idx, scale_grad_by_freq, std, impl: see :class:`Embedding`.
        rank: one rank for every bond; 16 when nothing is said. Or ``ranks``, one for each bond, or ``ratio``, the
            largest rank that makes the table this many times smaller.
        order: how many cores there are.
        shape: the factors of rows and columns, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.

    Shape:
        - index: ``(*)``, int32 or int64
        - output: ``(*, embedding_dim)``

    Example::

        >>> layer = tb.TTEmbedding(25_000, 256, rank=16)
        >>> layer(torch.tensor([[0, 7], [24_999, 3]])).shape
        torch.Size([2, 2, 256])
        >>> sum(parameter.numel() for parameter in layer.parameters())
        28800
    """

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int = DEFAULT_RANK,
        *,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        format = TensorTrain(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
        super().__init__(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **options)

    @classmethod
    @options_shown
    def from_pretrained(  # type: ignore[override]
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in the layer itself.

        Example::

            >>> trained = torch.nn.Embedding(500, 64)
            >>> layer = tb.TTEmbedding.from_pretrained(trained.weight, rel_error=0.1, freeze=False)
            >>> layer.fit_error <= 0.1
            True
        """
        _check_freeze(cls, freeze)
        format = TensorTrain(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **options)


class TTEmbeddingBag(_OfTrain, EmbeddingBag):
    """:class:`EmbeddingBag` over a tensor train, with the train's size in the place of a format.

    Args:
        num_embeddings, embedding_dim, mode, include_last_offset, padding_idx, std, impl: see :class:`EmbeddingBag`.
        rank: one rank for every bond; 16 when nothing is said. Or ``ranks``, one for each bond, or ``ratio``, the
            largest rank that makes the table this many times smaller.
        order: how many cores there are.
        shape: the factors of rows and columns, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.

    Shape:
        - input: ``(bags, length)``, or ``(n,)`` with offsets ``(bags,)``
        - output: ``(bags, embedding_dim)``

    Example::

        >>> layer = tb.TTEmbeddingBag(10_000_000, 64, rank=32, mode="sum")
        >>> layer(torch.tensor([4, 9, 9_999_999, 4]), torch.tensor([0, 3])).shape
        torch.Size([2, 64])
        >>> sum(parameter.numel() for parameter in layer.parameters())
        626560
    """

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int = DEFAULT_RANK,
        *,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        format = TensorTrain(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
        bags: Any = {"mode": mode, "include_last_offset": include_last_offset}
        super().__init__(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **bags, **options)

    @classmethod
    @options_shown
    def from_pretrained(  # type: ignore[override]
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in the layer itself.

        Example::

            >>> trained = torch.nn.EmbeddingBag(500, 64)
            >>> layer = tb.TTEmbeddingBag.from_pretrained(trained.weight, ratio=4)
            >>> layer.compression_ratio >= 4
            True
        """
        _check_freeze(cls, freeze)
        format = TensorTrain(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        bags: Any = {"mode": mode, "include_last_offset": include_last_offset}
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **bags, **options)


class TTHead(_OfTrain, Head):
    """:class:`Head` over a tensor train, with the train's size in the place of a format.

    Args:
        in_features, num_classes, bias, std, impl, memory_budget: see :class:`Head`.
        rank: one rank for every bond; 16 when nothing is said. Or ``ranks``, one for each bond, or ``ratio``, the
            largest rank that makes the table this many times smaller.
        order: how many cores there are.
        shape: the factors of classes and features, ``((I_1, ..., I_N), (J_1, ..., J_N))``; by default
            ``tb.suggest_shape``.

    Shape:
        - h: ``(*, in_features)``
        - output: ``(*, num_classes)``

    Example::

        >>> head = tb.TTHead(64, 10_000, rank=16)
        >>> hidden, target = torch.randn(8, 64), torch.randint(0, 10_000, (8,))
        >>> head.loss(hidden, target).shape, head.topk(hidden, 5).indices.shape
        (torch.Size([]), torch.Size([8, 5]))
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        rank: int = DEFAULT_RANK,
        *,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        bias: bool = False,
        std: Deviation = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        format = TensorTrain(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
        head: Any = {"std": std, "impl": impl, "memory_budget": memory_budget, "device": device, "dtype": dtype}
        super().__init__(in_features, num_classes, format, bias, **head)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        order: int = 3,
        shape: Shape | None = None,
        bias: Tensor | None = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        dtype: torch.dtype | None = None,
        std: Deviation = None,
        use: Use | None = None,
    ) -> Self:
        """Fit to a trained weight by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in :class:`Head`.

        Example::

            >>> linear = torch.nn.Linear(64, 500)
            >>> head = tb.TTHead.from_pretrained(linear.weight, ratio=4, bias=linear.bias)
            >>> head(torch.randn(8, 64)).shape
            torch.Size([8, 500])
        """
        _check_freeze(cls, freeze)
        format = TensorTrain(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        head: Any = {"impl": impl, "memory_budget": memory_budget, "dtype": dtype, "std": std, "use": use}
        return super().from_pretrained(table, format, freeze, bias=bias, **head)
