"""The longest sequence fits into a message, whatever else is asked for with it."""

import pytest

from paceline.core.block_hash import BlockHash
from paceline.core.request import SamplingParams
from paceline.runtime.wire_internal import prefix_hint_to_proto, spec_to_proto, ticket_to_proto
from paceline.runtime.wire_limits import max_sequence_tokens
from paceline.v1 import decode_pb2, engine_pb2, prefill_pb2
from tests.factories import make_spec, make_ticket

MAX_MESSAGE_BYTES = 4 << 20


def _messages(num_tokens: int, vocab_size: int, block_size: int) -> list[int]:
    """How long the messages about a sequence are that has so many tokens, all of them the longest ones to write."""
    last = vocab_size - 1
    spec = make_spec(
        "r" * 256,
        (last,) * num_tokens,
        max_tokens=2**31 - 1,
        sampling=SamplingParams(0.5, seed=2**64 - 1, logit_bias=tuple((last, -99.5) for _ in range(1024))),
        stop_token_ids=(last,) * 16,
        candidates=tuple(range(16)),
        cache_scope="s" * 256,
        tenant="t" * 256,
        time_budget_s=0.5,
    )
    num_blocks = num_tokens // block_size
    ticket = make_ticket("l" * 64, owner_address="a" * 1024, num_full_blocks=0, num_blocks=num_blocks)
    proto: engine_pb2.KvTicket = ticket_to_proto(ticket)
    proto.block_hashes.extend([bytes(BlockHash(b"\xff" * 16))] * num_blocks)
    context, sequence = spec_to_proto(spec)
    prefill = prefill_pb2.PrefillRequest(
        context=context, sequence=sequence, prefix_hint=prefix_hint_to_proto(None)
    )
    submit = decode_pb2.Submit(context=context, sequence=sequence, ticket=proto)
    started = prefill_pb2.PrefillResponse(started=prefill_pb2.PrefillStarted(ticket=proto))
    request = decode_pb2.DecodeRequest(submit=submit)
    return [prefill.ByteSize(), request.ByteSize(), started.ByteSize()]


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("vocab_size", [100, 32_000, 262_144])
def test_a_sequence_of_the_longest_kind_fits_into_each_message(vocab_size: int, block_size: int) -> None:
    """With the tenth part of it more it would not: so no model is cut short for nothing."""
    most = max_sequence_tokens(vocab_size, block_size)
    assert max(_messages(most, vocab_size, block_size)) <= MAX_MESSAGE_BYTES
    assert max(_messages(most * 11 // 10, vocab_size, block_size)) > MAX_MESSAGE_BYTES


def test_a_million_tokens_are_nearly_as_many_as_fit() -> None:
    """Of a usual vocabulary, in blocks of the usual size."""
    assert 900_000 < max_sequence_tokens(128_256, 16) < 1_100_000
