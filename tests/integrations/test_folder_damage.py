"""Damage to folders of compressed models is seen: the header of every file has checksums of our layers' tensors."""

import json
import random
import warnings
import zlib

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_pitfalls import edit_config
from tiny import FORMATS, GROUPED, ROWS, compressed, ids, logits, reloaded

import tensorbed as tb
from tensorbed.integrations.transformers import TensorbedConfig
from tensorbed.integrations.transformers.config import check_files

ENTRY = "tensorbed.checksums"


def header_of(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), 8 + size


def ours(folder):
    """File, name and place of every tensor of our layers."""
    for path in sorted(folder.glob("*.safetensors")):
        header, start = header_of(path)
        for name, entry in header.items():
            if name.rpartition(".")[2].startswith(("core_", "codes", "codebooks", "scale", "steps", "padding_row")):
                yield path, name, start + entry["data_offsets"][0], start + entry["data_offsets"][1]


def flip(path, bit):
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0] ^ 1 << bit % 8
        file.seek(bit // 8)
        file.write(bytes([byte]))


def without_checksums(folder):
    """As versions before wrote it."""
    for path in folder.glob("*.safetensors"):
        save_file(load_file(path), path, {"format": "pt"})


def load(folder, **options):
    """With any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def test_every_shard_has_checksums_of_all_our_tensors(tmp_path):
    compressed("llama", "quantized_rows", tied=False).save_pretrained(tmp_path, max_shard_size="20KB")
    found = list(ours(tmp_path))
    assert len({path for path, *_ in found}) > 1
    for path, name, start, stop in found:
        header, _ = header_of(path)
        kind = {"F32": "float32", "U8": "uint8", "I8": "int8"}[header[name]["dtype"]]
        meaning = zlib.crc32(f"torch.{kind} {header[name]['shape']}".encode())
        expected = zlib.crc32(path.read_bytes()[start:stop], meaning)
        assert json.loads(header["__metadata__"][ENTRY])["tensors"][name] == f"{expected:08x}"


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("tensor_train", {}),
        ("product_quantized", {"dtype": torch.bfloat16}),
        ("product_quantized", {"device_map": "cpu"}),
        ("tensor_train", {"device_map": {"": "cpu"}, "dtype": "auto"}),
    ],
    ids=str,
)
def test_a_flipped_bit_in_any_shard_is_refused_by_name(format, options, tmp_path):
    model = compressed("llama", format)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    chance = random.Random(0)
    for path, name, start, stop in list(ours(tmp_path)):
        bit = chance.randrange(8 * start, 8 * stop)
        flip(path, bit)
        with pytest.raises(ValueError, match=rf"{name} in .*{path.name} is damaged"):
            load(tmp_path, **options)
        flip(path, bit)
    again = load(tmp_path, **options)
    if "dtype" not in options:
        assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("format", ["tensor_ring", "quantized_rows", "hot_rows"])
def test_flipped_bits_all_over_our_tensors(format, tmp_path):
    """The first and the last bit of each tensor, and some hundreds between."""
    compressed("bert", format).save_pretrained(tmp_path, max_shard_size="20KB")
    config = TensorbedConfig(**json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    files = sorted(tmp_path.glob("*.safetensors"))
    check_files(config, files)
    bits = [(path, bit) for path, _, a, b in ours(tmp_path) for bit in (*range(8 * a, 8 * b, 997), 8 * b - 1)]
    for path, bit in bits[:: 1 + len(bits) // 300]:
        flip(path, bit)
        with pytest.raises(ValueError, match="is damaged: its checksum is"):
            check_files(config, files)
        flip(path, bit)
    check_files(config, files)


def test_a_damaged_file_is_refused_before_it_is_left_on_disk(tmp_path):
    compressed("llama", "quantized_rows").save_pretrained(tmp_path)
    path, _, start, _ = next(ours(tmp_path))
    flip(path, 8 * start)
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers": "cpu", "model.norm": "cpu"}
    with pytest.raises(ValueError, match=r"embed_tokens\.\w+ in .* is damaged"):
        load(tmp_path, device_map={**places, "model.rotary_emb": "cpu"}, offload_folder=tmp_path / "offload")


def test_a_model_left_on_disk_is_saved_with_checksums(tmp_path):
    model = compressed("llama", "quantized_rows")
    model.save_pretrained(tmp_path / "first")
    places = {"model.embed_tokens": "disk", "lm_head": "disk", "model.layers": "cpu", "model.norm": "cpu"}
    options = {"device_map": {**places, "model.rotary_emb": "cpu"}, "offload_folder": tmp_path / "offload"}
    load(tmp_path / "first", **options).save_pretrained(tmp_path / "second")
    assert torch.equal(logits(load(tmp_path / "second")), logits(model))


def test_training_and_resizing_change_the_checksums(tmp_path):
    model = compressed("llama", "tensor_train")
    model.save_pretrained(tmp_path)
    for change in (lambda: train_a_step(model), lambda: model.resize_token_embeddings(ROWS + 5), model.half):
        before, _ = header_of(tmp_path / "model.safetensors")
        change()
        model.save_pretrained(tmp_path)
        after, _ = header_of(tmp_path / "model.safetensors")
        assert before["__metadata__"][ENTRY] != after["__metadata__"][ENTRY]
        assert torch.equal(load(tmp_path).lm_head.core_1, model.lm_head.core_1)


def train_a_step(model):
    model(input_ids=ids(), labels=ids()).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("shards", ["20KB", "1GB"])
def test_folders_of_before_load_with_a_note(shards, tmp_path):
    model = compressed("llama", "product_quantized")
    model.save_pretrained(tmp_path, max_shard_size=shards)
    without_checksums(tmp_path)
    with pytest.warns(UserWarning, match=r"has no checksums .* model\.save_pretrained") as notes:
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert sum("no checksums" in str(note.message) for note in notes) == 1
    assert notes[0].filename == __file__
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path)
    load(tmp_path)


def test_shards_put_together_and_renamed_by_others(tmp_path):
    """With their header they are checked as before; a name that is not in it is noted."""
    model = compressed("llama", "tensor_train")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    with safe_open(shards[0], "pt") as file:
        header = file.metadata()
    tensors = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    for path in (*shards, tmp_path / "model.safetensors.index.json"):
        path.unlink()
    save_file(tensors, tmp_path / "model.safetensors", header)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    checksums = json.loads(header[ENTRY])
    checksums["tensors"].pop("model.embed_tokens.core_1")
    save_file(tensors, tmp_path / "model.safetensors", {**header, ENTRY: json.dumps(checksums)})
    with pytest.warns(UserWarning, match="has no checksums"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    renamed = {name.replace("model.embed_tokens", "model.words"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors", header)
    with pytest.warns(UserWarning, match="has no checksums"):
        again = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, key_mapping={"model.words": "model.embed_tokens"}
        )
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda q: q["layers"]["lm_head"]["options"].update(std=0.5),
        lambda q: q["layers"]["model.embed_tokens"]["options"].update(scale_grad_by_freq=True),
        lambda q: q["layers"]["lm_head"].update(dtype="float16"),
        lambda q: q.update(untied=["lm_head"]),
    ],
)
def test_a_changed_config_is_refused(change, tmp_path):
    compressed().save_pretrained(tmp_path)
    edit_config(tmp_path, change)
    with pytest.raises(ValueError, match=r"the description in .*config\.json.* is damaged"):
        load(tmp_path)


def test_names_that_transformers_changes_are_checked(tmp_path):
    """A language model inside of another has other names in the file than in the model."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=16, patch_size=8),
        text_config=transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True),
        image_token_index=1,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    tb.compress_(model, FORMATS["tensor_ring"], min_rows=ROWS)
    for original in (True, False):
        model.save_pretrained(tmp_path, save_original_format=original)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            again = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
        assert torch.equal(logits(again), logits(model))
        for path, name, start, _ in list(ours(tmp_path)):
            flip(path, 8 * start + 5)
            with pytest.raises(ValueError, match=rf"{name} in .* is damaged"):
                transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
            flip(path, 8 * start + 5)


