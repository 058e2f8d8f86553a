import json
from dataclasses import asdict
from pathlib import Path

import pytest
from laboratory import tried_line, try_point

pytest.importorskip("accelerate")

import tensorbed as tb
from experiments.lab.errors import ExperimentError
from experiments.lab.records import append, read
from experiments.lab.rows import Bench, configured, row_names
from experiments.lab.settings import recorded
from experiments.lab.task import find
from experiments.lab.training import How, train

TASK = find("sentiment")
PLAN = Bench(TASK, Path()).plan
POINTS = PLAN.search("sst5").points

# The paper's ratios, over the real vocabulary, cut or rounded to whole numbers; low rank: (I + J) R numbers.
RATIOS = {
    "imdb-tt1": 93, "imdb-tt2": 232, "imdb-tt3": 441, "imdb-tr4": 152, "imdb-tr5": 455, "imdb-tr6": 1042,
    "sst5-tt1": 78, "sst5-tt2": 182, "sst5-tt3": 307, "sst5-tr1": 128, "sst5-tr2": 366, "sst5-tr3": 800,
    "imdb-lr3": 84, "imdb-lr2": 127, "imdb-lr1": 253, "sst5-full": 1, "imdb-full": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "ratio"), RATIOS.items())
def test_rows_have_the_ratios_of_the_paper(name, ratio):
    settings = configured(TASK, name, {})
    structure = tb.Embedding(
        settings.vocabulary, settings.dim, settings.table_format(settings.vocabulary, settings.dim), device="meta"
    ).structure
    assert structure.rows * structure.cols / structure.numel == pytest.approx(ratio, abs=1)


def test_every_run_of_the_tables_has_a_file_and_every_file_a_run():
    assert {f"{dataset}-{row}".lower() for dataset, row, _ in PLAN.runs} == set(row_names(TASK))


def test_the_imdb_rows_of_the_claim_come_first_then_every_sst_row_seed_by_seed():
    order = [(dataset, seed) for dataset, _, seed in PLAN.runs]
    tables = [("imdb", 0)] * 8 + [("sst5", seed) for seed in range(10) for _ in range(10)]
    beside = [("sst5", seed) for seed in range(2) for _ in range(3)] + [("sst5", s) for s in range(5) for _ in range(4)]
    assert order == tables + beside + [("imdb", 0)] * 2


def test_rows_differ_in_their_tables_only():
    """Same words, schedule, batches, precision, selection for every row of a dataset."""
    for dataset in ("sst5", "imdb"):
        names = [name for name in row_names(TASK) if name.startswith(dataset) and name.count("-") == 1]
        rows = [configured(TASK, name, {}) for name in names]
        tables = {"row", "format", "rank", "shape"}
        same = {tuple((k, v) for k, v in asdict(one).items() if k not in tables) for one in rows}
        assert len(same) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabluary": 20}, r'row.toml: unknown key "vocabluary": did you mean "vocabulary"'),
        ({"dataset": "sst"}, r'row.toml: unknown dataset "sst": did you mean "sst5"'),
        ({"format": "tensor_tain"}, r'unknown format "tensor_tain": did you mean "tensor_train"'),
        ({"format": "tt(4)"}, r"format tt\(4\): what stands in brackets needs a name, as in tt\(order=4\)"),
        ({"format": "tt(order=4)", "ratio": 8.0}, r"rank=2 and ratio=8.0 both set the size; give one"),
        ({"format": "hot"}, r'unknown format "hot"'),
        ({"format": "straight_through"}, r'rank=2: format "straight_through" has none; give a --format that has one: '),
        ({"optimizer": "adamm"}, r'unknown optimizer "adamm": did you mean "adam'),
        ({"rank": "16"}, r"rank = '16' should be int"),
        ({"dropout": 1.5}, r"dropout=1.5: it must be at least 0 and below 1"),
        ({"precision": "fp16"}, r'unknown precision "fp16": did you mean "(fp32|bf16)"'),
        ({"pad_row": "zeros"}, r'unknown pad_row "zeros": did you mean "zero"'),
        ({"rank": 0}, r"rank=0: it must be at least 1"),
        ({"format": "full"}, r"rank=2: a full table has none"),
        ({"format": "lr"}, r'shape=.*: format "low_rank" has none'),
        ({"vocabulary": 2}, r"vocabulary=2: it must be at least 3"),
        ({"row": "../up"}, r"row='../up': a name of letters"),
        ({"batch": 0}, r"batch=0: it must be at least 1"),
        ({"max_tokens": -5}, r"max_tokens=-5: it must be at least 1"),
        ({"train_limit": 0}, r"train_limit=0: it must be at least 1"),
        ({"clip": 0.0}, r"clip=0.0: it must be above 0 and finite"),
        ({"std": -1.0}, r"std=-1.0: it must be above 0 and finite"),
        ({"seed": -1}, r"seed=-1: it must be at least 0"),
        ({"shape": [[4, 5]]}, r"shape = \[\[4, 5\]\] should be two lists"),
    ],
)
def test_a_wrong_row_is_refused_with_the_nearest_right_name(sentiment_row, changes, message):
    with pytest.raises(ExperimentError, match=message):
        configured(TASK, str(sentiment_row(**changes)), {})


