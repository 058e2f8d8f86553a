"""Quantised rows and product quantisation beyond the laws that hold for every structure."""

import pytest
import torch

import tensorbed as tb
from tensorbed.decompose.clusters import _nearest, k_means
from tensorbed.structures.formats import Budget
from tensorbed.structures.quantized_rows import packed, unpacked


@pytest.mark.parametrize("cols", [1, 2, 7, 16])
def test_two_codes_a_byte(cols):
    codes = torch.randint(-8, 8, (50, cols), generator=torch.Generator().manual_seed(0))
    codes[0], codes[1] = -8, 7
    stored = packed(codes)
    assert stored.shape == (50, -(-cols // 2))
    assert stored.dtype == torch.uint8
    assert torch.equal(unpacked(stored, cols).long(), codes)


def table(rows=500, cols=64):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("format", "ratio", "error"),
    [
        (tb.QuantizedRows(), 4 * 64 / (64 + 4), 0.008),
        (tb.QuantizedRows(bits=8, group=16), 4 * 64 / (64 + 4 + 4), 0.006),
        (tb.QuantizedRows(bits=4), 4 * 64 / (32 + 2 + 4), 0.085),
        (tb.QuantizedRows(bits=4, group=16), 4 * 64 / (32 + 4 + 4), 0.075),
    ],
)
def test_ratios_count_codes_steps_and_scales(format, ratio, error):
    layer = tb.Embedding.from_pretrained(table(), format)
    assert layer.compression_ratio == pytest.approx(ratio)
    assert 0.2 * error < layer.fit_error < error


def test_steps_found_by_search_beat_the_largest_number():
    """Rounding to the range of each group, as most do."""
    rows = table(cols=32)
    step = rows.abs().amax(1, keepdim=True) / 7
    plain = ((rows / step).round().clamp(-8, 7) * step - rows).norm() / rows.norm()
    layer = tb.Embedding.from_pretrained(rows, tb.QuantizedRows(bits=4, group=32))
    assert layer.fit_error < 0.93 * float(plain)


@pytest.mark.parametrize(
    "format", [tb.QuantizedRows(), tb.QuantizedRows(bits=4, group=8), tb.ProductQuantized(parts=4)]
)
def test_rows_of_zeros_and_rows_of_any_size(format):
    rows = table(300, 16) * torch.logspace(-20, 20, 300)[:, None]
    rows[7] = 0
    layer = tb.Embedding.from_pretrained(rows, format)
    made = layer(torch.arange(300))
    assert torch.isfinite(made).all()
    if not isinstance(format, tb.ProductQuantized):
        assert torch.count_nonzero(made[7]) == 0
        kept = torch.arange(300) != 7
        distance = (made - rows).norm(dim=1)[kept] / rows.norm(dim=1)[kept]
        assert float(distance.max()) < 0.2


def test_product_quantisation_of_few_different_parts_is_exact():
    generator = torch.Generator().manual_seed(0)
    books = torch.randn(3, 40, 4, generator=generator)
    codes = torch.randint(0, 40, (2000, 3), generator=generator)
    rows = torch.cat([books[m][codes[:, m]] for m in range(3)], 1)
    layer = tb.Embedding.from_pretrained(rows, tb.ProductQuantized(parts=3))
    assert layer.fit_error < 1e-6


def test_a_rotation_helps_where_columns_go_together():
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(1000, 16, generator=generator) * torch.logspace(0, -2, 16)
    turn, _ = torch.linalg.qr(torch.randn(16, 16, generator=generator))
    errors = [
        tb.Embedding.from_pretrained(mixed @ turn, tb.ProductQuantized(parts=4, rotate=rotate)).fit_error
        for rotate in (False, True)
    ]
    assert errors[1] < 0.9 * errors[0]


def test_ratio_takes_the_most_parts_that_keep_it():
    budget = Budget(30_522, 384)
    for ratio in (2, 4, 7, 14, 25):
        structure = tb.ProductQuantized(ratio=ratio).bind(budget)
        assert budget.ratio(structure) >= ratio
        wider = [m for m in range(structure.parts + 1, 385) if 384 % m == 0]
        assert not wider or budget.ratio(tb.ProductQuantized(parts=wider[0]).bind(budget)) < ratio
    with pytest.raises(ValueError, match="times smaller, the most it can be"):
        tb.ProductQuantized(ratio=10_000).bind(budget)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: tb.QuantizedRows(bits=3), ValueError, "choose 8 or 4"),
        (lambda: tb.QuantizedRows(group=0), ValueError, "group=0"),
        (lambda: tb.ProductQuantized(parts=2, ratio=3), ValueError, "give one"),
        (lambda: tb.ProductQuantized(parts=5).bind(Budget(10, 12)), ValueError, "choose one of 1, 2, 3, 4, 6, 12"),
        (lambda: tb.Embedding(10, 4, tb.QuantizedRows()), ValueError, "fit it to a table with from_pretrained"),
        (lambda: tb.Embedding(10, 4, tb.ProductQuantized()), ValueError, "fit it to a table with from_pretrained"),
    ],
)
def test_refusals(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_k_means_finds_separate_clusters_and_fills_empty_ones():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])
    points = torch.cat([centre + 0.01 * table(50, 2) for centre in centres])
    codes, found = k_means(points, 4, sweeps=20)
    assert float((found[codes] - points).norm(dim=1).max()) < 0.1
    same = torch.ones(10, 2)
    codes, found = k_means(same, 4, sweeps=5)
    assert torch.equal(found[codes], same)


