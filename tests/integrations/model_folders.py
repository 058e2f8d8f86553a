"""Small folders of models, as a user has them on disk."""

import json
import os
import shutil

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["the", "a", "man", "dog", "runs", "eats", "food", "in", "field", "and", "sees", "red", "house", "old", "tree"]
ROWS = 320
TEXTS = ["the man eats food", "a dog runs in the field and sees a red house", "", "old tree with a young dog", "man"]


def save_tokenizer(folder, words=WORDS):
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<unk>", *words])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", unk_token="<unk>")
    made.save_pretrained(folder)


def small(kind, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": ROWS,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        **options,
    }
    config = {"BertModel": "BertConfig", "LlamaForCausalLM": "LlamaConfig"}[kind]
    return getattr(transformers, kind)(getattr(transformers, config)(**sizes))


def make_bert(folder):
    """With what a folder of sentence-transformers has besides, and weights of other frameworks."""
    small("BertModel").save_pretrained(folder)
    save_tokenizer(folder)
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    (pooling / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}))
    dense = folder / "2_Dense"
    dense.mkdir()
    (dense / "model.safetensors").write_bytes(b"weights of another module")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "README.md").write_text("about the model")
    for name in ("tf_model.h5", "flax_model.msgpack", "pytorch_model.bin.index.json", "onnx/model.onnx", ".cache/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"old")
    return folder


def make_llama(folder, **options):
    small("LlamaForCausalLM", tie_word_embeddings=True, **options).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_gguf(folder):
    """One file with everything, its matrices in eight bits, as other programs write it."""
    import gguf

    model = small("LlamaForCausalLM", tie_word_embeddings=True, intermediate_size=64)
    config = model.config
    folder.mkdir()
    file = gguf.GGUFWriter(folder / "tiny.gguf", "llama")
    file.add_block_count(config.num_hidden_layers)
    file.add_context_length(config.max_position_embeddings)
    file.add_embedding_length(config.hidden_size)
    file.add_feed_forward_length(config.intermediate_size)
    file.add_head_count(config.num_attention_heads)
    file.add_head_count_kv(config.num_key_value_heads)
    file.add_layer_norm_rms_eps(config.rms_norm_eps)
    file.add_vocab_size(ROWS)
    tokens = ["<unk>", "t", "h", "e", "th", *WORDS]
    tokens += [f"word{number}" for number in range(ROWS - len(tokens))]
    file.add_tokenizer_model("gpt2")
    file.add_token_list(tokens)
    file.add_token_types([1] * ROWS)
    file.add_token_merges(["t h", "th e"])
    file.add_bos_token_id(0)
    file.add_eos_token_id(0)
    eight = gguf.GGMLQuantizationType.Q8_0
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored, numbers = names.get_name(name, try_suffixes=(".weight",)), tensor.numpy()
        if name == "lm_head.weight":
            continue
        if numbers.ndim == 2:
            file.add_tensor(stored, gguf.quants.quantize(numbers, eight), raw_dtype=eight)
        else:
            file.add_tensor(stored, numbers)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder


def in_hub_cache(root, model, name="models--org--bert"):
    """As the cache of Hugging Face has a model: links to blobs that are named by what is in them."""
    snapshot, blobs = root / "hub" / name / "snapshots" / ("0" * 40), root / "hub" / name / "blobs"
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(path for path in model.rglob("*") if path.is_file())):
        shutil.copyfile(path, blobs / f"{number:040x}")
        place = snapshot / path.relative_to(model)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(blobs / f"{number:040x}", place.parent))
    (root / "hub" / name / "refs").mkdir()
    (root / "hub" / name / "refs" / "main").write_text(snapshot.name)
    return snapshot
