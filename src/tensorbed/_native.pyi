"""Kernels of tensorbed, compiled: what native/module.cpp binds."""

isas: tuple[str, ...]  # the instruction sets compiled, least first
isa: str  # the greatest of them that this processor runs
openmp: bool
nanobind: str  # its version

def threads() -> int: ...
