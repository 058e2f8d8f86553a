"""A head over an embedding's own table: what is shared, what is counted and stored once, and what moves together."""

import copy
import io
import pickle
import zipfile

import pytest
import torch
import torch.nn.functional as F
from others import Coded
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from samples import SAMPLES
from torch import nn

import tensorbed as tb
from tensorbed.testing import Draw, Sample, assert_near

PADDING = 4


# Of every structure two shapes far apart for gradients; other laws take one, and those of moves one of each storage.
SAMPLED = [*(sample for group in SAMPLES.values() for sample in group[::3][:2]), Sample(Coded(), 97, 12)]
ONE_EACH = [*(group[0] for group in SAMPLES.values()), Sample(Coded(), 97, 12)]
DRAWN = [sample for sample in ONE_EACH if sample.structure.can_initialise]
STORED = [SAMPLES["tensor_train"][0], SAMPLES["quantized_rows"][0], ONE_EACH[-1]]
each_sample = pytest.mark.parametrize("sample", SAMPLED, ids=str)
one_of_each = pytest.mark.parametrize("sample", ONE_EACH, ids=str)
# A model is moved and loaded in the order its parts were registered in, which is the user's.
both_orders = pytest.mark.parametrize("first", ["embedding", "head"], ids="{}_first".format)


def is_of_one_dtype(sample):
    return all(spec.dtype is None for spec in sample.structure.tensors())


def made(sample, kind=tb.Embedding, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    if sample.structure.can_initialise:
        layer = kind(sample.rows, sample.cols, sample.format, std=1.0, dtype=dtype, **options)
    else:
        layer = kind.from_pretrained(
            torch.randn(sample.rows, sample.cols, dtype=dtype), sample.format, freeze=False, **options
        )
    if layer.padding_row is not None:
        with torch.no_grad():
            layer.padding_row.normal_()  # zeros would hide a row that is lost
    return layer


def pair(sample, first="embedding", bias=False, kind=tb.Embedding, **options):
    """A model of both ends, in either order of registration."""
    embedding = made(sample, kind, **options)
    layers = {"embedding": embedding, "head": tb.Head.tied_to(embedding, bias)}
    return nn.ModuleDict({name: layers[name] for name in sorted(layers, key=lambda name: name != first)})


def names(layer):
    """Of all that is shared."""
    kept = [spec.name for spec in layer.structure.tensors()]
    return kept if layer.padding_row is None else [*kept, "padding_row"]


def trained_names(layer):
    return [spec.name for spec in layer.structure.tensors() if spec.trainable]


def assert_tied(model):
    """The very same tensors, by attribute, by ``parameters()`` and ``buffers()``, and in what is computed."""
    embedding, head = model["embedding"], model["head"]
    assert head.is_tied
    apart = [name for name in names(embedding) if getattr(head, name) is not getattr(embedding, name)]
    assert not apart, f"no longer the embedding's: {', '.join(apart)}"
    own = 0 if head.bias is None else 1
    assert len(list(model.parameters())) == len(trained_names(embedding)) + own
    assert len(list(model.buffers())) == len(names(embedding)) - len(trained_names(embedding))
    if not next(model.parameters()).is_meta:
        assert torch.equal(head.weight, embedding.weight)


def assert_together_after_a_step(model, draw):
    """One step with both ends at work: both changed, to the same table, and the tie holds."""
    before = model["embedding"].weight.detach().clone()
    head_before = model["head"].weight.detach().clone()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    loss_of(model, draw).backward()
    optimiser.step()
    assert_tied(model)
    after = model["embedding"].weight.detach()
    assert not torch.equal(after, before)
    assert not torch.equal(model["head"].weight.detach(), head_before)
    rows = torch.arange(after.shape[0])
    assert_near(model["embedding"](rows), after)
    h = draw.normal(3, after.shape[1]).to(after.dtype)
    with torch.no_grad():
        assert_near(model["head"](h), F.linear(h, after, model["head"].bias))


def loss_of(model, draw):
    """The loss of a model whose both ends are the pair."""
    index = draw.index(4, 3)
    return model["head"].loss(torch.tanh(model["embedding"](index)), draw.index(4, 3))


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors, retain_graph=True)


