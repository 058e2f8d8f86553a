"""Choosing a format for every table of a model under a budget, by measured error or by rule."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.checks import require_number, require_positive
from tensorbed.fitting import check_table, fit_table
from tensorbed.progress import track
from tensorbed.structures import Format
from tensorbed.structures.dense import Dense
from tensorbed.structures.explanation import aligned
from tensorbed.structures.formats import Budget, OutOfReachError
from tensorbed.structures.low_rank import LowRank
from tensorbed.structures.product_quantized import ProductQuantized
from tensorbed.structures.quantized_rows import QuantizedRows
from tensorbed.structures.tensor_train import TensorTrain

# What a trained table may become; the plan weighs them by their error on it.
PRETRAINED: tuple[Format, ...] = (
    QuantizedRows(bits=8),
    QuantizedRows(bits=4, group=16),
    QuantizedRows(bits=4, group=32),
    *(ProductQuantized(ratio=ratio) for ratio in (6, 7, 10, 14, 25)),
    *(LowRank(ratio=ratio) for ratio in (2, 4, 8, 16, 32)),
    *(TensorTrain(ratio=ratio) for ratio in (4, 16, 64)),
)
# What one trained from scratch may become: the largest of these ratios that the budget asks for.
_TRAINED = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_SAMPLE = 8192  # rows on which errors are measured
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Option:
    """One format for one table: what it would take, and how far off it would be, ``None`` where nobody measured."""

    format: Format
    bytes: int
    ratio: float
    error: float | None


@dataclass(frozen=True)
class Plan(Mapping[str, Format | None]):
    """Formats by table name, for :func:`tensorbed.compress_`; ``None`` leaves a table dense. ``print`` it.

    Attributes:
        sizes: rows and columns of each table.
        chosen: what was chosen, ``Dense`` where it stays.
        options: all that were weighed, the dense table first.
        allowed: bytes that all tables together may take.
    """

    sizes: Mapping[str, tuple[int, int]]
    chosen: Mapping[str, Option]
    options: Mapping[str, tuple[Option, ...]]
    allowed: float

    def __getitem__(self, name: str) -> Format | None:
        format = self.chosen[name].format
        return None if isinstance(format, Dense) else format

    def __iter__(self) -> Iterator[str]:
        return iter(self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def bytes(self) -> int:
        """Of all tables as planned."""
        return sum(option.bytes for option in self.chosen.values())

    @property
    def fits(self) -> bool:
        """Whether that is within what was asked for."""
        return self.bytes <= self.allowed

    def frontier(self) -> Frontier:
        """Ratio against error of every format weighed; ``.figure()`` draws it."""
        return Frontier(self.options)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, for JSON."""
        tables = {
            name: {"rows": self.sizes[name][0], "cols": self.sizes[name][1], **asdict(one), "format": repr(one.format)}
            for name, one in self.chosen.items()
        }
        return {"tables": tables, "bytes": self.bytes, "allowed": self.allowed, "fits": self.fits}

    def __str__(self) -> str:
        head = ("table", "size", "format", "MB", "ratio", "error")
        rows = [
            (name, "{:,} x {:,}".format(*self.sizes[name]), repr(one.format), f"{one.bytes / 1e6:,.2f}", *_shown(one))
            for name, one in self.chosen.items()
        ]
        dense = sum(table[0].bytes for table in self.options.values())
        total = ("all", "", "", f"{self.bytes / 1e6:,.2f}", f"{dense / max(1, self.bytes):,.1f}", "")
        lines = aligned([head, *rows, total], "<<<>>>")
        if not self.fits:
            lines.append(f"warning: nothing weighed is small enough for {self.allowed / 1e6:,.2f} MB.")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Frontier:
    """Ratio and error of every option, by table."""

    options: Mapping[str, tuple[Option, ...]]

    def points(self, name: str) -> list[tuple[float, float]]:
        """``(ratio, error)`` of a table's options that no other beats in both, by ratio."""
        known = [(one.ratio, one.error) for one in self.options[name] if one.error is not None]
        return sorted(p for p in known if not any(q[0] >= p[0] and q[1] < p[1] for q in known))

    def figure(self) -> Any:
        """A matplotlib figure, a panel for each table and a line for each kind of format."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError('drawing needs matplotlib: pip install "tensorbed[figures]".') from error
        figure = Figure(figsize=(5.5 * max(1, len(self.options)), 4), layout="constrained")
        panels = figure.subplots(1, max(1, len(self.options)), squeeze=False)[0]
        for axes, (name, options) in zip(panels, self.options.items(), strict=False):
            kinds = dict.fromkeys(type(one.format).__name__ for one in options if one.error is not None)
            for kind in kinds:
                drawn = [o for o in options if type(o.format).__name__ == kind and o.error is not None]
                line = sorted((one.ratio, one.error or 0.0) for one in drawn)
                axes.plot(*zip(*line, strict=True), marker="o", label=kind)
            axes.set(title=name, xlabel="times smaller", ylabel="relative error", xscale="log")
            axes.grid(alpha=0.3)
            axes.legend()
        return figure


def plan(
    model: nn.Module | Mapping[str, tuple[int, int]],
    *,
    budget: str | int | None = None,
    ratio: float | None = None,
    formats: Sequence[Format] | None = None,
    purpose: str = "pretrained",
    min_rows: int = 2000,
    skip: Sequence[str] = (),
) -> Plan:
    """Choose a format for every table so that all together keep a budget.

    With weights and ``purpose="pretrained"`` each format's error is measured, on a sample of a large table's rows, and
    bytes are given up where that adds the least squared error. Else, and for ``purpose="train"``, by rule: tensor
    trains, all tables compressed by the same ratio, the smallest that keeps the budget; tables that cannot be made that
    small stay as small as they can be.

    Args:
        model: or sizes by name, ``{"wte": (50257, 768)}``.
        budget: bytes of all tables together, ``"20MB"``; or ``ratio``, their dense bytes over that.
        formats: those to weigh, in place of the usual ones.
        min_rows: smaller tables stay dense and are not counted.
        skip: patterns of names, as in ``fnmatch``, of tables that stay and are not counted.

    Example::

        >>> report = tb.compress_(model, tb.plan(model, ratio=8))
    """
    if purpose not in ("pretrained", "train"):
        raise ValueError(f'purpose={purpose!r}: choose "pretrained" or "train".')
    tables = _tables(model, min_rows, skip)
    sizes = {name: (int(w.shape[0]), int(w.shape[1])) for name, w in tables.items()}
    dense = sum(rows * cols * tables[name].element_size() for name, (rows, cols) in sizes.items())
    allowed = _allowed(budget, ratio, dense)
    measured = purpose == "pretrained" and not any(w.is_meta for w in tables.values())
    if formats is None:
        formats = PRETRAINED if measured else tuple(TensorTrain(ratio=r) for r in _TRAINED)
    options = {
        name: _options(weight, formats, measured) for name, weight in track(list(tables.items()), "measuring formats")
    }
    return Plan(sizes, _chosen(options, allowed), options, allowed)


def _tables(model: nn.Module | Mapping[str, tuple[int, int]], min_rows: int, skip: Sequence[str]) -> dict[str, Tensor]:
    """Weights by name, on the meta device where only sizes are known; what is shared once."""
    if isinstance(model, nn.Module):
        found: dict[int, tuple[str, Tensor]] = {}
        for name, module in model.named_modules():
            if any(fnmatchcase(name, pattern) for pattern in skip):
                continue
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.shape[0] >= min_rows:
                found.setdefault(id(module.weight), (name, module.weight.detach()))
        if not found:
            raise ValueError(f"the model has no table of at least min_rows={min_rows} rows.")
        return dict(found.values())
    if not isinstance(model, Mapping) or not model:
        raise TypeError(f"plan takes a model or sizes by name, {{'words': (rows, cols)}}, got {type(model).__name__}.")
    sizes = {}
    for name, size in model.items():
        rows, cols = size
        shape = (require_positive(rows, f"rows of {name}"), require_positive(cols, f"columns of {name}"))
        sizes[name] = torch.empty(shape, device="meta", dtype=torch.float32)
    return sizes


def _allowed(budget: str | int | None, ratio: float | None, dense: int) -> float:
    if (budget is None) == (ratio is None):
        raise ValueError("give a budget, for instance budget='20MB', or a ratio, and not both.")
    if ratio is not None:
        return dense / require_number(ratio, "ratio", low=0)
    return parsed_bytes(budget)


def parsed_bytes(budget: str | int | None) -> int:
    """``"20MB"``, ``"512 KiB"`` or a number as bytes."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", budget.lower())
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"budget={budget!r}: give bytes such as '20MB', '1.5 GB' or '512 KiB'.")
        return require_positive(int(float(match[1]) * _UNITS[match[2]]), "budget")
    return require_positive(budget, "budget")


