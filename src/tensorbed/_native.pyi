"""Kernels of tensorbed, compiled: what native/module.cpp binds. Memory is handed over as addresses."""

from collections.abc import Sequence

isas: tuple[str, ...]  # the instruction sets compiled, least first
isa: str  # the greatest of them that this processor runs
openmp: bool
nanobind: str  # its version

class Chain:
    """Sizes of a chain of cores."""

    def __init__(
        self, rows: int, row_factors: Sequence[int], col_factors: Sequence[int], ranks: Sequence[int], /
    ) -> None: ...

class Asked:
    """What is asked of one table; ``bounds`` 0 for a row an index, ``weights`` 0 for none, ``skip`` -1 for no row."""

    def __init__(
        self,
        chain: Chain,
        index: int,
        count: int,
        stride: int,
        skip: int,
        bounds: int,
        bags: int,
        weights: int,
        mean: bool,
        /,
    ) -> None: ...

class Batch:
    """The tables of one call, planned; ``type`` is 0 for float32, 1 for float64, 2 for bfloat16."""

    def __init__(self, type: int, asked: Sequence[Asked], threads: int, /) -> None: ...
    def forward(
        self,
        cores: Sequence[int],
        out: Sequence[int],
        out_row: Sequence[int],
        padding: Sequence[int],
        keep: bool,
        threads: int,
        /,
    ) -> None: ...
    def backward(
        self,
        cores: Sequence[int],
        grad: Sequence[int],
        grad_row: Sequence[int],
        core_grads: Sequence[int],
        scale_grads: Sequence[int],
        threads: int,
        /,
    ) -> None: ...

def use(isa: str) -> str: ...
