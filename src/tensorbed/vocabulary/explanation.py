"""How scores would be computed for so many vectors, counted without computing them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from tensorbed.backends.triton import serving
from tensorbed.checks import require_bool, require_int
from tensorbed.structures.explanation import aligned, fewer
from tensorbed.vocabulary.head_calls import check_hidden
from tensorbed.vocabulary.scorer import Vocabulary
from tensorbed.vocabulary.tiling import Task, choose, considered


@dataclass(frozen=True)
class ScoresExplanation:
    """One call of a head. ``print`` it, or take the numbers.

    Attributes:
        kind, description: the structure and its sizes.
        vectors: how many are scored.
        training: whether gradients follow.
        multiply_adds_dense: of the same product with a dense table, gradients counted where they follow.
        multiply_adds: as computed, making rows or merging cores included.
        considered: the counted cost of each way and its passes, in multiply-adds of a large product with what is
            written and read converted into them.
        path: the one taken.
        group, height: vectors and rows of a tile.
        bytes: held at once, about.
        allowed: the budget; where nothing fits into it, what takes least is taken.
        impl: the backend that was asked for.
    """

    kind: str
    description: str
    vectors: int
    training: bool
    multiply_adds_dense: int
    multiply_adds: int
    considered: dict[str, float]
    path: str
    group: int
    height: int
    bytes: int
    allowed: int
    impl: str = "auto"

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        dense, made = self.multiply_adds_dense, self.multiply_adds
        lines = [
            ("vectors", f"{self.vectors:,}", "with gradients" if self.training else ""),
            ("multiply-adds, dense", f"{dense:,}", ""),
            ("multiply-adds, as computed", f"{made:,}", fewer(dense, made)),
        ]
        for name, cost in sorted(self.considered.items(), key=lambda item: item[1])[:6]:
            lines.append((f"counted cost of {name}", f"{cost:,.0f}", "<- taken" if name == self.path else ""))
        if self.impl != "auto":
            lines.append(("backend", self.impl, "as asked"))
        if self.path not in self.considered:
            lines.append(("path", self.path, "<- taken"))
        tile = f"tiles of {self.group:,} vectors x {self.height:,} rows, "
        tile += f"about {self.bytes / 2**20:,.1f} MiB held of {self.allowed / 2**20:,.1f} allowed"
        return "\n  ".join([f"{self.kind}, {self.description}", *aligned(lines, "<><"), tile])

    __repr__ = __str__


def explain(
    vocabulary: Vocabulary,
    vectors: int | Tensor,
    memory_budget: int | None,
    *,
    training: bool = False,
    reduction: str = "mean",
) -> ScoresExplanation:
    """What the loss, or without training scores and choices, would do for so many vectors, or for these."""
    structure = vocabulary.structure
    require_bool(training, "training")
    if isinstance(vectors, Tensor):
        check_hidden(vectors, structure.cols)
        vectors = vectors.numel() // structure.cols
    elif require_int(vectors, "vectors") < 0:
        raise ValueError(f"vectors={vectors}: a number of hidden vectors, or the vectors themselves.")
    itemsize = max(4, max(t.element_size() for t in vocabulary.tensors if t.is_floating_point()))
    asked = {"trains": training, "at_once": reduction != "none", "whole": not training}
    asked["on_device"] = serving.asked_for(vocabulary.impl)
    task = Task.of(structure, vectors, itemsize, memory_budget, **asked)
    taken = choose(task)
    return ScoresExplanation(
        kind=structure.kind,
        description=structure.summary,
        vectors=vectors,
        training=training,
        multiply_adds_dense=structure.rows * structure.cols * vectors * (3 if training else 1),
        multiply_adds=taken.multiply_adds,
        considered={tiling.name: tiling.cost for tiling in considered(task)},
        path=taken.name,
        group=taken.group,
        height=taken.height,
        bytes=taken.numbers * itemsize,
        allowed=task.numbers * itemsize,
        impl=vocabulary.impl,
    )
