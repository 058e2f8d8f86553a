"""Trees of the Stanford Sentiment Treebank: ``(3 (2 It) (4 (2 works) (2 .)))``."""

from __future__ import annotations

import re

from experiments.lab.errors import ExperimentError

_SIGN = re.compile(r"[()]|[^\s()]+")
LABELS = ("0", "1", "2", "3", "4")


def parse(line: str, where: str) -> list[tuple[list[str], int]]:
    """Tokens and label of every node, children before parents: the last is the sentence."""
    nodes: list[tuple[list[str], int]] = []
    leaves: list[str] = []
    opened: list[tuple[int, int]] = []  # label and first leaf of each open node
    signs = iter(_SIGN.findall(line))
    for sign in signs:
        if nodes and not opened:
            raise ExperimentError(f"{where}: malformed tree, {sign!r} stands after its end.")
        if sign == "(":
            label = next(signs, "nothing")
            if label not in LABELS:
                raise ExperimentError(
                    f"{where}: malformed tree, a node begins with {label!r}, not a label from 0 to 4."
                )
            opened.append((int(label), len(leaves)))
        elif not opened:
            raise ExperimentError(f"{where}: malformed tree, it begins with {sign!r}, not with an open bracket.")
        elif sign == ")":
            root, first = opened.pop()
            if first == len(leaves):
                raise ExperimentError(f"{where}: malformed tree, a node without words.")
            nodes.append((leaves[first:], root))
        else:
            leaves.append(sign)
    if opened or not nodes:
        raise ExperimentError(f"{where}: malformed tree, {len(opened) or 'no'} brackets are left open.")
    return nodes
