"""Decides who runs in each step: a sequence is scheduled until `num_computed_tokens` reaches `num_tokens`.

Prefill chunks, decode steps, recompute after preemption and cached prefixes are all that one thing. A decode worker is
only a worker whose sequences arrive with the prompt already computed. No torch here, and no clock but the one given.

`schedule` decides in this order: whoever decodes, and room for those of them that grow; prompts under way; who comes in.
Who may come in is for paceline/engine/admission.py to say, who must lose its blocks for paceline/engine/preemption.py, and
what a sequence becomes on its way for paceline/engine/members.py.
"""

from collections import defaultdict
from collections.abc import Sequence as AbstractSequence
from itertools import islice

from paceline.core.block_hash import hash_block
from paceline.core.clock import Clock, monotonic
from paceline.core.request import FirstToken, Priority, SequenceId, SequenceSpec, TokenLogprob
from paceline.engine.admission import AGED_EVERY, Admission
from paceline.engine.announce import announce, new_token, take_scores
from paceline.engine.block_pool import BlockPool
from paceline.engine.block_tables import BlockContent
from paceline.engine.costs import CostEstimate, PreemptionKind
from paceline.engine.events import Event, NewTokens
from paceline.engine.expert_groups import share_experts, take_turns
from paceline.engine.fairness import OUTPUT_TOKEN
from paceline.engine.invariants import check_invariants
from paceline.engine.items import scheduled_chunk, scheduled_decodes, take_decodes
from paceline.engine.members import Members
from paceline.engine.overload import Overload
from paceline.engine.preemption import Preemption
from paceline.engine.pressure import Pressure
from paceline.engine.room import HashBlock, Room
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.scheduler_stats import SchedulerStats, num_waiting_by_priority, tokens_by_lane
from paceline.engine.sequence import Sequence, SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.engine.swap import SwapSpace
from paceline.engine.waiting import WaitingQueue


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
        self._clock = clock
        self._choose_decodes = share_experts if config.group_by_experts else take_turns
        self._running = Running()
        self._pressure = Pressure(config)
        self._overload = Overload(config.overload_wait_s)
        swap = SwapSpace(config.num_swap_blocks, content)
        self._room = Room(
            pool, swap, self._running, self._pressure, hash_block, config.max_num_batched_tokens
        )
        self._admission = Admission(config, self._running, self._room, self._pressure, self._overload)
        self.accounts = self._admission.accounts
        self._preemption = Preemption(config, pool, self._running, swap, self.costs, clock)
        self._members = Members(
            config,
            pool,
            content,
            clock,
            running=self._running,
            admission=self._admission,
            room=self._room,
            preemption=self._preemption,
            swap=swap,
        )
        # What of the fast lane's part was less than a token.
        self._fast_part = 0.0
        # What the step under way says and computes: first those that decode, then chunks, by their number of tokens.
        self._events: list[Event] = []
        self._decodes: list[Sequence] = []
        self._chunks: dict[Sequence, int] = {}

    # -- commands

    def add(self, spec: SequenceSpec, role: SequenceRole, num_remote_tokens: int = 0) -> None:
        """Queues a sequence; one that lends has its blocks at once. A second one with the same id is ignored, as a repeated message.

        Another worker is believed to have its first `num_remote_tokens` tokens cached.
        """
        self._members.add(spec, role, num_remote_tokens)

    def commit(self, sequence_id: SequenceId, first_tokens: AbstractSequence[FirstToken]) -> None:
        """The KV of an AWAIT_KV sequence is in its blocks: from now on it is a local sequence like any other.

        Of a candidate whose first token ends it, or that has none here, nothing more is said.
        """
        self._members.commit(sequence_id, first_tokens)

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """What was asked for with Recall is here as far as it comes: in the first `num_blocks` blocks, those held among them."""
        self._members.resume(sequence_id, candidate, num_blocks)

    def release(self, sequence_id: SequenceId, candidate: int | None = None) -> None:
        """Forgets a sequence, or one candidate of it, whatever its state, and frees its blocks; unknown ones are ignored.

        Whoever fills the blocks of a WAITING_FOR_KV sequence from outside must have stopped before.
        """
        self._members.release(sequence_id, candidate)

    # -- the step

    def has_work(self) -> bool:
        """Whether a step could do, or say, anything. Sequences that wait for KV from outside do not count."""
        return self._running.is_computing or len(self._admission) > 0 or self._members.has_news

    def schedule(self) -> SchedulerOutput:
        """Chooses this step's tokens: decodes, then chunks of running prefills, then whoever waits and fits."""
        now_s = self._clock()
        self._room.begin_step()
        self._admission.begin_step(now_s)
        self._events = self._members.take_news(now_s)
        has_preempted = self._plan_decodes()
        self._plan_chunks(now_s)
        if has_preempted or self._room.is_short:
            self._members.call_in_loans()
        if self._decodes or self._chunks:
            self._pressure.note_step(preempted=has_preempted, num_running=self._running.num_computing)
        items = scheduled_decodes(self._decodes)
        items += [scheduled_chunk(sequence, num_tokens) for sequence, num_tokens in self._chunks.items()]
        return SchedulerOutput(tuple(items), tuple(self._events), self._admission.has_urgent)

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
            self._members.seal(sequence)
            events += announce(sequence)
            if item.score is not None:
                events.append(take_scores(sequence, next(scores)))
            if item.samples:
                events += self._take_tokens(sequence, list(islice(sampled, len(item.samples))))
        self._decodes, self._chunks = [], {}
        return events

    # -- deciding

    def _plan_decodes(self) -> bool:
        """A token for each that decodes: first room for those that grow, then the rest. Whether anybody lost its blocks."""
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
        for sequence in sorted(preempted, key=lambda sequence: sequence.arrival_s, reverse=True):
            self._admission.add_first(sequence)
        if preempted:
            self._admission.close()
            decodes, growing = ([s for s in each if s in decoding] for each in (decodes, growing))
        for sequence in growing:
            sequence.blocks.extend(sequence.num_tokens)
        self._decodes = decodes
        return bool(preempted)

    def _plan_chunks(self, now_s: float) -> None:
        """What decodes leave goes to prompts, class by class: the fast lane's part, then the normal lane, then the fast lane again."""
        prefilling, admission = self._running.prefilling, self._admission
        left = self.config.max_num_batched_tokens - len(self._decodes)
        if not left or not (prefilling or len(admission)):
            return
        part, self._fast_part = divmod(self._fast_part + self.config.fast_lane_share * left, 1)
        for sequence in admission.admitted_by_age():
            self._enter(sequence)
        # In every AGED_EVERY-th step those that came long ago are before all others.
        is_age_first = self._room.num_steps % AGED_EVERY == 0
        for sequence in prefilling:
            if is_age_first and sequence.arrival_s <= now_s - self.config.aging_s:
                left -= self._plan_chunk(sequence, left)
        prompts = defaultdict[tuple[bool, Priority], list[Sequence]](list)
        for sequence in prefilling:
            prompts[admission.is_fast(sequence), sequence.turn_class].append(sequence)
        for _ in range(2):
            for priority in Priority:
                fast, normal = prompts[True, priority], prompts[False, priority]
                used = self._fill(admission.fast, priority, fast, min(int(part), left))
                part, left = part - used, left - used
                for queue, running in ((admission.normal, normal), (admission.fast, fast)):
                    left -= self._fill(queue, priority, running, left)
            if self._decodes or self._chunks or not admission.unbind():
                return

    def _fill(self, queue: WaitingQueue, priority: Priority, running: list[Sequence], budget: int) -> int:
        """Up to `budget` tokens for a lane and class: for those that run, then for those that wait and fit; gives how many."""
        left = budget
        for sequence in running:
            left -= self._plan_chunk(sequence, left)
        if left and queue.is_waited_in(priority):
            for sequence in self._admission.admitted(queue, priority):
                self._enter(sequence)
                running.append(sequence)
                left -= self._plan_chunk(sequence, left)
                if not left:
                    break
        return budget - left

    def _enter(self, sequence: Sequence) -> None:
        event = self._members.enter(sequence)
        self._events += [] if event is None else [event]

    def _plan_chunk(self, sequence: Sequence, budget: int) -> int:
        planned = self._chunks.get(sequence, 0)
        num_tokens = min(sequence.num_uncomputed_tokens - planned, budget)
        if not num_tokens or sequence not in self._running.prefilling:
            return 0
        # All known tokens have had their room since the admission.
        sequence.blocks.extend(sequence.num_computed_tokens + planned + num_tokens)
        self._chunks[sequence] = planned + num_tokens
        return num_tokens

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
            self._members.seal(sequence)
        for sequence in ended:
            self._members.drop(sequence)
        return events

    def _take_tokens(
        self, sequence: Sequence, sampled: list[tuple[int, TokenLogprob | None]]
    ) -> list[NewTokens]:
        """One token for each candidate of a sequence whose known tokens are computed."""
        events = [
            new_token(sequence, candidate, token_id, logprob)
            for candidate, (token_id, logprob) in zip(sequence.candidates, sampled, strict=True)
        ]
        sequence.account.charge(OUTPUT_TOKEN * len(events))
        if sequence.role is SequenceRole.PREFILL_ONLY:
            self._members.hold(sequence)
        else:
            self._members.go_on(
                sequence, {event.candidate: event.token_ids[0] for event in events if not event.finish_reason}
            )
        return events

    # -- for the outside

    def stats(self) -> SchedulerStats:
        """A picture of now."""
        running, admission = self._running, self._admission
        waiting, lanes = num_waiting_by_priority(admission), (admission.fast, admission.normal)
        mode, num_switches = self._overload.seen(is_busy=running.is_computing or admission.has_urgent)
        return SchedulerStats(
            num_running=running.num_computing,
            num_waiting=sum(waiting) + sum(sequence.num_seats for sequence in running.parked),
            num_pending_tokens=running.num_pending_tokens + sum(lane.num_pending_tokens for lane in lanes),
            num_waiting_by_priority=waiting,
            tokens=tokens_by_lane(admission, running),
            preemptions={kind.value: self._preemption.counts[kind] for kind in PreemptionKind},
            num_recomputed_tokens=self._members.num_recomputed_tokens,
            num_refused_for_room=self._room.num_refused,
            num_steps_without_room=self._preemption.num_rounds,
            watermark=self._pressure.watermark,
            max_seats=self._pressure.max_seats,
            is_cooling=self._pressure.is_cooling and running.is_computing,
            num_cool_downs=self._pressure.num_cool_downs,
            batch_mode=mode,
            num_batch_switches=num_switches,
            num_batch_refused=self._members.num_refused,
        )

    def check_invariants(self) -> None:
        """See paceline/engine/invariants.py."""
        families = self._members.families
        check_invariants(self.pool, families, self._admission, self._running, self.config.max_num_seqs)
