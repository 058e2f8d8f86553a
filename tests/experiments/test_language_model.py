"""Words of Wikipedia: the model against a reading of its formulas, the paper's sizes, data, and what is refused."""

import math
import re
import sys
import types
from pathlib import Path

import pytest
import small_files as tiny
import torch
from laboratory import assert_two_processes_trained_as_one, in_two_processes, killed, losses, needs_gloo
from safetensors.torch import save_file
from typer.testing import CliRunner

pytest.importorskip("accelerate")

from experiments.__main__ import app, main
from experiments.lab.errors import ExperimentError
from experiments.lab.files import gzip_lines
from experiments.lab.rows import configured, row_names
from experiments.lab.settings import How
from experiments.lab.task import find, tables
from experiments.lab.training import Training
from experiments.lab.training import train as train_task
from experiments.tasks.language_model import commands
from experiments.tasks.language_model.commands import written
from experiments.tasks.language_model.data import NOT_SCORED, Corpus, load, read_tokens, segments, write_tokens
from experiments.tasks.language_model.model import (
    END,
    RelativeAttention,
    TransformerXL,
    distance_waves,
    shifted,
    spelled,
    words_of,
)

TASK = find("language_model")
WORDS = [f"word{k}" for k in range(30)]
SIZE = {"vocabulary": 40, "dim": 8, "layers": 2, "heads": 2, "inner": 16, "dropout": 0.0, "batch": 3, "target": 5}
SIZE |= {"memory": 7, "evaluation_target": 6, "evaluation_memory": 9, "steps": 8, "validations": 2}


def settings(row="full", **options):
    return configured(TASK, f"wikitext-2-{row}", {**SIZE, **options})


def model_of(words=WORDS, row="full", **options):
    """In evaluation, in float64, with biases that are not zero."""
    torch.manual_seed(0)
    model = TransformerXL(settings(row, **options), words).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "lm"
    tiny.wikitext(folder)
    return folder


@pytest.fixture
def how(texts, tmp_path):
    return lambda **options: How(**{"data": texts, "out": tmp_path / "out", **options})


# Model


def naive_attention(attention, hidden, memory, clamp):
    """The paper's formula, number by number: Dai et al., section 3.3."""
    context = torch.cat([memory, hidden])
    dim, heads = hidden.shape[1], attention.heads
    width = dim // heads
    out = torch.zeros_like(hidden)
    key_weight, value_weight = attention.key_value.weight.chunk(2)
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        u, v = attention.content_bias[head, 0], attention.distance_bias[head, 0]
        for i in range(len(hidden)):
            query, scores, values = attention.query.weight[part] @ hidden[i], [], []
            for j in range(len(memory) + i + 1):
                distance = min(len(memory) + i - j, clamp)
                angles = [distance / 10_000 ** (2 * k / dim) for k in range(dim // 2)]
                wave = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=hidden.dtype)
                by_content = (query + u) @ (key_weight[part] @ context[j])
                by_distance = (query + v) @ (attention.distance.weight[part] @ wave)
                scores.append((by_content + by_distance) / math.sqrt(width))
                values.append(value_weight[part] @ context[j])
            out[i, part] = torch.stack(scores).softmax(0) @ torch.stack(values)
    return out @ attention.out.weight.T


@pytest.mark.parametrize(("remembered", "clamp"), [(0, 100), (4, 100), (4, 3)])
def test_attention_is_the_formula_of_the_paper(remembered, clamp):
    torch.manual_seed(1)
    attention = RelativeAttention(8, 2).double()
    with torch.no_grad():
        attention.content_bias.normal_()
        attention.distance_bias.normal_()
        hidden, memory = torch.randn(2, 5, 8).double(), torch.randn(2, remembered, 8).double()
        waves = distance_waves(remembered + 5, 8, clamp, hidden)
        found = attention(hidden, torch.cat([memory, hidden], dim=1), waves)
        expected = [naive_attention(attention, *pair, clamp) for pair in zip(hidden, memory, strict=True)]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-6, atol=1e-6)  # angles are of 32 bits


