"""The plain twins: all logits at once, in differentiable PyTorch, for any device, transform or export."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.rows import scores_of_rows
from tensorbed.vocabulary.loss import Asked
from tensorbed.vocabulary.scorer import Vocabulary

_NOWHERE = -(2**62)  # no target has it


def logits(vocabulary: Vocabulary, x: Tensor) -> Tensor:  # (*, cols) -> (*, rows)
    """Scores of every row in the dtype of the vectors."""
    return scores(vocabulary, x).to(x.dtype)


def scores(vocabulary: Vocabulary, x: Tensor) -> Tensor:  # (*, cols) -> (*, rows)
    """Scores of every row, with the padding row in its place and the bias; of half precision in single."""
    structure, dtype = vocabulary.structure, vocabulary.dtype(x)
    x = x.to(dtype)
    p = structure.widened(structure.named(vocabulary.tensors), x)
    made = scores_of_rows(structure, p, x, 0, structure.rows, "reference")
    if vocabulary.padding_row is not None:
        at = torch.tensor([vocabulary.padding_idx], device=made.device)
        padding = vocabulary.padding_row.to(dtype=dtype, device=x.device)
        made = made.index_copy(-1, at, (x @ padding)[..., None].to(dtype))
    return made if vocabulary.bias is None else made + vocabulary.bias.to(dtype)


def cross_entropy(asked: Asked) -> Tensor:
    """The loss of :mod:`tensorbed.vocabulary.loss` from all logits, by PyTorch's own."""
    options, vocabulary = asked.options, asked.vocabulary
    made = scores(vocabulary, asked.x)
    if options.softcap is not None:
        made = options.softcap * torch.tanh(made / options.softcap)
    ignored = _NOWHERE if options.ignore_index is None else options.ignore_index
    weight = None if asked.class_weight is None else asked.class_weight.to(made.dtype)
    loss = F.cross_entropy(
        made,
        asked.target,
        weight,
        ignore_index=ignored,
        reduction=options.reduction,
        label_smoothing=options.label_smoothing,
    )
    if not options.z_loss:
        return loss
    counted = asked.target != ignored
    z_loss = options.z_loss * torch.where(counted, torch.logsumexp(made, -1).square(), 0)
    if options.reduction == "none":
        return loss + z_loss
    return loss + (z_loss.sum() if options.reduction == "sum" else z_loss.sum() / counted.sum())
