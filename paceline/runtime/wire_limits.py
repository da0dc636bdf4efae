"""How long a sequence may be so that every message about it stays within what gRPC takes. That limit is nowhere raised between us."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 4 << 20
# What comes with the tokens: biases, stops, names, a fingerprint.
_REST_BYTES: Final = 64 << 10
# A digest of 16 bytes, and two that say so.
_HASH_BYTES: Final = 18


def max_sequence_tokens(vocab_size: int, block_size: int) -> int:
    """Tokens of prompt and output together; with them go the hashes of their blocks, in a hand-over."""
    id_bytes = max(1, -(-(vocab_size - 1).bit_length() // 7))
    bytes_a_block = id_bytes * block_size + _HASH_BYTES
    return (MAX_MESSAGE_BYTES - _REST_BYTES) * block_size // bytes_a_block
