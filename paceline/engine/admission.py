"""Decides which waiting sequences come in, and when. Room is theirs before they do."""

from collections.abc import Iterator

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

# After so many that do not fit nobody is looked at any more in this step.
_LOOK_AHEAD = 8
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
        self.fast = WaitingQueue(policy, config.aging_s)
        self.normal = WaitingQueue(policy, config.aging_s)
        # One that was passed by as often as may be: until it fits, nobody of its class, or of a later one, comes in.
        self._starving: Sequence | None = None
        self._is_open = True
        self._may_batch = True

    def __len__(self) -> int:
        return len(self.fast) + len(self.normal)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self.fast or sequence in self.normal

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.fast
        yield from self.normal

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
            self._starving = None

    def narrow(self, sequence: Sequence, candidates: tuple[int, ...]) -> None:
        """From now on it stands for these candidates only, whether it waits or not."""
        queue = self.queue_of(sequence)
        if sequence in queue:
            queue.narrow(sequence, candidates)
        else:
            sequence.keep(candidates)

    def begin_step(self, now_s: float) -> None:
        """Time has passed: classes age, BATCH requests give way or come back."""
        for queue in (self.fast, self.normal):
            queue.age(now_s)
        waiting = [queue for queue in (self.fast, self.normal) if len(queue)]
        urgent = [arrival_s for queue in waiting if (arrival_s := queue.oldest_urgent_s()) is not None]
        self._overload.note_wait(now_s - min(urgent) if urgent else 0.0, now_s)
        is_static = self._config.batching == "static"
        self._is_open = not self._running or not (is_static or self._pressure.is_cooling)
        self._may_batch = self._overload.mode is BatchMode.CONTINUOUS or (
            not urgent and not any(s.spec.priority is Priority.BATCH for s in self._running)
        )

    def refused(self) -> list[tuple[Sequence, Event]]:
        """BATCH requests that shall not wait any longer; those that have begun stay."""
        if self._overload.mode is not BatchMode.REFUSED:
            return []
        error = QueueFullError(
            "urgent requests wait, and BATCH ones are refused meanwhile",
            retry_after_s=self._overload.retry_after_s,
        )
        return [
            (sequence, Failed(sequence.sequence_id, error))
            for sequence in self.normal
            if sequence.spec.priority is Priority.BATCH and sequence.status is SequenceStatus.WAITING
        ]

    def admitted(self, queue: WaitingQueue, before: int = ALL_CLASSES) -> Iterator[Sequence]:
        """Those of a lane and of the classes before one that fit, one after the other; each has its room once it is given."""
        passed: list[Sequence] = []
        if not self._is_open or self._running.num_seats >= self._max_seats:
            return
        for sequence in self._candidates(queue, before):
            if self._is_barred(sequence, queue) or not self._is_allowed(sequence):
                continue
            if not self._fits(sequence, queue):
                # Whoever lost its blocks is not overtaken: newcomers would only take from others what it lacks.
                if sequence.status is SequenceStatus.PREEMPTED:
                    return
                passed.append(sequence)
                if len(passed) == _LOOK_AHEAD:
                    return
                continue
            self._note_overtaken(passed)
            self.remove(sequence)
            yield sequence

    def _candidates(self, queue: WaitingQueue, before: int) -> Iterator[Sequence]:
        starving = self._starving
        if starving is not None and starving in queue and queue.urgency(starving) < before:
            yield starving
        yield from queue.in_turn(before)

    def _is_barred(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        starving = self._starving
        # One that may not come in itself keeps nobody out.
        if starving is None or starving is sequence or not self._is_allowed(starving):
            return False
        return queue.urgency(sequence) >= self.queue_of(starving).urgency(starving)

    def _is_allowed(self, sequence: Sequence) -> bool:
        if sequence.spec.priority is not Priority.BATCH or self._overload.mode is BatchMode.CONTINUOUS:
            return True
        num_batch = sum(s.spec.priority is Priority.BATCH for s in self._running)
        return self._may_batch and num_batch < self._config.static_batch_size

    def _fits(self, sequence: Sequence, queue: WaitingQueue) -> bool:
        """Whether all its candidates have seats, and there is room, which it then has; alone it always has a seat."""
        num_taken = self._running.num_seats
        if num_taken and num_taken + sequence.num_seats > self._max_seats:
            return False
        from_cushion = may_use_cushion(sequence, is_fast=queue is self.fast)
        return self._room.take(sequence, from_cushion=from_cushion)

    @property
    def _max_seats(self) -> int:
        return min(self._config.max_num_seqs, self._pressure.max_seats)

    def _note_overtaken(self, passed: list[Sequence]) -> None:
        for sequence in passed:
            sequence.num_overtaken += 1
            if sequence.num_overtaken >= self._config.max_overtakes and self._starving is None:
                self._starving = sequence