def test_scores_by_distance_are_moved_to_their_keys():
    target, keys = 3, 5
    by_distance = torch.arange(keys - 1, -1, -1).expand(2, target, keys)  # each number is its distance
    found = shifted(by_distance)
    for i in range(target):
        own = keys - target + i
        assert found[:, i, : own + 1].tolist() == [list(range(own, -1, -1))] * 2


@pytest.mark.parametrize("row", ["full", "tt40_two"])
@pytest.mark.parametrize("clamp", [6, 400])
def test_chunks_with_memory_have_the_loss_of_one_long_segment(row, clamp):
    words = torch.randint(len(WORDS), (2, 24))
    model = model_of(row=row, evaluation_memory=100, clamp=clamp, ratio=None if row == "full" else 2.0)
    whole, _ = model(words[:, :-1], words[:, 1:])
    for size in (1, 5, 23):
        memory, total = None, 0.0
        for part in range(0, 23, size):
            end = min(part + size, 23)
            loss, memory = model(words[:, part:end], words[:, part + 1 : end + 1], memory)
            total += loss
        torch.testing.assert_close(total, whole)


def test_what_is_beyond_memory_is_forgotten():
    """With one layer it does not matter what stood there; with memory it does."""
    model = model_of(layers=1, evaluation_memory=4)
    one, other = torch.randint(len(WORDS), (2, 1, 6))
    same = torch.randint(len(WORDS), (1, 4))
    after = torch.randint(len(WORDS), (1, 3))

    def hidden(*parts):
        memory = None
        for part in parts:
            found, memory = model.hidden(part, memory)
            assert all(kept.shape[1] <= 4 for kept in memory)
        return found

    torch.testing.assert_close(hidden(one, same, after), hidden(other, same, after))
    assert not torch.allclose(hidden(one, after), hidden(other, after))


def test_memory_is_as_long_as_training_and_evaluation_say_and_has_no_gradient():
    model = model_of(memory=7, evaluation_memory=9)
    for training, length in ((True, 7), (False, 9)):
        model.train(training)
        memory = None
        for _ in range(3):
            _, memory = model(*torch.randint(len(WORDS), (2, 3, 5)), memory)
        assert [tuple(kept.shape) for kept in memory] == [(3, length, 8)] * 2
        assert not any(kept.requires_grad for kept in memory)


def test_rows_differ_in_their_tables_alone():
    def body(row):
        torch.manual_seed(3)
        model = TransformerXL(settings(row, **({} if row == "full" else {"ratio": 2.0})), WORDS)
        return {name: tensor for name, tensor in model.state_dict().items() if name.startswith("layers")}

    expected = body("full")
    for row in ("lr8", "tt8", "tt40_two"):
        torch.testing.assert_close(body(row), expected, rtol=0, atol=0)


# Millions of parameters and ratios in the paper's table; of LR3 the total is that of rank 64, the ratio of rank 48.
PAPER = {
    "full": (192, 1.0),
    "LR1": (89, 4.0),
    "LR2": (81, 5.3),
    "LR3": (72, 8.0),
    "TT1": (91, 3.8),
    "TT2": (71, 8.6),
    "TT3": (64, 15.1),
}


@pytest.mark.parametrize("row", PAPER)
def test_the_paper_has_so_many_parameters(row):
    chosen = configured(TASK, f"wikitext-103-{row}", {})
    with torch.device("meta"):
        model = TransformerXL(chosen, [""] * chosen.vocabulary)
    millions, ratio = PAPER[row]
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert TASK.ratio(model) == pytest.approx(ratio, abs=0.051)
    assert len(tables(model)) == chosen.tables


