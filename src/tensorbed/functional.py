"""Lookups and products with a structured table, for tensors given by the caller. The layers are built on these."""

from __future__ import annotations

import torch
from torch import Tensor

from tensorbed.backends import native
from tensorbed.backends.native.chains import Table, compute, takes
from tensorbed.backends.scores.rows import scores_of_rows
from tensorbed.checks import require_integer_indices
from tensorbed.dispatch import checked_indices, full_precision, is_exporting, is_plain, is_recorded, working_dtype
from tensorbed.structures import Explanation, Params, Structure


def lookup(structure: Structure, params: Params, index: Tensor, *, impl: str = "auto") -> Tensor:
    """``table[index]`` without the table.

    Args:
        impl: ``"auto"``, or one of ``structure.impls``. Exported graphs always take the reference.

    Shape:
        - index: ``(*)``, int32 or int64; an index outside ``[0, rows)`` raises ``IndexError``, exported graphs clamp it
        - output: ``(*, cols)``
    """
    check_impl(structure, impl)
    table = compiled_table(structure, params, index, impl)
    if table is not None:
        return shaped_like(index, compute([table]))
    check_params(structure, params)
    flat = checked_indices(index, structure.rows)
    if is_exporting():
        impl = "reference"
    with full_precision(next(iter(params.values()))):
        rows = structure.rows_of(params, flat) if impl == "reference" else structure.lookup(params, flat, impl)
    return rows.reshape(*index.shape, structure.cols)


def compiled_table(structure: Structure, params: Params, index: Tensor, impl: str) -> Table | None:
    """What to ask of the compiled kernels, which check the values of indices themselves; ``None`` where they are none.

    Shape:
        - index: ``(*)``, int32 or int64
    """
    if not native.available or impl not in ("auto", "native") or not isinstance(index, Tensor):
        return None
    if not is_plain(index) or is_recorded():
        return None
    if index.dtype not in (torch.int64, torch.int32) or index.numel() == 0:
        return None
    check_params(structure, params)
    found = structure.as_chain(params)
    if found is None:
        return None
    chain, cores = found
    # Even what does nothing takes a microsecond, and a row has few.
    flat = index if index.dim() == 1 else index.reshape(-1)
    flat = flat if flat.dtype == torch.int64 else flat.long()
    flat = flat.resolve_neg() if flat.is_neg() else flat
    if takes(cores, flat):
        return Table(chain, cores, flat)
    if impl == "native":
        kinds = {f"{type(t).__name__} of {str(t.dtype)[6:]} on {t.device}" for t in (*cores, index)}
        raise ValueError(
            'impl="native" computes on the CPU, with plain tensors of one dtype and at most 2^31 - 1 indices, got '
            f'{index.numel()} indices and {", ".join(sorted(kinds))}; use impl="auto".'
        )
    return None


def shaped_like(index: Tensor, rows: Tensor) -> Tensor:  # (*), (n, cols) -> (*, cols)
    """Rows of flattened indices in the indices' own shape."""
    return rows if index.dim() == 1 else rows.view(*index.shape, rows.shape[1])


def explain(structure: Structure, index: Tensor, *, impl: str = "auto") -> Explanation:
    """What :func:`lookup` would do for these indices, counted from the indices alone: no row is computed.

    Shape:
        - index: ``(*)``, int32 or int64, checked as :func:`lookup` checks them
    """
    check_impl(structure, impl)
    require_integer_indices(index)
    if not is_plain(index):
        raise ValueError("explain counts the indices themselves: call it eagerly, on a device that holds them.")
    return structure.explain(checked_indices(index, structure.rows), impl)


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
    if impl not in ("auto", "reference"):
        raise ValueError(f'impl={impl!r}: choose one of "auto", "reference".')
    wide = x.to(working_dtype(x, *params.values()))
    return scores_of_rows(structure, structure.widened(params, wide), wide, start, stop, impl).to(x.dtype)


def check_params(structure: Structure, params: Params) -> None:
    """The structure's tensors in their stored shapes, or an error that shows the first that is not."""
    for spec in structure.tensors():
        given = params.get(spec.name)
        if given is None or given.shape != spec.shape:
            found = "is missing" if given is None else f"has shape {tuple(given.shape)}"
            raise ValueError(f"{spec.name} {found}; {structure.kind} keeps it as {spec.shape} (see layer.params()).")


def check_impl(structure: Structure, impl: str) -> None:
    """A way of computing rows that this structure knows, or an error that lists them."""
    if impl not in structure.impls:
        allowed = ", ".join(f'"{name}"' for name in structure.impls)
        raise ValueError(f"impl={impl!r} for {structure.kind}: choose one of {allowed}.")
