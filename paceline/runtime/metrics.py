"""The names of all metrics, and how they become what Prometheus reads. It knows no service.

What happens often is observed as it happens, into histograms and counters. What somebody keeps count of anyway is read
from their `stats()` when it is asked for.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.core.request import Priority

# What the label `priority` says.
PRIORITY_NAMES = {priority: priority.name.lower() for priority in Priority}

_TIMES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# The scheduler's part of a step is tens of microseconds, the runner's may be seconds.
_STEP_TIMES_S = (5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LOOKUP_TIMES_S = (2e-4, 5e-4, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.02, 0.05)
_COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0)
_RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0)
_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """A name with its meaning. Its labels have few values each: never a request's id, never text."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    # Upper bounds of a histogram's buckets.
    buckets: tuple[float, ...] = ()


class Sample(NamedTuple):
    """What a metric is now, for one value of each of its labels."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


# -- the router

TTFT = Metric(
    "paceline_ttft_seconds", "histogram", "Arrival to first token, by priority.", ("priority",), _TIMES_S
)
ITL = Metric(
    "paceline_itl_seconds", "histogram", "Time between two tokens, by priority.", ("priority",), _TIMES_S
)
TPOT = Metric(
    "paceline_tpot_seconds",
    "histogram",
    "Mean time a token after the first, of each candidate.",
    ("priority",),
    _TIMES_S,
)
REQUESTS = Metric("paceline_requests_total", "counter", "Requests that have ended, by how.", ("end",))
REQUESTS_ACTIVE = Metric("paceline_requests_active", "gauge", "Requests under way.")
REQUESTS_ADMITTED = Metric("paceline_requests_admitted_total", "counter", "Requests taken at the door.")
REQUESTS_REFUSED = Metric("paceline_requests_refused_total", "counter", "Requests refused for want of room.")
REQUESTS_TOO_LATE = Metric(
    "paceline_requests_too_late_total",
    "counter",
    "Requests refused by a prediction, by the bound that they would have passed: deadline, delay, realtime.",
    ("rule",),
)
TTFT_OVER_PREDICTED = Metric(
    "paceline_ttft_over_predicted_ratio",
    "histogram",
    "Time to first token over what was predicted when the request was placed.",
    (),
    _RATIOS,
)
REQUEST_BYTES = Metric("paceline_request_bytes", "gauge", "Bytes of the requests under way.")
LIMITER_MODE = Metric(
    "paceline_limiter_mode", "gauge", "1 for who counts tenants' rates now, 0 for the others.", ("mode",)
)
LIMITER_FAILURES = Metric(
    "paceline_limiter_failures_total", "counter", "Questions about rates that Redis did not answer in time."
)
LIMITER_SKIPPED = Metric(
    "paceline_limiter_skipped_total", "counter", "Those that were not asked, since it kept failing."
)
LIMITER_STRICT = Metric(
    "paceline_limiter_strict_total", "counter", "Those that were answered by this router's share of the rate."
)
ATTEMPTS = Metric(
    "paceline_attempts_total",
    "counter",
    "Attempts placed, by where the prompt is computed.",
    ("mode",),
)
MIGRATIONS = Metric(
    "paceline_migrations_total", "counter", "Attempts after a lost one, by why it was lost.", ("reason",)
)
PROMPT_TOKENS = Metric("paceline_prompt_tokens_total", "counter", "Tokens of prompts that were computed.")
CACHED_PROMPT_TOKENS = Metric(
    "paceline_cached_prompt_tokens_total", "counter", "Those of them that came out of a prefix cache."
)
OUTPUT_TOKENS = Metric("paceline_output_tokens_total", "counter", "Tokens generated for clients.")
INDEX_SHARED = Metric("paceline_index_shared", "gauge", "1 while the prefix table answers, else 0.")
INDEX_LOOKUPS = Metric("paceline_index_lookups_total", "counter", "Look-ups in the prefix table.")
INDEX_FAILURES = Metric(
    "paceline_index_failures_total", "counter", "Calls of the prefix table that failed or took too long."
)
INDEX_LATE = Metric(
    "paceline_index_late_total", "counter", "Look-ups among them that missed their time budget."
)
INDEX_SKIPPED = Metric(
    "paceline_index_skipped_total", "counter", "Calls of the prefix table not made, since it kept failing."
)
INDEX_GARBAGE = Metric("paceline_index_garbage_total", "counter", "Values in it that no worker wrote.")
INDEX_LOOKUP = Metric(
    "paceline_index_lookup_seconds",
    "histogram",
    "Time of a look-up in the prefix table.",
    (),
    _LOOKUP_TIMES_S,
)
WORKERS = Metric("paceline_workers", "gauge", "Workers that the router sees.", ("tier",))
WORKERS_COOLING = Metric(
    "paceline_workers_cooling", "gauge", "Those of them that ask for less work.", ("tier",)
)
WORKER_ADDRESSES = Metric(
    "paceline_worker_addresses", "gauge", "Addresses at which workers are looked for.", ("tier",)
)
SOURCES_SILENT = Metric(
    "paceline_worker_sources_silent",
    "gauge",
    "Sources (DNS names, Redis) that cannot say now where workers are.",
)

# -- a worker's steps

SCHEDULING_DELAY = Metric(
    "paceline_scheduling_delay_seconds",
    "histogram",
    "Wait of a sequence for its first blocks.",
    ("priority",),
    _TIMES_S,
)
STEP = Metric(
    "paceline_step_seconds",
    "histogram",
    "Time a step, by part: scheduler, runner; of the runner's, bubble, in a pipeline.",
    ("part",),
    _STEP_TIMES_S,
)
STEP_TOKENS = Metric("paceline_step_tokens", "histogram", "Tokens computed in a step.", (), _COUNTS)
STEP_SEQUENCES = Metric(
    "paceline_step_sequences",
    "histogram",
    "Sequences computed in a step: the effective concurrency.",
    (),
    _COUNTS,
)
BATCH_UTILISATION = Metric(
    "paceline_batch_utilisation_ratio",
    "histogram",
    "What a step had over the most that it may have: of tokens, of seats for sequences.",
    ("of",),
    _SHARES,
)
SAMPLED_TOKENS = Metric("paceline_sampled_tokens_total", "counter", "Tokens sampled.")
ADMITTED_TOKENS = Metric(
    "paceline_admitted_tokens_total",
    "counter",
    "Tokens that sequences came with, by what became of them: computed or cached.",
    ("source",),
)

# -- a worker's state

RUNNING = Metric("paceline_sequences_running", "gauge", "Sequences in the batch.")
WAITING = Metric("paceline_sequences_waiting", "gauge", "Sequences that wait, for room or for their KV.")
QUEUED = Metric(
    "paceline_sequences_queued", "gauge", "Sequences that have not begun, by priority.", ("priority",)
)
PENDING_TOKENS = Metric("paceline_pending_tokens", "gauge", "Known tokens that are not computed yet.")
PREEMPTIONS = Metric(
    "paceline_preemptions_total", "counter", "Sequences that lost their blocks, by kind.", ("kind",)
)
RECOMPUTED_TOKENS = Metric(
    "paceline_recomputed_tokens_total", "counter", "Tokens computed again after a preemption."
)
SHORTAGES = Metric(
    "paceline_kv_shortages_total", "counter", "Times that there were too few blocks, by what for.", ("what",)
)
WATERMARK = Metric("paceline_kv_watermark_ratio", "gauge", "Share of the blocks kept free for growth.")
MAX_SEATS = Metric("paceline_max_sequences", "gauge", "Sequences that may run at once now.")
BATCH_MODE = Metric(
    "paceline_batch_mode", "gauge", "BATCH requests: 0 join like others, 1 in static batches, 2 are refused."
)
BATCH_SWITCHES = Metric("paceline_batch_mode_switches_total", "counter", "Times that this has changed.")
SEQUENCES_FAILED = Metric(
    "paceline_sequences_failed_total",
    "counter",
    "Sequences that a worker has not taken, or that have ended by an error, by its reason.",
    ("reason",),
)
BATCH_REFUSED = Metric("paceline_batch_refused_total", "counter", "BATCH requests refused by the scheduler.")
COOLING = Metric("paceline_cooling_down", "gauge", "1 while nobody new is admitted, to recover, else 0.")
COOL_DOWNS = Metric("paceline_cool_downs_total", "counter", "Times that preemption has led to a pause.")
DRAINING = Metric("paceline_draining", "gauge", "1 while nothing new is taken, else 0.")
KV_BLOCKS = Metric("paceline_kv_blocks", "gauge", "Blocks of the KV pool.")
KV_HELD_BLOCKS = Metric("paceline_kv_held_blocks", "gauge", "Those that a sequence holds.")
KV_CACHED_BLOCKS = Metric("paceline_kv_cached_blocks", "gauge", "Those that can be found by their hash.")
KV_PINNED_BLOCKS = Metric("paceline_kv_pinned_blocks", "gauge", "Held blocks of pinned prefixes.")
KV_FRAGMENTATION = Metric(
    "paceline_kv_fragmentation_ratio", "gauge", "Share of the held slots that no token is in."
)
KV_HITS = Metric("paceline_kv_hit_blocks_total", "counter", "Blocks found cached instead of computed.")
KV_EVICTIONS = Metric(
    "paceline_kv_evicted_blocks_total", "counter", "Cached blocks taken for something else."
)
KV_PULLED = Metric("paceline_kv_pulled_blocks_total", "counter", "Blocks pulled from other workers.")
KV_TRANSPORT_PULLS = Metric(
    "paceline_kv_transport_pulls_total",
    "counter",
    "Pulls from other workers, by how the blocks came.",
    ("transport",),
)
KV_TRANSPORT_BYTES = Metric(
    "paceline_kv_transport_bytes_total", "counter", "Bytes of their blocks.", ("transport",)
)
KV_TRANSPORT_FALLBACKS = Metric(
    "paceline_kv_transport_fallbacks_total", "counter", "Times that gRPC took over from a way that failed."
)
INDEX_REACHED = Metric(
    "paceline_index_reached", "gauge", "1 while the prefix table takes what this worker publishes, else 0."
)
INDEX_PUBLISH_FAILURES = Metric(
    "paceline_index_publish_failures_total", "counter", "Calls of this worker that failed or were not made."
)
INDEX_ENTRIES = Metric(
    "paceline_index_entries", "gauge", "Cached blocks that this worker names in the prefix table."
)
INDEX_PENDING = Metric(
    "paceline_index_pending_entries", "gauge", "Those not named yet, and removals not made yet."
)
INDEX_REFRESHED = Metric(
    "paceline_index_refreshed_entries_total", "counter", "Entries of the prefix table published again."
)
INDEX_LOST = Metric(
    "paceline_index_lost_entries_total",
    "counter",
    "Entries in calls of the prefix table that did not get through.",
)
INDEX_REFUSED = Metric(
    "paceline_index_refused_entries_total", "counter", "Entries that its server did not take."
)
STRANGERS = Metric(
    "paceline_strangers_refused_total", "counter", "Calls that have not brought the cluster's token."
)
LEASES = Metric("paceline_leases_active", "gauge", "Leases that are out on this worker's blocks.")
LEASES_EXPIRED = Metric("paceline_leases_expired_total", "counter", "Leases whose blocks nobody fetched.")


def histogram(metric: Metric, registry: CollectorRegistry) -> Histogram:
    """What to observe into; registered."""
    return Histogram(metric.name, metric.text, metric.labels, buckets=metric.buckets, registry=registry)


def counter(metric: Metric, registry: CollectorRegistry) -> Counter:
    """What to count with; registered."""
    return Counter(metric.name, metric.text, metric.labels, registry=registry)


class StatsCollector(Collector):
    """Metrics that are read when Prometheus asks: `read` gives all samples of one moment."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """One family a metric."""
        families: dict[Metric, CounterMetricFamily | GaugeMetricFamily] = {}
        for metric, value, labels in self._read():
            if metric not in families:
                kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                families[metric] = kind(metric.name, metric.text, labels=metric.labels)
            families[metric].add_metric(labels, value)
        yield from families.values()
