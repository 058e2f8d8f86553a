"""Plans: what is chosen for which table under a budget."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.compress.planning import _chosen, parsed_bytes
from tensorbed.compress.report import Option


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    easy = torch.randn(3000, 2) @ torch.randn(2, 16)  # of rank two
    made = nn.ModuleDict({"easy": nn.Embedding.from_pretrained(easy), "hard": nn.Embedding(2500, 16)})
    made["small"], made["again"] = nn.Embedding(10, 16), nn.Embedding(2500, 16)
    made["again"].weight = made["hard"].weight
    return made


FEW = (tb.QuantizedRows(bits=8), tb.QuantizedRows(bits=4), tb.LowRank(rank=2), tb.ProductQuantized(parts=4))


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 6])
def test_plans_keep_their_budget_with_the_error_where_it_hurts_least(model, ratio):
    plan = tb.plan(model, ratio=ratio, formats=FEW)
    assert list(plan) == ["easy", "hard"]
    assert plan.bytes <= 4 * 16 * 5500 / ratio
    if ratio == 1:
        assert plan["easy"] is plan["hard"] is None
    if ratio >= 2:
        assert plan["easy"] == tb.LowRank(rank=2)  # the same table in eight times fewer bytes
        assert plan.chosen["easy"].error < 1e-3
    if ratio >= 3:
        assert not isinstance(plan["hard"], tb.LowRank)


def test_what_was_planned_is_what_compressing_gives(model):
    fresh = nn.ModuleDict(
        {"easy": nn.Embedding(3000, 16), "hard": nn.Embedding(2500, 16), "small": nn.Embedding(10, 16)}
    )
    fresh["easy"].load_state_dict(model["easy"].state_dict())
    fresh["hard"].load_state_dict(model["hard"].state_dict())
    plan = tb.plan(fresh, budget="100 KB", formats=FEW)
    report = tb.compress_(fresh, plan)
    by_name = {entry.names[0]: entry for entry in report.entries}
    for name, option in plan.chosen.items():
        if plan[name] is not None:
            assert by_name[name].bytes_after == option.bytes
            assert by_name[name].error == pytest.approx(option.error, rel=1e-6)
    assert type(fresh["small"]) is nn.Embedding


def test_a_sample_tells_the_error_of_a_large_table():
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(20_000, 8)})
    formats = (tb.QuantizedRows(bits=4, group=8), tb.LowRank(ratio=2), tb.ProductQuantized(parts=2))
    plan = tb.plan(model, ratio=1, formats=formats)
    for option in plan.options["words"][1:]:
        real = tb.Embedding.from_pretrained(model["words"].weight.detach(), option.format)
        assert option.error == pytest.approx(real.fit_error, rel=0.1)
        assert option.ratio == pytest.approx(real.compression_ratio, rel=1e-6)


def test_a_few_parts_tell_the_error_of_many_however_unlike_they_are():
    torch.manual_seed(0)
    table = torch.randn(1000, 64)
    table[:, 7] += 20  # most of the norm and none of the error
    table[:, 20:30] *= 3
    table[:, 40:] = table[:, 40:].sign() * table[:, 40:] ** 4
    format = tb.ProductQuantized(parts=32, sweeps=2)
    (_, option) = tb.plan(tables(words=table), ratio=1, formats=[format], min_rows=1).options["words"]
    assert option.error == pytest.approx(tb.Embedding.from_pretrained(table, format).fit_error, rel=0.05)


def test_hot_rows_of_a_sample_are_those_of_its_table():
    torch.manual_seed(0)
    table = torch.randn(40_000, 16)
    table[:2400] *= 10
    (_, option) = tb.plan(tables(words=table), ratio=1, formats=[tb.HotRows()]).options["words"]
    assert option.error == pytest.approx(tb.Embedding.from_pretrained(table, tb.HotRows()).fit_error, rel=0.02)


def test_little_is_fitted_once_each_and_shown(monkeypatch):
    fitted, steps = [], []

    def fit(sample, format):
        fitted.append((sample.shape, format))
        return SimpleNamespace(error=0.1)

    monkeypatch.setattr("tensorbed.compress.planning.fit_table", fit)
    monkeypatch.setattr("tensorbed.compress.planning.track", lambda work, label: steps.extend(work) or work)
    formats = [tb.ProductQuantized(ratio=6), tb.ProductQuantized(ratio=7), tb.LowRank(ratio=4), tb.HotRows()]
    model = nn.ModuleDict({"words": nn.Embedding(50_000, 128), "ids": nn.Embedding(2500, 128)})
    plan = tb.plan(model, ratio=1, formats=formats)
    assert all(option.error == 0.1 for table in plan.options.values() for option in table[1:])
    assert len(steps) == 7
    # Both ratios give words the same parts.
    assert fitted[:2] == [((32_768, 32), tb.ProductQuantized(parts=16)), ((16_384, 128), tb.LowRank(rank=31))]
    assert fitted[2] == ((8192, 128), tb.HotRows())
    assert [shape[0] for shape, _ in fitted[3:]] == 4 * [2500]


def test_training_from_scratch_takes_trains_of_equal_ratio():
    plan = tb.plan({"a": (100_000, 64), "b": (1_000_000, 64)}, ratio=60, purpose="train")
    assert plan.bytes <= plan.allowed
    assert all(isinstance(format, tb.TensorTrain) for format in plan.values())
    assert plan["a"].ratio == plan["b"].ratio or {plan["a"].ratio, plan["b"].ratio} == {32, 64}
    assert all(option.error is None for option in plan.chosen.values())


def test_a_budget_out_of_reach_is_refused_with_the_least_there_is(model, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("tensorbed.compress.planning.fit_table", None)  # known before anything is measured
        with pytest.raises(ValueError, match=r"^A budget of 10 bytes is out of reach: .*, a ratio of ") as caught:
            tb.plan(model, budget=10, formats=FEW)
    least = int(re.search(r"take ([\d,]+) bytes at the least", str(caught.value))[1].replace(",", ""))
    assert tb.plan(model, budget=least, formats=FEW).bytes == least
    with pytest.raises(ValueError, match=f"take {least:,} bytes at the least"):
        tb.plan(model, budget=least - 1, formats=FEW)


@pytest.mark.parametrize("asked", ["10B", "1.5 kB", " 0.25KiB ", "0.0001 mb", "0.000001GiB", 1000.0, 64.5], ids=str)
def test_what_is_out_of_reach_is_told_as_it_was_asked_for_and_what_is_told_can_be_had(asked):
    sizes = {"a": (50_000, 16), "b": (30_000, 8)}
    given = {"ratio": asked} if isinstance(asked, float) else {"budget": asked}
    formats = [tb.LowRank(rank=1)]
    with pytest.raises(ValueError, match="is out of reach") as caught:
        tb.plan(sizes, formats=formats, **given)
    said = str(caught.value)
    if isinstance(asked, float):
        assert said.startswith(f"A ratio of {asked:g} is out of reach: ")
        given = {"ratio": float(re.search(r"become ([\d.]+) times smaller at the most", said)[1])}
    else:
        assert said.startswith(f"A budget of {asked.strip()} is out of reach: ")
        assert asked.strip().lstrip("0123456789. ") in re.search(r"take (.*) at the least", said)[1]
        given = {"budget": re.search(r"take (.*) at the least", said)[1]}
    assert tb.plan(sizes, formats=formats, **given).bytes == 4 * (50_000 + 16 + 30_000 + 8)


class Ends(nn.Module):
    """Two ends that share a table, one bag, and a head of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.again = nn.Embedding(3000, 16, padding_idx=3), nn.Embedding(3000, 16, padding_idx=3)
        self.ids, self.head = nn.EmbeddingBag(2500, 16), nn.Linear(16, 3000)
        self.again.weight = self.head.weight = self.words.weight
        self.other = nn.Linear(32, 2500, bias=False)


