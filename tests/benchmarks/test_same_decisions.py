"""The simulator is the same code: with a real model in its place, every decision is the same."""

from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.simulator.cluster import simulate
from benchmarks.simulator.cost import TEXTBOOK, work_of
from benchmarks.simulator.decisions import DecisionLog
from benchmarks.simulator.spec import ClusterSpec, scheduler_config
from benchmarks.simulator.trace import Trace, prompt_ids, spec_of
from benchmarks.simulator.traffic import made_up
from paceline.core.clock import ManualClock
from paceline.core.request import RequestId, SequenceId
from paceline.engine.block_pool import BlockPool
from paceline.engine.conformance.reference import plain_reference
from paceline.engine.engine import BlockMemory, Engine
from paceline.engine.model_loader import LoadedModel, load_model
from paceline.engine.model_runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.launcher.config import Topology

BLOCK_SIZE = 4
# Room for a few of them only: most decisions are about who has to wait, and who is preempted.
TRACE = made_up("chat:requests=16,rate=40,prompt=12,output=16,system=9,seed=5")
CONFIG = scheduler_config(max_num_batched_tokens=24, max_num_seqs=6)
SPEC = ClusterSpec(decode=CONFIG, prefill=CONFIG, block_size=BLOCK_SIZE, num_kv_tokens=200)


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> LoadedModel:
    """A tiny random Llama."""
    return load_model(tiny_model_dir, "float32", BLOCK_SIZE)


def make_runner(loaded: LoadedModel) -> ModelRunner:
    """What really computes."""
    return ModelRunner(loaded.model, loaded.layout, SPEC.num_blocks)


class Listening:
    """A runner that notes the tokens of each sequence."""

    def __init__(self, runner: ModelRunner, heard: dict[SequenceId, list[int]]) -> None:
        self._runner = runner
        self._heard = heard

    @property
    def memory(self) -> BlockMemory:
        """The runner's."""
        return self._runner.memory

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """The runner's."""
        step = self._runner.execute(output)
        ids = iter(step.token_ids)
        for item in output.scheduled:
            self._heard[item.sequence_id] += [next(ids) for _ in item.samples]
        return step


class Timed:
    """A runner that moves a clock by what the textbook says, and keeps what it was asked last."""

    def __init__(self, runner: ModelRunner, clock: ManualClock) -> None:
        self.memory = runner.memory
        self.last = SchedulerOutput((), ())
        self._runner = runner
        self._clock = clock

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """The runner's."""
        self.last = output
        computed = self._runner.execute(output)
        self._clock.advance(TEXTBOOK.step_s(work_of(output.scheduled)))
        return computed


def real_run(trace: Trace, loaded: LoadedModel) -> list[str]:
    """The real engine on the real model, driven by a loop of three lines; only the clock is the cost model's."""
    clock, log = ManualClock(), DecisionLog()
    runner = Timed(make_runner(loaded), clock)
    pool = BlockPool(SPEC.num_blocks, BLOCK_SIZE)
    engine = Engine(Scheduler(CONFIG, pool, runner.memory, clock=clock), runner)
    arrivals = list(enumerate(trace.requests))
    while arrivals or engine.has_work():
        if not engine.has_work():
            clock.advance(max(0.0, arrivals[0][1].arrival_s - clock()))
        while arrivals and arrivals[0][1].arrival_s <= clock():
            number, request = arrivals.pop(0)
            engine.add(spec_of(request, number, loaded.vocab_size), SequenceRole.GENERATE)
        start_s = clock()
        assert not engine.step().idle
        log.note("decode-0", start_s, runner.last.scheduled, engine.stats())
    return log.lines


def test_the_simulator_decides_as_a_real_run_does(loaded: LoadedModel) -> None:
    """The decision log of a simulation is that of the real engine with the real model, line by line."""
    simulated = simulate(TRACE, SPEC, TEXTBOOK, vocab_size=loaded.vocab_size, log_decisions=True)
    assert list(simulated.decisions) == real_run(TRACE, loaded)
    is_full = any(step.num_present > step.work.num_sequences for step in simulated.steps)
    assert is_full, "a trace in which nobody ever waits shows nothing"


@pytest.mark.parametrize("topology", ["0P2D", "1P1D", "2P1D"])
def test_a_cluster_decides_alike_with_a_real_model_in_it(topology: str, loaded: LoadedModel) -> None:
    """Also across hand-overs; and with the model in it, the tokens are those of each prompt alone."""
    spec = ClusterSpec(
        Topology.parse(topology), CONFIG, CONFIG, BLOCK_SIZE, SPEC.num_kv_tokens, handover_tokens=1
    )
    heard: dict[SequenceId, list[int]] = defaultdict(list)
    real = simulate(
        TRACE,
        spec,
        TEXTBOOK,
        make_runner=lambda: Listening(make_runner(loaded), heard),
        vocab_size=loaded.vocab_size,
        log_decisions=True,
    )
    simulated = simulate(TRACE, spec, TEXTBOOK, vocab_size=loaded.vocab_size, log_decisions=True)
    assert real == simulated
    for number, request in enumerate(TRACE.requests):
        ids = prompt_ids(request, number, loaded.vocab_size)
        reference = plain_reference(loaded.model, ids, request.num_output_tokens)
        assert tuple(heard[SequenceId(RequestId(f"r{number}"), 0)]) == reference.output_ids
