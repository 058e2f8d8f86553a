"""Whether the sum of some numbers is even, from a table of the numbers: the smallest task one can write."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.batches import Batch, Epochs
from experiments.lab.metrics import Metric
from experiments.lab.settings import Settings, option
from experiments.lab.task import Task


@dataclass(frozen=True, kw_only=True)
class ParitySettings(Settings):
    vocabulary: int = option(64, "numbers there are", least=2)
    dim: int = option(8, "numbers for each of them", least=1)
    examples: int = option(256, "sums to train on", least=1)


@dataclass(frozen=True)
class Sums:
    splits: dict[str, Batch]

    def sizes(self):
        return {name: [batch.rows] for name, batch in self.splits.items()}


class Model(nn.Module):
    def __init__(self, settings):
        super().__init__()
        size = settings.vocabulary, settings.dim
        self.table = tb.EmbeddingBag(*size, settings.table_format(*size), mode="sum")
        self.head = nn.Linear(settings.dim, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.table(numbers).tanh())


class Parity(Task):
    settings = ParitySettings
    metrics = (Metric("error", higher=False), Metric("confidence", digits=2))
    tests = ("pairs", "triples")
    items = "numbers"

    def load(self, settings, folder):
        draw = torch.Generator().manual_seed(0)
        splits = {}
        for name, width in {"train": 2, "validation": 2, "pairs": 2, "triples": 3}.items():
            numbers = torch.randint(settings.vocabulary, (settings.examples, width), generator=draw)
            splits[name] = Batch({"numbers": numbers, "labels": numbers.sum(1) % 2})
        return Sums(splits)

    def model(self, settings, data):
        return Model(settings)

    def batches(self, settings, data):
        return Epochs([data.splits["train"]], settings.batch, settings.seed, settings.epochs)

    def loss(self, model, batch, carried):
        return F.cross_entropy(model(batch["numbers"]), batch["labels"], reduction="sum"), None

    def evaluate(self, evaluation, data, split):
        def score(batch):
            shares = evaluation.model(batch["numbers"]).softmax(-1)
            return (shares.argmax(-1) != batch["labels"]).sum(), shares.amax(-1).sum(), batch.rows

        wrong, sure, rows = evaluation.totals([data.splits[split]], score)
        return {"error": wrong / rows, "confidence": sure / rows}

    def after(self, run):
        return {"largest_weight": max(float(p.abs().max()) for p in run.plain.parameters())}


TASK = Parity()
