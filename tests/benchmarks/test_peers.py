from dataclasses import replace

import pytest
import torch
from made_up import BAGS, ROWS, SEVERAL

import tensorbed as tb
from benchmarks import peers
from benchmarks.memory import Extra, extra_memory
from benchmarks.peers import DENSE, NATIVE, PEERS, TENSORLY, TORCHTT, WHOLE, CannotRunError, build, definition, draw
from benchmarks.workloads import Table, Workload

# tensorly hands torch tensors to numpy functions in a way numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
LIBRARIES = {TENSORLY: "tltorch", TORCHTT: "torchtt"}
BY_NAME = {peer.name: peer for peer in PEERS}
HUGE = Workload("huge", (Table(11_000_000, (200, 220, 250), (4, 4, 4), 2),), 4)


def dense_table(cores, table):
    """The definition: digits of rows and columns side by side, first slowest, summed over the ranks."""
    a, b, c = cores
    return torch.einsum("aipr,rjqs,skuz->ijkpqu", a, b, c).reshape(-1, table.cols)[: table.rows]


def layer_of(peer, workload, cores):
    if peer.name in LIBRARIES:
        pytest.importorskip(LIBRARIES[peer.name])
    try:
        return build(peer, workload, cores)
    except CannotRunError as reason:
        if "no compiled kernels" not in str(reason):
            raise
        pytest.skip(str(reason))


@pytest.mark.parametrize("workload", [ROWS, BAGS, SEVERAL], ids=lambda workload: workload.name)
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_implementation_gives_the_rows_of_the_dense_table(peer, workload):
    cores = draw(workload)
    layer = layer_of(peer, workload, cores)
    found = layer(workload.ids)
    parts = []
    for k, table in enumerate(workload.tables):
        rows = dense_table(cores[k], table)[workload.table_ids(k)]
        parts.append(rows.reshape(workload.batch, -1, table.cols).sum(1))
    torch.testing.assert_close(found, torch.cat(parts, dim=1))
    found.backward(workload.gradient)
    assert all(parameter.grad is not None for parameter in layer.parameters())
    peer.optimiser(layer).step()
    assert not torch.equal(layer(workload.ids), found)


def test_the_definition_is_that_of_a_tensor_train():
    (cores,) = draw(ROWS)
    expected = dense_table([core.double() for core in cores], ROWS.tables[0])
    torch.testing.assert_close(definition(cores, torch.arange(50)), expected)


@pytest.mark.parametrize(("cols", "reason"), [(12, "other rows"), (5, r"gives \(64, 5\)")])
def test_an_implementation_that_gives_something_else_is_not_timed(cols, reason):
    wrong = replace(PEERS[0], rows=lambda table, cores, ids: torch.nn.Embedding(table.rows, cols))
    with pytest.raises(CannotRunError, match=reason):
        build(wrong, ROWS, draw(ROWS))


def test_a_missing_library_is_a_reason():
    def absent(table, cores, ids):
        import no_such_library  # noqa: F401

    with pytest.raises(CannotRunError, match=r"not installed \(no_such_library\)"):
        build(replace(PEERS[0], rows=absent), ROWS, draw(ROWS))


def test_what_does_not_fit_in_memory_is_a_reason(monkeypatch):
    monkeypatch.setattr(peers, "available_bytes", lambda: 10**9)
    with pytest.raises(CannotRunError, match="GB are free"):
        build(BY_NAME[DENSE], ROWS, draw(ROWS))


def test_kernels_that_are_not_installed_are_a_reason(monkeypatch):
    structure = tb.TTEmbedding(8, 8, 2, device="meta").structure
    monkeypatch.setattr(type(structure), "impls", ("auto", "reference"))
    with pytest.raises(CannotRunError, match="no compiled kernels in this installation"):
        build(BY_NAME[NATIVE], ROWS, draw(ROWS))


def test_what_would_take_too_long_is_a_reason():
    workload = Workload("long", (Table(25_000, (25, 30, 40), (4, 8, 8), 16),), 32_768)
    with pytest.raises(CannotRunError, match="has no lookup"):
        build(BY_NAME[TORCHTT], workload, [])
    with pytest.raises(CannotRunError, match=r"would build tables of 2\.8 GB"):
        build(BY_NAME[WHOLE], HUGE, [])


def test_memory_is_that_of_the_rows_and_the_gradient():
    workload = Workload("memory", (Table(40_000, (20, 40, 50), (4, 4, 4), 4),), 30_000)
    dense = extra_memory(workload, BY_NAME[DENSE], 1)
    assert isinstance(dense, Extra)
    least = 4 * (workload.unpooled_numbers + workload.dense_numbers)
    assert least - 10**6 < dense.bytes < 2 * least + 8 * 10**6


def test_memory_of_what_cannot_run_is_a_reason():
    reason = extra_memory(HUGE, BY_NAME[WHOLE], 1)
    assert isinstance(reason, str)
    assert "would build tables" in reason
