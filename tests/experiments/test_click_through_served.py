"""What makes serving fast: fields as words, a hash table of them, and a model that scores only."""

import copy

import pytest
import small_files as tiny
import torch

pytest.importorskip("accelerate")

import numpy as np

from experiments.tasks.click_through import at_hand, served
from experiments.tasks.click_through.at_hand import AtHand
from experiments.tasks.click_through.codes import Codes, found_code, found_codes
from experiments.tasks.click_through.criteo import FEATURES
from experiments.tasks.click_through.fields import fields_of
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings
from experiments.tasks.click_through.prepared import UNSEEN, map_files
from experiments.tasks.click_through.served import PackedLayers, ServedModel


def lines_of(*fields):
    """A line for each field, which all features have."""
    return [b"\t".join([b"1", *[field] * len(FEATURES)]) for field in fields]


def test_words_are_equal_where_fields_are():
    texts = [b"", b"0", b"00", b" ", b"12345678", b"123456789", b"1234567890", b"-1234567890", b"-1234567899"]
    fields = fields_of(lines_of(*texts), labelled=True)
    assert fields.some(np.arange(len(fields.start)))[:: len(FEATURES)] == [text.decode() for text in texts]
    pairs = set(zip(fields.head.tolist(), fields.tail.tolist(), strict=True))
    assert len(pairs) == len(texts) * len(FEATURES)
    again = fields_of(lines_of(*reversed(texts)), labelled=True)
    assert set(zip(again.head.tolist(), again.tail.tolist(), strict=True)) == pairs
    assert fields.tail.all()


def test_a_line_with_a_field_that_is_too_long_has_no_words():
    assert fields_of(lines_of(b"-1234567890"), labelled=True) is not None
    for more in (1, 2, 2**16):
        assert fields_of(lines_of(b"1", b"-1234567890" + b"0" * more), labelled=True) is None


def test_text_is_where_its_field_says():
    rows = [row.encode() for row in tiny.criteo_rows()[:20]]
    expected = [field for row in rows for field in row.decode().split("\t")[1:]]
    for lines, labelled in ((rows, True), ([row.split(b"\t", 1)[1] + b"\r" for row in rows], False)):
        fields = fields_of(lines, labelled)
        assert fields.some(np.arange(len(expected))) == expected


def test_one_value_is_found_where_many_are():
    known, codes = np.array([b"", b"05db9164", b"68fd1e64", b"9"]), np.array([1, 4, 2, 3], dtype=np.int32)
    given = {"": 1, "05db9164": 4, "68fd1e64": 2, "9": 3, "05db916": 0, "05db91640": 0, "0": 0, "a": 0}
    assert {value: found_code(known, codes, value) for value in given} == given
    assert found_codes(known, codes, list(given)).tolist() == list(given.values())


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 1000])
def test_categories_are_found_by_their_words_as_by_their_texts(tmp_path, count):
    draw = np.random.default_rng(count)
    drawn = [f"{number:x}"[: 1 + number % 8] for number in draw.integers(2**28, 2**32, 2 * count).tolist()]
    texts = ["", "0", "00000000", "ffffffff", "f", *dict.fromkeys(["12345678", *drawn])]
    known = dict.fromkeys(["12345678", *draw.permutation(texts[6:])[: count - 1].tolist()])
    values = np.array(sorted(known), dtype="S8")
    codes = draw.permutation(np.arange(1, 1 + len(values), dtype=np.int32))
    for path, array in zip(map_files(tmp_path, "C1"), (values, codes), strict=True):
        np.save(path, array)
    expected = [dict(zip(sorted(known), codes.tolist(), strict=True)).get(text, UNSEEN) for text in texts]
    fields = fields_of(lines_of(*(text.encode() for text in texts)), labelled=True)
    places = np.arange(len(texts)) * len(FEATURES) + FEATURES.index("C1")
    found = Codes(tmp_path, "C1", "none")
    assert found.by_words
    assert found(fields, places).tolist() == expected
    assert [found(fields, place).item() for place in places[:, None]] == expected
    for wrong in (b"g", b"1234567G", b"/", b":", b"`", b"A", b"1 ", b"123456789"):
        spoiled = fields_of(lines_of(b"12345678", wrong), labelled=True)
        assert found(spoiled, places[:2]) is None
        assert found(spoiled, places[1:2]) is None


