import io
import json
from dataclasses import replace

import pytest
import torch

rich_console = pytest.importorskip("rich.console")

from benchmarks import lookup  # noqa: E402
from benchmarks.peers import PEERS, CannotRunError, build, make_table  # noqa: E402
from benchmarks.timing import Times  # noqa: E402
from benchmarks.workloads import AUTO, DENSE, GATHER, TENSORLY, WORKLOADS, Workload  # noqa: E402

# tensorly hands torch tensors to numpy functions in a way numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TINY = Workload("tiny", 50, (3, 4, 5), (2, 2, 3), 4, 64, floors={GATHER: 1e-9, TENSORLY: 1e9})


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def dense_table(cores):
    """The definition: digits of rows and columns side by side, first slowest, summed over the ranks."""
    a, b, c = (core.detach() for core in cores)
    table = torch.einsum("aipr,rjqs,skuz->aijkpquz", a, b, c)
    return table.reshape(60, 12)[:50]


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_implementation_gives_the_rows_of_the_dense_table(peer):
    if peer.name == TENSORLY:
        pytest.importorskip("tltorch")
    table = make_table(TINY)
    ids = TINY.ids()
    layer = build(peer, TINY, table)
    rows = layer(ids)
    torch.testing.assert_close(rows, dense_table(table.cores)[ids])
    rows.backward(TINY.gradient())
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_results_are_complete(tmp_path):
    pytest.importorskip("tltorch")
    out, screen = tmp_path / "made" / "lookup.jsonl", io.StringIO()
    assert lookup.measure([TINY], 1, out, rich_console.Console(file=screen, width=100)) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["implementation"] for line in lines] == [peer.name for peer in PEERS]
    for line in lines:
        assert line["reason"] is None
        assert line["forward_ms"]["median"] > 0
        assert line["forward_backward_ms"]["min"] > 0
        assert line["auto_speed_up"] > 0
        assert line["workload"]["rows"] == 50
        assert line["machine"].keys() == {"cpu", "cores", "threads", "load"}
        assert all(line["versions"].values())
        assert "commit" in line
    shown = screen.getvalue()
    assert all(peer.name in shown for peer in PEERS)
    assert "missed" in shown
    assert "met" in shown


def test_what_cannot_run_is_shown_with_the_reason(tmp_path):
    out, screen = tmp_path / "lookup.jsonl", io.StringIO()
    lookup.measure([replace(TINY, tokens=10)], 1, out, rich_console.Console(file=screen, width=100))
    lines = {line["implementation"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert "more rows" in lines["tensorbed whole_table"]["reason"]
    assert lines["tensorbed whole_table"]["forward_ms"] is None
    assert lines[AUTO]["reason"] is None
    assert lines[DENSE]["reason"] is None
    assert "not run: tensorbed whole_table" in screen.getvalue()


def test_an_implementation_that_gives_other_rows_is_not_timed():
    wrong = replace(PEERS[0], build=lambda workload, table: torch.nn.Embedding(workload.rows, workload.cols))
    with pytest.raises(CannotRunError, match="other rows"):
        build(wrong, TINY, make_table(TINY))


def test_ids_are_frequent_first_and_the_same_every_time():
    workload = WORKLOADS["LM"]
    ids = workload.ids()
    assert torch.equal(ids, workload.ids())
    assert ids.shape == (4096,)
    # p(0) = 1 / H(267735) = 0.077: about 314 of 4096.
    assert 240 < int((ids == 0).sum()) < 400


def test_spread_is_ordered():
    assert list(Times((3.0, 1.0, 2.0, 4.0)).record().values()) == [1.0, 1.75, 2.5, 3.25, 4.0]
    assert set(Times((2.0,)).record().values()) == {2.0}
