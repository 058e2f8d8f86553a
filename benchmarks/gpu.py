"""Lookups, bags, losses and gradients on a GPU: the kernels, plain PyTorch, a dense table, FBTT where it is installed.

``make gpu`` runs the suite of the kernels on the device, then this, and writes one file, ``out/gpu.json``: sizes,
times, memory, what the tests said, versions and the name of the GPU. ``--device cpu`` tries the walk without a GPU, on
the smallest workload, and times nothing that means anything.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import provenance
import tensorbed as tb
from benchmarks import quantized
from benchmarks.heads import HeadWorkload, Plain
from benchmarks.workloads import WORKLOADS, Workload
from tensorbed.info import info
from tensorbed.structures import Format

DTYPES = (torch.float32, torch.bfloat16)
_ROUNDS, _WARM_UP = 20, 3
_ROOM = 0.8  # of the device's memory that a dense table, its gradient and its moments may take


def layers(workload: Workload, dtype: torch.dtype, device: torch.device, impl: str) -> nn.Module:
    """Tensor trains of the workload's sizes."""
    kind: type[Any] = tb.Embedding if workload.bag is None and not workload.many else tb.EmbeddingBag
    said = {"mode": "sum"} if kind is tb.EmbeddingBag else {}
    tables = {
        f"C{at}": kind(
            table.rows, table.cols, tb.TensorTrain(rank=table.rank, shape=table.shape), impl=impl, dtype=dtype, **said
        )
        for at, table in enumerate(workload.tables)
    }
    made: nn.Module = tb.EmbeddingBagCollection(tables) if workload.many else tables["C0"]
    return made.to(device)


