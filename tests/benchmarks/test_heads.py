import argparse
import io
import json
from dataclasses import replace
from math import prod

import pytest
import torch
from made_up import SLOW_MACHINE

Console = pytest.importorskip("rich.console").Console
pytest.importorskip("matplotlib")

from benchmarks import heads, measure_heads, peers  # noqa: E402
from benchmarks.__main__ import Plan, bench, parse, plan  # noqa: E402
from benchmarks.floors import judge  # noqa: E402
from benchmarks.heads import CHUNKS, FUSED, HEADS, PLAIN, TT_16, TT_96, Fused, HeadWorkload  # noqa: E402
from benchmarks.measure_heads import HeadSettings  # noqa: E402
from benchmarks.memory import Extra, in_fresh_process  # noqa: E402
from benchmarks.peers import CannotRunError  # noqa: E402
from benchmarks.plots import HEAD_COLOURS  # noqa: E402
from benchmarks.results import HeadResult, HeadTimed  # noqa: E402
from benchmarks.tables import floors_sheet, heads_sheet, summary_sheet  # noqa: E402
from benchmarks.timing import Times  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

TINY = HeadWorkload(500, (24, 2, 12), (4, 4, 8), tokens=40, k=3)
NAMES = [peer.name for peer in HEADS]
BY_NAME = {peer.name: peer for peer in HEADS}
needs_fused = pytest.mark.skipif(
    not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy"
)


def made(peer, workload=TINY):
    return peer.around(peer.table(workload))


@pytest.fixture
def every_head():
    """By name, those that this torch can run."""
    found = {}
    for peer in HEADS:
        try:
            found[peer.name] = made(peer)
        except CannotRunError:
            assert peer.name == FUSED
    return found


def test_every_head_gives_the_plain_loss_of_its_table(every_head):
    for head in every_head.values():
        h = TINY.hidden.clone().requires_grad_()
        weight = head.weight.detach().clone().requires_grad_()
        expected = torch.nn.functional.cross_entropy(h @ weight.T, TINY.target)
        (gradient,) = torch.autograd.grad(expected, h)
        found = head.loss(h, TINY.target)
        torch.testing.assert_close(found, expected)
        found.backward()
        torch.testing.assert_close(h.grad, gradient)
        assert all(parameter.grad is not None for parameter in head.parameters())


def test_every_head_finds_the_best_classes_of_its_table(every_head):
    for head in every_head.values():
        values, indices = head.topk(TINY.hidden[0], 3)
        expected = torch.topk(TINY.hidden[0] @ head.weight.detach().T, 3)
        torch.testing.assert_close(values, expected.values)
        assert torch.equal(indices, expected.indices)


@needs_fused
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_option_of_the_fused_loss_gives_the_same(chunk):
    workload = replace(TINY, tokens=700)
    head = made(BY_NAME[FUSED], workload)
    head.chunk = chunk
    expected = heads.Plain.loss(head, workload.hidden, workload.target)
    torch.testing.assert_close(head.loss(workload.hidden, workload.target), expected)


def test_the_workload_is_the_one_asked_for():
    asked = HeadWorkload()
    assert (asked.classes, asked.dim, asked.tokens, asked.k) == (267_735, 512, 2048, 10)
    assert prod(asked.row_factors) >= asked.classes
    assert asked.hidden.shape == (2048, 512)
    assert 0.99 < float(asked.hidden.std()) < 1.01
    # Drawn as words are: half of a batch are the most frequent few hundred.
    assert 0.4 < float((asked.target < 500).double().mean()) < 0.6
    assert int(asked.target.max()) > 100_000
    assert torch.equal(asked.target, HeadWorkload().target)


def test_a_head_that_gives_something_else_is_not_timed():
    head = made(BY_NAME[PLAIN])
    right = TINY.hidden.clone().requires_grad_()
    head.loss(right, TINY.target).backward()
    heads.check(head, TINY, right.grad)
    with pytest.raises(CannotRunError, match="gives other gradients"):
        heads.check(head, TINY, right.grad * 1.01)


def ran_once(workload=TINY, **settings):
    told = []
    asked = HeadSettings(**{"rounds": 1, "topk_rounds": 2, "memory": False, **settings})
    return measure_heads.run(workload, asked, told.append), told, asked


def test_each_step_of_the_progress_is_told():
    result, told, asked = ran_once(rounds=2)
    assert len(told) == asked.steps()
    assert HeadSettings(3, 30, True).steps() == 7 + 3 * 7 + 30 + 7
    for timed in result.times.values():
        assert len(timed.both.rounds) == len(timed.step.rounds) == 2
        assert timed.both.median < timed.step.median
        assert timed.topk is None or len(timed.topk.rounds) == 2