@pytest.mark.parametrize("formats", [FEW, (tb.LowRank(ratio=4), tb.TensorTrain(ratio=8), tb.ProductQuantized(ratio=8))])
def test_ties_bags_heads_and_padding_are_planned_as_they_are_compressed(formats):
    model = Ends()
    plan = tb.plan(model, ratio=4, formats=formats)
    assert list(plan) == ["words", "ids", "other"]
    report = tb.compress_(model, plan)
    assert model.again is model.words
    assert model.head.is_tied
    sizes = {entry.names[0]: entry.bytes_after for entry in report.entries}
    assert sizes == {name: one.bytes for name, one in plan.chosen.items() if plan[name] is not None}


def stored(model, plan, **options):
    return sum(entry.bytes_after for entry in tb.compress_(model, plan, **options).entries)


def test_tables_that_are_untied_are_counted_each():
    plan = tb.plan(Ends(), ratio=4, formats=FEW, tied="untie")
    assert list(plan) == ["words", "again", "head", "ids", "other"]
    assert plan.allowed == 4 * (3000 * 16 + 2500 * 16 + 2500 * 32) / 4  # what is shared takes its bytes once
    assert stored(Ends(), plan, tied="untie") == plan.bytes <= plan.allowed
    assert f"{plan.dense / plan.bytes:.1f}" in str(plan).splitlines()[len(plan) + 1]


