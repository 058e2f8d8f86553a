"""A table that is held while many calls score a few vectors each."""

import pytest
import torch

import tensorbed as tb
from tensorbed.nn.head import Head
from tensorbed.testing import assert_near

pytestmark = pytest.mark.without_kernels


@pytest.fixture
def tables_made(monkeypatch):
    """The tables that heads have made whole."""
    made, of_head = [], Head._table

    def counted(head):
        made.append(of_head(head))
        return made[-1]

    monkeypatch.setattr(Head, "_table", counted)
    return made


def head_of(format=None, **options):
    torch.manual_seed(0)
    return tb.Head(24, 101, format or tb.TensorTrain(rank=3), bias=True, std=1.0, **options)


@pytest.mark.parametrize("format", [tb.TensorTrain(rank=3), tb.LowRank(rank=3), tb.Dense(), tb.Bands(ratio=2.0)])
@torch.no_grad()
def test_scores_are_those_of_the_head_and_its_table_is_made_once(format, tables_made):
    head, h = head_of(format), torch.randn(5, 2, 24)
    head.bias.normal_()
    expected = head(h)
    assert not tables_made
    with head.table_held():
        for some in (slice(0, 1), slice(1, 5), slice(0, 5)):
            assert_near(head(h[some]), expected[some])
    assert len(tables_made) == 1
    torch.testing.assert_close(head(h), expected, rtol=0, atol=0)
    assert len(tables_made) == 1


@torch.no_grad()
def test_a_padding_row_scores_as_the_constant_that_it_is():
    embedding, head = tb.embedding_and_head(101, 24, tb.TensorTrain(rank=3), tied=True, padding_idx=7)
    embedding.padding_row.fill_(2.0)
    h = torch.randn(3, 24)
    with head.table_held():
        assert_near(head(h)[:, 7], 2 * h.sum(1))


@torch.no_grad()
def test_under_autocast_it_is_held_in_the_precision_of_the_products():
    head, h = head_of(), torch.randn(5, 24)
    with head.table_held():
        with torch.autocast("cpu", torch.bfloat16):
            low = head(h)
            assert head.held.table.dtype == low.dtype == torch.bfloat16
        torch.testing.assert_close(low.float(), head(h), rtol=0.02, atol=0.05)
        assert head.held.table.dtype == torch.float32


def test_where_gradients_are_asked_for_nothing_is_held(tables_made):
    head, h = head_of(), torch.randn(5, 24)
    with head.table_held():
        head(h).sum().backward()
    assert not tables_made
    assert head.core_0.grad.abs().sum() > 0


@torch.no_grad()
def test_after_the_outermost_context_nothing_is_left(tables_made):
    head, h = head_of(), torch.randn(2, 24)
    tensors = list(head.state_dict())
    with head.table_held():
        head(h)
        with head.table_held():
            head(h)
        with pytest.raises(ValueError, match="last size must be 24"), head.table_held():
            head(h[:, 1:])
        head(h)
        assert list(head.state_dict()) == tensors
    assert len(tables_made) == 1
    assert head.held is None
