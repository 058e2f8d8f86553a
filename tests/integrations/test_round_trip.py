"""Compressed models come back from their folder bit for bit."""

import pytest
import torch
import transformers
from safetensors import safe_open
from tiny import ARCHITECTURES, COMMON, FORMATS, GROUPED, ROWS, compressed, dense, logits, numbers, reloaded

import tensorbed as tb
from tensorbed.nn.table import StructuredTable

KINDS = list(FORMATS)


def tables(model):
    return {n: m for n, m in model.named_modules(remove_duplicate=False) if isinstance(m, StructuredTable)}


@pytest.mark.filterwarnings("error:.*has no checksums")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, tied, tmp_path):
    # Another format for the untied one: every format meets several architectures, tied and untied.
    number = list(ARCHITECTURES).index(name) + (0 if tied else 3)
    model = compressed(name, KINDS[number % len(KINDS)], tied)
    again, info = reloaded(model, tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(again), logits(model))
    assert tables(again).keys() == tables(model).keys() != set()
    assert numbers(again) == numbers(model)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = sum(file.get_slice(key).get_shape() != [0] for key in file.keys())  # noqa: SIM118
    state = again.state_dict(keep_vars=True).items()
    assert stored == len({id(t) for key, t in state if key not in again._keys_to_ignore_on_save})


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_formats(format, tied, tmp_path):
    model = compressed("llama", format, tied)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    embedding, head = again.get_input_embeddings(), again.get_output_embeddings()
    first = embedding.structure.tensors()[0].name
    assert (getattr(embedding, first) is getattr(head, first)) is tied


DRAWN = [
    tb.Bands(),
    tb.CanonicalPolyadic(rank=6),
    tb.DeepHash(hashes=16, hidden=8),
    tb.Hashed(buckets=40, hashes=2, signed=True),
    tb.NonlinearTrain(rank=6),
    tb.Permuted(
        tb.HotRows(hot=tb.Dense(), rest=tb.LowRank(rank=4)), order=[(7 * row + 3) % ROWS for row in range(ROWS)]
    ),
    tb.QuotientRemainder(),
    tb.StraightThrough(tb.TensorTrain(rank=6)),
]


@pytest.mark.parametrize("format", DRAWN, ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_formats_that_are_drawn(format, tied, tmp_path):
    model = dense("llama", tied)
    tb.compress_(model, format, min_rows=ROWS, fit=False)
    again = reloaded(model, tmp_path)
    assert again.get_input_embeddings().structure == model.get_input_embeddings().structure
    assert torch.equal(logits(again), logits(model))


def test_tied_heads_are_drawn_as_their_table_is(tmp_path):
    """Compressed, loaded again, and put beside a model that was saved without a head."""
    model = compressed("llama", "low_rank")
    beside = reloaded(reloaded(model, tmp_path / "task", type(model.base_model)), tmp_path / "base", type(model))
    for one in (model, reloaded(model, tmp_path / "again"), beside):
        head = one.get_output_embeddings()
        head.reset_parameters()
        assert float((head.u @ head.v.T).square().mean().sqrt()) == pytest.approx(0.3, rel=1e-3)


def test_a_folder_is_whole_whatever_the_default_device(tmp_path):
    model = compressed("llama", "product_quantized")
    with torch.device("meta"):
        model.save_pretrained(tmp_path)
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize(
    ("name", "format"),
    [("llama", "tensor_train"), ("bert", "product_quantized"), ("t5", "product_quantized"), ("gpt2", "tensor_train")],
)
def test_base_and_task_load_each_other(name, format, tmp_path):
    model = compressed(name, format)
    base_class = type(model.base_model) if name != "t5" else transformers.T5Model
    base, info = reloaded(model, tmp_path / "task", base_class, output_loading_info=True)
    assert not [key for key in info["missing_keys"] if "pooler" not in key]
    assert tables(base)
    task, info = reloaded(base, tmp_path / "base", type(model), output_loading_info=True)
    if name != "bert":  # a masked language model has a transform of its own before its head
        assert not info["missing_keys"]
        assert torch.equal(logits(task), logits(model))
    embedding, head = task.get_input_embeddings(), task.get_output_embeddings()
    first = embedding.structure.tensors()[0].name
    assert getattr(embedding, first) is getattr(head, first)


def test_untied_by_compressing_stays_untied(tmp_path):
    model = dense("llama")
    tb.compress_(model, FORMATS["low_rank"], min_rows=ROWS, tied="untie")
    with torch.no_grad():
        model.lm_head.u.mul_(2)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.u is not again.model.embed_tokens.u


def test_head_left_dense(tmp_path):
    model = dense("llama", tied=False)
    tb.compress_(model, FORMATS["tensor_train"], min_rows=ROWS, include_heads=False)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert type(again.lm_head) is torch.nn.Linear


def test_dtype_of_the_file_and_another(tmp_path):
    model = compressed("llama", "product_quantized")
    model.save_pretrained(tmp_path / "single")
    half = type(model).from_pretrained(tmp_path / "single", dtype=torch.bfloat16)
    assert half.model.embed_tokens.codebooks.dtype == torch.bfloat16
    assert half.model.embed_tokens.codes.dtype == torch.uint8
    again = reloaded(half, tmp_path / "half")
    assert again.dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(half))


def test_twice(tmp_path):
    model = compressed("bart", "tensor_ring")
    once = reloaded(model, tmp_path / "once")
    twice = reloaded(once, tmp_path / "twice")
    assert torch.equal(logits(twice), logits(model))
    assert (tmp_path / "once" / "config.json").read_text() == (tmp_path / "twice" / "config.json").read_text()


def test_compressed_a_second_time(tmp_path):
    model = dense("llama", tied=False)
    tb.compress_(model, {"model.embed_tokens": FORMATS["low_rank"]}, include_heads=False)
    tb.compress_(model, {"lm_head": FORMATS["tensor_train"]})
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.structure.kind == "tensor_train"
    assert again.model.embed_tokens.structure.kind == "low_rank"


def test_sharded(tmp_path):
    model = compressed("llama", "tensor_train")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert torch.equal(logits(type(model).from_pretrained(tmp_path)), logits(model))


def test_scale_is_kept(tmp_path):
    model = dense("gemma3")
    before = logits(model)
    tb.compress_(model, tb.Dense(), min_rows=ROWS)
    assert torch.equal(logits(model), before)
    assert model.get_input_embeddings().embed_scale == pytest.approx(32**0.5)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), before)
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    dense("gemma3").save_pretrained(tmp_path / "dense")
    stock = type(model).from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    index = torch.arange(ROWS)
    assert torch.equal(half.get_input_embeddings()(index), stock.get_input_embeddings()(index))


def test_a_model_of_two_models(tmp_path):
    parts = [transformers.BertConfig(**COMMON) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    model = transformers.EncoderDecoderModel(config).eval()
    tb.compress_(model, FORMATS["product_quantized"], min_rows=ROWS)
    again, info = reloaded(model, tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(logits(again), logits(model))
    first, second = (part.get_input_embeddings().codes for part in (again.encoder, again.decoder))
    assert first is not second
    assert again.decoder.get_output_embeddings().codes is second


def test_a_model_with_a_language_model_inside(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
        image_token_index=1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tb.compress_(model, FORMATS["tensor_ring"], min_rows=ROWS)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.core_0 is again.model.language_model.embed_tokens.core_0
