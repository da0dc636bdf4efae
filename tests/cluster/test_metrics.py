"""Metrics of real processes: scraped over HTTP, before and after something has happened."""

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.client_error import PacelineRpcError
from paceline.runtime import metrics
from paceline.runtime.metrics import Metric
from tests.cluster.scraping import Scrape, Series, moved, scrape, series
from tests.cluster.support import PATIENCE_S, Cluster, fake_tokens, running_cluster
from tests.tiny_model import VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROMPT = tuple(range(40, 140))  # 6 full blocks of 16 and 4 tokens
NUM_TOKENS = 8
# Blocks that three long sequences do not fit into, and steps long enough that the others come before the first one is done.
NARROW = {"num_blocks": 24, "max_num_seqs": 4, "fake_step_ms": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """A cluster that nobody else uses, whose decode worker has little room."""
    async with running_cluster(
        tmp_path_factory.mktemp("metrics"),
        tiny_tokenizer_dir,
        sections={"decode": NARROW},
        runner="fake",
        disaggregate="always",
        max_model_len=300,
    ) as cluster:
        yield cluster


async def scrape_all(cluster: Cluster) -> dict[str, Scrape]:
    """What each process says of itself now."""
    return {process: await scrape(cluster, process) for process in ("router", "prefill-0", "decode-0")}


async def ask(cluster: Cluster, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> None:
    """One request, urgent and greedy, to its end."""
    answer = await cluster.client.generate_text(
        prompt, max_tokens=num_tokens, temperature=0, ignore_eos=True, priority="realtime"
    )
    assert answer.token_ids == fake_tokens(prompt, num_tokens, VOCAB_SIZE, None)


async def test_every_process_counts_a_request(cluster: Cluster) -> None:
    """One request moves what it must by as much as it must, under its class alone; the rest stands still."""
    before = await scrape_all(cluster)
    await ask(cluster, PROMPT)
    await cluster.until("decode-0", lambda load: load.num_running == 0)
    await cluster.until("prefill-0", lambda load: load.num_leases == 0)
    after = await scrape_all(cluster)
    expected: dict[str, dict[Series, float]] = {
        "router": {
            series("requests_total", end="length"): 1,
            series("requests_total", end="cancelled"): 0,
            series("requests_admitted_total"): 1,
            series("requests_refused_total"): 0,
            series("attempts_total", mode="disaggregated"): 1,
            series("attempts_total", mode="local"): 0,
            series("ttft_seconds_count", priority="realtime"): 1,
            series("ttft_seconds_count", priority="standard"): 0,
            series("itl_seconds_count", priority="realtime"): NUM_TOKENS - 1,
            series("tpot_seconds_count", priority="realtime"): 1,
            series("prompt_tokens_total"): len(PROMPT),
            series("cached_prompt_tokens_total"): 0,
            series("output_tokens_total"): NUM_TOKENS,
            series("index_failures_total"): 0,
        },
        "prefill-0": {
            series("scheduling_delay_seconds_count", priority="realtime"): 1,
            series("scheduling_delay_seconds_count", priority="standard"): 0,
            series("step_tokens_sum"): len(PROMPT),
            series("step_seconds_count", part="scheduler"): 1,
            series("step_seconds_count", part="runner"): 1,
            series("batch_utilisation_ratio_count", of="tokens"): 1,
            series("batch_utilisation_ratio_count", of="seats"): 1,
            series("sampled_tokens_total"): 1,
            series("admitted_tokens_total", source="computed"): len(PROMPT),
            series("admitted_tokens_total", source="cached"): 0,
            series("kv_pulled_blocks_total"): 0,
            series("kv_cached_blocks"): 6,
        },
        "decode-0": {
            series("scheduling_delay_seconds_count", priority="realtime"): 1,
            series("step_tokens_sum"): NUM_TOKENS - 1,
            series("step_sequences_sum"): NUM_TOKENS - 1,
            series("sampled_tokens_total"): NUM_TOKENS - 1,
            series("admitted_tokens_total", source="computed"): 0,
            series("kv_pulled_blocks_total"): 7,
            series("kv_transport_pulls_total", transport="shm"): 1,
            series("kv_transport_bytes_total", transport="shm"): 7 * 16 * 8,
            series("kv_transport_pulls_total", transport="grpc"): 0,
            series("kv_transport_fallbacks_total"): 0,
            series("preemptions_total", kind="recompute"): 0,
        },
    }
    for process, values in expected.items():
        found = {key: after[process][key] - before[process][key] for key in values}
        assert found == values, process
    for name, labels in (
        ("ttft_seconds_sum", {"priority": "realtime"}),
        ("tpot_seconds_sum", {"priority": "realtime"}),
    ):
        assert moved(before["router"], after["router"], name, **labels) > 0
    for part in ("scheduler", "runner"):
        assert moved(before["decode-0"], after["decode-0"], "step_seconds_sum", part=part) > 0


async def test_a_prefix_that_is_there_is_a_hit(cluster: Cluster) -> None:
    """The second request with one beginning finds its blocks, in router and worker; the first one did not."""
    prompt = tuple(range(200, 264))
    scrapes = [await scrape_all(cluster)]
    for last in (1, 2):
        await ask(cluster, (*prompt, last))
        scrapes.append(await scrape_all(cluster))
    for (before, after), hits in zip(itertools.pairwise(scrapes), (0, 64), strict=True):
        assert moved(before["router"], after["router"], "cached_prompt_tokens_total") == hits
        assert moved(before["prefill-0"], after["prefill-0"], "kv_hit_blocks_total") == hits / 16
        assert (
            moved(before["prefill-0"], after["prefill-0"], "admitted_tokens_total", source="cached") == hits
        )
        assert moved(before["router"], after["router"], "index_lookups_total") == 1


async def test_pressure_shows(cluster: Cluster) -> None:
    """More than the decode worker can hold preempts somebody and evicts what was cached; the prefill worker has room."""
    before = await scrape_all(cluster)
    prompts = [tuple(range(n, n + 60)) for n in (300, 310, 320, 330)]
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(ask(cluster, prompt, num_tokens=200))
    after = await scrape_all(cluster)
    by_kind = {
        kind: moved(before["decode-0"], after["decode-0"], "preemptions_total", kind=kind)
        for kind in ("recompute", "swap", "remote")
    }
    assert sum(by_kind.values()) > 0
    assert by_kind["swap"] == 0, "it has no room to swap"
    assert moved(before["decode-0"], after["decode-0"], "kv_shortages_total", what="growth") > 0
    assert moved(before["decode-0"], after["decode-0"], "kv_evicted_blocks_total") > 0
    assert moved(before["prefill-0"], after["prefill-0"], "kv_shortages_total", what="growth") == 0
    assert moved(before["decode-0"], after["decode-0"], "admitted_tokens_total", source="computed") == 0


async def test_what_is_refused_is_counted_by_its_reason(cluster: Cluster) -> None:
    """An error is an end like any other, and takes nothing from any worker."""
    before = await scrape_all(cluster)
    with pytest.raises(PacelineRpcError):
        await cluster.client.generate_text("hello", temperature=-1)
    with pytest.raises(PacelineRpcError):
        await cluster.client.generate_text((5,) * 400)
    after = await scrape_all(cluster)
    assert moved(before["router"], after["router"], "requests_total", end="BAD_SAMPLING") == 1
    assert moved(before["router"], after["router"], "requests_total", end="PROMPT_TOO_LONG") == 1
    assert moved(before["router"], after["router"], "ttft_seconds_count", priority="standard") == 0
    assert moved(before["prefill-0"], after["prefill-0"], "step_tokens_sum") == 0


async def test_state_is_that_of_now(cluster: Cluster) -> None:
    """While the decode worker is frozen, a request and the lease on its blocks are there; in the end they are not."""
    os.kill(cluster.local.pids["decode-0"], signal.SIGSTOP)
    try:
        asking = asyncio.create_task(ask(cluster, (1, 2, 3)))
        async with asyncio.timeout(PATIENCE_S):
            while (await scrape(cluster, "prefill-0"))[series("leases_active")] == 0:
                pass
        during = await scrape(cluster, "router")
    finally:
        os.kill(cluster.local.pids["decode-0"], signal.SIGCONT)
    await asking
    await cluster.until("decode-0", lambda load: load.num_free_blocks == NARROW["num_blocks"])
    await cluster.until("prefill-0", lambda load: load.num_leases == 0)
    after = await scrape_all(cluster)
    assert (during[series("requests_active")], after["router"][series("requests_active")]) == (1, 0)
    assert after["prefill-0"][series("leases_active")] == 0
    assert during[series("workers", tier="prefill")] == during[series("workers", tier="decode")] == 1
    assert during[series("workers_cooling", tier="decode")] == 0
    assert during[series("index_shared")] == 1
    decode = after["decode-0"]
    assert (decode[series("kv_blocks")], decode[series("kv_held_blocks")]) == (NARROW["num_blocks"], 0)


async def test_requests_that_are_left_are_counted(cluster: Cluster) -> None:
    """Who cancels is told from whose deadline passes, and neither from who is served."""
    before = await scrape(cluster, "router")
    os.kill(cluster.local.pids["decode-0"], signal.SIGSTOP)
    try:
        leaving = asyncio.create_task(ask(cluster, (1, 2, 4)))
        await _until_moved(cluster, before, "ttft_seconds_count", priority="realtime")
        leaving.cancel()
        await asyncio.wait({leaving})
        await _until_moved(cluster, before, "requests_total", end="cancelled")
        with pytest.raises(PacelineRpcError, match=r"(?i)deadline"):
            await cluster.client.generate_text((1, 2, 5), timeout_s=0.5)
        await _until_moved(cluster, before, "requests_total", end="DEADLINE_EXCEEDED")
    finally:
        os.kill(cluster.local.pids["decode-0"], signal.SIGCONT)
    after = await scrape(cluster, "router")
    ends = ("cancelled", "DEADLINE_EXCEEDED", "length")
    assert [moved(before, after, "requests_total", end=end) for end in ends] == [1, 1, 0]
    assert moved(before, after, "tpot_seconds_count", priority="realtime") == 0


async def _until_moved(cluster: Cluster, before: Scrape, name: str, **labels: str) -> None:
    """Returns when a value of the router is not what it was."""
    async with asyncio.timeout(PATIENCE_S):
        while moved(before, await scrape(cluster, "router"), name, **labels) == 0:
            pass


async def test_every_metric_is_served_by_somebody(cluster: Cluster) -> None:
    """What has a name is there, on the router or on a worker and not on both; nothing else is ours."""
    declared = {metric.name: metric for metric in vars(metrics).values() if isinstance(metric, Metric)}
    served = [_metrics_in(await scrape(cluster, process), declared) for process in ("router", "decode-0")]
    router, worker = served
    assert router & worker == set()
    # Nothing has been lost here, and so no reason has a series.
    assert router | worker | {metrics.MIGRATIONS.name} == set(declared)
    assert _metrics_in(await scrape(cluster, "prefill-0"), declared) == worker


async def test_no_label_tells_who_asked_or_what(cluster: Cluster) -> None:
    """Labels have a few values that the code knows."""
    seen = {
        label for found in (await scrape_all(cluster)).values() for _, labels in found for label, _ in labels
    }
    assert seen <= {
        "priority",
        "part",
        "of",
        "kind",
        "what",
        "mode",
        "tier",
        "end",
        "rule",
        "source",
        "transport",
        "reason",
        "le",
    }


def _metrics_in(found: Scrape, declared: dict[str, Metric]) -> set[str]:
    """The metrics of a scrape; a histogram is there as its parts."""
    names = set()
    for name in found.names():
        whole = re.sub("_(bucket|sum|count|created)$", "", name)
        known = next((each for each in (name, whole, f"{whole}_total") if each in declared), None)
        assert known is not None, f"{name} is not declared"
        names.add(known)
    return names