def test_heads_that_stay_are_not_counted():
    with pytest.raises(ValueError, match=r"head\.weight shares the weight of words"):
        tb.plan(Ends(), ratio=4, formats=FEW, include_heads=False)
    plan = tb.plan(Ends(), ratio=4, formats=FEW, include_heads=False, tied="untie")
    assert list(plan) == ["words", "again", "ids"]
    assert stored(Ends(), plan, tied="untie", include_heads=False) == plan.bytes


def options(*pairs):
    """Of given sizes and errors."""
    return tuple(Option(tb.LowRank(rank=size), size, 1.0, error) for size, error in pairs)


def test_bytes_that_are_left_are_spent_on_less_error():
    one = options((100, 0.0), (50, 0.5), (10, 0.55))
    assert _chosen({"a": one}, 60)["a"].error == 0.5
    assert _chosen({"a": one}, 49)["a"].error == 0.55
    # Giving one back makes room for no other; the one that gains most is first.
    both = _chosen({"a": one, "b": options((100, 0.0), (50, 0.3), (10, 0.6))}, 70)
    assert [option.error for option in both.values()] == [0.55, 0.3]


def tables(**weights):
    return nn.ModuleDict({name: nn.Embedding.from_pretrained(weight) for name, weight in weights.items()})


@pytest.mark.parametrize("ratio", [1.5, 3, 4.5, 7])
def test_neither_scales_nor_the_order_of_tables_decide(ratio):
    torch.manual_seed(0)
    weight, other = torch.randn(2500, 16), torch.rand(3000, 16)
    formats = (tb.QuantizedRows(bits=8), tb.QuantizedRows(bits=4), tb.LowRank(rank=4), tb.LowRank(rank=2))
    there = tb.plan(tables(a=weight, b=1000 * weight), ratio=ratio, formats=formats)
    back = tb.plan(tables(b=1000 * weight, a=weight), ratio=ratio, formats=formats)
    turned = tb.plan(tables(a=1000 * weight, b=weight), ratio=ratio, formats=formats)
    assert dict(there) == dict(back) == dict(turned)
    assert there.chosen["a"].bytes <= there.chosen["b"].bytes  # the first name gives up first
    plain = tb.plan(tables(a=weight, b=other), ratio=ratio, formats=formats)
    assert dict(plain) == dict(tb.plan(tables(b=1000 * other, a=weight), ratio=ratio, formats=formats))


@pytest.mark.parametrize("noise", [-1e-6, 0.0, 1e-6])
@pytest.mark.parametrize(
    ("pairs", "allowed", "sizes"),
    [
        (((100, 0.0), (50, 0.3), (10, 0.5)), 150, (50, 100)),
        (((100, 0.0), (50, 0.3), (10, 0.5)), 60, (10, 50)),
        (((100, 0.0), (90, 0.2), (10, 0.21)), 105, (10, 90)),  # of what is left after the last step
        (((100, 0.0), (10, 1e-6)), 110, (10, 100)),  # what is lost is rounding alone
    ],
)
def test_ties_go_by_name(noise, pairs, allowed, sizes):
    here, there = options(*pairs), options(pairs[0], *((size, error + noise) for size, error in pairs[1:]))
    for choice in (_chosen({"a": here, "b": there}, allowed), _chosen({"b": there, "a": here}, allowed)):
        assert (choice["a"].bytes, choice["b"].bytes) == sizes


def test_rules_do_not_go_by_the_order_of_tables_either():
    sizes = {"b": (100_000, 64), "a": (100_000, 64)}
    plans = [tb.plan(dict(order), ratio=40, purpose="train") for order in (sizes.items(), reversed(sizes.items()))]
    assert dict(plans[0]) == dict(plans[1])
    assert (plans[0]["a"].ratio, plans[0]["b"].ratio) == (40, 40)