@pytest.mark.without_kernels
@one_of_each
@pytest.mark.parametrize("options", [{}, {"padding_idx": PADDING}], ids=["plain", "padding"])
def test_scores_are_products_with_the_embedding_s_rows(sample, options):
    model, draw = pair(sample, **options), Draw(sample, seed=1)
    h = draw.normal(2, 3, sample.cols)
    assert_near(model["head"](h), F.linear(h, model["embedding"].weight))
    # The rows themselves are an oracle that does not go through the same property.
    rows = model["embedding"](torch.arange(sample.rows))
    assert_near(model["head"](h), h @ rows.T)
    assert torch.equal(model["head"].weight, model["embedding"].weight)


@pytest.mark.without_kernels
@each_sample
@pytest.mark.parametrize("options", [{}, {"padding_idx": PADDING}], ids=["plain", "padding"])
@pytest.mark.parametrize("through", ["loss", "each_loss", "logits"])
def test_gradients_of_both_uses_are_those_of_a_dense_tied_twin(sample, options, through):
    model, draw = pair(sample, bias=True, **options), Draw(sample, seed=2)
    embedding, head = model["embedding"], model["head"]
    with torch.no_grad():
        head.bias.copy_(draw.normal(sample.rows))
    index, target = draw.index(4, 3), draw.index(4, 3)
    index[1, 1] = target[2, 0] = PADDING

    hidden = torch.tanh(embedding(index))
    if through == "logits":
        loss = F.cross_entropy(head(hidden).flatten(0, 1), target.flatten())
    else:
        loss = head.loss(hidden, target, reduction="mean" if through == "loss" else "none").mean()
    loss.backward()

    table = embedding.weight.detach().clone().requires_grad_()
    bias = head.bias.detach().clone().requires_grad_()
    twin = F.linear(torch.tanh(F.embedding(index, table, **options)), table, bias)
    expected = F.cross_entropy(twin.flatten(0, 1), target.flatten())
    expected.backward()

    assert_near(loss, expected)
    assert_near(head.bias.grad, bias.grad)
    trained = [getattr(embedding, name) for name in trained_names(embedding)]
    # What the twin's table gets at the constant row ends there: ``weight`` shows it without a graph.
    wanted = gradients(embedding.weight.mul(table.grad).sum(), trained)
    assert_near(joined([tensor.grad for tensor in trained]), joined(wanted), units=256)


def joined(tensors):
    """As one vector: a tensor of few rows, hardly used, has the rounding errors of all others."""
    return torch.cat([tensor.flatten() for tensor in tensors])


@one_of_each
def test_gradients_flow_from_both_uses(sample):
    model, draw = pair(sample), Draw(sample, seed=3)
    embedding, head = model["embedding"], model["head"]
    trained = [getattr(embedding, name) for name in trained_names(embedding)]
    index, target = draw.index(4, 3), draw.index(4, 3)
    rows = embedding(index)
    both = gradients(head.loss(torch.tanh(rows), target), trained)
    by_head = gradients(head.loss(torch.tanh(rows.detach()), target), trained)
    scores = F.linear(torch.tanh(rows), head.weight.detach())
    by_embedding = gradients(F.cross_entropy(scores.flatten(0, 1), target.flatten()), trained)
    assert all(one.count_nonzero() > 0 for one in (*by_head, joined(by_embedding)))
    assert_near(joined(both), joined(by_head) + joined(by_embedding), units=256)


