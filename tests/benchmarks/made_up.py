"""Tiny workloads, and results with given times."""

from benchmarks.limit import Limit, Machine, Work
from benchmarks.results import Result
from benchmarks.timing import Timed, Times
from benchmarks.workloads import Table, Workload

TINY = Table(50, (3, 4, 5), (2, 2, 3), 4)
ROWS = Workload("rows", (TINY,), 64)
BAGS = Workload("bags", (TINY,), 8, bag=3)
SEVERAL = Workload("several", (TINY, Table.suggested(3, 16, 4), Table.suggested(200, 16, 4)), 16)
SLOW_MACHINE = Machine(flops=1e9, bandwidth=1e9)


def timed(forward, both, step, tracked=None):
    columns = (forward, forward if tracked is None else tracked, both, step)
    return Timed(*[Times((float(column),)) for column in columns])


def result(workload, times, memory=None, limit=(1.0, 1.0)):
    """With a limit of so many milliseconds forward and in all."""
    return Result(workload, Limit(Work(0, 0), Work(0, 0), *limit), times, {}, memory or {})
