"""Compressing the tables of a model in place, their use recorded before if asked for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tensorbed.adapters import check_layers, tell
from tensorbed.checks import naming, require_bool
from tensorbed.compress.finding import MIN_ROWS, Formats, Weight, found_tables, is_scaled
from tensorbed.compress.report import Entry, Report
from tensorbed.files.description import check_reducers, put
from tensorbed.nn.embedding import Embedding, EmbeddingBag, ScaledEmbedding
from tensorbed.nn.head import Head, scoring_std
from tensorbed.nn.options import Deviation, check_options
from tensorbed.nn.table import StructuredTable
from tensorbed.progress import about, track
from tensorbed.structures import Format, Use
from tensorbed.structures.formats import require_format

_BLOCK = 2**12  # vectors multiplied at once


def compress_(
    model: nn.Module,
    format: Formats,
    *,
    min_rows: int = MIN_ROWS,
    skip: Sequence[str] = (),
    tied: str = "keep",
    fit: bool = True,
    std: Deviation = None,
    include_heads: bool = True,
    calibrate: Callable[[Any], object] | None = None,
) -> Report:
    """Replace the large tables of a model, in place, by structured ones.

    Tables are ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``; with ``include_heads`` also the heads over their
    vocabularies: each ``torch.nn.Linear`` that shares a table's weight, that the model or one inside of it gives as its
    ``get_output_embeddings()``, or that is named by a pattern that no table matches. Where no model speaks for it, a
    layer is also a head if it has as many outputs as one table, and no other, has rows, if no other linear layer has
    as many, and if it is in no ``ModuleList``; the report notes what was taken by its size alone.

    Device, dtype, padding, training mode and what is frozen stay as they are. Tables are fitted one after the other,
    all before the first is replaced: an error leaves the model as it was. At the most three times the largest table,
    counted in float32, is held beside the model and what it becomes.

    Args:
        model: changed in place.
        format: for all tables, or by pattern of their names as in ``fnmatch``, the first that matches; ``None`` leaves
            a table as it is.
        min_rows: smaller tables stay, unless a pattern is their very name; layers compressed already stay, too.
        skip: patterns of names to leave alone; one that no table or head matches is refused.
        include_heads: whether vocabulary heads are replaced, too.
        tied: ``"keep"`` tables that share their weight sharing it, or ``"untie"`` them.
        fit: to the table that is there; ``False`` draws anew, for training from scratch.
        std: of tables that are drawn anew, ``"glorot"`` for the paper's; by default 0.3, and ``1 / sqrt(in_features)``
            of heads and of tables that they share.
        calibrate: called with the model, to run it on typical inputs. Which rows are looked up and what vectors meet
            the heads is recorded meanwhile, and formats that can weigh their errors by it do.

    Example::

        >>> model = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 2))
        >>> report = tb.compress_(model, tb.QuantizedRows(bits=8))
        >>> print(report)
        table  size        format                  numbers before  numbers after  MB before  MB after  ratio  fit error
        0      5,000 x 64  quantized_rows, bits=8         320,000        325,000       1.28      0.34    3.8      0.006
        model                                             320,130        325,130       1.28      0.34   3.76
    """
    require_bool(fit, "fit")
    _check(model, format, fit)
    require_bool(include_heads, "include_heads")
    check_options(std=std)
    if fit and std is not None:
        raise ValueError(f"std={std!r} is for tables that are drawn anew, fit=False; a fit has the scale of its table.")
    if calibrate is not None and not (fit and callable(calibrate)):
        raise ValueError("calibrate is a function that runs the model, for fit=True; leave it out else.")
    before = _sizes(model)
    weights, left = found_tables(model, format, min_rows, skip, include_heads, tied)
    check_reducers(model, {name: module for weight in weights for name, module in weight.places.items()})
    uses: Mapping[str, Use] = {}
    if calibrate is not None:
        uses = _recorded(model, {name: one for weight in weights for name, one in weight.places.items()}, calibrate)
    layers: dict[str, StructuredTable] = {}
    entries: list[Entry] = []
    for weight in track(weights, "compressing tables"):
        for places in weight.groups(tied):
            replaced = _layers(weight, places, fit, std, uses)
            layers |= replaced
            entries.append(_entry(tuple(places), weight, next(iter(replaced.values()))))
    check_layers(model, layers.values())
    put(model, layers)
    tell(model)
    after = _sizes(model)
    return Report(tuple(entries), before[0], after[0], before[1], after[1], left)


def _check(model: nn.Module, format: Formats, fit: bool) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_ takes a model, got {type(model).__name__}.")
    if isinstance(model, (nn.Embedding, nn.EmbeddingBag, StructuredTable)) or type(model) is nn.Linear:
        raise TypeError(f"a {type(model).__name__} cannot be replaced in itself; use tb.Embedding.from_pretrained.")
    # By name, None leaves a table dense.
    formats = [one for one in format.values() if one is not None] if isinstance(format, Mapping) else [format]
    for one in formats:
        require_format(one)
        if fit and not one.can_fit:
            raise one.no_fit()


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Numbers and bytes of parameters and buffers, what is shared once."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    held = [part for tensor in tensors for part in _parts(tensor)]
    return sum(t.numel() for t in held), sum(t.nbytes for t in held)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """What a tensor is kept as: itself, or of a sparse one its numbers and where they stand."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def _layers(
    weight: Weight, places: Mapping[str, nn.Module], fit: bool, std: Deviation, uses: Mapping[str, Use]
) -> dict[str, StructuredTable]:
    """The layers for places that share one table, whose own comes first."""
    # Tables before heads, which share theirs.
    by_rank = sorted(places.items(), key=lambda place: isinstance(place[1], nn.Linear))
    if std is None and isinstance(by_rank[-1][1], nn.Linear):
        std = scoring_std(weight.tensor.shape[1])
    use = _together(uses[name] for name in places) if uses else None
    layers: dict[str, StructuredTable] = {}
    by_module: dict[nn.Module, StructuredTable] = {}
    for name, module in by_rank:
        first = next(iter(layers.values()), None)
        with naming(name), about(name):
            if module not in by_module:
                options = {"use": use} if fit else {"std": std}
                by_module[module] = _layer(module, weight.formats[name], first, fit, options)
        layers[name] = by_module[module].train(module.training)
    return layers


