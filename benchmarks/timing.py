"""Times of several layers on one batch, taken in turns so that a disturbance meets all of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LOOP = 0.1  # seconds: a round of calls too short for the clock lasts no longer
# A turn repeats its call, as torch.utils.benchmark does, so that it is timed as it runs by itself and not by what the
# turn before left in the caches; calls of more than this many seconds are made once.
_REPEATS, _BURST = 10, 0.03
_SLOW = 4  # budgets: a layer whose first call takes longer is called once more, at once, and that is its time
_FEWEST, _LONG = 3, 5.0  # rounds that a layer gets whatever its budget, unless a turn takes this many seconds


@dataclass(frozen=True)
class Times:
    """Milliseconds of each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.rounds)

    def record(self) -> dict[str, float]:
        """Minimum, quartiles and maximum, for a result file."""
        lower, middle, upper = (
            quantiles(self.rounds, n=4, method="inclusive") if len(self.rounds) > 1 else 3 * [self.rounds[0]]
        )
        return {
            "min": min(self.rounds),
            "lower_quartile": lower,
            "median": middle,
            "upper_quartile": upper,
            "max": max(self.rounds),
        }


@dataclass(frozen=True)
class Timed:
    """What one layer took, by the round.

    Attributes:
        forward: a lookup under ``torch.no_grad()``.
        tracked: a lookup as it is in training, whose backward pass may follow.
        both: forward and backward.
        step: a training step, that is ``zero_grad``, forward, backward and the optimiser.
    """

    forward: Times
    tracked: Times
    both: Times
    step: Times

    @property
    def rounds(self) -> int:
        """Of training steps; lookups may have had more."""
        return len(self.both.rounds)


@dataclass
class Contestant:
    """A layer, its optimiser, its batch, and what was timed so far.

    Lookups and training steps have their seconds counted apart: a table whose steps take long is still looked up in
    every round.
    """

    layer: nn.Module
    optimiser: Optimizer
    ids: Tensor
    gradient: Tensor
    calls: int = 1
    finished: bool = False
    lookups: list[tuple[float, float]] = field(default_factory=list)  # without and with gradients
    steps: list[tuple[float, float]] = field(default_factory=list)  # forward and backward, the whole step
    looking: float = 0.0  # seconds
    training: float = 0.0

    def warm_up(self, budget: float) -> None:
        """Let caches and the optimiser's state be made; a first call of several budgets is repeated once, and done."""
        self._look(1)
        self._train(1)
        slow = self.calls == 1 and self.looking + self.training > _SLOW * budget
        if self.looking + self.training < budget / 4:
            self._look(1)
            self._train(1)
        self.lookups.clear()
        self.steps.clear()
        self.looking = self.training = 0.0
        if slow:
            # Now, while no other peer holds gigabytes beside it.
            self._look(1)
            self._train(1)
            self.finished = True

    def take_turn(self, budget: float) -> None:
        """One round, without what has used up its time."""
        if self._goes_on(len(self.lookups), self.looking, budget):
            self._look(self.calls)
        if self._goes_on(len(self.steps), self.training, budget):
            self._train(self.calls)

    def _goes_on(self, rounds: int, seconds: float, budget: float) -> bool:
        if rounds == 0 or self.finished:
            return rounds == 0
        return seconds <= budget or (rounds < _FEWEST and seconds < _LONG * rounds)

    def timed(self) -> Timed:
        forward, tracked = (Times(tuple(column)) for column in zip(*self.lookups, strict=True))
        both, step = (Times(tuple(column)) for column in zip(*self.steps, strict=True))
        return Timed(forward, tracked, both, step)

    def _look(self, calls: int) -> None:
        begin = time.perf_counter()
        with torch.no_grad():
            forward = repeated(lambda: self.layer(self.ids), calls)
        self.lookups.append((forward, repeated(lambda: self.layer(self.ids), calls)))
        self.looking += time.perf_counter() - begin

    def _train(self, calls: int) -> None:
        begin = time.perf_counter()
        self.steps.append(self._steps(calls))
        self.training += time.perf_counter() - begin

    def _steps(self, calls: int) -> tuple[float, float]:
        """Milliseconds of forward with backward, and of the whole step around them."""
        both = step = 0.0
        done = 0
        most, seconds = _turn(calls)
        while done < most and (done == 0 or step < seconds):
            begin = time.perf_counter()
            self.optimiser.zero_grad(set_to_none=True)
            start = time.perf_counter()
            self.layer(self.ids).backward(self.gradient)
            middle = time.perf_counter()
            self.optimiser.step()
            step += time.perf_counter() - begin
            both += middle - start
            done += 1
        # A dense gradient of gigabytes should not stay while the others are timed.
        self.optimiser.zero_grad(set_to_none=True)
        return 1e3 * both / done, 1e3 * step / done


def repeated(call: Callable[[], object], calls: int = 1) -> float:
    """Milliseconds of a call, of as many as a turn has."""
    begin = now = time.perf_counter()
    done = 0
    most, seconds = _turn(calls)
    while done < most and (done == 0 or now - begin < seconds):
        call()
        done += 1
        now = time.perf_counter()
    return 1e3 * (now - begin) / done


def _turn(calls: int) -> tuple[int, float]:
    """Calls and seconds of a turn, at most."""
    return (calls, _LOOP) if calls > 1 else (_REPEATS, _BURST)


def compare(contestants: Mapping[str, Contestant], rounds: Iterable[int], budget: float) -> dict[str, Timed]:
    """Time every warmed-up layer once a round.

    A layer that has used up its ``budget`` of seconds for lookups, or for steps, stops; how many rounds it got is
    recorded.
    """
    for name in in_turns(list(contestants), rounds):
        contestants[name].take_turn(budget)
    return {name: contestant.timed() for name, contestant in contestants.items()}


def in_turns(names: Sequence[str], rounds: Iterable[int]) -> Iterator[str]:
    """Every name once a round, in an order drawn anew each round.

    A fixed order would let one always run in the caches another has just emptied.
    """
    order = random.Random(0)
    for _ in rounds:
        yield from order.sample(names, len(names))
