"""Metrics have names that say what they are, and reach whoever asks over HTTP."""

import asyncio
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError
from paceline.runtime import metrics
from paceline.runtime.metrics import Metric, Sample, StatsCollector, counter, histogram
from paceline.runtime.metrics_server import check_metrics_port, metrics_host, on_loop, serving_metrics

ALL = [value for value in vars(metrics).values() if isinstance(value, Metric)]
LISTEN = "127.0.0.1:1"


def test_names_follow_the_house() -> None:
    """Each is ours, once; counters are totals, times are in seconds, shares are ratios, histograms have ascending buckets."""
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.name.startswith("paceline_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        assert not {"request_id", "prompt"} & set(metric.labels)


def test_stats_become_families() -> None:
    """Samples of one metric are one family, with a value for each of its labels; nothing else is said."""
    samples = [
        Sample(metrics.LEASES, 3),
        Sample(metrics.QUEUED, 1, ("batch",)),
        Sample(metrics.PREEMPTIONS, 7, ("recompute",)),
        Sample(metrics.QUEUED, 2, ("realtime",)),
    ]
    registry = CollectorRegistry()
    registry.register(StatsCollector(lambda: samples))
    families = {family.name: family for family in text_string_to_metric_families(_page(registry))}
    assert {name: family.type for name, family in families.items()} == {
        "paceline_leases_active": "gauge",
        "paceline_sequences_queued": "gauge",
        "paceline_preemptions": "counter",
    }
    queued = families["paceline_sequences_queued"].samples
    assert {sample.labels["priority"]: sample.value for sample in queued} == {"batch": 1, "realtime": 2}
    assert registry.get_sample_value("paceline_preemptions_total", {"kind": "recompute"}) == 7


def test_what_is_observed_is_there_under_its_name() -> None:
    """Histograms have their buckets, counters their total, in the registry that they were made for alone."""
    registry, other = CollectorRegistry(), CollectorRegistry()
    histogram(metrics.STEP_TOKENS, registry).observe(3)
    counter(metrics.SAMPLED_TOKENS, registry).inc(5)
    histogram(metrics.STEP_TOKENS, other)
    for bound, number in (("2.0", 0), ("4.0", 1), ("+Inf", 1)):
        assert registry.get_sample_value("paceline_step_tokens_bucket", {"le": bound}) == number
    assert registry.get_sample_value("paceline_sampled_tokens_total") == 5
    assert other.get_sample_value("paceline_step_tokens_count") == 0


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("127.0.0.1:50051", "127.0.0.1"),
        ("0.0.0.0:50051", "0.0.0.0"),
        ("[::1]:50051", "::1"),
        ("localhost:1", "localhost"),
        ("unix:/run/decode-0.sock", "127.0.0.1"),
    ],
)
def test_metrics_are_where_the_service_is(listen: str, host: str) -> None:
    """On the service's own host, and on loopback when that is a socket file."""
    assert metrics_host(listen) == host


@pytest.mark.parametrize("port", [-2, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    """With what to use instead; the numbers next to it are taken."""
    with pytest.raises(ConfigError, match="0: any that is free, -1: none"):
        check_metrics_port(port)
    check_metrics_port(port + (1 if port < 0 else -1))


async def test_the_page_is_served_until_the_end_of_the_block() -> None:
    """At the address that is logged, beside the event loop, and read on it; afterwards nobody listens there."""
    seen: list[threading.Thread] = []

    def read() -> Iterable[Sample]:
        """Notes who reads."""
        seen.append(threading.current_thread())
        return [Sample(metrics.LEASES, 4)]

    registry = CollectorRegistry()
    registry.register(StatsCollector(on_loop(read, asyncio.get_running_loop())))
    with capture_logs() as logged:
        async with serving_metrics(LISTEN, 0, registry):
            (address,) = [line["address"] for line in logged if line["event"] == "metrics"]
            page = await asyncio.to_thread(_get, address)
            again = await asyncio.to_thread(_get, address)
    assert "paceline_leases_active 4.0" in page
    assert again == page
    assert seen == [threading.main_thread()] * 2
    with pytest.raises(urllib.error.URLError, match="refused"):
        await asyncio.to_thread(_get, address)


async def test_none_is_none() -> None:
    """With -1 nobody listens, and nothing is said of an address."""
    threads = threading.active_count()
    with capture_logs() as logged:
        async with serving_metrics(LISTEN, -1, CollectorRegistry()):
            assert threading.active_count() == threads
    assert logged == []


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    """It names setting, port and host, and what to do; once it is free again, it is served there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--metrics-port: port {port} on 127.0.0.1 is in use; choose"):
            async with serving_metrics(LISTEN, port, CollectorRegistry()):
                pass
    async with serving_metrics(LISTEN, port, CollectorRegistry()):
        assert await asyncio.to_thread(_get, f"127.0.0.1:{port}") == ""


def _page(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
