"""Choosing a format for every table of a model under a budget or a ratio, by measured error or by rule."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from functools import partial

import torch
from torch import Tensor, nn

from tensorbed.checks import naming, require_bool, require_int, require_number, require_positive
from tensorbed.compress.finding import MIN_ROWS, Weight, found_tables
from tensorbed.compress.report import Option, Plan, why_nothing
from tensorbed.fitting import check_table, fit_table
from tensorbed.progress import about, track
from tensorbed.structures import Format, Structure
from tensorbed.structures.formats import Budget, OutOfRangeError, OutOfReachError, require_format
from tensorbed.structures.registry import formats as every_format
from tensorbed.structures.registry import plain_format

DEFAULT_RATIO = 7.0  # of trained tables in float32: formats that suit vocabulary heads reach it
_BYTES = 2**63 - 1  # of all tables
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_DIGITS = 4  # of sizes in a message
_ALIKE = 1e-3  # costs that differ by less are the same
_ROUNDING = 1e-5  # an error that is none
_MOST = 2**60  # numbers of a table; bytes are counted in 64 bits


def plan(
    model: nn.Module | Mapping[str, tuple[int, int]],
    *,
    budget: str | int | None = None,
    ratio: float | None = None,
    formats: Sequence[Format] | None = None,
    purpose: str = "pretrained",
    min_rows: int = MIN_ROWS,
    skip: Sequence[str] = (),
    tied: str = "keep",
    include_heads: bool = True,
    careful: bool = True,
) -> Plan:
    """Choose a format for every table so that all together keep a budget; ``ValueError`` where none does.

    Tables and heads are those of :func:`tensorbed.compress_`, those that share a weight counted once. With weights and
    ``purpose="pretrained"`` each format's error is measured and bytes are given up where each costs the least squared
    relative error, ``(||W - fit||_F / ||W||_F) ** 2``. So every table counts alike, whatever the scale of its numbers
    and however many rows it has: a model has learnt the scale of each, and looks up a row of each for every input.
    Else, and for ``purpose="train"``, by rule: tensor trains, all tables compressed by the same ratio, the smallest
    that keeps the budget; tables that cannot be made that small stay as small as they can be. Between steps that cost
    the same, to a thousandth, it is the one that saves the most bytes, then that of the table whose name is first in
    the alphabet; the order of the tables in the model does not matter.

    A vocabulary head is more sensitive than its error says: one of a language model may have a quarter of another's
    error and ruin its predictions all the same. Tables that score therefore take formats that are known to suit heads,
    8 bits and hot rows, unless ``formats`` are given or it is not ``careful``.

    Errors are those of fits to a part of a large table, mostly within a hundredth of what the whole will have: to 8,192
    rows, drawn at random and kept in their order; for low rank to 16,384 and the rank that the table would have, which
    is a little too near where a table is wide; for tensor trains to as many and the table's ratio; for product
    quantisation to 32,768 rows of 16 parts, drawn by their norms.

    Args:
        model: or sizes by name, ``{"wte": (50257, 768)}``.
        budget: bytes of all tables together, ``"20MB"``; or ``ratio``, their dense bytes over that.
        purpose: ``"pretrained"`` keeps what the tables have learnt, ``"train"`` is for training from scratch.
        formats: those to weigh, in place of the usual ones; one that does not suit a table, or whose numbers the
            table's dtype cannot hold, is left out for it.
        min_rows: smaller tables of a model stay dense and are not counted.
        skip: patterns of names in it to leave alone, not counted either.
        tied, include_heads: as :func:`tensorbed.compress_` will be given them; what it unties is counted each.
        careful: ``False`` weighs all formats for heads too, for tables that are fitted with ``calibrate=`` or trained.

    Example::

        >>> print(tb.plan({"words": (267_735, 512)}, ratio=50))
        table  size           format                      MB  ratio  error
        words  267,735 x 512  TensorTrain(ratio=50.0)  10.85   50.5      -
        all                                            10.85   50.5
        >>> model = torch.nn.Sequential(torch.nn.Embedding(5000, 64), torch.nn.Linear(64, 2))
        >>> report = tb.compress_(model, tb.plan(model, ratio=3))
        >>> report.ratio > 3
        True
    """
    if purpose not in ("pretrained", "train"):
        raise ValueError(f'purpose={purpose!r}: choose "pretrained" or "train".')
    require_bool(include_heads, "include_heads")
    require_bool(careful, "careful")
    if formats is not None:
        _check_formats(formats)
    weights: list[Weight] = []
    if isinstance(model, nn.Module):
        weights, left = found_tables(model, plain_format(), min_rows, skip, include_heads, tied)
        if not weights:
            raise ValueError(f"there is nothing to plan: {why_nothing(left)}")
    tables = _to_compress(weights, tied) if isinstance(model, nn.Module) else _empty(model)
    dense = sum({id(table.tensor): table.tensor.nbytes for table in tables.values()}.values())
    if (budget is None) == (ratio is None):
        raise ValueError("give a budget, for instance budget='20MB', or a ratio, and not both.")
    allowed = parsed_bytes(budget) if ratio is None else dense / require_number(ratio, "ratio", low=0)
    out_of_reach = partial(_out_of_reach, budget, ratio, dense)
    measured = purpose == "pretrained" and not any(table.tensor.is_meta for table in tables.values())
    if measured and (unfit := [format for format in formats or () if not format.can_fit]):
        raise unfit[0].no_fit()
    offers = [kind.candidates if measured else kind.candidates_to_train for kind in every_format()]
    weighed = formats or [format for offered in offers for format in offered(dense / allowed)]
    for name, table in tables.items():
        with naming(name):
            table.weigh(weighed)
    _require_reach(tables, allowed, out_of_reach)
    heads = [name for name, table in tables.items() if table.scores]
    if careful and measured and formats is None and heads:
        for name in heads:
            tables[name].bound = [pair for pair in tables[name].bound if pair[0].format.suits_heads]
        if (least := _least(tables)) > allowed:
            raise SpoilsHeadsError(out_of_reach(least), heads, dense / least)
    if measured:
        _require_reach(tables, allowed, out_of_reach, _measure(tables))
    options = {name: table.options(0.0 if measured else None) for name, table in tables.items()}
    sizes = {name: (int(table.tensor.shape[0]), int(table.tensor.shape[1])) for name, table in tables.items()}
    same_rows_as = {weight.name: weight.same_rows_as for weight in weights if weight.same_rows_as is not None}
    return Plan(sizes, _chosen(options, allowed), options, allowed, dense, same_rows_as)


@dataclass
class _Table:
    """One to be planned."""

    tensor: Tensor  # its weight, on the meta device where only its size is known
    reserved: int = 0  # bytes that are stored besides, the row of a padding_idx
    scores: bool = False  # whether it is a head, or shares its table with one
    bound: list[tuple[Option, Structure]] = field(default_factory=list)  # its options, and what it would be

    def weigh(self, formats: Sequence[Format]) -> None:
        """Take the formats that it can have; none where it is too small for each of them."""
        rows, cols = self.tensor.shape
        budget = Budget(rows, cols, self.tensor.dtype, self.reserved)
        unsuited = []
        for format in formats:
            try:
                structure = format.bind(budget)
            except OutOfReachError:
                continue
            except ValueError as error:
                unsuited.append(error)
                continue
            sized = format.sized_as(structure)
            if any(sized == option.format.sized_as(other) for option, other in self.bound):
                continue  # what two ratios have in common is weighed once
            size = structure.bytes(budget.dtype) + self.reserved
            self.bound.append((Option(format, size, budget.ratio(structure), None), structure))
        if unsuited and not self.bound:
            raise unsuited[0]

    def options(self, error: float | None = None) -> tuple[Option, ...]:
        """All, the table as it is first, whose error is given."""
        return Option(plain_format(), self.tensor.nbytes, 1.0, error), *(option for option, _ in self.bound)


class SpoilsHeadsError(ValueError):
    """A budget that only formats keep which spoil a vocabulary head; ``ratio`` is what the others reach."""

    def __init__(self, reach: str, heads: Collection[str], ratio: float) -> None:
        self.reach, self.ratio = reach, ratio
        self.heads = f"Smaller formats spoil the scores of a vocabulary head: {', '.join(sorted(heads))}."
        super().__init__(
            f"{reach} {self.heads} careful=False weighs them all the same, for tables that are fitted with calibrate= "
            "or trained afterwards."
        )


def _least(tables: Mapping[str, _Table]) -> int:
    return sum(min(option.bytes for option in table.options()) for table in tables.values())


def _require_reach(
    tables: Mapping[str, _Table], allowed: float, out_of_reach: Callable[[int], str], refusals: Sequence[str] = ()
) -> None:
    if (least := _least(tables)) > allowed:
        advice = "Ask for no smaller tables, or give formats= that are smaller."
        raise ValueError(" ".join([out_of_reach(least), advice, *refusals[:1]]))


def _check_formats(formats: object) -> None:
    if isinstance(formats, (str, Format)) or not isinstance(formats, Sequence):
        raise TypeError(f"formats={formats!r}: give a list of formats, [tb.QuantizedRows(bits=4), tb.HotRows()].")
    if not formats:
        raise ValueError("formats is empty: give at least one, or leave it out for the usual ones.")
    for format in formats:
        require_format(format)
        if getattr(format, "rel_error", None) is not None:
            raise ValueError(f"{format!r} has no size before it is fitted; give rank= or ratio=.")


def _to_compress(weights: Sequence[Weight], tied: str) -> dict[str, _Table]:
    """The tables that compressing makes, those that share a weight once."""
    tables = {}
    for weight in weights:
        row = weight.tensor.shape[1] * weight.tensor.element_size()
        for places in weight.groups(tied):
            name, first = next(iter(places.items()))
            padded = getattr(first, "padding_idx", None) is not None
            scores = any(isinstance(module, nn.Linear) for module in places.values())
            tables[name] = _Table(weight.tensor, row if padded else 0, scores)
    return tables


def _empty(sizes: Mapping[str, tuple[int, int]]) -> dict[str, _Table]:
    if not isinstance(sizes, Mapping) or not sizes:
        raise TypeError(f"plan takes a model or sizes by name, {{'words': (rows, cols)}}, got {type(sizes).__name__}.")
    tables = {}
    for name, size in sizes.items():
        if not isinstance(size, Sequence) or isinstance(size, str) or len(size) != 2:
            raise TypeError(f"{name}={size!r}: give rows and columns, (rows, cols).")
        rows, cols = require_positive(size[0], f"rows of {name}"), require_positive(size[1], f"columns of {name}")
        if rows * cols > _MOST:
            shown = " x ".join(f"{count:.4g}" if count < 1e300 else "over 1e300" for count in (rows, cols))
            raise ValueError(f"{name}: {shown} numbers are more than a table can have, {_MOST:.4g}.")
        tables[name] = _Table(torch.empty((rows, cols), device="meta", dtype=torch.float32))
    return tables


def _measure(tables: Mapping[str, _Table]) -> list[str]:
    """Enter the errors of fits to samples; formats whose numbers a dtype cannot hold are left out, and why is told."""
    for name, table in tables.items():
        with naming(name):
            check_table(table.tensor)
    refusals = []
    steps = [(name, option, structure) for name, table in tables.items() for option, structure in table.bound]
    for table in tables.values():
        table.bound = []
    for name, option, structure in track(steps, "measuring formats"):
        try:
            with naming(name), about(name):
                error = fit_table(*option.format.sample(tables[name].tensor.detach(), structure)).error
        except OutOfRangeError as refusal:
            refusals.append(f"{option.format!r} is none of them: {refusal}")
        else:
            tables[name].bound.append((replace(option, error=error), structure))
    return refusals


def _chosen(options: Mapping[str, tuple[Option, ...]], allowed: float) -> dict[str, Option]:
    """Start dense, and give up bytes where that adds the least squared error for each, until the budget is kept."""
    chosen = {name: table[0] for name, table in options.items()}
    while sum(one.bytes for one in chosen.values()) > allowed:
        steps = [
            (_price(one, other), one.bytes - other.bytes, name, other)
            for name, one in chosen.items()
            for other in options[name]
            if other.bytes < one.bytes
        ]
        if not steps:
            break
        least = min(price for price, *_ in steps)
        alike = [step for step in steps if step[0] - least <= _ALIKE * abs(least)]
        _, _, name, taken = min(alike, key=lambda step: (-step[1], step[2]))
        chosen[name] = taken
    # The last step may have given up more than was needed.
    while (better := _better(options, chosen, allowed)) is not None:
        chosen[better[0]] = better[1]
    return chosen


def _better(
    options: Mapping[str, tuple[Option, ...]], chosen: Mapping[str, Option], allowed: float
) -> tuple[str, Option] | None:
    """The change of one table that takes away most squared error within the budget, if there is one."""
    left = allowed - sum(one.bytes for one in chosen.values())
    gains = [
        (_squared(one.error) - _squared(other.error), other.bytes - one.bytes, name, other)
        for name, one in chosen.items()
        for other in options[name]
        if one.error is not None and other.error is not None and other.bytes - one.bytes <= left
    ]
    most = max((gain for gain, *_ in gains), default=0.0)
    alike = [change for change in gains if 0 < most * (1 - _ALIKE) <= change[0]]
    # The name that gives up first is given back last.
    return max(alike, key=lambda change: (-change[1], change[2]))[2:] if alike else None


def _price(one: Option, other: Option) -> float:
    """Squared error that a byte less costs; where nobody measured, the smaller ratio first."""
    if one.error is None or other.error is None:
        return other.ratio
    return (_squared(other.error) - _squared(one.error)) / (one.bytes - other.bytes)


def _squared(error: float) -> float:
    return max(error, _ROUNDING) ** 2


def parsed_bytes(budget: str | int | None) -> int:
    """``"20MB"``, ``"512 KiB"`` or a number as bytes."""
    if isinstance(budget, str):
        match = _BUDGET.fullmatch(budget)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"budget={budget!r}: give bytes such as '20MB', '1.5 GB' or '512 KiB'.")
        count = int(Decimal(match[1]) * _UNITS[match[2].lower()])  # exact, where a float is not
    else:
        count = require_int(budget, "budget")
    if not 1 <= count <= _BYTES:
        given = str(budget)[:40] if isinstance(budget, str) or abs(count) < 1e300 else "(over 300 digits)"
        raise ValueError(f"budget={given}: must be at least 1 byte and at most {_BYTES:.4g}.")
    return count


def _out_of_reach(budget: str | int | None, ratio: float | None, dense: int, least: int) -> str:
    """What was asked for and what there is, both as they were asked for and so that asking for that would do."""
    most = _rounded(Decimal(dense) / least, ROUND_FLOOR)
    if ratio is not None:
        return (
            f"A ratio of {float(ratio):g} is out of reach: with the formats weighed all tables together become {most} "
            "times smaller at the most."
        )
    given, there = f"{parsed_bytes(budget):,} bytes", f"{least:,} bytes"
    match = _BUDGET.fullmatch(str(budget))
    if match is not None and (unit := match[2]):
        given, there = match[0].strip(), f"{_rounded(Decimal(least) / _UNITS[unit.lower()], ROUND_CEILING)} {unit}"
    return (
        f"A budget of {given} is out of reach: with the formats weighed all tables together take {there} at the least, "
        f"a ratio of {most}."
    )


def _rounded(number: Decimal, way: str) -> str:
    """To a few digits, without zeros at the end."""
    return f"{Context(_DIGITS, way).create_decimal(number).normalize():f}"
