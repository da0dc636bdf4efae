"""Takes blocks for a sequence that comes in, and leaves enough for those that grow."""

from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence

from paceline.core.block_hash import BlockHash, salted
from paceline.core.request import Priority
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_prefix import CachedPrefix, find_prefix
from paceline.engine.pressure import Pressure
from paceline.engine.running import Running
from paceline.engine.sequence import Sequence, SequenceRole
from paceline.engine.swap import SwapSpace
from paceline.engine.waiting import RETRY_STEPS, RoomNow

HashBlock = Callable[[BlockHash, AbstractSequence[int]], BlockHash]


class Room:
    """All or nothing: what a sequence needs for its known tokens, or no block."""

    def __init__(
        self,
        pool: BlockPool,
        swap: SwapSpace,
        running: Running,
        pressure: Pressure,
        hash_block: HashBlock,
        max_step_tokens: int,
    ) -> None:
        self._pool = pool
        self._swap = swap
        self._running = running
        self._pressure = pressure
        self._hash_block = hash_block
        self._max_step_tokens = max_step_tokens
        self.num_refused = 0
        self.num_steps = 0
        self._refused_at_step = -1
        # What those that run may grow by, up to a limit, until the next step or until somebody comes in.
        self._growth: dict[int, int] = {}

    def begin_step(self) -> None:
        """Those that run have grown since, and some are gone."""
        self.num_steps += 1
        self._growth = {}

    def take(self, sequence: Sequence, *, from_cushion: bool) -> bool:
        """Reserves blocks, cached ones where there are some, or brings back what was swapped out.

        So much stays free as those that run, and this one, may grow by, up to the cushion; and what families need to part.
        """
        if self._is_hopeless(sequence):
            return False
        if not sequence.spec.bypass_cache:
            self.extend_hashes(sequence)
        spare = self._num_spare(sequence, from_cushion=from_cushion)
        taken = self._restore(sequence, spare) if sequence.saved else self._reserve(sequence, spare)
        if not taken:
            self._refused_at_step = self.num_steps
            self.num_refused += sequence.refused_with is None
            sequence.refused_with, sequence.refused_at_step = self._pool.num_available, self.num_steps
        else:
            self._growth = {}
        return taken

    @property
    def is_short(self) -> bool:
        """Whether somebody was refused in this step."""
        return self._refused_at_step == self.num_steps

    @property
    def _is_wanted(self) -> bool:
        """Whether somebody was refused, and may not have been asked again since."""
        return self._refused_at_step >= 0 and self.num_steps < self._refused_at_step + RETRY_STEPS

    @property
    def now(self) -> RoomNow:
        """What there is in this step."""
        return RoomNow(self.num_steps, self._pool.num_available, self._pool.names)

    @property
    def is_all_free(self) -> bool:
        """Whether nobody holds anything."""
        return self._pool.num_available == self._pool.num_blocks

    def lend(self, sequence: Sequence) -> bool:
        """Holds the longest cached prefix of its full blocks, if there is one; takes no other block.

        What is lent is not available. So much of the rest stays as for a sequence that comes in, and while one waits for room
        nothing is lent.
        """
        # Of a group with a window a reader needs other blocks, depending on what it has computed itself.
        if not self._pool.is_whole or sequence.spec.bypass_cache or self._is_wanted:
            return False
        # Between two steps anything may have changed.
        self._growth = {}
        self.extend_hashes(sequence)
        prefix = find_prefix(self._pool, sequence.chain, len(sequence.block_hashes))
        sequence.num_computed_tokens = sequence.num_cached_tokens = prefix.num_blocks * self._pool.block_size
        return prefix.num_blocks > 0 and sequence.blocks.reserve(
            prefix,
            sequence.num_computed_tokens,
            self._max_step_tokens,
            is_filled_outside=False,
            spare=self._num_spare(sequence, from_cushion=False),
        )

    def extend_hashes(self, sequence: Sequence) -> None:
        """Names the blocks that have become full."""
        size, hashes, token_ids = self._pool.block_size, sequence.block_hashes, sequence.token_ids
        end = (len(hashes) + 1) * size
        while end <= len(token_ids):
            start, last = end - size, hashes[-1] if hashes else sequence.root
            parent = salted(last, sequence.spec.cache_scope, start, end)
            hashes.append(self._hash_block(parent, token_ids[start:end]))
            end += size

    def _reserve(self, sequence: Sequence, spare: int) -> bool:
        prefix = self._cached_prefix(sequence)
        sequence.num_prefix_blocks = prefix.num_blocks
        is_filled_outside = sequence.role is SequenceRole.AWAIT_KV
        if not sequence.blocks.reserve(
            prefix,
            sequence.num_tokens,
            self._max_step_tokens,
            is_filled_outside=is_filled_outside,
            spare=spare,
        ):
            return False
        sequence.num_computed_tokens = prefix.num_blocks * self._pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _restore(self, sequence: Sequence, spare: int) -> bool:
        """Its KV comes from host memory, except for what has stayed cached; the last token is still to be computed."""
        num_computed = sequence.num_tokens - 1
        prefix = find_prefix(
            self._pool, sequence.chain, num_computed // self._pool.block_size, next_position=num_computed
        )
        # For the token that comes next, each group may need one more.
        if not sequence.blocks.reserve(
            prefix,
            num_computed,
            self._max_step_tokens,
            is_filled_outside=True,
            spare=spare + len(self._pool.groups),
        ):
            return False
        for saved in sequence.saved:
            block_id = sequence.blocks.block_at(saved.group, saved.ordinal)
            if block_id is not None and saved.ordinal >= prefix.num_blocks:
                self._swap.restore(saved, block_id)
        self._swap.drop(sequence.saved)
        sequence.num_computed_tokens = num_computed
        return True

    def _cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        # A cached token has no logits, and so does not tell how probable the next one was.
        if sequence.owes_prompt_logprobs:
            return find_prefix(self._pool, sequence.chain, max_blocks=0)
        # A token is sampled from its predecessor's output, so that one is computed even if it is cached;
        # unless the sampling has happened elsewhere.
        is_elsewhere = sequence.role is SequenceRole.AWAIT_KV
        max_blocks = (sequence.num_tokens - (0 if is_elsewhere else 1)) // self._pool.block_size
        next_position = sequence.num_tokens if is_elsewhere else None
        return find_prefix(self._pool, sequence.chain, max_blocks, next_position)

    def _num_spare(self, newcomer: Sequence, *, from_cushion: bool) -> int:
        # Alone it takes its room whether or not there is enough for growing and parting: there will never be more.
        if not self._running:
            return 0
        a_block_each = self._running.num_computing * len(self._pool.groups)
        cushion = 0 if from_cushion else int(self._pressure.watermark * self._pool.num_blocks)
        limit = max(a_block_each, cushion)
        if limit not in self._growth:
            self._growth[limit] = self._running.growth(limit)
        growth = min(limit, newcomer.num_to_grow + self._growth[limit])
        return growth + sum(map(_num_to_part, (newcomer, *self._running.prefilling, *self._running.parked)))

    def _is_hopeless(self, sequence: Sequence) -> bool:
        """Whether nothing has come free since it was refused, and no more of its prefix is here than then."""
        if sequence.refused_with is None or not self._running:
            return False
        # What is kept free for others may have become less since.
        if self.num_steps >= sequence.refused_at_step + RETRY_STEPS:
            return False
        is_longer = sequence.awaited_hash in self._pool.names
        return self._pool.num_available <= sequence.refused_with and not is_longer


def may_use_cushion(sequence: Sequence, *, is_fast: bool) -> bool:
    """Whether what is kept free for growth may be taken by this one, which is urgent, or small."""
    return is_fast or sequence.spec.priority is Priority.REALTIME


def _num_to_part(sequence: Sequence) -> int:
    """Blocks that its candidates need beside the first one's, once they become sequences of their own."""
    return (sequence.num_seats - 1) * sequence.blocks.num_needed_to_fork(sequence.num_tokens)
