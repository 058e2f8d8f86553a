"""Tables by hashes and remainders of row numbers: what they compute, and what they refuse before anything is drawn."""

import pytest
import torch
from torch import nn

import tensorbed as tb
from tensorbed.fitting import fit_table
from tensorbed.functional import lookup
from tensorbed.structures.deep_hash import DeepHashMatrix
from tensorbed.structures.hashed import HashedMatrix
from tensorbed.testing import largest_allocation

PRIME = 2**31 - 1


def hash_of(constants, row, buckets):
    """In whole numbers of any size."""
    a, b, c = constants
    return (a * (row % 2**31) + b * (row // 2**31) + c) % PRIME % buckets


def params(structure, largest_constants=False):
    p = {s.name: torch.empty(s.shape, dtype=s.dtype or torch.float64) for s in structure.tensors()}
    structure.initialise(p, 1.0, torch.Generator().manual_seed(0))
    if largest_constants:
        p["constants"].fill_(PRIME - 1)
    return p


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("rows", [1000, 2**31, 2**40, 2**62])
def test_hashes_are_those_of_whole_numbers(rows, largest):
    structure = HashedMatrix(rows, 3, buckets=7, hashes=2, signed=True)
    p = params(structure, largest)
    constants = p["constants"].tolist()
    index = torch.tensor([0, 1, 999, rows // 2, rows - 2, rows - 1])
    expected = torch.zeros(len(index), 3, dtype=torch.float64)
    for at, row in enumerate(index.tolist()):
        for j in range(2):
            sign = 1 - 2 * hash_of(constants[2 + j], row, 2)
            expected[at] += sign * p["table"][hash_of(constants[j], row, 7)]
    for impl in ("auto", "reference"):
        torch.testing.assert_close(lookup(structure, p, index, impl=impl), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1000, 2**62])
def test_deep_hashes_are_what_a_network_makes_of_hashes(rows):
    structure = DeepHashMatrix(rows, 3, hashes=5, hidden=4, layers=2)
    p = params(structure)
    index = [0, 7, 7, rows - 1]
    hashes = [[hash_of(constants, row, 10**6) for constants in p["constants"].tolist()] for row in index]
    x = torch.tensor(hashes, dtype=torch.float64) / (10**6 - 1) * 2 - 1
    for k in range(2):
        x = nn.functional.mish(x @ p[f"layer_{k}"] + p[f"bias_{k}"])
    torch.testing.assert_close(lookup(structure, p, torch.tensor(index)), x @ p["layer_2"])


def test_hashes_fall_into_all_buckets_alike():
    structure = HashedMatrix(100_000, 1, buckets=100)
    places, _ = structure.places(params(structure), torch.arange(100_000))
    counts = torch.bincount(places[:, 0], minlength=100)
    assert counts.min() > 500
    assert counts.max() < 1500


def test_tables_of_too_many_rows_to_measure_have_the_scale_asked_for():
    """Their deviation is that of a part of the rows, and of another part."""
    rows = 2**40
    for format in (tb.Hashed(buckets=5000), tb.Hashed(buckets=900, hashes=3), tb.DeepHash(hashes=64, hidden=64)):
        layer = tb.Embedding(rows, 8, format, std=0.5)
        made = layer(torch.randint(rows, (20_000,)))
        assert float(made.detach().square().mean().sqrt()) == pytest.approx(0.5, rel=0.05)


def test_one_hash_is_fitted_by_the_means_of_buckets():
    table = torch.randn(500, 6, dtype=torch.float64)
    found = fit_table(table, tb.Hashed(buckets=40))
    places = found.structure.places(found.params, torch.arange(500))[0][:, 0]
    for bucket in places.unique().tolist():
        torch.testing.assert_close(found.params["table"][bucket], table[places == bucket].mean(0))


@pytest.mark.parametrize("signed", [False, True])
def test_several_hashes_are_fitted_by_least_squares(signed):
    table = torch.randn(300, 4, dtype=torch.float64)
    found = fit_table(table, tb.Hashed(buckets=20, hashes=2, signed=signed))
    chosen = found.structure.full({**found.params, "table": torch.eye(20, dtype=torch.float64)[:, :20]})
    best = chosen @ torch.linalg.lstsq(chosen, table, driver="gelsd").solution
    assert found.error == pytest.approx(float((best - table).norm() / table.norm()), rel=1e-6)


@pytest.mark.parametrize("rows", [60, 64])  # with a last quotient of some remainders, and of all
@pytest.mark.parametrize("combine", ["multiply", "add", "concat"])
def test_no_step_from_a_fit_by_quotient_and_remainder_is_downhill(rows, combine):
    table = torch.randn(rows, 4, dtype=torch.float64) + 1
    found = fit_table(table, tb.QuotientRemainder(buckets=8, combine=combine))
    p = {name: tensor.clone().requires_grad_() for name, tensor in found.params.items()}
    distance = (found.structure.full(p) - table).square().sum()
    for gradient in torch.autograd.grad(distance, list(p.values())):
        assert gradient.abs().max() < 1e-2 if combine == "multiply" else gradient.abs().max() < 1e-9


def test_a_zero_table_is_fitted():
    for combine in ("multiply", "add", "concat"):
        assert tb.Embedding.from_pretrained(torch.zeros(20, 4), tb.QuotientRemainder(combine=combine)).fit_error == 0
    assert tb.Embedding.from_pretrained(torch.zeros(20, 4), tb.Hashed(buckets=3, hashes=2)).fit_error == 0


def test_no_two_rows_by_quotient_and_remainder_are_equal():
    for combine in ("multiply", "add", "concat"):
        weight = tb.Embedding(1000, 4, tb.QuotientRemainder(combine=combine)).weight.detach()
        assert weight.unique(dim=0).shape[0] == 1000


@pytest.mark.parametrize("format", [tb.Hashed, tb.QuotientRemainder])
def test_ratios_are_kept_by_the_most_buckets(format):
    for rows, ratio in ((1000, 3.0), (1000, 10.0), (997, 15.0)):
        structure = tb.Embedding(rows, 16, format(ratio=ratio)).structure
        dense = rows * 16 * 4
        assert dense / structure.bytes(torch.float32) >= ratio
        assert (
            dense / tb.Embedding(rows, 16, format(buckets=structure.buckets + 1)).structure.bytes(torch.float32) < ratio
        )


def test_fields_with_fewer_rows_than_buckets_stay_dense():
    sizes = {"few": 3, "many": 1000}
    fields = tb.EmbeddingBagCollection.from_sizes(sizes, 4, tb.Hashed(buckets=100))
    assert [layer.structure.kind for layer in fields.tables.values()] == ["dense", "hashed"]


REFUSED = [
    (lambda: tb.Hashed(buckets=4, hashes=0), "hashes=0: must be at least 1"),
    (lambda: tb.Hashed(buckets=0), "buckets=0: must be at least 1"),
    (lambda: tb.Hashed(), "give its size as buckets=, or as ratio="),
    (lambda: tb.Hashed(buckets=3, ratio=2), "and not as both"),
    (lambda: tb.Embedding(9, 4, tb.Hashed(buckets=10)), "buckets=10 for a table of 9 rows: .* at most 9; use tb.Dense"),
    (lambda: tb.Embedding(9, 4, tb.Hashed(ratio=100)), "ratio=100 for Hashed: .* the most it can be"),
    (lambda: tb.QuotientRemainder(buckets=0), "buckets=0: must be at least 1"),
    (lambda: tb.QuotientRemainder(buckets=3, ratio=2), "both set the size"),
    (lambda: tb.QuotientRemainder(combine="join"), "combine='join': choose one of 'multiply', 'add', 'concat'"),
    (lambda: tb.Embedding(9, 4, tb.QuotientRemainder(buckets=10)), "buckets=10 for a table of 9 rows: .* at most 9"),
    (lambda: tb.Embedding(9, 1, tb.QuotientRemainder(combine="concat")), "a half of each needs 2 columns"),
    (lambda: tb.DeepHash(), "give its size as hidden=, or as ratio="),
    (lambda: tb.DeepHash(hashes=0, hidden=3), "hashes=0: must be at least 1"),
    (lambda: tb.DeepHash(hidden=3, layers=0), "layers=0: must be at least 1"),
    (
        lambda: tb.Embedding(9, 4, tb.DeepHash(ratio=2)),
        "ratio=2 for DeepHash: with 1024 hashes and hidden=1 .* the most",
    ),
]


@pytest.mark.parametrize(("make", "sentence"), REFUSED, ids=[sentence[:40] for _, sentence in REFUSED])
def test_sizes_that_cannot_be_are_refused_before_anything_is_drawn(make, sentence):
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=sentence):
        make()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("format", [tb.Hashed(buckets=5), tb.DeepHash(hashes=4, hidden=3)], ids=str)
def test_constants_that_were_not_drawn_are_refused_on_load(format, tmp_path):
    layer = tb.Embedding(20, 4, format)
    for bad in (0, PRIME):
        layer.constants[0, 0] = bad
        tb.save(layer, tmp_path / "layer.safetensors")
        with pytest.raises(ValueError, match=r"constants of hashes go from .*: they are from 1 to 2147483646"):
            tb.load(tmp_path / "layer.safetensors")


def test_deep_hashes_cannot_be_fitted_and_are_drawn_instead():
    model = nn.ModuleDict({"words": nn.Embedding(2000, 8)})
    format = tb.DeepHash(hashes=8, hidden=8)
    for ask in (lambda: tb.compress_(model, format), lambda: tb.plan(model, ratio=2, formats=[format])):
        with pytest.raises(ValueError, match=r"DeepHash\(hashes=8, hidden=8\) cannot be fitted to a table"):
            ask()
    tb.compress_(model, format, fit=False)
    assert model["words"].structure.kind == "deep_hash"


def test_heads_of_deep_hashes_hold_no_more_than_a_part_of_the_table():
    """Though the hashes of a row are sixteen times as many as its columns."""
    head = tb.Head(32, 30_000, tb.DeepHash(hashes=512, hidden=16))
    h, target = torch.randn(64, 32), torch.arange(64)
    with largest_allocation() as most:
        head.loss(h, target).backward()
    assert most() <= 30_000 * 32 // 2
