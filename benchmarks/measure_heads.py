"""Heads timed in turns and, when they are gone, their memory one by one."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Adam

import tensorbed as tb
from benchmarks.heads import CHUNKS, HEADS, Fused, Head, HeadPeer, HeadWorkload, check
from benchmarks.measure import Advance
from benchmarks.memory import Extra, in_fresh_process, peak_beyond
from benchmarks.peers import CannotRunError
from benchmarks.results import HeadResult, HeadTimed
from benchmarks.timing import Times, in_turns, repeated
from tensorbed.structures import Format

_PATIENCE = 600  # seconds: the slowest head takes tens of them for one loss


@dataclass(frozen=True)
class HeadSettings:
    """How long to look: rounds of training steps, which take seconds each, and of top-k."""

    rounds: int = 3
    topk_rounds: int = 30
    memory: bool = True

    def steps(self, peers: int = len(HEADS)) -> int:
        """Steps of the progress bar: a training step takes seconds, so each is one."""
        return peers * (1 + self.rounds + self.memory) + self.topk_rounds


@dataclass
class Entrant:
    """A head, the optimiser of its table, and milliseconds so far."""

    head: Head
    optimiser: Adam
    steps: list[tuple[float, float]] = field(default_factory=list)  # forward with backward, the whole step
    choices: list[float] = field(default_factory=list)

    def train(self, h: Tensor, target: Tensor) -> float:
        """A training step: ``zero_grad``, the loss, its gradients (of the vectors too), Adam.

        Gives milliseconds of the loss and its gradients.
        """
        h.grad = None
        begin = time.perf_counter()
        self.optimiser.zero_grad(set_to_none=True)
        start = time.perf_counter()
        self.head.loss(h, target).backward()
        middle = time.perf_counter()
        self.optimiser.step()
        end = time.perf_counter()
        # A dense gradient should not stay while the others are timed.
        self.optimiser.zero_grad(set_to_none=True)
        self.steps.append((1e3 * (middle - start), 1e3 * (end - begin)))
        return self.steps[-1][0]

    @torch.no_grad()
    def choose(self, h: Tensor, k: int) -> None:
        """The ``k`` best classes of one vector, repeated as a turn of lookups is."""
        self.choices.append(repeated(lambda: self.head.topk(h, k)))

    def timed(self) -> HeadTimed:
        both, step = (Times(tuple(column)) for column in zip(*self.steps, strict=True))
        return HeadTimed(both, step, Times(tuple(self.choices)) if self.choices else None)


def run(workload: HeadWorkload, settings: HeadSettings, advance: Advance) -> HeadResult:
    """Times side by side, then memory, each head in a process of its own."""
    result = _times(workload, settings, advance)
    gc.collect()  # optimisers refer to themselves, and gigabytes of moments with them
    for number, peer in enumerate(HEADS if settings.memory else ()):
        if peer.name in result.times:
            # A copy without the tensors that are held here: the child draws its own.
            arguments = (replace(workload), number, result.chunk)
            found = in_fresh_process(_measured, arguments, torch.get_num_threads(), _PATIENCE)
            if isinstance(found, Extra):
                result.memory[peer.name] = found
            else:
                result.unmeasured[peer.name] = found
        advance(f"heads: memory of {peer.name}")
    return result


def _times(workload: HeadWorkload, settings: HeadSettings, advance: Advance) -> HeadResult:
    result = HeadResult(workload, settings.rounds)
    h, target = workload.hidden.clone().requires_grad_(), workload.target
    entrants = _enter(result, h, advance)
    names = [peer.name for peer in HEADS]
    for number, name in enumerate(in_turns(names, range(settings.rounds))):
        advance(f"heads: round {1 + number // len(names)} of {settings.rounds}, {name}")
        if name in entrants:
            entrants[name].train(h, target)
    one = workload.hidden[0]
    choosing = [peer.name for peer in HEADS if peer.chooses and peer.name in entrants]
    for name in in_turns(choosing, _told(settings.topk_rounds, advance)):
        entrants[name].choose(one, workload.k)
    result.times.update({name: entrant.timed() for name, entrant in entrants.items()})
    return result


def _enter(result: HeadResult, h: Tensor, advance: Advance) -> dict[str, Entrant]:
    """Build and warm up what can run, one after the other; for the rest the reason."""
    workload = result.workload
    tables: dict[Format, tuple[tb.Head, Adam]] = {}
    entrants: dict[str, Entrant] = {}
    for peer in HEADS:
        advance(f"heads: {peer.name}")
        try:
            format = peer.format(workload)
            if format not in tables:
                table = peer.table(workload)
                # At a rate of nothing Adam computes and writes all that it does at any other, and every round finds
                # the table as it was drawn, whoever shares it.
                tables[format] = table, Adam(table.parameters(), lr=0.0)
            table, optimiser = tables[format]
            entrant = Entrant(peer.around(table), optimiser)
            _warm_up(entrant, peer, result, h)
        except (CannotRunError, RuntimeError, MemoryError) as error:
            said = (str(error).splitlines() or [""])[0]
            result.reasons[peer.name] = said if isinstance(error, CannotRunError) else f"{type(error).__name__}: {said}"
            continue
        entrants[peer.name] = entrant
        held = [parameter.numel() * parameter.element_size() for parameter in entrant.head.parameters()]
        result.stored[peer.name] = sum(held)
    return entrants


def _warm_up(entrant: Entrant, peer: HeadPeer, result: HeadResult, h: Tensor) -> None:
    """One call of each kind, checked; where there is a choice, two with each option, and the fastest is kept."""
    workload = result.workload
    if isinstance(entrant.head, Fused):
        entrant.train(h, workload.target)  # the first call pays for memory that the others find
        for chunk in CHUNKS:
            entrant.head.chunk = chunk
            result.chunks[chunk] = min(entrant.train(h, workload.target) for _ in range(2))
        entrant.head.chunk = result.chunk or CHUNKS[0]
    else:
        entrant.train(h, workload.target)
    assert h.grad is not None
    check(entrant.head, workload, h.grad)
    if peer.chooses:
        entrant.choose(h.detach()[0], workload.k)
    entrant.steps.clear()
    entrant.choices.clear()


def _measured(workload: HeadWorkload, number: int, chunk: int | None) -> Extra:
    """Peak memory of loss and gradients, in this process, beyond parameters, vectors and targets."""
    peer = HEADS[number]
    head = peer.around(peer.table(workload))
    if isinstance(head, Fused):
        head.chunk = chunk or head.chunk
    h, target = workload.hidden.clone().requires_grad_(), workload.target

    def warm_up() -> None:
        head.loss(h.detach()[:1].requires_grad_(), target[:1]).backward()
        for parameter in head.parameters():
            parameter.grad = None

    return peak_beyond(warm_up, lambda: head.loss(h, target).backward())


def _told(rounds: int, advance: Advance) -> Iterator[int]:
    for number in range(rounds):
        advance(f"heads: top-k, round {number + 1} of {rounds}")
        yield number