@pytest.mark.parametrize("row", ["lr8", "lr40", "bands8", "tt8", "tt40", "tt40_two", "hashed40"])
def test_a_ratio_is_that_of_one_full_table_to_both_ends(row):
    chosen = configured(TASK, f"wikitext-2-{row}", {})
    with torch.device("meta"):
        model = TransformerXL(chosen, [""] * chosen.vocabulary)
    kept = {id(p): p.nbytes for end in (model.embedding, model.head) for p in end.params().values()}
    assert 4 * chosen.vocabulary * chosen.dim / sum(kept.values()) == pytest.approx(TASK.ratio(model))
    asked = float("".join(filter(str.isdigit, row)))
    assert 0.99 * asked < TASK.ratio(model) < 1.1 * asked
    assert model.head.is_tied is (chosen.tables == 1)


def test_every_row_can_be_made():
    for row in row_names(TASK):
        TASK.check_tables(configured(TASK, row, {}))


def test_the_papers_rows_train_all_of_their_steps_after_the_papers_warm_up():
    for row in PAPER:
        chosen = configured(TASK, f"wikitext-103-{row}", {})
        assert chosen.patience >= chosen.validations  # none ends before: the rate has to come down
        assert (chosen.steps, chosen.warm_up * chosen.steps) == (300_000, pytest.approx(3_000))
        assert (chosen.optimizer, chosen.schedule, chosen.lr) == ("novograd", "cosine", 0.025)
        evaluation = (chosen.evaluation_batch, chosen.evaluation_target, chosen.evaluation_memory, chosen.clamp)
        assert evaluation == (4, 128, 640, 400)


def test_sizes_that_do_not_fit_are_refused():
    for options in ({"dim": 9, "heads": 3}, {"dim": 8, "heads": 3}):
        with pytest.raises(ExperimentError, match=r"dim=.: it must be even and a multiple of heads=3"):
            settings(**options)
    with pytest.raises(ExperimentError, match="tables=3: it must be at least 1 and below 3"):
        settings(tables=3)


# Data


def test_lines_are_words_with_their_end_and_words_are_by_frequency(texts):
    tiny.pack(texts / "wikitext-2" / "train.txt.gz", [" ", " = b a = ", " b <unk> b a ", " c "])
    tiny.pack(texts / "wikitext-2" / "test.txt.gz", [" a new b ", " "])
    corpus = load(settings(), texts)
    assert corpus.words == ("<unk>", END, "b", "=", "a", "c")
    train = [corpus.words[k] for k in corpus.splits["train"]]
    assert train == f"{END} = b a = {END} b <unk> b a {END} c {END}".split()
    assert [corpus.words[k] for k in corpus.splits["test"]] == f"a <unk> b {END} {END}".split()
    assert load(settings(vocabulary=3), texts).words == ("<unk>", END, "b")
    tiny.pack(texts / "wikitext-2" / "train.txt.gz", [" b b a c "])
    assert load(settings(vocabulary=2), texts).words == ("<unk>", END)  # of a line, however few words there are
    assert load(settings(vocabulary=3), texts).words == ("<unk>", "b", END)
    assert load(settings(vocabulary=4), texts).words == ("<unk>", "b", END, "a")
    assert [len(stream) for stream in load(settings(tokens=4), texts).splits.values()] == [4, 4, 4]


def test_the_originals_are_fetched_by_datasets_and_read_as_files_are(texts, monkeypatch):
    asked = []

    def load_dataset(path, split, name):
        asked.append((path, split, name))
        file = {"validation": "valid"}.get(split, split)
        return [{"text": line} for _, line in gzip_lines(texts / "wikitext-2" / f"{file}.txt.gz")]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    ours, fetched = load(settings(), texts), load(settings(), None)
    assert ours.sizes() == fetched.sizes()
    assert all(torch.equal(fetched.splits[split], ours.splits[split]) for split in ours.splits)
    assert asked[1] == ("Salesforce/wikitext", "validation", "wikitext-2-v1")


def test_a_file_of_tokens_is_mapped_and_read_as_texts_are(texts, tmp_path):
    invoke("language-model", "prepare", "--data", texts, "--to", tmp_path / "made", "--vocabulary", "12")
    ours, mapped = (load(settings(vocabulary=12), folder) for folder in (texts, tmp_path / "made"))
    assert mapped.words == ours.words
    assert mapped.sizes() == ours.sizes()
    assert all(torch.equal(mapped.splits[split], ours.splits[split]) for split in ours.splits)
    if sys.platform == "linux":
        begin, end = mapping_of(tmp_path / "made" / "wikitext-2.safetensors")
        assert all(begin <= stream.data_ptr() < end for stream in mapped.splits.values())


