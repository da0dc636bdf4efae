"""What a worker tells of itself."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from paceline.core.prefix import PrefixChanges
from paceline.core.request import Priority
from paceline.engine.engine import StepResult
from paceline.engine.sequence import SequenceRole
from paceline.engine.step_report import Admission, StepReport
from paceline.runtime import metrics
from paceline.runtime.metrics import Metric
from paceline.worker.config import WorkerConfig
from paceline.worker.events import EventQueue
from paceline.worker.metrics import StepMetrics, worker_samples
from tests.factories import make_spec
from tests.worker.bench import DECODE, NUM_BLOCKS, require_empty, serving_worker, until

CONFIG = WorkerConfig(model="m", max_num_batched_tokens=10, max_num_seqs=4)


def result(report: StepReport | None = None, admissions: tuple[Admission, ...] = ()) -> StepResult:
    """A step's."""
    return StepResult((), PrefixChanges((), ()), idle=report is None, admissions=admissions, report=report)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """A sample's value."""
    return registry.get_sample_value(f"paceline_{name}", labels)


def test_a_step_is_observed_in_all_its_sizes() -> None:
    """Tokens, sequences, what they are of the limits, and the two parts of its time; one without work is no step."""
    observed = StepMetrics(CONFIG)
    observed.note_step(result())
    assert value(observed.registry, "step_tokens_count") == 0
    observed.note_step(result(StepReport(2, 5, 1, scheduler_s=0.25, runner_s=2.0)))
    observed.note_step(result(StepReport(1, 10, 1, scheduler_s=0.25, runner_s=1.0)))
    assert value(observed.registry, "step_tokens_sum") == 15
    assert value(observed.registry, "step_sequences_sum") == 3
    assert value(observed.registry, "step_seconds_sum", part="scheduler") == 0.5
    assert value(observed.registry, "step_seconds_sum", part="runner") == 3.0
    assert value(observed.registry, "batch_utilisation_ratio_sum", of="tokens") == pytest.approx(1.5)
    assert value(observed.registry, "batch_utilisation_ratio_sum", of="seats") == pytest.approx(0.75)
    assert value(observed.registry, "sampled_tokens_total") == 2


def test_what_a_pipeline_waits_is_a_part_of_a_step() -> None:
    """Of a worker without stages there is no such part."""
    report = StepReport(2, 5, 1, scheduler_s=0.25, runner_s=2.0, bubble_s=0.5)
    for num_stages, expected in ((2, 0.5), (1, None)):
        observed = StepMetrics(WorkerConfig(model="m", pp=num_stages))
        observed.note_step(result(report))
        assert value(observed.registry, "step_seconds_sum", part="runner") == 2.0
        assert value(observed.registry, "step_seconds_sum", part="bubble") == expected


def test_an_admission_is_observed_by_class() -> None:
    """Its wait under its own class alone, its tokens by whether they were cached."""
    observed = StepMetrics(CONFIG)
    observed.note_step(result(admissions=(Admission(Priority.BATCH, 3.0, 20, 16),)))
    assert value(observed.registry, "scheduling_delay_seconds_sum", priority="batch") == 3.0
    assert value(observed.registry, "scheduling_delay_seconds_count", priority="realtime") == 0
    assert value(observed.registry, "admitted_tokens_total", source="cached") == 16
    assert value(observed.registry, "admitted_tokens_total", source="computed") == 4


async def test_a_worker_tells_its_state(tiny_tokenizer_dir: Path) -> None:
    """Blocks, queues, leases and flags are those of now; what an end leaves behind is a cache."""
    async with serving_worker(tiny_tokenizer_dir, "worker-0", DECODE) as worker:

        def told(metric: Metric) -> float:
            """Its value, summed over its labels."""
            return sum(sample.value for sample in worker_samples(worker) if sample.metric is metric)

        assert (told(metrics.KV_BLOCKS), told(metrics.KV_HELD_BLOCKS)) == (NUM_BLOCKS, 0)
        events = EventQueue()
        worker.engine.submit(make_spec(prompt_ids=(1,) * 9), SequenceRole.PREFILL_ONLY, events.put)
        worker.leases.grant(make_spec().sequence_id, 0, [])
        worker.draining.set()
        await anext(events)
        assert told(metrics.KV_HELD_BLOCKS) == 3
        assert (told(metrics.LEASES), told(metrics.DRAINING), told(metrics.COOLING)) == (1, 1, 0)
        worker.leases.release_sequence(make_spec().sequence_id)
        await require_empty(worker)
        assert (told(metrics.KV_HELD_BLOCKS), told(metrics.KV_CACHED_BLOCKS)) == (0, 2)
        assert told(metrics.LEASES) == 0


async def test_overload_is_seen_to_come_and_to_go(tiny_tokenizer_dir: Path) -> None:
    """What becomes of BATCH requests while an urgent one waits for a seat, and once nobody does any more."""
    async with serving_worker(
        tiny_tokenizer_dir, "worker-0", DECODE, num_blocks=4000, overload_wait_s=0.001
    ) as worker:

        def told(metric: Metric) -> float:
            """Its value."""
            (sample,) = (sample for sample in worker_samples(worker) if sample.metric is metric)
            return sample.value

        assert told(metrics.BATCH_MODE) == 0
        specs = [make_spec(f"r{n}", (n + 5,) * 4, max_tokens=1500, ignore_eos=True) for n in range(9)]
        for spec in specs:
            worker.engine.submit(spec, SequenceRole.GENERATE, EventQueue().put)
        await until(lambda: told(metrics.BATCH_MODE) == 2)
        for spec in specs:
            worker.engine.release(spec.sequence_id)
        await until(lambda: not worker.engine.stats.num_waiting + worker.engine.stats.num_running)
        # The next one is alone.
        worker.engine.submit(
            make_spec("alone", max_tokens=900, ignore_eos=True), SequenceRole.GENERATE, EventQueue().put
        )
        await until(lambda: told(metrics.BATCH_MODE) == 0)
        assert told(metrics.BATCH_SWITCHES) >= 2
