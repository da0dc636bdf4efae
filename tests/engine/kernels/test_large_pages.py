"""Copies in large pages are what was copied, each in a place of its own."""

import torch

from paceline.engine.kernels.cpu.large_pages import LargePages


def test_what_is_kept_is_the_same_and_stays_so() -> None:
    """Of any type and shape, more than fits into one piece; nobody writes into what is another's."""
    pages, torch_types = LargePages(), (torch.uint8, torch.float32, torch.bfloat16)
    given = [
        torch.randn(*shape).to(dtype)
        for dtype in torch_types
        for shape in ((1,), (7, 3), (5, 5, 5), (1000, 999), (4096, 4097), (0, 4))
    ]
    kept = [pages.keep(each.clone()) for each in given]
    for before, after in zip(given, kept, strict=True):
        assert torch.equal(before, after)
        assert after.is_contiguous()
        assert not after.numel() or after.data_ptr() % 64 == 0


def test_what_is_kept_outlives_its_keeper() -> None:
    """Tensors hold the memory that they are in."""
    kept = LargePages().keep(torch.arange(1000))
    LargePages().keep(torch.zeros(1000))
    assert torch.equal(kept, torch.arange(1000))
