"""What users are promised: bounds on time to first token and between tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.records import RequestRecord, Result
from paceline.core.errors import ConfigError

_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Slo:
    """A request meets it when its TTFT does, and its mean time per output token is within `itl_s`."""

    ttft_s: float
    itl_s: float

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """`ttft=800ms,itl=100ms`; raises ConfigError."""
        given = dict(part.partition("=")[::2] for part in text.split(",") if part)
        if given.keys() != {"ttft", "itl"}:
            raise ConfigError(f"--slo {text!r} is not of the form ttft=800ms,itl=100ms")
        return cls(_duration_s(given["ttft"]), _duration_s(given["itl"]))

    def is_met_by(self, record: RequestRecord) -> bool:
        """Whether this request was served as promised; one that was refused or failed was not."""
        if not record.is_finished:
            return False
        return record.ttft_s <= self.ttft_s and (record.tpot_s or 0.0) <= self.itl_s

    def __str__(self) -> str:
        return f"ttft={self.ttft_s * 1e3:g}ms,itl={self.itl_s * 1e3:g}ms"


def goodput(result: Result, slo: Slo) -> float:
    """Requests a second that were served as promised, from 0 to the last token."""
    return sum(map(slo.is_met_by, result.requests)) / result.end_s if result.end_s else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed; not a number for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _duration_s(text: str) -> float:
    digits = text.rstrip("ms")
    unit = text[len(digits) :]
    try:
        seconds = float(digits) * _UNITS[unit]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{text!r} is no duration such as 800ms or 1.5s") from error
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"the duration {text!r} must be more than 0")
    return seconds
