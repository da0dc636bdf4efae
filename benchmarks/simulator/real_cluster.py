"""A real cluster of processes under a trace, through the client: what a simulation of several workers is measured against.

Its workers run the fake runner, whose every step takes one time whatever else the machine does: what is compared is everything
else, the router, the hand-over and who waits for whom.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.simulator.cost import CostModel
from benchmarks.simulator.records import Mode, RequestRecord
from benchmarks.simulator.trace import Trace, TraceRequest, prompt_ids
from paceline.client import PacelineClient
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import Topology, UpConfig
from paceline.v1 import inference_pb2

# As long as steps of the default model on a small machine.
_STEP_S = 0.04
_NUM_PROBES = 15
# Of the probes: what an idle cluster computes on the decode worker, and what it hands over. Their own tokens only.
_SHORT, _LONG = 12, 100


@asynccontextmanager
async def fake_cluster(topology: Topology, model: Path, step_s: float) -> AsyncIterator[PacelineClient]:
    """A client of a cluster that serves `model` without weights."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "paceline.toml"
        file.write_text(
            "".join(f"[{tier}]\nfake_step_ms = {step_s * 1e3}\n" for tier in ("prefill", "decode"))
        )
        config = UpConfig(config=str(file), topology=str(topology), runner="fake", port=0)
        async with LocalCluster(config, model) as local, PacelineClient(local.address) as client:
            yield client


async def probe(client: PacelineClient, vocab_size: int, num_probes: int) -> CostModel:
    """What a step, a hand-over and the way to the client and back take when nobody else is there: medians."""
    short = [await _probe(client, number, _SHORT, vocab_size) for number in range(num_probes)]
    long = [await _probe(client, num_probes + number, _LONG, vocab_size) for number in range(num_probes)]
    # The first gap of the long ones has the hand-over in it.
    step_s = statistics.median(gap for record in (*short, *long) for gap in record.itls_s[1:])
    hand_over_s = statistics.median(record.itls_s[0] for record in long) - step_s
    outside_s = statistics.median(record.ttft_s for record in (*short, *long)) - step_s
    return CostModel(
        "fake runner",
        base_s=step_s,
        decode_s=0.0,
        chunk_token_s=0.0,
        transfer_latency_s=max(0.0, hand_over_s / 2),
        request_overhead_s=max(0.0, outside_s),
    )


def probe_cluster(topology: Topology, model: Path, vocab_size: int) -> CostModel:
    """The same, of a cluster that is started for it and stopped again."""

    async def probed() -> CostModel:
        async with fake_cluster(topology, model, _STEP_S) as client:
            return await probe(client, vocab_size, _NUM_PROBES)

    return asyncio.run(probed())


def compare_on_cluster(
    trace: Trace, topology: Topology, model: Path, vocab_size: int, num_probes: int = _NUM_PROBES
) -> tuple[list[RequestRecord], CostModel]:
    """A real run, and what a step and the ways between the processes took right before it."""

    async def compared() -> tuple[list[RequestRecord], CostModel]:
        async with fake_cluster(topology, model, _STEP_S) as client:
            cost = await probe(client, vocab_size, num_probes)
            return await run_on_cluster(trace, client, vocab_size), cost

    return asyncio.run(compared())


async def run_on_cluster(trace: Trace, client: PacelineClient, vocab_size: int) -> list[RequestRecord]:
    """The trace in real time."""
    start_s = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_request(client, number, request, vocab_size, start_s))
            for number, request in enumerate(trace.requests)
        ]
    return [task.result() for task in tasks]


async def _probe(client: PacelineClient, number: int, num_tokens: int, vocab_size: int) -> RequestRecord:
    # Numbers that no trace has: what a probe leaves in a cache is nobody's prefix.
    request = TraceRequest(0.0, num_tokens, 6)
    return await _request(client, 1_000_000 + number, request, vocab_size, time.perf_counter())


async def _request(
    client: PacelineClient, number: int, request: TraceRequest, vocab_size: int, start_s: float
) -> RequestRecord:
    ids = prompt_ids(request, number, vocab_size)
    await asyncio.sleep(start_s + request.arrival_s - time.perf_counter())
    times: list[float] = []
    accepted, done, finish = inference_pb2.Accepted(), inference_pb2.PrefillDone(), inference_pb2.Finish()
    options = {"temperature": 0.0, "max_tokens": request.num_output_tokens, "ignore_eos": True}
    async for event in client.generate(ids, **options):  # type: ignore[arg-type] # each has its option's type
        accepted.MergeFrom(event.accepted)
        done.MergeFrom(event.prefill_done)
        finish.MergeFrom(event.finish)
        times += [time.perf_counter() - start_s] * len(event.delta.token_ids)
    is_local = accepted.mode == inference_pb2.MODE_LOCAL
    mode: Mode = "local" if is_local else "disaggregated"
    is_predicted = finish.timeline.HasField("predicted_ttft_s")
    return RequestRecord(
        number,
        request,
        mode,
        tuple(times),
        num_cached_tokens=done.cached_tokens,
        predicted_ttft_s=finish.timeline.predicted_ttft_s if is_predicted else None,
    )
