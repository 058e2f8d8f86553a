"""Translations by beams: what they find, when they end, and by what the steps are scored."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from translators import FULL, SOURCE, TRAIN, model_of, settings

from experiments.tasks.translation import commands
from experiments.tasks.translation.data import Sentences
from experiments.tasks.translation.model import END, PAD, Translator, scored_by_table


@pytest.mark.parametrize("table", [FULL, TRAIN], ids=["full", "tt"])
def test_one_beam_takes_the_likeliest_token_again_and_again(table):
    model = model_of(**table)
    with torch.no_grad():
        (found,) = model(SOURCE[:1, :4], beams=1).tolist()
        given = [END]
        for _ in found:
            logits = model.marian(input_ids=SOURCE[:1, :4], decoder_input_ids=torch.tensor([given])).logits
            given.append(int(logits[0, -1].argmax()))
            if given[-1] == END:
                break
    assert found[: len(given) - 1] == given[1:]


def test_beams_find_translations_that_are_at_least_as_likely():
    def likelihood(beams):
        written = model(SOURCE[:1, :4], beams=beams)
        ended = (written == END).int().cumsum(1) - (written == END).int() > 0
        return -model(SOURCE[:1, :4], written.masked_fill(ended, PAD)).item()

    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            model = Translator(settings(positions=6), 20).eval()
            assert likelihood(8) >= likelihood(1) - 1e-4


@pytest.mark.parametrize("beams", [1, 4])
def test_no_translation_is_empty(beams):
    """Beams without a length penalty found the end likelier than a sentence of a dozen tokens."""
    model = model_of()
    model.marian.final_logits_bias[0, END] = 50.0
    translated = model(SOURCE, beams=beams)
    assert (translated[:, 0] != END).all()
    assert (translated[:, 1:] == END).all()


@torch.no_grad()
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_steps_multiply_with_the_table_where_the_head_would_do_more(low):
    h = torch.randn(3, 2, 8)

    def scores(**table):
        marian = model_of(vocabulary=280, **table).marian
        head = marian.lm_head
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            expected = head(h)
            with scored_by_table(marian, 6):
                by_table, given, outer = marian.lm_head is not head, marian.lm_head(h), marian.lm_head
                with scored_by_table(marian, 6):
                    assert marian.lm_head is outer  # no second table
                assert marian.lm_head is outer
        told, near = head.explain(6), 0.02 if low else 1e-5
        assert given.dtype == expected.dtype
        torch.testing.assert_close(given, expected, rtol=near, atol=near)
        assert marian.lm_head is head
        assert by_table == (told.multiply_adds > told.multiply_adds_dense)
        with pytest.raises(ZeroDivisionError), scored_by_table(marian, 6):
            raise ZeroDivisionError
        assert marian.lm_head is head
        return by_table

    assert scores(format="tt", rank=12)
    assert not scores(format="lr", rank=2)
    assert not scores(**FULL)


@torch.no_grad()
def test_beams_end_when_nothing_likelier_can_come():
    """As many beams as translations had to end before, though only the best one is asked for."""

    def written(model):
        steps = []
        with model.marian.register_forward_hook(lambda *_: steps.append(1)):
            return model(SOURCE, beams=4).tolist(), len(steps)

    saved = 0
    for seed in range(5):
        torch.manual_seed(seed)
        model = Translator(settings(positions=30, std=1.0), 20).eval()
        model.marian.final_logits_bias[0, END] = 2.0
        mine, few = written(model)
        del model.marian._check_early_stop_heuristic  # so that transformers' own is taken
        own, many = written(model)
        width = max(len(own[0]), len(mine[0]))
        assert [line + [END] * (width - len(line)) for line in mine] == [
            line + [END] * (width - len(line)) for line in own
        ]
        saved += many - few
    assert saved > 0


@torch.no_grad()
def test_a_batch_that_stops_with_some_left_has_the_others_translations():
    """What is left is named, and none of the others waits for it."""
    seen = 0
    for seed in range(8):
        torch.manual_seed(seed)
        model = Translator(settings(positions=30, std=1.0), 20).eval()
        whole = model.translated(SOURCE, 4)
        for share in (0.0, 0.34, 0.67):
            some = model.translated(SOURCE, 4, share)
            left = some[:, 0] == PAD
            assert (some[left] == PAD).all()
            assert left.sum() <= share * len(SOURCE)
            for mine, own in zip(some[~left].tolist(), whole[~left].tolist(), strict=True):
                assert [*mine, END][: [*mine, END].index(END)] == [*own, END][: [*own, END].index(END)]
            seen += int(left.sum())
    assert seen > 0


@torch.no_grad()
@pytest.mark.parametrize("tokens", [200, 10_000], ids=["many batches", "one batch"])
def test_every_source_is_translated_once_whatever_was_left_at_first(tokens, monkeypatch):
    left, real = [], Translator.translated

    def translated(model, *given):
        written = real(model, *given)
        left.append(int((written[:, 0] == PAD).sum()))
        return written

    def parts(share):
        monkeypatch.setattr(commands, "_LEFT", share)
        return [
            pair
            for part, rows in commands.translated_parts(model, sources, tokens, 4)
            for pair in zip(part.tolist(), rows.tolist(), strict=True)
        ]

    monkeypatch.setattr(Translator, "translated", translated)
    torch.manual_seed(3)
    model = Translator(settings(positions=30, std=1.0), 20).eval()
    model.marian.final_logits_bias[0, END] = 1.0
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (120,), generator=draw).tolist()
    sources = Sentences.of([torch.randint(1, 20, (length,), generator=draw).tolist() for length in lengths])
    waited = parts(0.0)
    assert sum(left) == 0
    twice = parts(0.15)
    assert (sum(left) > 0) == (tokens == 200)  # nobody waits for the last few of a single batch
    assert [number for number, _ in sorted(twice)] == list(range(120))
    for (_, row), (_, expected) in zip(sorted(twice), sorted(waited), strict=True):
        shorter = min(len(row), len(expected))  # a limit is that of the longest source of its batch
        assert row[:shorter] == expected[:shorter]
