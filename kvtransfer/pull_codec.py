"""The messages of a pull as bytes on the wire. What they say is kv_transfer.proto; blocks are not copied on the way to it and back.

A block through protobuf's own classes is copied some five times, each time into memory that is touched for the first time. Here it is
copied once into the message, and the receiver looks at it where gRPC has put it.
"""

from google.protobuf.message import DecodeError

from kvtransfer.chunks import ChunkMessage, KvChunk, PullEnd, ReferenceMessage
from kvtransfer.wire import message_from_proto, message_to_proto, reference_message_from_proto
from paceline.core.errors import KvLostError
from paceline.v1 import kv_transfer_pb2

_SERVICE = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"]
_Parts = list[bytes | memoryview]
PULL_METHOD = f"/{_SERVICE.full_name}/Pull"
# Keys of fields: the number and the wire type, see https://protobuf.dev/programming-guides/encoding.
_CHUNK, _CHUNKS, _CHUNK_OF_CHUNKS = 1 << 3 | 2, 4 << 3 | 2, 1 << 3 | 2
_ORDINAL, _OFFSET, _DATA, _CHECKSUM = 1 << 3 | 0, 2 << 3 | 0, 3 << 3 | 2, 4 << 3 | 1


def encode(message: ChunkMessage | ReferenceMessage) -> bytes:
    """A PullResponse. The one copy of a chunk's data is made here."""
    if isinstance(message, PullEnd) or not isinstance(message[0], KvChunk):
        return message_to_proto(message).SerializeToString()
    encoded = [_encoded(chunk) for chunk in message]
    if len(encoded) == 1:
        return b"".join(_prefixed(_CHUNK, encoded[0]))
    chunks = [part for parts in encoded for part in _prefixed(_CHUNK_OF_CHUNKS, parts)]
    return b"".join(_prefixed(_CHUNKS, chunks))


def _encoded(chunk: KvChunk) -> _Parts:
    fields = kv_transfer_pb2.KvChunk(ordinal=chunk.ordinal, offset=chunk.offset, checksum=chunk.checksum)
    return [fields.SerializeToString(), *_prefixed(_DATA, [chunk.data])]


def _prefixed(key: int, parts: _Parts) -> _Parts:
    """A field that holds them."""
    return [bytes([key]) + _varint(sum(map(len, parts))), *parts]


def decode(raw: bytes) -> ChunkMessage:
    """What a PullResponse of a pull of bytes says; a chunk's data is a view of `raw`. Raises KvLostError for what it is not."""
    try:
        chunks = _decode_chunks(memoryview(raw))
    except IndexError:
        raise KvLostError("a message of the pull ends too early") from None
    # Whatever else it may be, protobuf knows.
    return chunks or message_from_proto(_parsed(raw))


def decode_references(raw: bytes) -> ReferenceMessage:
    """What a PullResponse of a pull by reference says; raises KvLostError for what it is not."""
    return reference_message_from_proto(_parsed(raw))


def _parsed(raw: bytes) -> kv_transfer_pb2.PullResponse:
    try:
        return kv_transfer_pb2.PullResponse.FromString(raw)
    except DecodeError:
        raise KvLostError("a message of the pull is none") from None


def _decode_chunks(raw: memoryview) -> tuple[KvChunk, ...] | None:
    """None for a message that has no chunks, or anything beside them and the fields that we know."""
    if not raw or raw[0] not in {_CHUNK, _CHUNKS}:
        return None
    num_bytes, at = _read_varint(raw, 1)
    if at + num_bytes != len(raw):
        return None
    if raw[0] == _CHUNK:
        chunk = _decode_chunk(raw[at:])
        return None if chunk is None else (chunk,)
    chunks: list[KvChunk] = []
    while at < len(raw):
        num_bytes, start = _read_varint(raw, at + 1)
        at, key = start + num_bytes, raw[at]
        chunk = _decode_chunk(raw[start:at]) if key == _CHUNK_OF_CHUNKS and at <= len(raw) else None
        if chunk is None:
            return None
        chunks.append(chunk)
    return tuple(chunks)


def _decode_chunk(raw: memoryview) -> KvChunk | None:
    """None for one with fields that we do not know."""
    at, data = 0, raw[:0]
    found: dict[int, int] = {}
    while at < len(raw):
        key, at = raw[at], at + 1
        if key in {_ORDINAL, _OFFSET}:
            found[key], at = _read_varint(raw, at)
        elif key == _CHECKSUM:
            found[key], at = int.from_bytes(raw[at : at + 8], "little"), at + 8
        elif key == _DATA:
            num_bytes, at = _read_varint(raw, at)
            data, at = raw[at : at + num_bytes], at + num_bytes
        else:
            return None
    if at != len(raw):
        raise IndexError
    return KvChunk(found.get(_ORDINAL, 0), found.get(_OFFSET, 0), data, found.get(_CHECKSUM, 0))


def _varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _read_varint(raw: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where the next thing begins."""
    number = shift = 0
    while raw[at] & 0x80:
        number |= (raw[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return number | raw[at] << shift, at + 1
