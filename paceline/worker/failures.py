"""What a worker refuses or gives up, told in its log and counted: its router hears of it, and so should whoever looks after it."""

from prometheus_client import CollectorRegistry

from paceline.core import errors
from paceline.core.request import SequenceId
from paceline.runtime import metrics
from paceline.runtime.log import get_logger
from paceline.runtime.metrics import counter

# What may become of a sequence here: there from the start, so that the first one is seen as a change.
_REASONS = tuple(
    error.reason
    for error in (
        errors.QueueFullError,
        errors.DrainingError,
        errors.DeadlineError,
        errors.FingerprintMismatchError,
        errors.KvLostError,
        errors.LeaseExpiredError,
        errors.KvChecksumError,
        errors.EngineFailedError,
        errors.InvariantError,
    )
)

# Longer than the name of any request; what is refused may have another one.
_MAX_NAME = 64

log = get_logger()


class SequenceFailures:
    """One worker's. Whoever tells a router of a failure notes it here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = counter(metrics.SEQUENCES_FAILED, registry)
        for reason in _REASONS:
            self._counter.labels(reason)

    def note(self, sequence_id: SequenceId, error: errors.PacelineError) -> None:
        """A sequence was not taken, or has ended by an error."""
        self._counter.labels(error.reason).inc()
        log.info(
            "sequence_failed",
            request_id=sequence_id.request_id[:_MAX_NAME],
            attempt=sequence_id.attempt,
            reason=error.reason,
            error=str(error),
        )