@pytest.mark.parametrize("dims", [1, 2, 5])
def test_nearest_centres(dims):
    points, centres = table(5000, dims), table(100, dims).flip(0)
    distance = torch.cdist(points.double(), centres.double())
    found = distance.gather(1, _nearest(points, centres)[:, None])[:, 0]
    least = distance.min(1).values
    # Squares differ by no more than what the bits that name a centre are worth.
    assert float((found.square() - least.square()).max()) < 2**-15 * float(points.square().sum(1).max() + 1)


def test_weights_pull_centres():
    points = torch.cat([torch.zeros(50, 2), torch.ones(50, 2)])
    weight = torch.cat([torch.full((50,), 3.0), torch.ones(50)])
    _, centres = k_means(points, 1, sweeps=5, weight=weight)
    assert torch.allclose(centres, torch.full((1, 2), 0.25))


def test_codebooks_train():
    torch.manual_seed(0)
    layer = tb.Embedding.from_pretrained(table(), tb.ProductQuantized(parts=16), freeze=False)
    assert [name for name, _ in layer.named_parameters()] == ["codebooks"]
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    index, goal = torch.arange(500), table()
    before = float((layer(index) - goal).square().mean().detach())
    for _ in range(50):
        optimiser.zero_grad()
        loss = (layer(index) - 0.5 * goal).square().mean()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.5 * before


@pytest.mark.parametrize("format", [tb.QuantizedRows(), tb.QuantizedRows(group=16), tb.QuantizedRows(bits=4)], ids=str)
@pytest.mark.parametrize("std", [1e-2, 1e-3, 1e-4])
def test_half_precision_holds_the_scales_of_small_numbers(format, std):
    rows = table() * std
    layer = tb.Embedding.from_pretrained(rows, format)
    error = float((layer.half().weight.float() - rows).norm() / rows.norm())
    assert error < layer.fit_error + 0.02


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0, 1000.0])
def test_product_quantisation_of_columns_far_from_zero(mean):
    rows = mean + 0.01 * table(2000, 8)
    layer = tb.Embedding.from_pretrained(rows, tb.ProductQuantized(parts=8))
    # A float32 of size 1000 is itself rounded by a hundredth of the spread.
    assert float((layer.weight - rows).norm() / (rows - mean).norm()) < 0.03


@pytest.mark.parametrize("size", [1e-30, 1e20])
def test_product_quantisation_of_any_size(size):
    layer = tb.Embedding.from_pretrained(table() * size, tb.ProductQuantized(parts=32))
    assert layer.fit_error < 0.2


def test_rotations_follow_the_tables_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        layer = tb.Embedding.from_pretrained(table(300, 8).float(), tb.ProductQuantized(parts=2, rotate=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.rotation.dtype == torch.float32


def test_a_bias_alone_can_be_trained():
    head = tb.Head.from_pretrained(table(300, 8), tb.ProductQuantized(parts=4), bias=torch.zeros(300))
    head.bias.requires_grad_()
    head.loss(torch.randn(3, 8), torch.tensor([1, 2, 3])).backward()
    assert head.bias.grad.count_nonzero() == 300


@pytest.mark.parametrize("format", [tb.QuantizedRows(bits=4), tb.ProductQuantized(parts=4)])
def test_codes_loaded_between_forward_and_backward_are_noticed(format):
    """As a train's cores are: what was looked up is no longer what the codes say."""
    layer = tb.Embedding.from_pretrained(table(), format, freeze=False)
    other = tb.Embedding.from_pretrained(table().flip(0), format)
    rows = layer(torch.arange(9))
    layer.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rows.sum().backward()
