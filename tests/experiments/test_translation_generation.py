"""Translations by beams: what they find, when they end, and by what the steps are scored."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from translators import FULL, SOURCE, TRAIN, model_of, padded, settings

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


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(("positions", "longest"), [(40, 2 * 6 + 10), (12, 12)], ids=["by source", "by positions"])
def test_translations_end_at_a_length_and_each_step_takes_one_token(beams, positions, longest):
    """Twice the longest source and ten more, or as many as the model has positions; what was before is in the cache."""
    model, taken = model_of(positions=positions), []
    model.marian.final_logits_bias[0, END] = -50.0
    model.marian.model.decoder.register_forward_pre_hook(
        lambda _, given, options: taken.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    assert SOURCE.shape[1] == 6
    assert model(SOURCE, beams=beams).shape[1] == longest
    assert taken == [1] * longest


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
    draw = torch.Generator().manual_seed(0)
    sources = padded(*(torch.randint(1, 20, (length,), generator=draw).tolist() for length in (4, 1, 8, 2, 6, 3, 5, 7)))
    for std, bias, seed in ((1.0, 2.0, 0), (2.0, 8.0, 0), (2.0, 12.0, 2)):  # of which some end early, and others do not
        torch.manual_seed(seed)
        model = Translator(settings(positions=30, std=std), 20).eval()
        model.marian.final_logits_bias[0, END] = bias
        whole = model.translated(sources, 4)
        assert len({[*row, END].index(END) for row in whole.tolist()}) > 1
        for share in (0.0, 0.25, 0.5, 0.75):
            some = model.translated(sources, 4, share)
            left = some[:, 0] == PAD
            assert (some[left] == PAD).all()
            assert left.sum() <= share * len(sources)
            for mine, own in zip(some[~left].tolist(), whole[~left].tolist(), strict=True):
                assert [*mine, END][: [*mine, END].index(END)] == [*own, END][: [*own, END].index(END)]
            seen += int(left.sum())
    assert seen > 0


class Copier:
    """Translates each sentence into itself, and leaves some unfinished where a batch need not wait for all."""

    def __init__(self):
        self.unfinished = 0

    def translated(self, source, beams, left):
        waits = (source[:, :1] % 7 == 0) & (left > 0)
        self.unfinished += int(waits.sum())
        return source.masked_fill(source == PAD, END).masked_fill(waits, PAD)


@pytest.mark.parametrize("tokens", [200, 10_000], ids=["many batches", "one batch"])
def test_every_source_has_its_own_translation_once_whatever_was_left_at_first(tokens):
    draw = torch.Generator().manual_seed(0)
    lines = [torch.randint(1, 20, (number % 9 + 1,), generator=draw).tolist() for number in range(120)]
    copier = Copier()
    parts = list(commands.translated_parts(copier, Sentences.of(lines), tokens, 4))
    numbers = torch.cat([part for part, _ in parts]).tolist()
    rows = [row for _, written in parts for row in written.tolist()]
    assert sorted(numbers) == list(range(120))
    for number, row in zip(numbers, rows, strict=True):
        assert row[: row.index(END)] == lines[number]
    assert (copier.unfinished > 0) == (tokens == 200)  # nobody waits for the last few of a single batch
