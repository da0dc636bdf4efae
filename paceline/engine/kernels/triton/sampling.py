"""Chooses the next token of each row by its own temperature, top_k, top_p and min_p: the same tokens as `sample` of sampler.py.

Nothing is sorted. What the filters leave is the beginning of one order, by logit and then by token id; so a row is described by the logit at
which the order is cut, and how many tokens of just that logit still belong to it. That logit is searched for among all there are, as a number
of eight digits of base 16, one digit in each pass over the row.

Chance comes from outside, as one number a row: a function of seed, position and candidate. Weights and sums are in double precision, as the
sampler's are. No row looks at another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.engine.device import Device
from paceline.engine.kernels.triton.launch import Launch
from paceline.engine.sampler import uniform
from paceline.engine.step import SampleTask

_TILE = 512


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What decides the choice of each row beside its logits, each [num_rows], float64 but for top_k, int32."""

    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor
    numbers: Tensor  # [0, 1)

    @classmethod
    def of(
        cls, tasks: Sequence[SampleTask], positions: Sequence[int], device: torch.device | str
    ) -> "SamplingRows":
        """Known before the logits are; what a task changes about those is not its matter (see `penalised`)."""
        params = [task.params for task in tasks]
        numbers = [
            uniform(task.params.seed, position, task.candidate)
            for task, position in zip(tasks, positions, strict=True)
        ]

        columns = (
            [each.temperature for each in params],
            [each.top_k for each in params],
            [each.top_p for each in params],
            [each.min_p for each in params],
            numbers,
        )
        # By one copy: whole numbers of this size are the same in float64.
        bits = torch.tensor(columns, dtype=torch.float64).view(torch.int64)
        (there,) = Device(torch.device(device)).upload((bits,))
        temperatures, top_ks, top_ps, min_ps, drawn = there.view(torch.float64)
        return cls(temperatures, top_ks.int(), top_ps, min_ps, drawn)


def choose_tokens(logits: Tensor, tasks: Sequence[SampleTask], positions: Sequence[int]) -> Tensor:
    """See `choose_tokens` in sampler.py."""
    return sample_tokens(logits, SamplingRows.of(tasks, positions, logits.device))


def sample_tokens(logits: Tensor, rows: SamplingRows) -> Tensor:
    """[num_rows], int64; `logits` [num_rows, vocab_size], float32, with bans, bias and penalties in them."""
    chosen, launch = plan_sampling(logits, rows)
    launch.run()
    return chosen


def plan_sampling(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Launch]:
    """Where the answer will be, and the call that writes it there: a program for each row."""
    assert logits.dtype == torch.float32 and logits.stride(1) == 1
    chosen = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    arguments = {
        "chosen": chosen,
        "logits": logits,
        "temperatures": rows.temperatures,
        "top_ks": rows.top_ks,
        "top_ps": rows.top_ps,
        "min_ps": rows.min_ps,
        "numbers": rows.numbers,
        "row_stride": logits.stride(0),
        "vocab_size": logits.shape[1],
        "tile": _TILE,
    }
    return chosen, Launch(sample_row, (len(logits),), arguments, num_warps=8)


@triton.jit
def _load(logits, start, vocab_size, tile: tl.constexpr):
    """Token ids and their logits; those behind the last token have none."""
    ids = start + tl.arange(0, tile)
    return ids, tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))


