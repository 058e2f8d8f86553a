"""Products of one matrix with many by the kernels for GPUs, in the interpreter, against double precision."""

import pytest
import torch
from drawing import normal

from tensorbed.backends import triton

if triton.reason:
    pytest.skip(triton.reason, allow_module_level=True)

from tensorbed.backends.triton import products

SIZES = [(1, 1, 1, 1), (5, 3, 4, 2), (2, 17, 33, 5), (7, 70, 40, 1), (3, 20, 100, 37)]  # parts, height, depth, width
every_size = pytest.mark.parametrize("size", SIZES, ids=str)
pytestmark = pytest.mark.tiles_as_they_are
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


def drawn(guards, dtype, *shape, seed):
    return guards.copy(normal(*shape, seed=seed, dtype=dtype))


def assert_product(found, wanted, size, dtype, depth):
    """Within the rounding of a sum of so many in single precision, and of the result to its dtype."""
    bound = depth * torch.finfo(torch.float32).eps * size + torch.finfo(dtype).eps * wanted.abs()
    assert ((found.double() - wanted).abs() <= bound + 1e-7 * (dtype == torch.float16)).all()


@every_size
@every_dtype
@pytest.mark.parametrize("transposed", [False, True])
def test_one_matrix_times_many(guards, size, dtype, transposed):
    parts, height, depth, width = size
    matrix = drawn(guards, dtype, *((depth, height) if transposed else (height, depth)), seed=1)
    matrix = matrix.T if transposed else matrix
    x = drawn(guards, dtype, parts, depth, width, seed=2)
    out = guards.empty((parts, height, width), dtype, x.device)
    products.times(matrix, x, out)
    assert_product(out, matrix.double() @ x.double(), matrix.double().abs() @ x.double().abs(), dtype, depth)


@every_size
@every_dtype
def test_outer_products_are_added(guards, size, dtype):
    parts, height, depth, width = size
    grad, x = drawn(guards, dtype, parts, height, width, seed=3), drawn(guards, dtype, parts, depth, width, seed=4)
    total = drawn(guards, torch.float32, height, depth, seed=5)
    before = total.double()
    products.add_outer(total, grad, x)
    wanted = before + (grad.double() @ x.double().transpose(1, 2)).sum(0)
    sizes = before.abs() + (grad.double().abs() @ x.double().abs().transpose(1, 2)).sum(0)
    assert_product(total, wanted, sizes, torch.float32, parts * width)


def test_many_columns_are_summed_in_pieces(guards):
    """More than one program adds to the same sums, which come out the same every time."""
    grad, x = drawn(guards, torch.float32, 40, 3, 50, seed=6), drawn(guards, torch.float32, 40, 4, 50, seed=7)
    totals = [guards.copy(torch.zeros(3, 4)) for _ in range(2)]
    for total in totals:
        products.add_outer(total, grad, x)
    wanted = (grad.double() @ x.double().transpose(1, 2)).sum(0)
    assert torch.equal(*totals)
    torch.testing.assert_close(totals[0].double(), wanted, rtol=1e-5, atol=1e-4)
