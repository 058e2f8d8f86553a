"""The task for the laboratory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer
from torch import Tensor, nn

from experiments.lab.batches import Batch, evenly
from experiments.lab.metrics import Evaluation, Metric
from experiments.lab.processes import first_process
from experiments.lab.task import Task, decaying
from experiments.tasks.translation import bleu
from experiments.tasks.translation.commands import translate
from experiments.tasks.translation.data import ByTokens, Corpus, decoded_at_once, load
from experiments.tasks.translation.frequencies import by_frequency
from experiments.tasks.translation.model import PAD, TranslationSettings, Translator, transformers
from experiments.tasks.translation.tokens import sentence

if TYPE_CHECKING:
    from experiments.lab.training import Training


class Translation(Task):
    """Sentences of German for sentences of English, measured by BLEU."""

    settings = TranslationSettings
    metrics = (Metric("BLEU", digits=2, unit="BLEU"),)
    tests = ("test", "test2017", "test2018", "mscoco")  # a dataset has the first one at least
    stage = "step"
    commands: ClassVar = {"translate": translate, "by-frequency": by_frequency}

    def load(self, settings: TranslationSettings, folder: Path | None) -> Corpus:
        for package in (bleu.metric, transformers):  # before anything long is begun
            package()
        return load(settings, folder)

    def model(self, settings: TranslationSettings, data: Corpus) -> nn.Module:
        tokens = data.tokenizer.get_vocab_size()
        self.check_tables(replace(settings, vocabulary=tokens))  # which may be fewer than were asked for
        return Translator(settings, tokens, data.tokenizer.to_str())

    def batches(self, settings: TranslationSettings, data: Corpus) -> ByTokens:
        pairs = data.splits["train"]
        steps = settings.steps or settings.epochs * len(pairs.batches(settings.batch))
        return ByTokens(pairs, settings.batch, settings.seed, evenly(steps, settings.validations))

    def parameters(self, settings: TranslationSettings, model: nn.Module) -> Iterable[Any]:
        return decaying(model)

    def count(self, batch: Batch) -> float:
        return float((batch["target"] != PAD).sum())

    def loss(self, model: nn.Module, batch: Batch, carried: None) -> tuple[Tensor, None]:
        return model(batch["source"], batch["target"]), None

    def evaluate(self, evaluation: Evaluation, data: Corpus, split: str) -> dict[str, float]:
        """Loss and BLEU; nothing for a test set that the dataset lacks."""
        if split not in data.splits:
            return {}
        settings, pairs = evaluation.settings, data.splits[split]
        translated: list[tuple[int, list[int]]] = []  # by the number of the pair
        beams = settings.validation_beam if split == "validation" else settings.beam

        def score(batch: Batch) -> tuple[Tensor, float]:
            written = evaluation.model(batch["source"], beams=beams).tolist()
            if batch.weight:
                translated.extend(zip(batch["number"].tolist(), written, strict=True))
            return evaluation.model(batch["source"], batch["target"]), self.count(batch)

        batches = (pairs.batch(numbers) for numbers in pairs.batches(decoded_at_once(settings, beams)))
        loss, tokens = evaluation.totals(batches, score)
        texts = [sentence(data.tokenizer, written) for _, written in sorted(evaluation.gathered(translated))]
        return {"loss": loss / tokens, "BLEU": bleu.bleu(texts, pairs.references)}

    def after(self, run: Training) -> Mapping[str, Any]:
        signature = bleu.signature()
        if first_process():
            typer.echo(f"BLEU is that of SacreBLEU, {signature}")
        return {"signature": signature}


TASK = Translation()
