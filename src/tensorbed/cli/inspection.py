"""What is in a file, a folder or a model: sizes, the scale of its tables, how fast their spectrum falls."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.compress.finding import MIN_ROWS, declared_heads
from tensorbed.decompose.powers import far_exponent, frobenius, shifted
from tensorbed.files.checksums import Checksums
from tensorbed.files.header import FORMAT, opened
from tensorbed.files.saving import contents_of
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.printable import printable
from tensorbed.structures.explanation import aligned
from tensorbed.structures.formats import Budget, OutOfReachError
from tensorbed.structures.registry import formats, plain_format

_TALL = 4  # times as many rows as columns: most weights that are no tables have fewer
_ROWS = 4096  # a table is looked at through so many of its rows
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 24


@dataclass(frozen=True)
class Inspected:
    """One layer. The spectrum is of a sample of its rows, the largest singular value as 1.

    Attributes:
        possible: of a dense table, formats it may take and the ratios they have.
        finite: whether every stored number is; else there is neither a spectrum nor a format.
    """

    name: str
    layer: str
    kind: str
    sizes: str
    numbers: int
    bytes: int
    ratio: float
    std: float
    spectrum: tuple[float, ...]
    possible: tuple[tuple[str, float], ...] = ()
    finite: bool = True

    @property
    def bars(self) -> str:
        """The spectrum as a small picture."""
        return "".join(_BARS[round(value * (len(_BARS) - 1))] for value in self.spectrum)


@dataclass(frozen=True)
class Inspection:
    """All layers of a file or model; ``print`` it."""

    layers: tuple[Inspected, ...]
    version: int | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("layer", "is", "kind", "sizes", "numbers", "MB", "ratio", "std", "spectrum")
        rows = [
            (
                one.name or "(alone)",
                one.layer,
                one.kind,
                one.sizes,
                f"{one.numbers:,}",
                f"{one.bytes / 1e6:,.2f}",
                f"{one.ratio:,.1f}",
                f"{one.std:.3g}",
                one.bars,
            )
            for one in self.layers
        ]
        lines = [*aligned([head, *rows], "<<<<>>>><"), *map(printable, self.remarks())]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def remarks(self) -> list[str]:
        """What tables could be, and which cannot be anything."""
        lines = []
        for one in self.layers:
            if one.possible:
                said = ", ".join(f"{format} {ratio:.1f} times smaller" for format, ratio in one.possible)
                lines.append(f"{one.name} could be {said}.")
            if not one.finite:
                lines.append(f"{one.name or '(alone)'} holds NaN or infinite numbers; no format can be fitted to it.")
        return lines

    __repr__ = __str__


def inspect(what: nn.Module | str | os.PathLike[str]) -> Inspection:
    """The layers of this library and the large dense tables, in a model or a folder of transformers; or the layers in a
    file of :func:`tensorbed.save`; or what may be tables in any other safetensors file, which tells names and shapes
    alone: tensors of at least 2,000 rows that have four times as many as columns, or ``emb`` in their name.
    """
    if not isinstance(what, nn.Module) and Path(what).is_dir():
        from tensorbed.integrations.transformers import folders

        what, _ = folders.load_model(folders.opened(what))
    if isinstance(what, nn.Module):
        return _of_model(what)
    if (plain := _of_plain_file(Path(what))) is not None:
        return plain
    contents = contents_of(what)
    return Inspection(tuple(_of_layer(name, layer) for name, layer in contents.layers.items()), contents.version)


def _of_plain_file(path: Path) -> Inspection | None:
    """What may be tables in a file that others wrote; ``None`` for one of :func:`tensorbed.save`."""
    with opened(path) as file:
        header = file.metadata() or {}
        if header.get("format") == FORMAT:
            return None
        if Checksums.read(header, path) is not None:
            raise ValueError(f"{path} is of a compressed model; look into its folder, {path.parent}.")
        found, others = [], 0
        for name in sorted(file.keys()):
            part = file.get_slice(name)
            if _may_be_table(name, part.get_shape(), part.get_dtype()):
                found.append(_of_tensor(name, file.get_tensor(name)))
            else:
                others += 1
    note = (
        f"{others} other tensors do not look like tables by name and shape; a folder with config.json tells which are."
    )
    return Inspection(tuple(found), notes=(note,))


def _may_be_table(name: str, shape: Sequence[int], dtype: str) -> bool:
    if len(shape) != 2 or shape[0] < MIN_ROWS or not shape[1] or dtype not in ("F64", "F32", "F16", "BF16"):
        return False
    return shape[0] >= _TALL * shape[1] or "emb" in name.lower()


def _of_tensor(name: str, tensor: Tensor) -> Inspected:
    return replace(_of_dense(name, nn.Embedding.from_pretrained(tensor), tied=False), layer="tensor")


def _of_model(model: nn.Module) -> Inspection:
    heads = {id(head) for declared in declared_heads(model).values() for head in declared}
    found = []
    first: dict[Any, str] = {}  # by identity of what is stored, who has it
    for name, module in model.named_modules():
        if isinstance(module, StructuredTable):
            stored: Any = getattr(module, module.structure.tensors()[0].name)
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or (
            isinstance(module, nn.Linear) and id(module) in heads
        ):
            stored = module.weight
            if stored.shape[0] < MIN_ROWS:
                continue
        else:
            continue
        tied = first.setdefault(id(stored), name) != name
        made = _of_layer(name, module, tied) if isinstance(module, StructuredTable) else _of_dense(name, module, tied)
        found.append(made)
    return Inspection(tuple(found))


def _of_layer(name: str, layer: StructuredTable, tied: bool = False) -> Inspected:
    rows = _sampled(layer)
    finite = all(_is_finite(tensor) for tensor in layer.params().values())
    tied = tied or (isinstance(layer, Head) and layer.is_tied)
    return Inspected(
        name=name,
        layer=f"{type(layer).__name__}{' (tied)' if tied else ''}",
        kind=layer.structure.kind,
        sizes=layer.structure.summary,
        numbers=layer._stored_numbers,
        bytes=layer._stored_bytes,
        ratio=layer.compression_ratio,
        std=frobenius(rows) / max(1, rows.numel()) ** 0.5,
        spectrum=_spectrum(rows) if finite else (),
        finite=finite,
    )


@torch.no_grad()
def _of_dense(name: str, module: nn.Module, tied: bool) -> Inspected:
    weight: Tensor = module.weight  # type: ignore[assignment]
    budget = Budget(len(weight), weight.shape[1], weight.dtype)
    plain = plain_format().bind(budget)
    rows = weight[_picked(len(weight)).to(weight.device)]
    possible = []
    finite = _is_finite(weight)
    for format in (format for kind in formats() for format in kind.without_training() if finite and not tied):
        with suppress(OutOfReachError):
            possible.append((repr(format), budget.ratio(format.bind(budget))))
    return Inspected(
        name=name,
        layer=f"{type(module).__name__}{' (tied)' if tied else ''}",
        kind=plain.kind,
        sizes=plain.summary,
        numbers=weight.numel(),
        bytes=weight.numel() * weight.element_size(),
        ratio=1.0,
        std=frobenius(rows) / max(1, rows.numel()) ** 0.5,
        spectrum=_spectrum(rows) if finite else (),
        possible=tuple(possible),
        finite=finite,
    )


def _is_finite(tensor: Tensor) -> bool:
    """Of every number, and not of a sample, without a table of answers."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.detach().aminmax())


def _spectrum(rows: Tensor) -> tuple[float, ...]:
    if not _is_finite(rows):  # of finite numbers that are large
        return ()
    wide = rows.double()
    values = torch.linalg.svdvals(shifted(wide, -far_exponent(wide)))
    top = float(values[0]) if len(values) else 0.0
    places = torch.linspace(0, len(values) - 1, min(_WIDTH, len(values)), device=values.device).round().long()
    return tuple(float(v) / top if top else 0.0 for v in values[places])


def _picked(count: int) -> Tensor:  # -> (n,)
    if count <= _ROWS:
        return torch.arange(count, device="cpu")
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")[:_ROWS]


@torch.no_grad()
def _sampled(layer: StructuredTable) -> Tensor:  # -> (n, cols)
    params = {name: tensor.detach() for name, tensor in layer.params().items()}
    device = next(iter(params.values())).device
    return layer.structure.lookup(params, _picked(layer.structure.rows).to(device), "auto")
