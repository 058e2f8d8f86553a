"""Words of texts, numbered by how frequent they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

UNKNOWN = "<unk>"


def numbering() -> defaultdict[str, int]:
    """A number for each word that is asked for, in this order: millions of equal strings need not be kept."""
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    return numbers


def choose_words(counts: Mapping[str, int], size: int, first: Sequence[str] = (UNKNOWN,)) -> tuple[str, ...]:
    """Some words that are always there and the most frequent ones, ``size`` in all; equally frequent ones by name."""
    ranked = sorted((word for word in counts if word not in first), key=lambda word: (-counts[word], word))
    return (*first, *ranked[: max(size - len(first), 0)])


def places(numbers: Iterable[str], words: Sequence[str]) -> list[int]:
    """Where each numbered word stands among those that were chosen; all others are unknown."""
    place = {word: k for k, word in enumerate(words)}
    return [place.get(word, place[UNKNOWN]) for word in numbers]


def log_frequencies(stream: Tensor, words: int) -> Tensor:  # (tokens,) -> (words,)
    """Log of each word's share of the tokens; half a sighting keeps absent words finite."""
    counts = torch.bincount(stream, minlength=words).double() + 0.5
    return (counts / counts.sum()).log().float()
