"""Compressing the tables of a model in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from tensorbed.adapters import check_layers, tell
from tensorbed.checks import naming, require_bool, require_int
from tensorbed.compress.calibration import recorded, together
from tensorbed.compress.finding import MIN_ROWS, Formats, Weight, found_tables, is_scaled
from tensorbed.compress.plans import Plan
from tensorbed.compress.report import Entry, Report
from tensorbed.files.description import put
from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.embedding import Embedding, ScaledEmbedding
from tensorbed.nn.head import Head, scoring_std
from tensorbed.nn.options import Deviation, check_format, check_options
from tensorbed.nn.table import StructuredTable
from tensorbed.progress import about, track
from tensorbed.structures import Format, Use


class _Drawn(NamedTuple):
    """How tables are drawn that are not fitted."""

    std: Deviation


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
        format: for all tables, or by pattern of their names as in ``fnmatch``, the first that matches; ``None`` leaves
            a table as it is.
        min_rows: smaller tables stay, unless a pattern is their very name; layers compressed already stay, too.
        skip: patterns of names to leave alone; one that no table or head matches is refused.
        tied: ``"keep"`` tables that share their weight sharing it, or ``"untie"`` them.
        fit: to the table that is there; ``False`` draws anew, for training from scratch.
        std: of tables that are drawn anew, ``"glorot"`` for the paper's; by default 0.3, and ``1 / sqrt(in_features)``
            of heads and of tables that they share.
        calibrate: called with the model, to run it on typical inputs. Which rows are looked up and what vectors meet
            the heads is recorded meanwhile, and formats that can weigh their errors by it do.

    Example::

        >>> report = tb.compress_(model, tb.HotRows())
        >>> print(report)
    """
    _check(model, format, min_rows, skip, tied)
    require_bool(fit, "fit")
    require_bool(include_heads, "include_heads")
    check_options(std=std)
    if fit and std is not None:
        raise ValueError(f"std={std!r} is for tables that are drawn anew, fit=False; a fit has the scale of its table.")
    if calibrate is not None and not (fit and callable(calibrate)):
        raise ValueError("calibrate is a function that runs the model, for fit=True; leave it out else.")
    before = _sizes(model)
    tables, left = found_tables(model, format, min_rows, tuple(skip), include_heads, tied)
    if isinstance(format, Plan):
        for table in tables:  # a plan names heads that nobody named to it
            table.same_rows_as = format.same_rows_as.get(table.name)
    uses: Mapping[str, Use] = {}
    if calibrate is not None:
        uses = recorded(model, {name: one for table in tables for name, one in table.places.items()}, calibrate)
    drawn = None if fit else _Drawn(std)
    made = [_made(table, tied, drawn, uses) for table in track(tables, "compressing tables")]
    layers = {name: layer for replaced, _ in made for name, layer in replaced.items()}
    check_layers(model, layers.values())
    put(model, layers)
    tell(model)
    after = _sizes(model)
    entries = tuple(entry for _, group in made for entry in group)
    return Report(entries, before[0], after[0], before[1], after[1], left)


def _check(model: nn.Module, format: Formats, min_rows: int, skip: Sequence[str], tied: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"compress_ takes a model, got {type(model).__name__}.")
    if isinstance(model, (nn.Embedding, nn.EmbeddingBag, StructuredTable)) or type(model) is nn.Linear:
        raise TypeError(f"a {type(model).__name__} cannot be replaced in itself; use tb.Embedding.from_pretrained.")
    for one in format.values() if isinstance(format, Mapping) else [format]:
        if one is not None:
            check_format(one)
    require_int(min_rows, "min_rows")
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r}: give a list of patterns.")
    if tied not in ("keep", "untie"):
        raise ValueError(f'tied={tied!r}: choose "keep" or "untie".')


