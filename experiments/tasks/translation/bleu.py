"""BLEU of a whole test set, by SacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.lab.errors import needed


def metric() -> Any:
    """BLEU of a whole set, cased, with SacreBLEU's own tokens; an error where the package is missing."""
    return needed("sacrebleu.metrics", "BLEU").BLEU()


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """From 0 to 100."""
    return float(metric().corpus_score(list(translations), [list(references)]).score)


def signature() -> str:
    """With which options and version: scores of one signature can be compared."""
    computed = metric()
    computed.corpus_score(["a"], [["a"]])  # without a score there is no signature
    return str(computed.get_signature())
