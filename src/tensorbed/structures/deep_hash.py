"""Deep hash embeddings: many hashes of a row's number through a small network, and no table at all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorbed.backends.scores.scoring import Scoring
from tensorbed.checks import require_number, require_positive
from tensorbed.dispatch import World, world_of
from tensorbed.structures.base import Params, Structure, TensorSpec, mean_square, rounded, scale_to_std
from tensorbed.structures.formats import Budget, Format, largest, written
from tensorbed.structures.hashing import check_constants, constants_of, draw_constants, hashed
from tensorbed.structures.registry import register

_VALUES = 10**6  # of a hash, as in the paper; single precision tells them apart
_MOST_LAYERS = 64
_BLOCK = 2**18  # hashes computed at once
_CENTRED = 2**12  # rows whose mean is taken out of a drawn table


@register("deep_hash")
@dataclass(frozen=True)
class DeepHashMatrix(Structure):
    r"""Each row what a network of ``layers`` hidden layers makes of ``hashes`` universal hashes of its number.

    .. math::
        x_0(i) = 2\, h(i) / (10^6 - 1) - 1, \quad
        x_l = \mathrm{Mish}(x_{l-1} W_l + b_l), \quad
        E[i] = x_L W_{L+1}

    From `Learning to embed categorical features without embedding tables for recommendation
    <https://arxiv.org/abs/2010.10784>`_ (Kang et al., 2020), without its batch normalisation: a row does not depend on
    what else is looked up.

    Shape:
        - constants: ``(hashes, 3)`` int64
        - layer_0: ``(hashes, hidden)``, further ones ``(hidden, hidden)``, the last ``(hidden, cols)``
        - bias_0, ...: ``(hidden,)`` of each but the last
    """

    hashes: int
    hidden: int
    layers: int

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hashes", "hidden", "layers"):
            require_positive(getattr(self, name), name)
        if self.layers > _MOST_LAYERS:
            raise ValueError(f"layers={self.layers}: at most {_MOST_LAYERS}.")
        widths = (self.hashes, *[self.hidden] * self.layers, self.cols)
        layers = [TensorSpec(f"layer_{k}", widths[k : k + 2]) for k in range(self.layers + 1)]
        biases = [TensorSpec(f"bias_{k}", (self.hidden,)) for k in range(self.layers)]
        self.hold(specs=(constants_of(self.hashes), *layers, *biases))

    def tensors(self) -> tuple[TensorSpec, ...]:
        specs: tuple[TensorSpec, ...] = vars(self)["specs"]
        return specs

    def check_values(self, p: Params) -> None:
        check_constants(p["constants"])

    def take(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        return self._last_hidden(p, index) @ p[f"layer_{self.layers}"]

    def _last_hidden(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, hidden)
        x = self._inputs(p, index)
        for k in range(self.layers):
            x = F.mish(torch.addmm(p[f"bias_{k}"], x, p[f"layer_{k}"]))
        return x

    def _inputs(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, hashes)
        """Hashes from -1 to 1. Where it may loop, some rows at a time: they come from numbers twice as wide."""
        step = max(1, _BLOCK // self.hashes)
        parts = index.split(step) if index.shape[0] > step and world_of(index) is World.EAGER else [index]
        constants, dtype = p["constants"], p["layer_0"].dtype
        made = [hashed(constants, part, self.rows, _VALUES).to(dtype).mul_(2 / (_VALUES - 1)).sub_(1) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def eager_rows(self, p: Params, index: Tensor) -> Tensor:  # (n,) -> (n, cols)
        """Each row once, however often it is asked for."""
        unique, inverse = torch.unique(index, return_inverse=True)
        if unique.shape[0] == index.shape[0]:
            return self.rows_of(p, index)
        return rounded(self.take(self.widened(p), unique).index_select(0, inverse), p)

    def full(self, p: Params) -> Tensor:  # -> (rows, cols)
        step = max(1, _BLOCK // self.hashes)
        index = torch.arange(self.rows, device=p["constants"].device)
        return torch.cat([self.take(p, part) for part in index.split(step)])

    def resized(self, p: Params, rows: int) -> tuple[Self, dict[str, Tensor]]:
        """New rows are made as all others are."""
        return replace(self, rows=rows), dict(p)

    @property
    def row_multiply_adds(self) -> int:
        return sum(spec.numel for spec in self.tensors() if spec.name.startswith("layer"))

    def scorings(self) -> list[Scoring]:
        """By rows: a block is as high as its hashes and hidden layers allow, which are wider than rows."""
        besides = self.hashes + self.layers * self.hidden
        return [self.by_rows(self.rows * self.row_multiply_adds, self.rows * besides)]

    def initialise(self, p: Params, std: float, generator: torch.Generator | None = None) -> None:
        draw_constants(p["constants"], generator)
        for k in range(self.layers + 1):
            p[f"layer_{k}"].normal_(std=(2 / p[f"layer_{k}"].shape[0]) ** 0.5, generator=generator)
        for k in range(self.layers):
            p[f"bias_{k}"].normal_(std=p[f"layer_{k}"].shape[0] ** -0.5, generator=generator)
        last = p[f"layer_{self.layers}"]
        if self.hidden > 1 and self.rows > 1:  # what all rows have in common is nothing to tell them by
            some = torch.randint(self.rows, (_CENTRED,), device=last.device, generator=generator)
            mean = self._last_hidden(p, some).mean(0)
            last -= torch.outer(mean, mean @ last) / mean.square().sum()
        scale_to_std({"last": last}, mean_square(self, p, generator), 1, std)

    def describe(self) -> str:
        layers = f"{self.layers} layers" if self.layers > 1 else "a layer"
        return f"{self.hashes} hashes, {layers} of {self.hidden}"


@dataclass(frozen=True, kw_only=True, repr=False)
class DeepHash(Format):
    """No table at all: many hashes of the row number pass through a small network, which is trained.

    A trained table cannot be fitted by it. Give ``hidden`` or ``ratio``.

    Args:
        hashes: how many hashes the network is given.
        hidden: the width of its hidden layers.
        layers: how many hidden layers there are.
        ratio: the largest width at which the dense table takes at least this many times the stored bytes.

    Example::

        >>> layer = tb.Embedding(25_000, 256, tb.DeepHash(hidden=128))
        >>> layer.structure.describe(), round(layer.compression_ratio, 1)
        ('1024 hashes, 2 layers of 128', 34.3)
    """

    hashes: int = 1024
    hidden: int | None = None
    layers: int = 2
    ratio: float | None = None

    __repr__ = written

    def __post_init__(self) -> None:
        if (self.hidden is None) == (self.ratio is None):
            raise ValueError("DeepHash: give its size as hidden=, or as ratio=, and not as both.")
        for name in ("hashes", "hidden", "layers"):
            if getattr(self, name) is not None:
                require_positive(getattr(self, name), name)
        if self.ratio is not None:
            require_number(self.ratio, "ratio", low=0)

    def bind(self, budget: Budget) -> DeepHashMatrix:
        def bound(hidden: int) -> DeepHashMatrix:
            return DeepHashMatrix(budget.rows, budget.cols, self.hashes, hidden, self.layers)

        if self.ratio is not None:
            widths = range(1, budget.rows * budget.cols + 1)
            return largest(self, widths, bound, budget, self.ratio, f"with {self.hashes} hashes and hidden=1")
        assert self.hidden is not None
        return bound(self.hidden)
