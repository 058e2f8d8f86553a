from dataclasses import asdict

import pytest

pytest.importorskip("accelerate")

import tensorbed as tb
from experiments.errors import ExperimentError
from experiments.records import append
from experiments.sentiment import task
from experiments.sentiment.run import settle
from experiments.sentiment.train import How, train
from experiments.settings import configured, row_names

# The paper's ratios, over the real vocabulary, cut or rounded to whole numbers; low rank: (I + J) R numbers.
RATIOS = {
    "imdb-tt1": 93, "imdb-tt2": 232, "imdb-tt3": 441, "imdb-tr4": 152, "imdb-tr5": 455, "imdb-tr6": 1042,
    "sst5-tt1": 78, "sst5-tt2": 182, "sst5-tt3": 307, "sst5-tr1": 128, "sst5-tr2": 366, "sst5-tr3": 800,
    "imdb-lr3": 84, "imdb-lr2": 127, "imdb-lr1": 253, "sst5-full": 1, "imdb-full": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "ratio"), RATIOS.items())
def test_rows_have_the_ratios_of_the_paper(name, ratio):
    settings = configured(task.CONFIGS, name, {})
    structure = tb.Embedding(settings.vocabulary, settings.dim, settings.table_format(), device="meta").structure
    assert structure.rows * structure.cols / structure.numel == pytest.approx(ratio, abs=1)


def test_every_run_of_the_tables_has_a_file_and_every_file_a_run():
    assert {f"{dataset}-{row}".lower() for dataset, row, _ in task.runs()} == set(row_names(task.CONFIGS))


def test_the_imdb_rows_of_the_claim_come_first_then_every_sst_row_seed_by_seed():
    order = [(dataset, seed) for dataset, _, seed in task.runs()]
    tables = [("imdb", 0)] * 8 + [("sst5", seed) for seed in range(5) for _ in range(10)]
    assert order == tables + [("sst5", 0)] * 3 + [("sst5", 1)] * 3 + [("imdb", 0)] * 2


def test_rows_differ_in_their_tables_only():
    """Same words, schedule, batches, precision, selection for every row of a dataset."""
    for dataset in ("sst5", "imdb"):
        names = [name for name in row_names(task.CONFIGS) if name.startswith(dataset) and "padded" not in name]
        rows = [configured(task.CONFIGS, name, {}) for name in names]
        tables = {"row", "format", "rank", "shape"}
        same = {tuple((k, v) for k, v in asdict(one).items() if k not in tables) for one in rows}
        assert len(same) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabluary": 20}, r'row.toml: unknown key "vocabluary": did you mean "vocabulary"'),
        ({"dataset": "sst"}, r'row.toml: unknown dataset "sst": did you mean "sst5"'),
        ({"format": "tensor_tain"}, r'unknown format "tensor_tain": did you mean "tensor_train"'),
        ({"rank": "16"}, r"rank = '16' should be int"),
        ({"dropout": 1.5}, r"dropout=1.5: it must be at least 0 and below 1"),
        ({"precision": "fp16"}, r'unknown precision "fp16": did you mean "fp32"|"bf16"'),
        ({"pad_row": "zeros"}, r'unknown pad_row "zeros": did you mean "zero"'),
        ({"batch": 0}, r"batch=0: it must be at least 1"),
        ({"shape": [[4, 5]]}, r"shape = \[\[4, 5\]\] should be two lists"),
    ],
)
def test_a_wrong_row_is_refused_with_the_nearest_right_name(row, changes, message):
    with pytest.raises(ExperimentError, match=message):
        configured(task.CONFIGS, str(row(**changes)), {})


@pytest.mark.parametrize("changes", [{"shape": [[4, 4], [2, 4]]}, {"shape": [[4, 5], [2, 3]]}, {"rank": 0}])
def test_a_table_that_cannot_be_is_refused_before_data_is_read(row, changes):
    settings = configured(task.CONFIGS, str(row(**changes)), {})
    with pytest.raises(ExperimentError, match=r"^sst5 tiny: .*(shape|rank)"):
        train(settings, How(data=None))


def test_an_unknown_row_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(ExperimentError, match=r'unknown row "sst5-tt11": did you mean "sst5-tt1"'):
        configured(task.CONFIGS, "sst5-tt11", {})
    with pytest.raises(ExperimentError, match="does not exist"):
        configured(task.CONFIGS, str(tmp_path / "none.toml"), {})
    (tmp_path / "bad.toml").write_text("rank = [", encoding="utf-8")
    with pytest.raises(ExperimentError, match=r"bad.toml is no TOML file"):
        configured(task.CONFIGS, str(tmp_path / "bad.toml"), {})


def test_options_go_before_the_file_and_the_file_before_defaults(row):
    settings = configured(task.CONFIGS, str(row(dropout=0.25)), {"rank": 3, "lr": None})
    assert (settings.rank, settings.dropout, settings.layers) == (3, 0.25, 2)


def test_the_fingerprint_is_of_the_configuration_not_of_the_seed(row):
    one = configured(task.CONFIGS, str(row()), {"seed": 1})
    assert one.fingerprint() == configured(task.CONFIGS, str(row()), {"seed": 2}).fingerprint()
    assert one.fingerprint() != configured(task.CONFIGS, str(row()), {"lr": 0.5}).fingerprint()


def test_the_best_point_of_a_whole_grid_is_taken_and_the_earlier_of_equals(tmp_path):
    scores = dict(zip(task.GRID, [0.3, 0.4, 0.4, 0.2], strict=True))
    for (rate, std), score in scores.items():
        assert task.found(tmp_path, "sst5", "tensor_train") is None
        tried = {
            "dataset": "sst5",
            "format": "tensor_train",
            "settings": {"lr": rate, "std": std},
            "val_accuracy": score,
        }
        append(tmp_path / task.SEARCH_FILE, tried)
    rate, std = task.GRID[1]
    assert task.found(tmp_path, "sst5", "tensor_train") == (rate, std)
    row = task.with_found("sst5-tt2", {}, tmp_path)
    assert (row.lr, row.std) == (rate, std)
    assert task.with_found("sst5-tt2", {"lr": 0.5}, tmp_path).lr == 0.5
    assert task.with_found("sst5-full", {}, tmp_path).lr == 1e-3


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
def test_a_row_that_was_changed_has_another_name(tmp_path, config, options, name):
    assert settle(config, options, tmp_path, smoke=False, search=False).row == name
