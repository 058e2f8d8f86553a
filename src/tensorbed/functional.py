"""Lookups, bags and products with a structured table, for tensors given by the caller; layers are built on these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tensorbed.backends.pooling import MODES, bounds_of, scale_by_frequency
from tensorbed.backends.scores.scoring import scores_of_rows
from tensorbed.checks import naming, require_integer_indices, wrapped_padding_idx
from tensorbed.dispatch import (
    BACKENDS,
    Asked,
    Backend,
    World,
    checked_indices,
    chosen,
    full_precision,
    handed_on,
    working_dtype,
    world_of,
)
from tensorbed.indexing import reads_values
from tensorbed.structures import Explanation, Params, Structure

_INTEGERS = (torch.int64, torch.int32)


def lookup(
    structure: Structure,
    params: Params,
    index: Tensor,
    *,
    impl: str = "auto",
    padding_idx: int | None = None,
    padding_row: Tensor | None = None,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """``table[index]`` without the table.

    Args:
        impl: ``"auto"``, or one of ``structure.impls``. Exported graphs always take the reference.
        padding_idx: an index that gives ``padding_row``, or zeros, without gradient.
        scale_grad_by_freq: divide each row's gradient by how often its index occurs.

    Shape:
        - index: ``(*)``, int32 or int64; an index outside ``[0, rows)`` raises ``IndexError``, exported graphs clamp it
        - padding_row: ``(cols,)``
        - output: ``(*, cols)``

    Example::

        >>> layer = tb.TTEmbedding(25_000, 256, rank=16)
        >>> tb.functional.lookup(layer.structure, layer.params(), torch.tensor([0, 24_999])).shape
        torch.Size([2, 256])
    """
    asked = request(structure, params, index, impl, padding_idx)
    if padding_row is not None and padding_idx is not None:
        if padding_row.shape != (structure.cols,):
            raise ValueError(f"padding_row has shape {tuple(padding_row.shape)}; ({structure.cols},) is needed.")
        asked = asked._replace(padding_row=padding_row)
    world = world_of(index)
    asked = handed_on(asked, world)
    rows = chosen(asked, world).compute([asked], world)
    # Even what does nothing takes a microsecond, and a row has few.
    rows = rows if index.dim() == 1 else rows.view(*index.shape, structure.cols)
    return scale_by_frequency(rows, index, world) if scale_grad_by_freq else rows


def request(
    structure: Structure,
    params: Params,
    index: Tensor,
    impl: str,
    padding_idx: int | None = None,
    *,
    checked: bool = False,
) -> Asked:
    """What is asked of a table, its tensors and the dtype of the indices ``(*)`` checked; their range may have been."""
    if not isinstance(index, Tensor) or index.dtype not in _INTEGERS:
        require_integer_indices(index)
    if impl != "auto":
        check_impl(structure, impl)
    check_params(structure, params)
    if padding_idx is not None and not (type(padding_idx) is int and 0 <= padding_idx < structure.rows):
        padding_idx = wrapped_padding_idx(padding_idx, structure.rows)
    flat = index if index.dim() == 1 else index.reshape(-1)
    flat = flat if flat.dtype == torch.int64 else flat.long()
    return Asked(structure, params, structure.made_of(params), flat, impl, padding_idx, checked=checked)


class Pooling(NamedTuple):
    """How rows become bags, by the names that ``torch.nn.EmbeddingBag`` has for it, and ``impl`` as in :func:`lookup`.

    Rows at ``padding_idx`` do not take part.
    """

    mode: str = "mean"  # or "sum", "max"
    include_last_offset: bool = False  # whether the last offset is the end of the last bag
    padding_idx: int | None = None
    scale_grad_by_freq: bool = False
    impl: str = "auto"


def bags(
    structure: Structure,
    params: Params,
    pooling: Pooling,
    index: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Bags of rows pooled: ``torch.nn.functional.embedding_bag`` without the table.

    Shape:
        - index: ``(bags, length)``, or ``(n,)`` with offsets ``(bags,)``; int32 or int64
        - per_sample_weights: like index, with ``mode="sum"`` only
        - output: ``(bags, cols)``
    """
    asked, world = request_bags(structure, params, pooling, index, offsets, per_sample_weights)
    return pooled([asked], world)