def mapping_of(path):
    """Where a file lies in memory."""
    (line,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [int(address, 16) for address in line.split()[0].split("-")]


def test_tokens_of_another_vocabulary_are_refused(texts, tmp_path):
    corpus, path = load(settings(vocabulary=12), texts), tmp_path / "wikitext-2.safetensors"
    write_tokens(corpus, path, 12)
    with pytest.raises(
        ExperimentError, match=r"of another vocabulary, of 12 words .* this run has 40: give --voc.* 12"
    ):
        load(settings(), tmp_path)
    write_tokens(Corpus(corpus.words[:5], corpus.splits), path, 12)
    with pytest.raises(ExperimentError, match=r"of another vocabulary: train has the word 11, and there are 5 words"):
        read_tokens(path, 12)
    write_tokens(Corpus(corpus.words, {**corpus.splits, "test": torch.zeros(3)}), path, 12)
    with pytest.raises(
        ExperimentError, match=r"no file of tokens: test is no stream of them. .* prepare makes it anew"
    ):
        read_tokens(path, 12)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ExperimentError, match=r"is no file of tokens: .* prepare makes it anew"):
        read_tokens(path, 12)


@pytest.mark.parametrize(
    "spelling",
    [
        torch.randn(4),
        torch.full((4,), 1000),
        torch.zeros(2, 2, dtype=torch.uint8),
        torch.full((4,), 255, dtype=torch.uint8),
        spelled(["the", "film"]),
        spelled(["<unk>", END, "film", "film"]),
    ],
    ids=["real numbers", "no bytes", "a matrix", "no UTF-8", "nothing unknown", "a word twice"],
)
def test_tokens_without_words_are_refused(texts, tmp_path, spelling):
    tensors = {**load(settings(), texts).splits, "words": spelling}
    save_file(tensors, tmp_path / "wikitext-2.safetensors", {"vocabulary": "40"})
    with pytest.raises(ExperimentError, match=r"is no file of tokens: .*words.* prepare makes it anew"):
        load(settings(), tmp_path)


def test_tokens_that_tell_no_vocabulary_are_refused(texts, tmp_path):
    corpus = load(settings(), texts)
    tensors = {**corpus.splits, "words": spelled(corpus.words)}
    for told in (None, {"vocabulary": "\x1b[2J"}):
        save_file(tensors, tmp_path / "wikitext-2.safetensors", told)
        with pytest.raises(ExperimentError, match=r"is no file of tokens: it tells no vocabulary. .* prepare makes"):
            load(settings(), tmp_path)


@pytest.mark.parametrize("lines", [[], [" ", " "]])
def test_an_empty_file_is_refused(texts, lines):
    tiny.pack(texts / "wikitext-2" / "valid.txt.gz", lines)
    with pytest.raises(ExperimentError, match=r"valid.txt.gz is empty: there are no words in it"):
        load(settings(), texts)


def test_another_dataset_and_missing_folders_are_refused(texts):
    told = CliRunner().invoke(app, ["language-model", "prepare", "--dataset", "wikitext2", "--to", str(texts)])
    assert str(told.exception).startswith('unknown dataset "wikitext2": did you mean "wikitext-2"? known: wikitext-103')
    with pytest.raises(ExperimentError, match="there is no such folder"):
        load(settings(), texts / "nowhere")
    with pytest.raises(ExperimentError, match=r"wikitext-103.train.txt.gz does not exist"):
        load(configured(TASK, "wikitext-103-full", {}), texts)


