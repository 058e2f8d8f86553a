"""Samples of every registered structure for the conformance suite.

The first of each is the one for laws that do not depend on sizes: small, with what is odd about its structure.
"""

from others import Packed

from tensorbed import (
    Bands,
    CanonicalPolyadic,
    DeepHash,
    Dense,
    Hashed,
    HotRows,
    LowRank,
    NonlinearTrain,
    Permuted,
    ProductQuantized,
    QuantizedRows,
    QuotientRemainder,
    StraightThrough,
    TensorRing,
    TensorTrain,
)
from tensorbed.testing import Sample

SAMPLES = {
    "canonical_polyadic": [
        Sample(CanonicalPolyadic(rank=3, shape=((4, 5, 6), (2, 3, 4))), 101, 24),  # padded vocabulary
        Sample(CanonicalPolyadic(rank=5, order=4), 1999, 48),
    ],
    "dense": [Sample(Dense(), 97, 12), Sample(Dense(), 5, 1)],
    "low_rank": [
        Sample(LowRank(rank=2), 50, 13),
        Sample(LowRank(rank=3), 997, 64),
        Sample(LowRank(rank=1), 997, 96),
        Sample(LowRank(rank=9), 31, 7),  # more rank than the table can use
    ],
    "nonlinear_train": [
        Sample(NonlinearTrain(rank=3, activation="tanh", shape=((4, 5, 6), (2, 3, 4))), 101, 24),
        Sample(NonlinearTrain(rank=4, order=4), 1999, 48),
    ],
    "quantized_rows": [
        Sample(QuantizedRows(bits=4, group=5), 60, 13),  # an odd number of columns, groups that do not divide it
        Sample(QuantizedRows(), 997, 64),
        Sample(QuantizedRows(bits=4), 1999, 48),
        Sample(QuantizedRows(bits=8, group=4), 31, 6),
    ],
    "product_quantized": [
        Sample(ProductQuantized(parts=6, rotate=True), 97, 12),  # fewer rows than a byte can name
        Sample(ProductQuantized(parts=8), 1999, 48),
        Sample(ProductQuantized(), 500, 13),  # a prime dimension: one part
        Sample(ProductQuantized(ratio=2), 700, 12),
    ],
    "hot_rows": [
        Sample(HotRows(), 1999, 48),
        Sample(HotRows(share=0.5, hot=LowRank(rank=2), rest=ProductQuantized(parts=2)), 60, 6),
        Sample(HotRows(share=0.01, hot=Dense()), 31, 7),  # one hot row
    ],
    "bands": [
        Sample(Bands(((9, Dense()), (30, LowRank(rank=2)), (None, TensorTrain(rank=2)))), 60, 6),
        Sample(Bands(), 1999, 48),
        # Compositions in a composition, in an order of their own.
        Sample(
            Bands(
                (
                    (20, Permuted(LowRank(rank=2), order=[(7 * row + 3) % 20 for row in range(20)])),
                    (None, HotRows(share=0.4, hot=Dense(), rest=LowRank(rank=1))),
                )
            ),
            60,
            6,
        ),
    ],
    "permuted": [
        Sample(Permuted(TensorTrain(rank=4), order=[(7 * row + 3) % 60 for row in range(60)]), 60, 12),
        Sample(Permuted(QuantizedRows(bits=4)), 1999, 48),
    ],
    "straight_through": [
        Sample(StraightThrough(bits=4, group=5), 60, 13),
        Sample(StraightThrough(), 997, 64),
    ],
    "straight_through_tensors": [
        Sample(StraightThrough(LowRank(rank=5), bits=4, group=3), 60, 13),  # one tensor has a row for each
        Sample(StraightThrough(TensorTrain(rank=3)), 1999, 48),
    ],
    "quantized_tensors": [
        Sample(Packed(StraightThrough(LowRank(rank=5), bits=4, group=3)), 60, 13),
        Sample(Packed(StraightThrough(TensorTrain(rank=3))), 1999, 48),
    ],
    "tensor_train": [
        Sample(TensorTrain(ranks=(2, 7), shape=((4, 5, 6), (2, 3, 4))), 101, 24),  # padded vocabulary
        Sample(TensorTrain(rank=3), 1999, 48),
        Sample(TensorTrain(rank=1, order=2), 60, 6),
        Sample(TensorTrain(rank=5, order=2), 97, 24),
        Sample(TensorTrain(rank=4, order=4), 500, 16),
        Sample(TensorTrain(ranks=(1, 3, 1, 2), order=5), 300, 32),
        Sample(TensorTrain(rank=4, shape=((2, 2, 2, 2, 3, 2), (2, 1, 2, 1, 3, 2))), 91, 24),  # R_1 above 2 x 2
        Sample(TensorTrain(rank=3, shape=((5, 4, 5), (1, 13, 1))), 96, 13),  # a prime dimension
    ],
    "tensor_ring": [
        Sample(TensorRing(ranks=(3, 2, 5), shape=((4, 5, 6), (2, 3, 4))), 101, 24),
        Sample(TensorRing(rank=2), 1999, 48),
        Sample(TensorRing(rank=1, order=2), 60, 6),
        Sample(TensorRing(rank=2, order=2), 97, 24),
        Sample(TensorRing(rank=2, order=4), 500, 16),
        Sample(TensorRing(ranks=(2, 1, 3, 1, 2), order=5), 300, 32),
        Sample(TensorRing(rank=2, shape=((2, 2, 2, 2, 3, 2), (2, 1, 2, 1, 3, 2))), 91, 24),
        Sample(TensorRing(rank=2, shape=((5, 4, 5), (1, 13, 1))), 96, 13),
    ],
    "hashed": [
        Sample(Hashed(buckets=7, hashes=2, signed=True), 60, 13),
        Sample(Hashed(ratio=64), 1999, 48),
    ],
    "quotient_remainder": [
        Sample(QuotientRemainder(buckets=8, combine="add"), 60, 13),  # a last quotient of four remainders
        Sample(QuotientRemainder(), 1999, 48),
        Sample(QuotientRemainder(buckets=60, combine="concat"), 1999, 47),
    ],
    "deep_hash": [
        Sample(DeepHash(hashes=5, hidden=7), 60, 13),
        Sample(DeepHash(hashes=8, ratio=64, layers=1), 1999, 48),
    ],
}
