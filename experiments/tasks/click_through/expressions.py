"""Preparation as ibis expressions, which any engine computes: rows from lines, numbers for values, rows of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ibis

from experiments.tasks.click_through.criteo import (
    FEATURES,
    FIELDS,
    GOOD_ROW,
    GOOD_TIMED_ROW,
    MISSING,
    NUMBERS,
    TIME,
)
from experiments.tasks.click_through.prepared import UNSEEN
from experiments.tasks.click_through.rows import LABEL


def is_good(lines: Any, timed: bool = False) -> Any:
    """Of a table of lines; an empty line may be null."""
    return lines.line.re_search(GOOD_TIMED_ROW if timed else GOOD_ROW).fill_null(False)


def parsed(lines: Any, bins: str, kept: Sequence[str] = (), timed: bool = False) -> Any:
    """Good lines as a label and 39 values, all of them texts, a missing one too; columns beside them are kept."""
    parts = lines.filter(is_good(lines, timed)).select(*kept, parts=ibis._.line.split("\t"))
    fields = {name: parts.parts[place] for place, name in enumerate(FEATURES, 1)}
    columns = {name: in_bins(field, bins) if name in NUMBERS else field for name, field in fields.items()}
    times = {TIME: parts.parts[FIELDS].cast("int64")} if timed else {}
    return parts.select(*kept, parts.parts[0].cast("int8").name(LABEL), **columns, **times)


def moments(rows: Any) -> Any:
    """Every time there is, and how many rows come ``before`` it."""
    counts = rows.group_by(TIME).agg(rows=ibis._.count())
    so_far = counts.rows.sum().over(ibis.cumulative_window(order_by=counts[TIME]))
    return counts.select(TIME, before=so_far - counts.rows)


def in_bins(field: Any, bins: str) -> Any:
    """As ``criteo.number_in_bins``."""
    number = field.nullif(MISSING).cast("int64")
    squared = (number.cast("float64").ln() ** 2).floor().cast("int64")
    binned = number if bins == "none" else ibis.ifelse(number <= 2, number, 2 + squared)
    return binned.cast("string").fill_null(MISSING)


def numbered(rows: Any, feature: str, least: int = 1, modulo: int | None = None) -> Any:
    """A number for each value seen at least so often: 1 for the most frequent, equally frequent ones by value.

    With a modulo several values share a number.
    """
    counts = rows.group_by(value=rows[feature]).agg(sightings=ibis._.count())
    kept = counts.filter(counts.sightings >= least)
    place = ibis.row_number().over(order_by=[kept.sightings.desc(), kept.value])
    return kept.select(kept.value, code=(1 + (place % modulo if modulo else place)).cast("int32"))


def coded(rows: Any, maps: Mapping[str, Any], kept: Sequence[str] = (LABEL,)) -> Any:
    """Values as their numbers, unseen ones as 0, beside the columns that are kept."""
    joined = rows
    for feature, numbers in maps.items():
        named = numbers.select(numbers.value.name(f"{feature}_value"), numbers.code.name(f"{feature}_code"))
        joined = joined.left_join(named, joined[feature] == named[f"{feature}_value"])
    codes = {feature: joined[f"{feature}_code"].fill_null(UNSEEN).cast("int32") for feature in maps}
    return joined.select(*kept, **codes)
