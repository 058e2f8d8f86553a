"""Train one row on one dataset: the whole run, readable from top to bottom."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from experiments.lab.batches import Batch, EqualLengthBatches
from experiments.lab.checkpoints import Checkpoints
from experiments.lab.errors import Diverged, ExperimentError, Stopped
from experiments.lab.interrupts import Interrupts
from experiments.lab.processes import accelerator_of, random_state, set_random_state
from experiments.lab.records import about, peak_memory
from experiments.lab.settings import Settings
from experiments.lab.sharding import load_whole_model, load_whole_optimizer, shard, whole_model, whole_optimizer
from experiments.lab.watching import Watch
from experiments.tasks.sentiment.data import Data, load
from experiments.tasks.sentiment.model import Classifier

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class How:
    """What is no part of a run's configuration: where it reads and writes, in how many pieces a batch is computed."""

    data: Path | None = None
    out: Path = Path("out/experiments")
    resume: bool = False
    checkpoint_steps: int | None = None
    checkpoint_minutes: float | None = 5.0
    accumulate: int = 1
    fsdp: bool = False
    tensorboard: bool = False
    test: bool = True  # a search looks at validation alone


@dataclass
class State:
    """Where a run is, beside the tensors of its model and optimiser."""

    epoch: int = 0
    step: int = 0  # within the epoch
    loss: float = 0.0  # summed over the epoch's texts
    texts: int = 0
    norm: float = 0.0  # of gradients before they are clipped, summed over the epoch's steps
    tokens: int = 0  # of the whole run, as are the seconds
    seconds: float = 0.0  # of training steps, everything included
    computing: float = 0.0  # of them forward, backward and the optimiser's step
    total: float = 0.0  # with evaluation, up to the last checkpoint
    commits: list[str | None] = field(default_factory=list)  # of the code that computed it, one a start
    history: list[dict[str, Any]] = field(default_factory=list)
    selected: int = -1
    best: float = -1.0


