"""The workloads of `./run bench scheduling`: requests of given lengths on one simulated worker. Plain data, no measuring."""

import random
from collections.abc import Iterable
from typing import Any

from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace, TraceRequest
from paceline.core.request import Priority

NUM_KV_TOKENS = 9_600
# The issue of continuous batching: 20 requests that are all there at once.
_SEED = 42


def one_worker(num_kv_tokens: int = NUM_KV_TOKENS, **settings: Any) -> ClusterSpec:
    """A worker that computes its own prompts."""
    return ClusterSpec(decode=scheduler_config(**settings), num_kv_tokens=num_kv_tokens, disaggregate="never")


def trace_of(name: str, requests: Iterable[TraceRequest]) -> Trace:
    """In the order of their arrival."""
    return Trace(name, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def waste_trace() -> Trace:
    """Outputs of 20, 50, 200 and 800 tokens."""
    return trace_of("waste", [TraceRequest(0.0, 10, num_output) for num_output in (20, 50, 200, 800)])


def batching_trace() -> Trace:
    """20 requests, prompts of 10 to 100 tokens, outputs of 20 to 200."""
    rng = random.Random(_SEED)  # noqa: S311 - to be drawn again, no secret
    requests = [TraceRequest(0.0, rng.randint(10, 100), rng.randint(20, 200)) for _ in range(20)]
    return trace_of("batching", requests)


def poisson(
    rate: float,
    num_requests: int,
    *,
    prompt: tuple[int, int],
    output: tuple[int, int],
    seed: int = 1,
    start_s: float = 0.0,
    priority: Priority = Priority.STANDARD,
) -> list[TraceRequest]:
    """Requests of lengths drawn evenly, so many a second."""
    rng, now_s, requests = random.Random(seed), start_s, []  # noqa: S311 - to be drawn again, no secret
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        lengths = rng.randint(*prompt), rng.randint(*output)
        requests.append(TraceRequest(now_s, *lengths, priority=priority))
    return requests


def load_trace_at(rate: float, num_requests: int) -> Trace:
    """Prompts of 50 to 300 tokens, outputs of 20 to 400: the pool holds some 25 of them."""
    return trace_of(f"{rate:g}/s", poisson(rate, num_requests, prompt=(50, 300), output=(20, 400)))


def head_of_line_trace(*, with_long: bool) -> Trace:
    """Fifty short requests within 50 ms, and a prompt of 4,096 tokens in the middle of them."""
    rng = random.Random(_SEED)  # noqa: S311 - to be drawn again, no secret
    short = [TraceRequest(0.001 * n, rng.randint(30, 120), rng.randint(10, 60)) for n in range(50)]
    return trace_of("head of the line", [*short, TraceRequest(0.0255, 4096, 32)] if with_long else short)


def fast_lane_trace(normal_rate: float, duration_s: float) -> Trace:
    """Three short requests a second beside prompts of 400 to 1,200 tokens, which saturate a worker at about four a second."""
    short = poisson(3.0, int(3 * duration_s), prompt=(30, 100), output=(10, 40), seed=2)
    normal = poisson(normal_rate, int(normal_rate * duration_s), prompt=(400, 1200), output=(50, 200))
    return trace_of("fast lane", [*short, *normal])


def is_short(request: TraceRequest) -> bool:
    """Whether it is one of the short ones of the traces above."""
    return request.num_prompt_tokens <= 120
