"""Whole blocks out of a pool into one run of memory, and back: what a hand-over or a swap moves over the bus in one piece."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.kernels.triton.launch import Launch

# The widest first: a block is copied in the largest words that it consists of.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_WORDS_A_PROGRAM = 1024


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """[num_ids, block_bytes], of the pool [num_blocks, block_bytes] in bytes."""
    out = pool.new_empty((len(block_ids), pool.shape[1]))
    plan_gather(pool, block_ids, out).run()
    return out


def scatter_blocks(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> None:
    """Writes [num_ids, block_bytes] to the blocks of these ids, no id twice."""
    plan_scatter(pool, block_ids, blocks).run()


def plan_gather(pool: Tensor, block_ids: Tensor, out: Tensor) -> Launch:
    """The call that does it."""
    return _plan(gather_words, pool, block_ids, out)


def plan_scatter(pool: Tensor, block_ids: Tensor, blocks: Tensor) -> Launch:
    """The call that does it."""
    return _plan(scatter_words, pool, block_ids, blocks)


def _plan(kernel: object, pool: Tensor, block_ids: Tensor, packed: Tensor) -> Launch:
    assert packed.is_contiguous() and packed.shape == (len(block_ids), pool.shape[1])
    word = next(word for word in _WORDS if pool.shape[1] % word.itemsize == 0)
    num_words = pool.shape[1] // word.itemsize
    arguments = {
        "pool": pool.view(word),
        "packed": packed.view(word),
        "block_ids": block_ids,
        "num_words": num_words,
        "words_a_program": _WORDS_A_PROGRAM,
    }
    return Launch(kernel, (len(block_ids), -(-num_words // _WORDS_A_PROGRAM)), arguments)


@triton.jit
def _places(pool, packed, block_ids, num_words, words_a_program: tl.constexpr):
    """Where this program's words are in the pool and in the run, and which of them there are."""
    ordinal = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * words_a_program + tl.arange(0, words_a_program)
    block_id = tl.load(block_ids + ordinal)
    return pool + block_id * num_words + words, packed + ordinal * num_words + words, words < num_words


@triton.jit
def gather_words(pool, packed, block_ids, num_words, words_a_program: tl.constexpr):
    """A part of one block."""
    in_pool, in_run, is_there = _places(pool, packed, block_ids, num_words, words_a_program)
    tl.store(in_run, tl.load(in_pool, mask=is_there), mask=is_there)


@triton.jit
def scatter_words(pool, packed, block_ids, num_words, words_a_program: tl.constexpr):
    """A part of one block."""
    in_pool, in_run, is_there = _places(pool, packed, block_ids, num_words, words_a_program)
    tl.store(in_pool, tl.load(in_run, mask=is_there), mask=is_there)