class DenseTables(nn.Module):
    """torch's own layers over dense tables."""

    def __init__(self, workload: Workload, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.many, said = workload.many, {"dtype": dtype, "device": device}
        self.tables = nn.ModuleList(
            nn.Embedding(table.rows, table.cols, **said)  # type: ignore[arg-type]
            if workload.bag is None
            else nn.EmbeddingBag(table.rows, table.cols, mode="sum", **said)  # type: ignore[arg-type]
            for table in workload.tables
        )

    def forward(self, ids: Tensor) -> Tensor:
        if not self.many:
            made: Tensor = self.tables[0](ids)
            return made
        return torch.cat([table(column) for table, column in zip(self.tables, ids.T, strict=True)], 1)


def dense(workload: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A dense table of the same size, where it fits the device together with its gradient."""
    bytes_needed = 2 * workload.dense_numbers * dtype.itemsize
    if device.type == "cuda" and bytes_needed > _ROOM * torch.cuda.get_device_properties(device).total_memory:
        raise MemoryError(f"{bytes_needed / 1e9:.0f} GB for a dense table and its gradient")
    return DenseTables(workload, dtype, device)


class FbttTable(nn.Module):
    """Facebook's tensor-train embedding bags, without their cache, over one table."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__()
        from tt_embeddings_ops import OptimType, TTEmbeddingBag

        (table,) = workload.tables
        self.bags = TTEmbeddingBag(
            num_embeddings=table.rows,
            embedding_dim=table.cols,
            tt_ranks=list(table.ranks[1:-1]),
            tt_p_shapes=list(table.row_factors),
            tt_q_shapes=list(table.col_factors),
            optimizer=OptimType.SGD,  # what it has besides is an optimiser's step inside backward
            sparse=False,
            use_cache=False,
        ).to(device)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1] if ids.dim() == 2 else 1
        offsets = torch.arange(0, ids.numel() + 1, length, device=ids.device)
        made: Tensor = self.bags(ids.reshape(-1), offsets)
        return made


def fbtt(workload: Workload, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The peer that computes the same on a GPU; it has float32 and one table at a time."""
    if workload.many or dtype != torch.float32 or workload.tables[0].order > 4:
        raise NotImplementedError("float32 and one table of at most 4 cores")
    return FbttTable(workload, device)


def timed(step: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Milliseconds, the median round."""
    for _ in range(_WARM_UP):
        step()
    found: list[float] = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step()
            end.record()
            end.synchronize()
            found.append(float(begin.elapsed_time(end)))
        else:
            started = time.perf_counter()
            step()
            found.append(1e3 * (time.perf_counter() - started))
    return median(found)


def measured(
    output: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor | None, device: torch.device, rounds: int
) -> dict[str, float]:
    """Times of a call without and with gradients of the leaves, and the most memory of a training step beside them.

    Where nothing trains there is the time without alone.
    """

    def forward() -> None:
        with torch.no_grad():
            output()

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        output().backward(grad)

    started = time.perf_counter()
    both() if leaves else forward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    record = {"first_call_s": time.perf_counter() - started, "forward_ms": timed(forward, device, rounds)}
    if not leaves:
        return record
    record["both_ms"] = timed(both, device, rounds)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        both()
        record["extra_bytes"] = torch.cuda.max_memory_allocated(device) - before
    return record


MAKERS: dict[str, Callable[[Workload, torch.dtype, torch.device], nn.Module]] = {
    "tensorbed triton": partial(layers, impl="triton"),
    "tensorbed torch": partial(layers, impl="torch"),
    "nn.Embedding": dense,
    "FBTT": fbtt,
}


def recorded(workload: str, name: str, dtype: torch.dtype, measure: Callable[[], dict[str, float]]) -> dict[str, Any]:
    """What was measured, or why it could not be."""
    record: dict[str, Any] = {"workload": workload, "name": name, "dtype": str(dtype)[6:]}
    try:
        return record | measure()
    except Exception as error:  # one that fails should not cost the others their times
        return record | {"error": f"{type(error).__name__}: {error}"[:500]}


def run(workload: Workload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """All implementations on one workload of lookups; one that cannot run says why."""

    def measure(make: Callable[..., nn.Module], dtype: torch.dtype) -> dict[str, float]:
        layer, ids, grad = make(workload, dtype, device), workload.ids.to(device), workload.gradient.to(device, dtype)

        def output() -> Tensor:
            made = layer(ids)
            out: Tensor = made[0] if isinstance(made, tuple) else made
            return out

        return measured(output, list(layer.parameters()), grad, device, rounds)

    return [
        recorded(workload.name, name, dtype, partial(measure, make, dtype))
        for dtype, (name, make) in product(DTYPES, MAKERS.items())
    ]


def run_losses(workload: HeadWorkload, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """The loss of a tensor-train head by the kernels, in tiles and as written, and of all logits of a dense one."""
    train = tb.TensorTrain(rank=16, shape=(workload.row_factors, workload.col_factors))
    makers: dict[str, Callable[[], Any]] = {
        "tensorbed triton": lambda: tb.Head(workload.dim, workload.classes, train, impl="triton"),
        "tensorbed auto": lambda: tb.Head(workload.dim, workload.classes, train),
        "tensorbed reference": lambda: tb.Head(workload.dim, workload.classes, train, impl="reference"),
        "cross_entropy": lambda: Plain(tb.Head(workload.dim, workload.classes, tb.Dense())),
    }

    def measure(make: Callable[[], Any], dtype: torch.dtype) -> dict[str, float]:
        head, target = make().to(device, dtype), workload.target.to(device)
        hidden = workload.hidden.to(device, dtype).requires_grad_()
        return measured(lambda: head.loss(hidden, target), [hidden, *head.parameters()], None, device, rounds)

    return [
        recorded("heads", name, dtype, partial(measure, make, dtype))
        for dtype, (name, make) in product(DTYPES, makers.items())
    ]


def run_codes(rows: int, cols: int, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Rows of drawn codes by the kernels and in plain PyTorch."""
    index = torch.randint(rows, (quantized.LOOKUPS,), generator=torch.Generator().manual_seed(0)).to(device)

    def measure(format: Format, impl: str) -> dict[str, float]:
        embedding = quantized.drawn(rows, cols, format)[0].to(device)
        embedding.impl = impl
        return measured(lambda: embedding(index), [], None, device, rounds)

    return [
        recorded(f"codes, {name}", f"tensorbed {impl}", torch.float32, partial(measure, make(cols), impl))
        for (name, make), impl in product(quantized.FORMATS.items(), ("triton", "reference"))
    ]


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu.json"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tests", type=Path, help="the report of pytest in JUnit's XML, to be summed up in the file")
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="these alone")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU: look at its driver, and at whether this torch is built for CUDA or ROCm.")
    names = options.workload or (list(WORKLOADS) if device.type == "cuda" else ["one row"])
    rounds = _ROUNDS if device.type == "cuda" else 1
    on_gpu = device.type == "cuda"
    heads = HeadWorkload() if on_gpu else HeadWorkload(1000, (10, 10, 10), (2, 2, 4), tokens=8)
    rows, cols = quantized.SIZES["MiniLM"] if on_gpu else (300, 64)
    records = [record for name in names for record in run(WORKLOADS[name], device, rounds)]
    if not options.workload:
        records += [*run_losses(heads, device, rounds), *run_codes(rows, cols, device, rounds)]
    found = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.processor(),
        "capability": torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "tf32": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "commit": provenance.commit(),
        "versions": provenance.versions(("torch", "triton", "tensorbed")),
        "kernels": info().as_dict()["gpu_kernels"],
        "tests": summed_up(options.tests),
        "workloads": [WORKLOADS[name].record() for name in names],
        "heads": heads.record(),
        "codes": {"rows": rows, "cols": cols, "lookups": quantized.LOOKUPS},
        "records": records,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {options.out}: please send it")


def summed_up(report: Path | None) -> dict[str, Any] | None:
    """How many tests ran, and what failed."""
    if report is None or not report.is_file():
        return None
    from xml.etree import ElementTree

    suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    failed = [
        {"test": case.get("name"), "said": (problem.get("message") or "")[:500]}
        for case in suite.iter("testcase")
        for problem in (*case.findall("failure"), *case.findall("error"))
    ]
    return {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} | {"failed": failed}


if __name__ == "__main__":
    main()
