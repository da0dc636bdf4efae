"""Decides which waiting sequences come in, and when. Room is theirs before they do."""

from collections.abc import Iterator
from math import inf

from paceline.core.errors import QueueFullError
from paceline.core.request import Priority
from paceline.engine.events import Event, Failed
from paceline.engine.overload import BatchMode, Overload
from paceline.engine.policies import TURN_POLICIES
from paceline.engine.pressure import Pressure
from paceline.engine.room import Room, may_use_cushion
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence, SequenceStatus
from paceline.engine.waiting import WaitingQueue

# After so many that do not fit nobody is looked at any more in this step, as long as somebody computes.
_LOOK_AHEAD = 32
# At least so many admissions lie between two of those whose turn comes by age alone.
AGED_EVERY = 8
# Every class; a limit for those that come before a class of their own.
ALL_CLASSES = len(Priority)


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
        policy = TURN_POLICIES[config.policy]
        self.fast = WaitingQueue(policy)
        self.normal = WaitingQueue(policy)
        # One that was passed by as often as may be, of the earliest class that has one: until it fits, nobody of its class, or of
        # a later one, comes in. That holds while it is its tenant's turn: those that were served less come before it.
        self._starving: Sequence | None = None
        self._bar: Sequence | None = None
        # Of this step: the time, whether anybody computes, whether somebody may come in, and how many BATCH requests may.
        self._now_s = 0.0
        self._is_computing = False
        self._is_open = True
        self._num_batch_left = 0
        # Those of the fast lane that have come in since the normal lane was last looked at.
        self._num_passed = 0
        # Admissions since somebody came in by age alone, and who would be the next to do so.
        self._num_since_aged = 0
        self._by_age: Sequence | None = None

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

    def queue_of(self, sequence: Sequence) -> WaitingQueue:
        """The lane that it waits in."""
        return self.fast if self.is_fast(sequence) else self.normal

    def remove(self, sequence: Sequence) -> None:
        """Forgets one that waits, if it does."""
        queue = self.queue_of(sequence)
        if sequence in queue:
            queue.remove(sequence)
        if sequence is self._starving:
            self._starving = self._bar = None

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on it stands for these candidates only, whether it waits or not."""
        queue = self.queue_of(sequence)
        if sequence in queue:
            queue.narrow(sequence, candidates)
        else:
            sequence.keep(candidates)

    def begin_step(self, now_s: float) -> None:
        """Time has passed: BATCH requests give way or come back, and a pause may be over."""
        self._now_s = now_s
        self._is_computing = bool(self._running.decoding or self._running.prefilling)
        if not len(self.normal):
            self._num_passed = 0
        waiting = [queue for queue in (self.fast, self.normal) if len(queue)]
        urgent = [arrival_s for queue in waiting if (arrival_s := queue.oldest_urgent_s()) is not None]
        if not self._is_computing:
            self._pressure.end_pause()
        if self._is_computing or urgent:
            self._overload.note_wait(now_s - min(urgent) if urgent else 0.0, now_s)
        else:
            self._overload.end()
        is_static = self._config.batching == "static" and bool(self._running)
        self._is_open = not is_static and not self._pressure.is_cooling
        self._num_batch_left = self._num_batch_to_come(is_slack=not urgent)

    def refused(self) -> list[tuple[Sequence, Event]]:
        """BATCH requests that shall not wait any longer. Those that have begun are of another class."""
        oldest = self.normal.oldest(Priority.BATCH)
        latest_s = inf if self._overload.mode is BatchMode.REFUSED else self._now_s - self._config.aging_s
        if self._overload.mode is BatchMode.CONTINUOUS or oldest is None or oldest.arrival_s > latest_s:
            return []
        error = QueueFullError(
            "urgent requests wait, and BATCH ones are refused meanwhile",
            retry_after_s=self._overload.retry_after_s,
        )
        return [
            (sequence, Failed(sequence.sequence_id, error))
            for sequence in self.normal.of_class(Priority.BATCH)
            if sequence.arrival_s <= latest_s
        ]

    def admitted(self, queue: WaitingQueue, before: int = ALL_CLASSES) -> Iterator[Sequence]:
        """Those of a lane and of the classes before one that fit, one after the other; each has its room once it is given."""
        passed: list[Sequence] = []
        starving = self._starving
        is_bar = starving is not None and self.queue_of(starving).is_turn_of_tenant(starving)
        self._bar = starving if is_bar else None
        if not self._is_open or not self._has_seats(1) or self._is_blocked(queue):
            self._note_full(queue)
            return
        if self._is_reserved(queue):
            return
        num_left = len(queue)
        for sequence in self._candidates(queue, before):
            if sequence not in queue or sequence in passed:
                continue
            # Since this step began a class has been shut; all that come now are of it, or of later ones.
            if self._is_barred(sequence) or self._gives_way(sequence):
                return
            if self._fits(sequence, queue):
                self._note_overtaken(passed)
                self._note_admitted(sequence, queue)
                yield sequence
                continue
            is_starving = self._note_refused(sequence, queue)
            # Whoever lost its blocks is not overtaken: newcomers would only take from others what it lacks.
            if sequence.status is SequenceStatus.PREEMPTED or (is_starving and self._is_overdue(sequence)):
                return
            passed.append(sequence)
            if len(passed) >= _LOOK_AHEAD and self._is_computing:
                break
        if passed and len(queue) == num_left and before == ALL_CLASSES:
            queue.note_blocked(self._room.num_available, self._room.num_steps)

    def _candidates(self, queue: WaitingQueue, before: int) -> Iterator[Sequence]:
        bar = self._bar
        # One that has to give way itself bars only those of its own class.
        if bar is not None and bar in queue and bar.turn_class < before and not self._gives_way(bar):
            yield bar
        # Not more often, so that age alone takes little from those that are urgent.
        if self._num_since_aged >= AGED_EVERY:
            for sequence in queue.aged(self._now_s - self._config.aging_s, self._first_shut_class()):
                self._by_age = sequence
                yield sequence
        self._by_age = None
        # While a REALTIME request waits in the normal lane the fast lane lets in no other, but for those whose turn comes by age.
        is_urgent_elsewhere = queue is self.fast and self.normal.oldest(Priority.REALTIME) is not None
        shut = Priority.STANDARD if is_urgent_elsewhere else self._first_shut_class()
        yield from queue.in_turn(min(before, shut))

    def _first_shut_class(self) -> int:
        shut = ALL_CLASSES if self._num_batch_left else Priority.BATCH
        return shut if self._bar is None else min(shut, self._bar.turn_class)

    def _is_reserved(self, queue: WaitingQueue) -> bool:
        """Whether whoever is next is in the other lane."""
        return self._bar is not None and self._bar not in queue and self._is_overdue(self._bar)

    def _is_overdue(self, bar: Sequence) -> bool:
        """Whether it is its turn by age too: then nobody comes in before it, of whatever class."""
        is_old = bar.arrival_s <= self._now_s - self._config.aging_s
        return is_old and self._num_since_aged >= AGED_EVERY and not self._gives_way(bar)

    def _gives_way(self, sequence: Sequence) -> bool:
        return self._num_batch_left == 0 and sequence.turn_class is Priority.BATCH

    def _is_barred(self, sequence: Sequence) -> bool:
        bar = self._bar
        return bar is not None and bar is not sequence and sequence.turn_class >= bar.turn_class

    def _note_refused(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        """It does not fit, and the fast lane's admissions of this step have passed it by; gives whether nobody may any more."""
        if queue is self.normal:
            sequence.num_overtaken += self._num_passed
            self._num_passed = 0
        self._note_starving(sequence)
        return sequence is self._starving

    def _note_starving(self, sequence: Sequence) -> None:
        bar = self._bar
        if sequence.num_overtaken >= self._config.max_overtakes and (
            bar is None or sequence.turn_class < bar.turn_class
        ):
            self._starving = self._bar = sequence

    def _note_full(self, queue: WaitingQueue) -> None:
        """Without a seat the head has been passed by too, by those of the fast lane."""
        if queue is self.normal and self._num_passed and self._is_open:
            head = next(queue.in_turn(), None)
            if head is not None:
                self._note_refused(head, queue)

    def _note_admitted(self, sequence: Sequence, queue: WaitingQueue) -> None:
        is_by_age = sequence is self._by_age or (sequence is self._starving and self._is_overdue(sequence))
        self._num_since_aged = 0 if is_by_age else self._num_since_aged + 1
        self._num_passed = self._num_passed + 1 if queue is self.fast else 0
        self._num_batch_left -= sequence.turn_class is Priority.BATCH
        self.remove(sequence)

    def _num_batch_to_come(self, *, is_slack: bool) -> int:
        """How many BATCH requests may begin in this step; while they give way, some once all others of them are done."""
        if self._overload.mode is BatchMode.CONTINUOUS:
            return self._config.max_num_seqs
        is_done = not any(sequence.spec.priority is Priority.BATCH for sequence in self._running)
        return self._config.static_batch_size if is_slack and is_done else 0

    def _fits(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        """Whether all its candidates have seats, and there is room, which it then has; alone it always has a seat."""
        if not self._has_seats(sequence.num_seats):
            return False
        from_cushion = may_use_cushion(sequence, is_fast=queue is self.fast)
        return self._room.take(sequence, from_cushion=from_cushion)

    def _has_seats(self, num_seats: int) -> bool:
        """After a pause fewer may compute; whoever only waits for KV is not counted there."""
        running = self._running
        return not running or (
            running.num_seats + num_seats <= self._config.max_num_seqs
            and running.num_computing + num_seats <= self._pressure.max_seats
        )

    def _is_blocked(self, queue: WaitingQueue) -> bool:
        """Whether nobody fitted the last time, and nothing has come free since, and nobody new has come."""
        return bool(self._running) and queue.is_blocked(self._room.num_available, self._room.num_steps)

    def _note_overtaken(self, passed: list[Sequence]) -> None:
        for sequence in passed:
            sequence.num_overtaken += 1
            self._note_starving(sequence)
