"""The life of one request, noted as it happens and reported once, at its end."""

from dataclasses import dataclass, field

from paceline.core.clock import Clock, monotonic
from paceline.v1 import decode_pb2, inference_pb2, prefill_pb2
from router.forecast import Forecast


@dataclass(slots=True)
class RequestTimeline:
    """Seconds on the router's clock, and what the workers said about their part."""

    clock: Clock = monotonic
    received_s: float = field(init=False)
    dispatched_s: float | None = None
    # From the arrival; None where the worker has not said how fast it is.
    predicted_ttft_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    worker_queue_s: float = 0.0
    transfer_s: float = 0.0
    # Of each candidate, on the worker that has it now.
    num_preemptions: dict[int, int] = field(default_factory=dict)
    kv_bytes: int = 0
    kv_blocks: int = 0
    prefix_bytes: int = 0
    prefix_blocks: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_attempts: int = 0

    def __post_init__(self) -> None:
        self.received_s = self.clock()

    def note_dispatch(self, predicted: Forecast | None = None) -> None:
        """An attempt begins. Only of the first one a prediction counts."""
        self.num_attempts += 1
        if self.dispatched_s is None:
            self.dispatched_s = self.clock()
            if predicted is not None:
                self.predicted_ttft_s = self.dispatched_s - self.received_s + predicted.ttft_s

    def note_started(self, started: prefill_pb2.PrefillStarted | decode_pb2.SequenceStarted) -> None:
        """A worker computes the prompt: how long the request waited there, and what has come from another one's cache.

        After the first token that wait is a part of the decode.
        """
        if self.first_token_s is None:
            self.worker_queue_s += started.queued_s
        self.prefix_blocks += started.num_pulled_blocks
        self.prefix_bytes += started.num_pulled_bytes

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token; None before it."""
        return None if self.first_token_s is None else self.first_token_s - self.received_s

    def note_tokens(self) -> None:
        """Tokens have come."""
        self.last_token_s = self.clock()
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s

    def note_preemptions(self, candidate: int, num_preemptions: int) -> None:
        """How often a candidate has been preempted where it is now."""
        self.num_preemptions[candidate] = num_preemptions

    def note_transfer(self, num_blocks: int, num_bytes: int, duration_s: float) -> None:
        """A hand-over is complete."""
        self.kv_blocks += num_blocks
        self.kv_bytes += num_bytes
        self.transfer_s += duration_s

    def to_proto(self) -> inference_pb2.Timeline:
        """The public form."""
        dispatched_s = _first(self.dispatched_s, self.received_s)
        first_s = _first(self.first_token_s, dispatched_s)
        return inference_pb2.Timeline(
            queued_s=dispatched_s - self.received_s + self.worker_queue_s,
            prefill_s=max(0.0, first_s - dispatched_s - self.worker_queue_s),
            transfer_s=self.transfer_s,
            decode_s=_first(self.last_token_s, first_s) - first_s,
            preemptions=sum(self.num_preemptions.values()),
            kv_bytes=self.kv_bytes,
            kv_blocks=self.kv_blocks,
            prefix_bytes=self.prefix_bytes,
            prefix_blocks=self.prefix_blocks,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            attempts=self.num_attempts,
            predicted_ttft_s=self.predicted_ttft_s,
        )


def _first(time_s: float | None, otherwise_s: float) -> float:
    return otherwise_s if time_s is None else time_s
