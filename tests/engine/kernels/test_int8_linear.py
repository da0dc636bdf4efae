"""The compiled product of 8 bits: what torch's own functions give, and the same bits for a row in any company."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.engine.kernels.cpu import build
from paceline.engine.kernels.cpu.build import NoKernelError
from paceline.engine.kernels.cpu.int8_linear import Int8Product, MakesInt8Product, native_int8
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.quantised_linear import TorchInt8, quantise_rows
from tests.engine.kernels.sanitized import run_checked

# What fills panels, vectors and quads, what does not, and what is not even one of each.
SHAPES = ((1, 1), (3, 2), (16, 32), (20, 33), (64, 48), (67, 100), (576, 192), (1021, 31))
# One, as many as have their sums in registers at once, one more, and several tasks.
ROWS = (1, 2, 3, 4, 5, 11, 12, 13, 95, 97, 200)


@cache
def _native(more: str) -> MakesInt8Product:
    """The kernel, for this processor or for one that lacks its widest vectors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", " ".join([*build._compiler(), more]))
        return native_int8()


@pytest.fixture(params=["", "-mno-avx512f"], ids=["whole", "narrow"])
def native(request: pytest.FixtureRequest) -> MakesInt8Product:
    """Each of them that this machine can build and run."""
    try:
        return _native(request.param)
    except NoKernelError as error:
        pytest.skip(str(error))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _layer(
    makes: MakesInt8Product, in_features: int, out_features: int, *, has_bias: bool = False
) -> Int8Product:
    torch.manual_seed(in_features)
    codes, units = quantise_rows(torch.randn(out_features, in_features))
    return makes(codes, units[:, 0], torch.randn(out_features) if has_bias else None)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_it_gives_the_bits_of_torchs_own_functions(
    native: MakesInt8Product, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    """For every number of rows; a bias is added with one rounding less."""
    ours, theirs = (_layer(makes, in_features, out_features) for makes in (native, TorchInt8))
    biased = [_layer(makes, in_features, out_features, has_bias=True) for makes in (native, TorchInt8)]
    for num_rows in (0, *ROWS):
        rows = (torch.randn(num_rows, in_features) * torch.logspace(-6, 6, num_rows)[:, None]).to(dtype)
        assert torch.equal(ours(rows), theirs(rows))
        found, expected = (each(rows) for each in biased)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values())
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_row_is_the_same_bits_in_any_company(
    native: MakesInt8Product, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    """Alone, in any part of any batch, with one thread or two: no neighbour changes what comes of it."""
    layer, chance = _layer(native, in_features, out_features, has_bias=True), random.Random(0)
    rows = torch.randn(max(ROWS), in_features).to(dtype)
    alone = torch.cat([layer(row[None]) for row in rows])
    for num_rows, num_threads in product(ROWS, (1, 2)):
        chosen = torch.tensor(chance.sample(range(len(rows)), num_rows))
        with _threads(num_threads):
            assert torch.equal(layer(rows[chosen]), alone[chosen])


def test_rows_keep_their_other_dimensions(native: MakesInt8Product) -> None:
    """As a linear layer of torch's does."""
    layer = _layer(native, 20, 33)
    rows = torch.randn(2, 3, 20)
    assert torch.equal(layer(rows), layer(rows.view(6, 20)).view(2, 3, 33))


@pytest.mark.parametrize("makes", ["native", "torch"])
def test_what_is_no_number_stays_in_its_row(native: MakesInt8Product, makes: str) -> None:
    """It is not made to look whole, and its neighbours do not hear of it; zeros, and what is too small for a unit, give zeros."""
    layer = _layer(native if makes == "native" else TorchInt8, 33, 40)
    for dtype in TORCH_DTYPES.values():
        rows = torch.randn(6, 33).to(dtype)
        before = layer(rows)
        rows[1, 0], rows[2, 32], rows[3, 5] = float("nan"), float("inf"), -float("inf")
        rows[4], rows[5] = 0, 1e-35
        after = layer(rows)
        assert torch.equal(after[0], before[0])
        assert after[1:4].isnan().all()
        assert (after[4:] == 0).all()


def test_it_shows_the_weights_that_it_was_given(native: MakesInt8Product) -> None:
    """Though they lie otherwise."""
    for in_features, out_features in SHAPES:
        codes, units = quantise_rows(torch.randn(out_features, in_features))
        layer = native(codes, units[:, 0], None)
        assert torch.equal(layer.codes, codes)
        assert torch.equal(layer.units, units[:, 0])


def test_rows_of_another_width_are_not_read(native: MakesInt8Product) -> None:
    """It would read what is not theirs."""
    with pytest.raises(AssertionError, match="what is not there"):
        _layer(native, 20, 33)(torch.randn(4, 19))


def test_whole_numbers_are_within_half_a_step() -> None:
    """And the largest of a row is kept as it was."""
    rows: Tensor = torch.randn(50, 30)
    codes, units = quantise_rows(rows)
    assert (codes.abs().amax(1) == 127).all()
    assert ((codes * units - rows).abs() <= units * 0.5001).all()


@pytest.mark.slow
def test_it_reads_what_is_its_own_and_does_nothing_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above once more, under the compiler's checks."""
    run_checked(__file__, tmp_path, monkeypatch, "-m", "not slow")
