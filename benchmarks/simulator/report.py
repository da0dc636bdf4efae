"""Numbers out of a result: what users felt, and what the workers did for it."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.simulator.records import Result, StepRecord
from benchmarks.simulator.slo import Slo, goodput, percentile

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of one kind of duration, in seconds; nan where there were none."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        """Those of some values."""
        ordered = sorted(values)
        return cls(*(percentile(ordered, share) for share in SHARES.values()))


@dataclass(frozen=True, slots=True)
class Report:
    """One run in numbers. Shares are between 0 and 1; `goodput` is None without an SLO.

    `slot_use` is the share, over the time of all steps, of the seats that could be used: sequences in the step over those
    that were there, or `max_num_seqs` if that is less. `recomputed_share` is of all computed tokens.
    """

    num_requests: int
    num_finished: int
    num_refused: int
    num_failed: int
    duration_s: float
    ttft_s: Quantiles
    itl_s: Quantiles
    tpot_s: Quantiles
    goodput: float | None
    slo_share: float | None
    output_tokens_per_s: float
    requests_per_s: float
    num_preemptions: int
    preempted_request_share: float
    recomputed_share: float
    cache_hit_share: float
    slot_use: float
    busy_share: dict[str, float]
    mode_shares: dict[str, float]

    def meets(self, slo: Slo) -> bool:
        """Whether p95 of both is within the bound and nobody was turned away."""
        is_served = self.num_finished == self.num_requests
        return is_served and self.ttft_s.p95 <= slo.ttft_s and not self.itl_s.p95 > slo.itl_s


def report(result: Result, slo: Slo | None = None) -> Report:
    """Adds a result up."""
    finished, requests = result.finished, result.requests
    modes = Counter(record.mode for record in requests)
    num_prompt_tokens = sum(record.request.num_prompt_tokens for record in finished)
    num_cached_tokens = sum(record.num_cached_tokens for record in finished)
    end_s = result.end_s
    return Report(
        num_requests=len(requests),
        num_finished=len(finished),
        num_refused=modes["refused"],
        num_failed=modes["failed"],
        duration_s=end_s,
        ttft_s=Quantiles.of([record.ttft_s for record in finished]),
        itl_s=Quantiles.of([gap for record in finished for gap in record.itls_s]),
        tpot_s=Quantiles.of([record.tpot_s for record in finished if record.tpot_s is not None]),
        goodput=None if slo is None else goodput(result, slo),
        slo_share=None if slo is None else sum(map(slo.is_met_by, requests)) / len(requests),
        output_tokens_per_s=_per(sum(len(record.token_times_s) for record in finished), end_s),
        requests_per_s=_per(len(finished), end_s),
        num_preemptions=sum(worker.num_preemptions for worker in result.workers),
        preempted_request_share=_per(sum(r.num_preemptions > 0 for r in requests), len(requests)),
        recomputed_share=_recomputed_share(result),
        cache_hit_share=_per(num_cached_tokens, num_prompt_tokens),
        slot_use=slot_use(result),
        busy_share={
            worker.worker: _busy_share(result.steps, worker.worker, end_s) for worker in result.workers
        },
        mode_shares={mode: _per(modes[mode], len(requests)) for mode in sorted(modes)},
    )


def slot_use(result: Result) -> float:
    """See Report."""
    max_num_seqs = {worker.worker: worker.max_num_seqs for worker in result.workers}
    used = usable = 0.0
    for step in result.steps:
        duration_s = step.end_s - step.start_s
        used += duration_s * step.work.num_sequences
        usable += duration_s * min(max_num_seqs[step.worker], max(step.num_present, step.work.num_sequences))
    return _per(used, usable)


def as_json(numbers: Report) -> dict[str, Any]:
    """For `json.dumps`: what is no number becomes null."""
    return {name: _plain(value) for name, value in asdict(numbers).items()}


def table(numbers: Report, slo: Slo | None) -> str:
    """For people."""
    return "\n".join([*_felt(numbers), *_promised(numbers, slo), *_done(numbers)])


def _felt(r: Report) -> list[str]:
    rows = {"TTFT": r.ttft_s, "ITL": r.itl_s, "TPOT": r.tpot_s}
    ends = f"({r.num_refused} refused, {r.num_failed} failed)"
    return [
        f"{r.num_finished} of {r.num_requests} requests finished in {r.duration_s:.1f} s {ends}",
        f"{'':<8}" + "".join(f"{share:>12}" for share in SHARES),
        *(
            f"{name:<8}{_ms(each.p50):>12}{_ms(each.p95):>12}{_ms(each.p99):>12}"
            for name, each in rows.items()
        ),
        f"throughput       {r.output_tokens_per_s:10.1f} output tokens/s, {r.requests_per_s:.2f} requests/s",
    ]


def _promised(r: Report, slo: Slo | None) -> list[str]:
    if slo is None:
        return []
    return [f"goodput          {r.goodput:10.2f} requests/s within {slo} ({r.slo_share:.1%} of all)"]


def _done(r: Report) -> list[str]:
    preempted = f"of {r.preempted_request_share:.1%} of the requests"
    return [
        f"preemptions      {r.num_preemptions:10d} {preempted}; {r.recomputed_share:.1%} of all tokens computed again",
        f"cache hits       {r.cache_hit_share:10.1%} of the prompt tokens",
        f"slot use         {r.slot_use:10.1%} of the seats that sequences were there for",
        "workers busy     " + ", ".join(f"{worker} {share:.0%}" for worker, share in r.busy_share.items()),
        "requests         " + ", ".join(f"{mode} {share:.0%}" for mode, share in r.mode_shares.items()),
    ]


def _recomputed_share(result: Result) -> float:
    """Whatever was computed beyond each prompt's uncached rest and each output token but the last."""
    num_computed = sum(step.work.num_tokens for step in result.steps)
    num_needed = sum(
        record.request.num_prompt_tokens - record.num_cached_tokens + record.request.num_output_tokens - 1
        for record in result.finished
    )
    # Requests that failed have computed something too.
    return max(0.0, _per(num_computed - num_needed, num_computed))


def _busy_share(steps: Sequence[StepRecord], worker: str, end_s: float) -> float:
    return _per(sum(step.end_s - step.start_s for step in steps if step.worker == worker), end_s)


def _per(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f} ms"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
