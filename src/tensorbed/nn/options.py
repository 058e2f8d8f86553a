"""What a layer over a table is given besides its sizes, and what of that is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypedDict, TypeVar

from tensorbed.checks import require_bool, require_number

Deviation = float | Literal["glorot"] | None
GLOROT = "glorot"


class TableOptions(TypedDict, total=False):
    """Keyword arguments of every layer: those of ``torch.nn.Embedding``, and ``std`` and ``impl``."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool
    std: Deviation
    impl: str


Function = TypeVar("Function", bound=Callable[..., Any])


def check_options(
    *,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    std: Deviation = None,
    impl: str = "auto",
    **unknown: object,
) -> None:
    """Refuse what cannot be had before anything is drawn or fitted."""
    if unknown:
        names, known = ", ".join(unknown), ", ".join(TableOptions.__annotations__)
        raise TypeError(f"unexpected argument {names}; besides the sizes there are {known}, and dtype.")
    if max_norm is not None:
        raise ValueError(
            f"max_norm={max_norm} is not supported: rows of a structured table share their numbers, so that one "
            "cannot be renormalised without changing others. Leave max_norm=None and clip the output instead."
        )
    require_bool(scale_grad_by_freq, "scale_grad_by_freq")
    if require_bool(sparse, "sparse"):
        raise ValueError(
            "sparse=True is not supported: every lookup touches the few shared tensors, whose gradients are "
            "dense and small. Leave sparse=False; any optimiser works."
        )
    if isinstance(std, str) and std != GLOROT:
        raise ValueError(f'std={std!r}: give a number, or "glorot" for sqrt(2 / (rows + columns)), as in the paper.')
    if std is not None and std != GLOROT:
        require_number(std, "std", low=0)


def options_shown(function: Function) -> Function:
    """Have ``inspect.signature``, and with it notebooks, list the options one by one, as type checkers see them."""
    own = inspect.signature(function)
    *named, _ = own.parameters.values()  # the last is **options
    each = [one for one in inspect.signature(check_options).parameters.values() if one.kind is one.KEYWORD_ONLY]
    function.__signature__ = own.replace(parameters=[*named, *each])  # type: ignore[attr-defined]
    return function