@needs_fused
def test_the_fused_loss_gets_its_fastest_option(monkeypatch):
    tried = []

    def train(self, h, target):
        if isinstance(self.head, Fused):
            tried.append(self.head.chunk)
        h.grad = torch.zeros_like(h)
        self.steps.append((1.0, 2.0))
        return {256: 3.0, 512: 1.0, 1024: 2.0}.get(getattr(self.head, "chunk", 0), 5.0)

    monkeypatch.setattr(measure_heads.Entrant, "train", train)
    monkeypatch.setattr(measure_heads, "check", lambda *_: None)
    result, _, _ = ran_once()
    assert tried == [CHUNKS[0], *(chunk for chunk in CHUNKS for _ in range(2)), 512]
    assert result.chunk == 512
    assert any("batch_chunk_size=512, the fastest" in note for note in heads_sheet(result).notes)


def test_dense_heads_share_one_weight_that_rounds_leave_as_it_was(monkeypatch):
    entered = {}
    enter = measure_heads._enter

    def spy(*arguments):
        entered.update(enter(*arguments))
        return entered

    monkeypatch.setattr(measure_heads, "_enter", spy)
    ran_once()
    dense = [entered[name] for name in (PLAIN, FUSED, heads.DENSE) if name in entered]
    assert len({id(entrant.optimiser) for entrant in dense}) == 1
    assert len({id(parameter) for entrant in dense for parameter in entrant.head.parameters()}) == 1
    for name, entrant in entered.items():
        assert all(parameter.grad is None for parameter in entrant.head.parameters())
        assert entrant.optimiser.state
        for now, drawn in zip(entrant.head.parameters(), made(BY_NAME[name]).parameters(), strict=True):
            assert torch.equal(now, drawn)


def test_what_does_not_fit_in_memory_is_a_reason(monkeypatch):
    monkeypatch.setattr(peers, "available_bytes", lambda: 10**9)
    result, told, asked = ran_once()
    assert len(told) == asked.steps()
    assert not result.times
    assert "GB are free" in result.reasons[PLAIN]
    assert f"not run: {PLAIN}, needs about" in "\n".join(heads_sheet(result).notes)
    assert {floor.verdict for floor in judge([], result)} == {"not run"}


def test_memory_is_measured_in_a_process_of_its_own():
    workload = HeadWorkload(20_000, (20, 25, 40), (4, 4, 4), tokens=512)
    scores, weight = 4 * workload.classes * workload.tokens, 4 * workload.classes * workload.dim
    plain = in_fresh_process(measure_heads._measured, (workload, NAMES.index(PLAIN), None), 1)
    train = in_fresh_process(measure_heads._measured, (workload, NAMES.index(TT_16), None), 1)
    assert isinstance(plain, Extra)
    assert isinstance(train, Extra)
    assert 2 * scores < plain.bytes < 4 * scores + weight + 8 * 10**6
    assert train.bytes < scores


def test_a_process_that_takes_too_long_is_a_reason():
    assert "more than 0 s" in in_fresh_process(measure_heads._measured, (TINY, 0, None), 1, patience=0.0)


def made_up(steps, topk=None, memory=None):
    times = {
        name: HeadTimed(Times((step / 2,)), Times((step,)), Times((topk[name],)) if name in (topk or {}) else None)
        for name, step in steps.items()
    }
    extra = {name: Extra(size, "made up") for name, size in (memory or {}).items()}
    return HeadResult(TINY, 1, times, stored=dict.fromkeys(times, 4), memory=extra, chunks={256: 2.0, 512: 1.0})


def verdicts(result, about):
    return {floor.workload: floor.verdict for floor in judge([], result) if about in floor.about}


def test_a_step_is_judged_against_the_fused_loss():
    step = "training step, times that of torch fused"
    both = made_up({PLAIN: 1.0, FUSED: 10.0, TT_16: 10.0, TT_96: 15.0})
    assert verdicts(both, step) == {f"head, {TT_16}": "met", f"head, {TT_96}": "met"}
    both = made_up({PLAIN: 99.0, FUSED: 10.0, TT_16: 10.1, TT_96: 15.1})
    assert verdicts(both, step) == {f"head, {TT_16}": "missed", f"head, {TT_96}": "missed"}
    assert "(goal: 1.25)" in "\n".join(heads_sheet(both).notes)


def test_memory_is_judged_against_the_plain_loss():
    times = dict.fromkeys(NAMES, 1.0)
    result = made_up(times, memory={PLAIN: 1000, FUSED: 1, TT_16: 150, TT_96: 151})
    assert verdicts(result, "extra memory") == {f"head, {TT_16}": "met", f"head, {TT_96}": "missed"}
    assert set(verdicts(made_up(times), "extra memory").values()) == {"not run"}


def test_topk_is_judged_against_all_logits():
    for taken, verdict in ((1.0, "met"), (1.1, "missed")):
        result = made_up(dict.fromkeys(NAMES, 1.0), topk={PLAIN: 3.0, TT_16: taken, TT_96: 9.0})
        assert verdicts(result, "topk") == {f"head, {TT_16}": verdict}


