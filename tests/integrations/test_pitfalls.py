"""What is known to go wrong with replaced tables in transformers, most of it in silence."""

import copy
import io
import json
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import FORMATS, ROWS, compressed, dense, ids, logits, numbers, reloaded

import tensorbed as tb
from tensorbed.integrations.transformers import TensorbedConfig, adopt, loss_without_logits

# Of files that tests have edited.
pytestmark = pytest.mark.filterwarnings("ignore:.*has no checksums")

TABLE = "bert.embeddings.word_embeddings"
QUANTISED = ["tensor_train", "product_quantized", "quantized_rows"]


def shares(model):
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return all(getattr(embedding, s.name) is getattr(head, s.name) for s in embedding.structure.tensors())


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def edit_file(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_without_the_library_loading_is_an_error(tmp_path):
    compressed().save_pretrained(tmp_path)
    script = f"import transformers; transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode != 0
    assert "mismatch" in run.stderr.lower()


def test_with_it_imported_a_fresh_process_loads(tmp_path):
    model = compressed("llama", "product_quantized")
    model.save_pretrained(tmp_path)
    script = (
        "import torch, transformers, tensorbed.integrations.transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        f"print(model(torch.tensor({ids().tolist()})).logits.double().sum().item())"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout.split()[-1]) == pytest.approx(logits(model).double().sum().item(), rel=1e-6)


def test_wrong_shapes_are_refused(tmp_path):
    compressed().save_pretrained(tmp_path)
    edit_file(tmp_path, lambda t: t.update({"model.embed_tokens.core_1": torch.zeros(2, 2)}))
    with pytest.raises(ValueError, match=r"core_1 has shape \(2, 2\)"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_missing_core_is_refused(tmp_path):
    compressed().save_pretrained(tmp_path)
    edit_file(tmp_path, lambda t: t.pop("model.embed_tokens.core_1"))
    with pytest.raises(ValueError, match=r"lacks model.embed_tokens.core_1"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_head_that_the_file_has_not_is_drawn(tmp_path):
    model = compressed(tied=False)
    model.save_pretrained(tmp_path)
    edit_file(tmp_path, lambda t: [t.pop(name) for name in list(t) if name.startswith("lm_head.core")])
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    std = again.lm_head.weight.detach().std().item()
    assert std == pytest.approx(32**-0.5, rel=0.1)
    missing = tmp_path / "quantised"
    compressed(format="quantized_rows", tied=False).save_pretrained(missing)
    edit_file(missing, lambda t: [t.pop(name) for name in list(t) if name.startswith("lm_head.") and t[name].numel()])
    with pytest.raises(ValueError, match="lacks lm_head"):
        transformers.LlamaForCausalLM.from_pretrained(missing)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda q: q["layers"]["lm_head"].update(structure='{"kind": "unheard"}'), "lm_head"),
        (lambda q: q["layers"].update(lm_head=7), "descriptions of layers"),
        (lambda q: q.update(version=99), "version 99"),
        (lambda q: q.update(more=1), "unexpected more"),
        (lambda q: q.pop("layers"), "wants a format"),
    ],
)
def test_damaged_configs_are_refused(tmp_path, change, said):
    compressed().save_pretrained(tmp_path)
    edit_config(tmp_path, change)
    with pytest.raises((ValueError, TypeError), match=said):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_config_of_another_size_is_refused(tmp_path):
    compressed().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace(f'"vocab_size": {ROWS}', '"vocab_size": 400'))
    with pytest.raises(ValueError, match=r"320 x 32, where the model has \(400, 32\)"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_unknown_subclasses_are_refused_by_name():
    class Odd(torch.nn.Embedding):
        pass

    model = dense()
    model.model.embed_tokens = Odd(ROWS, 32)
    with pytest.raises(TypeError, match="Odd"):
        tb.compress_(model, FORMATS["tensor_train"], min_rows=ROWS)
    assert type(model.lm_head) is torch.nn.Linear


def test_assigned_states_are_tied_again():
    model = compressed("llama", "product_quantized")
    before = logits(model)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model.tie_weights()
    assert shares(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("format", QUANTISED)
@pytest.mark.parametrize(("tied", "rows"), [(True, ROWS + 37), (False, ROWS - 20)])
def test_resize(format, tied, rows, tmp_path):
    model = compressed("llama", format, tied)
    index = ids(ROWS - 20)
    before = logits(model, index)
    assert model.resize_token_embeddings(rows) is model.get_input_embeddings()
    kept = min(rows, ROWS)
    after = logits(model, index)
    assert after.shape[-1] == rows == model.config.vocab_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], rtol=0, atol=1e-6)
    assert shares(model) is tied
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again, index), after)
    again.resize_token_embeddings(rows + 3)
    assert logits(again, index).shape[-1] == rows + 3


