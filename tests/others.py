"""Structures by someone else, not registered: one class and one format each."""

from dataclasses import dataclass

import torch

from tensorbed.structures import Fit, Format, Structure, TensorSpec


@dataclass(frozen=True)
class ScaledMatrix(Structure):
    """A fixed pattern times one number a column: the smallest structure there is."""

    fits_exactly = True

    def tensors(self):
        return (TensorSpec("scale", (self.cols,)),)

    def take(self, p, index):
        return torch.cos(index.double())[:, None].to(p["scale"].dtype) * p["scale"]

    def full(self, p):
        return self.take(p, torch.arange(self.rows, device=p["scale"].device))

    def initialise(self, p, std, generator=None):
        p["scale"].normal_(generator=generator)
        p["scale"].mul_(std / self.full(p).square().mean().sqrt())

    def describe(self):
        return "scaled"


@dataclass(frozen=True)
class ForgetfulMatrix(ScaledMatrix):
    """One whose ``__post_init__`` does not call ``super()``."""

    def __post_init__(self):
        object.__setattr__(self, "pattern", "cos")


@dataclass(frozen=True)
class Scaled(Format):
    def bind(self, budget):
        return ScaledMatrix(budget.rows, budget.cols)

    def fit(self, table, budget):
        pattern = torch.cos(torch.arange(budget.rows, dtype=torch.float64))
        return Fit(self.bind(budget), {"scale": pattern @ table.double() / pattern.square().sum()})


@dataclass(frozen=True)
class Unfitted(Format):
    """One without a fit."""

    def bind(self, budget):
        return ScaledMatrix(budget.rows, budget.cols)


@dataclass(frozen=True)
class CodedMatrix(Structure):
    """Integer codes, a number a row, and what follows from that: no draw, no exact fit."""

    can_initialise = False
    fits_exactly = False

    def tensors(self):
        codes = TensorSpec("codes", (self.rows, self.cols), torch.int8, trainable=False)
        return (codes, TensorSpec("scale", (self.rows, 1)))

    def take(self, p, index):
        scale = p["scale"].index_select(0, index)
        return p["codes"].index_select(0, index).to(scale.dtype) * scale

    def full(self, p):
        return p["codes"].to(p["scale"].dtype) * p["scale"]

    def describe(self):
        return "8 bits"


@dataclass(frozen=True)
class Coded(Format):
    def bind(self, budget):
        return CodedMatrix(budget.rows, budget.cols)

    def fit(self, table, budget):
        scale = table.double().abs().amax(1, keepdim=True) / 127
        return Fit(self.bind(budget), {"codes": (table / scale).round().to(torch.int8), "scale": scale})


@dataclass(frozen=True)
class Packed(Format):
    """What a format that rounds becomes once it is packed."""

    format: Format

    def bind(self, budget):
        return self._packed(self.format.bind(budget))[0]

    def fit(self, table, budget):
        found = self.format.fit(table, budget)
        return Fit(*found.structure.packed(found.params))

    @staticmethod
    def _packed(structure):
        return structure.packed({spec.name: torch.zeros(spec.shape) for spec in structure.tensors()})


ScaledMatrix.kind = "scaled"
CodedMatrix.kind = "coded"