@one_of_each
def test_the_padding_row_is_shared_and_constant(sample):
    model, draw = pair(sample, padding_idx=PADDING), Draw(sample, seed=4)
    embedding, head = model["embedding"], model["head"]
    h = draw.normal(5, sample.cols).requires_grad_()
    score = head(h)[:, PADDING]
    assert_near(score, h @ embedding.padding_row)
    assert not embedding.padding_row.requires_grad
    trained = [getattr(embedding, name) for name in trained_names(embedding)]
    *into_table, into_h = gradients(score.sum(), [*trained, h])
    assert all(grad.count_nonzero() == 0 for grad in into_table)
    assert_near(into_h, embedding.padding_row.expand(5, -1))
    with torch.no_grad():
        embedding.padding_row.fill_(2.0)
    assert_near(head(h)[:, PADDING], 2 * h.sum(1))


@one_of_each
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_padding_class_may_be_a_target(sample, reduction):
    model, draw = pair(sample, padding_idx=PADDING), Draw(sample, seed=5)
    embedding, head = model["embedding"], model["head"]
    h = draw.normal(6, sample.cols).requires_grad_()
    target = torch.full((6,), PADDING)
    loss = head.loss(h, target, reduction=reduction)
    expected = F.cross_entropy(F.linear(h, embedding.weight), target, reduction=reduction)
    assert_near(loss, expected)
    trained = [getattr(embedding, name) for name in trained_names(embedding)]
    found = gradients(loss.sum(), [*trained, h])
    for one, other in zip(found, gradients(expected.sum(), [*trained, h]), strict=True):
        assert_near(one, other, units=256)
    # The other classes push: their scores are lowered, and only that reaches the table.
    assert all(grad.count_nonzero() > 0 for grad in found)


@one_of_each
@both_orders
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_parameters_are_counted_once(sample, first, bias):
    model = pair(sample, first, bias, padding_idx=PADDING)
    embedding, head = model["embedding"], model["head"]
    assert_tied(model)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == sum(p.numel() for p in embedding.parameters()) + (sample.rows if bias else 0)
    assert {id(p) for p in embedding.parameters()} <= {id(p) for p in head.parameters()}
    assert len(list(model.modules())) == 3  # the head holds the embedding, but not as a part of itself


@one_of_each
def test_the_bias_is_the_head_s_own(sample):
    model, draw = pair(sample, bias=True), Draw(sample, seed=6)
    embedding, head = model["embedding"], model["head"]
    assert not hasattr(embedding, "bias")
    assert head.bias.count_nonzero() == 0
    assert {name for name, _ in head.named_parameters()} - {n for n, _ in embedding.named_parameters()} == {"bias"}
    other = tb.Head.tied_to(embedding, bias=True)
    with torch.no_grad():
        head.bias.copy_(draw.normal(sample.rows))
    assert other.bias.count_nonzero() == 0
    h = draw.normal(3, sample.cols)
    assert_near(head(h), F.linear(h, embedding.weight, head.bias))
    assert_near(other(h), F.linear(h, embedding.weight))
    assert tb.Head.tied_to(embedding).bias is None


def key_groups(state):
    """Keys by the memory behind them."""
    groups = {}
    for key, tensor in state.items():
        groups.setdefault(tensor.data_ptr(), []).append(key)
    return list(groups.values())


@one_of_each
@both_orders
def test_states_list_aliases_as_torch_s_own_tied_weights(sample, first):
    layers = {"embedding": nn.Embedding(7, 3), "head": nn.Linear(3, 7)}
    layers["head"].weight = layers["embedding"].weight
    order = sorted(layers, key=lambda name: name != first)
    twin = nn.ModuleDict({name: layers[name] for name in order})
    assert sorted(key_groups(twin.state_dict())) == sorted([[f"{name}.weight" for name in order], ["head.bias"]])

    model = pair(sample, first, bias=True, padding_idx=PADDING)
    state = model.state_dict()
    shared = names(model["embedding"])

    def prefixed(groups, name):
        """The pattern of torch's keys, with ``weight`` read as one of the tensors."""
        return {tuple(key.replace("weight", name) for key in group) for group in groups}

    wanted = set().union(*(prefixed(key_groups(twin.state_dict()), name) for name in shared))
    assert {tuple(group) for group in key_groups(state)} == wanted
    assert len(state) == 2 * len(shared) + 1
    assert set(model["head"].state_dict()) == {*shared, "bias"}


