"""Compressing models in place."""

import json
import re
import warnings
from html.parser import HTMLParser

import pytest
import torch
import torch.nn.utils.prune
from torch import nn

import tensorbed as tb

RANK = tb.TensorTrain(rank=4)


class Model(nn.Module):
    """Two tables, a small one, a head, and something else that is as wide."""

    def __init__(self, tied=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(3000, 16, **options)
        self.ids = nn.EmbeddingBag(2500, 16, mode="sum")
        self.kinds = nn.Embedding(10, 16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3000)
        if tied:
            self.head.weight = self.words.weight


def snapshot(model):
    return {name: (id(module), type(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("tied", [True, False])
def test_one_line(tied):
    model = Model(tied, padding_idx=7).eval()
    before = sum({id(p): p.numel() for p in model.parameters()}.values())
    bias = model.head.bias
    report = tb.compress_(model, RANK)
    assert [type(m) for m in (model.words, model.ids, model.head)] == [tb.Embedding, tb.EmbeddingBag, tb.Head]
    assert (type(model.kinds), type(model.body)) == (nn.Embedding, nn.Linear)
    assert model.head.is_tied is tied
    assert model.head.bias is bias
    assert (model.words.padding_idx, model.ids.mode) == (7, "sum")
    assert not model.words.training
    assert report.numbers_before == before
    assert report.numbers_after == sum(p.numel() for p in model.parameters()) + 16  # the padding row
    names = [entry.names for entry in report.entries]
    assert names == ([("words", "head"), ("ids",)] if tied else [("words",), ("ids",), ("head",)])
    assert report.left == {"kinds": "10 rows, fewer than min_rows=2,000"}
    logits = model.head(model.body(model.words(torch.arange(5))))
    assert logits.shape == (5, 3000)


def test_errors_are_those_of_the_fits_and_large_ones_are_told():
    model = Model()
    words = model.words.weight.detach().clone()
    report = tb.compress_(model, {"words": tb.QuantizedRows(), "ids": RANK, "head": tb.LowRank(rank=16)})
    by_name = {entry.names[0]: entry for entry in report.entries}
    distance = (model.words.weight - words).norm() / words.norm()
    assert by_name["words"].error == pytest.approx(float(distance.detach()), rel=1e-3)
    assert by_name["head"].error < 1e-5
    assert by_name["ids"].error > 0.5
    assert [warning.partition(":")[0] for warning in report.warnings] == ["ids"]
    assert by_name["words"].ratio == pytest.approx(4 * 16 / 20)


def test_reports_as_text_dict_and_page():
    report = tb.compress_(Model(tied=True), RANK)
    text = str(report)
    assert "words = head" in text
    assert "3,000 x 16" in text
    assert "warning: words" in text
    found = json.loads(json.dumps(report.to_dict()))
    assert found["entries"][0]["names"] == ["words", "head"]
    assert found["ratio"] == pytest.approx(report.bytes_before / report.bytes_after)

    page = Cells()
    page.feed(report.to_html())
    assert page.tags.count("td") == 9 * (len(report.entries) + 1)
    assert 'name=viewport content="width=device-width' in report.to_html()  # not a desktop's width on a phone


class Cells(HTMLParser):
    """The tags of a page, and what stands in its headings."""

    def __init__(self):
        super().__init__()
        self.tags, self.headings = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "th":
            self.headings.append("")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "th":
            self.headings[-1] += data


def test_every_column_of_a_report_has_a_heading_of_its_own():
    report = tb.compress_(Model(tied=True), RANK)
    page = Cells()
    page.feed(report.to_html())
    assert all(page.headings)
    assert len(set(page.headings)) == len(page.headings) == 9
    assert page.headings[:3] == ["table", "ratio", "fit error"]  # as far as a phone shows
    assert sorted(re.split(r"  +", str(report).splitlines()[0])) == sorted(page.headings)


def test_patterns_are_taken_in_their_order():
    model = Model()
    tb.compress_(model, {"wor*": tb.LowRank(rank=2), "ids": None, "*": tb.LowRank(rank=3)})
    assert model.words.structure.rank == 2
    assert type(model.ids) is nn.EmbeddingBag
    small = Model()
    tb.compress_(small, {"kinds": tb.LowRank(rank=2)})
    assert small.kinds.structure.rank == 2  # by its very name, however small
    assert type(small.words) is nn.Embedding


def test_skipping_and_leaving_heads():
    model = Model()
    tb.compress_(model, RANK, skip=["ids", "he*"])
    assert [type(m) for m in (model.words, model.ids, model.head)] == [tb.Embedding, nn.EmbeddingBag, nn.Linear]
    model = Model()
    tb.compress_(model, RANK, include_heads=False)
    assert type(model.head) is nn.Linear


def test_untied_tables_train_apart():
    model = Model(tied=True)
    report = tb.compress_(model, tb.LowRank(rank=16), tied="untie")
    assert not model.head.is_tied
    assert torch.allclose(model.head.weight, model.words.weight, atol=1e-5)
    assert [entry.names for entry in report.entries][:2] == [("words",), ("head",)]
    loose = Model(tied=True)
    tb.compress_(loose, RANK, include_heads=False, tied="untie")
    assert loose.head.weight.shape == (3000, 16)


def test_drawn_anew_for_training_from_scratch():
    model = Model(tied=True)
    report = tb.compress_(model, RANK, fit=False)
    assert all(entry.error is None for entry in report.entries)
    assert report.warnings == []
    assert of_table(model.words) == pytest.approx(16**-0.5, rel=1e-3)


@pytest.mark.parametrize(("std", "expected"), [(None, (0.3, 0.25)), (0.7, (0.7, 0.7)), ("glorot", (0.0257, 0.0257))])
def test_drawn_anew_with_a_deviation(std, expected):
    """Unless it is said, that of heads for all tables that score."""
    model = nn.Sequential(nn.Embedding(3000, 16), nn.Linear(16, 3000))
    tb.compress_(model, RANK, fit=False, std=std)
    assert [of_table(layer) for layer in model] == pytest.approx(expected, rel=2e-3)
    tied = Model(tied=True)
    tb.compress_(tied, RANK, fit=False, std=std)
    assert of_table(tied.words) == pytest.approx(expected[1], rel=2e-3)
    tied = Model(tied=True)
    tb.compress_(tied, RANK, fit=False, std=std, tied="untie")
    assert [of_table(layer) for layer in (tied.words, tied.head)] == pytest.approx(expected, rel=2e-3)


def of_table(layer):
    return float(layer.weight.detach().clone().double().square().mean().sqrt())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_and_what_is_frozen_stay(dtype):
    model = Model(tied=True).to(dtype)
    model.words.weight.requires_grad_(False)
    tb.compress_(model, tb.LowRank(rank=2))
    assert model.words.u.dtype == dtype
    assert not model.words.u.requires_grad
    assert model.head.bias.requires_grad


def test_one_table_in_three_places():
    shared = nn.Embedding(3000, 16)
    model = nn.ModuleDict(
        {"a": shared, "b": shared, "c": nn.Embedding(3000, 16), "head": nn.Linear(16, 3000, bias=False)}
    )
    model["c"].weight = shared.weight
    model["head"].weight = shared.weight
    report = tb.compress_(model, RANK)
    assert model["a"] is model["b"] is model["c"]
    assert model["head"].core_0 is model["a"].core_0
    assert report.entries[0].names == ("a", "b", "c", "head")


def test_twice_and_without_large_tables():
    model = Model()
    tb.compress_(model, RANK)
    before = snapshot(model)
    report = tb.compress_(model, RANK)
    assert snapshot(model) == before
    assert report.entries == ()
    assert "nothing was compressed" in str(report)
    assert report.ratio == 1
    assert tb.compress_(nn.Sequential(nn.Linear(3, 3)), RANK).entries == ()


class BartScaledWordEmbedding(nn.Embedding):
    __module__ = "transformers.models.bart.modeling_bart"

    def __init__(self, rows, cols, embed_scale=1.0):
        super().__init__(rows, cols)
        self.embed_scale = embed_scale

    def forward(self, index):
        return super().forward(index) * self.embed_scale


class NormedEmbedding(nn.Embedding):
    pass


def test_scaled_subclasses_keep_their_scale_and_others_are_refused(tmp_path):
    model = nn.ModuleDict({"words": BartScaledWordEmbedding(3000, 8, embed_scale=4.0), "head": nn.Linear(8, 3000)})
    model["head"].weight = model["words"].weight
    index = torch.arange(9)
    expected = model["words"](index)
    tb.compress_(model, tb.LowRank(rank=8))
    assert torch.allclose(model["words"](index), expected, atol=1e-4)
    assert torch.allclose(model["head"].weight * 4, model["words"](torch.arange(3000)), atol=1e-4)
    tb.save(model, tmp_path / "m")
    fresh = nn.ModuleDict({"words": nn.Embedding(3000, 8), "head": nn.Linear(8, 3000)})
    fresh["head"].weight = fresh["words"].weight
    tb.load(tmp_path / "m", into=fresh)
    assert torch.equal(fresh["words"](index), model["words"](index))
    other = nn.ModuleDict({"words": NormedEmbedding(3000, 8)})
    with pytest.raises(TypeError, match=r'words is a NormedEmbedding.*skip=\["words"\]'):
        tb.compress_(other, RANK)


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda m: tb.compress_(3, RANK), TypeError, "got int"),
        (lambda m: tb.compress_(m, "tt"), TypeError, "format must be a format"),
        (lambda m: tb.compress_(m, {"words": tb.TensorTrain}), TypeError, "format must be a format"),
        (
            lambda m: tb.compress_(m, {"wrods": RANK}),
            ValueError,
            "no table matches wrods; the model has words, ids, kinds",
        ),
        (lambda m: tb.compress_(m, RANK, tied="both"), ValueError, 'choose "keep" or "untie"'),
        (lambda m: tb.compress_(m, RANK, skip="ids"), TypeError, "list of patterns"),
        (lambda m: tb.compress_(m, RANK, min_rows="few"), TypeError, "min_rows must be an int"),
        (
            lambda m: tb.compress_(m, RANK, include_heads=False),
            ValueError,
            r"head.weight shares the weight of words.*\(a head, and include_heads=False\)",
        ),
        (lambda m: tb.compress_(m.words, RANK), TypeError, "cannot be replaced in itself"),
        (lambda m: tb.compress_(m, {"words": RANK, "ids": tb.LowRank(ratio=1e9)}), ValueError, "ids: ratio=1e"),
        (lambda m: tb.compress_(m, RANK, std=0.5), ValueError, "std=0.5 is for tables that are drawn anew, fit=False"),
        (lambda m: tb.compress_(m, RANK, fit=False, std="xavier"), ValueError, 'or "glorot"'),
        (lambda m: tb.compress_(m, tb.QuantizedRows(), fit=False), ValueError, "words: quantized_rows cannot be drawn"),
    ],
)
def test_refusals_leave_the_model_as_it_was(use, error, match):
    model = Model(tied=True)
    before, state = snapshot(model), {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(error, match=match):
        use(model)
    assert snapshot(model) == before
    assert all(torch.equal(state[name], t) for name, t in model.state_dict().items())


def test_a_table_with_nan_is_refused_by_name():
    model = Model()
    with torch.no_grad():
        model.ids.weight[3, 2] = torch.nan
    before = snapshot(model)
    with pytest.raises(ValueError, match="ids: the table holds nan at row 3"):
        tb.compress_(model, RANK)
    assert snapshot(model) == before


def test_none_leaves_a_head_as_it_is():
    model = Model()
    tb.compress_(model, {"head": None, "*": RANK})
    assert type(model.head) is nn.Linear
    with pytest.raises(ValueError, match=r"head\.weight shares the weight of words"):
        tb.compress_(Model(tied=True), {"head": None, "*": RANK})


def test_tied_tables_of_other_scales_are_refused():
    model = nn.ModuleDict({"a": BartScaledWordEmbedding(3000, 8, 2.0), "b": BartScaledWordEmbedding(3000, 8, 5.0)})
    model["b"].weight = model["a"].weight
    with pytest.raises(ValueError, match="b: shares its weight with a table of other options"):
        tb.compress_(model, RANK)
    tb.compress_(model, tb.LowRank(rank=8), tied="untie")
    assert (model["a"].embed_scale, model["b"].embed_scale) == (2.0, 5.0)


def hooked(module):
    module.register_forward_hook(lambda *_: None)


def patched(module):
    module.forward = lambda index: index


def pruned(module):
    torch.nn.utils.prune.random_unstructured(module, "weight", 0.5)


@pytest.mark.parametrize("change", [hooked, patched, pruned])
@pytest.mark.parametrize("name", ["words", "head"])
def test_what_was_added_to_a_layer_is_not_lost_in_silence(change, name):
    model = Model()
    change(getattr(model, name))
    with pytest.raises(ValueError, match=rf"{name} has .*skip {name}"):
        tb.compress_(model, RANK)
    tb.compress_(model, RANK, skip=[name])
    assert type(model.ids) is tb.EmbeddingBag


def test_names_with_brackets_are_names():
    model = nn.Module()
    model.add_module("we[0]", nn.Embedding(3000, 8))
    assert tb.compress_(model, RANK, skip=["we[0]"]).entries == ()
    assert tb.compress_(model, {"we[0]": RANK}).entries[0].names == ("we[0]",)


@pytest.mark.parametrize("pattern", ["head", "he*", "h[e]ad", "*ead"])
def test_patterns_name_heads(pattern):
    model = Model()
    report = tb.compress_(model, {pattern: tb.LowRank(rank=3)})
    assert [entry.names for entry in report.entries] == [("head",)]
    assert model.head.structure.rank == 3
    model = Model()
    tb.compress_(model, {pattern: tb.LowRank(rank=3), "*": tb.LowRank(rank=2)})
    assert (model.head.structure.rank, model.words.structure.rank) == (3, 2)
    assert type(model.body) is nn.Linear


def test_patterns_take_no_layer_that_is_no_head():
    model = Model()
    report = tb.compress_(model, {"bod*": RANK, "words": RANK})
    assert type(model.body) is nn.Linear
    assert report.left["body"] == "16 rows, fewer than min_rows=2,000"
    wide = nn.ModuleDict({"words": nn.Embedding(3000, 8), "up": nn.Linear(8, 4000)})
    tb.compress_(wide, {"*": RANK})
    assert type(wide["up"]) is nn.Linear


def test_a_head_of_another_width_belongs_to_its_vocabulary():
    model = nn.ModuleDict({"words": nn.Embedding(3000, 8), "kinds": nn.Embedding(10, 8)})
    model["head"], model["classes"] = nn.Linear(16, 3000), nn.Linear(16, 10)
    report = tb.compress_(model, {"words": RANK, "kinds": tb.LowRank(rank=2)})
    assert [entry.names[0] for entry in report.entries] == ["words", "kinds", "head"]
    assert type(model["classes"]) is nn.Linear


def test_tables_that_nobody_spoke_of_follow_their_tie():
    model = nn.ModuleDict({name: nn.Embedding(3000, 8) for name in ("a", "b")})
    model["b"].weight = model["a"].weight
    report = tb.compress_(model, {"b": RANK})
    assert model["a"] is model["b"]
    assert report.left == {}


@pytest.mark.parametrize(
    ("format", "match"),
    [
        ({"*": RANK, "words": tb.LowRank(rank=2)}, r"'words' is of no use: '\*', which comes before it, matches words"),
        ({"*": RANK, "he*": tb.LowRank(rank=2)}, r"'he\*' is of no use: '\*', which comes before it, matches head"),
        ({"words": RANK, "heat*": RANK}, r"no table matches heat\*; the model has words, ids, kinds"),
        ({"words": RANK, "head": tb.LowRank(rank=2)}, "words and head share one weight, but are given TensorTrain"),
    ],
)
def test_patterns_that_cannot_have_their_way_are_refused(format, match):
    model = Model(tied=True)
    before = snapshot(model)
    with pytest.raises(ValueError, match=match):
        tb.compress_(model, format)
    assert snapshot(model) == before


def test_untied_places_have_formats_of_their_own():
    model = Model(tied=True)
    tb.compress_(model, {"words": tb.LowRank(rank=2), "head": tb.LowRank(rank=3)}, tied="untie")
    assert (model.words.structure.rank, model.head.structure.rank) == (2, 3)


def compressed():
    model = Model()
    tb.compress_(model, RANK)
    return model


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (
            lambda: nn.Sequential(nn.Linear(3, 3)),
            {},
            r"the model has no torch\.nn\.Embedding or torch\.nn\.EmbeddingBag\.",
        ),
        (
            lambda: nn.ModuleDict({"a": nn.Embedding(9, 3)}),
            {},
            r"a \(9 rows, fewer than min_rows=2,000\)\. To take them lower min_rows\.$",
        ),
        (
            Model,
            {"skip": ["*s"]},
            r'words \(left out by skip=\["\*s"\]\), ids .*\. To take them leave out the pattern of skip=\.$',
        ),
        (compressed, {}, r"words \(compressed already\).*kinds \(10 rows, fewer than min_rows=2,000\)\."),
    ],
)
def test_nothing_compressed_says_why(model, options, match):
    report = tb.compress_(model(), RANK, **options)
    assert report.entries == ()
    assert re.search(f"nothing was compressed: {match}", str(report))


