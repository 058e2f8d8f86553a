"""Files of models inside of what ``torch.compile`` and data parallelism put around them."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorbed as tb


def train():
    return tb.TTEmbedding(300, 12, 3)


def test_layers_are_not_replaced_below_what_averages_their_gradients(tmp_path):
    def wrapped(first):
        return nn.parallel.DistributedDataParallel(nn.Sequential(first, nn.Linear(12, 2)))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, dense, other = (wrapped(one) for one in (train(), nn.Embedding(300, 12), train()))
        tb.save(model, tmp_path / "f")
        with pytest.raises(ValueError, match=r"^0 would be replaced below a DistributedDataParallel.*wrap it then"):
            tb.load(tmp_path / "f", into=dense)
        assert type(dense.module[0]) is nn.Embedding
        before = list(other.parameters())
        assert tb.load(tmp_path / "f", into=other) is other
        assert all(one is old for one, old in zip(other.parameters(), before, strict=True))
        assert torch.equal(other(torch.arange(300)), model(torch.arange(300)))
    finally:
        dist.destroy_process_group()


def test_what_is_not_around_a_model_is_saved_with_it(tmp_path):
    """A child of the name that ``torch.compile`` gives, beside others."""
    model, other = nn.Module(), nn.Module()
    for each in (model, other):
        each._orig_mod, each.more = train(), nn.Linear(2, 2)
    tb.save(model, tmp_path / "f")
    tb.load(tmp_path / "f", into=other)
    assert torch.equal(other.more.weight, model.more.weight)
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(ValueError, match="nothing here is a layer of tensorbed"),
    ):
        tb.save(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), tmp_path / "g")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: torch.compile(model, backend="eager")])
def test_files_of_wrapped_models_are_the_model_s_own(wrap, tmp_path):
    model, other = (nn.Sequential(train(), nn.Linear(12, 2)) for _ in range(2))
    tb.save(wrap(model), tmp_path / "f")
    assert tb.load(tmp_path / "f", into=other) is other
    index = torch.arange(300)
    assert torch.equal(other(index), model(index))
    third = wrap(nn.Sequential(nn.Embedding(300, 12), nn.Linear(12, 2)))
    assert tb.load(tmp_path / "f", into=third) is third
    torch.testing.assert_close(third(index), model(index))