def test_a_text_of_fewer_words_than_a_table_can_be_made_for_is_refused_before_training(texts):
    for row, sentence in (("tt40_two", "ratio=80 for TensorTrain: at rank 1"), ("hashed40", "ratio=40 for Hashed")):
        with pytest.raises(ExperimentError, match=f"wikitext-2 .*: {sentence}.* this table of 18 x 8 is"):
            TASK.load(settings(row), texts)


@pytest.mark.parametrize(("tokens", "lanes", "target"), [(30, 4, 3), (29, 4, 100), (3, 4, 2), (33, 1, 7)])
def test_every_token_but_the_first_is_foretold_once_from_the_one_before(tokens, lanes, target):
    pairs = []
    for batch in segments(torch.arange(tokens), lanes, target):
        assert batch["words"].shape[1] <= target
        seen = batch["following"] != NOT_SCORED
        pairs += zip(batch["words"][seen].tolist(), batch["following"][seen].tolist(), strict=True)
    assert sorted(pairs) == [(k, k + 1) for k in range(tokens - 1)]


# Training


def train(row, how):
    return train_task(TASK, row, how)


def test_evaluation_is_the_mean_over_all_tokens_with_memory(texts, how):
    """One lane and a memory that reaches everything: the loss of the whole stream at once."""
    row = settings(evaluation_batch=1, evaluation_memory=1000)
    trainer = Training(TASK, row, how(), TASK.load(row, texts))
    stream = trainer.data.splits["test"][None]
    with torch.no_grad():
        whole, _ = trainer.plain.eval()(stream[:, :-1], stream[:, 1:])
    expected = whole.item() / (stream.numel() - 1)
    found = trainer.evaluate("test")
    assert found["loss"] == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(expected), rel=1e-4)


def test_a_model_that_has_gone_wild_is_the_worst_and_no_error(how):
    row = settings()
    trainer = Training(TASK, row, how(), TASK.load(row, how().data))
    with torch.no_grad():
        trainer.plain.head.bias.zero_()[0] = 1e6  # of <unk>, and nothing else follows
    found = trainer.evaluate("validation")
    assert found["loss"] > 1e5
    assert found["perplexity"] == TASK.metrics[0].worst
    assert TASK.metrics[0].written(found["perplexity"]) == "diverged"


@pytest.mark.parametrize("row", ["full", "tt40_two", "lr8"])
def test_a_run_learns_and_tells_sizes_as_the_paper_counts(row, how):
    for name in ("train", "valid", "test"):
        tiny.pack(how().data / "wikitext-2" / f"{name}.txt.gz", [" ".join(tiny.WORDS)] * 40)  # one after the other
    known = {"evaluation_target": 5, "evaluation_memory": 7}  # as far as training reaches
    chosen = settings(row, steps=100, lr=0.02, ratio=None if row == "full" else 2.0, **known)
    record = train(chosen, how())
    assert record["test_perplexity"] < len(tiny.WORDS) / 2
    words = len(TASK.load(chosen, how().data).words)
    assert record["ratio"] == pytest.approx(words * chosen.dim / record["table_parameters"])


@pytest.mark.parametrize(("steps", "precision"), [(1, "fp32"), (5, "bf16")])
def test_a_killed_run_goes_on_bit_for_bit_with_its_memory(how, tmp_path, monkeypatch, steps, precision):
    row = settings(dropout=0.1, precision=precision)
    whole = losses(train(row, how(out=tmp_path / "whole")))
    with killed(monkeypatch, lambda _, made: made == steps):
        train(row, how(checkpoint_steps=1))
    assert losses(train(row, how(resume=True))) == whole


def test_gradients_of_pieces_are_those_of_the_batch_with_memory(how):
    row = settings(precision="fp32")  # in half precision sums of pieces are rounded otherwise

    def gradients(pieces):
        trainer = Training(TASK, row, how(accumulate=pieces), TASK.load(row, how().data))
        batches = trainer.source.batches(0)
        trainer.gradients(next(batches))
        trainer.plain.zero_grad()
        return trainer.gradients(next(batches)), [p.grad for p in trainer.plain.parameters()]

    torch.testing.assert_close(gradients(2), gradients(1), rtol=1e-5, atol=1e-6)


