"""A model sharded over processes by FSDP2, and its tensors whole again for checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

_WHOLE = StateDictOptions(full_state_dict=True)


def shard(model: nn.Module) -> nn.Module:
    """One unit: the model is small, what is saved is the optimiser's share of a large table."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.register_forward_pre_hook(_refresh)
    fully_shard(model)
    return model


def _refresh(module: nn.Module, _: Any) -> None:
    # An RNN keeps its own list of weights, which FSDP2 does not know of when it gathers the real ones.
    assert isinstance(module, nn.RNNBase)
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def gather_gradients(model: nn.Module, now: bool) -> None:
    """With the backward pass to come, or not yet."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(now)


def whole_model(model: nn.Module) -> dict[str, Any]:
    """All tensors, whole, in every process; all processes call it."""
    tensors: dict[str, Any] = get_model_state_dict(model, options=_WHOLE)
    return {name: value.cpu().clone() for name, value in tensors.items()}


def load_whole_model(model: nn.Module, tensors: dict[str, Any]) -> None:
    """Each process takes its share."""
    set_model_state_dict(model, tensors, options=_WHOLE)


def whole_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimiser's tensors, whole, in every process."""
    return dict(get_optimizer_state_dict(model, optimizer, options=_WHOLE))


def load_whole_optimizer(model: nn.Module, optimizer: Optimizer, content: dict[str, Any]) -> None:
    """Each process takes its share."""
    set_optimizer_state_dict(model, optimizer, content, options=_WHOLE)
