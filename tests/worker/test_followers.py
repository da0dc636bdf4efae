"""A worker of two processes: real ones, with a tiny model, of which each has half of the heads, or half of the layers."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import distributed

from paceline.core.errors import ConfigError, EngineFailedError
from paceline.core.request import SamplingParams, SequenceSpec
from paceline.engine.engine import Runner
from paceline.engine.events import PromptScored
from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.parallel.leader import Followers, ParallelRunner
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from paceline.worker.config import WorkerConfig
from paceline.worker.followers import OwnedFollowers, owned_followers
from paceline.worker.runner import LoadedRunner, load_runner
from tests.engine.harness import Bench
from tests.factories import BLOCK_SIZE, GREEDY, make_id, make_spec
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.thorough]

NUM_BLOCKS = 60
SPECS = tuple(
    make_spec(
        f"r{number}",
        tuple((7 * i + number) % VOCAB_SIZE for i in range(9 + number)),
        max_tokens=24,
        sampling=sampling,
    )
    for number, sampling in enumerate(
        (GREEDY, SamplingParams(seed=7), SamplingParams(temperature=0.7, top_p=0.9, seed=11))
    )
)


@dataclass(frozen=True, slots=True)
class Together:
    """Two processes, of which this one is rank 0."""

    owned: OwnedFollowers
    config: WorkerConfig


def _config(model: Path, *, tp: int = 1, pp: int = 1) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        threads=2,
        tp=tp,
        pp=pp,
        worker_id="test",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["tp", "pp"])
async def together(tiny_model_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[Together]:
    """In parts, then in stages."""
    num_threads = torch.get_num_threads()
    config = _config(tiny_model_dir, **{request.param: 2})
    async with owned_followers(config) as owned:
        assert owned is not None
        yield Together(owned, config)
    distributed.destroy_process_group()
    torch.set_num_threads(num_threads)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(together: Together) -> LoadedRunner:
    """The runner of both."""
    owned = together.owned
    return await owned.unless_lost(lambda: load_runner(together.config, owned.followers))


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path) -> ModelRunner:
    """The same model in one process."""
    found = load_model(tiny_model_dir, "float32", BLOCK_SIZE)
    return ModelRunner(found.model, found.layout, NUM_BLOCKS)


def _tokens(
    runner: Runner,
    specs: tuple[SequenceSpec, ...],
    num_blocks: int = NUM_BLOCKS,
    max_num_batched_tokens: int = 16,
) -> list[list[int]]:
    bench = Bench(
        num_blocks, runner=runner, num_swap_blocks=100, max_num_batched_tokens=max_num_batched_tokens
    )
    bench.scheduler.costs.swap_block_s = 0.0
    for spec in specs:
        bench.add(spec)
    bench.run()
    assert (bench.scheduler.stats().preemptions["swap"] > 0) == (num_blocks < NUM_BLOCKS)
    return [bench.tokens(make_id(spec.sequence_id.request_id)) for spec in specs]


async def test_two_processes_say_what_one_says(loaded: LoadedRunner, alone: ModelRunner) -> None:
    """Greedy and by chance, in chunks and decodes of several sequences."""
    assert isinstance(loaded.runner, ParallelRunner)
    assert _tokens(loaded.runner, SPECS) == _tokens(alone, SPECS)


async def test_long_prompts_are_cut_into_batches_and_say_the_same(
    loaded: LoadedRunner, alone: ModelRunner
) -> None:
    """Several chunks in a step, beside decodes."""
    specs = tuple(
        make_spec(f"long{number}", tuple((5 * i + number) % VOCAB_SIZE for i in range(50)), max_tokens=9)
        for number in range(3)
    )
    assert _tokens(loaded.runner, specs, max_num_batched_tokens=100) == _tokens(
        alone, specs, max_num_batched_tokens=100
    )


async def test_preempted_and_swapped_out_they_say_the_same(loaded: LoadedRunner, alone: ModelRunner) -> None:
    """Rank 0 copies whole blocks out and back, and the other process finds its part in them."""
    specs = tuple(
        make_spec(f"p{number}", spec.prompt_ids, max_tokens=24, bypass_cache=True)
        for number, spec in enumerate(SPECS)
    )
    assert _tokens(loaded.runner, specs, num_blocks=16) == _tokens(alone, specs)


async def test_candidates_that_share_a_prompt_say_the_same(loaded: LoadedRunner, alone: ModelRunner) -> None:
    """The partial block is copied for each, with all heads of it."""
    spec = make_spec(
        "family", tuple(range(5, 15)), sampling=SamplingParams(seed=3), max_tokens=14, candidates=(0, 1, 2)
    )
    found = []
    for runner in (loaded.runner, alone):
        bench = Bench(NUM_BLOCKS, runner=runner)
        bench.add(spec)
        bench.run()
        found.append(bench.events[spec.sequence_id])
    # Log probabilities are not asked for: what is left are tokens, and these are equal.
    assert found[0] == found[1]


async def test_a_block_is_that_of_one_process(loaded: LoadedRunner, alone: ModelRunner) -> None:
    """All heads at the places where one process has them, up to rounding: it can be handed over to a worker of any size."""
    spec = make_spec("blocks", tuple(range(20, 40)), max_tokens=1, bypass_cache=True)
    for runner in (loaded.runner, alone):
        _tokens(runner, (spec,))
    ours, theirs = (
        torch.frombuffer(bytearray(runner.memory.read(block_id)), dtype=torch.float32)  # type: ignore[arg-type] # a BlockId
        for runner in (loaded.runner, alone)
        for block_id in [0]
    )
    assert float(theirs.norm()) > 0
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


async def test_a_pipeline_tells_how_long_rank_0_has_waited(together: Together, loaded: LoadedRunner) -> None:
    """In a step with one sequence there is always something to wait for; in parts nobody waits for a stage."""
    tables = side_by_side(0, 3, loaded.layout)
    item = ScheduledSequence(make_id("waits"), (1, 2, 3), 0, tables, samples=(SampleTask(GREEDY),))
    step = loaded.runner.execute(SchedulerOutput((item,), ()))
    assert len(step.token_ids) == 1
    assert (step.bubble_s > 0) == (together.config.pp == 2)


async def test_what_they_are_to_others_does_not_tell_how_many_they_are(
    loaded: LoadedRunner, tiny_model_dir: Path
) -> None:
    """Blocks and tokens may pass between workers of different sizes."""
    assert loaded.fingerprint == load_model(tiny_model_dir, "float32", BLOCK_SIZE).fingerprint


async def test_nobody_else_can_write_to_the_pool(loaded: LoadedRunner) -> None:
    """Once both have mapped it, it is as closed as that of one process."""
    pool = loaded.runner.memory.pool
    assert pool is not None
    assert pool.offer is not None
    with pytest.raises(PermissionError):
        type(pool)(pool.offer.num_bytes, joins=pool.offer)


async def test_probabilities_of_prompt_tokens_are_those_of_one_process(
    loaded: LoadedRunner, alone: ModelRunner
) -> None:
    """Up to rounding; each token that is known is scored once, whatever the cuts."""
    spec = make_spec("scored", tuple(range(30, 70)), max_tokens=2, prompt_logprobs=True, num_top_logprobs=2)
    found = []
    for runner in (loaded.runner, alone):
        bench = Bench(NUM_BLOCKS, runner=runner, max_num_batched_tokens=25)
        bench.add(spec)
        bench.run()
        scored = bench.of(spec.sequence_id, PromptScored)
        found.append([entry for event in scored for entry in event.logprobs])
    assert [entry.token_id for entry in found[0]] == list(range(31, 70))
    for ours, theirs in zip(*found, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp": 0}, "--tp 0: at least one process"),
        ({"pp": 0}, "--pp 0: at least one process"),
        ({"pp": 2, "exactness": "exact"}, "for one process: leave --pp 2 out"),
        ({"tp": 2, "pp": 2}, "not yet in both"),
        ({"tp": 2, "exactness": "exact"}, "for one process: leave --tp 2 out"),
        ({"tp": 2, "mla": "latent"}, "for one process: leave --tp 2 out"),
        ({"tp": 2, "runner": "fake"}, "neither heads nor layers"),
    ],
)
async def test_what_cannot_be_computed_in_parts_is_refused(settings: dict[str, object], why: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=why):
        WorkerConfig(model="somewhere", **settings)  # type: ignore[arg-type] # each has its field's type


@pytest.fixture
async def ended() -> OwnedFollowers:
    """A follower that has ended before anybody told it to."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
    owned = OwnedFollowers(Followers([], "", 1.0), [process])
    await owned.watch(1)
    return owned


async def test_nobody_waits_for_a_follower_that_is_lost_while_it_loads(
    ended: OwnedFollowers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rank 0 is doing meanwhile, even if it waits for ever."""
    monkeypatch.setattr("paceline.worker.followers._OWN_WORDS_S", 0.001)
    for_ever = threading.Event()
    with pytest.raises(EngineFailedError, match="has ended while the model was loaded"):
        await ended.unless_lost(for_ever.wait)
    for_ever.set()


async def test_who_has_a_better_reason_says_it(ended: OwnedFollowers) -> None:
    """All ranks refuse a model that cannot be served, and rank 0's words are those that are read."""

    def refuse() -> None:
        raise ConfigError("cannot load the model")

    with pytest.raises(ConfigError, match="cannot load the model"):
        await ended.unless_lost(refuse)