def test_weights_of_the_body_decay_and_nothing_else(how):
    row = settings("tt40", ratio=2.0, weight_decay=0.1)
    model = TASK.model(row, TASK.load(row, how().data))
    groups = list(TASK.parameters(row, model))
    names = {id(p): name for name, p in model.named_parameters()}
    decaying = {names[id(p)] for p in groups[0]["params"]}
    assert decaying == {
        name for name in names.values() if "layers." in name and "bias" not in name and "norm" not in name
    }
    assert {names[id(p)] for p in groups[1]["params"]} == set(names.values()) - decaying
    assert groups[1]["weight_decay"] == 0.0


def test_novograd_has_the_betas_of_the_paper(monkeypatch):
    from experiments.lab.optimisers import OPTIMIZERS

    class NovoGrad(torch.optim.Adam):
        pass

    monkeypatch.setitem(sys.modules, "pytorch_optimizer", types.SimpleNamespace(NovoGrad=NovoGrad))
    made = OPTIMIZERS["novograd"]([torch.nn.Parameter(torch.zeros(2))], lr=0.025, weight_decay=1e-4)
    assert made.defaults["betas"] == (0.95, 0.25)


@needs_gloo
@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--fsdp", "--accumulate", "2")], ids=["ddp", "fsdp"])
def test_two_processes_train_one_table_for_both_ends_as_one_does(texts, how, tmp_path, more):
    named = {"dataset": "wikitext-2", "row": "tiny", "format": "tt", "ratio": 2.0}
    config = tiny.row(tmp_path / "row.toml", "", **{**SIZE, **named, "batch": 4})
    one = train(configured(TASK, str(config), {}), how())
    two = in_two_processes("language-model", config, texts, tmp_path / "two", *more)
    assert_two_processes_trained_as_one(two, one)
    assert two["test_loss"] == pytest.approx(one["test_loss"], rel=1e-4)


# Generation


@pytest.fixture
def kept(how):
    """A trained model in its folder."""
    row = settings(evaluation_memory=50)
    train(row, how(keep_model=True))
    return how().out / "language_model" / f"wikitext-2-{row.row}-0"


def invoke(*arguments, code=0):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.exception
    return done


@pytest.mark.parametrize("row", ["full", "tt40"])
def test_words_are_those_of_a_model_that_reads_all_again_without_memory(row):
    model = model_of(row=row, evaluation_memory=100, ratio=None if row == "full" else 2.0)
    given = [3, 1, 4]
    for _ in range(8):
        hidden, _ = model.hidden(torch.tensor([given]))
        given.append(int(model.head(hidden)[0, -1].argmax()))
    words = written(model, [3, 1, 4], temperature=0)
    assert [next(words) for _ in range(8)] == given[3:]


def test_words_are_drawn_by_the_seed_among_the_likeliest():
    model = model_of()

    def drawn(**options):
        words = written(model, [3], **options)
        return [next(words) for _ in range(12)]

    assert drawn(seed=1) == drawn(seed=1) != drawn(seed=2)
    assert drawn(top_k=1, seed=1) == drawn(temperature=0)


def test_a_prompt_is_gone_on_with_and_unknown_words_are_told_once(kept):
    told = invoke(
        "language-model", "generate", "--checkpoint", kept, "--prompt", "the xyzzy film xyzzy", "--length", "5"
    )
    assert told.stderr.strip().endswith("words of the model, read as <unk>: xyzzy")
    assert told.stdout.startswith("the <unk> film <unk>")
    quiet = invoke("language-model", "generate", "--checkpoint", kept, "--length", "5")
    assert quiet.stderr == ""
    again = invoke("language-model", "generate", "--checkpoint", kept / "model.pt", "--length", "5")
    assert again.stdout == quiet.stdout
    invoke(
        "language-model", "generate", "--checkpoint", kept, "--length", "5", "--top-k", "999"
    )  # as many as there are