def test_resize_to_a_multiple_and_of_dense_models():
    model = compressed("bert", "low_rank")
    assert model.resize_token_embeddings(ROWS + 1, pad_to_multiple_of=64).weight.shape[0] == 384
    assert model.get_output_embeddings().bias.shape == (384,)
    assert logits(model).shape[-1] == 384
    plain = dense()
    tb.compress_(plain, {"lm_head": FORMATS["low_rank"]}, tied="untie")
    plain.resize_token_embeddings(ROWS + 8)
    assert isinstance(plain.model.embed_tokens, torch.nn.Embedding)
    assert logits(plain).shape[-1] == ROWS + 8


@pytest.mark.parametrize("name", ["llama", "bart", "gemma3", "t5"])
def test_dequantize(name, tmp_path):
    model = compressed(name, "quantized_rows")
    before = logits(model)
    restored = model.dequantize()
    torch.testing.assert_close(logits(restored), before, rtol=1e-5, atol=1e-5)
    stock = dense(name)
    assert [type(m) for m in restored.modules()] == [type(m) for m in stock.modules()]
    assert restored.get_output_embeddings().weight is restored.get_input_embeddings().weight
    again = reloaded(restored, tmp_path)
    assert torch.equal(logits(again), logits(restored))
    assert not hasattr(again.config, "quantization_config")
    restored.resize_token_embeddings(ROWS + 5)


@pytest.mark.parametrize(
    ("format", "buffers"), [("tensor_train", True), ("product_quantized", False), ("quantized_rows", True)]
)
def test_disk_offload(format, buffers, tmp_path):
    model = compressed("llama", format)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers": "cpu", "model.norm": "cpu"}
    again = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map={**places, "model.rotary_emb": "cpu"},
        offload_folder=tmp_path / "offload",
        offload_buffers=buffers,
    )
    last = again.lm_head.structure.tensors()[-1].name
    assert getattr(again.lm_head, last).is_meta
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("places", ["cpu", "auto", {"": "cpu"}])
def test_device_maps(places, tmp_path):
    model = compressed("llama", "product_quantized")
    again = reloaded(model, tmp_path, device_map=places)
    assert shares(again)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("format", QUANTISED)
def test_copies_and_pickles(format, tmp_path):
    model = compressed("llama", format)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert torch.equal(logits(again), logits(model))
        assert shares(again)
        assert numbers(again) == numbers(model)
        again.resize_token_embeddings(ROWS + 9)
        assert logits(again).shape[-1] == ROWS + 9
        assert model.lm_head.num_classes == ROWS


def test_moves_do_not_double_the_file(tmp_path):
    model = compressed("llama", "product_quantized")
    model.lm_head.codes = model.lm_head.codes.clone()  # as .to(another device) does
    model.save_pretrained(tmp_path)
    assert "lm_head.codes" not in load_file(tmp_path / "model.safetensors")


def test_a_new_table_is_followed_by_the_head():
    model = compressed("llama", "low_rank")
    fresh = tb.Embedding(ROWS, 32, tb.LowRank(rank=4))
    model.set_input_embeddings(fresh)
    model.tie_weights()
    assert model.lm_head.u is fresh.u
    assert model.state_dict()["lm_head.u"].data_ptr() == fresh.u.data_ptr()


def test_half_and_float_and_the_trainer_are_not_refused():
    model = compressed("llama", "product_quantized")
    assert model.half().float().lm_head.codebooks.dtype == torch.float32
    assert not model.is_quantized


def test_compressed_while_loading(tmp_path):
    dense().save_pretrained(tmp_path / "dense")
    config = TensorbedConfig(FORMATS["quantized_rows"], min_rows=ROWS)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    assert model.lm_head.structure.kind == "quantized_rows"
    assert torch.equal(logits(model), logits(compressed("llama", "quantized_rows")))
    assert torch.equal(logits(reloaded(model, tmp_path / "small")), logits(model))


def test_adopt_layers_put_in_by_hand(tmp_path):
    model = dense(tied=False)
    model.model.embed_tokens = tb.TTEmbedding(ROWS, 32, rank=4)
    adopt(model)
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))
    with pytest.raises(ValueError, match="no layer"):
        adopt(dense())


def test_readers_of_the_weight():
    model = compressed("mamba", "product_quantized")
    weight = model.get_input_embeddings().weight
    assert weight.shape == (ROWS, 32)
    assert weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()
    assert model.get_input_embeddings().weight.dtype == torch.float32
    assert weight[3:5].shape == (2, 32)


