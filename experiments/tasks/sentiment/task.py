"""The task for the laboratory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lab.batches import Batch, Epochs
from experiments.lab.metrics import Evaluation, Metric
from experiments.lab.task import Task
from experiments.tasks.sentiment.data import Data, load
from experiments.tasks.sentiment.model import Classifier, SentimentSettings

EVALUATION_BATCH = 256


class Sentiment(Task):
    """A class for each text. A loss is divided by the full batch size, so that every text weighs the same."""

    settings = SentimentSettings
    metrics = (Metric("accuracy"),)

    def load(self, settings: SentimentSettings, folder: Path | None) -> Data:
        return load(settings, folder)

    def model(self, settings: SentimentSettings, data: Data) -> nn.Module:
        return Classifier(settings, data.classes)

    def batches(self, settings: SentimentSettings, data: Data) -> Epochs:
        return Epochs(data.splits["train"], settings.batch, settings.seed, settings.epochs)

    def divisor(self, settings: SentimentSettings, batch: Batch) -> float:
        return settings.batch

    def loss(self, model: nn.Module, batch: Batch, carried: Any) -> tuple[Tensor, None]:
        return F.cross_entropy(model(batch["tokens"]).float(), batch["labels"], reduction="sum"), None

    def evaluate(self, evaluation: Evaluation, data: Data, split: str) -> dict[str, float]:
        def score(batch: Batch) -> tuple[Tensor, Tensor, int]:
            scores, labels = evaluation.model(batch["tokens"]).float(), batch["labels"]
            loss = F.cross_entropy(scores, labels, reduction="sum")
            return loss, (scores.argmax(-1) == labels).sum(), len(labels)

        loss, right, texts = evaluation.totals(Epochs(data.splits[split], EVALUATION_BATCH).batches(), score)
        return {"loss": loss / texts, "accuracy": right / texts}


TASK = Sentiment()
