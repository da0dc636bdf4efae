"""The same checks on a GPU, where the machine has one: there bfloat16 is computed too. In the interpreter see `interpreted`."""

from collections.abc import Sequence

import pytest
import torch

from paceline.core.kv_layout import LayerKV
from paceline.engine.attention import AttentionRules
from paceline.engine.forward_batch import QueryRange
from paceline.engine.kernels.triton.block_copies import gather_blocks, scatter_blocks
from tests.engine.kernels.triton.checks import (
    HEADS,
    KINDS_OF_ROWS,
    LATENT,
    TOLERANCE,
    attention_of,
    require_attention,
    require_stored,
    require_tokens,
    vectors,
)
from tests.engine.kernels.triton.ragged import CHUNKS, DECODES, Ragged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

DEVICE = "cuda"
LONG = ((1, 1), (1, 2000), (1, 513))


@pytest.mark.parametrize("sequences", [(*DECODES, *LONG), CHUNKS], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", [*TOLERANCE])
@pytest.mark.parametrize(("key_dim", "value_dim"), HEADS)
def test_attention_equals_the_plain_form(
    sequences: Sequence[tuple[int, int]], kv_dtype: str, key_dim: int, value_dim: int
) -> None:
    """Every size of heads over every type of cache."""
    require_attention(LayerKV(2, key_dim, value_dim), sequences, 4, kv_dtype, device=DEVICE)


@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_attention_over_latents_equals_the_plain_form(
    sequences: Sequence[tuple[int, int]], kv_dtype: str
) -> None:
    """With as many heads as DeepSeek has."""
    require_attention(LATENT, sequences, 128, kv_dtype, device=DEVICE)


@pytest.mark.parametrize("sequences", [DECODES, CHUNKS], ids=["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_every_rule_at_once_equals_the_plain_form(
    sequences: Sequence[tuple[int, int]], kv_dtype: str
) -> None:
    """A window with sink tokens, a soft cap, and sinks that are logits."""
    layer = LayerKV(2, 64, 64, window=100, num_sink_tokens=4)
    require_attention(layer, sequences, 3, kv_dtype, softcap=20.0, with_sinks=True, device=DEVICE)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_rows_are_the_same_bits_in_any_company(kv_dtype: str) -> None:
    """Decodes alone and in a batch; chunks wherever they are cut."""
    decodes, chunk = (Ragged(LayerKV(2, 64, 64), kv_dtype, each) for each in (DECODES, ((90, 150),)))
    rules = AttentionRules(0.125)
    query = decodes.query(6)
    together = attention_of(decodes, query, rules, device=DEVICE)
    for part in decodes.queries:
        alone = attention_of(decodes, query, rules, [part], DEVICE)
        assert torch.equal(alone[part.first], together[part.first])
    query, (whole,) = chunk.query(6), chunk.queries
    together = attention_of(chunk, query, rules, device=DEVICE)
    for first, last in ((0, 33), (33, 36), (36, 90)):
        part = QueryRange(first, last, whole.start + last, whole.block_tables)
        assert torch.equal(
            attention_of(chunk, query, rules, [part], DEVICE)[first:last], together[first:last]
        )


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "fp8"])
def test_what_is_stored_is_what_the_cache_stores(kv_dtype: str) -> None:
    """Bit for bit."""
    torch.manual_seed(1)
    keys, values = vectors(40, 3, 128, 8.0).bfloat16(), vectors(40, 3, 21).bfloat16()
    require_stored(LayerKV(3, 128, 21), kv_dtype, keys, values, DEVICE)


@pytest.mark.parametrize("vocab_size", [1300, 128_256])
def test_every_kind_of_row_gets_the_sampler_s_token(vocab_size: int) -> None:
    """The same token for the same seed, on whatever it is computed."""
    torch.manual_seed(vocab_size)
    require_tokens(torch.randn(20 * len(KINDS_OF_ROWS), vocab_size) * 3, device=DEVICE)


def test_blocks_are_the_same_bytes_in_another_pool() -> None:
    """Out of one, into the other."""
    source, target = (torch.randint(0, 256, (9, 9000), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    ids, elsewhere = (torch.tensor(each, device=DEVICE) for each in ([7, 0, 3], [1, 8, 2]))
    scatter_blocks(target, elsewhere, gather_blocks(source, ids))
    assert torch.equal(target[elsewhere], source[ids])