@pytest.mark.parametrize("name", ["bert", "t5", "phi"])
def test_biases_and_parts_are_checked(name, tmp_path):
    model = compressed(name, "quantized_rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        again = reloaded(model, tmp_path / "task")
        base = type(model.base_model) if name != "t5" else transformers.T5Model
        reloaded(base.from_pretrained(tmp_path / "task"), tmp_path / "base", type(model))
    head = again.get_output_embeddings()
    if head.bias is not None:
        path = tmp_path / "task" / "model.safetensors"
        header, start = header_of(path)
        checked = json.loads(header["__metadata__"][ENTRY])["tensors"]
        biases = [key for key in header if key.endswith("bias") and header[key].get("shape") == [ROWS]]
        assert biases
        for key in biases:
            assert key in checked
            flip(path, 8 * (start + header[key]["data_offsets"][0]))
            with pytest.raises(ValueError, match=rf"{key} in .* is damaged"):
                type(model).from_pretrained(tmp_path / "task")
            flip(path, 8 * (start + header[key]["data_offsets"][0]))


def test_names_of_any_length_give_short_messages(tmp_path):
    compressed().save_pretrained(tmp_path)
    long = "n" * 100_000
    edits = [
        lambda q: q["layers"]["lm_head"].update(structure=long),
        lambda q: q["layers"]["lm_head"].update(tied_to=long),
        lambda q: q.update({long: 1}),
        lambda q: q.update(untied=long),
        lambda q: q.update(version=long),
    ]
    good = (tmp_path / "config.json").read_text()
    for change in edits:
        edit_config(tmp_path, change)
        with pytest.raises((ValueError, TypeError)) as refused:
            load(tmp_path)
        assert len(str(refused.value)) <= 1000
        (tmp_path / "config.json").write_text(good)