@triton.jit
def _keys(ids, values, vocab_size):
    """Whole numbers from 0 to 2**32 in the order of the logits; -1 behind the last token."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # there are two zeros
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(ids < vocab_size, ordered.to(tl.int64) + 2147483648, -1)


@triton.jit
def _weights(values, best, temperature):
    """Probabilities but for a factor: that of the best token is 1."""
    return tl.exp(values.to(tl.float64) / temperature - best.to(tl.float64) / temperature)


@triton.jit
def _best(logits, vocab_size, tile: tl.constexpr):
    """The highest logit and its token, of several the first."""
    best = tl.full([], float("-inf"), tl.float32)
    best_id = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, tile):
        ids, values = _load(logits, start, vocab_size, tile)
        highest = tl.max(values, 0)
        first = tl.min(tl.where(values == highest, ids, vocab_size), 0)
        best_id = tl.where(highest > best, first, best_id)
        best = tl.maximum(best, highest)
    return best, best_id


@triton.jit
def _find_cut(logits, vocab_size, best, temperature, goal, by_weight: tl.constexpr, tile: tl.constexpr):
    """The highest key of which the tokens from there up reach `goal`, by number or by weight."""
    cut = tl.full([], 0, tl.int64)
    for digit in range(8):
        place = 28 - 4 * digit
        candidates = cut + (tl.arange(0, 16).to(tl.int64) << place)
        reached = tl.zeros([16], tl.float64)
        for start in range(0, vocab_size, tile):
            ids, values = _load(logits, start, vocab_size, tile)
            counted = tl.full([tile], 1.0, tl.float64)
            if by_weight:
                counted = _weights(values, best, temperature)
            is_above = _keys(ids, values, vocab_size)[:, None] >= candidates[None, :]
            reached += tl.sum(tl.where(is_above, counted[:, None], 0.0), 0)
        num_reached = tl.sum((reached >= goal).to(tl.int64), 0)
        cut += tl.maximum(num_reached - 1, 0) << place
    return cut


@triton.jit
def _look_at(logits, vocab_size, best, temperature, cut, tile: tl.constexpr):
    """How many tokens are above the cut, their weight, and that of one at it."""
    num_above = tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float64)
    one = tl.full([], 0.0, tl.float64)
    for start in range(0, vocab_size, tile):
        ids, values = _load(logits, start, vocab_size, tile)
        keys, weights = _keys(ids, values, vocab_size), _weights(values, best, temperature)
        num_above += tl.sum((keys > cut).to(tl.int32), 0)
        above += tl.sum(tl.where(keys > cut, weights, 0.0), 0)
        one = tl.maximum(one, tl.max(tl.where(keys == cut, weights, 0.0), 0))
    return num_above, above, one


@triton.jit
def _kept(
    logits, start, vocab_size, best, temperature, cut, num_at_cut, min_p, num_before, tile: tl.constexpr
):
    """The weights of a tile's tokens, 0 of those that are left out; their ids; and how many are at the cut up to here."""
    ids, values = _load(logits, start, vocab_size, tile)
    keys, weights = _keys(ids, values, vocab_size), _weights(values, best, temperature)
    is_at_cut = (keys == cut).to(tl.int32)
    number = num_before + tl.cumsum(is_at_cut, 0)  # from 1, in the order of ids
    is_kept = (keys > cut) | ((keys == cut) & (number <= num_at_cut))
    return ids, tl.where(is_kept & (weights >= min_p), weights, 0.0), num_before + tl.sum(is_at_cut, 0)


@triton.jit
def sample_row(
    chosen,
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    numbers,
    row_stride,
    vocab_size,
    tile: tl.constexpr,
):
    """One row: the token at which the cumulated weight, by token id, passes the row's number."""
    row = tl.program_id(0).to(tl.int64)
    logits = logits + row * row_stride
    best, best_id = _best(logits, vocab_size, tile)
    temperature = tl.load(temperatures + row)
    if temperature == 0:
        tl.store(chosen + row, best_id.to(tl.int64))
        return
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    cut = tl.full([], 0, tl.int64)
    num_at_cut = vocab_size
    if (top_k > 0) & (top_k < vocab_size):
        cut = _find_cut(logits, vocab_size, best, temperature, top_k.to(tl.float64), False, tile)
        num_above, _, _ = _look_at(logits, vocab_size, best, temperature, cut, tile)
        num_at_cut = top_k - num_above
    if top_p < 1:
        _, above, one = _look_at(logits, vocab_size, best, temperature, cut, tile)
        goal = top_p * (above + one * num_at_cut)
        closer = _find_cut(logits, vocab_size, best, temperature, goal, True, tile)
        _, above, one = _look_at(logits, vocab_size, best, temperature, closer, tile)
        needed = tl.ceil((goal - above) / one)
        # A cut that is not closer is the same one: there the fewer count.
        num_at_cut = tl.where(closer > cut, vocab_size, num_at_cut)
        num_at_cut = tl.minimum(tl.maximum(needed, 1.0).to(tl.int32), num_at_cut)
        cut = tl.maximum(cut, closer)

    total = tl.full([], 0.0, tl.float64)
    num_before = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, tile):
        _, weights, num_before = _kept(
            logits, start, vocab_size, best, temperature, cut, num_at_cut, min_p, num_before, tile
        )
        total += tl.sum(weights, 0)
    threshold = tl.load(numbers + row) * total

    token = vocab_size
    last = best_id
    passed = tl.full([], 0.0, tl.float64)
    num_before = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, tile):
        ids, weights, num_before = _kept(
            logits, start, vocab_size, best, temperature, cut, num_at_cut, min_p, num_before, tile
        )
        is_past = (passed + tl.cumsum(weights, 0) > threshold) & (weights > 0)
        token = tl.minimum(token, tl.min(tl.where(is_past, ids, vocab_size), 0))
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), 0))
        passed += tl.sum(weights, 0)
    tl.store(chosen + row, tl.where(token < vocab_size, token, last).to(tl.int64))
