"""Embedding tables as tensor trains, tensor rings and other structured matrices, for PyTorch."""

from tensorbed import functional, indexing, nn, structures
from tensorbed._version import __version__
from tensorbed.nn import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    LowRankEmbedding,
    LowRankEmbeddingBag,
    TREmbedding,
    TREmbeddingBag,
    TTEmbedding,
    TTEmbeddingBag,
)
from tensorbed.shapes import suggest_shape
from tensorbed.structures.dense import Dense
from tensorbed.structures.low_rank import LowRank
from tensorbed.structures.tensor_ring import TensorRing
from tensorbed.structures.tensor_train import TensorTrain

__all__ = [
    "Dense",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "LowRank",
    "LowRankEmbedding",
    "LowRankEmbeddingBag",
    "TREmbedding",
    "TREmbeddingBag",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TensorRing",
    "TensorTrain",
    "__version__",
    "functional",
    "indexing",
    "nn",
    "structures",
    "suggest_shape",
]
