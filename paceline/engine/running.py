"""Who has blocks and is under way: sequences that compute their known tokens, that decode, or whose KV comes from outside."""

from collections.abc import Iterator

from paceline.engine.sequence import Sequence


class Running:
    """Each is in one of three sets, in the order in which it came into it."""

    def __init__(self) -> None:
        self.prefilling: dict[Sequence, None] = {}
        # One candidate each, one token from the next one.
        self.decoding: dict[Sequence, None] = {}
        self.parked: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.decoding
        yield from self.prefilling
        yield from self.parked

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.decoding or sequence in self.prefilling or sequence in self.parked

    def __bool__(self) -> bool:
        return bool(self.decoding or self.prefilling or self.parked)

    @property
    def is_computing(self) -> bool:
        """Whether anybody does more than wait for KV."""
        return bool(self.decoding or self.prefilling)

    @property
    def num_seats(self) -> int:
        """Sequences that they are, or will be once candidates part."""
        others = sum(sequence.num_seats for sequence in (*self.prefilling, *self.parked))
        return len(self.decoding) + others

    @property
    def num_computing(self) -> int:
        """The same without those that wait for KV."""
        return len(self.decoding) + sum(sequence.num_seats for sequence in self.prefilling)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that they have to compute before the next output of each."""
        return len(self.decoding) + sum(sequence.num_uncomputed_tokens for sequence in self.prefilling)

    def remove(self, sequence: Sequence) -> None:
        """Forgets one, if it is here."""
        for each in (self.decoding, self.prefilling, self.parked):
            each.pop(sequence, None)

    def growth(self, limit: int) -> int:
        """Blocks that all of them may yet ask for until their longest ends; counted no further than `limit`."""
        num_blocks = 0
        for sequence in self:
            if num_blocks >= limit:
                return limit
            num_blocks += sequence.num_to_grow
        return min(num_blocks, limit)
