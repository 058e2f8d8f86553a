"""A file of ``tb.save`` and a folder of ``save_pretrained`` for every kind: ``python tests/golden_files.py FOLDER``.

Only public names are used, so that the same lines run at any commit.
"""

import json
import sys
from pathlib import Path

import torch
import transformers

import tensorbed as tb
import tensorbed.integrations.transformers

ROWS, COLS = 240, 16
FORMATS = {
    "dense": tb.Dense(),
    "low_rank": tb.LowRank(rank=3),
    "quantized_rows": tb.QuantizedRows(bits=4),
    "product_quantized": tb.ProductQuantized(parts=4, rotate=True),
    "hot_rows": tb.HotRows(),
    "straight_through": tb.StraightThrough(bits=4),
    "tensor_train": tb.TensorTrain(rank=3),
    "tensor_ring": tb.TensorRing(rank=2),
}


def model(class_name):
    torch.manual_seed(0)
    sizes = {"vocab_size": ROWS, "hidden_size": COLS, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = getattr(transformers, class_name)
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 32, "tie_word_embeddings": True, "pad_token_id": 0}
    return kind(kind.config_class(**sizes)).eval()


def tied_pair(format):
    """An embedding with a padding row, a head that is tied to it, and a bag."""
    torch.manual_seed(0)
    table = torch.randn(ROWS, COLS)
    embedding = tb.Embedding.from_pretrained(table, format, padding_idx=3)
    bag = tb.EmbeddingBag.from_pretrained(table, format, mode="sum")
    return torch.nn.ModuleDict({"embedding": embedding, "head": tb.Head.tied_to(embedding), "bag": bag})


def outputs(pair):
    """Of a pair: rows, scores and bags."""
    index = torch.arange(0, ROWS, 7).clamp_max(ROWS - 1)
    made = (pair["embedding"](index), pair["head"](torch.ones(COLS)), pair["bag"](index.view(5, 7)))
    return torch.cat([part.detach().reshape(-1) for part in made]).tolist()


def hidden_states(model):
    index = torch.arange(0, ROWS, 9)[None] % 32
    with torch.no_grad():
        return model(index)[0].reshape(-1)[::11].tolist()


def main(folder):
    expected = {}
    for name, format in FORMATS.items():
        pair = tied_pair(format)
        tb.save(pair, folder / f"{name}.safetensors")
        expected[name] = outputs(pair)
        tied = model("LlamaForCausalLM" if name == "hot_rows" else "BertModel")
        tb.compress_(tied, format, min_rows=100)
        tied.save_pretrained(folder / name)
        expected[f"{name}/"] = hidden_states(tied)
    (folder / "outputs.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
