"""Two processes that train both ends of a model, by DDP or FSDP2, do what one does with their joined batch."""

import contextlib
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import tensorbed as tb
from tensorbed.testing import assert_near

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("this build of torch has no gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS, TOKENS, ROWS, COLS, PADDING, BEST = 2, 3, 12, 300, 16, 7, 5
FORMATS = {
    "train": tb.TensorTrain(rank=3, shape=((5, 6, 10), (2, 2, 4))),
    "ring": tb.TensorRing(rank=2, shape=((5, 6, 10), (2, 2, 4))),
    "low rank": tb.LowRank(rank=4),
    "dense": tb.Dense(),
}
UNITS = 256  # the order of sums differs, and every step builds on it
# A call that hangs in a process is an error and not the end of the test run.
PATIENCE = 60


@dataclass(frozen=True)
class Case:
    """One training run; the same in every process but for the part of the batch."""

    wrapper: str
    format: str
    tied: bool = True
    reduction: str = "mean"
    optimiser: str = "SGD"
    accumulate: bool = False
    padding: bool = True
    on_meta: bool = False

    def __str__(self):
        said = [self.wrapper, self.format, "tied" if self.tied else "untied", self.reduction, self.optimiser]
        marks = {"accumulated": self.accumulate, "no padding": not self.padding, "from meta": self.on_meta}
        return ", ".join([*said, *(mark for mark, holds in marks.items() if holds)])


CASES = [
    Case("ddp", "train", optimiser="Adam"),
    Case("ddp", "train", tied=False),
    Case("ddp", "train", reduction="none", accumulate=True),
    Case("ddp", "ring"),
    Case("ddp", "low rank", reduction="none", optimiser="Adam"),
    # Without a constant row the dense table's loss is PyTorch's own.
    Case("ddp", "dense", padding=False),
    Case("fsdp2", "train", optimiser="Adam"),
    Case("fsdp2", "train", reduction="none"),
    Case("fsdp2", "train", tied=False),
    Case("fsdp2", "train", tied=False, reduction="none", optimiser="Adam"),
    Case("fsdp2", "train", accumulate=True),
    Case("fsdp2", "train", on_meta=True),
    Case("fsdp2", "ring", reduction="none"),
    Case("fsdp2", "low rank"),
    Case("fsdp2", "low rank", tied=False, reduction="none"),
    Case("fsdp2", "dense"),
    Case("fsdp2", "dense", padding=False),
]


@dataclass
class Run:
    """What a training run left behind; ``error`` is a traceback where it did not end."""

    losses: list = field(default_factory=list)
    tensors: dict = field(default_factory=dict)  # name -> parameter, under every name it has
    through: list = field(default_factory=list)  # the largest scores and their classes by the whole model
    alone: list = field(default_factory=list)  # and by the head called by itself
    local: dict = field(default_factory=dict)  # name -> numbers this process keeps
    aliases: int = 0
    error: str = ""


class Model(nn.Module):
    """Ids to a loss, so that whatever wraps the model sees its whole pass."""

    def __init__(self, case):
        super().__init__()
        padding = {"padding_idx": PADDING} if case.padding else {}
        ends = tb.embedding_and_head(
            ROWS, COLS, FORMATS[case.format], tied=case.tied, bias=True, std=0.5, dtype=torch.float64, **padding
        )
        self.embedding, self.head = ends
        self.between = nn.Linear(COLS, COLS, dtype=torch.float64)
        if case.padding:
            with torch.no_grad():
                self.embedding.padding_row.fill_(0.3)

    def forward(self, index, target=None, reduction="mean"):
        hidden = torch.tanh(self.between(self.embedding(index)))
        if target is None:
            return self.head.topk(hidden, BEST)
        return self.head.loss(hidden, target, reduction=reduction).mean()


def made(case):
    torch.manual_seed(0)
    return Model(case)


def batches():
    """For every step ids and targets, ``(RANKS, TOKENS)`` each; the padding row is among both."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(0, ROWS, (STEPS, 2, RANKS, TOKENS), generator=generator)
    drawn[:, :, :, 3] = PADDING
    return drawn


def hidden_vectors():
    return torch.randn(4, COLS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def optimiser_of(case, model):
    if case.optimiser == "Adam":
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def train(case, model, optimiser, ranks, held_back=contextlib.nullcontext):
    """A step for each batch, or one by the mean of all where gradients accumulate; the losses."""
    losses, steps = [], batches()
    for step, (index, target) in enumerate(steps):
        last = step == len(steps) - 1
        waits = case.accumulate and not last
        with held_back() if waits else contextlib.nullcontext():
            loss = model(index[ranks], target[ranks], case.reduction)
            (loss / (STEPS if case.accumulate else 1)).backward()
        losses.append(loss.item())
        if not waits:
            optimiser.step()
            optimiser.zero_grad()
    return losses


def whole(tensor):
    """All of a tensor of which this process may keep a part."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def lived(case, model, core, ranks, held_back=contextlib.nullcontext):
    """Trained, asked, and trained on: a head called by itself leaves nothing behind that the next step stumbles on."""
    run, optimiser = Run(), optimiser_of(case, model)
    for _ in range(2):
        run.losses += train(case, model, optimiser, ranks, held_back)
        with torch.no_grad():
            run.through += model(batches()[0, 0])
            run.alone += core.head.topk(hidden_vectors(), BEST)
    for unit in core.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # those called last are gathered still
    run.tensors = {name: whole(p) for name, p in core.named_parameters(remove_duplicate=False)}
    run.aliases = len(run.tensors) - len(list(core.parameters()))
    return run


def by_one(case):
    """The oracle: one process, no wrapper, the joined batch."""
    model = made(case)
    return lived(case, model, model, slice(None))


def by_ddp(case, rank):
    core = made(case)
    model = DistributedDataParallel(core)
    return lived(case, model, core, slice(rank, rank + 1), model.no_sync)


def by_fsdp2(case, rank):
    mesh, model = init_device_mesh("cpu", (RANKS,)), made(case)
    state = model.state_dict()
    if case.on_meta:
        model = model.to("meta")
    # Both ends are one unit: a tied pair has one set of parameters, which is gathered for either.
    fully_shard([model.embedding, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    if case.on_meta:
        model.to_empty(device="cpu")
        fill(model, state)

    @contextlib.contextmanager
    def held_back():
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    run = lived(case, model, model, slice(rank, rank + 1), held_back)
    run.local = {name: p.to_local().numel() for name, p in model.named_parameters(remove_duplicate=False)}
    return run


def fill(model, state):
    """Load what every process holds whole into a model that holds parts."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def work(rank, folder):
    """One process: every case in a group of its own, so that one which fails leaves the next ones alone."""
    torch.set_num_threads(1)
    for number, case in enumerate(CASES):
        store = f"file://{folder}/store{number}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE / 2)
        )
        try:
            run = {"ddp": by_ddp, "fsdp2": by_fsdp2}[case.wrapper](case, rank)
        except Exception:
            run = Run(error=traceback.format_exc())
        finally:
            dist.destroy_process_group()
        torch.save(run, folder / f"{number}.{rank}.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each process found, by case. They are started once: starting takes longer than all cases together."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.start_processes(work, (folder,), nprocs=RANKS, join=False, start_method="spawn")
    end = time.monotonic() + 2 * PATIENCE
    try:
        while not context.join(timeout=max(0.0, end - time.monotonic()), grace_period=5):
            if time.monotonic() >= end:
                pytest.fail(f"the processes did not end within {2 * PATIENCE} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
            process.join()
    return {
        case: [torch.load(folder / f"{number}.{rank}.pt", weights_only=False) for rank in range(RANKS)]
        for number, case in enumerate(CASES)
    }


@pytest.fixture
def found(runs, case):
    """Of one case, or the traceback of the process that failed in it."""
    for rank, run in enumerate(runs[case]):
        if run.error:
            pytest.fail(f"process {rank} failed:\n{run.error}", pytrace=False)
    return runs[case]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_processes_train_as_one_does(case, found):
    expected, started = by_one(case), dict(made(case).named_parameters(remove_duplicate=False))
    shared = len(made(case).head.structure.tensors())
    assert len(expected.losses) == 2 * STEPS
    for step, loss in enumerate(expected.losses):
        assert sum(run.losses[step] for run in found) / RANKS == pytest.approx(loss, rel=1e-12)
    for run in found:
        assert run.tensors.keys() == expected.tensors.keys()
        assert run.aliases == expected.aliases == (shared if case.tied else 0)
        for name, tensor in expected.tensors.items():
            assert not torch.equal(tensor, started[name]), f"{name} was not trained"
            assert_near(run.tensors[name], tensor, units=UNITS)
    first, *others = found
    for other in others:
        for name, tensor in first.tensors.items():
            assert torch.equal(other.tensors[name], tensor), f"{name} differs between the processes"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_largest_scores_are_found_by_every_process(case, found):
    """Within the whole model, and by the head alone, whose call gathers what FSDP2 has put away."""
    expected = by_one(case)
    for run in found:
        for answers, wanted in ((run.through, expected.through), (run.alone, expected.alone)):
            assert len(answers) == 4  # values and classes, twice
            for answer, one in zip(answers, wanted, strict=True):
                if one.dtype == torch.int64:
                    assert torch.equal(answer, one)
                else:
                    assert_near(answer, one, units=UNITS)


@pytest.mark.parametrize("case", [case for case in CASES if case.wrapper == "fsdp2"], ids=str)
def test_processes_keep_a_part_of_every_tensor(case, found):
    """Otherwise the cases above would say nothing of sharding."""
    for name, tensor in found[0].tensors.items():
        kept = [run.local[name] for run in found]
        assert sum(kept) == tensor.numel()
        assert max(kept) < tensor.numel()


def test_one_step_without_a_group_is_not_what_two_processes_do():
    """The oracle sees both parts of the batch: either part alone would train other tensors."""
    case = CASES[0]
    joined, half = made(case), made(case)
    train(case, joined, optimiser_of(case, joined), slice(None))
    train(case, half, optimiser_of(case, half), slice(0, 1))
    assert not torch.allclose(joined.head.weight, half.head.weight, rtol=1e-3)