def _options(weight: Tensor, formats: Sequence[Format], measured: bool) -> tuple[Option, ...]:
    rows, cols = weight.shape
    whole = Budget(rows, cols, weight.dtype)
    sample = weight
    if measured:
        check_table(weight)
        if rows > _SAMPLE:
            picked = torch.randperm(rows, generator=torch.Generator().manual_seed(0))[:_SAMPLE]
            sample = weight[picked.to(weight.device)]
    found = [Option(Dense(), rows * cols * weight.element_size(), 1.0, 0.0 if measured else None)]
    for format in formats:
        try:
            structure = format.bind(whole)
        except OutOfReachError:
            continue
        error = fit_table(sample, format.sized_as(structure)).error if measured else None
        found.append(Option(format, structure.bytes(weight.dtype), whole.ratio(structure), error))
    return tuple(found)


def _chosen(options: Mapping[str, tuple[Option, ...]], allowed: float) -> dict[str, Option]:
    """Start dense, and give up bytes where that adds the least squared error for each, until the budget is kept."""
    chosen = {name: table[0] for name, table in options.items()}
    while sum(one.bytes for one in chosen.values()) > allowed:
        steps = [
            (_price(one, other), name, other)
            for name, one in chosen.items()
            for other in options[name]
            if other.bytes < one.bytes
        ]
        if not steps:
            break
        _, name, taken = min(steps, key=lambda step: step[0])
        chosen[name] = taken
    return chosen


def _price(one: Option, other: Option) -> tuple[float, float]:
    """Squared error that a byte less costs; where nobody measured, the smaller step first."""
    saved = one.bytes - other.bytes
    if one.error is None or other.error is None:
        return other.ratio, 0.0
    return (other.error**2 - one.error**2) / saved, -saved


def _shown(option: Option) -> tuple[str, str]:
    error = option.error
    return f"{option.ratio:,.1f}", "-" if error is None else f"{error:.3f}"
