"""A worker's metrics: what each step was, observed as it ends, and what its parts keep count of, read when asked for."""

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from paceline.engine.engine import StepResult
from paceline.engine.step_report import Admission, StepReport
from paceline.runtime import metrics
from paceline.runtime.metrics import PRIORITY_NAMES, Sample, counter, histogram
from paceline.worker.config import WorkerConfig

if TYPE_CHECKING:  # a worker has these metrics
    from paceline.worker.worker import Worker


class StepMetrics:
    """What is observed after every step. It costs microseconds, on the event loop."""

    def __init__(self, config: WorkerConfig) -> None:
        self.registry = CollectorRegistry()
        self._max_tokens, self._max_sequences = config.max_num_batched_tokens, config.max_num_seqs
        step = histogram(metrics.STEP, self.registry)
        self._scheduler, self._runner = step.labels("scheduler"), step.labels("runner")
        self._bubble = step.labels("bubble") if config.pp > 1 else None
        self._tokens = histogram(metrics.STEP_TOKENS, self.registry)
        self._sequences = histogram(metrics.STEP_SEQUENCES, self.registry)
        use = histogram(metrics.BATCH_UTILISATION, self.registry)
        self._token_use, self._seat_use = use.labels("tokens"), use.labels("seats")
        self._sampled = counter(metrics.SAMPLED_TOKENS, self.registry)
        delay = histogram(metrics.SCHEDULING_DELAY, self.registry)
        self._delay = {priority: delay.labels(name) for priority, name in PRIORITY_NAMES.items()}
        tokens = counter(metrics.ADMITTED_TOKENS, self.registry)
        self._computed, self._cached = tokens.labels("computed"), tokens.labels("cached")

    def note_step(self, result: StepResult) -> None:
        """A step has ended."""
        if result.report is not None:
            self._note_report(result.report)
        for admission in result.admissions:
            self._note_admission(admission)

    def _note_report(self, report: StepReport) -> None:
        self._scheduler.observe(report.scheduler_s)
        self._runner.observe(report.runner_s)
        if self._bubble is not None:
            self._bubble.observe(report.bubble_s)
        self._tokens.observe(report.num_tokens)
        self._sequences.observe(report.num_sequences)
        self._token_use.observe(report.num_tokens / self._max_tokens)
        self._seat_use.observe(report.num_sequences / self._max_sequences)
        self._sampled.inc(report.num_sampled_tokens)

    def _note_admission(self, admission: Admission) -> None:
        self._delay[admission.priority].observe(admission.queued_s)
        self._computed.inc(admission.num_tokens - admission.num_cached_tokens)
        self._cached.inc(admission.num_cached_tokens)


def worker_samples(worker: "Worker") -> list[Sample]:
    """What the worker's parts say of themselves now."""
    stats, leases = worker.engine.stats, worker.leases.stats()
    queues, pulls = stats.queues, worker.transport.stats()
    table, publisher = worker.index.stats(), worker.publisher.stats()
    queued = zip(PRIORITY_NAMES.values(), queues.num_waiting_by_priority, strict=True)
    return [
        Sample(metrics.RUNNING, stats.num_running),
        Sample(metrics.WAITING, stats.num_waiting),
        *(Sample(metrics.QUEUED, number, (name,)) for name, number in queued),
        Sample(metrics.PENDING_TOKENS, stats.num_pending_tokens),
        *(Sample(metrics.PREEMPTIONS, number, (kind,)) for kind, number in queues.preemptions.items()),
        Sample(metrics.RECOMPUTED_TOKENS, queues.num_recomputed_tokens),
        Sample(metrics.SHORTAGES, queues.num_refused_for_room, ("admission",)),
        Sample(metrics.SHORTAGES, queues.num_steps_without_room, ("growth",)),
        Sample(metrics.WATERMARK, queues.watermark),
        Sample(metrics.MAX_SEATS, queues.max_seats),
        Sample(metrics.COOLING, queues.is_cooling),
        Sample(metrics.COOL_DOWNS, queues.num_cool_downs),
        Sample(metrics.BATCH_MODE, queues.batch_mode),
        Sample(metrics.BATCH_SWITCHES, queues.num_batch_switches),
        Sample(metrics.BATCH_REFUSED, queues.num_batch_refused),
        Sample(metrics.DRAINING, worker.draining.is_set()),
        Sample(metrics.KV_BLOCKS, stats.num_blocks),
        Sample(metrics.KV_HELD_BLOCKS, stats.num_blocks - stats.pool.num_free),
        Sample(metrics.KV_CACHED_BLOCKS, stats.pool.num_cached),
        Sample(metrics.KV_PINNED_BLOCKS, worker.num_pinned_blocks),
        Sample(metrics.KV_FRAGMENTATION, stats.fragmentation),
        Sample(metrics.KV_HITS, stats.pool.num_hits),
        Sample(metrics.KV_EVICTIONS, stats.pool.num_evictions),
        Sample(metrics.KV_PULLED, worker.num_blocks_pulled),
        *(Sample(metrics.KV_TRANSPORT_PULLS, each.num_pulls, (name,)) for name, each in pulls.items()),
        *(Sample(metrics.KV_TRANSPORT_BYTES, each.num_bytes, (name,)) for name, each in pulls.items()),
        Sample(metrics.KV_TRANSPORT_FALLBACKS, worker.transport.num_fallbacks),
        Sample(metrics.INDEX_REACHED, worker.index.mode == "redis"),
        Sample(metrics.INDEX_PUBLISH_FAILURES, table.num_failures + table.num_skipped),
        Sample(metrics.INDEX_ENTRIES, publisher.num_held),
        Sample(metrics.INDEX_PENDING, publisher.num_pending),
        Sample(metrics.INDEX_REFRESHED, publisher.num_refreshed),
        Sample(metrics.INDEX_LOST, table.num_lost_entries + publisher.num_dropped),
        Sample(metrics.INDEX_REFUSED, table.num_refused_entries),
        Sample(metrics.LEASES, leases.num_active),
        Sample(metrics.LEASES_EXPIRED, leases.num_expired),
    ]
