"""An embedding and a head of one shape, made together."""

from __future__ import annotations

from typing import NamedTuple, Unpack

import torch

from tensorbed.checks import require_bool, require_positive
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.head import Head, scoring_std
from tensorbed.nn.options import TableOptions, options_shown
from tensorbed.structures import Format


class EmbeddingAndHead(NamedTuple):
    """Both ends of a model: ``embedding, head = tb.embedding_and_head(...)``."""

    embedding: Embedding
    head: Head

    @property
    def ratio(self) -> float:
        """As the paper counts: bytes of *one* dense table over those stored for both ends (a bias counts in both)."""
        bias = 0 if self.head.bias is None else self.head.bias.numel() * self.head.bias.element_size()
        stored = self.embedding._stored_bytes + (0 if self.head.is_tied else self.head._stored_bytes)
        return (self.embedding._dense_bytes + bias) / (stored + bias)


@options_shown
def embedding_and_head(
    num_embeddings: int,
    embedding_dim: int,
    format: Format,
    *,
    tied: bool = False,
    bias: bool = False,
    memory_budget: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: Unpack[TableOptions],
) -> EmbeddingAndHead:
    """An embedding and a head of one shape: two tables as in the paper, or one that both share.

    Args:
        num_embeddings: how many words there are, rows of the table.
        embedding_dim: how many numbers a word has, columns of the table.
        format: of both.
        tied: whether the head computes with the embedding's table, see :meth:`Head.tied_to`.
        bias, memory_budget: of the head.
        options: of the embedding, ``padding_idx`` for instance; ``std``, if given, holds for both, and one table for
            both is drawn with ``1 / sqrt(embedding_dim)`` if not. ``impl`` and ``scale_grad_by_freq`` are as in
            :class:`Embedding`.

    Example::

        >>> embedding, head = tb.embedding_and_head(10_000, 64, tb.TensorTrain(rank=16), tied=True)
        >>> words = torch.randint(0, 10_000, (2, 5))
        >>> head.loss(embedding(words), words).shape
        torch.Size([])
    """
    if require_bool(tied, "tied") and options.get("std") is None:
        options["std"] = scoring_std(require_positive(embedding_dim, "embedding_dim"))
    embedding = Embedding(num_embeddings, embedding_dim, format, device=device, dtype=dtype, **options)
    if tied:
        return EmbeddingAndHead(embedding, Head.tied_to(embedding, bias, memory_budget=memory_budget))
    sizes, std = (embedding_dim, num_embeddings), options.get("std")
    head = Head(*sizes, format, bias, std=std, memory_budget=memory_budget, device=device, dtype=dtype)
    return EmbeddingAndHead(embedding, head)