@one_of_each
@both_orders
def test_files_store_the_table_once(sample, first):
    model = pair(sample, first, padding_idx=PADDING)
    state = model["embedding"].state_dict()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with zipfile.ZipFile(file) as archive:
        stored = [entry.file_size for entry in archive.infolist() if "/data/" in entry.filename]
    assert sorted(stored) == sorted(tensor.nbytes for tensor in state.values())


@one_of_each
@both_orders
def test_loading_keeps_the_tie(sample, first):
    model, draw = pair(sample, first, bias=True, padding_idx=PADDING), Draw(sample, seed=7)
    with torch.no_grad():
        model["head"].bias.copy_(draw.normal(sample.rows))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = pair(sample, first, bias=True, padding_idx=PADDING, seed=1)
    before = list(fresh.parameters())
    assert not torch.equal(fresh["head"].weight, model["head"].weight)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert all(one is other for one, other in zip(fresh.parameters(), before, strict=True))
    assert_tied(fresh)
    h = draw.normal(3, sample.cols)
    assert torch.equal(fresh["embedding"].weight, model["embedding"].weight)
    assert torch.equal(fresh["head"](h), model["head"](h))
    assert_together_after_a_step(fresh, draw)


@one_of_each
@both_orders
def test_loading_by_assignment_keeps_the_tie(sample, first):
    """Into a model without memory, as large ones are loaded: two tables would come of it unnoticed."""
    model, draw = pair(sample, first, padding_idx=PADDING), Draw(sample, seed=8)
    fresh = pair(sample, first, padding_idx=PADDING, seed=1).to("meta")
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert_tied(fresh)
    assert torch.equal(fresh["embedding"].weight, model["embedding"].weight)
    fresh = copy.deepcopy(fresh)  # the assigned tensors are those of the first model
    assert_together_after_a_step(fresh, draw)


@one_of_each
@both_orders
def test_safetensors_files_keep_the_tie(sample, first, tmp_path):
    model, draw = pair(sample, first, bias=True, padding_idx=PADDING), Draw(sample, seed=9)
    with torch.no_grad():
        model["head"].bias.copy_(draw.normal(sample.rows))
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    with safe_open(path, "pt") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    assert {key.partition(".")[2] for key in stored} == {*names(model["embedding"]), "bias"}
    assert len(stored) == len(names(model["embedding"])) + 1
    fresh = pair(sample, first, bias=True, padding_idx=PADDING, seed=1)
    missing, unexpected = load_model(fresh, path)
    assert not missing
    assert not unexpected
    assert_tied(fresh)
    assert torch.equal(fresh["embedding"].weight, model["embedding"].weight)
    assert torch.equal(fresh["head"].bias, model["head"].bias)
    assert_together_after_a_step(fresh, draw)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@one_of_each
@both_orders
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_tied_to_their_own_embedding(sample, first, copied):
    model, draw = pair(sample, first, bias=True, padding_idx=PADDING), Draw(sample, seed=10)
    weight = model["embedding"].weight.detach().clone()
    other = copied(model)
    assert_tied(other)
    assert torch.equal(other["head"].weight, weight)
    assert not {t.data_ptr() for t in model.state_dict().values()} & {t.data_ptr() for t in other.state_dict().values()}
    assert_together_after_a_step(other, draw)
    assert torch.equal(model["head"].weight, weight)
    assert_tied(model)


MOVES = {
    "float64": lambda model: model.to(torch.float64),
    "double": lambda model: model.double(),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "cpu": lambda model: model.to("cpu"),
    "share_memory": lambda model: model.share_memory(),
    "there and back": lambda model: model.half().float(),
}


