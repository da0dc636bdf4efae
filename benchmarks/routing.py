"""`./run bench routing`: the placement policies side by side, on simulated workers and on a real 2P2D cluster of fake runners."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.routing_real import run_real
from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import load_cost
from benchmarks.simulator.options import say, write_json
from benchmarks.simulator.records import RequestRecord, Result
from benchmarks.simulator.report import report
from benchmarks.simulator.slo import percentile
from benchmarks.simulator.spec import ClusterSpec
from benchmarks.simulator.traffic import made_up
from paceline.launcher.config import Topology
from paceline.launcher.models import DEFAULT_MODEL, resolve_model
from router.policies import POLICIES, PlacementPolicy

# By the prefix of their keys. Together the beginnings of the first take several times what one worker's cache holds.
_TRACES = {
    "": "zipf:requests={requests},rate=36,prompt=64,output=32,system=768,prefixes=96,seed=7",
    "chat_": "chat:requests={requests},rate=36,prompt=96,output=48,system=64,turns=6,seed=7",
}
_REAL_TRACE = "zipf:requests={requests},rate=8,prompt=64,output=16,system=512,prefixes=64,seed=7"
_KV_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one trace. The load of a worker is the time that its steps took; the spread is that of the less even tier."""

    hit_ratio: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    max_over_mean_load: float
    local_share: float
    finished_share: float


def main(argv: Sequence[str]) -> int:
    """Runs every policy on both traces; always 0, since no promise is broken by a number."""
    parser = argparse.ArgumentParser("./run bench routing", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument("--topology", default="0P8D", help="workers of each tier, xPyD (default: 0P8D)")
    parser.add_argument("--requests", type=int, default=2000, help="of each trace (default: 2000)")
    parser.add_argument(
        "--cost",
        default="textbook",
        help="textbook, linear, or the file of `./run bench fit` (default: textbook)",
    )
    parser.add_argument("--no-real", action="store_true", help="simulate only: start no processes")
    parser.add_argument(
        "--real-requests", type=int, default=240, help="of the real cluster's trace (default: 240)"
    )
    parser.add_argument(
        "--prefix-pull",
        default="auto",
        choices=("auto", "never"),
        help="whether workers of the real cluster pull what others have cached (default: auto, as they do)",
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="whose tokenizer the real cluster has (default: the default model)",
    )
    args = parser.parse_args(argv)
    cost, topology = load_cost(args.cost), Topology.parse(args.topology)
    found: dict[str, Any] = {"topology": str(topology), "cost_model": cost.name}
    for prefix, text in _TRACES.items():
        trace = made_up(text.format(requests=args.requests))
        print(f"{trace.name} on {topology}, simulated\n{_HEAD}")
        for policy in POLICIES:
            say(f"simulating {policy}")
            spec = ClusterSpec(topology, num_kv_tokens=_KV_TOKENS, placement=policy)
            row = row_of_simulation(simulate(trace, spec, cost))
            print(_line(policy, row))
            found |= _keys(prefix, policy, row)
    if not args.no_real:
        model = args.model or resolve_model(DEFAULT_MODEL.name, say)
        found |= _real(model, args.real_requests, args.prefix_pull)
    write_json(args.json, found)
    return 0


def _real(model: Path, num_requests: int, prefix_pull: str) -> dict[str, float]:
    """The section of the real cluster; its keys begin with `real_`."""
    trace, found = made_up(_REAL_TRACE.format(requests=num_requests)), dict[str, float]()
    print(f"{trace.name} on 2P2D, real processes with fake runners, pulls: {prefix_pull}\n{_HEAD}")
    for policy in POLICIES:
        say(f"running {policy}")
        records, steps = run_real(policy, trace, model, prefix_pull)
        row = _row(Result(tuple(records), (), ()), steps)
        print(_line(policy, row))
        found |= _keys("real_", policy, row) | _predicted(policy, records)
    return found


def _predicted(policy: PlacementPolicy, records: Sequence[RequestRecord]) -> dict[str, float]:
    """How far what the router predicted was from the time to first token of each request for which it predicted one."""
    told = [(each.ttft_s, each.predicted_ttft_s) for each in records if each.predicted_ttft_s is not None]
    errors_ms = [1e3 * abs(predicted_s - ttft_s) for ttft_s, predicted_s in told]
    p50_ms, p95_ms = percentile(errors_ms, 0.5), percentile(errors_ms, 0.95)
    share = len(told) / len(records)
    print(f"{'':<18}TTFT was predicted for {share:.0%}, and off by {p50_ms:.1f} ms, p95 {p95_ms:.1f} ms")
    name = f"real_{policy.replace('-', '_')}_prediction"
    return {f"{name}_error_p50_ms": p50_ms, f"{name}_error_p95_ms": p95_ms, f"{name}_share": share}


def row_of_simulation(result: Result) -> Row:
    """What came of a simulated run."""
    busy_s = dict.fromkeys((worker.worker for worker in result.workers), 0.0)
    for step in result.steps:
        busy_s[step.worker] += step.end_s - step.start_s
    return _row(result, busy_s)


def _row(result: Result, loads: Mapping[str, float]) -> Row:
    numbers = report(result)
    return Row(
        hit_ratio=numbers.cache_hit_share,
        ttft_p50_ms=1e3 * numbers.ttft_s.p50,
        ttft_p95_ms=1e3 * numbers.ttft_s.p95,
        max_over_mean_load=_max_over_mean(loads),
        local_share=numbers.mode_shares.get("local", 0.0),
        finished_share=numbers.num_finished / numbers.num_requests,
    )


def _max_over_mean(loads: Mapping[str, float]) -> float:
    tiers: dict[str, list[float]] = {}
    for worker, load in loads.items():
        tiers.setdefault(worker.partition("-")[0], []).append(load)
    return max(max(each) * len(each) / sum(each) for each in tiers.values() if sum(each))


_HEAD = f"{'policy':<18}{'hits':>8}{'TTFT p50':>12}{'p95':>12}{'max/mean':>10}{'local':>8}{'finished':>10}"


def _line(policy: str, row: Row) -> str:
    return (
        f"{policy:<18}{row.hit_ratio:>8.1%}{row.ttft_p50_ms:>9.1f} ms{row.ttft_p95_ms:>9.1f} ms"
        f"{row.max_over_mean_load:>10.2f}{row.local_share:>8.0%}{row.finished_share:>10.1%}"
    )


def _keys(prefix: str, policy: PlacementPolicy, row: Row) -> dict[str, float]:
    """For `--json`: the plain keys are of the shared prefixes, `chat_` of the conversations, `real_` of the real cluster."""
    name = f"{prefix}{policy.replace('-', '_')}"
    return {
        f"{name}_hit_ratio": row.hit_ratio,
        f"{name}_ttft_p50_ms": row.ttft_p50_ms,
        f"{name}_ttft_p95_ms": row.ttft_p95_ms,
        f"{name}_max_over_mean_load": row.max_over_mean_load,
        f"{name}_finished_share": row.finished_share,
    }