def request_bags(
    structure: Structure,
    params: Params,
    pooling: Pooling,
    index: Tensor,
    offsets: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    owner: str = "",
) -> tuple[Asked, World]:
    """What bags ask of a table, one of several by its name: what can be refused is, before anything is computed."""
    if not isinstance(pooling, Pooling):
        raise TypeError(f'pooling must be a Pooling, such as Pooling(mode="sum"), got {type(pooling).__name__}.')
    mode, include_last_offset, padding_idx, by_frequency, impl = pooling
    with naming(owner):
        check_mode(mode, by_frequency)
        require_integer_indices(index)
        if weights is not None:
            _check_weights(weights, index, mode, dtype_of(structure, params))
            weights = weights.reshape(-1)
        world = world_of(index)
        bounds, ids = bounds_of(index, offsets, include_last_offset, world), index.reshape(-1)
    reads = world is World.EAGER and reads_values(ids.device)
    if owner and (reads or world is not World.EAGER):  # whoever looks up checks too, and does not know the name
        ids = checked_indices(ids, structure.rows, world, owner)
    if reads and index.dim() == 1:  # bags that are rows of 2-D indices hold all of them
        end = int(bounds[-1]) if bounds.shape[0] > 1 else 0
        if end < ids.shape[0]:  # torch's kernels would count what is beyond the last bag into it
            checked_indices(ids[end:], structure.rows, world)
            ids, weights = ids[:end], None if weights is None else weights[:end]
    asked = request(structure, params, ids, impl, padding_idx)._replace(
        bounds=bounds, weights=weights, mode=mode, by_frequency=by_frequency
    )
    return asked, world


def request_columns(
    tables: Mapping[str, tuple[Structure, Params, Pooling]], ids: Tensor
) -> tuple[list[Asked], World]:  # (B, F)
    """One id of each table a row: bags of one id each are rows, and padding is zero."""
    world = world_of(ids)
    columns = ids.T.contiguous()  # once, for all that reads the ids of one table
    low, high = [0] * len(tables), [0] * len(tables)
    reads = world is World.EAGER and reads_values(ids.device)
    if reads and ids.shape[0]:
        # One pass over all fields; the table at fault is looked for afterwards.
        low, high = (bound.tolist() for bound in torch.aminmax(columns, dim=1))
    asked = []
    fields = zip(tables.items(), columns.unbind(0), low, high, strict=True)
    for (name, (structure, params, pooling)), column, least, most in fields:
        if world is not World.EAGER or least < 0 or most >= structure.rows:
            column = checked_indices(column, structure.rows, world, name)
        checked = reads or world is not World.EAGER
        table = request(structure, params, column, pooling.impl, pooling.padding_idx, checked=checked)
        if pooling.scale_grad_by_freq:
            bounds = torch.arange(ids.shape[0] + 1, device=ids.device)
            table = table._replace(bounds=bounds, by_frequency=True)
        asked.append(table)
    return asked, world


def _check_weights(weights: Tensor, index: Tensor, mode: str, dtype: torch.dtype) -> None:
    if not isinstance(weights, Tensor):
        raise TypeError(f"per_sample_weights must be a tensor, got {type(weights).__name__}.")
    if mode != "sum":
        raise ValueError(f'per_sample_weights needs mode="sum", as in torch; this layer has mode="{mode}".')
    if weights.dtype != dtype:
        raise TypeError(f"per_sample_weights is {weights.dtype}, the layer {dtype}; convert it.")
    if weights.shape != index.shape:
        raise ValueError(
            f"per_sample_weights has shape {tuple(weights.shape)}; one weight for each index of "
            f"shape {tuple(index.shape)} is needed."
        )


def check_mode(mode: str, scale_grad_by_freq: bool) -> None:
    """A way of pooling, or an error that lists them."""
    if mode not in MODES:
        raise ValueError(f'mode={mode!r}: choose one of "sum", "mean", "max".')
    if mode == "max" and scale_grad_by_freq:
        raise ValueError('scale_grad_by_freq=True does not go with mode="max", as in torch.')


def pooled(asked: Sequence[Asked], world: World) -> Tensor:  # -> (bags, sum of cols)
    """Bags, or rows where there are no bounds, of tables side by side; all that one backend takes in one call."""
    asked = [handed_on(table, world) for table in asked]
    backends = [chosen(table, world) for table in asked]
    kinds = [_kind(table, backend) for table, backend in zip(asked, backends, strict=True)]
    runs: list[list[int]] = []  # of neighbours of one kind: columns are copied in as few pieces as there are
    for at, kind in enumerate(kinds):
        if at and kind == kinds[at - 1]:
            runs[-1].append(at)
        else:
            runs.append([at])
    columns: dict[int, Tensor] = {}
    for kind in dict.fromkeys(kinds):
        own = [run for run in runs if kinds[run[0]] == kind]
        tables = [asked[at] for run in own for at in run]
        with full_precision(tables[0].ids):
            out = backends[own[0][0]].compute(tables, world)
        if len(runs) == 1:
            return out
        widths = [sum(asked[at].table.cols for at in run) for run in own]
        pieces = out.split(widths, 1) if len(own) > 1 else [out]  # a split of one would be copied in backward
        columns |= zip([run[0] for run in own], pieces, strict=True)
    return torch.cat([columns[run[0]] for run in runs], 1)


