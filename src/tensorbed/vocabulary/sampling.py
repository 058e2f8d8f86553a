"""The best rows for a vector, and rows drawn by their probability, without all scores at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tensorbed.dispatch import full_precision
from tensorbed.vocabulary.scorer import Scorer, Vocabulary


class TopK(NamedTuple):
    """As ``torch.topk`` returns them: the largest first.

    Shape:
        - values, indices: ``(*, k)``
    """

    values: Tensor
    indices: Tensor


@torch.no_grad()
def topk(
    vocabulary: Vocabulary,
    x: Tensor,
    k: int,
    memory_budget: int | None,
    softcap: float | None = None,
    changed: Callable[[Tensor], Tensor] | None = None,
) -> TopK:  # (n, cols)
    """The ``k`` largest scores of each vector, or of what ``changed`` makes of some of them, ``(n, rows)``."""
    best = TopK(x.new_empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device))
    with full_precision(x):
        # In single precision under autocast too: rounded scores have ties, which the first class would win.
        single = x.detach().to(vocabulary.dtype(x))
        scorer = Scorer(vocabulary.detached(), single, memory_budget, softcap, whole=True)
        buffer = scorer.buffer()
        for group in scorer.groups():
            found: tuple[Tensor, Tensor] | None = None
            for start, tile in scorer.tiles(group, buffer, by_vector=True):
                scores = scorer.cap_(tile).T
                found = _merged(found, scores if changed is None else changed(scores), start, k)
            if found is not None:
                best.values[group.at], best.indices[group.at] = found[0], scorer.row(found[1])
    return best


def _merged(found: tuple[Tensor, Tensor] | None, scores: Tensor, start: int, k: int) -> tuple[Tensor, Tensor]:
    """The best of those found before, and of a block of scores ``(n, rows)`` that begins at this row."""
    values, indices = torch.topk(scores, min(k, scores.shape[1]), dim=1)
    indices += start
    if found is None:
        return values, indices
    values, indices = torch.cat([found[0], values], 1), torch.cat([found[1], indices], 1)
    values, places = torch.topk(values, min(k, values.shape[1]), dim=1)
    return values, indices.gather(1, places)


@torch.no_grad()
def drawn(values: Tensor, indices: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One of the indices by its score, the largest first: ``(*, k) -> (*)``."""
    if temperature == 0:
        return indices[..., 0]
    return indices.gather(-1, with_noise(values, temperature, generator).argmax(-1, keepdim=True))[..., 0]


def with_noise(scores: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """With Gumbel noise, the largest is drawn by ``softmax(scores / temperature)``; dividing by that may overflow."""
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return scores - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_().mul_(temperature)
