"""The sequences that a scheduler knows, from the moment they are added until they are forgotten."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence

from paceline.core.block_hash import chain_root
from paceline.core.clock import Clock
from paceline.core.errors import DeadlineError, KvLostError
from paceline.core.request import FirstToken, SequenceId, SequenceSpec
from paceline.engine.admission import Admission
from paceline.engine.announce import announce, reserved
from paceline.engine.block_pool import BlockPool
from paceline.engine.block_tables import BlockContent, SequenceBlocks
from paceline.engine.deadlines import Deadlines
from paceline.engine.events import Event, Failed
from paceline.engine.fairness import PROMPT_TOKEN, Account
from paceline.engine.preemption import Preemption
from paceline.engine.recalls import Recalls
from paceline.engine.room import Room
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence, SequenceRole, SequenceStatus
from paceline.engine.swap import SwapSpace


class Members:
    """Families by their id. A family is one sequence at first, and one for each candidate that is left once it has parted."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        content: BlockContent,
        clock: Clock,
        *,
        running: Running,
        admission: Admission,
        room: Room,
        preemption: Preemption,
        swap: SwapSpace,
    ) -> None:
        self.families: dict[SequenceId, list[Sequence]] = {}
        self.num_recomputed_tokens = self.num_refused = 0
        self.deadlines = Deadlines()
        self._config = config
        self._pool = pool
        self._content = content
        self._clock = clock
        self._running = running
        self._admission = admission
        self._room = room
        self._preemption = preemption
        self._swap = swap
        is_always = config.prefix_pull == "always"
        self._recalls = Recalls(pool.block_size, preemption.costs, clock, is_always=is_always)
        self._num_added = 0
        # Loans that nobody has been asked to end.
        self._lent: dict[Sequence, None] = {}
        # What was found out between two steps, for the next one to say.
        self._news: list[Event] = []

    # -- coming

    def add(self, spec: SequenceSpec, role: SequenceRole, num_remote_tokens: int) -> None:
        """See Scheduler.add."""
        if spec.sequence_id in self.families:
            return
        self._num_added += 1
        sequence = Sequence(
            spec=spec,
            role=role,
            root=chain_root(self._config.fingerprint, spec.cache_scope),
            blocks=SequenceBlocks(self._pool, self._content),
            account=self._account_of(spec, role),
            eos_token_ids=self._config.eos_token_ids,
            number=self._num_added,
            arrival_s=self._clock(),
            num_remote_tokens=num_remote_tokens if self._may_pull(spec, role) else 0,
        )
        sequence.is_recallable = sequence.num_remote_tokens > 0
        self.families[spec.sequence_id] = [sequence]
        if role is SequenceRole.LEND:
            self._lend(sequence)
            return
        self._admission.add(sequence)
        self.deadlines.watch(sequence)

    def enter(self, sequence: Sequence) -> Event | None:
        """It has its room: it computes, or it waits for KV, of which the event speaks."""
        if sequence.started_s is None:
            sequence.started_s = self._clock()
        if sequence.role is SequenceRole.AWAIT_KV:
            self._charge_prompt(sequence)
            sequence.status = SequenceStatus.WAITING_FOR_KV
            self._running.parked[sequence] = None
            return reserved(sequence, self._pool.block_size)
        if recall := self._recalls.begin(sequence):
            self._running.parked[sequence] = None
            return recall
        self._compute(sequence)
        return None

    def commit(self, sequence_id: SequenceId, first_tokens: AbstractSequence[FirstToken]) -> None:
        """See Scheduler.commit."""
        (sequence, *_) = self.families.get(sequence_id, (None,))
        if sequence not in self._running.parked or sequence in self._recalls:
            return
        self._unpark(sequence)
        sequence.role, sequence.status = SequenceRole.GENERATE, SequenceStatus.RUNNING
        sequence.announced = True
        sequence.num_remote_tokens = len(sequence.spec.prompt_ids)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.num_scored_tokens = len(sequence.spec.prompt_ids)
        self.seal(sequence)
        self.go_on(
            sequence,
            {first.candidate: first.token_id for first in first_tokens if first.finish_reason is None},
        )

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """See Scheduler.resume."""
        sequence = self._recalls.find(self.families.get(sequence_id, ()), candidate)
        if sequence is None:
            return
        self._unpark(sequence)
        self._recalls.end(sequence, num_blocks)
        self.seal(sequence)
        self._compute(sequence)

    # -- going on

    def seal(self, sequence: Sequence) -> None:
        """Checksums and publishes what has become full, and lets go of what nobody will see any more."""
        if not sequence.spec.bypass_cache:
            self._room.extend_hashes(sequence)
        sequence.blocks.seal(sequence.num_computed_tokens, sequence.chain)
        if not self._pool.is_whole:
            sequence.blocks.trim(sequence.num_computed_tokens, sequence.num_tokens)

    def go_on(self, sequence: Sequence, token_ids: Mapping[int, int]) -> None:
        """Each candidate goes on with its token, as a sequence of its own; those that have none are over."""
        if not token_ids:
            self.drop(sequence)
            return
        first, *others = token_ids
        sequence.keep((first,))
        self._running.remove(sequence)
        self._running.decoding[sequence] = None
        forks = [self._fork(sequence, candidate) for candidate in others]
        self.families[sequence.sequence_id] += forks
        for member, token_id in zip((sequence, *forks), token_ids.values(), strict=True):
            member.token_ids.append(token_id)
        # In line as what they are, more work of their tenant: at the head they would come before all others.
        for fork in forks:
            if fork not in self._running:
                self._preemption.note_fork(fork)
                self._admission.add(fork)

    # -- leaving

    def release(self, sequence_id: SequenceId, candidate: int | None = None) -> None:
        """See Scheduler.release."""
        for sequence in list(self.families.get(sequence_id, ())):
            left = tuple(each for each in sequence.candidates if each != candidate)
            if candidate is None or not left:
                self.drop(sequence)
            elif left != sequence.candidates:
                self._admission.narrow(sequence, left)

    def drop(self, sequence: Sequence) -> None:
        """Forgets one sequence, and its family with the last one."""
        if sequence in self._running.parked:
            self._unpark(sequence)
        self._recalls.forget(sequence)
        self._lent.pop(sequence, None)
        self._stop([sequence])
        family = self.families[sequence.sequence_id]
        family.remove(sequence)
        if not family:
            del self.families[sequence.sequence_id]
            self.deadlines.forget(self.families, len(self.families))
            if sequence.role is not SequenceRole.LEND:
                self._admission.accounts.leave(sequence.account)

    def hold(self, sequence: Sequence) -> None:
        """Ends a sequence whose blocks others read; they are held until it is released."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    def call_in_loans(self) -> None:
        """Their room is needed: asks whoever holds the leases to end them. Their readers compute what they do not get."""
        error = KvLostError("the loan is called in: the owner needs the room")
        self._news += [Failed(sequence.sequence_id, error) for sequence in self._lent]
        self._lent.clear()

    def take_news(self, now_s: float) -> list[Event]:
        """What happened between two steps; and who is late, or refused, and so is no member any more."""
        news, self._news = self._news, []
        # Of those that are released meanwhile nothing more is said.
        said = [event for event in news if isinstance(event, Failed) or event.sequence_id in self.families]
        return [*said, *self._expire(now_s), *self._refuse()]

    @property
    def has_news(self) -> bool:
        """Whether the next step has something to say, though it may compute nothing."""
        return bool(self._news) or self.deadlines.is_due(self._clock())

    # -- how it is done

    def _account_of(self, spec: SequenceSpec, role: SequenceRole) -> Account:
        """A loan is no service to a tenant."""
        is_loan = role is SequenceRole.LEND
        return Account("") if is_loan else self._admission.accounts.enter(spec.tenant, spec.tenant_weight)

    def _may_pull(self, spec: SequenceSpec, role: SequenceRole) -> bool:
        """Whether another worker's cache is of use to a newcomer that computes; where there are windows it would need other blocks."""
        return (
            self._config.prefix_pull != "never"
            and self._pool.is_whole
            and role in (SequenceRole.GENERATE, SequenceRole.PREFILL_ONLY)
            and not spec.bypass_cache
            and not spec.prompt_logprobs
        )

    def _compute(self, sequence: Sequence) -> None:
        """From now on it computes what is missing of its known tokens."""
        sequence.status = SequenceStatus.RUNNING
        self._running.prefilling[sequence] = None
        if sequence.num_preemptions:
            self.num_recomputed_tokens += sequence.num_uncomputed_tokens - 1
        else:
            self._charge_prompt(sequence)

    def _charge_prompt(self, sequence: Sequence) -> None:
        sequence.account.charge(PROMPT_TOKEN * sequence.num_uncomputed_tokens)

    def _unpark(self, sequence: Sequence) -> None:
        """It waits for KV no more. Its deadline may have passed meanwhile; the next step finds that out."""
        self._running.remove(sequence)
        if sequence.deadline_s <= self._clock():
            self.deadlines.watch(sequence)

    def _lend(self, sequence: Sequence) -> None:
        """Holds what is cached of its prompt until it is released, or forgets it if nothing is; the next step says which."""
        sequence.started_s = sequence.arrival_s
        if self._room.lend(sequence):
            self.hold(sequence)
            self._lent[sequence] = None
            self._news += announce(sequence)
        else:
            self.drop(sequence)
            error = KvLostError("no block of the prefix is cached here")
            self._news.append(Failed(sequence.sequence_id, error))

    def _fork(self, family: Sequence, candidate: int) -> Sequence:
        """Shares the family's blocks and runs; without a seat, or room for what cannot be shared, it has no block."""
        has_seat = self._running.num_seats < self._config.max_num_seqs
        if has_seat and family.blocks.num_needed_to_fork(family.num_tokens) <= self._pool.num_available:
            member = family.fork(candidate, family.blocks.fork(family.num_tokens))
            self._running.decoding[member] = None
            return member
        member = family.fork(candidate, SequenceBlocks(self._pool, self._content))
        member.num_computed_tokens = 0
        return member

    def _expire(self, now_s: float) -> list[Event]:
        """Ends what is late. A PREFILL_ONLY sequence that may be read keeps its blocks until it is released."""
        events: list[Event] = []
        for sequence_id, number in self.deadlines.passed(now_s):
            family = self.families.get(sequence_id)
            if not family or family[0].number != number or family[0].is_held:
                continue
            # Whoever fills their blocks looks at the clock too, and must stop before they are given back. Then the family ends.
            if any(member in self._running.parked for member in family):
                self._stop([member for member in family if member not in self._running.parked])
                continue
            events.append(Failed(sequence_id, DeadlineError(family[0].phase)))
            if family[0].role is SequenceRole.PREFILL_ONLY and family[0].announced:
                self.hold(family[0])
            else:
                self.release(sequence_id)
        return events

    def _stop(self, sequences: Iterable[Sequence]) -> None:
        """They compute nothing any more, and hold nothing."""
        for sequence in sequences:
            self._admission.remove(sequence)
            self._running.remove(sequence)
            sequence.status = SequenceStatus.FINISHED
            sequence.forget_blocks()
            self._swap.drop(sequence.saved)

    def _refuse(self) -> list[Event]:
        refused = self._admission.refused()
        for sequence, _ in refused:
            self.drop(sequence)
        self.num_refused += len(refused)
        return [event for _, event in refused]
