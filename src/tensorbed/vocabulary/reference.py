"""The plain twins: all logits at once, in differentiable PyTorch, for any device, transform or export."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.functional import project
from tensorbed.vocabulary.loss import Asked, working_dtype
from tensorbed.vocabulary.scorer import Vocabulary

_NOWHERE = -(2**62)  # no target has it


def logits(vocabulary: Vocabulary, x: Tensor) -> Tensor:  # (*, cols) -> (*, rows)
    """Scores of every row, with the padding row in its place and the bias."""
    structure = vocabulary.structure
    scores = project(structure, structure.named(vocabulary.tensors), x)
    if vocabulary.padding_row is not None:
        at = torch.tensor([vocabulary.padding_idx], device=scores.device)
        padding = vocabulary.padding_row.to(dtype=x.dtype, device=x.device)
        scores = scores.index_copy(-1, at, (x @ padding)[..., None].to(scores.dtype))
    return scores if vocabulary.bias is None else scores + vocabulary.bias.to(scores.dtype)


def cross_entropy(asked: Asked) -> Tensor:
    """The loss of :mod:`tensorbed.vocabulary.loss` from all logits, by PyTorch's own."""
    options, vocabulary = asked.options, asked.vocabulary
    dtype = working_dtype(asked.x, *vocabulary.tensors)
    scores = logits(vocabulary, asked.x).to(dtype)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    ignored = _NOWHERE if options.ignore_index is None else options.ignore_index
    weight = None if asked.class_weight is None else asked.class_weight.to(dtype)
    loss = F.cross_entropy(
        scores,
        asked.target,
        weight,
        ignore_index=ignored,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    if not options.z_loss:
        return loss
    counted = asked.target != ignored
    z_loss = options.z_loss * torch.where(counted, torch.logsumexp(scores, -1).square(), 0)
    if options.reduction == "none":
        return loss + z_loss
    return loss + (z_loss.sum() if options.reduction == "sum" else z_loss.sum() / counted.sum())
