"""What is refused before a loss is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.checks import require_int, require_number
from tensorbed.dispatch import is_autocast


def check_targets(target: Tensor, classes: int, ignore_index: int | None) -> None:
    """Every target a class or ignored; ``IndexError`` that shows the first which is neither."""
    bad = (target < 0) | (target >= classes)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bool(bad.any()):
        first = int(target[bad.nonzero()[0, 0]])
        ignored = "" if ignore_index is None else f", or ignore_index={ignore_index}"
        raise IndexError(f"target {first} is out of range for {classes} classes (valid: 0 to {classes - 1}{ignored}).")


@torch.library.custom_op("tensorbed::check_targets", mutates_args=())
def checked_targets(target: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    """The targets, checked when a graph runs."""
    check_targets(target, classes, ignore_index)
    return target.clone()


@checked_targets.register_fake
def _(target: Tensor, classes: int, ignore_index: int | None) -> Tensor:
    return torch.empty_like(target)


def check_hidden(h: Tensor, cols: int) -> None:
    """Vectors of as many numbers as the table has columns."""
    if not isinstance(h, Tensor):
        raise TypeError(f"the hidden vectors must be a tensor, got {type(h).__name__}.")
    if not h.is_floating_point():
        raise TypeError(f"the hidden vectors must be floating-point numbers, got {str(h.dtype)[6:]}.")
    if h.dim() == 0 or h.shape[-1] != cols:
        raise ValueError(f"the hidden vectors have shape {tuple(h.shape)}; their last size must be {cols}.")


def check_target_shape(target: Tensor, h: Tensor) -> None:
    """A class number for each vector."""
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a tensor, got {type(target).__name__}; use torch.as_tensor(...).")
    if target.is_floating_point():
        raise TypeError(
            f"target must be class numbers, int32 or int64, got {str(target.dtype)[6:]}: probabilities of all classes "
            "would be as large as the logits; use torch.nn.functional.cross_entropy(head(h), target) for those."
        )
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"target must be int32 or int64, got {str(target.dtype)[6:]}; convert it with .long().")
    if target.device != h.device:
        raise ValueError(f"target is on {target.device} and the hidden vectors are on {h.device}; move one.")
    if target.shape != h.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}; hidden vectors of shape {tuple(h.shape)} need one class each, "
            f"shape {tuple(h.shape[:-1])}."
        )


def check_terms(reduction: str, label_smoothing: float, z_loss: float, softcap: float | None) -> None:
    """Options that make sense, or an error that shows the first that does not."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction={reduction!r}: choose one of "mean", "sum", "none".')
    require_number(label_smoothing, "label_smoothing", low=0, high=1, inclusive=True)
    require_number(z_loss, "z_loss", low=0, inclusive=True)
    check_softcap(softcap)


def check_softcap(softcap: float | None) -> None:
    """A positive number, or none."""
    if softcap is not None:
        require_number(softcap, "softcap", low=0)


def check_ignore_index(ignore_index: int | None) -> None:
    """A number that a target may have, or none."""
    # What torch.compile takes for a symbol is an int already.
    if ignore_index is None or torch.compiler.is_compiling():
        return
    if not -(2**63) <= require_int(ignore_index, "ignore_index") < 2**63:
        raise ValueError(f"ignore_index={ignore_index}: targets are int64, which it does not fit into.")


def check_budget(memory_budget: int | None) -> None:
    """A positive number of bytes, or none."""
    if memory_budget is not None and not 1 <= require_int(memory_budget, "memory_budget") < 2**63:
        raise ValueError(f"memory_budget={memory_budget}: a number of bytes, at least 1; leave None for the default.")


def check_per_class(weight: Tensor | None, classes: int, name: str) -> None:
    """A number for each class."""
    if weight is None:
        return
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        found = str(weight.dtype)[6:] if isinstance(weight, Tensor) else type(weight).__name__
        raise TypeError(f"{name} must be a tensor of floating-point numbers, got {found}.")
    if weight.shape != (classes,):
        raise ValueError(f"{name} has shape {tuple(weight.shape)}; one for each of {classes} classes is needed.")


def check_class_weight(weight: Tensor | None, classes: int, name: str) -> None:
    """A constant for each class."""
    check_per_class(weight, classes, name)
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which the loss does not have for it; give {name}.detach().")


def check_together(h: Tensor, tensors: tuple[Tensor, ...]) -> None:
    """As a product of matrices asks: one device and, unless autocast is on, one dtype."""
    for tensor in tensors:
        if tensor.device != h.device:
            raise ValueError(f"the hidden vectors are on {h.device} and the table is on {tensor.device}; move one.")
        if tensor.is_floating_point() and tensor.dtype != h.dtype and not is_autocast(h):
            raise ValueError(
                f"the hidden vectors are {str(h.dtype)[6:]} and the table is {str(tensor.dtype)[6:]}; convert one with "
                ".to(...), or compute under torch.autocast."
            )