@pytest.mark.parametrize("sample", STORED, ids=str)
@both_orders
@pytest.mark.parametrize("move", MOVES)
def test_moves_keep_the_tie(sample, first, move):
    model, draw = pair(sample, first, bias=True, padding_idx=PADDING, dtype=torch.float32), Draw(sample, seed=11)
    table = model["embedding"].weight.detach()
    moved = MOVES[move](model)
    assert_tied(moved)
    dtype = moved["embedding"].weight.dtype
    assert {t.dtype for t in moved.state_dict().values() if t.is_floating_point()} == {dtype}
    assert moved["head"](draw.normal(2, sample.cols, dtype=dtype)).dtype == dtype
    if dtype in (torch.float32, torch.float64) and move != "there and back":
        assert_near(moved["head"].weight.float(), table)
    assert_near(moved["head"].weight[PADDING], moved["embedding"].padding_row)
    assert_together_after_a_step(moved, draw)


@one_of_each
@both_orders
def test_a_model_goes_without_memory_and_comes_back_tied(sample, first):
    model, draw = pair(sample, first, bias=True, padding_idx=PADDING), Draw(sample, seed=12)
    state = copy.deepcopy(model.state_dict())
    weight = model["embedding"].weight.detach().clone()
    model.to("meta")
    assert_tied(model)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model["head"].weight.shape == weight.shape
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()  # what lay in memory may be no number, and equal to nothing
    assert_tied(model)
    model.load_state_dict(state)
    assert_tied(model)
    assert torch.equal(model["head"].weight, weight)
    assert_together_after_a_step(model, draw)


@one_of_each
@both_orders
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.Adam])
def test_one_step_moves_both_as_it_moves_one_table(sample, first, optimiser):
    rounded = not sample.structure.can_initialise or sample.structure.packs
    if optimiser is torch.optim.Adam and rounded:
        pytest.skip("Adam makes full steps of gradients that are rounding errors, as rows hardly used have")
    model, draw = pair(sample, first, padding_idx=PADDING), Draw(sample, seed=13)
    alone = made(sample, padding_idx=PADDING)
    index, target = draw.index(4, 3), draw.index(4, 3)

    stepping = optimiser(model.parameters(), lr=0.1)
    model["head"].loss(torch.tanh(model["embedding"](index)), target).backward()
    stepping.step()

    stepping = optimiser(alone.parameters(), lr=0.1)
    scores = F.linear(torch.tanh(alone(index)), alone.weight)
    F.cross_entropy(scores.flatten(0, 1), target.flatten()).backward()
    before = alone.weight.detach().clone()
    stepping.step()

    assert_tied(model)
    assert not torch.equal(alone.weight, before)
    assert_near(model["embedding"].weight, alone.weight, units=1e4)
    assert_near(model["head"].weight, alone.weight, units=1e4)
    assert torch.equal(model["head"].weight[PADDING], before[PADDING])


@pytest.mark.without_kernels
@one_of_each
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_tied_to_an_embedding_bag(sample, mode):
    model, draw = pair(sample, kind=tb.EmbeddingBag, mode=mode, padding_idx=PADDING), Draw(sample, seed=14)
    bag, head = model["embedding"], model["head"]
    assert_tied(model)
    index, target = draw.index(4, 3), draw.index(4)
    target[3] = PADDING
    index[:, 1] = PADDING
    loss = head.loss(bag(index), target)
    loss.backward()
    table = bag.weight.detach().clone().requires_grad_()
    pooled = F.embedding_bag(index, table, mode=mode, padding_idx=PADDING)
    expected = F.cross_entropy(F.linear(pooled, table), target)
    expected.backward()
    assert_near(loss, expected)
    trained = [getattr(bag, name) for name in trained_names(bag)]
    for tensor, wanted in zip(trained, gradients(bag.weight.mul(table.grad).sum(), trained), strict=True):
        assert_near(tensor.grad, wanted, units=256)


