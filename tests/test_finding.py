"""Which linear layers are taken for vocabulary heads: those that a model, a tie or a pattern says, and few by size."""

import json

import pytest
from torch import nn

import tensorbed as tb

ROWS, COLS = 3000, 16
FORMAT = tb.LowRank(rank=2)


class Words(nn.Module):
    """A table and what else is given."""

    def __init__(self, **layers):
        super().__init__()
        self.words = nn.Embedding(ROWS, COLS)
        for name, layer in layers.items():
            setattr(self, name, layer)


class Projection(nn.Linear):
    """A layer of another kind, such as that of ``nn.MultiheadAttention``."""


def head():
    return nn.Linear(COLS, ROWS)


def blocks():
    return nn.ModuleList(nn.Sequential(nn.Linear(COLS, ROWS), nn.Linear(ROWS, COLS)) for _ in range(2))


def compressed(model, format=FORMAT, **options):
    report = tb.compress_(model, format, **options)
    return [name for entry in report.entries for name in entry.names]


def test_the_only_layer_of_a_vocabularys_size_is_its_head_and_the_report_says_why():
    model = Words(head=head(), body=nn.Linear(COLS, COLS))
    report = tb.compress_(model, FORMAT)
    assert isinstance(model.head, tb.Head)
    (note,) = report.notes
    assert note.startswith("head was taken for a vocabulary head only because it has 3,000 outputs, as many as words")
    assert 'skip=["head"]' in note
    assert f"note: {note}" in str(report)
    assert "<p>note: head was taken" in report.to_html()
    found = json.loads(json.dumps(report.to_dict()))
    assert found["notes"] == [note]
    assert [entry["same_rows_as"] for entry in found["entries"]] == [None, "words"]


def test_heads_that_are_tied_or_named_need_no_note():
    model = Words(head=head())
    model.head.weight = model.words.weight
    assert tb.compress_(model, FORMAT).notes == []
    assert tb.compress_(Words(head=head()), {"head": FORMAT, "*": FORMAT}).notes == []


def test_plans_say_it_and_so_does_what_is_compressed_by_them():
    model = Words(head=head())
    most = tb.plan(model, ratio=2, formats=[FORMAT]).bytes  # what they take, so that there is no more to say
    plan = tb.plan(model, budget=most, formats=[FORMAT])
    assert list(plan) == ["words", "head"]
    (note,) = plan.notes
    assert "head was taken for a vocabulary head only because" in note
    assert str(plan).endswith(f"note: {note}")
    assert plan.to_dict()["notes"] == [note]
    assert tb.compress_(model, plan).notes == [note]
    assert tb.plan({"words": (ROWS, COLS)}, ratio=4).notes == []


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ({"one": head, "two": head}, "but other layers have as many"),
        ({"one": head, "blocks": blocks}, "but other layers have as many"),
        ({"one": head, "projection": lambda: Projection(COLS, ROWS)}, "but other layers have as many"),
        ({"one": head, "ids": lambda: nn.EmbeddingBag(ROWS, 4)}, "but several tables have that many"),
        ({"one": head, "done": lambda: tb.Embedding(ROWS, COLS, FORMAT)}, "but several tables have that many"),
    ],
    ids=["two", "blocks", "subclass", "tables", "compressed"],
)
def test_size_alone_does_not_decide_between_several(layers, reason):
    model = Words(**{name: make() for name, make in layers.items()})
    report = tb.compress_(model, FORMAT)
    assert type(model.one) is nn.Linear
    assert not any(type(module) is tb.Head for module in model.modules())
    assert reason in report.left["one"]
    assert "name it in a pattern" in report.left["one"]
    assert not any(name.startswith("blocks") for name in report.left)
    assert "one" in compressed(Words(one=head(), two=head()), {"one": FORMAT, "*": FORMAT})


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ModuleList([head()]),
        lambda: nn.ModuleList([nn.Sequential(nn.ReLU(), head())]),
        lambda: nn.Sequential(nn.ModuleList([head()])),
    ],
)
def test_layers_in_lists_are_taken_by_name_only(make):
    model = Words(blocks=make())
    assert compressed(model) == ["words"]
    assert compressed(model, {"blocks.*": FORMAT})[0].startswith("blocks.0")


