"""The task for the laboratory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.lab.batches import Batch, Windows, evenly, lanes_of
from experiments.lab.metrics import Evaluation, Metric, perplexity
from experiments.lab.settings import with_options
from experiments.lab.task import Task, decaying, tables
from experiments.lab.words import log_frequencies
from experiments.tasks.language_model.commands import generate, prepare
from experiments.tasks.language_model.data import NOT_SCORED, Corpus, load, segments
from experiments.tasks.language_model.model import LanguageModelSettings, Memory, TransformerXL


class LanguageModel(Task):
    """The next word, by segments that remember those before them; gradients stay within a segment."""

    settings = LanguageModelSettings
    metrics = (Metric("perplexity", higher=False, digits=1, unit="%", log=True),)
    stage = "step"
    commands: ClassVar = {
        "generate": generate,
        "prepare": with_options(prepare, LanguageModelSettings, names=("dataset", "vocabulary")),
    }

    def load(self, settings: LanguageModelSettings, folder: Path | None) -> Corpus:
        corpus = load(settings, folder)
        # A text may have fewer words than the settings allow, too few for the format.
        self.check_tables(replace(settings, vocabulary=len(corpus.words)))
        return corpus

    def model(self, settings: LanguageModelSettings, data: Corpus) -> nn.Module:
        model = TransformerXL(settings, data.words)
        # Born knowing how frequent words are, it does not spend its first hundreds of steps on that.
        assert model.head.bias is not None
        with torch.no_grad():
            model.head.bias.copy_(log_frequencies(data.splits["train"], len(data.words)))
        return model

    def batches(self, settings: LanguageModelSettings, data: Corpus) -> Windows:
        lanes = lanes_of(data.splits["train"], settings.batch, "training")
        steps = settings.steps or settings.epochs * max(1, (lanes.shape[1] - 1) // settings.target)
        return Windows(lanes, settings.target, evenly(steps, settings.validations))

    def parameters(self, settings: LanguageModelSettings, model: nn.Module) -> Iterable[Any]:
        return decaying(model)

    def count(self, batch: Batch) -> float:
        return batch.numbers

    def loss(self, model: nn.Module, batch: Batch, carried: Memory | None) -> tuple[Tensor, Memory]:
        loss, memory = model(batch["words"], batch["following"], carried)
        return loss, memory

    def evaluate(self, evaluation: Evaluation, data: Corpus, split: str) -> dict[str, float]:
        settings, memory = evaluation.settings, None

        def score(batch: Batch) -> tuple[Tensor, Tensor]:
            nonlocal memory
            loss, memory = evaluation.model(batch["words"], batch["following"], memory)
            return loss, (batch["following"] != NOT_SCORED).sum()

        parts = segments(data.splits[split], settings.evaluation_batch, settings.evaluation_target)
        loss, tokens = evaluation.totals(parts, score)
        return {"loss": loss / tokens, "perplexity": perplexity(loss / tokens)}

    def ratio(self, model: nn.Module) -> float:
        """As the paper counts: one full table over what is kept for both ends."""
        return super().ratio(model) / len(tables(model))


TASK = LanguageModel()
