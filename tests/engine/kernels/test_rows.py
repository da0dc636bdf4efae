"""What a layer does to rows between its products, against torch; each row by itself."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from paceline.engine.kernels.cpu.rows import row_kernels
from paceline.engine.kv_cache import TORCH_DTYPES

# Of numbers around 1; bfloat16 has 8 bits.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
DTYPES = list(TORCH_DTYPES.values())
WIDTHS = (1, 2, 7, 16, 33, 576, 1000)


def rows_of(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random ones, the same each time."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows * width)).to(dtype)


def require_close(found: Tensor, expected: Tensor) -> None:
    """Up to one rounding to the type of what was found."""
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """By definition, in float32."""
    wide = rows.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_is_that_of_its_row(width: int, dtype: torch.dtype) -> None:
    """Alone, and of a sum, which is given too."""
    rows, more, weight = rows_of(9, width, dtype), rows_of(9, width, dtype) * 0.5, rows_of(1, width, dtype)[0]
    require_close(row_kernels().norm(rows, weight, 1e-5), norm(rows, weight, 1e-5))
    total, found = row_kernels().add_norm(rows, more, weight, 0.1)
    assert torch.equal(total, rows + more)
    require_close(found, norm(total, weight, 0.1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_gate_is_silu_times_what_goes_through(width: int, dtype: torch.dtype) -> None:
    """Of small numbers and of such that overflow an exponential."""
    for size in (1.0, 300.0):
        rows = rows_of(5, 2 * width, dtype)
        rows[:, :width] *= size
        gate, up = rows[:, :width].float(), rows[:, width:].float()
        require_close(row_kernels().gate(rows) / size, functional.silu(gate) * up / size)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """By definition: `heads` [num_rows, num_heads, dim]."""
    first, second = heads.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return heads.float() * cos.float()[:, None] + turned * sin.float()[:, None]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80, 256])
def test_queries_and_keys_are_rotated_and_what_is_new_is_stored_at_its_slot(
    dim: int, dtype: torch.dtype
) -> None:
    """Values stay as they are, and no other slot of the pool changes."""
    heads = rows_of(4, (3 + 2 * 1) * dim, dtype)
    cos, sin = rows_of(4, dim, dtype), rows_of(4, dim, dtype).flip(0)
    before = heads.clone().view(4, 5, dim)
    pool = torch.full((6, 2, 3, 2, dim), 9.0, dtype=dtype)
    keys, values = pool[:, 0, :, :1], pool[:, 1, :, 1:]
    slots = torch.tensor([17, 0, 4, 9])
    row_kernels().rotate_and_store(heads, (3, 1), cos, sin, slots, (keys, values))
    after = heads.view(4, 5, dim)
    require_close(after[:, :4], rotated(before[:, :4], cos, sin))
    assert torch.equal(after[:, 4], before[:, 4])
    at = slots // 3, slots % 3
    assert torch.equal(keys[at], after[:, 3:4])
    assert torch.equal(values[at], after[:, 4:])
    assert int((pool != 9.0).any(dim=-1).sum()) == 2 * len(slots)
    again = before.clone().view(4, -1)
    row_kernels().rotate(again, (3, 1), cos, sin)
    assert torch.equal(again, heads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """To the last bit, with more threads too; and one that is no number stays alone."""
    rows, weight = rows_of(40, 100, dtype), rows_of(1, 100, dtype)[0]
    cos = rows_of(40, 10, dtype)
    rows[7] = float("nan")
    kernels = row_kernels()

    def all_of(some: Tensor, cosines: Tensor) -> list[Tensor]:
        """What each kernel gives."""
        turned = some.clone()
        kernels.rotate(turned, (6, 2), cosines, cosines)
        return [
            kernels.norm(some, weight, 1e-5),
            *kernels.add_norm(some, some, weight, 1e-5),
            kernels.gate(some),
            turned,
        ]

    together = all_of(rows, cos)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = all_of(rows, cos)
    finally:
        torch.set_num_threads(num_threads)
    for number in range(40):
        alone = all_of(rows[number : number + 1], cos[number : number + 1])
        for one, two, three in zip(alone, together, again, strict=True):
            assert torch.equal(one[0].isnan(), two[number].isnan())
            assert torch.equal(one[0].nan_to_num(), two[number].nan_to_num())
            assert torch.equal(one[0].nan_to_num(), three[number].nan_to_num())
            assert bool(one.isnan().all()) or number != 7