def test_a_layer_under_two_names_is_one_layer():
    only = head()
    model = Words(one=only, two=only)
    assert compressed(model) == ["words", "one", "two"]
    assert model.one is model.two
    assert compressed(Words(one=only, blocks=nn.ModuleList([only]))) == ["words"]


def test_tables_that_share_their_weight_are_one_table():
    model = Words(again=nn.Embedding(ROWS, COLS), head=head())
    model.again.weight = model.words.weight
    assert compressed(model) == ["words", "again", "head"]


def test_classes_are_no_vocabulary_however_their_table_is_named():
    model = Words(kinds=nn.Embedding(10, COLS), classes=nn.Linear(COLS, 10))
    assert compressed(model, {"kinds": FORMAT}) == ["kinds"]


class Declaring(Words):
    def __init__(self, answer, **layers):
        super().__init__(**layers)
        self.answer = answer

    def get_output_embeddings(self):
        if self.answer is NotImplementedError:
            raise NotImplementedError
        return None if self.answer is None else self.get_submodule(self.answer)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("one", ["words", "one"]),
        ("heads", ["words", "heads.0", "heads.1"]),
        (None, ["words"]),
        (NotImplementedError, ["words"]),
    ],
)
@pytest.mark.parametrize("outer", [False, True])
def test_models_that_declare_their_head_are_believed(answer, names, outer):
    model = Declaring(answer, one=head(), two=head(), heads=nn.ModuleList([head(), head()]))
    if outer:
        model, names = nn.Sequential(model, nn.Linear(COLS, COLS)), [f"0.{name}" for name in names]
    assert compressed(model) == names


def test_a_model_without_a_head_speaks_for_its_own_layers_alone():
    inner = Declaring(None, pooler=head())
    report = tb.compress_(inner, FORMAT)
    assert "but the model does not call it its head" in report.left["pooler"]
    model = nn.ModuleDict({"encoder": Declaring(None), "head": head()})
    assert compressed(model) == ["encoder.words", "head"]
    assert compressed(Declaring(NotImplementedError, one=head())) == ["words", "one"]


def test_a_declared_head_of_another_size_is_taken_unless_it_is_small():
    assert compressed(Declaring("wide", wide=nn.Linear(COLS, ROWS + 64))) == ["words", "wide"]
    report = tb.compress_(model := Declaring("few", few=nn.Linear(COLS, 32)), FORMAT)
    assert type(model.few) is nn.Linear
    assert report.left == {"few": "32 rows, fewer than min_rows=2,000"}


@pytest.mark.parametrize("call", [lambda m, **o: tb.compress_(m, FORMAT, **o), lambda m, **o: tb.plan(m, ratio=2, **o)])
def test_a_skipped_name_that_nothing_has_is_refused(call):
    model = Words(head=head(), body=nn.Linear(COLS, COLS))
    for useless in ("wrods", "body", "w"):
        with pytest.raises(ValueError, match=rf'skip=\["{useless}"\]: no table or head matches; the model has words'):
            call(model, skip=["head", useless])
    assert type(model.words) is nn.Embedding
    assert call(model, skip=["he*", "head"])


def test_what_stays_anyway_may_be_skipped():
    """A small table, a head whose table is skipped, and what is compressed already."""
    model = Words(head=head(), small=nn.Embedding(7, COLS), done=tb.Embedding(ROWS, COLS, FORMAT))
    assert compressed(model, skip=["small", "done"], include_heads=False) == ["words"]
    assert compressed(Words(head=head()), skip=["words", "head"]) == []
