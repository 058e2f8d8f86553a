"""What is in a file, a folder or a model: sizes, the scale of its tables, how fast their spectrum falls."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.compress.finding import MIN_ROWS, declared_heads
from tensorbed.decompose.powers import far_exponent, frobenius, shifted
from tensorbed.files.header import FORMAT, Checksums, opened, understood
from tensorbed.files.saving import fill
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable
from tensorbed.structures import Structure
from tensorbed.structures.formats import Budget, OutOfReachError
from tensorbed.structures.registry import formats, plain_format

_TALL = 4  # times as many rows as columns: most weights that are no tables have fewer
_ROWS = 4096  # a table is looked at through so many of its rows
_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 24


@dataclass(frozen=True)
class Inspected:
    """One layer."""

    name: str
    layer: str
    kind: str
    sizes: str
    numbers: int
    bytes: int
    ratio: float
    std: float
    spectrum: tuple[float, ...]  # of a sample of its rows, the largest singular value as 1
    possible: tuple[tuple[str, float], ...] = ()  # of a dense table, formats it may take and the ratios they have
    finite: bool = True  # whether every stored number is; else there is neither a spectrum nor a format

    @property
    def bars(self) -> str:
        """The spectrum as a small picture."""
        return "".join(_BARS[round(value * (len(_BARS) - 1))] for value in self.spectrum)


@dataclass(frozen=True)
class Inspection:
    """All layers of a file or model."""

    layers: tuple[Inspected, ...]
    version: int | None = None
    notes: tuple[str, ...] = ()

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
    return _of_file(Path(what))


def _of_file(path: Path) -> Inspection:
    with opened(path) as file:
        header = file.metadata() or {}
        if header.get("format") == FORMAT:
            contents = understood(file, path)
            fill(contents.layers, contents.read(file))
            return Inspection(tuple(map(_of_layer, contents.layers, contents.layers.values())), contents.version)
        if Checksums.read(header, path) is not None:
            raise ValueError(f"{path} is of a compressed model; look into its folder, {path.parent}.")
        names = sorted(file.keys())
        likely = [name for name in names if _may_be_table(name, file.get_slice(name))]
        found = [_of_dense(name, "tensor", file.get_tensor(name)) for name in likely]
    others = len(names) - len(likely)
    note = (
        f"{others} other tensors do not look like tables by name and shape; a folder with config.json tells which are."
    )
    return Inspection(tuple(found), notes=(note,))


def _may_be_table(name: str, stored: Any) -> bool:
    shape, is_real = stored.get_shape(), stored.get_dtype() in ("F64", "F32", "F16", "BF16")
    if not is_real or len(shape) != 2 or shape[0] < MIN_ROWS or not shape[1]:
        return False
    return bool(shape[0] >= _TALL * shape[1]) or "emb" in name.lower()


def _of_model(model: nn.Module) -> Inspection:
    heads = {id(head) for declared in declared_heads(model).values() for head in declared}
    found = []
    first: dict[int, str] = {}  # by identity of what is stored, who has it
    for name, module in model.named_modules():
        if isinstance(module, StructuredTable):
            stored = getattr(module, module.structure.tensors()[0].name)
            found.append(_of_layer(name, module, first.setdefault(id(stored), name) != name))
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.Linear)):
            weight = module.weight
            if isinstance(module, nn.Linear) and id(module) not in heads:
                continue
            if len(weight) >= MIN_ROWS:
                tied = first.setdefault(id(weight), name) != name
                found.append(_of_dense(name, type(module).__name__, weight, tied))
    return Inspection(tuple(found))


@torch.no_grad()
def _of_layer(name: str, layer: StructuredTable, tied: bool = False) -> Inspected:
    params = {key: tensor.detach() for key, tensor in layer.params().items()}
    rows = layer.structure.lookup(params, _picked(layer.structure.rows, next(iter(params.values())).device), "auto")
    finite = all(map(_is_finite, params.values()))
    tied = tied or (isinstance(layer, Head) and layer.is_tied)
    sizes = {"numbers": layer._stored_numbers, "bytes": layer._stored_bytes, "ratio": layer.compression_ratio}
    return _inspected(name, type(layer).__name__, tied, layer.structure, rows, finite=finite, **sizes)


@torch.no_grad()
def _of_dense(name: str, kind: str, weight: Tensor, tied: bool = False) -> Inspected:
    budget, finite = Budget(len(weight), weight.shape[1], weight.dtype), _is_finite(weight)
    possible = []
    for format in (format for known in formats() for format in known.without_training() if finite and not tied):
        with suppress(OutOfReachError):
            possible.append((repr(format), budget.ratio(format.bind(budget))))
    rows, plain = weight[_picked(len(weight), weight.device)], plain_format().bind(budget)
    sizes = {"numbers": weight.numel(), "bytes": weight.nbytes, "ratio": 1.0}
    return _inspected(name, kind, tied, plain, rows, finite=finite, possible=tuple(possible), **sizes)


def _inspected(
    name: str, layer: str, tied: bool, structure: Structure, rows: Tensor, *, finite: bool, **more: Any
) -> Inspected:
    std = frobenius(rows) / max(1, rows.numel()) ** 0.5
    spectrum = _spectrum(rows) if finite else ()
    facts = {"kind": structure.kind, "sizes": structure.summary, "std": std, "spectrum": spectrum}
    return Inspected(name, f"{layer} (tied)" if tied else layer, finite=finite, **facts, **more)


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


def _picked(count: int, device: torch.device) -> Tensor:  # -> (n,)
    if count <= _ROWS:
        return torch.arange(count, device=device)
    return torch.randperm(count, generator=torch.Generator("cpu").manual_seed(0), device="cpu")[:_ROWS].to(device)
