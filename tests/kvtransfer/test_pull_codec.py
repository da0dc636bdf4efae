"""Our bytes for a pull's messages and protobuf's are the same messages."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.chunks import KvChunk, KvReference, PullEnd
from kvtransfer.pull_codec import decode, decode_references, encode
from kvtransfer.wire import message_from_proto
from paceline.core.errors import KvLostError
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken
from paceline.v1 import kv_transfer_pb2

CHUNKS = st.builds(
    KvChunk,
    ordinal=st.integers(0, 2**32 - 1),
    offset=st.integers(0, 2**32 - 1),
    data=st.binary(max_size=300) | st.just(bytes(70_000)),
    checksum=st.integers(0, 2**64 - 1),
)
MESSAGES = st.lists(CHUNKS, min_size=1, max_size=4).map(tuple)


def _by_protobuf(chunks: Sequence[KvChunk]) -> kv_transfer_pb2.PullResponse:
    """As the generated classes write it."""
    messages = [
        kv_transfer_pb2.KvChunk(
            ordinal=chunk.ordinal, offset=chunk.offset, data=bytes(chunk.data), checksum=chunk.checksum
        )
        for chunk in chunks
    ]
    if len(messages) == 1:
        return kv_transfer_pb2.PullResponse(chunk=messages[0])
    return kv_transfer_pb2.PullResponse(chunks=kv_transfer_pb2.KvChunks(chunks=messages))


@given(MESSAGES)
def test_protobuf_reads_what_we_write(chunks: tuple[KvChunk, ...]) -> None:
    """Whoever uses the generated classes gets the same chunks."""
    response = kv_transfer_pb2.PullResponse.FromString(encode(chunks))
    assert response == _by_protobuf(chunks)
    assert message_from_proto(response) == chunks


@given(MESSAGES)
def test_we_read_what_protobuf_writes(chunks: tuple[KvChunk, ...]) -> None:
    """Whoever uses the generated classes can send to us."""
    assert decode(_by_protobuf(chunks).SerializeToString()) == chunks
    assert decode(encode(chunks)) == chunks


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_a_chunk_is_not_copied_when_it_is_read(num_chunks: int) -> None:
    """Its data is a part of the message."""
    raw = encode((KvChunk(1, 2, b"abc" * 1000, 3),) * num_chunks)
    chunks = decode(raw)
    assert isinstance(chunks, tuple)
    for chunk in chunks:
        assert isinstance(chunk.data, memoryview)
        assert chunk.data.obj is raw


def test_the_other_messages_pass_too() -> None:
    """The end of either pull, and references."""
    end = PullEnd((FirstToken(7), FirstToken(8, candidate=2)))
    references = (KvReference(0, BlockId(9), 2**64 - 1), KvReference(1, BlockId(3), 0))
    assert decode(encode(end)) == decode_references(encode(end)) == end
    assert decode_references(encode(references)) == references


def test_a_message_of_the_other_pull_is_refused() -> None:
    """Who asked for bytes wants no references, and the other way round."""
    with pytest.raises(KvLostError):
        decode(encode((KvReference(0, BlockId(9), 1),)))
    for num_chunks in (1, 2):
        with pytest.raises(KvLostError):
            decode_references(encode((KvChunk(0, 0, b"x", 1),) * num_chunks))


def test_unknown_fields_are_left_to_protobuf() -> None:
    """A later version may say more of a chunk, or beside it."""
    known, later = KvChunk(5, 0, b"xyz", 0), bytes([15 << 3, 1])
    inner = kv_transfer_pb2.KvChunk(ordinal=5, data=b"xyz").SerializeToString() + later
    raw = bytes([1 << 3 | 2, len(inner)]) + inner
    assert decode(raw) == decode(raw + later) == (known,)
    both = raw + raw
    chunks = bytes([4 << 3 | 2, len(both)]) + both
    assert decode(chunks) == decode(chunks + later) == (known, known)


@given(st.binary(max_size=40) | MESSAGES.map(lambda chunks: encode(chunks)[:-1]))
def test_rubbish_is_kv_lost(raw: bytes) -> None:
    """Whatever comes is a message or KV_LOST."""
    try:
        found = decode(raw)
    except KvLostError:
        return
    assert isinstance(found, tuple | PullEnd)
