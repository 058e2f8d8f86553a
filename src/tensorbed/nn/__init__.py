"""Layers: drop-in replacements for ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over any structure."""

from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.collection import EmbeddingBagCollection, Pooled
from tensorbed.nn.embedding import Embedding
from tensorbed.nn.named import (
    LowRankEmbedding,
    LowRankEmbeddingBag,
    TREmbedding,
    TREmbeddingBag,
    TTEmbedding,
    TTEmbeddingBag,
)

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "LowRankEmbedding",
    "LowRankEmbeddingBag",
    "Pooled",
    "TREmbedding",
    "TREmbeddingBag",
    "TTEmbedding",
    "TTEmbeddingBag",
]
