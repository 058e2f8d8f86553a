"""What the kernels need on each target and what to expect of them, as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import tensorbed as tb
from benchmarks.gpu_compile import expected
from benchmarks.gpu_compile.calls import DTYPES, RANKS
from benchmarks.gpu_compile.compiling import TARGETS, VERSION, Needs
from benchmarks.gpu_compile.expected import DEVICES, Call, Launch
from benchmarks.heads import HeadWorkload
from benchmarks.quantized import SIZES
from tensorbed.structures import Format
from tensorbed.structures.formats import Budget

Found = Mapping[tuple[str, str, int], Mapping[str, Sequence[Needs]]]

_HEAD = """# The kernels for GPUs, without one

**No kernel of this page was run on a GPU.** The first part is what compilers say of them; the second is a model on
paper of the time that they would take, an expectation and no measurement. [GPUs](../gpus.md) says what was run, and how
to send what a GPU measures. Made by

```
python -m benchmarks.gpu_compile
```

## What the compilers say

Triton {version} compiled every kernel of the backend, as the backend's own calls launch it, for
{targets}:
{launches} launches, those that are the same for several dtypes and ranks counted for each. **Spilled: {spilled} bytes.
Programs with more shared memory than their target has: {large}.** Other numbers than 0 make the command fail.

A cell has the registers of a thread for ranks {ranks}, of several launches of a kernel the most, and after the
point the most KiB of shared memory that one program has. Targets have
{limits}. Of NVIDIA's targets the numbers are those that `ptxas -v` says as Triton calls it, of AMD's those that the
assembly declares. Kernels with no product in them are the same for `float32 as tf32` and `float32`.

"""

_MODEL = """
## What to expect, on paper

Bytes and multiply-adds of each launch, counted for the batches of `make bench`, against the peaks that NVIDIA publishes
(without sparsity): A100 SXM 80 GB with 2.039 TB/s, 19.5 TFLOPS in float32, 156 in tf32, 312 in bfloat16; H100 SXM with
3.35 TB/s, 67, 494.5 and 989. *Floor* is the sum over launches of what is larger, bytes at the peak bandwidth or
multiply-adds at the peak of the dtype: these kernels cannot be faster. *Expected* assumes half of the bandwidth, a
quarter of the arithmetic and 5 microseconds for each launch, a plan's {plan} operators of PyTorch counted. These three
numbers are assumptions; where the launches are most of the time, a graph of CUDA saves most of it. Rows whose left
products would hold a fourth of the table are computed in pieces, each with a plan and launches of its own. Both are
milliseconds of forward and backward together, without the optimiser. Lookups of bfloat16 multiply it by tensor cores up
to the second core, and single precision from there on.