def test_what_is_left_says_why():
    """Also under a plan, where nobody has named the tables that were too small, or skipped."""
    sizes = {"words": 4000, "few": 300, "others": 2500, "dense": 2500}

    def left(format, **options):
        model = nn.ModuleDict({name: nn.Embedding(rows, 16) for name, rows in sizes.items()})
        return tb.compress_(model, format(model) if callable(format) else format, **options).left

    few = "300 rows, fewer than min_rows=2,000"
    assert left({"words": RANK, "dense": None}) == {
        "few": "no pattern matches it",
        "others": "no pattern matches it",
        "dense": "its format is None",
    }
    assert left(RANK, skip=["o*", "d*"]) == {
        "few": few,
        "others": 'left out by skip=["o*"]',
        "dense": 'left out by skip=["d*"]',
    }
    planned = left(lambda model: tb.plan(model, ratio=1.5, skip=["others"], formats=[RANK]), skip=["others"])
    assert planned == {"few": few, "others": 'left out by skip=["others"]', "dense": "kept dense by the plan"}
    assert left(lambda model: tb.plan(model, ratio=3, skip=["others"], formats=[RANK])) == {
        "few": few,
        "others": "not in the plan",
    }


def test_patterns_twice_do_nothing_the_second_time():
    model = Model(tied=True)
    formats = {"words": RANK, "i*": tb.LowRank(rank=2)}
    tb.compress_(model, formats)
    before = snapshot(model)
    assert tb.compress_(model, formats).entries == ()
    assert snapshot(model) == before
    model.more = nn.Embedding(2500, 16)
    assert [entry.names for entry in tb.compress_(model, tb.LowRank(rank=2)).entries] == [("more",)]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_what_a_structured_table_cannot_do_is_refused_by_name_before_any_fit(kind, option, monkeypatch):
    model = nn.ModuleDict({"first": nn.Embedding(3000, 8), "words": kind(3000, 8, **option)})
    monkeypatch.setattr("tensorbed.nn.table.fit_table", None)
    (name,) = option
    with pytest.raises(ValueError, match=rf'words has {name}=.*set words\.{name} = .*skip=\["words"\]'):
        tb.compress_(model, RANK)
    assert type(model["first"]) is nn.Embedding


