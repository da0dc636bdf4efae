"""Everything that can go wrong, as one tree; each class has the reason that goes on the wire and carries its facts.

    PacelineError
    ├── InvalidRequestError        the caller's mistake; nothing was computed
    │   ├── BadPromptError             BAD_PROMPT
    │   ├── PromptTooLongError         PROMPT_TOO_LONG
    │   ├── BadSamplingError           BAD_SAMPLING
    │   ├── BadStopError               BAD_STOP
    │   └── BadFieldError              BAD_FIELD: a label of the request is too long
    ├── NotBuiltError              NOT_BUILT: a field whose feature does not exist yet
    ├── AccessError                who asks may not have this; nothing was computed
    │   ├── TenantUnknownError         TENANT_UNKNOWN: no API key, or one that nobody has
    │   ├── PeerUnknownError           PEER_UNKNOWN: a call to a worker from outside of its cluster
    │   └── ScopeForbiddenError        SCOPE_FORBIDDEN: more than the tenant may ask for; a retry does not help
    ├── OverloadedError            come back later; carries retry_after_s
    │   ├── QueueFullError             QUEUE_FULL
    │   ├── RateLimitedError           RATE_LIMITED: retry_after_s is exact
    │   └── SlowConsumerError          SLOW_CONSUMER
    ├── UnavailableError           nobody can serve this now
    │   ├── NoEndpointError            NO_ENDPOINT
    │   ├── DrainingError              DRAINING
    │   ├── PeerLostError              PEER_LOST
    │   └── EngineFailedError          ENGINE_FAILED: a worker is about to end
    ├── DeadlineError              DEADLINE_EXCEEDED, with the phase
    ├── CancelledRequestError      CANCELLED: the caller left; not a failure
    ├── FingerprintMismatchError   FINGERPRINT_MISMATCH, naming the field
    ├── KvError                    a hand-over failed; recovered under a new attempt
    │   ├── KvLostError                KV_LOST
    │   ├── LeaseExpiredError          LEASE_EXPIRED
    │   └── KvChecksumError            KV_CHECKSUM
    ├── UnsupportedModelError      ARCHITECTURE_UNSUPPORTED: refused at start
    ├── InvariantError             INVARIANT: our own bug
    ├── ConfigError                CONFIG: a setting that cannot work; ends the process at start
    └── ProcessLostError           START: a process of a local cluster does not come up, or not back

Only `paceline/runtime/grpc_status.py` knows which gRPC code each one becomes.
"""

from typing import ClassVar


class PacelineError(Exception):
    """The root. `str(error)` says what happened and what to do, in one sentence; it never holds prompt text."""

    reason: ClassVar[str] = "INVARIANT"

    def facts(self) -> dict[str, str]:
        """What goes into ErrorInfo.metadata."""
        return {}


class InvalidRequestError(PacelineError):
    """The request cannot be served as it is."""


class BadPromptError(InvalidRequestError):
    """The prompt is empty, not text, holds an unknown role or token id, or is said to begin with a prefix that nobody knows."""

    reason = "BAD_PROMPT"


class PromptTooLongError(InvalidRequestError):
    """The prompt passes a limit; `unit` is "bytes", "tokens" or "messages"."""

    reason = "PROMPT_TOO_LONG"

    def __init__(self, *, limit: int, given: int, unit: str = "tokens") -> None:
        super().__init__(f"the prompt has {given} {unit}, and the limit is {limit}; shorten it")
        self.limit, self.given, self.unit = limit, given, unit

    def facts(self) -> dict[str, str]:
        return {"limit": str(self.limit), "given": str(self.given), "unit": self.unit}


class _FieldError(Exception):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field} {problem}")
        self.field = field

    def facts(self) -> dict[str, str]:
        return {"field": self.field}


class BadSamplingError(_FieldError, InvalidRequestError):
    """A sampling field is out of its range."""

    reason = "BAD_SAMPLING"


class BadStopError(_FieldError, InvalidRequestError):
    """A stop condition is out of its range."""

    reason = "BAD_STOP"


class BadFieldError(_FieldError, InvalidRequestError):
    """A field or metadata that has nothing to do with sampling or stopping passes a limit."""

    reason = "BAD_FIELD"


class NotBuiltError(PacelineError):
    """The field is in the contract, but what it asks for is not built yet."""

    reason = "NOT_BUILT"

    def __init__(self, field: str, meaning: str) -> None:
        super().__init__(f"{field} is not built yet ({meaning}); leave it unset")
        self.field = field

    def facts(self) -> dict[str, str]:
        return {"field": self.field}


class AccessError(PacelineError):
    """Whoever asks may not have this."""


class TenantUnknownError(AccessError):
    """There is no API key with the call, or none that a tenant has. The message never shows it."""

    reason = "TENANT_UNKNOWN"