class Training:
    """A model, its optimiser and where they are; each method is a stage of the run."""

    def __init__(self, settings: Settings, how: How, data: Data) -> None:
        self.settings, self.how, self.data = settings, how, data
        self.accelerator = accelerator_of(settings.precision)
        self.processes = self.accelerator.num_processes
        torch.manual_seed(settings.seed)
        self.classifier = Classifier(settings, data.classes)
        self.train_batches = EqualLengthBatches(data.splits["train"], settings.batch, settings.seed)
        self.steps = settings.epochs * len(self.train_batches)
        self.model, self.optimizer = self.prepared()
        # Down to zero in a straight line over the epochs allowed, for every row alike.
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            getattr(self.optimizer, "optimizer", self.optimizer), lambda step: max(0.0, 1 - step / self.steps)
        )
        # One model in all processes, another dropout in each.
        torch.manual_seed(settings.seed + 7919 * self.accelerator.process_index)
        self.state = State()
        self.best: dict[str, Tensor] = {}
        self.about = about()
        self.begun = time.perf_counter()

    def prepared(self) -> tuple[nn.Module, Any]:
        """Model and optimiser as accelerate has them: on the device, distributed, in the precision asked for."""
        if self.how.fsdp:
            if self.processes == 1:
                raise ExperimentError("--fsdp shards a model over several processes; start them with torchrun.")
            placed = self.accelerator.prepare_model(self.classifier, evaluation_mode=True)  # without DDP around it
            model = shard(placed)
            return model, torch.optim.Adam(model.parameters(), lr=self.settings.lr, fused=True)
        optimizer = torch.optim.Adam(self.classifier.parameters(), lr=self.settings.lr, fused=True)
        model, prepared = self.accelerator.prepare(self.classifier, optimizer)
        return model, prepared

    def gathering(self, last: bool) -> AbstractContextManager[None]:
        """Gradients go from process to process with the last piece of a batch only."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)
            return nullcontext()
        waiting: AbstractContextManager[None] = self.accelerator.no_sync(self.model)
        return nullcontext() if last else waiting

    def run_epoch(self, watch: Watch, checkpoints: Checkpoints, interrupts: Interrupts) -> None:
        """The rest of an epoch, from where the state stands."""
        self.model.train()
        state = self.state
        begun = time.perf_counter()
        for batch in self.train_batches.epoch(state.epoch, state.step):
            mine = self.step(batch)
            loss, due, asked = self.agreed(mine, checkpoints.due(), interrupts.asked)
            state.step += 1
            state.loss += loss
            state.texts += len(batch.labels)
            state.tokens += batch.tokens.numel()
            now = time.perf_counter()
            state.seconds += now - begun
            begun = now
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss or its gradient is {loss} in step {state.step} of epoch {state.epoch + 1}: "
                    f"begin anew with a smaller --lr. {checkpoints.kept()}"
                )
            metric = state.history[-1]["val_accuracy"] if state.history else None
            done = state.epoch * len(self.train_batches) + state.step
            watch.step(done, state.loss / state.texts, metric, state.tokens / state.seconds)
            if due or asked:
                self.save(checkpoints)
            if asked:
                raise Stopped(f"stopped after step {state.step} of epoch {state.epoch + 1}. {checkpoints.kept()}")

    def agreed(self, loss: float, due: bool, asked: bool) -> tuple[float, bool, bool]:
        """The loss over all processes, and what any of them wants: they have to save together."""
        if self.processes == 1:
            return loss, due, asked
        mine = torch.tensor([loss, float(due), float(asked)], dtype=torch.float64, device=self.accelerator.device)
        total, dues, askings = self.accelerator.reduce(mine, "sum").tolist()
        return total, dues > 0, askings > 0

    def step(self, batch: Batch) -> float:
        """One step of the optimiser; the loss summed over this process's texts, nan where a gradient is no number.

        Processes and accumulation only divide the batch: the gradient is that of the sum over all its texts, divided
        by the full batch size.
        """
        begun = time.perf_counter()
        total = self.gradients(batch)
        norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.clip))
        if not math.isfinite(norm):  # a step would spoil every weight
            return math.nan
        self.state.norm += norm
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.computing += time.perf_counter() - begun
        return total

    def gradients(self, batch: Batch) -> float:
        """Of a batch, piece by piece; as many pieces in every process, whoever has a text less."""
        mine = batch.part(self.accelerator.process_index, self.processes)
        parts = min(self.how.accumulate, -(-len(batch.labels) // self.processes))
        total = 0.0
        for part in range(parts):
            piece = mine.part(part, parts)
            with self.gathering(last=part == parts - 1):
                loss = self.loss(piece)
                # Gradients are averaged over processes: times their number they are summed.
                self.accelerator.backward(loss * (self.processes / self.settings.batch))
            total += float(loss.detach())
        return total

    def loss(self, batch: Batch) -> Tensor:  # -> ()
        """Cross-entropy summed over the texts."""
        device = self.accelerator.device
        scores = self.model(batch.tokens.to(device))
        losses = F.cross_entropy(scores.float(), batch.labels.to(device), reduction="none")
        return losses @ batch.weights.to(device)

    @torch.no_grad()
    def evaluate(self, split: str) -> tuple[float, float]:
        """Mean loss and accuracy on a split."""
        self.model.eval()
        batches = EqualLengthBatches(self.data.splits[split], EVALUATION_BATCH)
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in batches.epoch():
            mine = batch.part(self.accelerator.process_index, self.processes)
            scores = self.model(mine.tokens.to(self.accelerator.device)).float().cpu()
            sums[0] += F.cross_entropy(scores, mine.labels, reduction="none") @ mine.weights
            sums[1] += (scores.argmax(-1) == mine.labels).float() @ mine.weights
        if self.processes > 1:
            sums = self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
        loss, right = (sums / batches.texts).tolist()
        return loss, right

    def unfinished(self) -> bool:
        """Is there another epoch to train?"""
        state = self.state
        waited = state.epoch - 1 - state.selected
        return state.epoch < self.settings.epochs and (not state.history or waited < self.settings.patience)

    def close_epoch(self) -> dict[str, Any]:
        """Validate, and keep the best; the figures of the epoch."""
        state = self.state
        val_loss, val_accuracy = self.evaluate("validation")
        figures = {
            "epoch": state.epoch + 1,
            "train_loss": state.loss / state.texts,
            "val_loss": val_loss,
            "val_accuracy": val_accuracy,
            "gradient_norm": state.norm / len(self.train_batches),
            "train_seconds": round(state.seconds, 1),
        }
        state.history.append(figures)
        if val_accuracy > state.best:
            state.best, state.selected = val_accuracy, state.epoch
            self.best = self.model_state()
        state.epoch += 1
        state.step, state.loss, state.texts, state.norm = 0, 0.0, 0, 0.0
        return figures

    def model_state(self) -> dict[str, Tensor]:
        """A copy of the model's tensors."""
        if self.how.fsdp:
            return whole_model(self.model)
        return {
            name: tensor.detach().cpu().clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()
        }

    def load_model(self, tensors: dict[str, Tensor]) -> None:
        """Put a copy back."""
        if self.how.fsdp:
            load_whole_model(self.model, tensors)
            return
        self.accelerator.unwrap_model(self.model).load_state_dict(tensors)

    def save(self, checkpoints: Checkpoints) -> None:
        """Everything the rest of the run depends on. All processes take part; the first one writes."""
        mine = [random_state(self.accelerator.device)]
        random = gather_object(mine) if self.processes > 1 else mine
        self.state.total = time.perf_counter() - self.begun
        content = {
            "data": self.data.sizes(),
            "fsdp": self.how.fsdp,
            "model": self.model_state(),
            "optimizer": whole_optimizer(self.model, self.optimizer) if self.how.fsdp else self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": random,
            "state": asdict(self.state),
            "best": self.best,
        }
        if self.accelerator.is_main_process:
            checkpoints.save(content)

    def restore(self, checkpoints: Checkpoints) -> None:
        """Go back to where the checkpoint was taken."""
        content = checkpoints.load()
        if content.get("fsdp") != self.how.fsdp:
            began = "with" if content.get("fsdp") else "without"
            raise ExperimentError(f"{checkpoints.path} is of a run {began} --fsdp; go on as it began.")
        if len(content["random"]) != self.processes:
            raise ExperimentError(
                f"{checkpoints.path} was written by {len(content['random'])} processes, this run has {self.processes}; "
                "go on with as many."
            )
        if content["data"] != self.data.sizes():
            raise ExperimentError(
                f"{checkpoints.path} was made with other data: texts and tokens {content['data']}, "
                f"now {self.data.sizes()}. Give the same --data, or begin anew with --restart."
            )
        self.load_model(content["model"])
        if self.how.fsdp:
            load_whole_optimizer(self.model, self.optimizer, content["optimizer"])
        else:
            self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])
        set_random_state(self.accelerator.device, content["random"][self.accelerator.process_index])
        self.state, self.best = State(**content["state"]), content["best"]
        self.begun = time.perf_counter() - self.state.total


