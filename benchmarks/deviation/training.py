"""The small models of the study, and one training run of one of them: short, as a first try in a script is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorbed as tb
from experiments.lab.batches import Windows
from experiments.lab.optimisers import pace
from experiments.tasks.source_code.corpus import Corpus
from tensorbed.structures import Format

VOCABULARY = 8000
LANES = 16
STEPS = 300
WINDOW = 32
CLIP = 1.0
CONTEXT = 8  # words before the one that a bag predicts
VALIDATION_TOKENS = 8192
FORMATS: dict[str, Format] = {
    "dense": tb.Dense(),
    "tt8": tb.TensorTrain(rank=8),
    "tt32": tb.TensorTrain(rank=32),
}


def deviations(dim: int) -> tuple[float, ...]:
    """Those that are tried: the paper's, that of ``nn.Linear``, uniform within ``1 / sqrt(dim)``, and larger ones."""
    return (math.sqrt(2 / (VOCABULARY + dim)), 1 / math.sqrt(3 * dim), 1 / dim**0.5, 0.3, 1.0)


@dataclass(frozen=True)
class Trial:
    """One training run.

    Attributes:
        model: ``"lstm"``, ``"transformer"`` or ``"bag"``.
        use: the table whose deviation is tried: ``"embedding"`` beside a dense head drawn as ``nn.Linear`` is,
            ``"head"`` beside an embedding drawn as ``nn.Embedding`` is, or ``"tied"``, one table for both.
        format: a key of :data:`FORMATS`.
        std: of that table at birth.
        decay: AdamW's, on all parameters alike.
        warm_up: the rate goes up in a line and down in a cosine; else it is constant.
        dim: the columns of the table, and the width of the model.
    """

    model: str
    use: str
    format: str
    std: float
    lr: float
    decay: float = 0.01
    warm_up: bool = False
    seed: int = 0
    dim: int = 128

    def record(self) -> dict[str, Any]:
        return asdict(self)

    def cell(self) -> tuple[Any, ...]:
        """Everything but the deviation: runs of one cell are compared."""
        return (self.model, self.use, self.format, self.lr, self.decay, self.warm_up, self.seed, self.dim)


class Recurrent(nn.Module):
    """An LSTM and a narrowing: ``(length, batch, dim) -> (length, batch, dim)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lstm, self.narrow = nn.LSTM(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.narrow(self.lstm(x)[0])
        return hidden


class Transformer(nn.Module):
    """Two layers with the norm first, causal, positions learnt: ``(length, batch, dim) -> (length, batch, dim)``."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(0.02 * torch.randn(64, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, activation="gelu", norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(dim), enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        hidden: Tensor = self.layers(x + self.positions[: len(x)], mask=mask, is_causal=True)
        return hidden


class Bags(nn.Module):
    """The mean of the words before, to predict the next one: ``(length, batch) -> (length, batch, dim)``."""

    def __init__(self, table: tb.EmbeddingBag) -> None:
        super().__init__()
        self.table = table

    def forward(self, words: Tensor) -> Tensor:
        padded = F.pad(words.T, (CONTEXT - 1, 0)).unfold(1, CONTEXT, 1)  # (batch, length, CONTEXT)
        means: Tensor = self.table(padded.reshape(-1, CONTEXT))
        return means.reshape(*words.T.shape, -1).transpose(0, 1)


class Model(nn.Module):
    """A table of words, a body and a head over all of them, as a trial asks for."""

    def __init__(self, trial: Trial) -> None:
        super().__init__()
        torch.manual_seed(trial.seed)
        body = {"lstm": Recurrent, "transformer": Transformer, "bag": nn.Identity}[trial.model](trial.dim)
        format, dim = FORMATS[trial.format], trial.dim
        linear = deviations(dim)[1]
        std = {"embedding": (trial.std, linear), "head": (1.0, trial.std), "tied": (trial.std, trial.std)}
        embedding_std, head_std = std[trial.use]
        dense = tb.Dense()
        of_embedding, of_head = (format, dense) if trial.use == "embedding" else (dense, format)
        if trial.use == "tied":
            of_embedding = format
        self.head: tb.Head
        if trial.model == "bag":
            table: Any = tb.EmbeddingBag(VOCABULARY, dim, of_embedding, std=embedding_std)
            self.body: nn.Module = Bags(table)
        else:
            table = tb.Embedding(VOCABULARY, dim, of_embedding, std=embedding_std)
            self.body = nn.Sequential(table, body)
        bias = trial.use != "tied"
        self.head = (
            tb.Head.tied_to(table) if trial.use == "tied" else tb.Head(dim, VOCABULARY, of_head, bias, std=head_std)
        )
        self.tried = self.head if trial.use == "head" else table

    def loss(self, words: Tensor, following: Tensor) -> Tensor:  # (length, batch) twice -> ()
        loss: Tensor = self.head.loss(self.body(words), following)
        return loss


def run(trial: Trial, corpus: Corpus) -> dict[str, Any]:
    """Train for :data:`STEPS` steps; the validation loss, and the deviation that the table has then."""
    model = Model(trial)
    optimiser = torch.optim.AdamW(model.parameters(), lr=trial.lr, weight_decay=trial.decay, fused=True)
    schedule, rise = ("cosine", 0.1) if trial.warm_up else ("constant", 0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: pace(schedule, step, STEPS, rise))
    length = len(corpus.train) // LANES
    lanes = corpus.train[: length * LANES].view(LANES, length)
    curve = []
    for step, batch in enumerate(Windows(lanes, WINDOW, [STEPS]).batches(), start=1):
        loss = model.loss(batch["words"].T, batch["following"].T)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimiser.step()
        rate.step()
        if step % 50 == 0:
            curve.append(round(loss.item(), 4))
    return {"loss": validation_loss(model, corpus), "train_losses": curve, "std_after": deviation(model.tried)}


@torch.no_grad()
def validation_loss(model: Model, corpus: Corpus) -> float:
    lanes = corpus.valid[: VALIDATION_TOKENS + LANES].view(LANES, -1)
    windows = Windows(lanes, WINDOW, [(lanes.shape[1] - 1) // WINDOW]).batches()
    losses = [model.loss(batch["words"].T, batch["following"].T) for batch in windows]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def deviation(table: Any) -> float:
    """The root mean square of the table's entries."""
    return float(table.weight.detach().double().square().mean().sqrt())
