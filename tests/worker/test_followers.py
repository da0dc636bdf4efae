"""A worker of two processes: real ones, with a tiny model, of which each has half of the heads."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import distributed

from paceline.core.errors import ConfigError
from paceline.core.request import SamplingParams, SequenceSpec
from paceline.engine.engine import Runner
from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner
from paceline.engine.parallel.leader import ParallelRunner
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


def _config(model: Path, tp: int) -> WorkerConfig:
    return WorkerConfig(
        model=str(model),
        dtype="float32",
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        threads=tp,
        tp=tp,
        worker_id="test",
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def owned(tiny_model_dir: Path) -> AsyncIterator[OwnedFollowers]:
    """The other process; this one is rank 0, until the module ends."""
    num_threads = torch.get_num_threads()
    async with owned_followers(_config(tiny_model_dir, 2)) as owned:
        assert owned is not None
        yield owned
    distributed.destroy_process_group()
    torch.set_num_threads(num_threads)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def loaded(owned: OwnedFollowers, tiny_model_dir: Path) -> LoadedRunner:
    """The runner of both."""
    config = _config(tiny_model_dir, 2)
    return await owned.unless_lost(lambda: load_runner(config, owned.followers))


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path) -> ModelRunner:
    """The same model in one process."""
    found = load_model(tiny_model_dir, "float32", BLOCK_SIZE)
    return ModelRunner(found.model, found.layout, NUM_BLOCKS)


def _tokens(runner: Runner, specs: tuple[SequenceSpec, ...], num_blocks: int = NUM_BLOCKS) -> list[list[int]]:
    bench = Bench(num_blocks, runner=runner, num_swap_blocks=100)
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


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tp": 0}, "at least one process"),
        ({"tp": 2, "exactness": "exact"}, "other bits"),
        ({"tp": 2, "mla": "latent"}, "the same latents"),
        ({"tp": 2, "runner": "fake"}, "has no heads"),
    ],
)
async def test_what_cannot_be_computed_in_parts_is_refused(settings: dict[str, object], why: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=why):
        WorkerConfig(model="somewhere", **settings)  # type: ignore[arg-type] # each has its field's type
