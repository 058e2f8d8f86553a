"""How much all tables together may take: a budget or a ratio, and what is said where neither can be had."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Self

from tensorbed.checks import require_int, require_number

DEFAULT_RATIO = 7.0  # of trained tables in float32: formats that suit vocabulary heads reach it
_BYTES = 2**63 - 1  # of all tables
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BUDGET = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_DIGITS = 4  # of sizes in a message


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


@dataclass(frozen=True)
class Limit:
    """Bytes that all tables may take, and how that was asked for."""

    bytes: float
    dense: int  # bytes that they take as they are
    asked: str | int | float  # the budget, or a ratio as a float

    @classmethod
    def of(cls, budget: str | int | None, ratio: float | None, dense: int) -> Self:
        """One of both is given."""
        if (budget is None) == (ratio is None):
            raise ValueError("give a budget, for instance budget='20MB', or a ratio, and not both.")
        if budget is not None:
            return cls(parsed_bytes(budget), dense, budget)
        ratio = require_number(ratio, "ratio", low=0)
        return cls(dense / ratio, dense, float(ratio))

    def out_of_reach(self, least: int) -> str:
        """What was asked for and what there is, both as they were asked for and so that asking for that would do."""
        ratio = _rounded(Decimal(self.dense) / least, ROUND_FLOOR)
        if isinstance(self.asked, float):
            return (
                f"A ratio of {self.asked:g} is out of reach: with the formats weighed all tables together become "
                f"{ratio} times smaller at the most."
            )
        given, there = f"{int(self.bytes):,} bytes", f"{least:,} bytes"
        match = _BUDGET.fullmatch(str(self.asked))
        if match is not None and (unit := match[2]):
            given, there = match[0].strip(), f"{_rounded(Decimal(least) / _UNITS[unit.lower()], ROUND_CEILING)} {unit}"
        return (
            f"A budget of {given} is out of reach: with the formats weighed all tables together take {there} at the "
            f"least, a ratio of {ratio}."
        )


def _rounded(number: Decimal, way: str) -> str:
    """To a few digits, without zeros at the end."""
    step = Decimal(1).scaleb(number.adjusted() + 1 - _DIGITS)
    text = f"{number.quantize(step, way):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
