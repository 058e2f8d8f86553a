"""What files hold: dtypes, values, options and ties that are refused, kept, or written in another way."""

import copy
import json
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_files import Model, described, edit, header_of, rewrite_on_purpose, same
from torch import nn

import tensorbed as tb


def restored(path, **changed):
    """The same file with some tensors changed."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
    save_file({**load_file(path), **changed}, path, header)
    rewrite_on_purpose(path, *header_of(path))


@pytest.mark.parametrize(
    ("format", "name", "dtype"),
    [
        (tb.TensorTrain(rank=3), "core_0", torch.int8),
        (tb.TensorTrain(rank=3), "core_1", torch.float16),
        (tb.LowRank(rank=2), "u", torch.int32),
        (tb.ProductQuantized(parts=4), "codes", torch.float32),
        (tb.ProductQuantized(parts=4), "codes", torch.int8),
        (tb.QuantizedRows(), "codes", torch.uint8),
        (tb.QuantizedRows(bits=4, group=4), "steps", torch.bool),
        (tb.QuantizedRows(), "padding_row", torch.int64),
    ],
)
def test_tensors_of_other_dtypes_are_refused(format, name, dtype, tmp_path):
    path = tmp_path / "layer"
    tb.save(tb.Embedding.from_pretrained(torch.randn(300, 12), format, padding_idx=1), path)
    restored(path, **{name: load_file(path)[name].to(dtype)})
    with pytest.raises(ValueError, match=rf"{name} is stored as .* its description needs"):
        tb.load(path)


def test_codes_without_an_entry_are_refused_and_the_model_left_alone(tmp_path):
    path = tmp_path / "m"
    format = tb.ProductQuantized(parts=3)
    model = nn.ModuleDict({"words": tb.Embedding.from_pretrained(torch.randn(100, 12), format)})
    tb.save(model, path)
    codes = load_file(path)["words.codes"]
    codes[7, 1] = 100
    restored(path, **{"words.codes": codes})
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"layer 'words' .* codes name entry 100 of codebooks of 100"):
        tb.load(path, into=model)
    same(model, before)
    codes[7, 1] = 99
    restored(path, **{"words.codes": codes})
    tb.load(path, into=model)
    assert model["words"].codes[7, 1] == 99


LAYERS = {
    "embedding": lambda: tb.TTEmbedding(300, 12, 3, padding_idx=4),
    "bag": lambda: tb.EmbeddingBag(300, 12, tb.LowRank(rank=2), mode="sum"),
    "head": lambda: tb.TTHead(12, 300, rank=3, bias=True),
    "quantised": lambda: tb.Embedding.from_pretrained(torch.randn(300, 12), tb.QuantizedRows(bits=4, group=5)),
    "hot": lambda: tb.Embedding.from_pretrained(torch.randn(300, 12), tb.HotRows()),
    "straight": lambda: tb.Embedding(300, 12, tb.StraightThrough(bits=4)),
    "product": lambda: tb.Embedding.from_pretrained(torch.randn(300, 12), tb.ProductQuantized(parts=4)),
}
OPTIONS = [
    ("embedding", "impl", "fast"),
    ("embedding", "impl", ["auto"]),
    ("embedding", "std", "0.1"),
    ("embedding", "std", -1),
    ("embedding", "std", True),
    ("embedding", "std", 10**400),
    ("embedding", "padding_idx", 1.0),
    ("embedding", "padding_idx", 300),
    ("embedding", "padding_idx", 10**30),
    ("embedding", "padding_idx", True),
    ("embedding", "scale_grad_by_freq", 1),
    ("embedding", "scale_grad_by_freq", None),
    ("bag", "mode", "median"),
    ("bag", "mode", {}),
    ("bag", "include_last_offset", "no"),
    ("head", "bias", 1),
    ("head", "bias", "yes"),
    ("head", "impl", "native"),
    ("head", "memory_budget", 0),
    ("head", "memory_budget", 1.5),
    ("head", "memory_budget", "1GB"),
    ("head", "memory_budget", 10**30),
]


@pytest.mark.parametrize(("kind", "option", "value"), OPTIONS)
def test_options_of_the_wrong_type_or_size_are_refused(kind, option, value, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS[kind](), path)
    described(path, lambda d: edit(d, options={**d["layers"][""]["options"], option: value}))
    with pytest.raises(ValueError, match=f"not a description of a layer.*{option}"):
        tb.load(path)


def test_missing_options_are_refused(tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["bag"](), path)
    described(path, lambda d: edit(d, options={k: v for k, v in d["layers"][""]["options"].items() if k != "mode"}))
    with pytest.raises(ValueError, match="without options mode"):
        tb.load(path)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("embedding", "rows", True),
        ("embedding", "ranks", [1, 3.0, 3, 1]),
        ("embedding", "ranks", "1331"),
        ("embedding", "ranks", []),
        ("embedding", "row_factors", []),
        ("embedding", "rows", 10**30),
        ("bag", "rank", 2.0),
        ("bag", "rank", 0),
        ("quantised", "bits", 5),
        ("quantised", "group", 0),
        ("quantised", "group", -5),
        ("quantised", "group", 10**20),
        ("product", "parts", 5),
        ("product", "parts", -4),
        ("product", "rotated", 0),
        ("product", "rows", float("nan")),
        ("product", "rows", float("inf")),
    ],
)
def test_structures_that_cannot_be_are_refused(kind, field, value, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS[kind](), path)
    described(path, lambda d: edit(d, structure=json.dumps({**json.loads(d["layers"][""]["structure"]), field: value})))
    with pytest.raises(ValueError, match="not a description of a layer"):
        tb.load(path)


@pytest.mark.parametrize("text", ['{"version": NaN}', '{"version": Infinity}', "1" * 5000, "[" * 100_000, '"\\ud800"'])
def test_text_that_is_no_description_is_refused(text, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    header, body = header_of(path)
    header["__metadata__"]["description"] = text
    rewrite_on_purpose(path, header, body)
    with pytest.raises(ValueError, match=r"the description in .* cannot be read"):
        tb.load(path)


LONG = "n" * 1_000_000


@pytest.mark.parametrize(
    "change",
    [
        lambda d: {**d, "layers": {LONG: d["layers"][""]}},
        lambda d: edit(d, tied_to=LONG),
        lambda d: edit(d, structure=LONG),
        lambda d: edit(d, options={LONG: 1}),
        lambda d: edit(d, structure=json.dumps({**json.loads(d["layers"][""]["structure"]), "ranks": LONG})),
        lambda d: {**d, "aliases": {LONG: "core_0"}},
        lambda d: {**d, "layers": {str(k): d["layers"][""] for k in range(1000)}},
        lambda d: {**d, "layers": {"\x1b[2J": d["layers"][""]}},
    ],
)
def test_messages_are_short_whatever_a_file_says(change, tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    described(path, change)
    for into in (None, Model()):
        with pytest.raises(ValueError, match=r"layer|the model has no") as refused:
            tb.load(path, into=into)
        assert len(str(refused.value)) <= 1000
        assert str(refused.value).isprintable()


def test_a_long_name_of_a_tensor_gives_a_short_message(tmp_path):
    path = tmp_path / "layer"
    tb.save(LAYERS["embedding"](), path)
    header, body = header_of(path)
    header[LONG] = header.pop("core_1")
    rewrite_on_purpose(path, header, body)
    with pytest.raises(ValueError, match="core_1 is missing") as refused:
        tb.load(path)
    assert len(str(refused.value)) <= 1000


def tied_heads():
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(8, 3000), "b": nn.Linear(8, 3000)})
    model["b"].weight = model["a"].weight
    return model


def test_heads_tied_to_each_other_come_back_tied(tmp_path):
    model = tied_heads()
    tb.compress_(model, {"a": tb.LowRank(rank=3), "b": tb.LowRank(rank=3)})
    assert model["b"].u is model["a"].u
    tb.save(model, tmp_path / "m")
    for other in (tied_heads(), copy.deepcopy(model)):
        tb.load(tmp_path / "m", into=other)
        same(model, other)
        assert other["b"].u is other["a"].u
        assert other["b"].is_tied
        assert other["b"].bias is not other["a"].bias


@pytest.mark.parametrize("padding_idx", [None, 5])
@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.ProductQuantized(parts=4)])
def test_a_tied_head_alone_is_saved_as_one_that_is_not(padding_idx, format, tmp_path):
    table = tb.Embedding.from_pretrained(torch.randn(300, 12), format, padding_idx=padding_idx)
    head = tb.Head.tied_to(table, bias=True)
    tb.save(head, tmp_path / "head")
    found = tb.load(tmp_path / "head")
    assert not found.is_tied
    same(head, found)
    h = torch.randn(3, 12)
    assert torch.equal(found(h), head(h))
    tb.save(nn.ModuleList([head, tb.Head.tied_to(head)]), tmp_path / "two")
    into = nn.ModuleList([nn.Linear(12, 300), nn.Linear(12, 300, bias=False)])
    into[1].weight = into[0].weight
    one, two = tb.load(tmp_path / "two", into=into)
    assert (one.is_tied, two.is_tied) == (False, True)
    assert torch.equal(one(h), head(h))


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_tied_in_one_of_both_only_is_refused(tied, compressed, tmp_path):
    tb.save(Model(tied=tied), tmp_path / "m")
    other = Model(tied=not tied, compressed=compressed)
    before = copy.deepcopy(other)
    match = "words and head are not tied in the model" if tied else "words and head are tied in the model"
    with pytest.raises(ValueError, match=match):
        tb.load(tmp_path / "m", into=other)
    same(other, before)


@pytest.mark.parametrize("tied", [True, False])
def test_other_tensors_are_tied_in_both_or_none(tied, tmp_path):
    def made(tied):
        model = nn.ModuleDict({"words": tb.TTEmbedding(300, 12, 3), "x": nn.Linear(3, 3), "y": nn.Linear(3, 3)})
        if tied:
            model["y"].weight = model["x"].weight
        return model

    tb.save(made(tied), tmp_path / "m")
    with pytest.raises(ValueError, match=r"x\.weight and y\.weight are (not )?tied in the model"):
        tb.load(tmp_path / "m", into=made(not tied))
    assert tb.load(tmp_path / "m", into=made(tied))


@pytest.mark.parametrize("tied", [True, False])
def test_an_optimiser_goes_on_after_loading_into_a_compressed_model(tied, tmp_path):
    model = Model(tied=tied).eval()
    tb.save(model, tmp_path / "m")
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.words.impl = "reference"
    tb.load(tmp_path / "m", into=model)
    same(model, Model(tied=tied))
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    assert model.words.impl == "auto"
    before = model.words.core_0.detach().clone()
    model(torch.arange(5)).sum().backward()
    optimiser.step()
    assert not torch.equal(model.words.core_0, before)
    tb.save(Model(tied=tied, rank=2), tmp_path / "m")
    tb.load(tmp_path / "m", into=model)  # of another structure: new ones, tied as before
    assert model.words.structure.ranks == (1, 2, 2, 1)
    assert (model.head.core_0 is model.words.core_0) is tied


class Extra(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = tb.TTEmbedding(300, 12, 3)

    def get_extra_state(self):
        return {"epoch": 3}

    def set_extra_state(self, state):
        pass


def shares_a_core():
    model = nn.ModuleList([tb.TTEmbedding(300, 12, 3), tb.TTEmbedding(300, 12, 3)])
    model[1].core_0 = model[0].core_0
    return model


def half_a_layer():
    layer = tb.TTEmbedding(300, 12, 3)
    layer.core_0.data = layer.core_0.data.half()
    return layer


def with_buffer(tensor):
    model = nn.ModuleDict({"words": tb.TTEmbedding(300, 12, 3)})
    model.register_buffer("other", tensor)
    return model


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (Extra, "_extra_state is a dict, of get_extra_state"),
        (lambda: nn.ModuleList([tb.TTEmbedding(300, 12, 3), nn.LazyLinear(3)]), r"1\.weight has no shape yet"),
        (lambda: with_buffer(torch.zeros(3, device="meta")), "other is on the meta device"),
        (lambda: with_buffer(torch.eye(3).to_sparse()), "other is a Tensor of torch.sparse_coo"),
        (shares_a_core, r"1\.core_0 and 0\.core_0 share their memory"),
        (half_a_layer, r"core_1 is torch.float32, its layer torch.float16"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(made, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        tb.save(made(), tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_views_and_strides_are_written_as_their_numbers(tmp_path):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.ModuleDict({"words": tb.TTEmbedding(300, 12, 3)})
        whole = torch.randn(10, 4)
        for name, view in {"whole": whole, "low": whole[:7], "high": whole[3:], "turned": whole.T}.items():
            model.register_buffer(name, view)
        model.register_buffer("wide", torch.randn(1).expand(4).clone() if seed else torch.randn(1).expand(4))
        return model

    model, other = made(0), made(1)
    tb.save(model, tmp_path / "m")
    tb.load(tmp_path / "m", into=other)
    same(model, other)
    assert other.low.data_ptr() == other.whole.data_ptr()  # as its class made them


@pytest.mark.parametrize("lost", [nn.LazyLinear(12), nn.Linear(12, 12, device="meta")], ids=["lazy", "meta"])
def test_a_model_that_is_not_complete_is_refused(lost, tmp_path):
    model = Model()
    tb.save(model, tmp_path / "m")
    model.body[0] = lost
    with pytest.raises(ValueError, match=r"body\.0\.weight of the model is without a shape or numbers"):
        tb.load(tmp_path / "m", into=model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
def test_a_bias_is_neither_lost_nor_made_up(bias, compressed, tmp_path):
    def head(bias, compressed=True):
        made = tb.TTHead(12, 300, rank=3, bias=bias) if compressed else nn.Linear(12, 300, bias=bias)
        return nn.ModuleDict({"head": made})

    tb.save(head(bias), tmp_path / "m")
    with pytest.raises(ValueError, match=r"head has (a bias|none) there, and here (none|a bias)"):
        tb.load(tmp_path / "m", into=head(not bias, compressed))


def test_numbers_do_not_become_counts_in_silence(tmp_path):
    path = tmp_path / "m"
    tb.save(Model(), path)
    name = "body.1.num_batches_tracked"
    restored(path, **{name: load_file(path)[name].float()})
    with pytest.raises(ValueError, match=f"{name} is torch.float32 there, and here torch.int64"):
        tb.load(path, into=Model())


ODD = [None, True, False, 0, 1, -1, 2, 3.5, 1e308, 10**30, "", "words", "auto", [], [1, 2], {}, {"a": 1}, [[[]]], "NaN"]


def places(value, path=()):
    """All places in a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, chance):
    """A copy with something odd at a place, or nothing."""
    if not path:
        return chance.choice(ODD)
    value = copy.copy(value)
    if len(path) == 1 and chance.random() < 0.2:
        value.pop(path[0])
    else:
        value[path[0]] = changed(value[path[0]], path[1:], chance)
    return value


