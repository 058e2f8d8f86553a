"""Compressing the tables of a model in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from tensorbed.calibration import recorded, together
from tensorbed.checks import naming, require_int
from tensorbed.nn.bag import EmbeddingBag
from tensorbed.nn.described import put
from tensorbed.nn.embedding import Embedding, ScaledEmbedding
from tensorbed.nn.head import Head
from tensorbed.nn.table import StructuredTable, check_format
from tensorbed.report import Entry, Report
from tensorbed.structures import Format, Use

Formats = Format | Mapping[str, Format | None]


@dataclass
class _Table:
    """One weight and all modules that hold it."""

    weight: Tensor
    format: Format
    places: dict[str, nn.Module] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return next(iter(self.places))


def compress_(
    model: nn.Module,
    format: Formats,
    *,
    min_rows: int = 2000,
    skip: Sequence[str] = (),
    tied: str = "keep",
    fit: bool = True,
    include_heads: bool = True,
    calibrate: Callable[[Any], object] | None = None,
) -> Report:
    """Replace the large tables of a model, in place, by structured ones.

    Tables are ``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag``; with ``include_heads`` also each
    ``torch.nn.Linear`` over the same vocabulary: one that shares a table's weight, is the model's
    ``get_output_embeddings()``, has a table's size, or is named by a pattern itself. Device, dtype, padding, training
    mode and what is frozen stay as they are. Everything is fitted before the first layer is replaced: an error leaves
    the model as it was.

    Args:
        format: for all tables, or by pattern of their names as in ``fnmatch``, the first that matches; ``None`` leaves
            a table as it is.
        min_rows: smaller tables stay, unless a pattern is their very name.
        skip: patterns of names to leave alone.
        tied: ``"keep"`` tables that share their weight sharing it, or ``"untie"`` them.
        fit: to the table that is there; ``False`` draws anew, for training from scratch.
        calibrate: called with the model, to run it on typical inputs. Which rows are looked up and what vectors meet
            the heads is recorded meanwhile, and formats that can weigh their errors by it do.

    Example::

        >>> report = tb.compress_(model, tb.ProductQuantized(ratio=8))
        >>> print(report)
    """
    _check(model, format, min_rows, skip, tied)
    if calibrate is not None and not (fit and callable(calibrate)):
        raise ValueError("calibrate is a function that runs the model, for fit=True; leave it out else.")
    before = _sizes(model)
    tables, left = _found(model, format, min_rows, tuple(skip), include_heads, tied)
    uses: Mapping[str, Use] = {}
    if calibrate is not None:
        uses = recorded(model, {name: one for table in tables for name, one in table.places.items()}, calibrate)
    made = [_made(table, tied, fit, uses) for table in tables]
    put(model, {name: layer for replaced, _ in made for name, layer in replaced.items()})
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
    found: Iterable[Tensor] = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
    held = list(found)
    return sum(t.numel() for t in held), sum(t.numel() * t.element_size() for t in held)


def _found(
    model: nn.Module, format: Formats, min_rows: int, skip: tuple[str, ...], include_heads: bool, tied: str
) -> tuple[list[_Table], dict[str, str]]:
    """Weights to compress, with all their places, and why others stay."""
    tables: dict[int, _Table] = {}
    left: dict[str, str] = {}
    used: set[str] = set()
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or any(_matches(name, p) for p in skip):
            continue
        pattern, chosen = _chosen(name, format)
        used.add(pattern)
        if chosen is None:
            left[name] = "no format for it"
        elif module.weight.shape[0] < min_rows and pattern != name:
            left[name] = f"{module.weight.shape[0]:,} rows"
        else:
            _refuse_subclass(name, module)
            _refuse_changed(name, module)
            tables.setdefault(id(module.weight), _Table(module.weight, chosen)).places[name] = module
    if include_heads:
        _add_heads(model, modules, format, skip, tables, used)
    if tied == "keep":
        _refuse_broken_ties(modules, tables)
    if isinstance(format, Mapping) and (unused := [p for p in format if p not in used]):
        names = [n for n, m in modules.items() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
        raise ValueError(f"no table matches {', '.join(unused)}; the model has {', '.join(names) or 'none'}.")
    return list(tables.values()), left


def _chosen(name: str, format: Formats) -> tuple[str, Format | None]:
    """The pattern that matches, and its format."""
    if isinstance(format, Format):
        return "*", format
    pattern = next((p for p in format if _matches(name, p)), "")
    return pattern, format.get(pattern)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _refuse_changed(name: str, module: nn.Module) -> None:
    """What was added to a layer would be lost with it."""
    hooks = [key for key in vars(module) if "hooks" in key and vars(module)[key]]
    if hooks or "forward" in vars(module) or "weight" not in module._parameters:
        what = (
            "hooks" if hooks else "a forward of its own" if "forward" in vars(module) else "a weight that is computed"
        )
        raise ValueError(f"{name} has {what}, which its replacement would not have; remove that first, or skip {name}.")


def _refuse_subclass(name: str, module: nn.Module) -> None:
    exact = type(module) in (nn.Embedding, nn.EmbeddingBag)
    if not exact and not _is_scaled(module):
        raise TypeError(
            f"{name} is a {type(module).__name__}, whose forward may do more than look up; leave it out with "
            f'skip=["{name}"], or replace it yourself.'
        )


def _is_scaled(module: nn.Module) -> bool:
    """The scaled embeddings of transformers' Gemma, BART and their kin: rows times ``embed_scale`` and nothing else."""
    return type(module).__name__.endswith("ScaledWordEmbedding") and hasattr(module, "embed_scale")


