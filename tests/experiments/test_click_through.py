"""The model of clicks, its rows from Parquet, and runs of the task."""

import pytest
import torch

pytest.importorskip("accelerate")
pytest.importorskip("ibis")

import tensorbed as tb
from benchmarks.workloads import CRITEO
from experiments.tasks.click_through.model import ClickModel, ClickThroughSettings, format_of

SIZES = {"user": 5000, "book": 3000, "year": 30}


def settings(**options):
    return ClickThroughSettings(**{"dataset": "criteo", "row": "tiny", "dim": 4, "hidden": 8, **options})


def parameters(module):
    return sum(tensor.numel() for tensor in module.parameters())


# The model


@pytest.mark.parametrize(("hidden", "body"), [(1024, 3_789_825), (128, 129_665)])
@pytest.mark.parametrize("order", [3, 4])
def test_the_paper_has_so_many_parameters_as_far_as_it_tells(hidden, body, order):
    """Its layers and threshold are known, and the values of 26 features; those of the 13 numbers are not."""
    rank = 16 if hidden == 1024 else 2
    hashed = {f"C{k}": min(rows, 100_000) for k, rows in enumerate(CRITEO)} | {f"I{k}": 100 for k in range(13)}
    trains = settings(dim=16, hidden=hidden, format=f"tensor_train(order={order})", rank=rank)
    with torch.device("meta"):
        full = ClickModel(settings(dim=16, hidden=hidden), hashed)
        small = ClickModel(trains, hashed)
    assert parameters(full.body) == parameters(small.body) == body == 624 * hidden + 3 * hidden**2 + 5 * hidden + 1
    assert parameters(full) == body + 16 * sum(hashed.values())
    large = [rows for rows in hashed.values() if rows > 2000]
    cores = [tb.TTEmbeddingBag(rows, 16, rank=rank, order=order, device="meta") for rows in large]
    kept = 16 * sum(rows for rows in hashed.values() if rows <= 2000)
    assert parameters(small) == body + kept + sum(map(parameters, cores))
    # The paper's own totals are larger, by tables that it does not tell the sizes of.
    assert parameters(full) < 41.2e6 - (3_789_825 - body)
    assert parameters(small) < {1024: 4.5e6, 128: 0.53e6}[hidden]


def test_only_large_tables_have_the_format_of_the_row():
    row = settings(format="tensor_train", rank=2)
    assert format_of(row, 2000) == tb.Dense()
    assert format_of(row, 2001) == tb.TensorTrain(rank=2)
    model = ClickModel(row, SIZES)
    kinds = [type(layer.structure).__name__ for layer in model.features.tables.values()]
    assert kinds == ["TensorTrainMatrix", "TensorTrainMatrix", "DenseMatrix"]


def test_a_ratio_that_a_small_table_cannot_have_is_the_most_it_can():
    row = settings(dim=16, format="quotient_remainder", ratio=200.0)
    for rows, most in ((2001, 22.23), (16_807, 64.64), (340_556, 200.1)):
        ratio = tb.EmbeddingBag(rows, 16, format_of(row, rows), device="meta").compression_ratio
        assert most / 1.02 <= ratio <= most * 1.001


@pytest.mark.parametrize("interaction", [False, True])
def test_scores_are_those_of_layers_over_rows_side_by_side(interaction):
    model = ClickModel(settings(format="tensor_train", rank=2, interaction=interaction), SIZES)
    ids = torch.stack([torch.randint(rows, (7,)) for rows in SIZES.values()], 1)
    rows = [layer(ids[:, [k]]) for k, layer in enumerate(model.features.tables.values())]
    pairs = [(rows[i] * rows[j]).sum(1, keepdim=True) for i in range(3) for j in range(i + 1, 3)]
    hidden = torch.cat([*rows, *(pairs if interaction else [])], 1)
    linear = [layer for layer in model.body if isinstance(layer, torch.nn.Linear)]
    assert len(linear) == 5
    for layer in linear[:-1]:
        hidden = (hidden @ layer.weight.T + layer.bias).clamp_min(0)
    expected = hidden @ linear[-1].weight[0] + linear[-1].bias
    torch.testing.assert_close(model(ids), expected)
