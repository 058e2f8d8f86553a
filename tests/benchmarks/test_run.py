import io
import json
from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from made_up import SLOW_MACHINE, TINY

Console = pytest.importorskip("rich.console").Console
pytest.importorskip("matplotlib")

from benchmarks.__main__ import Plan, _parser, bench  # noqa: E402
from benchmarks.measure import Settings  # noqa: E402
from benchmarks.peers import PEERS, WHOLE  # noqa: E402
from benchmarks.plots import COLOURS  # noqa: E402
from benchmarks.scaling import SHOWN, SWEEPS, Sweep  # noqa: E402
from benchmarks.timing import Contestant, Times, compare  # noqa: E402
from benchmarks.workloads import Table, Workload  # noqa: E402

# tensorly hands torch tensors to numpy functions in a way numpy deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
QUICK = Settings(rounds=2, budget=0.05, memory=False)
NAMES = [peer.name for peer in PEERS]


def at(count):
    return Workload("scaling", (TINY,), count)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run over tiny workloads: the folder, its records, and what was on the screen."""
    out, screen = tmp_path_factory.mktemp("bench") / "made", io.StringIO()
    several = Workload("CTR", (TINY, Table.suggested(200, 16, 4)), 16)
    workloads = [Workload("LM r16", (TINY,), 64), several, Workload("one row", (TINY,), 1, calls=3)]
    sweeps = (Sweep("tokens", "tiny", (1, 8), at), Sweep("order", "tiny", (2,), at))
    bench(Plan(workloads, QUICK, sweeps), out, Console(file=screen, width=140), SLOW_MACHINE)
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return out, records, screen.getvalue()


def test_records_are_complete(ran):
    lookups = [record for record in ran[1] if record["kind"] == "lookup"]
    assert [record["implementation"] for record in lookups] == 3 * NAMES
    for record in lookups:
        assert record["machine"].keys() >= {"cpu", "cores", "threads", "load", "gemm_flops", "copy_bytes_per_second"}
        assert record["versions"]["torch"] == version("torch")
        assert record["versions"].keys() >= {"python", "tensorbed", "tensorly", "tensorly-torch", "torchtt"}
        assert "commit" in record
        assert record["limit"]["forward"]["flops"] > 0
        if record["reason"] is not None:
            # All that is installed can run what is so small.
            assert record["reason"].startswith(("no compiled kernels", "not installed"))
            assert record["forward_backward_ms"] is None
            continue
        assert 1 <= record["rounds"] <= 2
        for key in ("forward_ms", "forward_grad_mode_ms", "forward_backward_ms", "training_step_ms"):
            spread = record[key]
            assert 0 < spread["min"] <= spread["lower_quartile"] <= spread["median"] <= spread["upper_quartile"]


def test_curves_and_floors_are_recorded(ran):
    _, records, screen = ran
    points = {(found["curve"], found["at"], found["implementation"]) for found in records if found["kind"] == "scaling"}
    assert points == {(*place, name) for place in (("tokens", 1), ("tokens", 8), ("order", 2)) for name in SHOWN}
    floors = [record for record in records if record["kind"] == "floor"]
    assert {floor["verdict"] for floor in floors} <= {"met", "missed", "not run"}
    assert {floor["workload"] for floor in floors} == {"LM r16", "CTR", "one row"}
    for title in ("numbers to reach", "auto against the best of ours", "fwd+bwd by tokens", "one row, microseconds"):
        assert title in screen


def test_pictures_and_page_are_written(ran):
    out, _, _ = ran
    for name in ("times.png", "steps.png", "efficiency.png", "scaling.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    page = (out / "index.html").read_text()
    assert page.count('src="data:image/png;base64,') == page.count("src=") == 4
    assert "$" not in page
    assert all(name in page for name in NAMES)


def test_a_reason_takes_the_place_of_numbers(tmp_path):
    screen = io.StringIO()
    workload = Workload("huge", (Table(2**21, (128, 128, 128), (4, 4, 8), 1),), 4)
    others = {"nn.Embedding", "nn.Embedding sparse"}
    kept = tuple(peer for peer in PEERS if peer.name not in others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.measure.PEERS", kept)
        asked = Plan([workload], replace(QUICK, rounds=1))
        report = bench(asked, tmp_path, Console(file=screen, width=140), SLOW_MACHINE)
    assert "would build tables of 1.1 GB" in report.results[0].reasons[WHOLE]
    assert f"not run: {WHOLE}, would build tables of 1.1 GB" in screen.getvalue()
    assert f"not run: {WHOLE}, would build tables of 1.1 GB" in (tmp_path / "index.html").read_text()
    assert not (tmp_path / "scaling.png").exists()


def contestant():
    layer = torch.nn.Embedding(2, 3)
    return Contestant(layer, torch.optim.Adam(layer.parameters()), torch.tensor([0]), torch.ones(1, 3))


def test_a_layer_that_used_up_its_time_stops():
    spent, other = contestant(), contestant()
    spent.training = 1e9
    times = compare({"spent": spent, "other": other}, range(4), budget=1e6)
    assert times["spent"].rounds == 1
    assert len(times["spent"].forward.rounds) == 4  # lookups have a budget of their own
    assert times["other"].rounds == 4


def test_after_a_first_call_of_several_budgets_one_more_is_the_measurement():
    slow = contestant()
    slow.warm_up(budget=0.0)
    times = compare({"slow": slow}, range(4), budget=0.0)
    assert times["slow"].rounds == len(times["slow"].forward.rounds) == 1
    assert slow.finished


def test_calls_too_short_for_the_clock_are_never_timed_by_one():
    layer = contestant()
    layer.calls = 3
    layer.warm_up(budget=0.0)
    assert not layer.finished
    assert not layer.lookups


def test_spread_is_ordered():
    assert list(Times((3.0, 1.0, 2.0, 4.0)).record().values()) == [1.0, 1.75, 2.5, 3.25, 4.0]
    assert set(Times((2.0,)).record().values()) == {2.0}


def test_sweeps_are_those_asked_for():
    values = {sweep.name: (min(sweep.values), max(sweep.values)) for sweep in SWEEPS}
    assert values == {"rows": (10**4, 10**9), "tokens": (1, 10**6), "rank": (4, 256), "order": (2, 6)}
    rows, tokens, rank, order = (sweep.workload for sweep in SWEEPS)
    assert rows(10**9).rows == 10**9
    assert tokens(10).tokens == 10
    assert rank(8).tables[0].rank == 8
    assert order(5).tables[0].order == 5


def test_every_implementation_has_a_colour_of_its_own():
    assert list(COLOURS) == NAMES
    assert len(set(COLOURS.values())) == len(NAMES)


def test_options_are_understood():
    options = _parser().parse_args(["--workload", "NMT", "one row", "--rounds", "3", "--no-memory"])
    assert options.workload == ["NMT", "one row"]
    assert options.rounds == 3
    assert options.no_memory
    with pytest.raises(SystemExit):
        _parser().parse_args(["--rounds", "0"])
