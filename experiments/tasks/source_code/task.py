"""The task for the laboratory."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from experiments.lab.batches import Batch, Windows, evenly, lanes_of
from experiments.lab.metrics import Evaluation, Metric
from experiments.lab.settings import with_options
from experiments.lab.task import Task
from experiments.tasks.source_code.corpus import Corpus, read_corpus
from experiments.tasks.source_code.demo import OPTIONS, demo
from experiments.tasks.source_code.model import LanguageModel, SourceCodeSettings, State

VALIDATION_LANES = 16
VALIDATION_TOKENS = 8192


@dataclass(frozen=True)
class Lanes:
    """The two streams cut into equal parts that are read side by side, for validation only their beginning."""

    corpus: Corpus
    train: Tensor  # (batch, length)
    valid: Tensor  # (VALIDATION_LANES, length)

    @classmethod
    def of(cls, corpus: Corpus, batch: int) -> Lanes:
        valid = lanes_of(corpus.valid, VALIDATION_LANES, "validation")
        train = lanes_of(corpus.train, batch, "training")
        return cls(corpus, train, valid[:, : VALIDATION_TOKENS // VALIDATION_LANES + 1])

    def sizes(self) -> dict[str, list[int]]:
        corpus = self.corpus
        return {"train": [len(corpus.train)], "validation": [len(corpus.valid)], "words": [len(corpus.words)]}


class SourceCode(Task):
    """The next word of Python source, by windows whose state goes on to the next; gradients do not."""

    settings = SourceCodeSettings
    metrics = (Metric("perplexity", higher=False, digits=1, unit="%", log=True),)
    tests = ()
    selects = False
    stage = "step"
    commands: ClassVar = {"demo": with_options(demo, SourceCodeSettings, names=OPTIONS)}

    def load(self, settings: SourceCodeSettings, folder: Path | None) -> Lanes:
        root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        return Lanes.of(read_corpus(root, settings.vocabulary), settings.batch)

    def model(self, settings: SourceCodeSettings, data: Lanes) -> nn.Module:
        return LanguageModel(settings, data.corpus.log_frequencies())

    def batches(self, settings: SourceCodeSettings, data: Lanes) -> Windows:
        return Windows(data.train, settings.window, evenly(settings.steps, settings.validations))

    def count(self, batch: Batch) -> float:
        return batch.numbers

    def loss(self, model: nn.Module, batch: Batch, carried: State | None) -> tuple[Tensor, State]:
        loss, (hidden, cell) = model(batch["words"].T, batch["following"].T, carried)
        return loss, (hidden.detach(), cell.detach())

    def evaluate(self, evaluation: Evaluation, data: Lanes, split: str) -> dict[str, float]:
        whole = Batch({"words": data.valid[:, :-1], "following": data.valid[:, 1:]})
        loss, tokens = evaluation.totals(
            [whole], lambda batch: (evaluation.model(batch["words"].T, batch["following"].T)[0], batch.numbers)
        )
        return {"loss": loss / tokens, "perplexity": math.exp(loss / tokens)}


TASK = SourceCode()
