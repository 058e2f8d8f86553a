"""Training and validation, the same steps on the same words for every format."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from experiments.tasks.source_code.corpus import Corpus
from experiments.tasks.source_code.model import LanguageModel, State

WINDOW = 32  # tokens per lane and step, as far back as gradients go
LEARNING_RATE = 0.01  # twice of it moved full tables by -3 % and a train by +2 % in 300 steps, about as a seed does
WARM_UP = 0.1  # of the steps
CLIP = 1.0
VALIDATIONS = 8
VALIDATION_LANES = 16
VALIDATION_TOKENS = 8192


@dataclass(frozen=True)
class Settings:
    steps: int = 1000
    vocab: int = 10_000
    dim: int = 96
    batch: int = 16
    seed: int = 0


@dataclass
class Run:
    """What came of one model: validation perplexity after so many steps, and the time the steps alone took."""

    curve: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        return self.curve[-1][1]


class Watch(Protocol):
    """Told when training starts, and of every step and validation; what it raises ends the training."""

    def started(self) -> None: ...

    def stepped(self, step: int, loss: float) -> None: ...

    def validated(self, step: int, perplexity: float) -> None: ...


@dataclass(frozen=True)
class Lanes:
    """The two streams cut into equal parts that are read side by side, for validation only their beginning."""

    train: Tensor  # (length, batch)
    valid: Tensor  # (length, VALIDATION_LANES)

    @classmethod
    def of(cls, corpus: Corpus, batch: int) -> Lanes:
        valid = _cut(corpus.valid, VALIDATION_LANES, "validation")
        return cls(_cut(corpus.train, batch, "training"), valid[: VALIDATION_TOKENS // VALIDATION_LANES + 1])


def _cut(stream: Tensor, count: int, use: str) -> Tensor:  # (tokens,) -> (tokens // count, count)
    length = len(stream) // count
    if length < 2:
        raise ValueError(
            f"the corpus has {len(stream)} tokens for {use}, too few to read in {count} places at once: "
            "give a larger one" + (f" or a --batch of at most {len(stream) // 2}." if use == "training" else ".")
        )
    return stream[: length * count].view(count, length).T.contiguous()


def windows(lanes: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:  # lanes: (length, batch)
    """Words and the words that follow them, window after window, from the start again when the lanes end."""
    length = min(WINDOW, len(lanes) - 1)
    fitting = (len(lanes) - 1) // length
    for step in range(steps):
        at = step % fitting * length
        yield lanes[at : at + length], lanes[at + 1 : at + length + 1]


def train(model: LanguageModel, lanes: Lanes, settings: Settings, watch: Watch) -> Run:
    """Train with the settings' steps, validating now and then."""
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: pace(step, settings.steps))
    pauses = {round(settings.steps * k / VALIDATIONS) for k in range(1, VALIDATIONS + 1)}
    run, state = Run(), None
    watch.started()
    for step, (words, following) in enumerate(windows(lanes.train, settings.steps), start=1):
        begin = time.perf_counter()
        loss, state = take_step(model, optimiser, words, following, state)
        schedule.step()
        run.seconds += time.perf_counter() - begin
        watch.stepped(step, loss)
        if step in pauses:
            run.curve.append((step, perplexity(model, lanes.valid)))
            watch.validated(*run.curve[-1])
    return run


def pace(step: int, steps: int) -> float:
    """The share of the learning rate: up in a line, down in a cosine."""
    return min((step + 1) / (WARM_UP * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))


def take_step(
    model: LanguageModel,
    optimiser: torch.optim.Optimizer,
    words: Tensor,  # (length, batch)
    following: Tensor,  # (length, batch)
    state: State | None,
) -> tuple[float, State]:
    """One step of the optimiser; the state goes on to the next window, gradients do not."""
    hidden, (h, c) = model.hidden(words, state)
    loss = model.head.loss(hidden, following)
    optimiser.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimiser.step()
    return loss.item(), (h.detach(), c.detach())


@torch.no_grad()
def perplexity(model: LanguageModel, lanes: Tensor) -> float:  # lanes: (length, VALIDATION_LANES)
    hidden, _ = model.hidden(lanes[:-1])
    return math.exp(model.head.loss(hidden, lanes[1:]).item())
