"""A model sharded over processes by FSDP2, and its tensors whole again for checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
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


def whole(model: nn.Module, *optimizers: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of the model, and of its optimiser if it is given, whole in every process; all processes call it."""
    return get_state_dict(model, optimizers, options=_WHOLE)


def load_whole(model: nn.Module, tensors: dict[str, Any], *optimizers: Optimizer, state: Any = None) -> None:
    """Each process takes its share."""
    set_state_dict(model, optimizers, model_state_dict=tensors, optim_state_dict=state or {}, options=_WHOLE)
