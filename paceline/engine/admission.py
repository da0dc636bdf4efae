"""Decides which waiting sequences come in, and when. Room is theirs before they do. docs/scheduling.md has the rules."""

from collections.abc import Iterator
from math import inf

from paceline.core.request import Priority
from paceline.engine.events import Event, Failed
from paceline.engine.fairness import Accounts
from paceline.engine.overload import BatchMode, Overload
from paceline.engine.patience import Patience
from paceline.engine.policies import TURN_POLICIES
from paceline.engine.pressure import Pressure
from paceline.engine.room import Room, may_use_cushion
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence, SequenceRole, SequenceStatus
from paceline.engine.waiting import WaitingQueue

# After so many that do not fit nobody is looked at any more in this step, if anything is computed in it.
_LOOK_AHEAD = 32
# At least so many admissions lie between two of those whose turn comes by age alone.
AGED_EVERY = 8


class Admission:
    """Owns the lanes in which sequences wait."""

    def __init__(
        self, config: SchedulerConfig, running: Running, room: Room, pressure: Pressure, overload: Overload
    ) -> None:
        self._config = config
        self._running = running
        self._room = room
        self._pressure = pressure
        self._overload = overload
        self.accounts = Accounts()
        policy = TURN_POLICIES[config.policy]
        self.fast = WaitingQueue(policy)
        self.normal = WaitingQueue(policy)
        # Of this step: the time, whether somebody may come in, whether those before it may hold it back, whether none that would
        # wait for KV may, and how many BATCH requests may come in.
        self._now_s = 0.0
        self._is_open = self._is_bound = True
        self._patience = Patience()
        self._has_parked = False
        self._num_batch_left = 0
        # Admissions since somebody came in by age alone, and who would be the next to do so, but does not fit.
        self._num_since_aged = 0
        self._due: Sequence | None = None

    def __len__(self) -> int:
        return len(self.fast) + len(self.normal)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.fast or sequence in self.normal

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.fast
        yield from self.normal

    @property
    def has_urgent(self) -> bool:
        """Whether one waits that is not BATCH and has not begun."""
        return any(queue.oldest_urgent_s() is not None for queue in (self.fast, self.normal))

    # -- coming and going

    def is_fast(self, sequence: Sequence) -> bool:
        """Whether it has its place in the fast lane."""
        config, spec = self._config, sequence.spec
        return (
            config.fast_lane_share > 0
            and len(spec.prompt_ids) <= config.fast_lane_prompt_tokens
            and spec.max_tokens <= config.fast_lane_output_tokens
            and len(spec.candidates) == 1  # of all that the request asked for, so that the lane never changes
            and spec.priority is not Priority.BATCH
        )

    def add(self, sequence: Sequence) -> None:
        """Waits in its lane."""
        self.accounts.join(sequence.account, sequence.turn_class)
        self._queue_of(sequence).add(sequence, max(sequence.arrival_s, self._now_s))

    def add_first(self, sequence: Sequence) -> None:
        """The same, at the head of its class, since it lost its blocks."""
        self.accounts.join(sequence.account, sequence.turn_class)
        self._queue_of(sequence).add_first(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forgets one that waits, if it does."""
        queue = self._queue_of(sequence)
        if sequence in queue:
            self.accounts.quit(sequence.account, queue.remove(sequence))

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on it stands for these candidates only, whether it waits or not."""
        queue = self._queue_of(sequence)
        if sequence in queue:
            queue.narrow(sequence, candidates)
        else:
            sequence.keep(candidates)

    # -- a step

    def begin_step(self, now_s: float) -> None:
        """Time has passed: BATCH requests give way or come back, and a pause may be over."""
        self._now_s, self._due, self._is_bound, self._has_parked = now_s, None, True, False
        is_computing = self._running.is_computing
        waiting = [queue for queue in (self.fast, self.normal) if len(queue)]
        urgent = [arrival_s for queue in waiting if (arrival_s := queue.oldest_urgent_s()) is not None]
        if not is_computing:
            self._pressure.end_pause()
        if is_computing or urgent:
            self._overload.note_wait(now_s - min(urgent) if urgent else 0.0, now_s)
        else:
            self._overload.end()
        is_static = self._config.batching == "static" and bool(self._running)
        self._is_open = not is_static and not self._pressure.is_cooling
        self._num_batch_left = self._num_batch_to_come(is_slack=not urgent)

    def close(self) -> None:
        """In this step nobody comes in any more."""
        self._is_open = False

    def unbind(self) -> bool:
        """Nothing is computed in this step, so far: whoever fits comes in, whoever is before it; or not yet, since leases may end.

        But none that would only wait for KV, where some do: nobody computes the sooner for it, and there might always be some.
        """
        self._is_bound = not (self._room.is_all_free or self._patience.has_ended(self._now_s))
        self._has_parked = bool(self._running.parked)
        return not self._is_bound

    def refused(self) -> list[tuple[Sequence, Event]]:
        """BATCH requests that shall not wait any longer. Those that have begun are of another class."""
        oldest = self.normal.oldest(Priority.BATCH)
        latest_s = inf if self._overload.mode is BatchMode.REFUSED else self._now_s - self._config.aging_s
        if self._overload.mode is BatchMode.CONTINUOUS or oldest is None or oldest.arrival_s > latest_s:
            return []
        return [
            (sequence, Failed(sequence.sequence_id, self._overload.refusal()))
            for sequence in self.normal.of_class(Priority.BATCH)
            if sequence.arrival_s <= latest_s
        ]

    def admitted_by_age(self) -> Iterator[Sequence]:
        """The oldest that fits of those whose turn it is by age alone, if that is due; it has its room once it is given."""
        if not self._is_open or self._num_since_aged < AGED_EVERY or not self._has_seats(1):
            return
        arrived_by_s = self._now_s - self._config.aging_s
        aged = [(*each, queue) for queue in (self.fast, self.normal) for each in queue.by_age(arrived_by_s)]
        for _, sequence, is_tenants, queue in sorted(aged, key=lambda each: each[0]):
            # A class's turn is that of whoever lost its blocks, then its least served tenant's, in whichever lane.
            is_first = is_tenants or queue.is_sent_back(sequence)
            heads = () if is_first else self._other(queue).head(sequence.turn_class)
            is_ahead = any(head.account.service < sequence.account.service for head in heads)
            if is_ahead or self._gives_way(sequence.turn_class):
                continue
            if self._fits(sequence, queue):
                self._note_admitted(sequence, queue)
                self._num_since_aged = 0
                yield sequence
                return
            self._due = self._due or sequence
            if self._is_held_up:
                return

    def admitted(self, queue: WaitingQueue, priority: Priority) -> Iterator[Sequence]:
        """Those of a lane and a class that fit, one after the other; each has its room once it is given."""
        if not self._is_open or self._is_held_up or self._gives_way(priority):
            return
        if not self._has_seats(1):
            queue.note_full(priority)
            return
        now = self._room.now
        if bool(self._running) and queue.is_blocked(priority, now, is_bound=self._is_bound):
            return
        if self._is_bound and self._is_shut(queue, priority):
            return
        other = self._other(queue)
        before = [*other.refused(priority), *other.head(priority)]
        refused, has_admitted = queue.note_look(priority), False
        for sequence in self._in_turn(queue, priority):
            # At the head of its class whoever lost its blocks is before all others.
            is_bound = self._is_bound and (bool(refused) or not queue.is_sent_back(sequence))
            if self._gives_way(priority) or (is_bound and not self._may_pass(sequence, before, queue)):
                break
            if self._fits(sequence, queue):
                self._note_admitted(sequence, queue)
                has_admitted = True
                yield sequence
                continue
            refused.append(sequence)
            before.append(sequence)
            if len(refused) >= _LOOK_AHEAD and self._is_bound:
                break
        if refused and not has_admitted:
            queue.note_blocked(priority, now, is_bound=self._is_bound or self._has_parked)

    def _in_turn(self, queue: WaitingQueue, priority: Priority) -> Iterator[Sequence]:
        """Those of a lane and a class, without those that would wait for KV where that may not be."""
        for sequence in queue.in_turn(priority):
            may_wait = sequence.role is SequenceRole.AWAIT_KV or sequence.is_recallable
            if not (self._has_parked and may_wait):
                yield sequence

    # -- who is before whom

    @property
    def _is_held_up(self) -> bool:
        """Whether nobody comes in before the oldest, of whatever class and however old: so many have."""
        due = self._due if self._is_bound else None
        return due is not None and due.num_overtaken >= self._config.max_overtakes

    def _is_bar(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        """Whether nobody of a lane who is behind it comes in before it: it was passed by as often as may be, or lost its blocks there."""
        is_sent_back = sequence.status is SequenceStatus.PREEMPTED and sequence in queue
        return is_sent_back or sequence.num_overtaken >= self._config.max_overtakes

    def _is_shut(self, queue: WaitingQueue, priority: Priority) -> bool:
        """Whether one of an earlier class does not fit, and may not be passed by any more."""
        return any(
            self._is_bar(sequence, queue)
            for lane in (self.fast, self.normal)
            for earlier in Priority
            if earlier < priority
            for sequence in lane.refused(earlier)
        )

    def _may_pass(self, sequence: Sequence, before: list[Sequence], queue: WaitingQueue) -> bool:
        """Whether its tenant is not too far ahead of theirs, and none of them whose turn is before its own is a bar."""
        service, lead = sequence.account.service, self._config.max_num_batched_tokens
        for other in before:
            least = other.account.service
            if service > least + lead:
                return False
            if self._is_before(other, service) and self._is_bar(other, queue):
                # Of two bars of one tenant, in two lanes, one has to be the first.
                is_first = self._is_bar(sequence, queue) and sequence.number < other.number
                if service != least or not is_first:
                    return False
        return True

    def _is_before(self, other: Sequence, service: float) -> bool:
        """Whether its turn is before that of one of its class whose tenant was served so much: whoever lost its blocks is at the head."""
        if other.status is SequenceStatus.PREEMPTED and self._queue_of(other).is_sent_back(other):
            return True
        return other.account.service <= service

    def _note_admitted(self, sequence: Sequence, queue: WaitingQueue) -> None:
        priority, service = sequence.turn_class, sequence.account.service
        passed = {
            other
            for lane in (self.fast, self.normal)
            for each in Priority
            if each <= priority
            for other in lane.refused(each)
            if each < priority or self._is_before(other, service)
        }
        for other in passed | ({self._due} if self._due is not None else set()):
            other.num_overtaken += 1
        self.remove(sequence)
        queue.note_turn(sequence.spec.tenant, priority, self._now_s)
        self._num_since_aged += 1
        self._num_batch_left -= priority is Priority.BATCH

    # -- whether it fits

    def _gives_way(self, priority: Priority) -> bool:
        return priority is Priority.BATCH and self._num_batch_left == 0

    def _num_batch_to_come(self, *, is_slack: bool) -> int:
        """How many BATCH requests may begin in this step; while they give way, some once all others of them are done."""
        if self._overload.mode is BatchMode.CONTINUOUS:
            return self._config.max_num_seqs
        if not is_slack:
            return 0
        # Those that have begun may wait too, for room or for a seat; in the slack nobody else is in their class.
        begun = (*self._running, *self.normal.of_class(Priority.STANDARD))
        is_done = not any(sequence.spec.priority is Priority.BATCH for sequence in begun)
        return self._config.static_batch_size if is_done else 0

    def _fits(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        """Whether all its candidates have seats, and there is room, which it then has; alone it always has a seat."""
        from_cushion = may_use_cushion(sequence, is_fast=queue is self.fast)
        return self._has_seats(sequence.num_seats) and self._room.take(sequence, from_cushion=from_cushion)

    def _has_seats(self, num_seats: int) -> bool:
        """After a pause fewer may compute; whoever only waits for KV is not counted there."""
        running = self._running
        return not running or (
            running.num_seats + num_seats <= self._config.max_num_seqs
            and running.num_computing + num_seats <= self._pressure.max_seats
        )

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self.fast if self.is_fast(sequence) else self.normal

    def _other(self, queue: WaitingQueue) -> WaitingQueue:
        return self.normal if queue is self.fast else self.fast
