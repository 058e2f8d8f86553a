"""The task for the laboratory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.lab.batches import Batch, Source
from experiments.lab.errors import ExperimentError, needed, unknown
from experiments.lab.files import check_folder
from experiments.lab.formats import stored
from experiments.lab.metrics import Evaluation, Metric
from experiments.lab.task import Task, tables
from experiments.tasks.click_through.commands import generate, prepare, score
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings

if TYPE_CHECKING:
    from experiments.lab.training import Training

DATASETS = ("book-crossing", "criteo", "criteo-sample", "criteo-coded", "synthetic")


class ClickThrough(Task):
    """Whether somebody clicks, measured by the mean logarithmic loss and the area under the ROC curve."""

    settings = ClickThroughSettings
    metrics = (Metric("logloss", higher=False, digits=4), Metric("AUC", digits=4))
    stage = "step"
    items = "rows"
    commands: ClassVar = {"prepare": prepare, "generate": generate, "score": score}

    def load(self, settings: ClickThroughSettings, folder: Path | None) -> Any:
        """Rows with ``tables``, ``maps`` and ``sizes()``, which are streamed or lie in memory."""
        if settings.dataset not in DATASETS:
            raise unknown("dataset", settings.dataset, DATASETS)
        if folder is None and settings.dataset != "synthetic":
            raise ExperimentError(f"{settings.dataset} is not fetched; give the folder that holds it with --data.")
        check_folder(folder)
        area_under_curve(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))  # before anything long is begun
        try:
            from experiments.tasks.click_through import books, coded, prepared, synthetic
        except ImportError as error:
            raise ExperimentError(f"click-through needs pip install '.[experiments]' ({error}).") from None
        if folder is None or settings.dataset == "synthetic":
            return synthetic.Synthetic.of_size(settings.values)
        if settings.dataset == "criteo-coded":
            return coded.load(folder)
        if settings.dataset in prepared.DATASETS:
            # A sample lies beside the other small sets, so that one --data serves a sweep of them.
            return prepared.Prepared.open(folder if settings.dataset == "criteo" else folder / settings.dataset)
        return books.load(folder, settings.least)

    def model(self, settings: ClickThroughSettings, data: Any) -> nn.Module:
        try:
            return ClickModel(settings, data.tables, data.maps)
        except ValueError as error:
            raise ExperimentError(f"{settings.dataset} {settings.row}: {str(error).splitlines()[0]}") from None

    def table_sizes(self, settings: ClickThroughSettings) -> list[tuple[int, int]]:
        return []  # the data tells them

    def batches(self, settings: ClickThroughSettings, data: Any) -> Source:
        source: Source = data.training(settings)
        return source

    def loss(self, model: nn.Module, batch: Batch, carried: None) -> tuple[Tensor, None]:
        return F.binary_cross_entropy_with_logits(model(batch["ids"]), batch["labels"], reduction="sum"), None

    def evaluate(self, evaluation: Evaluation, data: Any, split: str) -> dict[str, float]:
        kept: list[tuple[Tensor, Tensor]] = []

        def score(batch: Batch) -> tuple[Tensor, float]:
            scores = evaluation.model(batch["ids"])
            if batch.weight:
                kept.append((scores.float().cpu(), batch["labels"].cpu()))
            return F.binary_cross_entropy_with_logits(scores, batch["labels"], reduction="sum"), batch.rows

        loss, rows = evaluation.totals(data.in_order(evaluation.settings, split), score)
        scores, labels = (torch.cat(parts) for parts in zip(*evaluation.gathered(kept), strict=True))
        return {"logloss": loss / rows, "AUC": area_under_curve(scores, labels)}

    def after(self, run: Training) -> Mapping[str, Any]:
        """Shape and ranks of the largest table, not of the first; what all of them take; and what the data tells."""
        layers = [stored(layer) for layer in tables(run.plain)]
        largest = max((layer.structure for layer in layers), key=lambda structure: structure.rows)
        factors = [getattr(largest, f"{side}_factors", (getattr(largest, f"{side}s"),)) for side in ("row", "col")]
        return {
            "shape": [list(of) for of in factors],
            "ranks": list(getattr(largest, "ranks", ())),
            "table_bytes": sum(layer.structure.bytes(torch.float32) for layer in layers),
            "tables": dict(run.data.tables),
            **run.data.told(),
        }


def area_under_curve(scores: Tensor, labels: Tensor) -> float:
    """Of the ROC, exact: how often a click has the higher score of two rows."""
    classification = needed("torchmetrics.functional.classification", "AUC")
    return float(classification.binary_auroc(scores.double().sigmoid(), labels.long()))


TASK = ClickThrough()