@pytest.mark.parametrize(
    "changes", [{"shape": [[4, 4], [2, 4]]}, {"shape": [[4, 5], [2, 3]]}, {"shape": [[4, 5], [2, 4.5]]}]
)
def test_a_table_that_cannot_be_is_refused_before_data_is_read(sentiment_row, changes):
    settings = configured(TASK, str(sentiment_row(**changes)), {})
    with pytest.raises(ExperimentError, match=r"^sst5 tiny: .*(shape|rank)"):
        train(TASK, settings, How(data=None))


def test_an_unknown_row_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ExperimentError, match=r'unknown row "sst5-tt11": did you mean "sst5-tt1"'):
        configured(TASK, "sst5-tt11", {})
    with pytest.raises(ExperimentError, match="does not exist"):
        configured(TASK, str(tmp_path / "none.toml"), {})
    (tmp_path / "bad.toml").write_text("rank = [", encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"bad.toml is no TOML file"):
        configured(TASK, str(tmp_path / "bad.toml"), {})


def test_another_format_leaves_rank_and_shape_of_the_file_behind(sentiment_row, bench):
    settings = configured(TASK, str(sentiment_row()), {"format": "full"})
    assert (settings.rank, settings.shape) == (None, None)
    settings = configured(TASK, str(sentiment_row()), {"format": "lr", "rank": 3})
    assert (settings.format, settings.rank, settings.shape) == ("low_rank", 3, None)
    assert configured(TASK, str(sentiment_row()), {"format": "tensor_train"}).shape is not None
    with pytest.raises(ExperimentError, match='unknown dataset "imbd": did you mean "imdb"'):
        bench.settle(None, {"dataset": "imbd"})


def test_a_seed_may_stand_in_the_file(sentiment_row, bench):
    assert bench.settle(str(sentiment_row(seed=5)), {}).seed == 5
    assert bench.settle(str(sentiment_row(seed=5)), {"seed": 6}).seed == 6


def test_options_go_before_the_file_and_the_file_before_defaults(sentiment_row):
    settings = configured(TASK, str(sentiment_row(dropout=0.25)), {"rank": 3, "lr": None})
    assert (settings.rank, settings.dropout, settings.layers) == (3, 0.25, 2)


def test_the_fingerprint_is_of_the_configuration_not_of_the_seed(sentiment_row):
    one = configured(TASK, str(sentiment_row()), {"seed": 1})
    assert one.fingerprint() == configured(TASK, str(sentiment_row()), {"seed": 2}).fingerprint()
    assert one.fingerprint() != configured(TASK, str(sentiment_row()), {"lr": 0.5}).fingerprint()


def test_the_best_point_of_a_whole_grid_is_taken_and_the_earlier_of_equals(bench):
    scores = dict(zip(POINTS, [0.3, 0.4, 0.4, 0.2, 0.2, 0.1, 0.1, 0.1], strict=True))
    for point, score in scores.items():
        assert bench.best("sst5", "tensor_train") is None
        try_point(bench, "sst5", "tensor_train", point, score)
    rate, std = POINTS[1]
    assert bench.best("sst5", "tensor_train") == {"lr": rate, "std": std}
    row = bench.with_best("sst5-tt2", {})
    assert (row.lr, row.std) == (rate, std)
    assert bench.with_best("sst5-full", {}).lr == 1e-3


