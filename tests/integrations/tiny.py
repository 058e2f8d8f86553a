"""Tiny random models of many architectures, and what every test asks of them."""

import copy
import os

import pytest

pytest.importorskip("transformers")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from transformers.utils import logging

import tensorbed as tb

logging.set_verbosity_error()
logging.disable_progress_bar()

ROWS = 320
COMMON = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
PAIR = {
    "vocab_size": ROWS,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
T5 = {"vocab_size": ROWS, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# The configuration, the class with a head, and what the configuration is made with.
ARCHITECTURES = {
    "bert": ("BertConfig", "BertForMaskedLM", COMMON),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", COMMON),
    "xlm-r": ("XLMRobertaConfig", "XLMRobertaForMaskedLM", COMMON),
    "modernbert": (
        "ModernBertConfig",
        "ModernBertForMaskedLM",
        {**COMMON, **TOKENS, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta": ("DebertaV2Config", "DebertaV2ForMaskedLM", COMMON),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": ROWS, "n_embd": 32, "n_layer": 2, "n_head": 2, **TOKENS}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", GROUPED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", GROUPED),
    "phi": ("PhiConfig", "PhiForCausalLM", COMMON),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            **{k: v for k, v in COMMON.items() if k != "intermediate_size"},
            "ffn_dim": 48,
            "word_embed_proj_dim": 32,
        },
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "bart": ("BartConfig", "BartForConditionalGeneration", {**PAIR, "scale_embedding": True}),
    "marian": (
        "MarianConfig",
        "MarianMTModel",
        {**PAIR, "pad_token_id": ROWS - 1, "decoder_start_token_id": ROWS - 1},
    ),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"vocab_size": ROWS, "hidden_size": 32, "num_hidden_layers": 2}),
}

FORMATS = {
    "tensor_train": tb.TensorTrain(rank=6),
    "tensor_ring": tb.TensorRing(rank=4),
    "low_rank": tb.LowRank(rank=4),
    "quantized_rows": tb.QuantizedRows(bits=4, group=16),
    "product_quantized": tb.ProductQuantized(parts=8, sweeps=2),
    "hot_rows": tb.HotRows(),
    "dense": tb.Dense(),
}


def dense(name="llama", tied=True, **more):
    """A model with random weights, always the same."""
    config_name, model_name, options = ARCHITECTURES[name]
    config = getattr(transformers, config_name)(**{**options, **more})
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    return getattr(transformers, model_name)(config).eval()


def compressed(name="llama", format="tensor_train", tied=True, **options):
    model = dense(name, tied)
    tb.compress_(model, FORMATS[format], min_rows=ROWS, **options)
    return model


def ids(rows=ROWS, shape=(2, 7)):
    return torch.randint(3, rows - 5, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, index=None):
    index = ids() if index is None else index
    # A copy, because where a tensor lies in a mapped file changes the last bit of products with it.
    model = copy.deepcopy(model)
    more = {"decoder_input_ids": index} if model.config.is_encoder_decoder else {}
    return model(input_ids=index, **more).logits


def reloaded(model, folder, cls=None, **options):
    model.save_pretrained(folder)
    return (cls or type(model)).from_pretrained(folder, **options)


def numbers(model):
    """All that a model holds, what is shared once."""
    return sum(t.numel() for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())
