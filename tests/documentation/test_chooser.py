"""The form of the page "Which format should I take?": its code does what it says, and what it expects was measured."""

import re

import pytest
import torch
from torch import nn

import tensorbed as tb

pytestmark = pytest.mark.browser

ENCODER, TIED = "compress an encoder", "compress a language model with tied ends"
AGAIN = "arguments[1].removeAttribute('data-ready'); arguments[0].dispatchEvent(new Event('input'))"
TO_TRAIN = ["train a language model", "train a classifier", "train a recommender"]


@pytest.fixture
def ask(browser, address):
    """Fill in the form of a fresh page; the answer as text, and its line of code if there is one."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import Select, WebDriverWait

    browser.get(f"{address}which_format/")
    wait = WebDriverWait(browser, 20)
    wait.until(lambda b: b.find_elements(By.CSS_SELECTOR, "#chooser output[data-ready]"))

    def asked(have, rows, dim, budget, *, unit="ratio", texts=False):
        form = browser.find_element(By.CSS_SELECTOR, "#chooser form")
        output = browser.find_element(By.CSS_SELECTOR, "#chooser output")
        Select(form.find_element(By.NAME, "have")).select_by_value(have)
        Select(form.find_element(By.NAME, "unit")).select_by_value(unit)
        for name, value in (("rows", rows), ("dim", dim), ("budget", budget)):
            field = form.find_element(By.NAME, name)
            field.clear()
            field.send_keys(str(value))
        box = form.find_element(By.NAME, "texts")
        if box.is_displayed() and box.is_selected() != texts:
            box.click()
        # Answers come as soon as the lines are read; one more of the same form comes after all others.
        browser.execute_script(AGAIN, form, output)
        wait.until(lambda b: output.get_attribute("data-ready"))
        lines = output.find_elements(By.CLASS_NAME, "chooser-code")
        return output.text, lines[0].text if lines else None

    return asked


def shown_ratio(text):
    least, number = re.search(r": (at least )?([\d.,]+) times smaller\.", text).groups()
    return bool(least), float(number.replace(",", ""))


def ratio_of(layer):
    """Of what is stored when training is over."""
    return (layer.packed() if hasattr(layer.structure, "packed") else layer).compression_ratio


@pytest.mark.parametrize("have", TO_TRAIN)
@pytest.mark.parametrize(("rows", "dim", "ratio"), [(10_000, 96, 8), (50_000, 64, 30), (25_000, 256, 120.5)])
def test_code_for_training_makes_tables_as_small_as_asked(ask, have, rows, dim, ratio):
    text, code = ask(have, rows, dim, ratio)
    names = {"tb": tb}
    exec(code, names)
    layers = [value for value in names.values() if isinstance(value, (tb.Embedding, tb.EmbeddingBag, tb.Head))]
    assert layers
    at_least, shown = shown_ratio(text)
    assert at_least
    assert shown >= ratio - 0.05
    for layer in layers:
        assert tuple(layer.weight.shape) == (rows, dim)
        assert ratio_of(layer) >= ratio


@pytest.mark.parametrize("have", [ENCODER, TIED])
@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("rows", "dim", "ratio"), [(3000, 48, 3.5), (2500, 96, 5), (4000, 64, 6), (9000, 60, 6.5)])
def test_code_for_trained_tables_makes_them_as_small_as_it_says(ask, have, texts, rows, dim, ratio):
    text, code = ask(have, rows, dim, ratio, texts=texts)
    model = nn.Sequential(nn.Embedding(rows, dim))
    names = {"tb": tb, "model": model, "run": lambda model: model(torch.arange(100))}
    exec(code, names)
    assert ("calibrate" not in code) or texts
    made = 4 * rows * dim / sum(t.nbytes for t in model.state_dict().values())
    assert made >= ratio
    assert shown_ratio(text) == (False, pytest.approx(made, abs=0.051))


@pytest.mark.parametrize(
    ("have", "size", "ratio", "texts", "code", "expected"),
    [
        (ENCODER, (30_522, 384), 3.9, False, "tb.QuantizedRows(bits=8)", "mean cosine 1.0000"),
        (ENCODER, (30_522, 384), 7, False, "tb.HotRows()", "mean cosine 0.9991"),
        (ENCODER, (30_522, 384), 7, True, "tb.HotRows(), calibrate=run", "mean cosine 0.9994"),
        (ENCODER, (30_522, 384), 7.4, False, "tb.ProductQuantized(ratio=7.4)", "mean cosine 0.9990"),
        (ENCODER, (30_522, 384), 14, False, "tb.ProductQuantized(ratio=14)", "mean cosine 0.9871"),
        (TIED, (49_152, 576), 3.9, False, "tb.QuantizedRows(bits=8)", "perplexity 22.99 beside 22.95"),
        (TIED, (49_152, 576), 7, True, "tb.HotRows(), calibrate=run", "perplexity 23.27 beside 22.95"),
        (TIED, (49_152, 576), 14, True, "tb.ProductQuantized(ratio=14), calibrate=run", "perplexity 28.64"),
        ("train a language model", (10_000, 96), 100, False, "TensorTrain", "validation perplexity 36.9 beside 32.8"),
        ("train a recommender", (45_681, 16), 15, False, "tb.LowRank(ratio=15)", "log-loss 0.5889 beside 0.5854"),
        ("train a recommender", (45_681, 16), 40, False, "tb.QuotientRemainder(ratio=40)", "0.6003 beside 0.5854"),
        (
            "train a classifier",
            (17_200, 256),
            100,
            False,
            "tb.TensorRing(ratio=100)",
            "test accuracy 0.407 beside 0.407",
        ),
    ],
)
def test_it_answers_what_the_committed_tables_say(ask, have, size, ratio, texts, code, expected):
    text, line = ask(have, *size, ratio, texts=texts)
    assert code in line
    assert expected in text


def test_a_budget_in_megabytes_is_a_ratio(ask):
    by_ratio, by_size = ask(ENCODER, 30_522, 384, 7), ask(ENCODER, 30_522, 384, 4 * 30_522 * 384 / 7e6, unit="MB")
    assert by_ratio == by_size


def test_it_promises_nothing_that_was_not_measured(ask):
    text, code = ask(ENCODER, 30_522, 384, 300)
    assert code is None
    assert "No format was measured" in text
    text, code = ask("train a classifier", 1_000_000, 64, 5000)
    assert "Nothing was measured" in text
    assert "tb.TensorTrain(ratio=5000)" in code
    text, code = ask("train a recommender", 1_000_000, 64, 5000)
    assert "Nothing was measured" in text
    assert "tb.TensorTrain(ratio=5000)" in code


def test_it_says_what_is_wrong_with_a_size(ask):
    text, code = ask(ENCODER, "", 384, 7)
    assert code is None
    assert "whole numbers" in text
    text, _ = ask(ENCODER, 500, 384, 3)
    assert "below 2,000 rows" in text
