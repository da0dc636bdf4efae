"""Whole engines whose blocks are kept as a device's are, on the host: forks, swaps, checksums and hits give the same tokens."""

from paceline.core.request import SamplingParams, SequenceSpec
from paceline.engine.block_bytes import DeviceBlocks
from paceline.engine.block_pool import BlockPool
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.device import HOST
from paceline.engine.engine import Engine, EngineStats
from paceline.engine.events import NewTokens
from paceline.engine.kv_cache import KVCache
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner, filled_blocks
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import SequenceRole
from paceline.engine.step import SchedulerOutput, StepOutput
from tests.factories import make_id

BLOCK_SIZE, MAX_TOKENS, NUM_REQUESTS = 4, 24, 6


class TwinRunner(ModelRunner):
    """Fetches what a step fills, as a runner on a device does."""

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        step = super().execute(output)
        self.memory.fetch(filled_blocks(output.scheduled, BLOCK_SIZE))
        return step


def as_on_a_device(cache: KVCache, num_blocks: int) -> None:
    """Keeps the blocks of an empty cache behind a device's calls."""
    cache._store = DeviceBlocks(HOST, num_blocks, cache.block_bytes)
    for views in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        views.clear()
    cache._make_views(cache._store.blocks)


def specs() -> list[SequenceSpec]:
    """Prompts with a beginning in common; every second one has two candidates."""
    return [
        SequenceSpec(
            sequence_id=make_id(f"r{index}"),
            prompt_ids=(*range(5, 16), 20 + index, 30 + index),
            sampling=SamplingParams(temperature=1.0, seed=index),
            max_tokens=MAX_TOKENS,
            candidates=(0, 1) if index % 2 else (0,),
            ignore_eos=True,
        )
        for index in range(NUM_REQUESTS)
    ]


def answers(runner: ModelRunner, num_blocks: int) -> tuple[dict[tuple[str, int], list[int]], EngineStats]:
    """The tokens of each candidate; half of the requests come once the others are under way."""
    config = SchedulerConfig(16, max_num_seqs=8, num_swap_blocks=num_blocks)
    engine = Engine(Scheduler(config, BlockPool(num_blocks, BLOCK_SIZE), runner.memory), runner)
    waiting, found = specs(), dict[tuple[str, int], list[int]]()
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0), SequenceRole.GENERATE)
        for event in engine.step().events:
            if isinstance(event, NewTokens):
                key = event.sequence_id.request_id, event.candidate
                found.setdefault(key, []).extend(event.token_ids)
    engine.check_invariants()
    return found, engine.stats()


def runner_of(kind: type[ModelRunner], num_blocks: int) -> ModelRunner:
    """With an empty cache."""
    model = build_tiny("llama")
    return kind(model, use_paged_attention(model, "float32", BLOCK_SIZE), num_blocks)


def test_a_crowded_pool_behind_a_devices_calls_gives_the_same_tokens() -> None:
    """As one in which nobody is ever preempted, and nothing is swapped."""
    expected, _ = answers(runner_of(ModelRunner, 200), 200)
    crowded = runner_of(TwinRunner, 30)
    as_on_a_device(crowded.memory, 30)
    found, stats = answers(crowded, 30)
    assert found == expected
    assert stats.num_preemptions > 0
