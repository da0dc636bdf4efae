"""Paged attention equals `attend`: decodes in splits that are joined, and chunks of prompts."""

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.core.kv_layout import LayerKV
from paceline.engine.attention import AttentionRules
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.attention_arguments import takes
from paceline.engine.kernels.triton.paged_attention import StepTables, paged_attention
from tests.engine.kernels.triton.checks import HEADS, LATENT, attention_of, require_attention
from tests.engine.kernels.triton.ragged import CHUNKS, DECODES, FLOAT16, Ragged

WINDOWS = [(None, 0), (1, 0), (7, 4), (100, 0), (300, 20), (1000, 4)]


@pytest.mark.parametrize("sequences", [((1, 3), (1, 300)), ((5, 40), (1, 20))], ids=["decode", "chunk"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (192, 128), (20, 12)])
def test_heads_of_several_sizes(sequences: Sequence[tuple[int, int]], key_dim: int, value_dim: int) -> None:
    """Those that fill whole tiles, and those that do not; keys and values of different sizes."""
    require_attention(LayerKV(2, key_dim, value_dim), sequences, 3)


@pytest.mark.parametrize("sequences", [((1, 3), (1, 300)), ((5, 40), (1, 20))], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", [FLOAT16, "int8", "fp8"])
def test_every_type_of_the_cache(sequences: Sequence[tuple[int, int]], kv_dtype: str) -> None:
    """Codes of 8 bits are taken with their scales out of the block as it lies in the pool."""
    require_attention(LayerKV(2, 32, 20), sequences, 2, kv_dtype)


@pytest.mark.parametrize("sequences", [((1, 3), (1, 300)), ((5, 40), (1, 20))], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_latents(sequences: Sequence[tuple[int, int]], kv_dtype: str) -> None:
    """The compressed pair is key and value in one, and the rotary part only key; each has a scale of its own."""
    require_attention(LayerKV(1, 48, 16, is_latent=True), sequences, 20, kv_dtype)


@pytest.mark.parametrize("sequences", [((1, 280), (1, 520)), ((30, 100), (1, 600))], ids=["decode", "chunk"])
@pytest.mark.parametrize(("window", "num_sink_tokens"), [(7, 4), (300, 0)])
def test_windows(sequences: Sequence[tuple[int, int]], window: int, num_sink_tokens: int) -> None:
    """Blocks that no token sees are not touched: there are none, and what their places hold is no number."""
    layer = LayerKV(1, 16, 16, window=window, num_sink_tokens=num_sink_tokens)
    require_attention(layer, sequences, 2, block_size=8)


@pytest.mark.parametrize("sequences", [((1, 1), (1, 300)), ((5, 40), (1, 1))], ids=["decode", "chunk"])
def test_soft_caps_and_sinks(sequences: Sequence[tuple[int, int]]) -> None:
    """Sinks that are logits take part in the softmax of every row, also beside a single token."""
    require_attention(LayerKV(2, 16, 16), sequences, 2, softcap=2.0, with_sinks=True)


def test_a_decode_is_the_same_bits_in_any_company() -> None:
    """Alone, and in a batch whose longest context has more splits."""
    ragged = Ragged(LayerKV(2, 32, 32), "float32", DECODES)
    query, rules = ragged.query(4), AttentionRules(0.2)
    together = attention_of(ragged, query, rules)
    for part in ragged.queries:
        assert torch.equal(attention_of(ragged, query, rules, [part])[part.first], together[part.first])


def test_a_chunk_is_the_same_bits_wherever_it_is_cut() -> None:
    """A prompt's rows computed together, and in parts, some of which end inside a tile.

    Each begins with a tile: where in one a row is makes a difference to numpy's matrix product, and none to a GPU's.
    """
    ragged = Ragged(LayerKV(1, 16, 16, window=50, num_sink_tokens=3), "float32", ((70, 150),))
    query, rules = ragged.query(2), AttentionRules(0.3, ragged.layer.view)
    together, (whole,) = attention_of(ragged, query, rules), ragged.queries
    for first, last in ((0, 13), (0, 32), (32, 45), (32, 70), (64, 70)):
        part = QueryRange(first, last, whole.start + last, whole.block_tables)
        assert torch.equal(attention_of(ragged, query, rules, [part])[first:last], together[first:last])


@pytest.mark.parametrize("kept", [slice(0, 5), slice(0, 1), slice(1, 3)], ids=["both", "decode", "chunks"])
def test_decodes_and_chunks_of_a_step_share_an_answer(kept: slice) -> None:
    """Each sequence by its kernel, in any order, and steps that have only one kind."""
    ragged = Ragged(LayerKV(2, 16, 12), "float32", ((1, 33), (7, 40), (3, 3), (1, 257), (2, 5)))
    query, rules, parts = ragged.query(4), AttentionRules(0.3), ragged.queries[kept]
    found = paged_attention(query, ragged.views, StepTables.of(parts, 0, "cpu"), rules)
    rows = slice(parts[0].first, parts[-1].last)
    torch.testing.assert_close(found[rows], ragged.plain(query, rules)[rows], atol=2e-5, rtol=2e-5)


def test_what_is_no_number_stays_with_its_sequence() -> None:
    """A broken neighbour changes nothing here, and is not made to look whole."""
    ragged = Ragged(LayerKV(1, 16, 16), "float32", ((1, 40), (1, 300)))
    query, rules = ragged.query(2), AttentionRules(0.25)
    before = attention_of(ragged, query, rules)
    ragged.views.keys[ragged.queries[1].block_tables[0][3]] = float("nan")
    after = attention_of(ragged, query, rules)
    assert torch.equal(after[0], before[0])
    assert after[1].isnan().all()


def test_what_the_kernels_are_not_written_for_is_known() -> None:
    """A pool of another type than the queries, and queries of a type without kernels."""
    ragged = Ragged(LayerKV(1, 16, 16), "float32", ((1, 4),))
    query = ragged.query(1)
    assert takes(query, ragged.views)
    assert not takes(query.half(), ragged.views)
    assert not takes(query.double(), ragged.views)
    quantised = Ragged(LayerKV(1, 16, 16), "int8", ((1, 4),))
    assert takes(query.half(), quantised.views)


# -- the whole grid

LONG = ((1, 1), (1, 2000), (1, 513))
LONG_CHUNKS = ((3, 3), (20, 1000), (1, 77))


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [LONG, LONG_CHUNKS], ids=["decode", "chunk"])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS)
def test_every_size_of_heads_and_groups(
    sequences: Sequence[tuple[int, int]], group: int, key_dim: int, value_dim: int
) -> None:
    """From every head its own keys to sixteen that share them."""
    require_attention(LayerKV(1, key_dim, value_dim), sequences, group)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", ["float32", FLOAT16, "int8", "fp8"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS)
