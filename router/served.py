"""What the workers of a cluster serve together."""

from collections.abc import Collection
from dataclasses import dataclass

from paceline.core.fingerprint import ModelFingerprint
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.runtime.wire_limits import max_sequence_tokens
from paceline.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What all known workers serve, and the lengths that the smallest of them allows, and messages between them."""

    model_id: str
    fingerprint: ModelFingerprint
    vocab_size: int
    max_model_tokens: int


def served_by(infos: Collection[worker_pb2.GetInfoResponse]) -> ServedModel | None:
    """None for nobody. All of them serve the same content."""
    if not infos:
        return None
    first, *_ = infos
    block_size = min(info.fingerprint.block_size for info in infos)
    return ServedModel(
        model_id=first.model_id,
        fingerprint=fingerprint_from_proto(first.fingerprint),
        vocab_size=first.vocab_size,
        max_model_tokens=min(
            max_sequence_tokens(first.vocab_size, block_size), *(info.max_model_tokens for info in infos)
        ),
    )
