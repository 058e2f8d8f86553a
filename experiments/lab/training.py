"""Train one row of one task: the whole run, from options to a line of results."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from benchmarks.allocator import keep_freed_memory
from experiments.lab.batches import Batch
from experiments.lab.checkpoints import MODEL, Checkpoints
from experiments.lab.errors import Diverged, ExperimentError, Stopped
from experiments.lab.files import alone, writable_folder
from experiments.lab.formats import stored
from experiments.lab.metrics import LOSS, Evaluation
from experiments.lab.optimisers import OPTIMIZERS, pace
from experiments.lab.processes import Interrupts, accelerator_of, check_same_data, first_process, part
from experiments.lab.records import about, append, peak_memory
from experiments.lab.rows import Bench
from experiments.lab.settings import How, Settings
from experiments.lab.task import Task, tables
from experiments.lab.watching import Display, Line


@dataclass
class State:
    """Where a run is, beside the tensors of its model and optimiser. A stage lies between two validations."""

    epoch: int = 0  # stages that are over
    step: int = 0  # within the stage
    done: int = 0  # steps of the whole run
    loss: float = 0.0  # summed over the stage, as are the items it is a mean of
    items: float = 0.0
    norm: float = 0.0  # of gradients before they are clipped, summed over the stage's steps
    tokens: int = 0  # of the whole run, as are the seconds
    seconds: float = 0.0  # of training steps, everything included
    computing: float = 0.0  # of them forward, backward and the optimiser's step
    total: float = 0.0  # with evaluation, up to the last checkpoint
    commits: list[str | None] = field(default_factory=list)  # of the code that computed it, one a start
    history: list[dict[str, Any]] = field(default_factory=list)
    selected: int = -1
    best: float | None = None


class Training:
    """A model, its optimiser and where they are; each method is a stage of the run."""

    def __init__(self, task: Task, settings: Settings, how: How, data: Any) -> None:
        keep_freed_memory()  # large fresh allocations are slow
        self.task, self.settings, self.how, self.data = task, settings, how, data
        self.metric = task.metrics[0]
        self.accelerator = accelerator_of(settings.precision)
        self.processes = self.accelerator.num_processes
        if self.processes > 1:
            check_same_data(gather_object([data.sizes()]))
        torch.manual_seed(settings.seed)
        self.plain = task.model(settings, data)  # as nothing has wrapped it yet
        self.source = task.batches(settings, data)
        self.steps = self.source.ends[-1]
        self.model, self.optimizer = self.prepared()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            getattr(self.optimizer, "optimizer", self.optimizer),
            lambda step: pace(settings.schedule, step, self.steps, settings.warm_up),
        )
        # One model in all processes, another dropout in each.
        torch.manual_seed(settings.seed + 7919 * self.accelerator.process_index)
        self.state = State()
        self.carried: dict[int, Any] = {}  # from batch to batch, of each piece a batch is computed in
        self.best: dict[str, Tensor] = {}
        self.about = about()
        self.begun = time.perf_counter()

    def prepared(self) -> tuple[nn.Module, Any]:
        """Model and optimiser as accelerate has them: on the device, distributed, in the precision asked for."""
        model, settings = self.plain, self.settings
        if self.how.fsdp:
            if self.processes == 1:
                raise ExperimentError("--fsdp shards a model over several processes; start them with torchrun.")
            from experiments.lab import sharding  # only here: FSDP takes a second to import

            self.sharding = sharding
            model = sharding.shard(self.accelerator.prepare_model(model, evaluation_mode=True))  # without DDP around it
        options = {"lr": settings.lr, "weight_decay": settings.weight_decay}
        optimizer = OPTIMIZERS[settings.optimizer](self.task.parameters(settings, model), **options)
        return (model, optimizer) if self.how.fsdp else self.accelerator.prepare(model, optimizer)

    def gathering(self, last: bool) -> AbstractContextManager[None]:
        """Gradients go from process to process with the last piece of a batch only."""
        if self.how.fsdp:
            self.sharding.gather_gradients(self.model, last)
        return nullcontext() if last or self.how.fsdp else self.accelerator.no_sync(self.model)

    def train(self, line: Line, interrupts: Interrupts, checkpoints: Checkpoints | None = None) -> None:
        """All that is left of the run; at its end the model is the selected one."""
        line.started(self.state.done)
        batches = self.source.batches(self.state.done)
        while self.unfinished():
            self.run_stage(batches, line, interrupts, checkpoints)
            figures = self.close_stage()
            if checkpoints is not None:
                self.save(checkpoints)
            line.validated(self.state.done, figures)
        self.load_model(self.best)

    def run_stage(
        self, batches: Iterator[Batch], line: Line, interrupts: Interrupts, checkpoints: Checkpoints | None
    ) -> None:
        """The steps up to the next validation, from where the state stands."""
        self.model.train()
        state, end = self.state, self.source.ends[self.state.epoch]
        begun = time.perf_counter()
        while state.done < end:
            batch = next(batches)
            mine = self.step(batch)
            wanted = checkpoints is not None and checkpoints.due()
            loss, due, asked = self.agreed(mine, wanted, interrupts.asked)
            state.step += 1
            state.done += 1
            state.loss += loss
            state.items += self.task.count(batch)
            state.tokens += batch.numbers
            now = time.perf_counter()
            state.seconds += now - begun
            begun = now
            if not math.isfinite(loss):
                what = f"the loss or its gradient is {loss} in {self.place()}: begin anew with a smaller --lr."
                raise Diverged(f"{what} {checkpoints.kept() if checkpoints else ''}".rstrip())
            line.stepped(state.done, state.loss / state.items, state.tokens / state.seconds)
            if checkpoints is not None and (due or asked):
                self.save(checkpoints)
            if asked:
                kept = checkpoints.kept() if checkpoints else "Nothing was written."
                raise Stopped(f"stopped after {self.place()}. {kept}")

    def place(self) -> str:
        """Where the run is, for people."""
        return f"step {self.state.step} of {'epoch' if self.task.stage == 'epoch' else 'stage'} {self.state.epoch + 1}"

    def agreed(self, loss: float, due: bool, asked: bool) -> tuple[float, bool, bool]:
        """The loss over all processes, and what any of them wants: they have to save together."""
        if self.processes == 1:
            return loss, due, asked
        mine = torch.tensor([loss, float(due), float(asked)], dtype=torch.float64, device=self.accelerator.device)
        total, dues, askings = self.accelerator.reduce(mine, "sum").tolist()
        return total, dues > 0, askings > 0

    def step(self, batch: Batch) -> float:
        """One step of the optimiser; the loss summed over this process's rows, nan where a gradient is no number.

        Processes and accumulation only divide the batch: the gradient is that of the sum over all its rows, divided
        by what the task divides it by.
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
        """Of a batch, piece by piece; as many pieces in every process, whoever has a row less."""
        mine = batch.part(self.accelerator.process_index, self.processes)
        parts = min(self.how.accumulate, -(-batch.rows // self.processes))
        # Gradients are averaged over processes: times their number they are summed.
        factor = self.processes / self.task.divisor(self.settings, batch)
        total = 0.0
        for number in range(parts):
            piece = mine.part(number, parts).to(self.accelerator.device)
            with self.gathering(last=number == parts - 1):
                loss, self.carried[number] = self.task.loss(self.model, piece, self.carried.get(number))
                self.accelerator.backward(loss * (piece.weight * factor))
            total += piece.weight * float(loss.detach())
        return total

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        self.model.eval()
        return self.task.evaluate(Evaluation(self.model, self.settings, self.accelerator), self.data, split)

    def unfinished(self) -> bool:
        state, patience = self.state, self.settings.patience
        waited = state.epoch - 1 - state.selected
        goes_on = not state.history or patience is None or waited < patience
        return state.epoch < len(self.source.ends) and goes_on

    def close_stage(self) -> dict[str, Any]:
        """Validate, and keep the best; the figures of the stage."""
        state = self.state
        values = self.evaluate("validation")
        figures = {
            "epoch": state.epoch + 1,
            "step": state.done,
            "train_loss": state.loss / state.items,
            **{f"val_{name}": value for name, value in values.items()},
            "gradient_norm": state.norm / state.step,
            "train_seconds": round(state.seconds, 1),
        }
        state.history.append(figures)
        value = values[self.metric.name]
        if not self.task.selects or self.metric.better(value, state.best):
            state.best, state.selected = value, state.epoch
            self.best = self.model_state()
        state.epoch += 1
        state.step, state.loss, state.items, state.norm = 0, 0.0, 0.0, 0.0
        return figures

    def model_state(self) -> dict[str, Tensor]:
        of_all = self.sharding.whole(self.model)[0] if self.how.fsdp else self.accelerator.get_state_dict(self.model)
        return {name: tensor.detach().cpu().clone() for name, tensor in of_all.items()}

    def load_model(self, tensors: dict[str, Tensor]) -> None:
        if self.how.fsdp:
            self.sharding.load_whole(self.model, tensors)
        else:
            self.accelerator.unwrap_model(self.model).load_state_dict(tensors)

    def save(self, checkpoints: Checkpoints) -> None:
        """Everything the rest of the run depends on. All processes take part; the first one writes."""
        device = self.accelerator.device
        of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        mine = [(torch.get_rng_state(), of_device, self.carried)]
        of_all = gather_object(mine) if self.processes > 1 else mine
        self.state.total = time.perf_counter() - self.begun
        content = {
            "data": self.data.sizes(),
            "model": self.model_state(),
            "optimizer": self.sharding.whole(self.model, self.optimizer)[1]
            if self.how.fsdp
            else self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "processes": of_all,
            "source": self.source.state_dict() if hasattr(self.source, "state_dict") else None,
            "state": asdict(self.state),
            "best": self.best,
        }
        if self.accelerator.is_main_process:
            checkpoints.save(content)

    def restore(self, checkpoints: Checkpoints) -> None:
        content = checkpoints.load()
        before, now = content["data"], self.data.sizes()
        if before != now:
            parts = [part for part in {**before, **now} if before.get(part) != now.get(part)]
            told = "; ".join(f"{part} {before.get(part)}, now {now.get(part)}" for part in parts)
            raise ExperimentError(
                f"{checkpoints.path} was made with other data: {told}. "
                "Give the same --data, or begin anew with --restart."
            )
        if self.how.fsdp:
            self.sharding.load_whole(self.model, content["model"], self.optimizer, state=content["optimizer"])
        else:
            self.load_model(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        self.scheduler.load_state_dict(content["scheduler"])
        of_processor, of_device, self.carried = content["processes"][self.accelerator.process_index]
        torch.set_rng_state(of_processor)
        if of_device is not None:
            torch.cuda.set_rng_state(of_device, self.accelerator.device)
        if hasattr(self.source, "load_state_dict"):
            self.source.load_state_dict(content["source"])
        self.state, self.best = State(**content["state"]), content["best"]
        self.begun = time.perf_counter() - self.state.total


def train(task: Task, settings: Settings, how: How) -> dict[str, Any]:
    """A whole run: its result, complete but for what is asked after it."""
    task.check_tables(settings)
    data = task.load(settings, how.data)
    checkpoints = Checkpoints.of(task.name, settings, how)
    try:
        run = Training(task, settings, how, data)
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise ExperimentError(f"{settings.dataset} {settings.row} needs more memory than there is: {reason}") from None
    if how.resume:
        run.restore(checkpoints)
    run.state.commits.append(run.about["commit"])
    main = run.accelerator.is_main_process
    logs = checkpoints.folder / "tensorboard" if how.tensorboard else None
    name = f"{settings.dataset} {settings.row} seed {settings.seed}"
    with Display(task, [name], run.steps, main=main, logs=logs) as display, Interrupts() as interrupts:
        run.train(display.lines[0], interrupts, checkpoints)
        searching = how.kind == "search"  # which looks at validation alone
        tests = {} if searching else {split: run.evaluate(split) for split in task.tests}
        with torch.no_grad():
            more = {} if searching else task.after(run)
    if how.keep_model and main:
        checkpoints.save({"best": run.best}, MODEL)
    return {**result(run, tests), **more}


def result(run: Training, tests: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The line of results."""
    settings, state, task = run.settings, run.state, run.task
    layers = [stored(layer) for layer in tables(run.plain)]
    structure = layers[0].structure
    rank = getattr(structure, "rank", settings.rank)  # which a ratio may have settled
    full = [layer.structure.rows * layer.structure.cols for layer in layers]
    kept = sum(numbers / layer.compression_ratio for numbers, layer in zip(full, layers, strict=True))
    untold = dict.fromkeys(metric.name for metric in task.metrics)  # a search does not look at test sets
    figures = {f"{split}_{name}": v for split in task.tests for name, v in {**untold, **tests.get(split, {})}.items()}
    return {
        **settings.as_line(task.name),
        "shape": [
            list(getattr(structure, "row_factors", (structure.rows,))),
            list(getattr(structure, "col_factors", (structure.cols,))),
        ],
        "ranks": list(getattr(structure, "ranks", ())) or ([rank] if rank else []),
        "table_parameters": sum(layer.structure.numel for layer in layers),
        "total_parameters": sum(tensor.numel() for tensor in run.plain.parameters()),
        "ratio": task.ratio(run.plain),  # as the task counts; the next one counts padding rows and biases too
        "stored_ratio": sum(full) / kept,
        **{name: value for name, value in state.history[state.selected].items() if name.startswith("val_")},
        **figures,
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


def run(task: Task, config: str | None, options: Mapping[str, Any], how: How) -> str:
    """Train, and add the result to the file of its kind; what came of it, in a sentence."""
    bench = Bench.of(task, how)
    settings = bench.settle(config, options, tiny=how.smoke, search=how.kind == "search")
    checkpoints = Checkpoints.of(task.name, settings, how)
    writable_folder(checkpoints.folder, "--out")
    writable_folder(bench.results, "--results")
    with alone(checkpoints.folder) if first_process() else nullcontext():
        if how.resume:
            # What a search finds is as it was when the run began: one may have ended since.
            names = {name for search in bench.plan.searches.values() for name in search.names}
            begun = checkpoints.read()["settings"]
            kept = {name: begun[name] for name in names if name in begun and options.get(name) is None}
            settings = replace(settings, **kept)
        elif how.resume_if_possible:
            how = replace(how, resume=checkpoints.usable())
        elif checkpoints.path.exists() and not how.restart:
            raise ExperimentError(
                f"{checkpoints.path} is of a run that was stopped: --resume goes on with it, --restart begins anew."
            )
        try:
            record = train(task, settings, how)
        except Diverged as error:
            if not how.kind:
                raise
            # A point of a grid or a cell of a league: tried, and the worst there is.
            worst = {f"val_{metric.name}": metric.worst for metric in (LOSS, bench.metric)}
            record = {**settings.as_line(task.name), **worst, "diverged": str(error), **about()}
        if first_process():
            append(bench.file(how.kind), record)
            checkpoints.path.unlink(missing_ok=True)  # nobody needs it any more
    part()
    return f"{told(task, record)}; a line was added to {bench.file(how.kind)}"


def told(task: Task, record: Mapping[str, Any]) -> str:
    """A result in words."""
    figures = [(f"{split} {each.name}", f"{split}_{each.name}", each) for split in task.tests for each in task.metrics]
    figures.append(("validation", f"val_{task.metrics[0].name}", task.metrics[0]))
    said = [f"{name} {record[key]:.{each.digits + 1}f}" for name, key, each in figures if record.get(key) is not None]
    said += [f"ratio {record['ratio']:,.0f}"] if "ratio" in record else []
    return f"{record['dataset']} {record['row']} seed {record['seed']}: {', '.join(said)}"