def test_a_sparse_buffer_is_counted_by_what_it_stores():
    """Graphs of recommenders stand in models as such."""
    model = nn.ModuleDict({"user": nn.Embedding(3000, 16)})
    graph = torch.eye(500).to_sparse_coo()
    model.register_buffer("graph", graph)
    with warnings.catch_warnings(action="ignore"):  # torch calls the layout a beta
        model.register_buffer("rows", graph.to_sparse_csr())
    report = tb.compress_(model, tb.TensorTrain(ratio=10), fit=False)
    of_graphs = 500 * (2 * 8 + 4) + (501 + 500) * 8 + 500 * 4
    assert report.bytes_before == 3000 * 16 * 4 + of_graphs
    assert report.bytes_after == sum(p.nbytes for p in model.parameters()) + of_graphs


def test_an_embedding_and_a_bag_that_share_a_table_are_refused_by_name():
    model = nn.ModuleDict({"rows": nn.Embedding(3000, 16), "bags": nn.EmbeddingBag(3000, 16)})
    model["bags"].weight = model["rows"].weight
    with pytest.raises(ValueError, match='bags: shares its weight with a table of other options; use tied="untie"'):
        tb.compress_(model, tb.TensorTrain(ratio=10), fit=False)
    assert type(model["bags"]) is nn.EmbeddingBag
    tb.compress_(model, tb.TensorTrain(ratio=10), fit=False, tied="untie")
    assert type(model["bags"]) is tb.EmbeddingBag


def test_no_format_at_all_is_refused():
    with pytest.raises(TypeError, match=r"format must be a format such as tb\.TensorTrain\(rank=16\), got None"):
        tb.compress_(Model(), None)


def test_an_alias_of_the_model_s_own_is_named_without_a_dot():
    model = nn.Module()
    model.e = nn.Embedding(3000, 16)
    model.w = model.e.weight
    with pytest.raises(ValueError, match=r"^w shares the weight of e "):
        tb.compress_(model, tb.TensorTrain(ratio=10), fit=False)