def _layer(
    module: Any, format: Format, first: StructuredTable | None, fit: bool, options: dict[str, Any]
) -> StructuredTable:
    if isinstance(module, nn.Linear):
        head: Head = _new(Head, module, format, fit, options) if first is None else Head.tied_to(first)
        head.bias = module.bias
        return head
    kind: Any = ScaledEmbedding if is_scaled(module) else Embedding
    names = ["padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
    if isinstance(module, nn.EmbeddingBag):
        kind, names = EmbeddingBag, [*names, "mode", "include_last_offset"]
    own = {name: getattr(module, name) for name in names}
    if first is None:
        layer: StructuredTable = _new(kind, module, format, fit, {**options, **own})
        if isinstance(layer, ScaledEmbedding):
            layer.embed_scale, layer.rounds_scale = float(module.embed_scale), isinstance(module.embed_scale, Tensor)
        return layer
    scales = [float(getattr(one, "embed_scale", 1.0)) for one in (first, module)]
    alike = type(first) is kind and scales[0] == scales[1]
    if not alike or any(getattr(first, name) != value for name, value in own.items()):
        raise ValueError('shares its weight with a table of other options; use tied="untie".')
    return first


def _new(kind: Any, module: Any, format: Format, fit: bool, options: dict[str, Any]) -> Any:
    """A layer fitted to the module's weight, or drawn with its sizes; frozen where that is."""
    weight: Tensor = module.weight
    if fit:
        return kind.from_pretrained(weight, format, not weight.requires_grad, **options)
    sizes = reversed(weight.shape) if kind is Head else weight.shape
    layer = kind(*sizes, format, device=weight.device, dtype=weight.dtype, **options)
    return layer.requires_grad_(weight.requires_grad)


def _entry(names: tuple[str, ...], weight: Weight, layer: StructuredTable) -> Entry:
    return Entry(
        names=names,
        rows=weight.tensor.shape[0],
        cols=weight.tensor.shape[1],
        format=f"{layer.structure.kind}, {layer.structure.describe()}",
        numbers_before=weight.tensor.numel(),
        numbers_after=layer._stored_numbers,
        bytes_before=weight.tensor.nbytes,
        bytes_after=layer._stored_bytes,
        error=layer.fit_error,
        same_rows_as=weight.same_rows_as,
    )


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


def _recorded(model: nn.Module, modules: Mapping[str, nn.Module], run: Callable[[Any], object]) -> dict[str, Use]:
    """What each module was given while ``run(model)`` ran; modes and hooks are as before when it is done, or failed."""
    records = {module: _Record(module) for module in modules.values()}
    with ExitStack() as as_before, torch.no_grad():
        for module in model.modules():
            as_before.callback(setattr, module, "training", module.training)
        for module, record in records.items():
            as_before.enter_context(module.register_forward_pre_hook(record.see, with_kwargs=True))
        run(model.eval())
    # A table that shares its weight with one that ran may only stand for it, as T5's.
    ran = {id(module.weight) for module, record in records.items() if record.seen}
    needed = {module for module, record in records.items() if record.is_head or id(module.weight) not in ran}
    if idle := [name for name, module in modules.items() if module in needed and not records[module].seen]:
        raise ValueError(f"calibrate did not run {', '.join(idle)}; give it inputs that do, or skip these layers.")
    return {name: records[module].use() for name, module in modules.items()}


def _together(uses: Iterable[Use]) -> Use:
    """The use of a table that several layers share."""
    found = list(uses)
    counts = [use.counts for use in found if use.counts is not None]
    moments = [use.moment for use in found if use.moment is not None]
    return Use(torch.stack(counts).sum(0) if counts else None, torch.stack(moments).mean(0) if moments else None)
