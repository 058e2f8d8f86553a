"""Adam whose tables share second moments among their rows."""

import pytest
import torch

pytest.importorskip("accelerate")

from experiments.lab.optimisers import OPTIMIZERS, SharingAdam

ROWS, COLS, STEPS = 7, 3, 5


def tables_after(optimizer_of):
    """The table after each step, and a bias beside it, with gradients that are the same for every optimiser."""
    draw = torch.Generator().manual_seed(0)
    table, bias = (torch.nn.Parameter(torch.randn(size, generator=draw).double()) for size in ((ROWS, COLS), (COLS,)))
    optimizer, seen = optimizer_of(table, bias), []
    for _ in range(STEPS):
        table.grad, bias.grad = (torch.randn(each.shape, generator=draw).double() for each in (table, bias))
        optimizer.step()
        seen.append((table.detach().clone(), bias.detach().clone()))
    return seen


def sharing(sets):
    return lambda table, bias: SharingAdam([{"params": [bias]}, {"params": [table], "sharing": sets}], lr=0.1)


def test_with_a_set_for_each_row_it_is_adam():
    torch.testing.assert_close(
        tables_after(sharing(ROWS)), tables_after(lambda *tensors: torch.optim.Adam(tensors, lr=0.1))
    )


def test_rows_of_a_set_divide_by_the_moments_of_its_sum_of_squares():
    """By hand, row after row; the bias beside the table has Adam's own."""
    sets, draw = 3, torch.Generator().manual_seed(0)
    table = torch.randn((ROWS, COLS), generator=draw).double()
    torch.randn(COLS, generator=draw)
    first, second = torch.zeros(ROWS, COLS).double(), torch.zeros(ROWS, COLS).double()
    of_adam = tables_after(lambda *tensors: torch.optim.Adam(tensors, lr=0.1))
    for step, (seen, bias) in enumerate(tables_after(sharing(sets)), 1):
        gradient = torch.randn((ROWS, COLS), generator=draw).double()
        torch.randn(COLS, generator=draw)
        for row in range(ROWS):
            of_set = sum(gradient[k] ** 2 for k in range(row % sets, ROWS, sets))
            first[row] = 0.9 * first[row] + 0.1 * gradient[row]
            second[row] = 0.999 * second[row] + 0.001 * of_set
        table -= 0.1 * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
        torch.testing.assert_close(seen, table)
        torch.testing.assert_close(bias, of_adam[step - 1][1])


def test_it_goes_on_from_its_state():
    tensors = torch.zeros(ROWS, COLS), torch.zeros(COLS)
    whole, halves = ([torch.nn.Parameter(tensor.clone()) for tensor in tensors] for _ in range(2))

    def step(optimizer, parameters, gradient):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    through, before, after = sharing(2)(*whole), sharing(2)(*halves), sharing(2)(*halves)
    step(through, whole, 1.0)
    step(before, halves, 1.0)
    after.load_state_dict(before.state_dict())
    step(through, whole, -2.0)
    step(after, halves, -2.0)
    torch.testing.assert_close(halves, whole, rtol=0, atol=0)


def test_it_is_the_adam_of_the_laboratory():
    assert isinstance(OPTIMIZERS["adam"]([torch.nn.Parameter(torch.zeros(2))], lr=0.1), SharingAdam)