@pytest.mark.parametrize("sample", [sample for sample in ONE_EACH if sample.format.can_fit], ids=str)
def test_a_frozen_embedding_s_head_is_frozen_but_for_its_bias(sample):
    table = made(sample).weight.detach()
    embedding = tb.Embedding.from_pretrained(table, sample.format)
    head, draw = tb.Head.tied_to(embedding, bias=True), Draw(sample, seed=15)
    assert [name for name, p in head.named_parameters() if p.requires_grad] == ["bias"]
    head.loss(draw.normal(3, sample.cols), draw.index(3)).backward()
    assert head.bias.grad.count_nonzero() > 0
    assert all(p.grad is None for p in embedding.parameters())
    assert not tb.Head.tied_to(embedding)(draw.normal(3, sample.cols)).requires_grad


@pytest.mark.parametrize("sample", DRAWN, ids=str)
def test_a_table_drawn_anew_is_new_at_both_ends(sample):
    for layer in ("embedding", "head"):
        model = pair(sample, bias=True, padding_idx=PADDING)
        before = model["embedding"].weight.detach().clone()
        model[layer].reset_parameters()
        assert_tied(model)
        assert not torch.equal(model["embedding"].weight, before)
        assert model["head"].weight[PADDING].count_nonzero() == 0


def test_several_heads_may_share_a_table():
    model = pair(SAMPLES["tensor_train"][0], padding_idx=PADDING)
    model["other"] = tb.Head.tied_to(model["embedding"], bias=True)
    model.half()
    assert_tied(nn.ModuleDict({"embedding": model["embedding"], "head": model["other"]}))
    assert len(list(model.parameters())) == len(list(model["embedding"].parameters())) + 1
    assert torch.equal(model["other"].weight, model["head"].weight)


@pytest.mark.parametrize("given", [nn.Embedding(7, 3), nn.Linear(3, 7), torch.zeros(7, 3), None], ids=repr)
def test_only_tables_of_this_library_can_be_tied_to(given):
    with pytest.raises(TypeError, match=rf"got {type(given).__name__}; .*tb\.Embedding\.from_pretrained"):
        tb.Head.tied_to(given)


def test_bad_choices_are_refused_before_anything_is_tied():
    embedding = made(SAMPLES["tensor_train"][0])
    with pytest.raises(ValueError, match="impl='magic': choose one of"):
        tb.Head.tied_to(embedding, impl="magic")
    with pytest.raises((TypeError, ValueError), match="memory_budget"):
        tb.Head.tied_to(embedding, memory_budget=-1)


def test_a_tied_head_says_so():
    embedding = tb.TTEmbedding(25000, 256, 16, shape=((25, 30, 40), (4, 8, 8)))
    head = tb.Head.tied_to(embedding)
    assert repr(head).startswith("Head(256, 25000, tied, tensor_train, shape=(25, 30, 40) x (4, 8, 8)")
    assert (head.in_features, head.num_classes, head.out_features) == (256, 25000, 25000)
    assert head.compression_ratio == embedding.compression_ratio
    assert not tb.Head(256, 25000, tb.TensorTrain(rank=16)).is_tied


@pytest.mark.parametrize("sample", DRAWN, ids=str)
def test_untied_ends_are_two_tables_of_one_shape(sample):
    torch.manual_seed(0)
    ends = tb.embedding_and_head(sample.rows, sample.cols, sample.format, dtype=torch.float64, std=0.3)
    embedding, head = ends
    assert ends.embedding is embedding
    assert ends.head is head
    assert not head.is_tied
    assert head.structure == embedding.structure
    assert {n: t.shape for n, t in head.params().items()} == {n: t.shape for n, t in embedding.params().items()}
    assert len(list(nn.ModuleList(ends).parameters())) == 2 * len(list(embedding.parameters()))
    assert not {t.data_ptr() for t in embedding.params().values()} & {t.data_ptr() for t in head.params().values()}
    one, other = embedding.weight.detach(), head.weight.detach()
    for table in (one, other):
        assert table.square().mean().sqrt() == pytest.approx(0.3, rel=0.05)
    # Two draws of one table, or of tables that share a factor, would point the same way.
    assert abs(F.cosine_similarity(one.flatten(), other.flatten(), dim=0)) < 0.1


