"""Files of models inside of what ``torch.compile`` and data parallelism put around them."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorbed as tb


def train():
    return tb.TTEmbedding(300, 12, 3)


@pytest.fixture
def averaged():
    """Makes a model whose gradients would be averaged over processes, of which there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel
    dist.destroy_process_group()


def test_layers_are_not_replaced_below_what_averages_their_gradients(averaged, tmp_path):
    model, dense, other = (
        averaged(nn.Sequential(first, nn.Linear(12, 2))) for first in (train(), nn.Embedding(300, 12), train())
    )
    tb.save(model, tmp_path / "f")
    with pytest.raises(ValueError, match=r"^0 would be replaced below a DistributedDataParallel.*wrap it then"):
        tb.load(tmp_path / "f", into=dense)
    with pytest.raises(ValueError, match=r"^module.0 would be replaced below a DistributedDataParallel.*wrap it then"):
        tb.compress_(dense, tb.LowRank(rank=2), min_rows=300)
    assert type(dense.module[0]) is nn.Embedding
    before = list(other.parameters())
    assert tb.load(tmp_path / "f", into=other) is other
    assert all(one is old for one, old in zip(other.parameters(), before, strict=True))
    assert torch.equal(other(torch.arange(300)), model(torch.arange(300)))


def test_layers_beside_what_averages_the_gradients_of_others_are_replaced(averaged, tmp_path):
    model, other = (
        nn.ModuleDict({"ids": first, "body": averaged(nn.Linear(12, 2))}) for first in (train(), nn.Embedding(300, 12))
    )
    tb.save(model, tmp_path / "f")
    tb.load(tmp_path / "f", into=other)
    assert torch.equal(other["ids"](torch.arange(300)), model["ids"](torch.arange(300)))


def test_a_file_of_one_layer_says_how_it_is_loaded(tmp_path):
    layer = train()
    tb.save(torch.compile(layer), tmp_path / "f")
    with pytest.raises(ValueError, match=r"f is one layer, and not of a model: load\(path\) gives it"):
        tb.load(tmp_path / "f", into=layer)
    assert torch.equal(tb.load(tmp_path / "f").weight, layer.weight)


@pytest.mark.parametrize("more", [nn.Linear(2, 2), nn.Parameter(torch.ones(3))], ids=["module", "parameter"])
def test_what_is_not_around_a_model_is_saved_with_it(more, tmp_path):
    """A child of the name that ``torch.compile`` gives, beside others."""
    model, other = nn.Module(), nn.Module()
    for each in (model, other):
        each._orig_mod, each.more = train(), deepcopy(more)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    tb.save(model, tmp_path / "f")
    tb.load(tmp_path / "f", into=other)
    for one, param in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, param)


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
