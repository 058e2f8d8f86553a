"""The study of deviations at birth: its page, and one short run of each model."""

import pytest
import torch

from benchmarks.deviation import page, training
from benchmarks.deviation.training import FORMATS, Trial
from experiments.tasks.source_code.corpus import Corpus


def records(losses, **options):
    """A line for each deviation."""
    trial = {"model": "lstm", "use": "embedding", "format": "dense", "lr": 3e-3, **options}
    stds = training.deviations(Trial.dim)
    return [{**Trial(std=std, **trial).record(), "loss": loss} for std, loss in zip(stds, losses, strict=True)]


def test_the_page_tells_how_far_defaults_are_from_the_best():
    lines = records([5.0, 4.5, 4.2, 4.04, 4.0]) + records([5.0, 4.5, 4.2, 4.1, 4.0], format="tt32")
    lines += records([4.4, 4.0, 4.1, 4.2, 5.0], use="head")[:-1]  # not all deviations: not a line
    told = page.page(lines)
    assert "| looked up only, beside a dense head | 0.3 | 1 of 2 | +2.5% | 0 of 2 | +25.0% |" in told
    assert "a head of its own" not in told
    assert "| lstm | 0.003 | 4.000 |  | 4.100 |" in told
    assert (
        "| lstm | embedding | dense | 128 | 0.003 | 0.01 |  | 5.000 | 4.500 | 4.200 | **4.040** | **4.000** |" in told
    )


@pytest.mark.parametrize(("model", "use"), [("lstm", "tied"), ("transformer", "head"), ("bag", "embedding")])
def test_a_short_run(model, use, monkeypatch):
    for name, value in {"VOCABULARY": 60, "STEPS": 3, "VALIDATION_TOKENS": 1024}.items():
        monkeypatch.setattr(training, name, value)
    words = torch.randint(0, 60, (20_000,), generator=torch.Generator().manual_seed(0))
    corpus = Corpus(tuple(map(str, range(60))), words, words[:2000], 1)
    found = training.run(Trial(model, use, "tt8", 0.3, 1e-3), corpus)
    assert 2 < found["loss"] < 8
    assert found["std_after"] == pytest.approx(0.3, rel=0.2)
    assert set(FORMATS) == {"dense", "tt8", "tt32"}
