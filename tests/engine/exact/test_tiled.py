"""Products and elementwise functions give a row the same bits in any company."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.engine.exact.modules import ExactFunctions
from paceline.engine.exact.tiled import (
    Product,
    _agreeing_heights,
    _is_placeless,
    affine,
    cancelling,
    elementwise,
    linear,
    multiply,
    placeless,
)

pytestmark = pytest.mark.thorough

SIZES = ((33, 47), (64, 32), (576, 192))  # inner, outer
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads of torch, put back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _inputs(product: Product, inner: int, outer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = cancelling(70, outer, inner, dtype)
    return rows, columns if product is linear else columns.t().contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("product", [linear, affine])
def test_a_row_of_a_product_is_alike_in_any_company(
    product: Product, size: tuple[int, int], dtype: torch.dtype, num_threads: int
) -> None:
    """Alone, among few or many, in another order: the same bits. Other bits with another number of threads are allowed."""
    rows, weight = _inputs(product, *size, dtype)
    bias = torch.linspace(-1e-6, 1e-6, size[1], dtype=dtype)
    whole = multiply(product, rows, weight, bias)
    for count in (1, 2, 3, 7, 8, 30):
        parts = [multiply(product, part, weight, bias) for part in torch.split(rows, count)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(multiply(product, rows.flip(0), weight, bias).flip(0), whole)


def test_a_row_of_a_plain_product_is_not() -> None:
    """The library gives a row alone other bits than among eight: the test above can fail."""
    rows, weight = _inputs(linear, 576, 192, torch.float32)
    alone = torch.cat([functional.linear(row, weight) for row in torch.split(rows, 1)])
    assert not torch.equal(alone, functional.linear(rows, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_keep_their_shape_and_value(dtype: torch.dtype) -> None:
    """They are the library's products but for rounding, with any axes before the last."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 64, generator=generator).to(dtype)
    weight = torch.randn(32, 64, generator=generator).to(dtype)
    out = multiply(linear, x, weight, None)
    torch.testing.assert_close(out, functional.linear(x, weight))
    torch.testing.assert_close(multiply(affine, x, weight.t(), None), out)
    assert multiply(linear, x[:0], weight, None).shape == (0, 3, 32)


def test_exact_functions_inside_exact_functions_are_exact() -> None:
    """As in a router inside a block of experts: the ladder is found by the library's product, not by an exact one."""
    weight = torch.randn(4, 48)  # no other test has this shape: its ladder is found here
    x = torch.randn(16, 48)
    with ExactFunctions(), ExactFunctions():
        whole = functional.linear(x, weight)
        parts = [functional.linear(part, weight) for part in torch.split(x, 1)]
    heights = _agreeing_heights(linear, (4, 48), 0, torch.float32, torch.get_num_threads())
    _agreeing_heights.cache_clear()
    assert heights == _agreeing_heights(linear, (4, 48), 0, torch.float32, torch.get_num_threads())
    assert torch.equal(torch.cat(parts), whole)


def test_cancelling_products_are_nothing_but_rounding() -> None:
    """They are far smaller than their terms, and hardly ever 0: an order of summation shows."""
    rows, columns = cancelling(16, 16, 600, torch.float32)
    out = rows @ columns.t()
    assert out.abs().max() < 1e-4
    assert (out != 0).float().mean() > 0.8


@pytest.mark.parametrize("function", [functional.silu, torch.sigmoid, functional.gelu])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_is_alike_at_any_place(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, num_threads: int
) -> None:
    """In arrays of all lengths, strided ones too, and whatever part of them a thread gets."""
    x = (torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    whole = elementwise(function, x)
    torch.testing.assert_close(whole, function(x))
    assert torch.equal(elementwise(function, x[5:]), whole[5:])
    assert torch.equal(elementwise(function, x[::3]), whole[::3])
    for count in (1, 3, 15, 33):
        parts = [elementwise(function, part) for part in torch.split(x[:200], count)]
        assert torch.equal(torch.cat(parts), whole[:200])


def test_a_function_that_looks_at_the_place_is_found_out() -> None:
    """Its name would not be among those that are trusted; those of exact attention are."""
    x = torch.randn(100)
    assert not _is_placeless(lambda part: part * (1 + 1e-6) if len(part) < 16 else part, x)
    assert not _is_placeless(lambda part: part if part.is_contiguous() else part * (1 + 1e-6), x)
    assert _is_placeless(lambda part: part + 1, x)
    assert placeless(torch.float32) >= {"exp", "tanh", "cos", "sin", "rsqrt"}