def test_a_point_is_as_good_as_the_mean_over_its_seeds(bench):
    first, second, *others = POINTS
    for point in others:
        try_point(bench, "sst5", "tensor_train", point, 0.1)
    try_point(bench, "sst5", "tensor_train", first, 0.5, 0.2, 0.2)
    try_point(bench, "sst5", "tensor_train", second, 0.4, 0.4)
    assert bench.best("sst5", "tensor_train") is None  # a seed is missing
    append(bench.file("search"), tried_line(bench, "sst5", "tensor_train", second, 0.4, seed=2))
    assert bench.best("sst5", "tensor_train") == {"lr": second[0], "std": second[1]}
    assert bench.points("sst5", "tensor_train")[first] == pytest.approx(0.3)


def searched(bench, best):
    """A whole grid of tensor trains on SST-5."""
    for point in POINTS:
        try_point(bench, "sst5", "tensor_train", point, 0.5 if point == best else 0.4)


def test_what_was_found_goes_below_the_rows_own_file_and_the_options(sentiment_row, bench):
    best = (2e-3, 1.0)
    searched(bench, best)
    told = [
        ("sst5-tt1", {}, best),
        ("sst5-tt1", {"lr": 0.5}, (0.5, 1.0)),
        ("sst5-tt1", {"std": 0.5}, (2e-3, 0.5)),
        ({"lr": 0.01}, {}, (0.01, 1.0)),
        ({"lr": 0.01, "std": 0.3}, {}, (0.01, 0.3)),
    ]
    for config, options, wanted in told:
        name = str(sentiment_row(**config)) if isinstance(config, dict) else config
        settings = bench.settle(name, options)
        assert (settings.lr, settings.std) == wanted
    assert bench.settle("sst5-tt1", {"lr": 2e-3}).row == "TT1"


def test_points_tried_with_other_settings_do_not_count(bench):
    searched(bench, POINTS[0])
    lines = read(bench.file("search"))
    assert bench.best("sst5", "tensor_train") == {"lr": POINTS[0][0], "std": POINTS[0][1]}
    lines[0]["settings"]["epochs"] += 1
    bench.file("search").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench.best("sst5", "tensor_train") is None


def test_settings_come_back_from_a_line_of_results():
    settings = configured(TASK, "sst5-tr2", {"seed": 3, "std": 0.5})
    line = json.loads(json.dumps({"settings": settings.as_record()}))
    assert recorded(TASK.settings, line) == settings
    assert recorded(TASK.settings, {"settings": {**line["settings"], "gone": 1}}) is None
    assert recorded(TASK.settings, {}) is None
    before = {name: value for name, value in line["settings"].items() if name != "pad_to"}
    assert recorded(TASK.settings, {"settings": before}) == settings


def test_a_smoke_run_has_a_name_of_its_own(bench):
    real, tiny = (bench.settle("sst5-tt1", {}, tiny=smoke) for smoke in (False, True))
    assert real.row != tiny.row


def test_what_was_asked_for_goes_before_what_is_tiny(bench):
    tiny = bench.settle("sst5-tt1", {"hidden": 24}, tiny=True)
    assert (tiny.hidden, tiny.row) == (24, "TT1-hidden=24-smoke")
    assert tiny.examples == bench.settle("sst5-tt1", {}, tiny=True).examples


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        ("sst5-tt1", {"seed": 3}, "TT1"),
        ("sst5-tt1", {"rank": 16, "precision": "bf16"}, "TT1"),
        ("sst5-tt1", {"rank": 8, "epochs": 2}, "TT1-rank=8-epochs=2"),
        (None, {"format": "tt", "rank": 4}, "tensor_train-rank4"),
        (None, {}, "full"),
    ],
)
def test_a_row_that_was_changed_has_another_name(config, options, name, bench):
    assert bench.settle(config, options).row == name
