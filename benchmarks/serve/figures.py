"""What lives under a workload come to: one number a key."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.serve.drive import Life
from benchmarks.simulator.records import RequestRecord, Result
from benchmarks.simulator.slo import Slo, goodput, percentile

# Where a workload has them: whose first tokens, and whose later ones, are looked at.
_WAITING, _STREAMING = "long", "steady"


def figures(key: str, lives: Sequence[Life], slo: Slo | None) -> dict[str, float]:
    """Of one run; a duration of which there was none is left out."""
    result = Result(tuple(life.record for life in lives), (), ())
    num_tokens = sum(len(record.token_times_s) for record in result.requests)
    last_s = max(
        (record.token_times_s[-1] for record in result.requests if record.token_times_s), default=0.0
    )
    ttfts = [record.ttft_s for record in _finished(lives, _WAITING)]
    itls = [gap for record in _finished(lives, _STREAMING) for gap in record.itls_s]
    tpots = [each for record in _finished(lives, _STREAMING) if (each := record.tpot_s) is not None]
    numbers = {"output_tok_s": num_tokens / last_s if last_s else 0.0, "wall_s": last_s}
    if ttfts:
        numbers |= {
            "ttft_p50_ms": _ms(ttfts, 0.5),
            "ttft_p95_ms": _ms(ttfts, 0.95),
            "ttft_p99_ms": _ms(ttfts, 0.99),
        }
    if itls:
        numbers |= {
            "itl_p50_ms": _ms(itls, 0.5),
            "itl_p99_ms": _ms(itls, 0.99),
            "itl_max_ms": 1e3 * max(itls),
        }
        numbers |= {"tpot_p50_ms": _ms(tpots, 0.5)}
    if slo is not None:
        numbers["goodput_per_s"] = goodput(result, slo)
    numbers["failed"] = float(sum(not record.is_finished for record in result.requests))
    return {f"{key}_{name}": number for name, number in numbers.items()}


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each key, over the runs that have it; but of failures their sum, so that none is lost in the middle."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return {
        key: (sum if key.endswith("_failed") else statistics.median)([run[key] for run in runs if key in run])
        for key in keys
    }


def ratios(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Ours over theirs, of each key that both have; failures are no measure."""
    return {
        key: number / theirs[key]
        for key, number in ours.items()
        if theirs.get(key) and not key.endswith("_failed")
    }


def table(ours: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> str:
    """A line a key: ours, and each other server's with what ours is of it."""
    heads = f"{'':<36}{'paceline':>12}" + "".join(f"{name:>14}{'ours / it':>11}" for name in others)
    beside = [(theirs, ratios(ours, theirs)) for theirs in others.values()]
    lines = [
        f"{key:<36}{number:>12.2f}" + "".join(_cell(theirs.get(key), of.get(key)) for theirs, of in beside)
        for key, number in ours.items()
    ]
    return "\n".join([heads, *lines])


def _finished(lives: Sequence[Life], group: str) -> list[RequestRecord]:
    """Those of a group that got every token; of all, where the workload has no such group."""
    some = [life for life in lives if life.group == group] or lives
    return [life.record for life in some if life.record.is_finished]


def _ms(seconds: Sequence[float], share: float) -> float:
    return 1e3 * percentile(seconds, share)


def _cell(theirs: float | None, ratio: float | None) -> str:
    number = f"{'-':>14}" if theirs is None else f"{theirs:>14.2f}"
    return number + (f"{'':>11}" if ratio is None else f"{ratio:>11.3f}")