@pytest.mark.parametrize("sample", DRAWN, ids=str)
def test_tied_ends_are_one_table(sample):
    embedding, head = tb.embedding_and_head(sample.rows, sample.cols, sample.format, tied=True, padding_idx=PADDING)
    assert head.is_tied
    assert head.padding_row is embedding.padding_row
    assert head.padding_idx == embedding.padding_idx == PADDING
    assert_tied(nn.ModuleDict({"embedding": embedding, "head": head}))
    h = torch.randn(3, sample.cols)
    assert_near(head(h), F.linear(h, embedding.weight))


def test_options_of_both_ends():
    for tied in (False, True):
        embedding, head = tb.embedding_and_head(
            50, 8, tb.LowRank(rank=2), tied=tied, bias=True, memory_budget=4096, padding_idx=-1, dtype=torch.bfloat16
        )
        assert embedding.padding_idx == 49
        assert head.padding_idx == (49 if tied else None)  # a class of an untied head is like any other
        assert head.memory_budget == 4096
        assert head.bias.shape == (50,)
        assert {p.dtype for p in (*embedding.parameters(), *head.parameters())} == {torch.bfloat16}
    with pytest.raises(TypeError, match="nonsense"):
        tb.embedding_and_head(50, 8, tb.LowRank(rank=2), nonsense=1)


@pytest.mark.parametrize("sample", [s for s in SAMPLED if s.structure.can_initialise and is_of_one_dtype(s)], ids=str)
def test_the_ratio_counts_both_ends_against_one_dense_table(sample):
    entries, numbers = sample.rows * sample.cols, sample.structure.numel
    size = (sample.rows, sample.cols, sample.format)
    assert tb.embedding_and_head(*size).ratio == pytest.approx(entries / (2 * numbers))
    assert tb.embedding_and_head(*size, tied=True).ratio == pytest.approx(entries / numbers)
    # Bytes and not numbers are counted, which is the same where all are of one dtype; a bias is nobody's merit.
    for tied, times in ((False, 2), (True, 1)):
        ends = tb.embedding_and_head(*size, tied=tied, bias=True, padding_idx=1, dtype=torch.bfloat16)
        stored = times * numbers + sample.cols + sample.rows
        assert ends.ratio == pytest.approx((entries + sample.rows) / stored)


@pytest.mark.parametrize(("rank", "published"), [(192, 3.8), (128, 8.6), (96, 15.1)])
def test_ratios_of_the_paper_s_language_models_with_two_tensor_trains(rank, published):
    """The table of WikiText-103: V d / (2 parameters), for TT1, TT2 and TT3."""
    format = tb.TensorTrain(rank=rank, shape=((60, 60, 75), (8, 8, 8)))
    parameters = 60 * 8 * rank + rank * 60 * 8 * rank + rank * 75 * 8
    ends = tb.embedding_and_head(267735, 512, format, device="meta")
    assert ends.ratio == pytest.approx(267735 * 512 / (2 * parameters))
    # In print the ratios are cut or rounded after one digit.
    assert ends.ratio == pytest.approx(published, abs=0.1)
    tied = tb.embedding_and_head(267735, 512, format, tied=True, device="meta")
    assert tied.ratio == pytest.approx(2 * ends.ratio)


@pytest.mark.parametrize(("rank", "published"), [(128, 4), (96, 5.3), (48, 10.7)])
def test_ratios_of_the_paper_s_language_models_with_one_low_rank_table(rank, published):
    """The same table's low-rank rows are counted tied; the one printed as rank 64 is rank 48."""
    ends = tb.embedding_and_head(267735, 512, tb.LowRank(rank=rank), tied=True, device="meta")
    assert ends.ratio == pytest.approx(published, rel=0.01)


