"""What passes between a worker that wants leading blocks of some tokens and one that may have them in its prefix cache."""

from dataclasses import dataclass
from typing import Protocol

from paceline.core.fingerprint import ModelFingerprint
from paceline.core.request import BootEpoch, SequenceId
from paceline.core.ticket import KvTicket


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """Asks for the blocks of `token_ids`, which fill them, on behalf of a sequence and within its cache scope."""

    sequence_id: SequenceId
    cache_scope: str
    token_ids: tuple[int, ...]


class PrefixLender(Protocol):
    """Whoever has a prefix cache and leases."""

    async def lend(
        self, request: PrefixRequest, boot_epoch: BootEpoch, fingerprint: ModelFingerprint
    ) -> KvTicket | None:
        """A complete lease on as many of the blocks as are cached, from the first one on; None if that one is not."""
