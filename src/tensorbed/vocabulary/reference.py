"""The plain twins: all logits at once, in differentiable PyTorch, for any device, transform or export."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.scoring import scores_of_rows
from tensorbed.vocabulary.loss import Asked
from tensorbed.vocabulary.scorer import Vocabulary

_NOWHERE = -(2**62)  # no target has it


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


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Scores with the soft cap, if there is one."""
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def computed(asked: Asked) -> Tensor:
    """What :func:`tensorbed.vocabulary.loss.computed` gives, from all logits and by PyTorch's own loss."""
    options, target = asked.options, asked.target
    made = capped(scores(asked.vocabulary, asked.x), options.softcap)
    if target is None:
        return made.to(asked.x.dtype)
    ignored = _NOWHERE if options.ignore_index is None else options.ignore_index
    weight = None if asked.class_weight is None else asked.class_weight.to(made.dtype)
    said: Any = {"reduction": options.reduction, "label_smoothing": options.label_smoothing}
    loss = F.cross_entropy(made, target, weight, ignore_index=ignored, **said)
    if not options.z_loss:
        return loss
    counted = target != ignored
    z_loss = options.z_loss * torch.where(counted, torch.logsumexp(made, -1).square(), 0)
    if options.reduction == "none":
        return loss + z_loss
    return loss + (z_loss.sum() if options.reduction == "sum" else z_loss.sum() / counted.sum())