def test_a_head_converted_by_itself_takes_its_table_along():
    embedding, head = tb.embedding_and_head(20, 8, tb.TensorTrain(rank=2), tied=True, padding_idx=3)
    head.double()
    assert {t.dtype for t in (*embedding.parameters(), *embedding.buffers())} == {torch.float64}
    assert torch.equal(embedding.weight, head.weight)
    head.to("meta")
    assert all(t.is_meta for t in (*embedding.parameters(), *embedding.buffers()))
    assert all(a is b for a, b in zip(embedding.parameters(), head.parameters(), strict=True))


def test_a_file_with_the_heads_names_alone_loads_both():
    source = tb.embedding_and_head(20, 8, tb.TensorTrain(rank=2), tied=True)
    state = {f"head.{name}": tensor for name, tensor in source.head.state_dict().items()}
    for assign in (False, True):
        embedding, head = tb.embedding_and_head(20, 8, tb.TensorTrain(rank=2), tied=True)
        model = nn.ModuleDict({"embedding": embedding, "head": head})
        model.load_state_dict(state, strict=False, assign=assign)
        assert torch.equal(embedding.weight, source.embedding.weight)
        assert all(a is b for a, b in zip(embedding.parameters(), head.parameters(), strict=True))


def both_ends():
    """Of a model: dense ones, and layers of this library."""
    embedding, head = tb.embedding_and_head(300, 12, tb.TensorTrain(rank=3))
    bag = tb.EmbeddingBag.from_pretrained(torch.randn(300, 12), tb.QuantizedRows(bits=8))
    dense = {"dense table": nn.Embedding(300, 12), "dense head": nn.Linear(12, 300)}
    return {**dense, "table": embedding, "bag": bag, "head": head}


ASSIGNED = {
    "as it is": lambda module, weight: setattr(module, "weight", weight),
    "its data": lambda module, weight: setattr(module, "weight", weight.data),
    "registered": lambda module, weight: module.register_parameter("weight", weight),
    "as a parameter": lambda module, weight: setattr(module, "weight", nn.Parameter(weight)),
}


@pytest.mark.parametrize("source", ["table", "bag", "head"])
@pytest.mark.parametrize("target", both_ends())
@pytest.mark.parametrize("way", ASSIGNED)
def test_tying_by_assignment_is_answered_with_the_way_to_tie(source, target, way):
    ends = both_ends()
    module = ends[target]
    before = copy.deepcopy(module.state_dict())
    with pytest.raises((AttributeError, TypeError, RuntimeError), match=r"tb\.Head\.tied_to\(embedding\)") as refused:
        ASSIGNED[way](module, ends[source].weight)
    ours = ends[source] if target.startswith("dense") or way == "as a parameter" else module
    assert f"weight of {type(ours).__name__} is made from {next(iter(ours.params()))}" in str(refused.value)
    assert before.keys() == module.state_dict().keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("target", ["table", "bag", "head"])
@pytest.mark.parametrize("source", ["dense table", "dense head"])
def test_a_dense_weight_is_not_assigned_but_fitted(target, source):
    ends = both_ends()
    module = ends[target]
    match = rf"cannot be set.*tb\.Head\.tied_to.*{type(module).__name__}\.from_pretrained"
    for value in (ends[source].weight, ends[source].weight.detach(), None):
        with pytest.raises(AttributeError, match=match):
            module.weight = value
    assert "weight" not in module.state_dict()


def test_the_type_of_a_weight_is_told_everywhere_else():
    weight = both_ends()["table"].weight
    assert weight.type() == weight.data.type() == torch.typename(weight) == "torch.FloatTensor"
    assert weight.type(torch.float64).dtype == torch.float64
