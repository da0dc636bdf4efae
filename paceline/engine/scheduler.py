"""Decides who runs in each step: a sequence is scheduled until `num_computed_tokens` reaches `num_tokens`.

Prefill chunks, decode steps, recompute after preemption and cached prefixes are all that one thing. A decode worker is
only a worker whose sequences arrive with the prompt already computed. No torch here, and no clock but the one given.
"""

import heapq
from collections.abc import Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from itertools import islice

from paceline.core.block_hash import chain_root, hash_block
from paceline.core.clock import Clock, monotonic
from paceline.core.errors import DeadlineError, KvLostError
from paceline.core.request import FirstToken, Priority, SequenceId, SequenceSpec, TokenLogprob
from paceline.engine.admission import ALL_CLASSES, Admission
from paceline.engine.announce import announce, new_token, reserved, take_scores
from paceline.engine.block_pool import BlockPool
from paceline.engine.block_tables import BlockContent, SequenceBlocks
from paceline.engine.costs import CostEstimate, PreemptionKind
from paceline.engine.decode import scheduled_decodes, take_decodes
from paceline.engine.events import Event, Failed, NewTokens
from paceline.engine.expert_groups import share_experts, take_turns
from paceline.engine.fairness import OUTPUT_TOKEN, PROMPT_TOKEN, Account, Accounts
from paceline.engine.invariants import check_invariants
from paceline.engine.overload import BatchMode, Overload
from paceline.engine.preemption import Preemption
from paceline.engine.pressure import Pressure
from paceline.engine.recalls import Recalls
from paceline.engine.room import HashBlock, Room
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence, SequenceRole, SequenceStatus
from paceline.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from paceline.engine.swap import SwapSpace
from paceline.engine.tasks import sample_tasks, score_task
from paceline.engine.waiting import WaitingQueue


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A picture of the queues, and of what the policies have done."""

    num_running: int
    num_waiting: int
    num_pending_tokens: int
    # Those that wait for their turn, by class; without those that wait for KV.
    num_waiting_by_priority: tuple[int, int, int]
    # Of a sequence, by what became of its KV: "recompute", "swap", "remote".
    preemptions: Mapping[str, int]
    # Tokens that had been computed before and were computed again.
    num_recomputed_tokens: int
    watermark: float
    max_seats: int
    is_cooling: bool
    batch_mode: BatchMode
    # Sequences that had to wait for blocks, and steps in which somebody that decodes got none.
    num_refused_for_room: int
    num_steps_without_room: int
    # How often batch_mode has changed, and how many requests it has refused.
    num_batch_switches: int
    num_batch_refused: int

    @property
    def num_preemptions(self) -> int:
        """Of all kinds."""
        return sum(self.preemptions.values())


class Scheduler:
    """Owns the sequences and, through the pool, their blocks. Each policy is a part of its own; here they meet."""

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
        self.costs = CostEstimate()
        self.accounts = Accounts()
        self._content = content
        self._clock = clock
        # A family is one sequence at first, and one for each candidate that is left once it has parted.
        self._families: dict[SequenceId, list[Sequence]] = {}
        self._deadlines: list[tuple[float, int, SequenceId]] = []
        self._num_added = self._num_recomputed = self._num_refused = 0
        self._running = Running()
        self._pressure = Pressure(config)
        self._overload = Overload(config.overload_wait_s)
        self._swap = SwapSpace(config.num_swap_blocks, content)
        self._room = Room(
            pool, self._swap, self._running, self._pressure, hash_block, config.max_num_batched_tokens
        )
        self._admission = Admission(config, self._running, self._room, self._pressure, self._overload)
        self._choose_decodes = share_experts if config.group_by_experts else take_turns
        self._preemption = Preemption(
            config.victim, pool, self._running, self._swap, self.costs, clock, may_recall=config.may_recall
        )
        self._recalls = Recalls(pool.block_size, self.costs, clock)
        # What was found out between two steps, for the next one to say.
        self._news: list[Event] = []
        # What the step under way computes: first those that decode, then chunks, by their number of tokens.
        self._decodes: list[Sequence] = []
        self._chunks: dict[Sequence, int] = {}

    # -- commands

    def add(self, spec: SequenceSpec, role: SequenceRole) -> None:
        """Queues a sequence; one that lends has its blocks at once. A second one with the same id is ignored, as a repeated message."""
        if spec.sequence_id in self._families:
            return
        sequence = Sequence(
            spec=spec,
            role=role,
            root=chain_root(self.config.fingerprint, spec.cache_scope),
            blocks=SequenceBlocks(self.pool, self._content),
            # A loan is no service to a tenant.
            account=Account("") if role is SequenceRole.LEND else self.accounts.enter(spec.tenant),
            eos_token_ids=self.config.eos_token_ids,
            number=self._num_added,
            arrival_s=self._clock(),
        )
        self._num_added += 1
        self._families[spec.sequence_id] = [sequence]
        if role is SequenceRole.LEND:
            self._lend(sequence)
            return
        self._admission.queue_of(sequence).add(sequence)
        self._watch_deadline(sequence)

    def commit(self, sequence_id: SequenceId, first_tokens: AbstractSequence[FirstToken]) -> None:
        """The KV of an AWAIT_KV sequence is in its blocks: from now on it is a local sequence like any other.

        Of a candidate whose first token ends it, or that has none here, nothing more is said.
        """
        (sequence, *_) = self._families.get(sequence_id, (None,))
        if sequence not in self._running.parked or sequence in self._recalls:
            return
        self._unpark(sequence)
        sequence.role, sequence.status = SequenceRole.GENERATE, SequenceStatus.RUNNING
        sequence.announced = True
        sequence.num_remote_tokens = len(sequence.spec.prompt_ids)
        sequence.num_computed_tokens = sequence.num_tokens
        sequence.num_scored_tokens = len(sequence.spec.prompt_ids)
        self._seal(sequence)
        going_on = {first.candidate: first.token_id for first in first_tokens if first.finish_reason is None}
        self._go_on(sequence, going_on)

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """What was asked for with Recall is here as far as it comes: in the first `num_blocks` blocks, those held among them."""
        sequence = self._recalls.find(self._families.get(sequence_id, ()), candidate)
        if sequence is None:
            return
        self._unpark(sequence)
        self._recalls.end(sequence, num_blocks)
        self._seal(sequence)
        self._compute(sequence)

    def release(self, sequence_id: SequenceId, candidate: int | None = None) -> None:
        """Forgets a sequence, or one candidate of it, whatever its state, and frees its blocks; unknown ones are ignored.

        Whoever fills the blocks of a WAITING_FOR_KV sequence from outside must have stopped before.
        """
        for sequence in list(self._families.get(sequence_id, ())):
            left = tuple(each for each in sequence.candidates if each != candidate)
            if candidate is None or not left:
                self._drop(sequence)
            elif left != sequence.candidates:
                self._admission.narrow(sequence, left)

    # -- the step

    def has_work(self) -> bool:
        """Whether a step could do, or say, anything. Sequences that wait for KV from outside do not count."""
        return bool(self._running.decoding or self._running.prefilling or len(self._admission) or self._news)

    def schedule(self) -> SchedulerOutput:
        """Chooses this step's tokens: decodes, then chunks of running prefills, then whoever waits and fits."""
        now_s = self._clock()
        events = [*self._take_news(), *self._expire(now_s)]
        self._admission.begin_step(now_s)
        events += self._refuse()
        may_admit = self._plan_decodes()
        self._plan_chunks(events, may_admit=may_admit)
        if self._decodes or self._chunks:
            self._pressure.note_step(preempted=not may_admit, num_running=self._running.num_computing)
        items = scheduled_decodes(self._decodes)
        items += [self._chunk(sequence, num_tokens) for sequence, num_tokens in self._chunks.items()]
        return SchedulerOutput(tuple(items), tuple(events))

    def update(self, output: SchedulerOutput, step: StepOutput) -> list[Event]:
        """Takes the step's results into the sequences; a block is published here, once it is computed."""
        logprobs = step.logprobs or (None,) * len(step.token_ids)
        num_decodes = len(self._decodes)
        events = [*output.events, *self._update_decodes(step.token_ids[:num_decodes], logprobs[:num_decodes])]
        # Of the decodes, which come first; nobody tells, unless asked to.
        for sequence, experts in zip(self._decodes, step.experts, strict=False):
            sequence.experts = experts
        sampled = zip(step.token_ids[num_decodes:], logprobs[num_decodes:], strict=True)
        scores = iter(step.scores)
        for sequence, item in zip(self._chunks, output.scheduled[num_decodes:], strict=True):
            sequence.num_computed_tokens = item.end
            self._seal(sequence)
            events += announce(sequence)
            if item.score is not None:
                events.append(take_scores(sequence, next(scores)))
            if item.samples:
                events += self._take_tokens(sequence, list(islice(sampled, len(item.samples))))
        self._decodes, self._chunks = [], {}
        return events

    # -- for the outside

    def stats(self) -> SchedulerStats:
        """A picture of now."""
        running, lanes = self._running, (self._admission.fast, self._admission.normal)
        waiting = tuple(sum(lane.num_waiting(priority) for lane in lanes) for priority in Priority)
        return SchedulerStats(
            num_running=running.num_computing,
            num_waiting=sum(waiting) + sum(sequence.num_seats for sequence in running.parked),
            num_pending_tokens=running.num_pending_tokens + sum(lane.num_pending_tokens for lane in lanes),
            num_waiting_by_priority=(waiting[0], waiting[1], waiting[2]),
            preemptions={kind.value: self._preemption.counts[kind] for kind in PreemptionKind},
            num_recomputed_tokens=self._num_recomputed,
            num_refused_for_room=self._room.num_refused,
            num_steps_without_room=self._preemption.num_rounds,
            watermark=self._pressure.watermark,
            max_seats=self._pressure.max_seats,
            is_cooling=self._pressure.is_cooling,
            batch_mode=self._overload.mode,
            num_batch_switches=self._overload.num_switches,
            num_batch_refused=self._num_refused,
        )

    def check_invariants(self) -> None:
        """See paceline/engine/invariants.py."""
        check_invariants(self.pool, self._families, self._admission, self._running, self.config.max_num_seqs)

    # -- deciding

    def _plan_decodes(self) -> bool:
        """A token for each that decodes: first room for those that grow, then the rest. False if anybody lost its blocks."""
        decoding, budget = self._running.decoding, self.config.max_num_batched_tokens
        most = min(budget, self.config.max_decodes or budget)
        decodes = list(decoding) if len(decoding) <= most else self._choose_decodes(decoding, most)
        if len(decoding) > most:
            # The others come first in the next step.
            for sequence in decodes:
                del decoding[sequence]
                decoding[sequence] = None
        growing = [s for s in decodes if len(s.token_ids) > s.blocks.num_tokens_held]
        preempted = self._preemption.make_room(growing) if growing else []
        for sequence in sorted(preempted, key=_age, reverse=True):
            self._admission.queue_of(sequence).add_first(sequence)
        if preempted:
            decodes, growing = ([s for s in each if s in decoding] for each in (decodes, growing))
        for sequence in growing:
            sequence.blocks.extend(sequence.num_tokens)
        self._decodes = decodes
        return not preempted

    def _plan_chunks(self, events: list[Event], *, may_admit: bool) -> None:
        """What decodes leave goes to prompts: the fast lane's part first, then to the others, and what is left to the fast lane."""
        budget, lane = self.config.max_num_batched_tokens, self._admission
        left = budget - len(self._decodes)
        quota = min(left, int(self.config.fast_lane_share * budget))
        for queue, limit in ((lane.fast, quota), (lane.normal, left), (lane.fast, left)):
            planned = sum(self._chunks.values())
            self._fill(queue, min(limit, left - planned), events, may_admit=may_admit)

    def _fill(self, queue: WaitingQueue, budget: int, events: list[Event], *, may_admit: bool) -> None:
        """Up to `budget` tokens of one lane: of each class those that run, then those that wait."""
        running = sorted(
            (s for s in self._running.prefilling if self._admission.queue_of(s) is queue),
            key=self._urgency,
        )
        for sequence in running:
            if may_admit:
                budget -= self._admit(queue, budget, events, before=self._urgency(sequence))
            budget -= self._plan_chunk(sequence, budget)
        if may_admit:
            self._admit(queue, budget, events, before=ALL_CLASSES)

    def _admit(self, queue: WaitingQueue, budget: int, events: list[Event], before: int) -> int:
        """Lets in who waits and fits; gives the number of tokens that they take."""
        left = budget
        if not (left and len(queue)):
            return 0
        for sequence in self._admission.admitted(queue, before):
            self._enter(sequence, events)
            left -= self._plan_chunk(sequence, left)
            if not left:
                break
        return budget - left

    def _enter(self, sequence: Sequence, events: list[Event]) -> None:
        if sequence.started_s is None:
            sequence.started_s = self._clock()
            sequence.account.service += PROMPT_TOKEN * sequence.num_uncomputed_tokens
        if sequence.role is SequenceRole.AWAIT_KV:
            sequence.status = SequenceStatus.WAITING_FOR_KV
            self._running.parked[sequence] = None
            events.append(reserved(sequence, self.pool.block_size))
        elif recall := self._recalls.begin(sequence):
            self._running.parked[sequence] = None
            events.append(recall)
        else:
            self._compute(sequence)

    def _compute(self, sequence: Sequence) -> None:
        """From now on it computes what is missing of its known tokens."""
        sequence.status = SequenceStatus.RUNNING
        self._running.prefilling[sequence] = None
        if sequence.num_preemptions:
            self._num_recomputed += sequence.num_uncomputed_tokens - 1

    def _unpark(self, sequence: Sequence) -> None:
        """It waits for KV no more. Its deadline may have passed meanwhile; the next step finds that out."""
        self._running.remove(sequence)
        if sequence.deadline_s <= self._clock():
            self._watch_deadline(sequence)

    def _plan_chunk(self, sequence: Sequence, budget: int) -> int:
        planned = self._chunks.get(sequence, 0)
        num_tokens = min(sequence.num_uncomputed_tokens - planned, budget)
        if not num_tokens or sequence not in self._running.prefilling:
            return 0
        # All known tokens have had their room since the admission.
        sequence.blocks.extend(sequence.num_computed_tokens + planned + num_tokens)
        self._chunks[sequence] = planned + num_tokens
        return num_tokens

    def _chunk(self, sequence: Sequence, num_tokens: int) -> ScheduledSequence:
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        return ScheduledSequence(
            sequence_id=sequence.sequence_id,
            token_ids=tuple(sequence.token_ids[start:end]),
            start=start,
            block_tables=sequence.blocks.view,
            samples=sample_tasks(sequence) if end == sequence.num_tokens else (),
            score=score_task(sequence, start, end) if sequence.owes_prompt_logprobs else None,
            candidate=sequence.candidates[0],
        )

    def _urgency(self, sequence: Sequence) -> int:
        """Its class, after it has waited and run for so long."""
        num_up = int((self._clock() - sequence.arrival_s) // self.config.aging_s)
        return max(0, sequence.spec.priority - num_up)

    def _lend(self, sequence: Sequence) -> None:
        """Holds what is cached of its prompt until it is released, or forgets it if nothing is; the next step says which."""
        sequence.started_s = sequence.arrival_s
        if self._room.lend(sequence):
            self._hold(sequence)
            self._news += announce(sequence)
        else:
            self._drop(sequence)
            self._news.append(
                Failed(sequence.sequence_id, KvLostError("no block of the prefix is cached here"))
            )

    def _take_news(self) -> list[Event]:
        news, self._news = self._news, []
        # Of those that are released meanwhile nothing more is said.
        return [event for event in news if isinstance(event, Failed) or event.sequence_id in self._families]

    def _watch_deadline(self, sequence: Sequence) -> None:
        if sequence.spec.time_budget_s is not None:
            heapq.heappush(self._deadlines, (sequence.deadline_s, sequence.number, sequence.sequence_id))

    def _expire(self, now_s: float) -> list[Event]:
        """Ends what is late. A PREFILL_ONLY sequence that may be read keeps its blocks until it is released."""
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, sequence_id = heapq.heappop(self._deadlines)
            family = self._families.get(sequence_id)
            if not family or family[0].number != number or family[0].status is SequenceStatus.FINISHED:
                continue
            # Whoever fills its blocks looks at the clock too, and must stop before they are given back.
            if any(member in self._running.parked for member in family):
                continue
            events.append(Failed(sequence_id, DeadlineError(family[0].phase)))
            if family[0].role is SequenceRole.PREFILL_ONLY and family[0].announced:
                self._hold(family[0])
            else:
                self.release(sequence_id)
        return events

    def _forget_deadlines(self) -> None:
        """Those of sequences that are gone stay until they pass, or until they are most of all."""
        if len(self._deadlines) > 2 * len(self._families) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._families]
            heapq.heapify(self._deadlines)

    def _refuse(self) -> list[Event]:
        refused = self._admission.refused()
        for sequence, _ in refused:
            self._drop(sequence)
        self._num_refused += len(refused)
        return [event for _, event in refused]

    # -- taking results

    def _update_decodes(
        self, token_ids: AbstractSequence[int], logprobs: AbstractSequence[TokenLogprob | None]
    ) -> list[NewTokens]:
        # Where there are windows, a step may also end what somebody sees of a block.
        has_windows = any(group.is_windowed for group in self.pool.groups)
        events, full, ended = take_decodes(
            self._decodes, token_ids, logprobs, 1 if has_windows else self.pool.block_size
        )
        self.accounts.charge((s.account for s in self._decodes), len(events), OUTPUT_TOKEN)
        for sequence in full:
            self._seal(sequence)
        for sequence in ended:
            self._drop(sequence)
        return events

    def _take_tokens(
        self, sequence: Sequence, sampled: list[tuple[int, TokenLogprob | None]]
    ) -> list[NewTokens]:
        """One token for each candidate of a sequence whose known tokens are computed."""
        events = [
            new_token(sequence, candidate, token_id, logprob)
            for candidate, (token_id, logprob) in zip(sequence.candidates, sampled, strict=True)
        ]
        if sequence.role is SequenceRole.PREFILL_ONLY:
            self._hold(sequence)
        else:
            self._go_on(
                sequence, {event.candidate: event.token_ids[0] for event in events if not event.finish_reason}
            )
        return events

    def _seal(self, sequence: Sequence) -> None:
        """Checksums and publishes what has become full, and lets go of what nobody will see any more."""
        if not sequence.spec.bypass_cache:
            self._room.extend_hashes(sequence)
        sequence.blocks.seal(sequence.num_computed_tokens, sequence.chain)
        sequence.blocks.trim(sequence.num_computed_tokens, sequence.num_tokens)

    def _go_on(self, sequence: Sequence, token_ids: Mapping[int, int]) -> None:
        """Each candidate goes on with its token, as a sequence of its own; those that have none are over."""
        if not token_ids:
            self._drop(sequence)
            return
        first, *others = token_ids
        sequence.keep((first,))
        self._running.remove(sequence)
        self._running.decoding[sequence] = None
        forks = [self._fork(sequence, candidate) for candidate in others]
        self._families[sequence.sequence_id] += forks
        for member, token_id in zip((sequence, *forks), token_ids.values(), strict=True):
            member.token_ids.append(token_id)
        # The last one is sent back first, so that the first one stands in front.
        for fork in reversed(forks):
            if fork not in self._running:
                self._preemption.note_fork(fork)
                self._admission.queue_of(fork).add_first(fork)

    def _fork(self, family: Sequence, candidate: int) -> Sequence:
        """Shares the family's blocks and runs; without a seat, or room for what cannot be shared, it has no block."""
        has_seat = self._running.num_seats < self.config.max_num_seqs
        if has_seat and family.blocks.num_needed_to_fork(family.num_tokens) <= self.pool.num_available:
            member = family.fork(candidate, family.blocks.fork(family.num_tokens))
            self._running.decoding[member] = None
            return member
        member = family.fork(candidate, SequenceBlocks(self.pool, self._content))
        member.num_computed_tokens = 0
        return member

    def _drop(self, sequence: Sequence) -> None:
        """Forgets one sequence, and its family with the last one."""
        self._admission.remove(sequence)
        if sequence in self._running.parked:
            self._unpark(sequence)
        self._running.remove(sequence)
        self._recalls.forget(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.forget_blocks()
        self._swap.drop(sequence.saved)
        family = self._families[sequence.sequence_id]
        family.remove(sequence)
        if not family:
            del self._families[sequence.sequence_id]
            self._forget_deadlines()
            if sequence.role is not SequenceRole.LEND:
                self.accounts.leave(sequence.account)

    def _hold(self, sequence: Sequence) -> None:
        """Ends a sequence whose blocks others read; they are held until it is released."""
        self._running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED


def _age(sequence: Sequence) -> float:
    return sequence.arrival_s
