"""Shorthands: a layer and a format under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor

from tensorbed.checks import require_bool
from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.head import Head
from tensorbed.nn.options import Deviation, TableOptions, options_shown
from tensorbed.nn.table import StructuredTable
from tensorbed.shapes import Shape
from tensorbed.structures import Structure, Use
from tensorbed.structures.formats import DEFAULT_RANK
from tensorbed.structures.low_rank import LowRank, LowRankMatrix
from tensorbed.structures.tensor_ring import TensorRing
from tensorbed.structures.tensor_train import TensorTrain


def _sizes(rank: int, **others: Any) -> dict[str, Any]:
    """The default rank gives way to another way of saying the size; one that was given, 16 too, does not."""
    given = {name: value for name, value in others.items() if value is not None}
    return given if given and rank is DEFAULT_RANK else {"rank": rank, **given}


def _check_freeze(shorthand: type[StructuredTable], freeze: object) -> None:
    """What stands where other layers have a format, or constructors a rank, is not taken for ``freeze``."""
    general = next(layer.__name__ for layer in (Embedding, EmbeddingBag, Head) if issubclass(shorthand, layer))
    require_bool(
        freeze,
        "freeze",
        f"a size goes by its name, {shorthand.__name__}.from_pretrained(table, rank=16), "
        f"and a format to tb.{general}.from_pretrained(table, format)",
    )


class _OfChain(StructuredTable):
    """Layers over a chain of cores."""

    _format: ClassVar[type[TensorTrain] | type[TensorRing]]

    @classmethod
    def _structure(cls) -> type[Structure]:
        return cls._format.structure


class _ChainedEmbedding(_OfChain, Embedding):
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
        format = self._format(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
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

            >>> layer = tb.TTEmbedding.from_pretrained(old.weight, rel_error=0.1)
            >>> layer.fit_error <= 0.1
            True
        """
        _check_freeze(cls, freeze)
        format = cls._format(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **options)


class _ChainedEmbeddingBag(_OfChain, EmbeddingBag):
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
        format = self._format(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
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
        """Fit to a trained table by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in the layer."""
        _check_freeze(cls, freeze)
        format = cls._format(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        bags: Any = {"mode": mode, "include_last_offset": include_last_offset}
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **bags, **options)


class _LowRanked(StructuredTable):
    """Layers over ``U @ V.T``."""

    @classmethod
    def _structure(cls) -> type[Structure]:
        return LowRankMatrix


class LowRankEmbedding(_LowRanked, Embedding):
    """:class:`Embedding` over ``U @ V.T``."""

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int = DEFAULT_RANK,
        *,
        ratio: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        format = LowRank(**_sizes(rank, ratio=ratio))
        super().__init__(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **options)

    @classmethod
    @options_shown
    def from_pretrained(  # type: ignore[override]
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ratio`` or ``rel_error``; the rest as in the layer itself."""
        _check_freeze(cls, freeze)
        format = LowRank(rank=rank, ratio=ratio, rel_error=rel_error)
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **options)


class LowRankEmbeddingBag(_LowRanked, EmbeddingBag):
    """:class:`EmbeddingBag` over ``U @ V.T``."""

    @options_shown
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int = DEFAULT_RANK,
        *,
        ratio: float | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        format = LowRank(**_sizes(rank, ratio=ratio))
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
        ratio: float | None = None,
        rel_error: float | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        use: Use | None = None,
        **options: Unpack[TableOptions],
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ratio`` or ``rel_error``; the rest as in the layer itself."""
        _check_freeze(cls, freeze)
        format = LowRank(rank=rank, ratio=ratio, rel_error=rel_error)
        bags: Any = {"mode": mode, "include_last_offset": include_last_offset}
        return super().from_pretrained(table, format, freeze, dtype=dtype, use=use, **bags, **options)


class _NamedHead(Head):
    """A head of one kind is tied to tables of that kind."""

    @classmethod
    def tied_to(
        cls, embedding: StructuredTable, bias: bool = False, *, impl: str = "auto", memory_budget: int | None = None
    ) -> Self:
        """See :meth:`Head.tied_to`; the embedding's table is of this kind."""
        structure = getattr(embedding, "structure", None)
        if structure is not None and not isinstance(structure, cls._structure()):  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__}.tied_to a {structure.kind} table; use tb.Head.tied_to for any.")
        return super().tied_to(embedding, bias, impl=impl, memory_budget=memory_budget)


class _ChainedHead(_OfChain, _NamedHead):
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
        format = self._format(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
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
        """Fit to a trained weight by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in :class:`Head`."""
        _check_freeze(cls, freeze)
        format = cls._format(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        head: Any = {"impl": impl, "memory_budget": memory_budget, "dtype": dtype, "std": std, "use": use}
        return super().from_pretrained(table, format, freeze, bias=bias, **head)


class LowRankHead(_LowRanked, _NamedHead):
    """:class:`Head` over ``U @ V.T``."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        rank: int = DEFAULT_RANK,
        *,
        ratio: float | None = None,
        bias: bool = False,
        std: Deviation = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        format = LowRank(**_sizes(rank, ratio=ratio))
        head: Any = {"std": std, "impl": impl, "memory_budget": memory_budget, "device": device, "dtype": dtype}
        super().__init__(in_features, num_classes, format, bias, **head)

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        bias: Tensor | None = None,
        impl: str = "auto",
        memory_budget: int | None = None,
        dtype: torch.dtype | None = None,
        std: Deviation = None,
        use: Use | None = None,
    ) -> Self:
        """Fit to a trained weight by ``rank``, ``ratio`` or ``rel_error``; the rest as in :class:`Head`."""
        _check_freeze(cls, freeze)
        format = LowRank(rank=rank, ratio=ratio, rel_error=rel_error)
        head: Any = {"impl": impl, "memory_budget": memory_budget, "dtype": dtype, "std": std, "use": use}
        return super().from_pretrained(table, format, freeze, bias=bias, **head)


class TTEmbedding(_ChainedEmbedding):
    """:class:`Embedding` over a tensor train: ``tb.TTEmbedding(25000, 256, rank=16)``, or ``ratio=``, ``ranks=``."""

    _format = TensorTrain


class TREmbedding(_ChainedEmbedding):
    """:class:`Embedding` over a tensor ring."""

    _format = TensorRing


class TTEmbeddingBag(_ChainedEmbeddingBag):
    """:class:`EmbeddingBag` over a tensor train."""

    _format = TensorTrain


class TREmbeddingBag(_ChainedEmbeddingBag):
    """:class:`EmbeddingBag` over a tensor ring."""

    _format = TensorRing


class TTHead(_ChainedHead):
    """:class:`Head` over a tensor train: ``tb.TTHead(512, 267735, rank=16)``.

    ``shape`` is that of the table, ``((vocabulary factors), (feature factors))``.
    """

    _format = TensorTrain


class TRHead(_ChainedHead):
    """:class:`Head` over a tensor ring."""

    _format = TensorRing
