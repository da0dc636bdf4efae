"""Decides who runs in each step: a sequence is scheduled until `num_computed_tokens` reaches `num_tokens`.

Prefill chunks, decode steps, recompute after preemption and cached prefixes are all that one thing. A decode worker is
only a worker whose sequences arrive with the prompt already computed. No torch here, and no clock but the one given.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass

from paceline.core.block_hash import BlockHash, chain_root, hash_block
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import DeadlineError
from paceline.core.request import FirstToken, SequenceId, SequenceSpec, TokenLogprob
from paceline.engine.block_pool import BlockPool
from paceline.engine.block_tables import BlockContent, SequenceBlocks
from paceline.engine.cached_prefix import CachedPrefix, find_prefix
from paceline.engine.events import BlocksReady, Event, Failed, NewTokens, PromptScored, Reserved, Started
from paceline.engine.sequence import Sequence, SequenceRole, SequenceStatus
from paceline.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from paceline.engine.tasks import sample_tasks, score_task

HashBlock = Callable[[BlockHash, AbstractSequence[int]], BlockHash]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The bounds of a step, and what the model says about its tokens."""

    max_num_batched_tokens: int
    max_num_seqs: int
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: bytes = b""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A picture of the queues."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    num_preemptions: int


class Scheduler:
    """Owns the sequences and, through the pool, their blocks. FCFS; preempts by recompute, the youngest first."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        content: BlockContent,
        *,
        clock: Clock = monotonic,
        hash_block: HashBlock = hash_block,
    ) -> None:
        self.config = config
        self.pool = pool
        self._content = content
        self._clock = clock
        self._hash_block = hash_block
        # A family is one sequence at first, and one for each candidate that is left once it has parted.
        self._families: dict[SequenceId, list[Sequence]] = {}
        self._waiting: deque[Sequence] = deque()
        self._parked: list[Sequence] = []
        self._running: list[Sequence] = []
        self._num_preemptions = 0

    # -- commands

    def add(self, spec: SequenceSpec, role: SequenceRole) -> None:
        """Queues a sequence. A second one with the same id is a repeated message and is ignored."""
        if spec.sequence_id in self._families:
            return
        root = chain_root(self.config.fingerprint, spec.cache_scope)
        blocks = SequenceBlocks(self.pool, self._content)
        sequence = Sequence(spec, role, root, blocks, arrival_s=self._clock())
        self._families[spec.sequence_id] = [sequence]
        self._waiting.append(sequence)

    def commit(self, sequence_id: SequenceId, first_tokens: AbstractSequence[FirstToken]) -> None:
        """The KV of an AWAIT_KV sequence is in its blocks: from now on it is a local sequence like any other.

        Of a candidate whose first token ends it, or that has none here, nothing more is said.
        """
        (sequence, *_) = self._families.get(sequence_id, (None,))
        if sequence is None or sequence.status is not SequenceStatus.WAITING_FOR_KV:
            return
        self._parked.remove(sequence)
        self._running.append(sequence)
        sequence.role, sequence.status = SequenceRole.GENERATE, SequenceStatus.RUNNING
        sequence.announced = True
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.num_scored_tokens = len(sequence.spec.prompt_ids)
        self._seal(sequence)
        self._go_on(
            sequence,
            {first.candidate: first.token_id for first in first_tokens if first.finish_reason is None},
        )

    def release(self, sequence_id: SequenceId, candidate: int | None = None) -> None:
        """Forgets a sequence, or one candidate of it, whatever its state, and frees its blocks; unknown ones are ignored.

        Whoever fills the blocks of a WAITING_FOR_KV sequence from outside must have stopped before.
        """
        for sequence in list(self._families.get(sequence_id, ())):
            left = tuple(each for each in sequence.candidates if each != candidate)
            if candidate is None or not left:
                self._drop(sequence)
            else:
                sequence.candidates = left

    # -- the step

    def has_work(self) -> bool:
        """Whether a step could do anything. Sequences that wait for KV from outside do not count."""
        return bool(self._waiting or self._running)

    def schedule(self) -> SchedulerOutput:
        """Chooses this step's tokens: decodes, then chunks of running prefills, then whoever waits and fits."""
        events = self._expire()
        scheduled: list[ScheduledSequence] = []
        budget, preempted = self._schedule_running(scheduled)
        if not preempted:
            self._admit_waiting(budget, scheduled, events)
        return SchedulerOutput(tuple(scheduled), tuple(events))

    def update(self, output: SchedulerOutput, step: StepOutput) -> list[Event]:
        """Takes the step's results into the sequences; a block is published here, once it is computed."""
        logprobs = step.logprobs or (None,) * len(step.token_ids)
        sampled = iter(zip(step.token_ids, logprobs, strict=True))
        scores = iter(step.scores)
        events = list(output.events)
        for item in output.scheduled:
            sequence = self._member(item)
            sequence.num_computed_tokens = item.end
            self._seal(sequence)
            events += self._announce(sequence)
            if item.score is not None:
                events.append(_take_scores(sequence, next(scores)))
            if item.samples:
                events += self._take_tokens(sequence, [next(sampled) for _ in item.samples])
        return events

    # -- for the outside

    def stats(self) -> SchedulerStats:
        """A picture of now."""
        return SchedulerStats(
            num_running=sum(s.num_seats for s in self._running),
            num_waiting=sum(s.num_seats for s in (*self._waiting, *self._parked)),
            num_pending_tokens=sum(s.num_uncomputed_tokens for s in (*self._waiting, *self._running)),
            num_preemptions=self._num_preemptions,
        )

    def check_invariants(self) -> None:
        """Blocks are whole, and every sequence is in the one queue that its status says."""
        sequences = list(self._all())
        tables = [table for sequence in sequences for table in sequence.blocks.tables]
        self.pool.check_invariants(
            [table.held_ids for table in tables], sum(table.pledged for table in tables)
        )
        for sequence in sequences:
            waits = sequence.status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
            assert (sequence in self._waiting) == waits
            assert (sequence in self._parked) == (sequence.status is SequenceStatus.WAITING_FOR_KV)
            assert (sequence in self._running) == (sequence.status is SequenceStatus.RUNNING)
            assert not (waits and not sequence.blocks.is_empty), "a waiting sequence holds blocks"
            assert sequence.num_computed_tokens <= sequence.blocks.num_tokens_held, "computed without a block"
            is_missed = (
                sequence.owes_prompt_logprobs and sequence.num_computed_tokens >= sequence.num_scored_tokens
            )
            assert not is_missed, "a prompt token's log probability was passed over"
        queued = len(self._waiting) + len(self._parked) + len(self._running)
        assert queued <= len(sequences), "a forgotten sequence is still queued"
        for family in self._families.values():
            candidates = [candidate for sequence in family for candidate in sequence.candidates]
            assert candidates, "a family without candidates is still known"
            assert len(set(candidates)) == len(candidates), "two sequences of one candidate"
        num_seats = sum(s.num_seats for s in (*self._running, *self._parked))
        is_one_family = len(self._running) + len(self._parked) == 1
        assert num_seats <= self.config.max_num_seqs or is_one_family, "more sequences than seats"

    # -- deciding

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> tuple[int, bool]:
        """Returns the budget that is left, and whether anyone was preempted."""
        budget, preempted = self.config.max_num_batched_tokens, False
        order = sorted(self._running, key=lambda s: (not s.is_decoding, s.arrival_s))
        for index, sequence in enumerate(order):
            if budget == 0:
                break
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            # Whoever comes earlier in the order is scheduled already, and so is no victim.
            if not self._grow(sequence, num_tokens, order[index + 1 :]):
                preempted = True
                continue
            scheduled.append(self._scheduled(sequence, num_tokens))
            budget -= num_tokens
        preempted |= any(s.status is SequenceStatus.PREEMPTED for s in order)
        return budget, preempted

    def _admit_waiting(self, budget: int, scheduled: list[ScheduledSequence], events: list[Event]) -> None:
        while budget and self._waiting:
            sequence = self._waiting[0]
            if not self._has_seats_for(sequence) or not self._reserve(sequence):
                return
            self._waiting.popleft()
            if sequence.started_s is None:
                sequence.started_s = self._clock()
            if sequence.role is SequenceRole.AWAIT_KV:
                events.append(self._park(sequence))
                continue
            sequence.status = SequenceStatus.RUNNING
            self._running.append(sequence)
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            sequence.blocks.extend(sequence.num_computed_tokens + num_tokens)
            scheduled.append(self._scheduled(sequence, num_tokens))
            budget -= num_tokens

    def _scheduled(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        completes = num_tokens == sequence.num_uncomputed_tokens
        return ScheduledSequence(
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids[start : start + num_tokens]),
            start=start,
            block_tables=sequence.blocks.view(),
            samples=sample_tasks(sequence, self.config.eos_token_ids) if completes else (),
            score=score_task(sequence, start, start + num_tokens) if sequence.owes_prompt_logprobs else None,
            candidate=sequence.candidates[0],
        )

    def _has_seats_for(self, sequence: Sequence) -> bool:
        """Whether all its candidates may run; a family that is too large for that may once nobody else is here."""
        num_taken = sum(s.num_seats for s in (*self._running, *self._parked))
        return num_taken == 0 or num_taken + sequence.num_seats <= self.config.max_num_seqs

    def _reserve(self, sequence: Sequence) -> bool:
        """Takes room for every known token, cached blocks where there are some; all or nothing.

        A block of each group is left for the growth of each running sequence, and what families need to part, this one too:
        without it somebody is preempted at once.
        """
        prefix = self._cached_prefix(sequence)
        if not sequence.blocks.reserve(
            prefix,
            sequence.num_tokens,
            self.config.max_num_batched_tokens,
            is_filled_outside=sequence.role is SequenceRole.AWAIT_KV,
            spare=self._num_spare(sequence),
        ):
            return False
        sequence.num_computed_tokens = prefix.num_blocks * self.pool.block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _num_spare(self, newcomer: Sequence) -> int:
        num_growing = sum(sequence.num_seats for sequence in self._running)
        here = (*self._running, *self._parked)
        # Alone, a family takes its prompt's room whether or not there is enough for parting: there will never be more.
        parting = sum(map(_num_to_part, (newcomer, *here))) if here else 0
        return num_growing * len(self.pool.groups) + parting

    def _cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        if not sequence.spec.bypass_cache:
            self._extend_hashes(sequence)
        # A cached token has no logits, and so does not tell how probable the next one was.
        if sequence.owes_prompt_logprobs:
            return find_prefix(self.pool, sequence.chain, max_blocks=0)
        # A token is sampled from its predecessor's output, so that one is computed even if it is cached;
        # unless the sampling has happened elsewhere.
        is_elsewhere = sequence.role is SequenceRole.AWAIT_KV
        max_blocks = (sequence.num_tokens - (0 if is_elsewhere else 1)) // self.pool.block_size
        next_position = sequence.num_tokens if is_elsewhere else None
        return find_prefix(self.pool, sequence.chain, max_blocks, next_position)

    def _park(self, sequence: Sequence) -> Event:
        sequence.status = SequenceStatus.WAITING_FOR_KV
        self._parked.append(sequence)
        blocks, num_cached = sequence.blocks, sequence.num_computed_tokens // self.pool.block_size
        return Reserved(
            sequence.sequence_id, blocks.place_ids(), num_held=blocks.num_places_before(num_cached)
        )

    def _expire(self) -> list[Event]:
        now_s = self._clock()
        # The candidates of a family have one deadline, and so one failure.
        late = {s.sequence_id: s for s in (*self._waiting, *self._running) if s.deadline_s <= now_s}
        events: list[Event] = [Failed(s.sequence_id, DeadlineError(s.phase)) for s in late.values()]
        for sequence in late.values():
            # Whoever has been told of a PREFILL_ONLY sequence's blocks may be reading them.
            if sequence.role is SequenceRole.PREFILL_ONLY and sequence.announced:
                self._hold(sequence)
            else:
                self.release(sequence.sequence_id)
        return events

    # -- growing and preempting

    def _grow(self, sequence: Sequence, num_tokens: int, others: list[Sequence]) -> bool:
        """Makes room for `num_tokens` more, preempting the youngest of the others for it, at last `sequence` itself.

        False in that case. All known tokens have room since the admission, so that only a decode step may lack it.
        """
        victims = [s for s in others if _may_preempt(s)]
        end = sequence.num_computed_tokens + num_tokens
        while self.pool.num_available < sequence.blocks.num_missing(end):
            victim = max(victims, key=lambda s: (s.arrival_s, s.candidates)) if victims else sequence
            self._preempt(victim)
            if victim is sequence:
                return False
            victims.remove(victim)
        sequence.blocks.extend(end)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.forget_blocks()
        self._send_back(sequence)

    def _send_back(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        self._num_preemptions += 1
        self._waiting.appendleft(sequence)

    # -- taking results

    def _seal(self, sequence: Sequence) -> None:
        """Checksums and publishes what has become full, and lets go of what nobody will see any more."""
        if not sequence.spec.bypass_cache:
            self._extend_hashes(sequence)
        sequence.blocks.seal(sequence.num_computed_tokens, sequence.chain)
        sequence.blocks.trim(sequence.num_computed_tokens, sequence.num_tokens)

    def _announce(self, sequence: Sequence) -> list[Event]:
        """Says that a sequence has started, and which blocks of a PREFILL_ONLY one have become ready."""
        events: list[Event] = []
        if not sequence.announced:
            sequence.announced = True
            events.append(_started(sequence))
        if sequence.role is SequenceRole.PREFILL_ONLY:
            events.append(self._ready_blocks(sequence))
        return events

    def _ready_blocks(self, sequence: Sequence) -> Event:
        blocks = sequence.blocks.ready_places(
            sequence.num_announced_blocks, is_complete=sequence.num_uncomputed_tokens == 0
        )
        sequence.num_announced_blocks += len(blocks)
        return BlocksReady(sequence.sequence_id, sequence.num_computed_tokens, blocks)

    def _take_tokens(
        self, sequence: Sequence, sampled: list[tuple[int, TokenLogprob | None]]
    ) -> list[NewTokens]:
        """One token for each candidate of a sequence."""
        events = [
            NewTokens(
                sequence_id=sequence.sequence_id,
                first_index=sequence.num_output_tokens,
                token_ids=(token_id,),
                finish_reason=sequence.end_with(token_id, self.config.eos_token_ids),
                num_preemptions=sequence.num_preemptions,
                logprobs=() if logprob is None else (logprob,),
                candidate=candidate,
            )
            for candidate, (token_id, logprob) in zip(sequence.candidates, sampled, strict=True)
        ]
        if sequence.role is SequenceRole.PREFILL_ONLY:
            self._hold(sequence)
        else:
            self._go_on(
                sequence, {event.candidate: event.token_ids[0] for event in events if not event.finish_reason}
            )
        return events

    def _go_on(self, sequence: Sequence, token_ids: Mapping[int, int]) -> None:
        """Each candidate goes on with its token, as a sequence of its own; those that have none are over."""
        if not token_ids:
            self._drop(sequence)
            return
        first, *others = token_ids
        sequence.candidates = (first,)
        forks = [self._fork(sequence, candidate) for candidate in others]
        self._families[sequence.sequence_id] += forks
        # The last one is sent back first, so that the first one stands in front.
        for fork in reversed(forks):
            if fork.blocks.is_empty:
                self._send_back(fork)
        for member, token_id in zip((sequence, *forks), token_ids.values(), strict=True):
            member.token_ids.append(token_id)

    def _fork(self, family: Sequence, candidate: int) -> Sequence:
        """Shares the family's blocks and runs; without a seat, or room for what cannot be shared, it has no block."""
        has_seat = sum(s.num_seats for s in (*self._running, *self._parked)) < self.config.max_num_seqs
        if has_seat and family.blocks.num_needed_to_fork(family.num_tokens) <= self.pool.num_available:
            member = family.fork(candidate, family.blocks.fork(family.num_tokens))
            self._running.append(member)
            return member
        member = family.fork(candidate, SequenceBlocks(self.pool, self._content))
        member.num_computed_tokens = 0
        return member

    def _drop(self, sequence: Sequence) -> None:
        """Forgets one sequence, and its family with the last one."""
        for queue in (self._waiting, self._parked, self._running):
            if sequence in queue:
                queue.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.forget_blocks()
        family = self._families[sequence.sequence_id]
        family.remove(sequence)
        if not family:
            del self._families[sequence.sequence_id]

    def _hold(self, sequence: Sequence) -> None:
        """Ends a PREFILL_ONLY sequence; its blocks are held until it is released."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    # -- small things

    def _all(self) -> Iterator[Sequence]:
        return (sequence for family in self._families.values() for sequence in family)

    def _member(self, item: ScheduledSequence) -> Sequence:
        return next(s for s in self._families[item.sequence_id] if item.candidate in s.candidates)

    def _extend_hashes(self, sequence: Sequence) -> None:
        size, hashes = self.pool.block_size, sequence.block_hashes
        for start in range(len(hashes) * size, sequence.num_tokens - size + 1, size):
            parent = hashes[-1] if hashes else sequence.root
            hashes.append(self._hash_block(parent, sequence.token_ids[start : start + size]))


def _num_to_part(sequence: Sequence) -> int:
    """Blocks that its candidates need beside the first one's, once they become sequences of their own."""
    return (sequence.num_seats - 1) * sequence.blocks.num_needed_to_fork(sequence.num_tokens)


def _take_scores(sequence: Sequence, logprobs: tuple[TokenLogprob, ...]) -> Event:
    first_index = sequence.num_scored_tokens
    sequence.num_scored_tokens += len(logprobs)
    return PromptScored(sequence.sequence_id, first_index, logprobs)


def _may_preempt(sequence: Sequence) -> bool:
    # The blocks of a PREFILL_ONLY sequence are promised to a receiver.
    return sequence.status is SequenceStatus.RUNNING and sequence.role is not SequenceRole.PREFILL_ONLY


def _started(sequence: Sequence) -> Started:
    assert sequence.started_s is not None, "a sequence starts when it is admitted"
    return Started(
        sequence_id=sequence.sequence_id,
        num_cached_tokens=sequence.num_cached_tokens,
        queued_s=sequence.started_s - sequence.arrival_s,
        num_blocks=sequence.blocks.num_places,
        block_hashes=sequence.blocks.place_hashes(sequence.block_hashes),
    )
