"""Runs an engine on its own thread and brings what it says to asyncio.

The thread owns the engine. The event loop owns the sinks. Commands go one way, through a queue; the results of a step
come the other way, all at once.
"""

import asyncio
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.core.errors import EngineFailedError, PacelineError
from paceline.core.prefix import PrefixChanges
from paceline.core.request import FirstToken, SequenceId, SequenceSpec
from paceline.engine.engine import Engine, EngineStats, StepResult
from paceline.engine.events import Event, Failed, NewTokens, Recall
from paceline.engine.sequence import SequenceRole
from paceline.runtime.log import get_logger

# Called on the event loop with what one step said about the sequences of one sink, in order.
Sink = Callable[[Sequence[Event]], None]
_Command = Callable[[Engine], None]

# While sequences wait that cannot run, deadlines still pass: look at least so often. Where there is nothing to do, what is said
# of the last seconds becomes old.
_IDLE_TICK_S, _QUIET_TICK_S = 0.1, 1.0

log = get_logger()


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    """Who hears of a sequence, and which of its candidates have not ended."""

    tell: Sink
    candidates: set[int]


class AsyncEngine:
    """An engine's commands for asyncio code. Every method is called on the event loop that made it."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_changes: Callable[[PrefixChanges], None] = lambda _: None,
        on_step: Callable[[StepResult], None] = lambda _: None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._listeners: dict[SequenceId, _Listener] = {}
        # Those that keep their blocks, and so their sink, after their last event.
        self._held: set[SequenceId] = set()
        self._on_changes = on_changes
        self._on_step = on_step
        self._on_failure = on_failure
        self._failed = False
        self.stats: EngineStats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def num_sequences(self) -> int:
        """Sequences that have been submitted and neither ended nor released; `stats` lags behind it by a step."""
        return len(self._listeners)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def stop(self, *, patience_s: float = 10.0) -> None:
        """Ends the thread after the step under way; sequences that are left get no further event.

        A step that lasts longer than `patience_s` is left behind, and ends with the process.
        """
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, patience_s)

    def ping(self, answer: Callable[[], None]) -> None:
        """Calls `answer` once the step under way has ended."""
        self._commands.put(lambda _: self._call_loop(answer))

    def submit(self, spec: SequenceSpec, role: SequenceRole, sink: Sink, num_remote_tokens: int = 0) -> bool:
        """Queues a sequence, see Scheduler.add; `sink` gets its events until its last candidate ends or is released.

        False for an id that is in use already: a repeated message is ignored, and the first sink stays. The id of a
        PREFILL_ONLY or LEND sequence is in use until it is released.
        """
        if self._failed:
            sink([Failed(spec.sequence_id, _dead())])
            return True
        if spec.sequence_id in self._listeners:
            return False
        self._listeners[spec.sequence_id] = _Listener(sink, set(spec.candidates))
        if role in (SequenceRole.PREFILL_ONLY, SequenceRole.LEND):
            self._held.add(spec.sequence_id)
        self._commands.put(lambda engine: engine.add(spec, role, num_remote_tokens))
        return True

    def commit(self, sequence_id: SequenceId, first_tokens: Sequence[FirstToken]) -> None:
        """The sequence's KV has arrived in its reserved blocks.

        Of a candidate whose first token ends it, or that has none here, nothing more is said.
        """
        going_on = {first.candidate for first in first_tokens if first.finish_reason is None}
        listener = self._listeners.get(sequence_id)
        for candidate in list(listener.candidates - going_on) if listener else ():
            self._note_end(sequence_id, candidate)
        self._commands.put(lambda engine: engine.commit(sequence_id, first_tokens))

    def resume(self, sequence_id: SequenceId, candidate: int, num_blocks: int) -> None:
        """What was asked for with Recall is here: in the first `num_blocks` blocks, those held among them."""
        self._commands.put(lambda engine: engine.resume(sequence_id, candidate, num_blocks))

    def release_candidate(self, sequence_id: SequenceId, candidate: int) -> None:
        """Forgets one candidate of a sequence; the others go on. Nobody may be filling its blocks from outside."""
        self._note_end(sequence_id, candidate)
        asked_at_step = self.stats.num_steps
        self._commands.put(lambda engine: engine.release(sequence_id, asked_at_step, candidate))

    def release(self, sequence_id: SequenceId, error: PacelineError | None = None) -> None:
        """Forgets a sequence, whatever its state, and frees its blocks; unknown ones are ignored.

        Its sink hears of the `error`, if there is one, and then nothing more. Whoever fills its blocks from outside
        must have stopped before.
        """
        self._held.discard(sequence_id)
        listener = self._listeners.pop(sequence_id, None)
        if listener is not None and error is not None:
            listener.tell([Failed(sequence_id, error)])
        asked_at_step = self.stats.num_steps
        self._commands.put(lambda engine: engine.release(sequence_id, asked_at_step))

    # -- the engine thread

    def _run(self) -> None:
        try:
            self._loop_until_stopped()
        except BaseException as error:  # whatever it was, the sequences must hear of it
            log.exception("engine_died", error=type(error).__name__)
            self._call_loop(self._fail, error)

    def _loop_until_stopped(self) -> None:
        idle = True
        while self._apply_commands(wait=idle):
            if not self._engine.has_work():
                self._call_loop(self._deliver, None, self._engine.stats())
                idle = True
                continue
            result = self._engine.step()
            idle = result.idle
            self._call_loop(self._deliver, result, self._engine.stats())

    def _apply_commands(self, *, wait: bool) -> bool:
        """Applies all queued commands, waiting for a first one if there is nothing else to do; False to stop."""
        try:
            command = self._commands.get(block=wait, timeout=self._idle_timeout_s() if wait else None)
            while command is not None:
                command(self._engine)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _idle_timeout_s(self) -> float:
        return _IDLE_TICK_S if self._engine.has_work() else _QUIET_TICK_S

    def _call_loop(self, callback: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            log.warning("engine_event_without_loop")

    # -- the event loop

    def _deliver(self, result: StepResult | None, stats: EngineStats) -> None:
        self.stats = stats
        if result is not None:
            self._on_changes(result.changes)
            self._on_step(result)
            for sink, events in self._by_sink(result.events).items():
                _tell(sink, events)

    def _by_sink(self, events: Sequence[Event]) -> dict[Sink, list[Event]]:
        grouped: defaultdict[Sink, list[Event]] = defaultdict(list)
        for event in events:
            listener = self._listeners.get(event.sequence_id)
            if listener is None:  # released since
                continue
            if isinstance(event, NewTokens) and event.candidate not in listener.candidates:
                continue
            if isinstance(event, Recall) and listener.candidates.isdisjoint(event.candidates):
                continue
            grouped[listener.tell].append(event)
            if isinstance(event, NewTokens) and event.finish_reason is not None:
                self._note_end(event.sequence_id, event.candidate)
            if isinstance(event, Failed) and event.sequence_id not in self._held:
                del self._listeners[event.sequence_id]
        return grouped

    def _note_end(self, sequence_id: SequenceId, candidate: int) -> None:
        listener = self._listeners.get(sequence_id)
        if listener is None:
            return
        listener.candidates.discard(candidate)
        if not listener.candidates and sequence_id not in self._held:
            del self._listeners[sequence_id]

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        listeners, self._listeners = self._listeners, {}
        self._held.clear()
        for sequence_id, listener in listeners.items():
            _tell(listener.tell, [Failed(sequence_id, _dead())])
        self._on_failure(error)


def _tell(sink: Sink, events: Sequence[Event]) -> None:
    """A sink that raises is a bug of its owner; the others must hear of their sequences all the same."""
    try:
        sink(events)
    except Exception:
        log.exception("sink_failed", num_events=len(events))


def _dead() -> EngineFailedError:
    return EngineFailedError("the worker's engine has failed; this is a bug, see the worker's log")
