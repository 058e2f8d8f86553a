"""Criteo's raw rows: a label, 13 whole numbers and 26 hexadecimal categories, tabs between; fields may be missing.

Rows may end with one field more, a time. Criteo's own do not: they stand in its order.

What SQL does with all rows at once (``expressions.py``) is done here with one: values as texts, and what is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

NUMBERS = tuple(f"I{k}" for k in range(1, 14))
CATEGORIES = tuple(f"C{k}" for k in range(1, 27))
FEATURES = NUMBERS + CATEGORIES
FIELDS = 1 + len(FEATURES)
BINS = ("squared-log", "none")  # of the numbers
MISSING = ""  # a value like any other
TIME = "time"
_LABEL, _NUMBER, _CATEGORY, _TIME = "[01]", "-?[0-9]{1,10}", "[0-9a-f]{1,8}", "-?[0-9]{1,18}"
# Of a whole row, and read alike by RE2, Java and Python.
GOOD_ROW = rf"^{_LABEL}(?:\t(?:{_NUMBER})?){{13}}(?:\t(?:{_CATEGORY})?){{26}}$"
GOOD_TIMED_ROW = rf"{GOOD_ROW[:-1]}\t{_TIME}$"
_GOOD = {timed: re.compile(form[:-1] + r"\Z") for timed, form in ((False, GOOD_ROW), (True, GOOD_TIMED_ROW))}
# Of a field of each feature, to be matched in full; it may be missing.
GOOD_FIELDS = {name: re.compile(f"(?:{_NUMBER if name in NUMBERS else _CATEGORY})?") for name in FEATURES}


def is_good(row: str, timed: bool = False) -> bool:
    """Whether it is of the format."""
    return _GOOD[timed].match(row) is not None


def problem(row: str, timed: bool = False) -> str:
    """What is wrong with a row, or nothing."""
    if is_good(row, timed):
        return ""
    fields = row.split("\t")
    if len(fields) != FIELDS + timed:
        others = {sign: row.count(sign) for sign in ",;| " if row.count(sign) >= FIELDS - 1}
        hint = f" It has {max(others.values())} of {max(others, key=others.__getitem__)!r}: put tabs." if others else ""
        form = f"a label, 13 numbers, 26 categories{', a time' if timed else ''}"
        return f"{len(fields)} fields; {FIELDS + timed} are needed, tabs between: {form}.{hint}"
    if fields[0] not in ("0", "1"):
        return f"the label is {_shown(fields[0])}; it must be 0 or 1."
    if timed and not re.fullmatch(_TIME, fields[-1]):
        return f"the time is {_shown(fields[-1])}; a whole number of at most 18 digits, such as seconds, is needed."
    for name, field in zip(FEATURES, fields[1:FIELDS], strict=True):
        if not GOOD_FIELDS[name].fullmatch(field):
            number, category = "a whole number of at most 10 digits", "1 to 8 hexadecimal digits in lower case"
            needed = number if name in NUMBERS else category
            return f"{name} is {_shown(field)}; {needed}, or nothing, is needed."
    raise AssertionError(row)


def _shown(field: str) -> str:
    return ascii(field if len(field) <= 40 else field[:40] + "...")


def values(fields: Iterable[str], bins: str) -> list[str]:
    """The 39 fields of a good row, numbers in bins."""
    return [
        number_in_bins(field, bins) if field and name in NUMBERS else field
        for name, field in zip(FEATURES, fields, strict=True)
    ]


def number_in_bins(field: str, bins: str) -> str:
    """Numbers up to 2 are themselves; those above are 2 more than the floor of their squared logarithm."""
    number = int(field)
    return str(number if bins == "none" or number <= 2 else 2 + math.floor(math.log(number) ** 2))