def language_model(tied=True):
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(3000, 64), "head": nn.Linear(64, 3000, bias=False)})
    if tied:
        model.head.weight = model.words.weight
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_heads_take_formats_that_suit_them(tied):
    plan = tb.plan(language_model(tied), ratio=6)
    scoring = "words" if tied else "head"
    assert all(option.format.suits_heads for option in plan.options[scoring])
    assert tied or not all(option.format.suits_heads for option in plan.options["words"])


def test_heads_are_not_spoilt_without_being_told():
    with pytest.raises(ValueError, match=r"spoil the scores of a vocabulary head: words\. careful=False weighs"):
        tb.plan(language_model(), ratio=8)
    plan = tb.plan(language_model(), ratio=8, careful=False)
    assert not plan["words"].suits_heads
    assert tb.plan(language_model(), ratio=8, formats=[tb.LowRank(ratio=8)])["words"] == tb.LowRank(ratio=8)
    assert tb.plan(nn.ModuleDict({"words": nn.Embedding(3000, 64)}), ratio=8).bytes <= 3000 * 64 * 4 / 8


def test_formats_of_formats_suit_heads_where_both_do():
    assert tb.HotRows().suits_heads
    assert not tb.HotRows(rest=tb.LowRank(rank=2)).suits_heads


def test_trains_have_the_ratio_asked_for():
    plan = tb.plan({"words": (267_735, 512)}, ratio=50, purpose="train")
    assert 50 <= plan.chosen["words"].ratio < 52
    assert plan.notes == []


def test_a_ratio_that_is_overshot_is_told():
    model = nn.ModuleDict({"words": nn.Embedding(5000, 64)})
    plan = tb.plan(model, ratio=8, formats=[tb.QuantizedRows(bits=8), tb.LowRank(rank=6)])
    low, high = (option.ratio for option in plan.options["words"][1:])
    assert plan.notes == [
        f"8 times smaller was asked for; the formats weighed make the tables {low:.3g} or {high:.3g} times smaller, "
        f"and nothing between: {high:.3g} was taken."
    ]
    assert tb.plan(model, ratio=3.5, formats=[tb.QuantizedRows(bits=8), tb.LowRank(rank=6)]).notes == []


def test_hot_rows_are_weighed():
    assert tb.HotRows() in tb.HotRows.candidates(7)
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(3000, 64)})
    plan = tb.plan(model, ratio=6, formats=(tb.QuantizedRows(bits=4, group=32), tb.HotRows()))
    assert plan["words"] == tb.HotRows()


def test_a_format_that_suits_some_tables_is_left_out_for_the_others():
    torch.manual_seed(0)
    model = nn.ModuleDict({"even": nn.Embedding(3000, 16), "odd": nn.Embedding(3000, 9)})
    parts, rows = tb.ProductQuantized(parts=8), tb.QuantizedRows(bits=8)
    options = tb.plan(model, ratio=1.5, formats=[parts, rows]).options
    assert [option.format for option in options["even"][1:]] == [parts, rows]
    assert [option.format for option in options["odd"][1:]] == [rows]
    with pytest.raises(ValueError, match="odd: parts=8 does not divide embedding_dim=9"):
        tb.plan(model, ratio=1.5, formats=[parts])
    with pytest.raises(ValueError, match="has no size before it is fitted"):
        tb.plan(model, ratio=1.5, formats=[tb.LowRank(rel_error=0.1), rows])


def test_a_table_too_small_for_any_format_stays():
    plan = tb.plan({"large": (100_000, 64), "tiny": (8, 8)}, ratio=10, formats=[tb.TensorTrain(ratio=16)])
    assert plan["tiny"] is None
    assert plan["large"] == tb.TensorTrain(ratio=16)


def test_tables_may_be_left_out():
    model = Ends()
    plan = tb.plan(model, ratio=4, formats=FEW, skip=["ids", "oth*"])
    assert list(plan) == ["words"]
    assert tb.compress_(model, plan).left == {"ids": "not in the plan"}
    with pytest.raises(
        ValueError, match=r"there is nothing to plan: words \(compressed already\).*ids \(left out by skip"
    ):
        tb.plan(model, ratio=4, skip=["ids", "other"])