def test_a_config_alone_makes_a_dense_model(tmp_path):
    compressed().save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model.lm_head) is torch.nn.Linear


@pytest.mark.parametrize(("name", "format"), zip(["llama", "bart", "bert"], QUANTISED, strict=True))
def test_files_of_our_own(name, format, tmp_path):
    model = compressed(name, format)
    tb.save(model, tmp_path / "model.safetensors")
    for into in (dense(name), compressed(name, format)):
        with torch.no_grad():
            next(p for p in into.get_input_embeddings().parameters()).zero_()
        tb.load(tmp_path / "model.safetensors", into=into)
        assert torch.equal(logits(into), logits(model))
        assert shares(into)
        again = reloaded(into, tmp_path / "folder")
        assert torch.equal(logits(again), logits(model))
        into.resize_token_embeddings(ROWS + 4)


@pytest.mark.parametrize("formats", [FORMATS["product_quantized"], {"model.embed_tokens": tb.QuantizedRows(bits=4)}])
def test_what_was_untied_stays_so_when_dense_again(formats, tmp_path):
    model = dense()
    tb.compress_(model, formats, min_rows=ROWS, tied="untie", include_heads=False)
    before = logits(model)
    model.dequantize()
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), before, rtol=1e-5, atol=1e-5)


def test_dequantize_to_another_dtype():
    model = compressed("llama", "quantized_rows").dequantize(dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("bert.embeddings.word_embeddings.padding_row"), "lacks .*padding_row"),
        (lambda t: t.update({"bert.embeddings.word_embeddings.padding_row": torch.zeros(7)}), r"padding_row .*\(7,\)"),
        (
            lambda t: t.update({f"{TABLE}.codes": t[f"{TABLE}.codes"].float()}),
            "codes is stored as F32 .* whole numbers",
        ),
        (
            lambda t: t.update({f"{TABLE}.codebooks": t[f"{TABLE}.codebooks"].to(torch.int8)}),
            "codebooks is stored as I8",
        ),
        (
            lambda t: t.update({f"{TABLE}.padding_row": t[f"{TABLE}.padding_row"].to(torch.int8)}),
            "padding_row is stored as I8 .* floating-point numbers",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, change, said):
    compressed("bert", "product_quantized").save_pretrained(tmp_path)
    edit_file(tmp_path, change)
    with pytest.raises((ValueError, RuntimeError), match=said):
        transformers.BertForMaskedLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q.update(layers=7),
        lambda q: q.update(layers=["a"]),
        lambda q: q.update(layers={}),
        lambda q: q.update(untied=5),
        lambda q: q.update(untied="lm_head"),
        lambda q: q.update(version="1"),
        lambda q: q.update(version=0),
        lambda q: q["layers"]["lm_head"].update(tied_to=7),
        lambda q: q["layers"]["lm_head"].pop("options"),
        lambda q: q["layers"]["lm_head"]["options"].update(impl=3),
    ],
)
def test_edited_configs_give_clear_errors(tmp_path, change):
    compressed().save_pretrained(tmp_path)
    edit_config(tmp_path, change)
    with pytest.raises(ValueError, match=r"quantization_config|version"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_codes_that_name_nothing_are_refused(tmp_path):
    model = dense("llama", vocab_size=ROWS)
    tb.compress_(model, tb.HotRows(), min_rows=ROWS)
    model.save_pretrained(tmp_path)
    edit_file(tmp_path, lambda t: t.update({"model.embed_tokens.places": t["model.embed_tokens.places"].flip(0)}))
    with pytest.raises(ValueError, match="places of hot rows must ascend"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_structure_that_no_file_can_name_changes_nothing():
    class Unknown(tb.LowRank):
        def bind(self, budget):
            return replace_class(super().bind(budget))

        def fit(self, table, budget):
            found = super().fit(table, budget)
            return type(found)(replace_class(found.structure), found.params)

    model = dense()
    before = logits(model)
    with pytest.raises(TypeError, match="cannot be described"):
        tb.compress_(model, Unknown(rank=2), min_rows=ROWS)
    assert type(model.lm_head) is torch.nn.Linear
    assert torch.equal(logits(model), before)


def replace_class(structure):
    """The same, of a class that was never registered."""
    unknown = type("UnknownMatrix", (type(structure),), {})
    return unknown(structure.rows, structure.cols, structure.rank)


def test_models_of_another_quantiser_are_refused():
    model = dense()
    model.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    with pytest.raises(ValueError, match="quantised by bitsandbytes"):
        tb.compress_(model, FORMATS["low_rank"], min_rows=ROWS)
    assert type(model.lm_head) is torch.nn.Linear


def test_layers_replaced_by_hand_after_compressing(tmp_path):
    model = dense()
    tb.compress_(model, tb.StraightThrough(bits=4), min_rows=ROWS)
    table = model.model.embed_tokens.packed()
    model.model.embed_tokens, model.lm_head = table, tb.Head.tied_to(table)
    again = reloaded(model, tmp_path)
    assert torch.equal(logits(again), logits(model))
    assert again.lm_head.structure.kind == "quantized_rows"
    assert again.lm_head.scale is again.model.embed_tokens.scale


def test_scaled_embeddings_that_do_more_are_refused():
    class MyScaledWordEmbedding(torch.nn.Embedding):
        embed_scale = 2.0

    model = dense()
    for odd in (MyScaledWordEmbedding(ROWS, 32), with_a_row_of_its_own()):
        model.model.embed_tokens = odd
        with pytest.raises(TypeError, match="ScaledWordEmbedding"):
            tb.compress_(model, FORMATS["tensor_train"], min_rows=ROWS, include_heads=False)


def with_a_row_of_its_own():
    """As T5Gemma 2 has one."""
    known = transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding
    made = type("OtherScaledWordEmbedding", (known,), {"__module__": known.__module__})(ROWS, 32, 0)
    made.eoi_embedding = torch.nn.Parameter(torch.zeros(32))
    return made


def test_dense_models_made_with_the_same_config(tmp_path):
    first, second = dense(), dense()
    second.config = first.config
    tb.compress_(first, FORMATS["tensor_train"], min_rows=ROWS)
    assert not hasattr(second.config, "quantization_config")
    assert first.model.config is first.config
    assert torch.equal(logits(reloaded(second, tmp_path / "second")), logits(second))
    third = type(first)(first.config).eval()  # its config says that it is compressed
    with pytest.raises(ValueError, match="remove its quantization_config"):
        reloaded(third, tmp_path / "third")


@pytest.mark.parametrize("name", ["phi", "modernbert", "bert"])
def test_a_bias_that_the_file_has_not_is_zero(name, tmp_path):
    model = compressed(name, "quantized_rows")
    with torch.no_grad():
        model.get_output_embeddings().bias.fill_(3)
    again = reloaded(reloaded(model, tmp_path / "task", type(model.base_model)), tmp_path / "base", type(model))
    assert again.get_output_embeddings().bias.count_nonzero() == 0


def test_a_resized_head_with_a_bias_comes_back(tmp_path):
    model = compressed("bert", "quantized_rows", tied=False)
    model.resize_token_embeddings(ROWS + 11)
    again = reloaded(model, tmp_path)
    assert logits(again).isfinite().all()
    assert logits(again).shape[-1] == ROWS + 11


def test_parts_are_saved_by_themselves(tmp_path):
    model = compressed("llama", "product_quantized")
    model.resize_token_embeddings(ROWS + 8)
    with torch.no_grad():
        expected = model.model(ids()).last_hidden_state
    found = reloaded(model.model, tmp_path / "part", transformers.LlamaModel)
    assert torch.equal(found(ids()).last_hidden_state, expected)
    assert torch.equal(logits(reloaded(model, tmp_path / "whole")), logits(model))


@pytest.mark.parametrize("name", ["llama", "marian", "bart", "t5"])
def test_all_that_share_a_table_are_resized(name, tmp_path):
    model = compressed(name, "quantized_rows")
    model.resize_token_embeddings(ROWS + 11)
    assert logits(model).shape[-1] == ROWS + 11
    assert torch.equal(logits(reloaded(model, tmp_path)), logits(model))


def test_a_part_whose_table_others_share_is_not_resized_alone():
    model = compressed("llama", "quantized_rows")
    with pytest.raises(ValueError, match="of the whole model"):
        model.model.resize_token_embeddings(ROWS + 5)
    assert logits(model).shape[-1] == ROWS
    alone = compressed("llama", "quantized_rows", tied=False)
    alone.model.resize_token_embeddings(ROWS + 5)
    assert alone.model.embed_tokens.num_embeddings == ROWS + 5


def test_resizing_keeps_hooks_and_the_lazy_head():
    model = loss_without_logits(compressed("llama", "quantized_rows"))
    model.requires_grad_(False)
    model.enable_input_require_grads()
    model.resize_token_embeddings(ROWS + 8)
    assert model.get_input_embeddings()(ids()).requires_grad
    assert model.lm_head.forward.args[0] is model.lm_head
    assert type(model.train()(ids()).logits) is not torch.Tensor


def test_dequantize_after_saving(tmp_path):
    model = compressed("llama", "quantized_rows")
    before = logits(model)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(model.dequantize()), before, rtol=1e-5, atol=1e-5)
