"""A whole cluster on the virtual clock: requests arrive, are placed, computed, handed over and generated.

It follows `router/dispatcher.py` without its failures: here no worker is ever lost.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import assert_never

from benchmarks.simulator.agenda import Agenda
from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.decisions import DecisionLog
from benchmarks.simulator.hand_over import HandOver
from benchmarks.simulator.journey import Journey
from benchmarks.simulator.records import RequestRecord, Result
from benchmarks.simulator.routing import SimulatedRouter
from benchmarks.simulator.runner import EmptyRunner
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.trace import ANY_VOCAB_SIZE, Trace, TraceRequest, spec_of
from benchmarks.simulator.worker import SimulatedWorker
from paceline.core.errors import InvariantError, OverloadedError, PacelineError, PromptTooLongError
from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, FirstToken, SequenceId, WorkerId
from paceline.engine.engine import Runner, StepResult
from paceline.engine.events import (
    BlocksReady,
    Event,
    Failed,
    NewTokens,
    Progress,
    PromptScored,
    Recall,
    Reserved,
    Started,
)
from paceline.engine.sequence import SequenceRole
from router.forecast import forecast
from router.views import Ask

# An engine that has work and could do none of it looks again after so long (paceline/engine/async_engine.py).
_IDLE_TICK_S = 0.1
# So many looks in a row at which nobody in the cluster could do anything: nobody ever will.
_MAX_IDLE_TICKS = 10_000


def simulate(
    trace: Trace,
    spec: ClusterSpec,
    cost: CostModel,
    *,
    make_runner: Callable[[], Runner] = EmptyRunner,
    vocab_size: int = ANY_VOCAB_SIZE,
    log_decisions: bool = False,
) -> Result:
    """Runs a trace to its end. The same arguments give the same result, whatever the machine does meanwhile.

    A runner of `make_runner` may be a real one: then tokens are real, and time is still the cost model's.
    """
    cluster = SimulatedCluster(spec, cost, make_runner, vocab_size, DecisionLog() if log_decisions else None)
    return cluster.run(trace)


class SimulatedCluster:
    """Owns the workers, the router and the agenda of one run."""

    def __init__(
        self,
        spec: ClusterSpec,
        cost: CostModel,
        make_runner: Callable[[], Runner],
        vocab_size: int,
        log: DecisionLog | None,
    ) -> None:
        def worker(tier: str, index: int) -> SimulatedWorker:
            key = WorkerKey(WorkerId(f"{tier}-{index}"), BootEpoch(1))
            config = spec.prefill if tier == "prefill" else spec.decode
            return SimulatedWorker(key, config, spec, cost, make_runner(), log)

        self._spec = spec
        self._cost = cost
        self._vocab_size = vocab_size
        self._log = log
        self._agenda = Agenda()
        self._prefill = [worker("prefill", index) for index in range(spec.topology.num_prefill)]
        self._decode = [worker("decode", index) for index in range(spec.topology.num_decode)]
        self._workers = {worker.key: worker for worker in (*self._prefill, *self._decode)}
        self._router = SimulatedRouter(spec, self._prefill, self._decode)
        self._journeys: dict[SequenceId, Journey] = {}
        self._records: dict[int, RequestRecord] = {}
        self._num_idle_ticks = 0

    def run(self, trace: Trace) -> Result:
        """The trace from its first arrival to its last token."""
        self._expect(trace, 0)
        self._agenda.run()
        assert not self._journeys, "a request is neither finished nor failed"
        workers = self._workers.values()
        return Result(
            requests=tuple(self._records[number] for number in range(len(trace.requests))),
            steps=tuple(sorted((s for w in workers for s in w.steps), key=lambda step: step.start_s)),
            workers=tuple(worker.record() for worker in workers),
            decisions=tuple(self._log.lines) if self._log else (),
        )

    # -- the router's part

    def _expect(self, trace: Trace, number: int) -> None:
        """One arrival is on the agenda at a time, however long the trace is."""
        if number < len(trace.requests):
            arrival_s = trace.requests[number].arrival_s
            self._agenda.at(
                arrival_s + self._cost.request_overhead_s, partial(self._arrive_together, trace, number)
            )

    def _arrive_together(self, trace: Trace, number: int) -> None:
        """All that come at the same time are there before any worker looks."""
        arrival_s = trace.requests[number].arrival_s
        while number < len(trace.requests) and trace.requests[number].arrival_s == arrival_s:
            self._arrive(number, trace.requests[number])
            number += 1
        self._expect(trace, number)

    def _arrive(self, number: int, request: TraceRequest) -> None:
        leave = ExitStack()
        try:
            self._require_room(request)
            self._router.admit(leave)
            spec = spec_of(request, number, self._vocab_size)
            self._router.require_time(spec, self._agenda.now_s)
        except PacelineError as error:
            leave.close()
            self._refuse(number, request, error)
            return
        route = self._router.place(spec, self._agenda.now_s)
        predicted = forecast(Ask.of(spec), route.num_tokens, route.computing)
        assigned = self._router.assign(spec, route, leave)
        prefill = self._workers[route.prefill.key] if route.prefill else None
        journey = Journey(
            number,
            request,
            spec,
            self._workers[route.decode.key],
            prefill,
            assigned,
            None if predicted is None else predicted.ttft_s,
            leave,
            self._agenda.now_s,
        )
        self._journeys[spec.sequence_id] = journey
        role = SequenceRole.PREFILL_ONLY if prefill else SequenceRole.GENERATE
        worker = prefill or journey.decode
        worker.add(spec, role)
        self._call(worker)

    def _refuse(self, number: int, request: TraceRequest, error: PacelineError) -> None:
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else None
        self._records[number] = RequestRecord(
            number, request, "refused", (), reason=error.reason, retry_after_s=retry_after_s
        )

    def _require_room(self, request: TraceRequest) -> None:
        limit = self._spec.num_blocks * self._spec.block_size
        given = request.num_prompt_tokens + request.num_output_tokens
        if given > limit:
            raise PromptTooLongError(limit=limit, given=given, unit="tokens")

    # -- the workers' turns

    def _call(self, worker: SimulatedWorker) -> None:
        """Lets a worker look at its inbox, after all else that happens now; a busy one looks when its step is over."""
        if not worker.is_busy and not worker.is_called:
            worker.is_called = True
            self._agenda.at(self._agenda.now_s, partial(self._turn, worker))

    def _call_later(self, worker: SimulatedWorker) -> None:
        """An engine that could do nothing looks again, since time alone may change what it can do."""
        self._num_idle_ticks += 1
        if self._num_idle_ticks > _MAX_IDLE_TICKS:
            raise InvariantError(f"{len(self._journeys)} requests wait, and no worker can do anything")
        if not worker.is_ticking:
            worker.is_ticking = True
            self._agenda.at(self._agenda.now_s + _IDLE_TICK_S, partial(self._tick, worker))

    def _tick(self, worker: SimulatedWorker) -> None:
        worker.is_ticking = False
        self._call(worker)

    def _turn(self, worker: SimulatedWorker) -> None:
        worker.is_called = False
        if worker.is_busy or not worker.has_work:
            return
        stepped = worker.step(self._agenda.now_s)
        if not stepped.result.idle:
            self._num_idle_ticks = 0
            worker.is_busy = True
            self._agenda.at(stepped.end_s, partial(self._end_step, worker, stepped.result))
            return
        self._deliver(worker, stepped.result)
        if worker.has_work:
            self._call_later(worker)

    def _end_step(self, worker: SimulatedWorker, result: StepResult) -> None:
        worker.is_busy = False
        self._deliver(worker, result)
        # What else happens now comes before its next step; mostly nothing does.
        if self._agenda.is_quiet:
            self._turn(worker)
        else:
            self._call(worker)

    def _deliver(self, worker: SimulatedWorker, result: StepResult) -> None:
        self._router.note_changes(worker.key, result.changes)
        for event in result.events:
            journey = self._journeys.get(event.sequence_id)
            # Of one that is over, the last events of its prefill worker may still come.
            if journey is not None:
                self._take(worker, journey, event)

    def _take(self, worker: SimulatedWorker, journey: Journey, event: Event) -> None:
        match event:
            case NewTokens():
                self._take_token(worker, journey, event)
            case Started():
                self._take_start(worker, journey, event)
            case BlocksReady():
                journey.assigned.note_progress(event.num_computed_tokens)
                _of(journey).ready.append((self._agenda.now_s, event.blocks))
            case Progress():
                pass  # as in the dispatcher: it counts whole until it is computed
            case Reserved():
                _of(journey).reserve(self._agenda.now_s, event.block_ids, event.num_held)
                self._try_hand_over(journey)
            case Failed():
                self._end(journey, event.error.reason)
            case PromptScored():
                raise AssertionError("no request of a trace asks for log probabilities")
            case Recall():
                raise AssertionError("no simulated worker may recall; see ClusterSpec")
            case _:
                assert_never(event)

    def _take_token(self, worker: SimulatedWorker, journey: Journey, event: NewTokens) -> None:
        if not journey.token_times_s:
            journey.assigned.prompt_done()
        journey.token_times_s.append(self._agenda.now_s + self._cost.token_overhead_s)
        journey.num_preemptions = event.num_preemptions
        if event.finish_reason is not None:
            self._end(journey)
        elif worker is journey.prefill:
            worker.note_end(journey.sequence_id)
            hand_over = _of(journey)
            hand_over.complete_s = self._agenda.now_s
            hand_over.first_token = FirstToken(event.token_ids[0])
            self._try_hand_over(journey)

    def _take_start(self, worker: SimulatedWorker, journey: Journey, event: Started) -> None:
        if worker is journey.prefill:
            journey.hand_over = HandOver()
            journey.decode.add(journey.spec_at(self._agenda.now_s), SequenceRole.AWAIT_KV)
            self._call(journey.decode)
        journey.num_cached_tokens = event.num_cached_tokens

    def _end(self, journey: Journey, reason: str = "") -> None:
        """Its last token has come, or it has failed: nobody holds anything of it any more."""
        for worker in (journey.prefill, journey.decode):
            if worker is not None:
                worker.release(journey.sequence_id)
                self._call(worker)
        journey.leave.close()
        del self._journeys[journey.sequence_id]
        self._records[journey.number] = journey.record(reason)

    # -- the hand-over

    def _try_hand_over(self, journey: Journey) -> None:
        hand_over = _of(journey)
        if hand_over.is_ready:
            block_bytes = self._cost.kv_bytes_per_token * self._spec.block_size
            end_s = max(self._agenda.now_s, hand_over.end_s(self._cost, block_bytes))
            self._agenda.at(end_s, partial(self._commit, journey))

    def _commit(self, journey: Journey) -> None:
        """The blocks have arrived: the decode worker goes on, the prefill worker lets go."""
        if journey.sequence_id not in self._journeys:
            return
        hand_over, source = _of(journey), journey.prefill
        first_token = hand_over.first_token
        assert source is not None and first_token is not None
        # At once: the owner's blocks are another's as soon as they are released.
        hand_over.copy(source.memory, journey.decode.memory)
        journey.decode.command(lambda engine: engine.commit(journey.sequence_id, [first_token]))
        self._call(journey.decode)
        source.release(journey.sequence_id)
        self._call(source)


def _of(journey: Journey) -> HandOver:
    assert journey.hand_over is not None, "a hand-over begins with Started"
    return journey.hand_over
