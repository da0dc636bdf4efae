"""One request on its way through a simulated cluster."""

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from benchmarks.simulator.hand_over import HandOver
from benchmarks.simulator.records import Mode, RequestRecord
from benchmarks.simulator.trace import TraceRequest
from benchmarks.simulator.worker import SimulatedWorker
from paceline.core.request import SequenceId, SequenceSpec
from router.assignments import Assigned


@dataclass(slots=True, eq=False)
class Journey:
    """Changes until its end; then `record` says what came of it. `leave` gives back what the router holds for it."""

    number: int
    request: TraceRequest
    spec: SequenceSpec
    decode: SimulatedWorker
    # None: the decode worker computes the prompt itself.
    prefill: SimulatedWorker | None
    assigned: Assigned
    predicted_ttft_s: float | None
    leave: ExitStack
    # When the router sent it off.
    started_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    hand_over: HandOver | None = None

    @property
    def sequence_id(self) -> SequenceId:
        """What the workers call it."""
        return self.spec.sequence_id

    def spec_at(self, now_s: float) -> SequenceSpec:
        """What is sent later than its beginning: the same, with less time left."""
        budget_s = self.spec.time_budget_s
        if budget_s is None:
            return self.spec
        return replace(self.spec, time_budget_s=max(0.0, self.started_s + budget_s - now_s))

    def record(self, reason: str = "") -> RequestRecord:
        """What came of it; a reason means that it failed."""
        mode: Mode = "local" if self.prefill is None else "disaggregated"
        return RequestRecord(
            number=self.number,
            request=self.request,
            mode="failed" if reason else mode,
            token_times_s=tuple(self.token_times_s),
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            prefill_worker="" if self.prefill is None else self.prefill.name,
            decode_worker=self.decode.name,
            reason=reason,
            predicted_ttft_s=self.predicted_ttft_s,
        )