@pytest.fixture
def few_slots(monkeypatch):
    monkeypatch.setattr(at_hand, "_BITS", 8)
    monkeypatch.setattr(at_hand, "_SLOTS", 256)


def test_what_is_at_hand_is_what_was_kept_last(few_slots):
    """As a dictionary has it, under collisions."""
    draw, table, kept = np.random.default_rng(0), AtHand(), {}
    for _ in range(200):
        head, tail = draw.integers(0, 30, 60, dtype=np.uint64), draw.integers(1, 10, 60, dtype=np.uint64)
        keys = list(zip(head.tolist(), tail.tolist(), strict=True))
        numbers, missing = table.find(head, tail)
        there = sorted(set(range(60)) - set(missing.tolist()))
        assert {keys[place] for place in missing} == set(keys) - set(kept)
        assert [kept[keys[place]] for place in there] == numbers[there].tolist()
        first = np.array(list({keys[place]: place for place in missing}.values()), dtype=np.int64)
        if table.kept + len(first) > 128:
            kept.clear()
        new = draw.integers(0, 1000, len(first))
        table.keep(head[first], tail[first], new)
        kept.update(zip([keys[place] for place in first], new.tolist(), strict=True))
        assert table.kept == len(kept) <= 128


def test_a_field_given_twice_is_kept(few_slots):
    table, head, tail = AtHand(), np.array([5, 6, 5], np.uint64), np.ones(3, np.uint64)
    table.keep(head, tail, np.array([50, 60, 50]))
    numbers, missing = table.find(head, tail)
    assert numbers.tolist() == [50, 60, 50]
    assert not len(missing)


def test_more_fields_than_there_is_room_for_are_not_kept(few_slots):
    table, tail = AtHand(), np.ones(129, np.uint64)
    head = np.arange(129, dtype=np.uint64)
    table.keep(head[:3], tail[:3], np.arange(3))
    table.keep(head, tail, np.arange(129))
    assert table.find(head, tail)[1].tolist() == list(range(129))


def small_model(full_up_to=30, hidden=8, **options):
    """Of tables some of which may be full, with ids for it; always the same."""
    torch.manual_seed(0)
    sizes = {"day": 7, "user": 5000, "book": 3000, "year": 30, "page": 20, "shop": 4000}
    options = {"format": "tensor_train", "rank": 2, "full_up_to": full_up_to, "hidden": hidden, **options}
    model = ClickModel(ClickThroughSettings(dataset="criteo", row="tiny", dim=8, **options), sizes).eval()
    return model, torch.stack([torch.randint(rows, (50,)) for rows in sizes.values()], 1)


@pytest.mark.parametrize("interaction", [False, True])
@pytest.mark.parametrize("full_up_to", [0, 30, 10_000])
def test_a_served_model_has_the_scores_of_the_model(full_up_to, interaction, monkeypatch):
    """Bit for bit, whichever tables are full: none, some of them, all."""
    monkeypatch.setattr(served, "PACKS", False)
    model, ids = small_model(full_up_to, interaction=interaction)
    serving = ServedModel(model, full_up_to)
    with torch.inference_mode():
        for some in (ids, ids[:1], ids[:20], ids):
            assert torch.equal(serving(some), model(some))
    before = model(ids)
    assert before.requires_grad
    serving(ids)
    assert torch.equal(model(ids), before)


@pytest.mark.skipif(not served.PACKS, reason="torch has no oneDNN here")
def test_packed_layers_are_as_near_to_the_exact_scores_as_the_model_is():
    model, ids = small_model(hidden=256)
    with torch.inference_mode():
        exact = copy.deepcopy(model).double()(ids)
        error = (model(ids) - exact).abs().max()
        assert error > 0
        packed = ServedModel(model, 30)
        assert isinstance(packed.body, PackedLayers)
        for some in (ids, ids[:1], ids[:20]):
            torch.testing.assert_close(packed(some), exact[: len(some)].float(), rtol=0, atol=2 * float(error))