class PeerUnknownError(AccessError):
    """A call to an internal service has not shown that it comes from its cluster."""

    reason = "PEER_UNKNOWN"


class ScopeForbiddenError(_FieldError, AccessError):
    """The tenant may never have what `field` asks for."""

    reason = "SCOPE_FORBIDDEN"


class OverloadedError(PacelineError):
    """There is no room now."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        # What comes from another process says so already.
        when = f"; try again in {retry_after_s:g} s"
        super().__init__(message.removesuffix(when) + when)
        self.retry_after_s = retry_after_s

    def facts(self) -> dict[str, str]:
        return {"retry_after_s": f"{self.retry_after_s:g}"}


class QueueFullError(OverloadedError):
    """The router holds as many requests as it may."""

    reason = "QUEUE_FULL"


class RateLimitedError(OverloadedError):
    """The tenant's rate is used up; `limit` is "requests" or "tokens". Who waits `retry_after_s` seconds, and lets nobody pass, gets in."""

    reason = "RATE_LIMITED"

    def __init__(self, limit: str, per_minute: int, *, retry_after_s: float) -> None:
        super().__init__(
            f"the tenant's rate of {per_minute} {limit} a minute is used up", retry_after_s=retry_after_s
        )
        self.limit, self.per_minute = limit, per_minute

    def facts(self) -> dict[str, str]:
        return {
            "limit": self.limit,
            "per_minute": str(self.per_minute),
            "retry_after_s": f"{self.retry_after_s:g}",
        }


class SlowConsumerError(OverloadedError):
    """The client reads more slowly than tokens come, and its buffer is full."""

    reason = "SLOW_CONSUMER"


class UnavailableError(PacelineError):
    """Nobody can serve this at the moment."""


class NoEndpointError(UnavailableError):
    """No worker of the needed tier is known."""

    reason = "NO_ENDPOINT"


class DrainingError(UnavailableError):
    """The process is shutting down and takes nothing new."""

    reason = "DRAINING"


class PeerLostError(UnavailableError):
    """A process that held part of the request is gone, and the attempts are used up."""

    reason = "PEER_LOST"


class EngineFailedError(UnavailableError):
    """The engine that held part of the request has failed, its worker ends, and the attempts are used up."""

    reason = "ENGINE_FAILED"


class DeadlineError(PacelineError):
    """The deadline passed, or is sure to; `phase` is queued, prefill, transfer or decode."""

    reason = "DEADLINE_EXCEEDED"

    def __init__(self, phase: str, problem: str = "") -> None:
        super().__init__(problem or f"the deadline passed in phase {phase}")
        self.phase = phase

    def facts(self) -> dict[str, str]:
        return {"phase": self.phase}


class CancelledRequestError(PacelineError):
    """The caller cancelled; the request's blocks are given back."""

    reason = "CANCELLED"


class FingerprintMismatchError(PacelineError):
    """Two processes do not serve the same thing; `field` says in what they differ."""

    reason = "FINGERPRINT_MISMATCH"

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field} differs: {ours} here, {theirs} there; start both with the same settings")
        self.field, self.ours, self.theirs = field, ours, theirs

    def facts(self) -> dict[str, str]:
        return {"field": self.field, "ours": self.ours, "theirs": self.theirs}


class KvError(PacelineError):
    """A hand-over failed as a whole; the request goes on under a new attempt."""


class KvLostError(KvError):
    """The blocks are gone, or nobody can say that they are not."""

    reason = "KV_LOST"


class LeaseExpiredError(KvError):
    """The lease ended before the last byte was safe."""

    reason = "LEASE_EXPIRED"


class KvChecksumError(KvError):
    """A block arrived other than it left."""

    reason = "KV_CHECKSUM"

    def __init__(self, ordinal: int) -> None:
        super().__init__(f"block {ordinal} of the hand-over does not match its checksum")
        self.ordinal = ordinal

    def facts(self) -> dict[str, str]:
        return {"ordinal": str(self.ordinal)}


class UnsupportedModelError(PacelineError):
    """This model would be served wrongly, so it is not served."""

    reason = "ARCHITECTURE_UNSUPPORTED"


class InvariantError(PacelineError):
    """Something that can only be false through our own bug."""

    reason = "INVARIANT"


class ConfigError(PacelineError):
    """A setting cannot work; the message says which and why."""

    reason = "CONFIG"


class ProcessLostError(PacelineError):
    """A process of a local cluster does not come up, or not back; `process` is its name."""

    reason = "START"

    def __init__(self, process: str, problem: str) -> None:
        super().__init__(f"{process} {problem}")
        self.process = process

    def facts(self) -> dict[str, str]:
        return {"process": self.process}