def test_edited_descriptions_give_clear_errors_only(tmp_path):
    """Values of other types and sizes, missing and moved ones, in descriptions and structures: two thousand of them."""
    path, chance = tmp_path / "m", random.Random(0)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: make() for name, make in LAYERS.items()})
    model["tied"] = tb.Head.tied_to(model["embedding"])
    model["again"] = model["bag"]
    tb.save(model, path)
    header, body = header_of(path)
    good = json.loads(header["__metadata__"]["description"])
    for one in good["layers"].values():
        one["structure"] = json.loads(one["structure"])
    every = list(places(good))
    before, reasons = copy.deepcopy(model), []
    for _ in range(2000):
        case = good
        for _ in range(chance.choice([1, 1, 1, 2, 4])):
            place = chance.choice(every)
            with_place = place in set(places(case))
            case = changed(case, place, chance) if with_place else case
        if isinstance(case, dict) and isinstance(case.get("layers"), dict):
            texts = {
                n: {**o, "structure": _text(o.get("structure"))} for n, o in case["layers"].items() if type(o) is dict
            }
            case = {**case, "layers": {**case["layers"], **texts}}
        header["__metadata__"]["description"] = json.dumps(case)
        rewrite_on_purpose(path, header, body)
        try:
            tb.load(path, into=model)
        except ValueError as error:
            reasons.append(str(error))
    assert len(reasons) > 1500
    assert all(str(path) in reason or "the model has no" in reason for reason in reasons)
    same(model, before)


def _text(structure):
    return json.dumps(structure) if isinstance(structure, dict) else structure
