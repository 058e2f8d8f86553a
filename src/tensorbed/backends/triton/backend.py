"""Which calls the kernels for GPUs take, and how tables are put together for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tensorbed.backends import triton as state
from tensorbed.backends.chain import ChainOfCores
from tensorbed.backends.coded import Coded
from tensorbed.backends.graphs import graph_output
from tensorbed.backends.pooling import pool_rows, with_padding
from tensorbed.backends.triton import serving
from tensorbed.backends.triton.chains import Table, compute, in_pieces
from tensorbed.dispatch import BACKENDS, Asked, Backend, World

_MOST_KEYS = 2**62  # rows of all tables of a call


class Triton(Backend):
    """The kernels for GPUs: chains and codes in single precision and the half ones; float64 goes to PyTorch."""

    name = "triton"
    limits = "with chains of cores and tables of codes, all of one dtype and on one device"
    scores = True
    checks_on_device = True

    def absent(self, device: torch.device | None = None) -> str:
        return state.absent(device)

    def knows(self, making: type | None, device: torch.device | None = None) -> bool:
        known = making is ChainOfCores or (making is not None and issubclass(making, Coded))
        return known and not state.absent(device) and (device is None or (state.measured and device.type == "cuda"))

    def shares(self, making: type | None) -> bool:
        return making is ChainOfCores

    def why(self, device: torch.device) -> str:
        return f"its kernels take every batch on {device}"

    def takes(self, asked: Asked, world: World) -> bool:
        made_of, ids = asked.made_of, asked.ids
        if asked.impl != self.name and not (state.measured and ids.device.type == "cuda"):
            return False
        if state.absent(ids.device):
            return False
        if isinstance(made_of, ChainOfCores):
            alike = all(core.dtype == made_of.cores[0].dtype and core.device == ids.device for core in made_of.cores)
        else:
            alike = isinstance(made_of, Coded) and made_of.fits() and made_of.are_on(ids.device)
        return alike and (world is World.COMPILED or (world is World.EAGER and ids.numel() > 0))

    def compute(self, asked: Sequence[Asked], world: World) -> Tensor:
        if isinstance(asked[0].made_of, Coded):
            return super().compute(asked, world)
        if asked[0].made_of.cores[0].dtype not in state.TYPES:
            return BACKENDS["torch"].compute(asked, world)
        if world is World.COMPILED or not _pools(asked[0]):
            return super().compute(asked, world)
        columns: dict[int, Tensor] = {}
        for places in _launches(asked):
            tables = [asked[at] for at in places]
            made = compute([_table(table) for table in tables], all(table.checked for table in tables))
            if len(tables) == len(asked) and not any(map(_pads, asked)):
                return made
            columns |= zip(places, made.split([table.made_of.chain.cols for table in tables], 1), strict=True)
        padded = [with_padding(columns[at], table) if _pads(table) else columns[at] for at, table in enumerate(asked)]
        return padded[0] if len(padded) == 1 else torch.cat(padded, 1)

    def compute_table(self, asked: Asked, world: World) -> Tensor:
        if isinstance(asked.made_of, Coded):
            return serving.rows_of_codes(asked, world)
        if world is World.COMPILED:
            return graph_output(asked, self.name, pools=_pools(asked))
        rows = compute([_table(asked._replace(bounds=None))], asked.checked)
        return pool_rows(rows, asked, asked.ids, world)


def _launches(asked: Sequence[Asked]) -> Iterable[list[int]]:
    """Which tables are computed together: those of one order, as long as 64 bits can tell their rows apart.

    A table that is computed in pieces is computed by itself.
    """
    chains = [table.made_of.chain for table in asked]
    if sum(chain.rows for chain in chains) > _MOST_KEYS:
        return [[at] for at in range(len(asked))]
    together: dict[tuple[int, int], list[int]] = {}
    for at, (table, chain) in enumerate(zip(asked, chains, strict=True)):
        together.setdefault((chain.order, at if in_pieces(_table(table)) else -1), []).append(at)
    return together.values()


def _pools(asked: Asked) -> bool:
    """Whether the kernels write what is asked: rows, or sums of weighted rows."""
    return asked.bounds is None or (asked.mode != "max" and not asked.by_frequency)


def _pads(asked: Asked) -> bool:
    """Whether rows of padding are shown in the place of those that were computed."""
    return asked.bounds is None and asked.padding_idx is not None


def _table(asked: Asked) -> Table:
    (chain, cores), bounds = asked.made_of, asked.bounds
    if bounds is None:
        return Table(chain, cores, asked.ids)
    skipped = -1 if asked.padding_idx is None else asked.padding_idx
    return Table(chain, cores, asked.ids, bounds, asked.weights, asked.mode == "mean", skipped)