def train(settings: Settings, how: How) -> dict[str, Any]:
    """A whole run: its result, complete but for what is asked after it."""
    name = f"{settings.dataset} {settings.row} seed {settings.seed}"
    folder = settings.folder(how.out)
    checkpoints = Checkpoints(folder, settings.as_record(), how.checkpoint_steps, how.checkpoint_minutes)
    settings.check_table()
    data = load(settings, how.data)
    try:
        run = Training(settings, how, data)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        raise ExperimentError(f"{name} needs more memory than there is: {str(error).splitlines()[0]}") from None
    if how.resume:
        run.restore(checkpoints)
    run.state.commits.append(run.about["commit"])
    main = run.accelerator.is_main_process
    logs = folder / "tensorboard" if how.tensorboard else None
    with Watch(name, run.steps, main=main, logs=logs) as watch, Interrupts() as interrupts:
        while run.unfinished():
            run.run_epoch(watch, checkpoints, interrupts)
            figures = run.close_epoch()
            run.save(checkpoints)
            watch.epoch(run.state.epoch * len(run.train_batches), figures)
        run.load_model(run.best)
        test = run.evaluate("test") if how.test else None
    return result(run, test)


def named(settings: Settings) -> dict[str, Any]:
    """What every line begins with: of which run it is."""
    names = ("dataset", "row", "seed", "format")
    return {"task": "sentiment", **{name: getattr(settings, name) for name in names}, "settings": settings.as_record()}


def result(run: Training, test: tuple[float, float] | None) -> dict[str, Any]:
    """The line of results."""
    settings, state = run.settings, run.state
    embedding = run.accelerator.unwrap_model(run.model).embedding
    structure = embedding.structure
    dense = structure.rows * structure.cols
    return {
        **named(settings),
        "shape": [
            list(getattr(structure, "row_factors", (structure.rows,))),
            list(getattr(structure, "col_factors", (structure.cols,))),
        ],
        "ranks": list(getattr(structure, "ranks", ())) or ([settings.rank] if settings.rank else []),
        "table_parameters": structure.numel,
        "total_parameters": sum(tensor.numel() for tensor in run.classifier.parameters()),
        "ratio": dense / structure.numel,  # as the paper counts; the next one counts the padding row too
        "stored_ratio": embedding.compression_ratio,
        "val_accuracy": state.best,
        "test_accuracy": None if test is None else test[1],
        "test_loss": None if test is None else test[0],
        "selected_epoch": state.selected + 1,
        "epochs": state.history,
        "seconds": time.perf_counter() - run.begun,
        "train_seconds": state.seconds,
        "tokens": state.tokens,
        "tokens_per_second": state.tokens / state.seconds,
        "overhead": 1 - state.computing / state.seconds,
        "peak_memory_bytes": peak_memory(),
        "processes": run.processes,
        **run.about,
        "commits": list(dict.fromkeys(state.commits)),
    }