def _kind(asked: Asked, backend: Backend) -> tuple[object, ...]:
    """Tables of one kind are computed in one call."""
    dtype = next(tensor.dtype for tensor in asked.params.values() if tensor.is_floating_point())
    return backend.name, type(asked.made_of), dtype, asked.mode == "max", asked.by_frequency


def explain(structure: Structure, index: Tensor, *, impl: str = "auto") -> Explanation:
    """What :func:`lookup` would do for these indices, counted from the indices alone: no row is computed.

    Shape:
        - index: ``(*)``, int32 or int64, checked as :func:`lookup` checks them
    """
    check_impl(structure, impl)
    require_integer_indices(index)
    world = world_of(index)
    if world is not World.EAGER:
        raise ValueError("explain counts the indices themselves: call it eagerly, on a device that holds them.")
    return structure.explain(checked_indices(index, structure.rows, world), impl)


def explain_bags(asked: Asked, world: World) -> Explanation:
    """The same of bags, where each row is looked up once."""
    index, impl = asked.ids, asked.impl
    if world is not World.EAGER or impl == "reference" or index.numel() == 0:
        return explain(asked.table, index, impl=impl)
    return explain(asked.table, torch.unique(index), impl=impl).asked_by(index.shape[0])


def project(
    structure: Structure, params: Params, x: Tensor, start: int = 0, stop: int | None = None, *, impl: str = "auto"
) -> Tensor:
    """``x @ table[start:stop].T``, a block of rows at a time: logits over a part of the vocabulary, or all of it.

    Half precision is computed in single and rounded once.

    Args:
        impl: ``"auto"``, or ``"reference"``, which is twice differentiable.

    Shape:
        - x: ``(*, cols)``
        - output: ``(*, stop - start)``

    Example::

        >>> layer = tb.TTEmbedding(25_000, 256, rank=16)
        >>> tb.functional.project(layer.structure, layer.params(), torch.randn(3, 256), 0, 100).shape
        torch.Size([3, 100])
    """
    stop = structure.rows if stop is None else stop
    if not 0 <= start <= stop <= structure.rows:
        raise IndexError(
            f"rows {start} to {stop} are not a block of a table of {structure.rows} rows "
            f"(0 <= start <= stop <= {structure.rows})."
        )
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}.")
    if x.dim() == 0 or x.shape[-1] != structure.cols:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last size must be the table's {structure.cols} columns.")
    check_params(structure, params)
    check_score_impl(impl)
    wide = x.to(working_dtype(x, *params.values()))
    return scores_of_rows(structure, structure.widened(params, wide), wide, start, stop, impl).to(x.dtype)


def check_params(structure: Structure, params: Params) -> None:
    """The structure's tensors in their stored shapes, or an error that shows the first that is not."""
    for spec in structure.tensors():
        given = params.get(spec.name)
        if given is None or given.shape != spec.shape:
            found = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            raise ValueError(f"{spec.name} {found}; {structure.kind} keeps it as {spec.shape} (see layer.params()).")


def dtype_of(structure: Structure, params: Params) -> torch.dtype:
    """That of a table: of the tensors which did not declare their own."""
    own = (params[spec.name].dtype for spec in structure.tensors() if spec.dtype is None)
    return next(own, torch.get_default_dtype())


def check_impl(structure: Structure, impl: str) -> None:
    """A way of computing rows that this structure knows, or an error that lists them."""
    if impl not in structure.impls:
        allowed = ", ".join(f'"{name}"' for name in structure.impls)
        why = BACKENDS[impl].absent() if isinstance(impl, str) and impl in BACKENDS else ""
        reason = f" cannot be had: {why}; or" if why else ":"
        raise ValueError(f"impl={impl!r} for {structure.kind}{reason} choose one of {allowed}.")


def check_score_impl(impl: str) -> None:
    """A way of computing scores, or an error that lists them."""
    known = ["auto", *(name for name, backend in BACKENDS.items() if backend.scores)]
    if impl not in known:
        allowed = ", ".join(f'"{name}"' for name in known)
        raise ValueError(f"impl={impl!r}: choose one of {allowed}.")
