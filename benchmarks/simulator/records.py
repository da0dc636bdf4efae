"""What a simulation says: of each request, of each step, and of the whole. Plain frozen values."""

import itertools
from dataclasses import dataclass
from typing import Literal

from benchmarks.simulator.cost import StepWork
from benchmarks.simulator.trace import TraceRequest

# "refused": the door took nothing more. "failed": it was taken and did not end well.
Mode = Literal["local", "disaggregated", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's life, as its client sees it. Times are seconds on the trace's clock."""

    number: int
    request: TraceRequest
    mode: Mode
    token_times_s: tuple[float, ...]
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    # Why it was refused or failed.
    reason: str = ""
    # What the router predicted when it was placed; None where nothing was known.
    predicted_ttft_s: float | None = None
    # When one that was refused may come again, in seconds from its arrival.
    retry_after_s: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether every token came."""
        return len(self.token_times_s) == self.request.num_output_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token; of finished requests only."""
        return self.token_times_s[0] - self.request.arrival_s

    @property
    def itls_s(self) -> list[float]:
        """The gaps between its tokens."""
        times = self.token_times_s
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one worker. `num_present` counts the sequences that it had, running and waiting, when it began."""

    worker: str
    start_s: float
    end_s: float
    work: StepWork
    num_present: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker, over the whole run."""

    worker: str
    max_num_seqs: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    num_evictions: int


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one trace on one cluster. `decisions` is empty unless it was asked for."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[StepRecord, ...]
    workers: tuple[WorkerRecord, ...]
    decisions: tuple[str, ...] = ()

    @property
    def finished(self) -> list[RequestRecord]:
        """The requests that got every token."""
        return [record for record in self.requests if record.is_finished]

    @property
    def end_s(self) -> float:
        """When the last token came."""
        return max((record.token_times_s[-1] for record in self.finished), default=0.0)