def test_floors_of_heads_stand_beside_those_of_lookups():
    result = made_up({FUSED: 10.0, TT_16: 8.0, TT_96: 20.0})
    found = judge([], result)
    assert judge([]) == []
    assert floors_sheet(found).title == "numbers to reach: 1 of 2 met"
    row = next(row for row in summary_sheet(found).rows if "training step" in row[0])
    assert row[1:] == (f"head, {TT_96}", "1 of 2", "<= 1.50 x", "2.00 x", "missed")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A run of heads alone: the folder, its records, and what was on the screen."""
    out, screen = tmp_path_factory.mktemp("bench") / "made", io.StringIO()
    asked = Plan([], heads=TINY, head_settings=HeadSettings(1, 2, memory=False))
    bench(asked, out, Console(file=screen, width=120), SLOW_MACHINE)
    records = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return out, records, screen.getvalue()


def test_heads_are_recorded(ran):
    found = [record for record in ran[1] if record["kind"] == "head"]
    assert [record["implementation"] for record in found] == NAMES
    for record in found:
        assert record["workload"]["classes"] == 500
        assert "commit" in record
        if record["reason"] is not None:
            assert "has no linear_cross_entropy" in record["reason"]
            continue
        assert record["rounds"] == 1
        assert 0 < record["forward_backward_ms"]["median"] < record["training_step_ms"]["median"]
        assert (record["topk_ms"] is None) == (record["implementation"] == FUSED)
        assert (record["batch_chunk_size"] in CHUNKS) == (record["implementation"] == FUSED)
    stored = {record["implementation"]: record["parameter_bytes"] for record in found}
    assert stored[PLAIN] == stored[heads.DENSE] == 4 * 500 * 128
    assert stored[TT_16] == 4 * (24 * 4 * 16 + 2 * 16 * 4 * 16 + 12 * 16 * 8)
    floors = {(record["workload"], record["about"]) for record in ran[1] if record["kind"] == "floor"}
    assert len(floors) == 5


def test_heads_are_shown_on_the_screen_and_on_the_page(ran):
    out, _, screen = ran
    page = (out / "index.html").read_text()
    for shown in (screen, page):
        assert "heads: 500 classes" in shown
        assert "numbers to reach" in shown
        assert all(name in shown for name in NAMES)
        assert "auto against the best of ours" not in shown
    assert (out / "heads.png").read_bytes().startswith(b"\x89PNG")
    assert page.count('src="data:image/png;base64,') == page.count("src=") == 1
    assert "<h2>Heads</h2>" in page
    assert "<h2>Every workload</h2>" not in page
    assert "$" not in page
    assert all(len(line) <= 120 for line in screen.splitlines())


def test_the_sheet_says_what_the_fused_loss_was_given():
    rows = heads_sheet(made_up(dict.fromkeys(NAMES, 1.0), memory={PLAIN: 10**9, TT_96: 10**8})).rows
    assert [row[0] for row in rows] == [f"{name}, 512 at a time" if name == FUSED else name for name in NAMES]
    assert [row[6] for row in rows if row[0] in (PLAIN, TT_96)] == ["100.0 %", "10.0 %"]


def test_every_head_has_a_colour_of_its_own():
    assert list(HEAD_COLOURS) == NAMES
    assert len(set(HEAD_COLOURS.values())) == len(NAMES)


def options(*said):
    found = parse(said)
    assert isinstance(found, argparse.Namespace)
    return plan(found)


def test_heads_run_beside_the_lookups_unless_told_otherwise():
    asked = options()
    assert asked.heads == HeadWorkload()
    assert len(asked.workloads) == len(WORKLOADS)
    assert asked.head_settings == HeadSettings(3, 30, True)
    assert asked.steps() == options("--no-heads").steps() + asked.head_settings.steps()
    assert options("--no-heads").heads is None
    assert options("--workload", "NMT").heads is None


def test_heads_run_alone_when_asked_to():
    alone = options("--heads-only", "--rounds", "5", "--no-memory")
    assert not alone.workloads
    assert not alone.sweeps
    assert alone.heads == HeadWorkload()
    assert alone.head_settings == HeadSettings(5, 30, False)
    assert alone.steps() == alone.head_settings.steps()


def test_quick_heads_take_one_round_and_no_memory():
    assert options("--quick").head_settings == HeadSettings(1, 30, False)
    assert options("--quick", "--rounds", "2").head_settings.rounds == 2


@pytest.mark.parametrize("said", [("--heads-only", "--no-heads"), ("--heads-only", "--workload", "NMT")])
def test_options_that_contradict_each_other_are_refused(said, capsys):
    with pytest.raises(SystemExit):
        parse(said)
    assert "heads" in capsys.readouterr().err
