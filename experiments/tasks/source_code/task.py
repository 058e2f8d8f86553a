"""The task for the laboratory."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from experiments.lab.batches import Batch, Windows, evenly, lanes_of
from experiments.lab.metrics import Evaluation, Metric, perplexity
from experiments.lab.settings import with_options
from experiments.lab.task import Task
from experiments.tasks.source_code.corpus import Corpus, read_corpus
from experiments.tasks.source_code.demo import OPTIONS, demo
from experiments.tasks.source_code.model import LanguageModel, SourceCodeSettings, State


class SourceCode(Task):
    """The next word of Python source, by windows whose state goes on to the next; gradients do not."""

    settings = SourceCodeSettings
    metrics = (Metric("perplexity", higher=False, digits=1, unit="%", log=True),)
    tests = ()
    selects = False
    stage = "step"
    commands: ClassVar = {"demo": with_options(demo, SourceCodeSettings, names=OPTIONS)}

    def load(self, settings: SourceCodeSettings, folder: Path | None) -> Corpus:
        root = Path(sysconfig.get_path("stdlib")) if folder is None else folder
        corpus = read_corpus(root, settings.vocabulary)
        corpus.validation()
        self.batches(settings, corpus)  # both say it here if there are too few tokens
        return corpus

    def model(self, settings: SourceCodeSettings, data: Corpus) -> nn.Module:
        return LanguageModel(settings, data.log_frequencies())

    def batches(self, settings: SourceCodeSettings, data: Corpus) -> Windows:
        lanes = lanes_of(data.train, settings.batch, "training")
        return Windows(lanes, settings.window, evenly(settings.steps, settings.validations))

    def count(self, batch: Batch) -> float:
        return batch.numbers

    def loss(self, model: nn.Module, batch: Batch, carried: State | None) -> tuple[Tensor, State]:
        loss, (hidden, cell) = model(batch["words"].T, batch["following"].T, carried)
        return loss, (hidden.detach(), cell.detach())

    def evaluate(self, evaluation: Evaluation, data: Corpus, split: str) -> dict[str, float]:
        lanes = data.validation()
        whole = Batch({"words": lanes[:, :-1], "following": lanes[:, 1:]})
        loss, tokens = evaluation.totals(
            [whole], lambda batch: (self.loss(evaluation.model, batch, None)[0], batch.numbers)
        )
        return {"loss": loss / tokens, "perplexity": perplexity(loss / tokens)}


TASK = SourceCode()
