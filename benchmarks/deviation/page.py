"""The results of the study as a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.deviation.training import STEPS, Trial, deviations

Cell = tuple[Any, ...]

# In the order of training.deviations.
NAMES = ('`"glorot"`', "`nn.Linear`'s", "1/sqrt(dim)", "0.3", "1")
PAPER = 0
DEFAULTS = {"embedding": 3, "tied": 2, "head": 2}
NEAR = 1.02  # of the best loss of a line
USES = {
    "embedding": "looked up only, beside a dense head",
    "tied": "one table for both ends",
    "head": "a head of its own, beside a dense embedding",
}

_HEAD = f"""# The scale of a table at birth

Small models over the sources of Python's standard library, {STEPS} steps of AdamW each, as a first try in a script is:
validation loss by the standard deviation with which the table is drawn. Made by `python -m benchmarks.deviation`.
"""


def of_record(record: Mapping[str, Any]) -> Trial:
    return Trial(**{name: record[name] for name in Trial.__dataclass_fields__ if name in record})


def by_cell(records: Sequence[Mapping[str, Any]]) -> dict[Cell, list[float]]:
    """Losses in the order of the deviations, for every cell that was run with all of them."""
    cells: defaultdict[Cell, dict[float, float]] = defaultdict(dict)
    for record in records:
        trial = of_record(record)
        cells[trial.cell()][trial.std] = record["loss"]
    complete = {cell: losses for cell, losses in cells.items() if len(losses) == len(NAMES)}
    return {cell: [losses[std] for std in sorted(losses)] for cell, losses in sorted(complete.items(), key=str)}


def page(records: Sequence[Mapping[str, Any]]) -> str:
    cells = by_cell(records)
    return "\n".join([_HEAD, _seen(cells), _replaced(cells), _all(cells)])


def _seen(cells: Mapping[Cell, Sequence[float]]) -> str:
    """For each use of a table how far the default is from the best, and the paper's."""
    rows = []
    for use, about in USES.items():
        mine = [losses for cell, losses in cells.items() if cell[1] == use]
        if mine:
            default, paper = ([losses[at] / min(losses) for losses in mine] for at in (DEFAULTS[use], PAPER))
            rows.append((about, NAMES[DEFAULTS[use]], _share(default), _worst(default), _share(paper), _worst(paper)))
    head = ("table", "default", f"within {NEAR - 1:.0%}", "at worst", f'`"glorot"` within {NEAR - 1:.0%}', "at worst")
    return "## Default and paper\n\n" + _table(head, rows, words=1)


def _share(factors: Sequence[float]) -> str:
    return f"{sum(factor <= NEAR for factor in factors)} of {len(factors)}"


def _worst(factors: Sequence[float]) -> str:
    return f"+{max(factors) - 1:.1%}"


def _replaced(cells: Mapping[Cell, Sequence[float]]) -> str:
    """What a script has that draws a full table as ``nn.Embedding`` does, and with one line changed."""
    rows = []
    for cell, losses in cells.items():
        model, use, format, lr, decay, warm_up, seed, dim = cell
        if use != "embedding" or format != "dense" or decay != Trial.decay or warm_up:
            continue
        trains = [cells.get((model, use, name, lr, decay, warm_up, seed, dim)) for name in ("tt8", "tt32")]
        shown = ["" if train is None else f"{train[DEFAULTS[use]]:.3f}" for train in trains]
        rows.append((model, f"{lr:g}", f"{losses[-1]:.3f}", *shown))
    head = ("model", "rate", "`nn.Embedding`", "`tb.TTEmbedding(rank=8)`", "`tb.TTEmbedding(rank=32)`")
    about = "The same script, rate, decay and steps; the embedding alone is another, with its default deviation.\n\n"
    return "## In place of `nn.Embedding`\n\n" + about + _table(head, rows, words=1)


def _all(cells: Mapping[Cell, Sequence[float]]) -> str:
    rows = []
    for (model, use, format, lr, decay, warm_up, _, dim), losses in cells.items():
        near = NEAR * min(losses)
        figures = [f"**{loss:.3f}**" if loss <= near else f"{loss:.3f}" for loss in losses]
        rows.append((model, use, format, str(dim), f"{lr:g}", f"{decay:g}", "yes" if warm_up else "", *figures))
    head = ("model", "table", "format", "dim", "rate", "decay", "warm-up", *NAMES)
    numbers = ", ".join(f"{std:.3g}" for std in deviations(Trial.dim)[:3])
    about = (
        f"Bold: within {NEAR - 1:.0%} of the best of its line. The first three are {numbers} at {Trial.dim} columns; "
        "the first is the paper's, and `nn.Embedding` has 1.\n\n"
    )
    return "## All runs\n\n" + about + _table(head, rows, words=3)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    sides = ["---"] * words + ["---:"] * (len(head) - words)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, sides, *rows)) + "\n"