def test_every_type_and_size_of_blocks(
    sequences: Sequence[tuple[int, int]], kv_dtype: str, block_size: int, key_dim: int, value_dim: int
) -> None:
    """As all kinds of models have them."""
    require_attention(LayerKV(1, key_dim, value_dim), sequences, 4, kv_dtype, block_size=block_size)


@pytest.mark.slow
@pytest.mark.parametrize("sequences", [LONG, ((3, 3), (7, 300), (1, 77))], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", ["float32", FLOAT16, "int8", "fp8"])
@pytest.mark.parametrize("group", [1, 16, 40])
def test_latents_as_large_as_real_ones(
    sequences: Sequence[tuple[int, int]], kv_dtype: str, group: int
) -> None:
    """512 + 64, for as many heads as there are."""
    require_attention(LATENT, sequences, group, kv_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sequences", [(*DECODES, *LONG), CHUNKS, LONG_CHUNKS], ids=["decode", "chunk", "long"]
)
@pytest.mark.parametrize(("window", "num_sink_tokens"), WINDOWS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_every_rule_with_every_other(
    sequences: Sequence[tuple[int, int]],
    window: int | None,
    num_sink_tokens: int,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    """All that a layer may ask for."""
    layer = LayerKV(1, 64, 64, window=window, num_sink_tokens=num_sink_tokens)
    require_attention(layer, sequences, 2, softcap=softcap, with_sinks=with_sinks)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_batches(seed: int) -> None:
    """Any of it together."""
    chance = random.Random(seed)
    window, num_sink_tokens = chance.choice(WINDOWS)
    layer = LayerKV(
        chance.choice([1, 2, 3]),
        chance.choice([8, 20, 64, 80]),
        chance.choice([8, 21, 64, 80]),
        window=window,
        num_sink_tokens=num_sink_tokens,
    )
    longest = chance.choice([1, 1, 20])
    sequences = [
        (num, num + chance.randrange(chance.choice([20, 600])))
        for num in (chance.randint(1, longest) for _ in range(chance.randint(1, 5)))
    ]
    require_attention(
        layer,
        sequences,
        chance.choice([1, 2, 3, 5]),
        chance.choice(["float32", FLOAT16, "int8", "fp8"]),
        block_size=chance.choice([8, 16, 32]),
        softcap=chance.choice([None, 20.0]),
        with_sinks=chance.random() < 0.3,
        seed=seed,
    )
