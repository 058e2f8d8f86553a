"""Shorthands: a layer and a format under one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from tensorbed.checks import require_bool
from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.shapes import Shape
from tensorbed.structures import Structure
from tensorbed.structures.formats import DEFAULT_RANK
from tensorbed.structures.low_rank import LowRank, LowRankMatrix
from tensorbed.structures.tensor_ring import TensorRing
from tensorbed.structures.tensor_train import TensorTrain


class _OfChain(StructuredTable):
    """Layers over a chain of cores: how they are fitted, and to what a head of that kind is tied."""

    _format: ClassVar[type[TensorTrain] | type[TensorRing]]

    @classmethod
    def from_pretrained(
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
        **options: Any,
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ranks``, ``ratio`` or ``rel_error``; the rest as in the layer itself.

        Example::

            >>> layer = tb.TTEmbedding.from_pretrained(old.weight, rel_error=0.1)
            >>> layer.fit_error <= 0.1
            True
        """
        _check_freeze(cls, freeze)
        format = cls._format(rank=rank, ranks=ranks, ratio=ratio, rel_error=rel_error, order=order, shape=shape)
        layer: Self = super().from_pretrained(table, format, freeze, **options)  # type: ignore[misc]
        return layer

    @classmethod
    def _structure(cls) -> type[Structure]:
        return cls._format.structure


class _OfLowRank(StructuredTable):
    """Layers over ``U @ V.T``."""

    @classmethod
    def from_pretrained(
        cls,
        table: Tensor,
        freeze: bool = True,
        *,
        rank: int | None = None,
        ratio: float | None = None,
        rel_error: float | None = None,
        **options: Any,
    ) -> Self:
        """Fit to a trained table by ``rank``, ``ratio`` or ``rel_error``; the rest as in the layer itself."""
        _check_freeze(cls, freeze)
        format = LowRank(rank=rank, ratio=ratio, rel_error=rel_error)
        layer: Self = super().from_pretrained(table, format, freeze, **options)  # type: ignore[misc]
        return layer

    @classmethod
    def _structure(cls) -> type[Structure]:
        return LowRankMatrix


def _check_freeze(shorthand: type[StructuredTable], freeze: object) -> None:
    """What stands where other layers have a format, or constructors a rank, is not taken for ``freeze``."""
    general = next(layer.__name__ for layer in (Embedding, EmbeddingBag, Head) if issubclass(shorthand, layer))
    require_bool(
        freeze,
        "freeze",
        f"a size goes by its name, {shorthand.__name__}.from_pretrained(table, rank=16), "
        f"and a format to tb.{general}.from_pretrained(table, format)",
    )


class _Chained(_OfChain):
    """Constructor of tables over a chain of cores."""

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
        **options: Any,
    ) -> None:
        format = self._format(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
        super().__init__(num_embeddings, embedding_dim, format, **options)


class _LowRanked(_OfLowRank):
    """Constructor of tables over ``U @ V.T``."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rank: int = DEFAULT_RANK,
        *,
        ratio: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, LowRank(**_sizes(rank, ratio=ratio)), **options)


class _NamedHead(Head):
    """A head of one kind is tied to tables of that kind."""

    @classmethod
    def tied_to(cls, embedding: StructuredTable, bias: bool = False, **options: Any) -> Self:
        """See :meth:`Head.tied_to`; the embedding's table is of this kind."""
        structure = getattr(embedding, "structure", None)
        if structure is not None and not isinstance(structure, cls._structure()):  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__}.tied_to a {structure.kind} table; use tb.Head.tied_to for any.")
        return super().tied_to(embedding, bias, **options)


class _ChainedHead(_OfChain, _NamedHead):  # type: ignore[misc]
    """Constructor of heads over a chain of cores."""

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
        **options: Any,
    ) -> None:
        format = self._format(**_sizes(rank, ranks=ranks, ratio=ratio), order=order, shape=shape)
        Head.__init__(self, in_features, num_classes, format, bias, **options)


class TTHead(_ChainedHead):
    """:class:`Head` over a tensor train: ``tb.TTHead(512, 267735, rank=16)``.

    ``shape`` is that of the table, ``((vocabulary factors), (feature factors))``.
    """

    _format = TensorTrain


class TRHead(_ChainedHead):
    """:class:`Head` over a tensor ring."""

    _format = TensorRing


class LowRankHead(_OfLowRank, _NamedHead):  # type: ignore[misc]
    """:class:`Head` over ``U @ V.T``."""

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        rank: int = DEFAULT_RANK,
        *,
        ratio: float | None = None,
        bias: bool = False,
        **options: Any,
    ) -> None:
        Head.__init__(self, in_features, num_classes, LowRank(**_sizes(rank, ratio=ratio)), bias, **options)


def _sizes(rank: int, **others: Any) -> dict[str, Any]:
    """The default rank gives way to another way of saying the size; one that was given, 16 too, does not."""
    given = {name: value for name, value in others.items() if value is not None}
    return given if given and rank is DEFAULT_RANK else {"rank": rank, **given}


class TTEmbedding(_Chained, Embedding):  # type: ignore[misc]
    """:class:`Embedding` over a tensor train: ``tb.TTEmbedding(25000, 256, rank=16)``, or ``ratio=``, ``ranks=``."""

    _format = TensorTrain


class TREmbedding(_Chained, Embedding):  # type: ignore[misc]
    """:class:`Embedding` over a tensor ring."""

    _format = TensorRing


class LowRankEmbedding(_LowRanked, Embedding):  # type: ignore[misc]
    """:class:`Embedding` over ``U @ V.T``."""


class TTEmbeddingBag(_Chained, EmbeddingBag):  # type: ignore[misc]
    """:class:`EmbeddingBag` over a tensor train."""

    _format = TensorTrain


class TREmbeddingBag(_Chained, EmbeddingBag):  # type: ignore[misc]
    """:class:`EmbeddingBag` over a tensor ring."""

    _format = TensorRing


class LowRankEmbeddingBag(_LowRanked, EmbeddingBag):  # type: ignore[misc]
    """:class:`EmbeddingBag` over ``U @ V.T``."""
