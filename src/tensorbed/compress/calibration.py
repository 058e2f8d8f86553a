"""How the tables of a model are used, recorded while it runs on typical inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.structures import Use

_BLOCK = 2**12  # vectors multiplied at once


class _Record:
    """What one layer was given: of a table the rows are counted, of a linear layer ``h h^T`` is summed."""

    def __init__(self, module: nn.Module) -> None:
        weight: Tensor = module.weight  # type: ignore[assignment]
        self.is_head = isinstance(module, nn.Linear)
        size = (weight.shape[1], weight.shape[1]) if self.is_head else (weight.shape[0],)
        self.sums = torch.zeros(size, dtype=torch.float64, device=weight.device)
        self.seen = 0

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: Tensor = (args[0] if args else kwargs["input"]).detach()
        self.seen += given.numel() if not self.is_head else given.numel() // given.shape[-1]
        if not self.is_head:
            self.sums += torch.bincount(given.reshape(-1), minlength=len(self.sums)).to(self.sums)
            return
        for block in given.reshape(-1, given.shape[-1]).split(_BLOCK):
            wide = block.to(self.sums)
            self.sums.addmm_(wide.T, wide)

    def use(self) -> Use:
        if not self.seen:
            return Use()
        return Use(moment=self.sums / self.seen) if self.is_head else Use(counts=self.sums)


def recorded(model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[Any], object]) -> dict[str, Use]:
    """What each of the modules was given while ``run(model)`` ran, without gradients and in evaluation mode.

    No input is kept. Modes and hooks are as before when it is done, also by an error. What did not run is refused,
    but a table that shares its weight with one that did: it may only stand for it, as T5's.
    """
    records = {id(module): _Record(module) for module in modules.values()}
    modes = [(module, module.training) for module in model.modules()]
    handles = [
        module.register_forward_pre_hook(records[id(module)].see, with_kwargs=True)
        for module in {id(module): module for module in modules.values()}.values()
    ]
    try:
        with torch.no_grad():
            run(model.eval())
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    ran = {id(module.weight) for module in modules.values() if records[id(module)].seen}
    idle = [name for name, module in modules.items() if not records[id(module)].seen]
    if idle := [name for name in idle if records[id(modules[name])].is_head or id(modules[name].weight) not in ran]:
        raise ValueError(f"calibrate did not run {', '.join(idle)}; give it inputs that do, or skip these layers.")
    return {name: records[id(module)].use() for name, module in modules.items()}


def together(uses: Iterable[Use]) -> Use:
    """The use of a table that several layers share."""
    found = list(uses)
    counts = [use.counts for use in found if use.counts is not None]
    moments = [use.moment for use in found if use.moment is not None]
    return Use(torch.stack(counts).sum(0) if counts else None, torch.stack(moments).mean(0) if moments else None)