def test_a_model_of_another_task_and_one_that_is_not_there_yet_are_refused(kept):
    content = torch.load(kept / "model.pt", weights_only=True)

    def refused():
        torch.save(content, kept / "model.pt")
        return str(CliRunner().invoke(app, ["language-model", "generate", "--checkpoint", str(kept)]).exception)

    tensors = content["best"]
    for best in (
        {name: tensor for name, tensor in tensors.items() if name != "spelling"},
        {name: tensor for name, tensor in tensors.items() if name != "head.bias"},
        {**tensors, "spelling": spelled(words_of(tensors["spelling"])[:-1])},
        {**tensors, "spelling": torch.randn(3)},
        [1],
    ):
        content["best"] = best
        assert re.search(r" is damaged: .*\. Train it anew, with --keep-model", refused())
    content["best"] = {}
    assert "has no model yet: a run selects one by its first validation" in refused()
    content["settings"]["task"] = "source_code"
    assert "is a model of the task source_code, not of language_model" in refused()


@pytest.mark.parametrize(
    ("option", "given"), [("--temperature", "inf"), ("--temperature", "nan"), ("--seed", 2**64), ("--seed", -1)]
)
def test_what_words_are_drawn_with_is_checked_before_anything_is_written(kept, option, given):
    told = CliRunner().invoke(app, ["language-model", "generate", "--checkpoint", str(kept), option, str(given)])
    assert told.exit_code
    assert option in told.stderr + str(told.exception)
    assert told.stdout == ""


def test_lines_begin_with_words(kept, monkeypatch):
    """Words of a line have one space between them, and none before them."""
    words = words_of(torch.load(kept / "model.pt", weights_only=True)["best"]["spelling"])

    def generated(prompt, *follow):
        monkeypatch.setattr(commands, "written", lambda *_: iter([words.index(word) for word in follow]))
        given = ("--checkpoint", kept, "--prompt", prompt, "--length", len(follow))
        return invoke("language-model", "generate", *given).stdout

    assert generated("", "the", "film", END, "It", END) == "the film\nIt\n\n"
    assert generated("a film", "is", END, END, "It") == "a film is\n\nIt\n"


def test_a_long_prompt_is_read_in_segments_as_evaluation_reads():
    model = model_of(evaluation_memory=9, evaluation_target=6)
    prompt, lengths, real = torch.randint(len(WORDS), (1, 40)), [], model.hidden

    def hidden(words, memory=None):
        lengths.append(words.shape[1])
        return real(words, memory)

    model.hidden = hidden
    found = next(written(model, prompt[0].tolist(), temperature=0))
    assert lengths == [6] * 6 + [4]
    memory = None
    for part in prompt.split(6, dim=1):
        last, memory = real(part, memory)
    assert found == int(model.head(last)[0, -1].argmax())


def test_errors_reach_a_terminal_without_control_characters(kept, monkeypatch, capsys):
    content = torch.load(kept / "model.pt", weights_only=True)
    content["settings"]["task"] = "\x1b[2Jcaf\u00e9"
    torch.save(content, kept / "model.pt")
    monkeypatch.setattr(sys, "argv", ["experiments", "language-model", "generate", "--checkpoint", str(kept)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.endswith("is a model of the task \\x1b[2Jcaf\u00e9, not of language_model.\n")


def test_words_reach_a_terminal_without_control_characters(kept):
    content = torch.load(kept / "model.pt", weights_only=True)
    words = words_of(content["best"]["spelling"])
    content["best"]["spelling"] = spelled(
        [word if word in ("<unk>", END) else f"\x1b[2J{word}\u00e9" for word in words]
    )
    torch.save(content, kept / "model.pt")
    said = invoke(
        "language-model", "generate", "--checkpoint", kept, "--prompt", "\x1b[2Jfilm\u00e9 \x07", "--length", "5"
    )
    assert said.stdout.startswith(r"\x1b[2Jfilm\u00e9 <unk>".replace(r"\u00e9", "\u00e9"))
    assert said.stderr.endswith("read as <unk>: \\x07\n")
    assert "\x1b" not in said.output
