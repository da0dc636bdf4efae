"""`./run bench gpu` where there is no GPU, and its arithmetic."""

import pytest
import torch

from benchmarks.gpu import NO_GPU, Weights, main, step_work
from benchmarks.gpu_roofline import (
    AttentionShape,
    Machine,
    Work,
    attention_work,
    copy_work,
    median,
    reached,
    weights_work,
)

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, kv_bytes=2)
MACHINE = Machine(bytes_a_s=100.0, flops_a_s=1000.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("argv", "message"), [([], "finds no GPU"), (["--device", "cuda:1"], "no such GPU")])
def test_without_a_gpu_it_refuses(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By a sentence and a status of its own."""
    assert main(argv) == NO_GPU
    assert message in capsys.readouterr().err


def test_a_decode_reads_its_context_once() -> None:
    """Keys and values of both sequences, a query and an answer each; each pair of vectors is two products."""
    work = attention_work(SHAPE, [(1, 10), (1, 30)], 2)
    assert work == Work(2 * 40 * 2 * 8 * 2 + 2 * 2 * 4 * 8 * 2, 4 * 40 * 4 * 8)


def test_a_chunk_sees_what_stands_before_each_token() -> None:
    """Three tokens at the end of ten see 8, 9 and 10 of them."""
    assert attention_work(SHAPE, [(3, 10)], 2).num_flops == 4 * (8 + 9 + 10) * 4 * 8


def test_weights_are_read_once_whatever_the_tokens() -> None:
    """And multiplied with each."""
    assert weights_work(1000, 7, 2) == Work(2000, 14_000)


def test_a_step_is_its_weights_and_the_attention_of_each_layer() -> None:
    """The head is for one token of each sequence, though its weights are read as a whole."""
    one, three = (step_work(Weights(1000, 100), layers, [(1, 16), (3, 16)]) for layers in (1, 3))
    assert one.num_flops - 2 * 1000 * 4 - 2 * 100 * 2 == (three.num_flops - one.num_flops) / 2
    assert one.num_bytes - 2 * 1100 == (three.num_bytes - one.num_bytes) / 2


@pytest.mark.parametrize(
    ("work", "share", "is_bound_by_memory"),
    [(Work(100, 10), 0.5, True), (Work(10, 1000), 0.5, False), (copy_work(100), 1.0, True)],
)
def test_the_share_is_of_the_longer_of_moving_and_computing(
    work: Work, share: float, is_bound_by_memory: bool
) -> None:
    """A step that takes as long as that has reached the roof."""
    row = reached("x", work, 2.0, MACHINE)
    assert (row.share, row.is_bound_by_memory) == (share, is_bound_by_memory)
    assert (row.bytes_a_s, row.flops_a_s) == (work.num_bytes / 2, work.num_flops / 2)


def test_the_median_is_one_that_was_measured() -> None:
    """Of an even number the lower one."""
    assert (median([3.0, 1.0, 2.0]), median([4.0, 1.0, 3.0, 2.0])) == (2.0, 2.0)