def test_a_sample_tells_the_error_of_a_train_too():
    torch.manual_seed(0)
    model = nn.ModuleDict({"words": nn.Embedding(30_000, 16)})
    (_, option) = tb.plan(model, ratio=1, formats=[tb.TensorTrain(ratio=4)]).options["words"]
    real = tb.Embedding.from_pretrained(model["words"].weight.detach(), option.format)
    assert option.error == pytest.approx(real.fit_error, rel=0.05)


def test_plans_as_text_dict_and_picture(model, tmp_path):
    plan = tb.plan(model, ratio=3, formats=FEW)
    assert "LowRank(rank=2)" in str(plan)
    found = json.loads(json.dumps(plan.to_dict()))
    assert found["tables"]["hard"]["rows"] == 2500
    frontier = plan.frontier()
    ratios = [ratio for ratio, _ in frontier.points("hard")]
    errors = [error for _, error in frontier.points("hard")]
    assert ratios == sorted(ratios)
    assert errors == sorted(errors)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    frontier.figure().savefig(tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 10_000


def test_skipped_tables_are_not_counted(model):
    found = tb.plan(model, ratio=4, formats=FEW, skip=["h*", "again"])
    assert set(found) == {"easy"}
    assert found.allowed == 3000 * 16 * 4 / 4


def test_formats_are_shown_as_one_writes_them():
    shown = [tb.QuantizedRows(), tb.QuantizedRows(bits=4, group=16), tb.ProductQuantized(ratio=8), tb.LowRank(rank=2)]
    assert [eval(repr(format), vars(tb)) for format in shown] == shown
    assert [repr(format) for format in shown[:3]] == [
        "QuantizedRows(bits=8)",
        "QuantizedRows(bits=4, group=16)",
        "ProductQuantized(ratio=8)",
    ]


@pytest.mark.parametrize(
    ("text", "count"), [("20MB", 20_000_000), ("1.5 gb", 1_500_000_000), ("512 KiB", 2**19), (7, 7), ("9", 9)]
)
def test_budgets(text, count):
    assert parsed_bytes(text) == count


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda m: tb.plan(m), ValueError, "give a budget"),
        (lambda m: tb.plan(m, budget=3, ratio=3), ValueError, "and not both"),
        (lambda m: tb.plan(m, ratio=0), ValueError, "ratio=0"),
        (lambda m: tb.plan(m, budget="20 apples"), ValueError, "give bytes such as"),
        (lambda m: tb.plan(m, budget="0MB"), ValueError, "budget=0"),
        (lambda m: tb.plan(m, ratio=2, purpose="fun"), ValueError, 'choose "pretrained" or "train"'),
        (lambda m: tb.plan(nn.Linear(2, 2), ratio=2), ValueError, "nothing to plan: the model has no torch.nn.Emb"),
        (lambda m: tb.plan(3, ratio=2), TypeError, "takes a model or sizes"),
        (lambda m: tb.plan({"a": (0, 3)}, ratio=2), ValueError, "rows of a=0"),
        (lambda m: tb.plan({"a": 5}, ratio=3), TypeError, r"a=5: give rows and columns, \(rows, cols\)"),
        (lambda m: tb.plan({"a": (5, 6, 7)}, ratio=3), TypeError, "give rows and columns"),
        (lambda m: tb.plan({"a": "55"}, ratio=3), TypeError, "give rows and columns"),
        (lambda m: tb.plan({"a": (10**23, 16)}, ratio=3), ValueError, "a: 1e.23 x 16 numbers are more than"),
        (lambda m: tb.plan(m, ratio=3, formats=[]), ValueError, "formats is empty"),
        (lambda m: tb.plan(m, ratio=3, formats=[tb.QuantizedRows]), TypeError, r"such as QuantizedRows\(\)"),
        (lambda m: tb.plan(m, ratio=3, formats=tb.HotRows()), TypeError, "formats=.*give a list"),
        (lambda m: tb.plan(m, ratio=3, skip="hard"), TypeError, "skip='hard': give a list of patterns"),
        (lambda m: tb.plan(m, ratio=3, min_rows="many"), TypeError, "min_rows must be an int"),
        (lambda m: tb.plan(m, ratio=3, tied="yes"), ValueError, "tied='yes': choose"),
    ],
)
def test_refusals(model, use, error, match):
    with pytest.raises(error, match=match):
        use(model)
