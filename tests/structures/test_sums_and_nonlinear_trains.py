"""Sums of Kronecker products and non-linear trains beyond the laws of every structure: definitions, fits, refusals."""

import pytest
import torch

import tensorbed as tb
from tensorbed.fitting import fit_table

ROWS, SHAPE = 101, ((4, 5, 6), (2, 3, 4))


def test_a_canonical_polyadic_table_is_a_sum_of_kronecker_products():
    layer = tb.Embedding(ROWS, 24, tb.CanonicalPolyadic(rank=3, shape=SHAPE), dtype=torch.float64)
    factors = list(layer.params().values())
    terms = [torch.kron(torch.kron(factors[0][..., r], factors[1][..., r]), factors[2][..., r]) for r in range(3)]
    torch.testing.assert_close(layer.weight, torch.stack(terms).sum(0)[:ROWS])


def test_a_non_linear_train_is_a_train_with_an_activation_after_each_core_but_the_last():
    layer = tb.Embedding(ROWS, 24, tb.NonlinearTrain(rank=3, shape=SHAPE), dtype=torch.float64)
    first, second, third = layer.cores
    for row in (0, 37, 100):
        a, b, c = row // 30, row // 6 % 5, row % 6
        left = first[0, a].relu()  # (J_1, R)
        left = torch.einsum("jr,rks->jks", left, second[:, b]).relu()
        expected = torch.einsum("jks,sl->jkl", left, third[:, c, :, 0]).reshape(-1)
        torch.testing.assert_close(layer(torch.tensor(row)), expected)


def test_one_activation_is_not_another():
    layers = []
    for activation in ("relu", "tanh", "gelu"):
        torch.manual_seed(0)
        layers.append(tb.Embedding(ROWS, 24, tb.NonlinearTrain(rank=3, shape=SHAPE, activation=activation)))
    tables = [layer.weight.detach().clone() for layer in layers]
    assert not torch.allclose(tables[0], tables[1])
    assert not torch.allclose(tables[0], tables[2])


@pytest.mark.parametrize("order", [2, 3, 4])
def test_fits_of_few_terms_are_found_again(order):
    """Of so few terms that there is one way to write the table; its padded rows are found with it."""
    format = tb.CanonicalPolyadic(rank=2, order=order)
    torch.manual_seed(0)
    table = tb.Embedding(2**12, 2**6, format, dtype=torch.float64).weight.detach().clone()
    assert fit_table(table, format).error < 1e-3


def test_more_terms_fit_better_and_every_fit_is_the_same():
    table = torch.randn(200, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = [fit_table(table, tb.CanonicalPolyadic(rank=rank)).error for rank in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]
    assert fit_table(table, tb.CanonicalPolyadic(rank=4)).error == errors[1]
    table.zero_()
    assert fit_table(table, tb.CanonicalPolyadic(rank=4)).error == 0


def test_huge_tables_are_born_at_scale():
    """Of the non-linear one by drawn rows, of the other by its exact norm."""
    for format in (tb.NonlinearTrain(rank=4), tb.CanonicalPolyadic(rank=4)):
        layer = tb.Embedding(10**9, 16, format, std=0.3)
        index = torch.randint(10**9, (200_000,), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            assert float(layer(index).square().mean().sqrt()) == pytest.approx(0.3, rel=0.05)


def test_refusals():
    with pytest.raises(
        ValueError, match=r'activation=.swish. for NonlinearTrain: choose one of "relu", "tanh", "gelu"'
    ):
        tb.NonlinearTrain(activation="swish")
    for format in (tb.NonlinearTrain, tb.CanonicalPolyadic):
        with pytest.raises(ValueError, match="ranks are positive; use ratio="):
            format(rank=0)
        with pytest.raises(ValueError, match="rank and ratio both set the size"):
            format(rank=2, ratio=4)
        with pytest.raises(ValueError, match="no fit of it keeps an error; give rank= or ratio="):
            format(rel_error=0.1)
        with pytest.raises(ValueError, match="fewer than"):
            tb.Embedding(1000, 24, format(rank=2, shape=SHAPE))
        with pytest.raises(ValueError, match="times smaller, the most it can be"):
            tb.Embedding(1000, 24, format(ratio=10_000))
    with pytest.raises(ValueError, match=r"NonlinearTrain\(rank=2\) cannot be fitted to a table"):
        tb.Embedding.from_pretrained(torch.randn(100, 8), tb.NonlinearTrain(rank=2))


def test_a_draw_of_which_an_activation_lets_nothing_pass_is_drawn_again():
    for seed in range(20):
        torch.manual_seed(seed)
        layer = tb.Embedding(9, 1, tb.NonlinearTrain(rank=1, order=2), std=0.5)
        assert float(layer.weight.detach().square().mean().sqrt()) == pytest.approx(0.5, rel=1e-4)