"""

_PUBLISHED = {
    "[FBTT-Embedding](https://github.com/facebookresearch/FBTT-Embedding), of TT-Rec": (
        "its README shows 0.416 microseconds for each index, forward and backward with a fused step of SGD, for a "
        "table of 11,000,000 x 64, factors (200, 220, 250) x (4, 4, 4), rank 32 and 512 bags with 10,240 indices, that "
        "is 4.26 ms; it does not name the GPU. This is the workload `TT-Rec` above, for which {tt_rec} without the step"
    ),
    "[TT-Rec](https://arxiv.org/abs/2101.11714), MLSys 2021": (
        "its kernels are 3 times faster than the tensor trains that it compares itself with"
    ),
    "[EL-Rec](https://sc22.supercomputing.org/presentation/?id=pap312&sess=sess169), SC 2022": (
        "3 times faster than other frameworks for recommenders: whole training with a pipeline, not lookups alone"
    ),
}


def written(found: Found) -> str:
    """The page."""
    every = [needs for by_kernel in found.values() for launches in by_kernel.values() for needs in launches]
    limits = ", ".join(f"{target.shared // 1024} ({name})" for name, target in TARGETS.items())
    head = _HEAD.format(
        version=VERSION,
        targets=", ".join(f"{name} ({target.devices})" for name, target in TARGETS.items()),
        launches=len(every),
        spilled=sum(needs.spilled for needs in every),
        large=sum(
            needs.shared > TARGETS[target].shared
            for (target, _, _), by_kernel in found.items()
            for launches in by_kernel.values()
            for needs in launches
        ),
        ranks=", ".join(map(str, RANKS)),
        limits=f"{limits} KiB",
    )
    return head + "\n".join(_matrix(found)) + "\n" + model()


def _matrix(found: Found) -> Iterator[str]:
    yield f"| kernel | dtype | {' | '.join(TARGETS)} |"
    yield f"|---|---|{'---|' * len(TARGETS)}"
    for kernel in sorted({kernel for by_kernel in found.values() for kernel in by_kernel}):
        for dtype in DTYPES:
            cells = [_cell([found[target, dtype, rank][kernel] for rank in RANKS]) for target in TARGETS]
            yield f"| `{kernel}` | {dtype} | {' | '.join(cells)} |"


def _cell(by_rank: Sequence[Sequence[Needs]]) -> str:
    registers = [str(max(needs.registers for needs in launches)) for launches in by_rank]
    shared = max(needs.shared for launches in by_rank for needs in launches)
    same = registers[0] if len(set(registers)) == 1 else " ".join(registers)
    return f"{same} · {shared / 1024:.3g}"


def model() -> str:
    """The part on paper."""
    single, half = _calls(4), _calls(2)
    lines = [_MODEL.format(plan=expected._PLAN_LAUNCHES) + "\n".join(_totals(single, half))]
    tt_rec = next(call for call in single if call.name == "TT-Rec")
    spans = [f"{_milliseconds(tt_rec, device, 'float32', floor=False)} ms on an {device.name}" for device in DEVICES]
    said = f"in float32 {' and '.join(spans)} are expected"
    lines += ["\n### Beside others\n\nPublished speeds, on other GPUs; none was measured here.\n"]
    lines += ["| who | what they publish |", "|---|---|"]
    lines += [f"| {who} | {text.format(tt_rec=said)} |" for who, text in _PUBLISHED.items()]
    return "\n".join([*lines, "", *_launches(single)]) + "\n"


def _calls(itemsize: int) -> list[Call]:
    heads, rank = HeadWorkload(), {"TT rank 16": 16, "TT rank 96": 96}
    shape = (heads.row_factors, heads.col_factors)
    formats: dict[str, Format] = {name: tb.TensorTrain(rank=r, shape=shape) for name, r in rank.items()}
    formats |= {"low rank 96": tb.LowRank(rank=96), "dense": tb.Dense()}
    made = expected.lookups(itemsize)
    for name, format in formats.items():
        made.append(expected.head(f"head {name}", format.bind(Budget(heads.classes, heads.dim)), heads, itemsize))
    for name, (rows, cols) in SIZES.items():
        made.append(expected.codes_lookup(f"{name} int8", rows, cols, cols + itemsize, itemsize))
        made.append(expected.codes_lookup(f"{name} product", rows, cols, cols // 2 * (1 + 2 * itemsize), itemsize))
    return made


def _totals(single: Sequence[Call], half: Sequence[Call]) -> Iterator[str]:
    kinds = [("float32", single), ("float32 as tf32", single), ("bfloat16", half)]
    titles = [f"{device.name.split()[0]} {dtype}" for device in DEVICES for dtype, _ in kinds]
    yield f"| call | launches | multiply-adds | MB, float32 | {' | '.join(titles)} |"
    yield f"|---|---|---|---|{'---|' * len(titles)}"
    for at, call in enumerate(single):
        every = [*call.forward, *call.backward]
        cells = []
        for device in DEVICES:
            for dtype, calls in kinds:
                floor, likely = (_milliseconds(calls[at], device, dtype, floor=floor) for floor in (True, False))
                cells.append(f"{floor} / {likely}")
        adds, size = sum(launch.multiply_adds for launch in every), sum(launch.bytes for launch in every)
        count = sum(launch.count for launch in every)
        yield f"| {call.name} | {count} | {adds:,.0f} | {size / 1e6:,.1f} | {' | '.join(cells)} |"
    yield "\nCells are *floor* / *expected*."


def _milliseconds(call: Call, device: expected.Device, dtype: str, *, floor: bool) -> str:
    every: list[Launch] = [*call.forward, *call.backward]
    seconds = sum(launch.floor(device, dtype) if floor else launch.expected(device, dtype) for launch in every)
    return f"{1000 * seconds:.2g}" if seconds < 0.1 else f"{1000 * seconds:,.0f}"


def _launches(calls: Sequence[Call]) -> Iterator[str]:
    yield "### Each launch, in float32\n"
    yield "| call | launch | times | multiply-adds | MB | A100 floor, microseconds | bound by |"
    yield "|---|---|---|---|---|---|---|"
    device = expected.A100
    for call in calls:
        for way, launches in (("forward", call.forward), ("backward", call.backward)):
            for launch in launches:
                floor = 1e6 * launch.floor(device, "float32")
                by_bytes = launch.bytes / device.bandwidth >= 2 * launch.multiply_adds / device.operations["float32"]
                yield (
                    f"| {call.name}, {way} | {launch.name} | {launch.count} | {launch.multiply_adds:,.0f} | "
                    f"{launch.bytes / 1e6:,.2f} | {floor:,.1f} | {'memory' if by_bytes else 'arithmetic'} |"
                )
