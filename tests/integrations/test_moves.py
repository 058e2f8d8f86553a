"""Tied models of transformers that are moved, converted, copied and loaded: one table goes in and one comes out."""

import copy
import pickle

import pytest
import torch
from tiny import ROWS, compressed, logits, numbers, reloaded

import tensorbed as tb
from tensorbed.files.description import tables
from tensorbed.nn.ties import shared_names

# As .to(another device) does it, for every tensor that it is given.
ELSEWHERE = "to another device"
MOVES = {
    ELSEWHERE: lambda model: model._apply(torch.clone),
    "half": lambda model: model.half(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "double and back": lambda model: model.double().float(),
    "to meta": lambda model: model.to("meta"),
    "to meta and back": lambda model: model.to("meta").to_empty(device="cpu"),
    "share_memory": lambda model: model.share_memory(),
}


def assert_one_table(model):
    """All of our layers hold the very same tensors, which agree in dtype and device."""
    layers = list(tables(model).values())
    assert len(layers) > 1
    for layer in layers[1:]:
        apart = [name for name in shared_names(layer) if getattr(layer, name) is not getattr(layers[0], name)]
        assert not apart, f"two of each: {', '.join(apart)}"
    for layer in layers:
        own = [getattr(layer, name) for name in shared_names(layer)]
        assert len({tensor.device for tensor in own}) == 1
        assert {tensor.dtype for tensor in own if tensor.is_floating_point()} == {layer._dtype}


# Codes that are no Parameters; a padding row and a bias besides; four layers over one table, two of them scaled.
@pytest.mark.parametrize(("name", "format"), [("llama", "product_quantized"), ("bert", "quantized_rows")])
@pytest.mark.parametrize("move", MOVES)
def test_moves_keep_one_table(name, format, move):
    model = compressed(name, format)
    before, count = logits(model), numbers(model)
    moved = MOVES[move](model)
    assert_one_table(moved)
    if "meta" not in move:  # where a bias is two, as in every model of transformers
        assert numbers(moved) == count
    if move in (ELSEWHERE, "double and back", "share_memory"):
        assert torch.equal(logits(moved), before)


def tied_to_a_new_table(model, folder):
    """As a user sets one, whose head follows when the model is tied again."""
    old = model.get_input_embeddings()
    model.set_input_embeddings(tb.Embedding.from_pretrained(old.weight.detach() * 2, tb.ProductQuantized(parts=8)))
    model.tie_weights()
    return model


def resized(model, folder):
    model.resize_token_embeddings(ROWS + 9)
    return model


def from_our_own_file(model, folder):
    tb.save(model, folder / "model.safetensors")
    into = compressed("llama", "product_quantized")
    return tb.load(folder / "model.safetensors", into=into)


def assigned(model, folder):
    model.load_state_dict({key: tensor.clone() for key, tensor in model.state_dict().items()}, assign=True)
    return model


@pytest.mark.parametrize(
    "become",
    [
        lambda model, folder: copy.deepcopy(model),
        lambda model, folder: pickle.loads(pickle.dumps(model)),
        lambda model, folder: copy.deepcopy(copy.deepcopy(model)),
        reloaded,
        resized,
        tied_to_a_new_table,
        from_our_own_file,
        assigned,
    ],
    ids=["deepcopy", "pickle", "copied twice", "reloaded", "resized", "new table", "our own file", "assigned"],
)
def test_what_has_become_of_a_model_moves_as_one(become, tmp_path):
    model = compressed("llama", "product_quantized")
    other = become(model, tmp_path)
    other.eval()
    before, count = logits(other), numbers(other)
    assert_one_table(other)
    MOVES[ELSEWHERE](other)
    assert_one_table(other)
    assert torch.equal(logits(other), before)
    other.half()
    assert_one_table(other)
    assert numbers(other) == count


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_all_layers_over_a_table_move_with_it(name):
    model = compressed(name, "product_quantized")
    assert len(tables(model)) > 2
    MOVES[ELSEWHERE](model)
    assert_one_table(model)
    model.to("meta")
    assert_one_table(model)


@pytest.mark.parametrize("part", ["model.embed_tokens", "model", "lm_head"])
def test_a_part_that_moves_takes_the_others_along(part):
    """As with a dense tied weight, whose Parameter is moved in place."""
    model = compressed("llama", "hot_rows")
    MOVES[ELSEWHERE](model.get_submodule(part))
    assert_one_table(model)
    model.get_submodule(part).to("meta")
    assert_one_table(model)


def test_copies_move_by_themselves():
    model = compressed("bert", "product_quantized")
    before, other = logits(model), copy.deepcopy(model)
    other.to("meta")
    assert_one_table(model)
    assert torch.equal(logits(model), before)
    table = copy.deepcopy(model.get_input_embeddings())
    model.half()
    assert table.padding_row.dtype == torch.float32


def test_untied_layers_stay_apart():
    model = compressed("llama", "product_quantized", tied=False)
    count = numbers(model)
    MOVES[ELSEWHERE](model)
    assert numbers(model) == count
    assert model.lm_head.codes is not model.model.embed_tokens.codes
    model.lm_head.half()
    assert model.model.embed_tokens.codebooks.dtype == torch.float32


def test_a_layer_that_was_replaced_is_no_longer_moved():
    model = compressed("llama", "product_quantized")
    old = model.get_input_embeddings()
    tied_to_a_new_table(model, None)
    model.to("meta")
    assert not old.codes.is_meta
    assert not old.codebooks.is_meta
