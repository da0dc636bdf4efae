"""Products of a few rows, in the layout of oneDNN's weights: what it gives itself, up to the order of a sum."""

import pytest
import torch
from torch import Tensor, nn

from paceline.engine.fusion import PackedLinear
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.few_rows import MAX_ROWS, FewRows


def packed(out_features: int, in_features: int, *, bias: bool = False) -> PackedLinear:
    """A layer with random weights."""
    torch.manual_seed(out_features)
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)
    return PackedLinear(linear.requires_grad_(requires_grad=False))


@pytest.fixture(scope="module", autouse=True)
def _is_there() -> None:
    """This processor has it, and its oneDNN packs weights as we read them; otherwise there is nothing to test."""
    if packed(64, 64)._few_rows is None:
        pytest.skip("no products of a few rows here: no AVX512-BF16, or another layout")


def require_close(found: Tensor, expected: Tensor) -> None:
    """Up to one rounding of sums that are near 1."""
    torch.testing.assert_close(found, expected, atol=2**-9, rtol=2**-7)


def rows_of(num_rows: int, width: int) -> Tensor:
    """Random ones, the same each time."""
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows)).bfloat16()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 64), (192, 128), (576, 1536), (960, 576)])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_it_gives_what_onednn_gives(
    out_features: int, in_features: int, num_threads: int, *, bias: bool
) -> None:
    """For each number of rows that it takes, on any number of threads."""
    layer = packed(out_features, in_features, bias=bias)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert layer._few_rows is not None
        for num_rows in (*range(1, 20), MAX_ROWS):
            rows = rows_of(num_rows, in_features)
            require_close(layer._few_rows(rows), layer._multiply(rows))
    finally:
        torch.set_num_threads(before)


def test_a_row_is_the_same_in_any_company() -> None:
    """And what is no number stays in its row."""
    layer, rows = packed(192, 128), rows_of(20, 128)
    rows[3, 5] = float("nan")
    together = layer(rows)
    for number in range(20):
        alone = layer(rows[number : number + 1])[0]
        assert torch.equal(alone.nan_to_num(), together[number].nan_to_num())
        assert bool(alone.isnan().all()) == (number == 3)


def test_rows_may_come_in_any_shape() -> None:
    """Those of more dimensions, none at all, more than it takes, and such as do not lie end to end."""
    layer = packed(64, 128)
    for shape in ((0,), (5,), (1, 7), (2, 3, 4), (MAX_ROWS + 1,), (1, 300)):
        rows = torch.randn(*shape, 128).bfloat16()
        require_close(layer(rows), layer._multiply(rows))
    rows = torch.randn(128, 6).bfloat16().T
    require_close(layer(rows), layer._multiply(rows))


def test_a_weight_that_is_packed_with_gaps_is_left_to_onednn() -> None:
    """There its numbers lie elsewhere."""
    for out_features, in_features in ((100, 64), (64, 70), (1, 1)):
        layer = packed(out_features, in_features)
        assert layer._few_rows is None
        with pytest.raises(NoKernelError, match="with gaps"):
            FewRows(layer._packed, out_features, in_features, None)


def test_another_layout_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not give oneDNN's very product is not used, and the layer gives what it gave."""
    monkeypatch.setattr(FewRows, "__call__", lambda self, rows: rows.new_ones(len(rows), self._sizes[1]))
    layer = packed(64, 64)
    assert layer._few_rows is None
    rows = rows_of(2, 64)
    assert torch.equal(layer(rows), layer._multiply(rows))
