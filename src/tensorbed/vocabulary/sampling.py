"""The best rows for a vector, and rows drawn by their probability, without all scores at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorbed.dispatch import full_precision, working_dtype
from tensorbed.vocabulary.logits import scorer_of
from tensorbed.vocabulary.scorer import Vocabulary


class TopK(NamedTuple):
    """As ``torch.topk`` returns them: the largest first.

    Shape:
        - values, indices: ``(*, k)``
    """

    values: Tensor
    indices: Tensor


@torch.no_grad()
def topk(vocabulary: Vocabulary, x: Tensor, k: int, memory_budget: int | None) -> TopK:  # (n, cols)
    """The ``k`` largest scores of each vector."""
    best = TopK(x.new_empty(x.shape[0], k), torch.empty(x.shape[0], k, dtype=torch.int64, device=x.device))
    with full_precision(x):
        scorer = scorer_of(vocabulary.detached(), x.detach(), memory_budget)
        buffer = scorer.buffer()
        for group in scorer.groups():
            found: tuple[Tensor, Tensor] | None = None
            for start, _, tile in scorer.tiles(group, buffer, by_vector=True):
                found = _merged(found, tile.T, start, k)
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
def sample(
    vocabulary: Vocabulary,
    x: Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    softcap: float | None,
    memory_budget: int | None,
) -> Tensor:  # (n, cols) -> (n,)
    """One row for each vector, drawn with the probability ``softmax(scores / temperature)`` gives it.

    The largest of scores with Gumbel noise is such a draw, so that no sum over all rows is needed. Temperature 0 takes
    the largest score itself.
    """
    if temperature == 0:
        return topk(vocabulary, x, 1, memory_budget).indices[:, 0]
    if top_k is not None:
        values, indices = topk(vocabulary, x, top_k, memory_budget)
        values = values.to(working_dtype(values))
        if softcap is not None:
            values = softcap * torch.tanh(values / softcap)
        chosen = _with_noise(values, temperature, generator).argmax(1, keepdim=True)
        return indices.gather(1, chosen)[:, 0]
    chosen = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    with full_precision(x):
        scorer = scorer_of(vocabulary.detached(), x.detach(), memory_budget, softcap=softcap)
        buffer = scorer.buffer()
        for group in scorer.groups():
            found: tuple[Tensor, Tensor] | None = None
            for start, _, tile in scorer.tiles(group, buffer, by_vector=True):
                found = _merged(found, _with_noise(tile.T, temperature, generator), start, 1)
            if found is not None:
                chosen[group.at] = scorer.row(found[1][:, 0])
    return chosen


def _with_noise(scores: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Scores with Gumbel noise of this temperature, which may be so small that dividing by it would overflow."""
    noise = torch.empty_like(scores).exponential_(generator=generator)
    return scores - noise.clamp_min_(torch.finfo(noise.dtype).tiny).log_().mul_(temperature)


def drawn(scores: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One of all scores ``(*, rows)``: the plain twin of :func:`sample`."""
    values, indices = torch.topk(scores, scores.shape[-1] if top_k is None else top_k)
    if temperature == 0:
        return indices[..., 0]
    return indices.gather(-1, _with_noise(values, temperature, generator).argmax(-1, keepdim=True))[..., 0]
