"""Embedding tables as tensor trains, tensor rings and other structured matrices, for PyTorch."""

from tensorbed import functional, indexing, structures
from tensorbed import integrations as _integrations  # noqa: F401 - enters the adapters of other libraries
from tensorbed._version import __version__
from tensorbed.compress.planning import plan
from tensorbed.compress.replacing import compress_
from tensorbed.files.saving import load, save
from tensorbed.nn import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    Head,
    TTEmbedding,
    TTEmbeddingBag,
    TTHead,
    embedding_and_head,
)
from tensorbed.shapes import suggest_shape
from tensorbed.structures.bands import Bands
from tensorbed.structures.canonical_polyadic import CanonicalPolyadic
from tensorbed.structures.deep_hash import DeepHash
from tensorbed.structures.dense import Dense
from tensorbed.structures.hashed import Hashed
from tensorbed.structures.hot_rows import HotRows
from tensorbed.structures.low_rank import LowRank
from tensorbed.structures.nonlinear_train import NonlinearTrain
from tensorbed.structures.permuted import Permuted
from tensorbed.structures.product_quantized import ProductQuantized
from tensorbed.structures.quantized_rows import QuantizedRows
from tensorbed.structures.quotient_remainder import QuotientRemainder
from tensorbed.structures.straight_through import StraightThrough
from tensorbed.structures.tensor_ring import TensorRing
from tensorbed.structures.tensor_train import TensorTrain
from tensorbed.vocabulary.head_calls import linear_cross_entropy

__all__ = [
    "Bands",
    "CanonicalPolyadic",
    "DeepHash",
    "Dense",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "Hashed",
    "Head",
    "HotRows",
    "LowRank",
    "NonlinearTrain",
    "Permuted",
    "ProductQuantized",
    "QuantizedRows",
    "QuotientRemainder",
    "StraightThrough",
    "TTEmbedding",
    "TTEmbeddingBag",
    "TTHead",
    "TensorRing",
    "TensorTrain",
    "__version__",
    "compress_",
    "embedding_and_head",
    "functional",
    "indexing",
    "linear_cross_entropy",
    "load",
    "plan",
    "save",
    "structures",
    "suggest_shape",
]
