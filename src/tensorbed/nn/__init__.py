"""Layers: drop-in replacements for ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` over any structure."""

from tensorbed.nn.collection import EmbeddingBagCollection, KeyedPooled, Pooled
from tensorbed.nn.embedding import Embedding, EmbeddingBag
from tensorbed.nn.head import EmbeddingAndHead, Head, embedding_and_head
from tensorbed.nn.shorthands import TTEmbedding, TTEmbeddingBag, TTHead

__all__ = [
    "Embedding",
    "EmbeddingAndHead",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "Head",
    "KeyedPooled",
    "Pooled",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTHead",
    "embedding_and_head",
]