def _sizes(model: nn.Module) -> tuple[int, int]:
    """Numbers and bytes of parameters and buffers, what is shared once."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    return sum(t.numel() for t in held), sum(t.numel() * t.element_size() for t in held)


def _made(
    table: Weight, tied: str, drawn: _Drawn | None, uses: Mapping[str, Use]
) -> tuple[dict[str, StructuredTable], list[Entry]]:
    """The layers for all places of a weight, and what to report of them."""
    groups = [{name: module} for name, module in table.places.items()] if tied == "untie" else [table.places]
    replaced: dict[str, StructuredTable] = {}
    entries = []
    for places in groups:
        scores = any(isinstance(module, nn.Linear) for module in places.values())
        as_drawn = _Drawn(scoring_std(table.tensor.shape[1])) if scores and drawn == _Drawn(None) else drawn
        use = together(uses[name] for name in places) if uses else None
        first: StructuredTable | None = None
        by_module: dict[int, StructuredTable] = {}
        # Tables before heads, which share theirs.
        for name, module in sorted(places.items(), key=lambda item: isinstance(item[1], nn.Linear)):
            with naming(name), about(name):
                layer = by_module.get(id(module)) or _layer(module, table.formats[name], first, as_drawn, use)
            layer.train(module.training)
            by_module[id(module)], first = layer, first or layer
            replaced[name] = layer
        assert first is not None
        entries.append(_entry(tuple(places), table, first))
    return replaced, entries


def _layer(
    module: nn.Module, format: Format, first: StructuredTable | None, drawn: _Drawn | None, use: Use | None
) -> StructuredTable:
    if isinstance(module, nn.Linear):
        head: Head = Head.tied_to(first) if first is not None else _new(Head, module, format, drawn, use)
        head.bias = module.bias
        return head
    kind, options = _kind(module), _options(module)
    if first is not None:
        scales = [float(getattr(one, "embed_scale", 1.0)) for one in (first, module)]
        other = scales[0] != scales[1] or any(getattr(first, name) != value for name, value in options.items())
        if type(first) is not kind or other:
            raise ValueError('shares its weight with a table of other options; use tied="untie".')
        return first
    layer: StructuredTable = _new(kind, module, format, drawn, use, **options)
    if isinstance(layer, ScaledEmbedding):
        scale: Any = module.embed_scale
        layer.embed_scale, layer.rounds_scale = float(scale), isinstance(scale, Tensor)
    return layer


def _new(kind: Any, module: nn.Module, format: Format, drawn: _Drawn | None, use: Use | None, **options: Any) -> Any:
    """A layer fitted to the module's weight, or drawn with its sizes; frozen where that is."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if drawn is None:
        return kind.from_pretrained(weight, format, not weight.requires_grad, use=use, **options)
    sizes = reversed(weight.shape) if kind is Head else weight.shape
    layer = kind(*sizes, format, std=drawn.std, device=weight.device, dtype=weight.dtype, **options)
    return layer.requires_grad_(weight.requires_grad)


def _kind(module: nn.Module) -> Any:
    if isinstance(module, nn.EmbeddingBag):
        return EmbeddingBag
    return ScaledEmbedding if is_scaled(module) else Embedding


def _options(module: nn.Module) -> dict[str, Any]:
    names = ["padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
    names += ["mode", "include_last_offset"] if isinstance(module, nn.EmbeddingBag) else []
    return {name: getattr(module, name) for name in names}


def _entry(names: tuple[str, ...], table: Weight, layer: StructuredTable) -> Entry:
    weight = table.tensor
    return Entry(
        names=names,
        rows=weight.shape[0],
        cols=weight.shape[1],
        format=f"{layer.structure.kind}, {layer.structure.describe()}",
        numbers_before=weight.numel(),
        numbers_after=layer._stored_numbers,
        bytes_before=weight.numel() * weight.element_size(),
        bytes_after=layer._stored_bytes,
        error=layer.fit_error,
        same_rows_as=table.same_rows_as,
    )