def _add_heads(
    model: nn.Module,
    modules: Mapping[str, nn.Module],
    format: Formats,
    skip: tuple[str, ...],
    tables: dict[int, _Table],
    used: set[str],
) -> None:
    """Linear layers over a vocabulary that is compressed."""
    output = None
    with suppress(NotImplementedError, AttributeError):
        output = model.get_output_embeddings()  # type: ignore[operator]
    sizes = {tuple(table.weight.shape): table.format for table in tables.values()}
    for name, module in modules.items():
        if type(module) is not nn.Linear or any(_matches(name, p) for p in skip):
            continue
        named = format.get(name) if isinstance(format, Mapping) else None
        if isinstance(format, Mapping) and name in format:
            used.add(name)
            if named is None:
                continue
        if id(module.weight) in tables:
            _refuse_changed(name, module)
            tables[id(module.weight)].places[name] = module
        elif named is not None or (module is output and sizes) or tuple(module.weight.shape) in sizes:
            _refuse_changed(name, module)
            chosen = named or sizes.get(tuple(module.weight.shape)) or next(iter(sizes.values()))
            tables[id(module.weight)] = _Table(module.weight, chosen, {name: module})


def _refuse_broken_ties(modules: Mapping[str, nn.Module], tables: Mapping[int, _Table]) -> None:
    """Whoever else holds a weight would go on with the dense one, alone."""
    for name, module in modules.items():
        for own, parameter in module._parameters.items():
            table = tables.get(id(parameter))
            if table is not None and name not in table.places:
                raise ValueError(
                    f"{name}.{own} shares the weight of {table.name} and is not among the layers to compress; skip "
                    f'{table.name} too, or break the tie with tied="untie".'
                )


def _made(
    table: _Table, tied: str, fit: bool, uses: Mapping[str, Use]
) -> tuple[dict[str, StructuredTable], list[Entry]]:
    """The layers for all places of a weight, and what to report of them."""
    groups = [{name: module} for name, module in table.places.items()] if tied == "untie" else [table.places]
    replaced: dict[str, StructuredTable] = {}
    entries = []
    for places in groups:
        use = together(uses[name] for name in places) if uses else None
        first: StructuredTable | None = None
        by_module: dict[int, StructuredTable] = {}
        # Tables before heads, which share theirs.
        for name, module in sorted(places.items(), key=lambda item: isinstance(item[1], nn.Linear)):
            with naming(name):
                layer = by_module.get(id(module)) or _layer(module, table.format, first, fit, use)
            layer.train(module.training)
            by_module[id(module)], first = layer, first or layer
            replaced[name] = layer
        assert first is not None
        entries.append(_entry(tuple(places), table, first))
    return replaced, entries


def _layer(
    module: nn.Module, format: Format, first: StructuredTable | None, fit: bool, use: Use | None
) -> StructuredTable:
    if isinstance(module, nn.Linear):
        head = _new_head(module, format, fit, use) if first is None else Head.tied_to(first)
        head.bias = module.bias
        return head
    options = _options(module)
    if first is not None:
        scales = [float(getattr(one, "embed_scale", 1.0)) for one in (first, module)]
        other = scales[0] != scales[1] or any(getattr(first, name) != value for name, value in options.items())
        if type(first) is not _kind(module) or other:
            raise ValueError('shares its weight with a table of other options; use tied="untie".')
        return first
    kind = _kind(module)
    weight: Tensor = module.weight  # type: ignore[assignment]
    layer: StructuredTable
    if fit:
        layer = kind.from_pretrained(weight, format, not weight.requires_grad, use=use, **options)
    else:
        layer = kind(*weight.shape, format, device=weight.device, dtype=weight.dtype, **options)
        layer.requires_grad_(weight.requires_grad)
    if isinstance(layer, ScaledEmbedding):
        layer.embed_scale = float(module.embed_scale)  # type: ignore[arg-type]
    return layer


def _kind(module: nn.Module) -> Any:
    if isinstance(module, nn.EmbeddingBag):
        return EmbeddingBag
    return ScaledEmbedding if _is_scaled(module) else Embedding


def _options(module: nn.Module) -> dict[str, Any]:
    names = ["padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"]
    names += ["mode", "include_last_offset"] if isinstance(module, nn.EmbeddingBag) else []
    return {name: getattr(module, name) for name in names}


def _new_head(module: nn.Linear, format: Format, fit: bool, use: Use | None) -> Head:
    weight = module.weight
    if fit:
        return Head.from_pretrained(weight, format, not weight.requires_grad, use=use)
    head = Head(module.in_features, module.out_features, format, device=weight.device, dtype=weight.dtype)
    head.requires_grad_(weight.requires_grad)
    return head


def _entry(names: tuple[str, ...], table: _Table, layer: StructuredTable) -> Entry:
    weight = table.weight
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
    )
